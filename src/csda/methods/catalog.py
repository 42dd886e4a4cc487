"""Methods, settings and published weights as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from csda.config import Detail, Reading, RunConfig
from csda.errors import ConfigError
from csda.methods import METHODS, Entry


def methods_table() -> Table:
    """A table of the methods: what each is, its paper, and what it needs besides labels."""
    table = _table("method", "what it is", "paper", "needs")
    for name, entry in METHODS.items():
        table.add_row(Text(name, "bold"), entry.summary, entry.paper, _needs(entry))
    table.caption = (
        "`csda methods NAME` lists the settings of one. Add alignment and queue to self-train, fixmatch, glm, nm and "
        "bis with --set align=csda --set queue=vcq; da, vcq and csda are self-train with a teacher and these parts."
    )
    return table


def settings_table(here: RunConfig, paper: RunConfig, *, every: bool = False) -> Table:
    """A table of the settings of a method, with the values of a run `here` and those of the preset `paper`.

    Without `every`, readings of the paper, details and settings with a single value are left out, and so is the column
    of allowed values, so that the table fits 80 columns.
    """
    entry = METHODS[here.method]
    table = _table("setting", "value", "paper", *(["values"] if every else []), "meaning")
    origin = f" ({entry.paper})" if entry.uses_unlabeled else ""
    table.title = f"{here.method} with the preset {here.preset}, as here: {entry.summary}{origin}"
    own, run = entry.settings.model_fields, RunConfig.model_fields
    readings = {key: field for key, field in (own | run).items() if _has_mark(field, Reading)}
    main = {key: field for key, field in own.items() if key not in readings}
    rest = {key: field for key, field in run.items() if key not in {*readings, "method_settings"}}
    values, paper_values = (config.model_dump() | config.method_settings for config in (here, paper))
    hidden = 0
    for section in (main, readings, rest):
        for key, field in section.items():
            choices, meaning = " | ".join(list_values(field.annotation, field.metadata)), field.description or ""
            chosen_from = get_origin(field.annotation) is Literal
            fixed = chosen_from and len(get_args(field.annotation)) == 1
            if not every and (key in readings or fixed or _has_mark(field, Detail)):
                hidden += 1
                continue
            differs = values[key] != paper_values[key] and key != "preset"
            table.add_row(
                key,
                Text(_fitting(format_value(values[key]), every), "bold" if differs else ""),
                format_value(paper_values[key]) if differs else "",
                *([Text(choices)] if every else []),
                Text(f"{meaning}: {choices}" if chosen_from and not every else meaning),
            )
        table.add_section()
    table.caption = "Change one with --set setting=value. The column paper has what the preset paper has."
    if hidden:
        table.caption += f" --all shows {hidden} more, with the readings of the paper."
    return table


def weights_table() -> Table:
    """A table of the backbones: whether their published weights are installed, or how to get them."""
    from csda.models.download import Download
    from csda.models.weights import PUBLISHED, find_weights

    table = _table("backbone", "installed", "size", "source", "licence")
    for name, published in PUBLISHED.items():
        try:
            file = find_weights(name)
            place = str(file) if isinstance(published.place, Download) else "yes"
        except ConfigError:
            place = f"no; {published.way}"
        cells = (place, published.size, published.source, published.licence)
        table.add_row(Text(name, "bold"), *(Text(cell, overflow="fold") for cell in cells))
    table.caption = (
        "Use them with --set backbone=NAME --set pretrained=true, and other weights with --set weights=FILE. "
        "timm downloads those of backbone=timm:NAME itself."
    )
    return table


def _fitting(value: str, every: bool) -> str:
    """A long value, cut in the short table, to leave room for the descriptions."""
    return value if every or len(value) <= 9 else f"{value[:8]}…"


def _has_mark(field: FieldInfo, mark: type) -> bool:
    return any(isinstance(each, mark) for each in field.metadata)


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
    """Write a value as `--set` takes it."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return f"[{', '.join(format_value(item) for item in value)}]"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def list_values(annotation: Any, limits: Sequence[Any] = ()) -> list[str]:
    """The allowed values of a setting: its choices, or its type and limits."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if annotation is type(None):
        return []
    if annotation is bool:
        return ["true", "false"]
    if annotation is str:
        return ["text"]
    if origin is Literal:
        return [format_value(choice) for choice in parts]
    if origin is Annotated:
        return list_values(parts[0], [limit for part in parts[1:] for limit in getattr(part, "metadata", [part])])
    if origin in (tuple, list):
        return [f"[{list_values(parts[0])[0]}, …]"]
    if parts:
        return [value for part in parts for value in list_values(part, limits)]
    return [_limits(annotation, limits)]


def _limits(kind: type, limits: Sequence[Any]) -> str:
    """The limits of a number in words, or "a number" without limits."""
    given = {name: getattr(each, name) for each in limits for name in ("ge", "gt", "le", "lt") if hasattr(each, name)}
    if kind is int and "lt" in given:  # an integer below 8 is at most 7
        given["le"] = given.pop("lt") - 1
    low = f"{given['ge']:.10g}" if "ge" in given else f"above {given['gt']:.10g}" if "gt" in given else ""
    high = f"{given['le']:.10g}" if "le" in given else f"below {given['lt']:.10g}" if "lt" in given else ""
    if low and high:
        return f"{low} to {high}"
    if high:
        return f"up to {high}"
    return (low if "gt" in given else f"{low} or more") if low else "any number"
