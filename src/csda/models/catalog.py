"""The published weights as a table for a terminal."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from csda.errors import ConfigError
from csda.models.weights import PUBLISHED, find_weights


def weights_table() -> Table:
    """A line for each backbone: where its weights are, or how to get them."""
    table = Table(
        *("backbone", "at hand", "size", "source", "licence"),
        box=SIMPLE_HEAD,
        title_justify="left",
        caption_justify="left",
    )
    for name, published in PUBLISHED.items():
        try:
            place = str(find_weights(name))
        except ConfigError:
            place = f"no; {published.way}"
        cells = (place, published.size, published.source, published.licence)
        table.add_row(Text(name, "bold"), *(Text(cell, overflow="fold") for cell in cells))
    table.caption = (
        "A run begins with them by --set backbone=NAME --set pretrained=true, and with others by --set weights=FILE. "
        "timm fetches those of backbone=timm:NAME itself."
    )
    return table
