"""The methods and their settings as tables for a terminal."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args, get_origin

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from csda.config import RunConfig
from csda.methods import METHODS, Entry

KINDS = {str: "text", int: "whole number", float: "number"}
"""What a setting takes that has no list of choices."""


def methods_table() -> Table:
    """A line for each method: what it is, where it comes from, what it needs beside labels."""
    table = _table("method", "what it is", "paper", "needs")
    for name, entry in METHODS.items():
        table.add_row(Text(name, "bold"), entry.summary, entry.paper, _needs(entry))
    table.caption = (
        "`csda methods NAME` lists the settings of one. Alignment and queue go on self-train, fixmatch, glm, nm and "
        "bis with --set align=csda --set queue=vcq; da, vcq and csda are self-train with a teacher and these parts."
    )
    return table


def settings_table(name: str) -> Table:
    """All settings of a method with their defaults: its own, those it shares with others, those of every run."""
    entry = METHODS[name]
    table = _table("setting", "default", "values", "meaning")
    table.title = f"{name}: {entry.summary}" + (f" ({entry.paper})" if entry.uses_unlabeled else "")
    fields = entry.settings.model_fields
    own = {key: field for key, field in fields.items() if key in entry.settings.__annotations__}
    shared = {key: field for key, field in fields.items() if key not in own}
    every = {key: field for key, field in RunConfig.model_fields.items() if key != "method_settings"}
    fixed = {"method": name, **entry.defaults}
    for section in (own, shared, every):
        for key, field in section.items():
            default = Text(format_value(fixed.get(key, field.default)), "bold" if key in fixed else "")
            table.add_row(key, default, Text(" | ".join(list_kinds(field.annotation))), Text(field.description or ""))
        table.add_section()
    table.caption = "Any of them with --set setting=value. Bold is what the name stands for; presets change others."
    return table


def _table(*columns: str) -> Table:
    table = Table(*columns, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    table.title_justify = table.caption_justify = "left"
    table.columns[0].no_wrap = True
    return table


def _needs(entry: Entry) -> str:
    if entry.uses_truth:
        return "all labels"
    if not entry.uses_unlabeled:
        return "labels"
    return "unlabeled images" if entry.multi_label else "unlabeled, one class"


def format_value(value: Any) -> str:
    """A value as `--set` takes it."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return f"[{', '.join(format_value(item) for item in value)}]"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def list_kinds(annotation: Any) -> list[str]:
    """What values a setting takes: its choices, or the kinds of them."""
    if annotation is type(None):
        return []
    if annotation is bool:
        return ["true", "false"]
    if get_origin(annotation) is Literal:
        return [format_value(choice) for choice in get_args(annotation)]
    if get_origin(annotation) is Annotated:
        return list_kinds(get_args(annotation)[0])
    if get_origin(annotation) in (tuple, list):
        return [f"[{list_kinds(get_args(annotation)[0])[0]}, …]"]
    if parts := get_args(annotation):
        return [kind for part in parts for kind in list_kinds(part)]
    return [KINDS[annotation]]
