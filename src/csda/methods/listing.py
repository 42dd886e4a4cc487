"""The methods and their settings as tables for a terminal."""

from __future__ import annotations

from typing import get_args, get_origin

from rich.table import Table

from csda.config import RunConfig, Settings
from csda.methods import METHODS


def methods_table() -> Table:
    """A line for each method: what it is, where it comes from, what it needs, and the settings that make it."""
    table = Table("method", "what it is", "paper", "needs", "is made by", title="Methods")
    for name, entry in METHODS.items():
        needs = "labels of all images" if entry.uses_truth else "unlabeled images" if entry.uses_unlabeled else "labels"
        made_by = ", ".join(f"{key}={value}" for key, value in entry.defaults.items())
        table.add_row(name, entry.summary, entry.paper, needs, made_by)
    table.caption = "`csda methods NAME` lists the settings of one, for --set."
    return table


def settings_table(name: str) -> Table:
    """All settings of a method with their defaults; first those that every method has."""
    entry = METHODS[name]
    table = Table("setting", "default", "values", "meaning", title=f"Settings of {name}")
    for settings, defaults in ((RunConfig, {}), (entry.settings, entry.defaults)):
        for key, field in settings.model_fields.items():
            if key != "method_settings":
                default = defaults.get(key, field.default)
                table.add_row(
                    key, "–" if default is None else str(default), _values(settings, key), field.description or ""
                )
        table.add_section()
    return table


def _values(settings: type[Settings], key: str) -> str:
    annotation = settings.model_fields[key].annotation
    if get_origin(annotation) is None:
        return getattr(annotation, "__name__", str(annotation))
    names = [
        str(part) if isinstance(part, str) else getattr(part, "__name__", str(part))
        for part in get_args(annotation)
        if part is not type(None)
    ]
    return " | ".join(names).replace("typing.", "")
