"""Writes cli.md and settings.md from the code; a test checks that they are current.

python docs/reference/generate.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import typer.main

from csda.cli import app
from csda.config import RunConfig, Settings
from csda.methods import METHODS
from csda.methods.catalog import format_value, list_values
from csda.presets import PRESETS

NOTE = "<!-- Written by docs/reference/generate.py. Change the code, then run it. -->"


def render_cli() -> str:
    """Every command with its arguments and options."""
    lines = [
        "# Commands",
        "",
        NOTE,
        "",
        "A mistake that you can mend ends with one line that names it and exit code 2, Ctrl-C with 130.",
        "`csda data check` ends with 1 when something would stop a training.",
        "",
    ]
    for name, command in _commands("csda", typer.main.get_command(app)):
        arguments = [each for each in command.params if each.param_type_name == "argument"]
        words = [_word(each) for each in arguments]
        lines += [
            f"## `{name}`",
            "",
            command.help.strip(),
            "",
            "```sh",
            " ".join([name, *words, *([] if hasattr(command, "commands") else ["[OPTIONS]"])]),
            "```",
            "",
        ]
        rows = [(f"`{each.name.upper()}`", _sentence(each.help)) for each in arguments]
        rows += [
            (
                ", ".join(f"`{flag}`" for flag in each.opts) + (f" `{each.metavar}`" if each.metavar else ""),
                _sentence(each.help) + _default(each),
            )
            for each in command.params
            if each.param_type_name == "option" and each.name != "help"
        ]
        lines += [*_table(("", "meaning"), rows), ""] if rows else []
    return "\n".join(lines).rstrip() + "\n"


def render_settings() -> str:
    """The settings that every method has, those of the methods, and what the presets change."""
    lines = [
        "# Settings",
        "",
        NOTE,
        "",
        "All of these can be given with `--set key=value`; an unknown key or a value out of range is refused. Those of",
        "the first table belong to every method. `csda methods NAME` prints those of one method with the\n"
        "values that a run on your machine would use.",
        "A run folder's `config.toml` holds them all.",
        "",
        "## Of every run",
        "",
        *_settings(RunConfig),
        "",
        "## Of methods",
        "",
        "A method has the settings of its own section and of those that it names.",
        "",
    ]
    for settings in _classes():
        users = [name for name, entry in METHODS.items() if entry.settings is settings]
        parents = [f"[{_title(each)}](#{_title(each).lower()})" for each in _bases(settings)]
        users = [f"Methods: {', '.join(f'`{name}`' for name in users)}."] if users else []
        parents = [f"Further settings: {', '.join(parents)}."] if parents else []
        heading = [" ".join([*users, *parents]), ""] if users else []
        lines += [f"### {_title(settings)}", "", *heading, *_settings(settings), ""]
    lines += ["## Methods", "", "What each is, and what its name fixes among the settings above.", ""]
    methods = [
        (f"`{name}`", entry.summary, entry.paper, _assignments(entry.defaults.items()))
        for name, entry in METHODS.items()
    ]
    lines += [*_table(("method", "what it is", "paper", "stands for"), methods), "", "## Presets", ""]
    lines += [
        "A preset changes defaults: of every run, and of a method that it names. Without a GPU the preset is `quick`",
        "unless told otherwise, with one `default`. With another number of epochs the `warm_up_epochs` that a preset",
        "names keep their share of them.",
        "",
    ]
    changes = []
    for name, preset in PRESETS.items():
        groups: dict[str, list[str]] = {_assignments(preset.run.items()): ["every run"]} if preset.run else {}
        for method, own in preset.methods.items():
            groups.setdefault(_assignments(own.items()), []).append(f"`{method}`")
        changes += [(f"`{name}`", ", ".join(users), settings) for settings, users in groups.items()]
    return "\n".join([*lines, *_table(("preset", "of", "changes"), changes)]) + "\n"


PAGES: dict[str, Callable[[], str]] = {"cli.md": render_cli, "settings.md": render_settings}


def _commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    if not hasattr(command, "commands"):
        yield name, command
        return
    if command.invoke_without_command:
        yield name, command
    for word, each in command.commands.items():
        yield from _commands(f"{name} {word}", each)


def _word(argument: Any) -> str:
    """An argument as usage lines write it."""
    word = argument.name.upper() + (" …" if argument.nargs == -1 else "")
    return word if argument.required else f"[{word}]"


def _default(option: Any) -> str:
    """The default, where the help does not tell it."""
    value = option.default
    if value is None or value is False or callable(value) or "[default" in (option.help or ""):
        return ""
    return f" Default: `{value}`."


def _sentence(text: str | None) -> str:
    return (text or "").replace("  [default:", " [default:").replace("|", "\\|")


def _classes() -> list[type[Settings]]:
    """The settings classes of all methods with fields of their own, parents first."""
    found: dict[type[Settings], None] = {}
    for entry in METHODS.values():
        for settings in reversed(entry.settings.__mro__):
            if issubclass(settings, Settings) and _own(settings):
                found[settings] = None
    return list(found)


def _bases(settings: type[Settings]) -> list[type[Settings]]:
    return [base for base in settings.__mro__[1:] if issubclass(base, Settings) and _own(base)]


def _own(settings: type) -> list[str]:
    """The fields that a class adds to its parents, or changes."""
    if not issubclass(settings, Settings):
        return []
    return [key for key in settings.model_fields if key in settings.__annotations__]


def _title(settings: type[Settings]) -> str:
    return settings.__name__.removesuffix("Settings")


def _settings(settings: type[Settings]) -> list[str]:
    rows = []
    for key in _own(settings):
        field = settings.model_fields[key]
        if key != "method_settings":
            default = "–" if field.default is None else f"`{format_value(field.default)}`"
            rows.append((f"`{key}`", default, _values(field), (field.description or "").replace("|", "\\|")))
    return _table(("setting", "default", "values", "meaning"), rows)


def _values(field: Any) -> str:
    """The choices, or the kind with its limits."""
    values = list_values(field.annotation, field.metadata)
    return " or ".join(f"`{value}`" if value.isidentifier() and value != "text" else value for value in values)


def _assignments(settings: Iterable[tuple[str, Any]]) -> str:
    return ", ".join(f"`{key} = {format_value(value)}`" for key, value in settings)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *lines]


if __name__ == "__main__":
    for name, render in PAGES.items():
        (Path(__file__).parent / name).write_text(render(), encoding="utf-8")
