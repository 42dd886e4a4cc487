"""docs/explanation/paper-map.md and readings.md name only what exists."""

from __future__ import annotations

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from csda.config import Reading, RunConfig
from csda.methods import METHODS
from csda.presets import PRESETS, configure

ROOT = Path(__file__).parent.parent
EXPLANATION = ROOT / "docs" / "explanation"

Row = dict[str, str]


def _tables(page: str) -> dict[str, list[Row]]:
    """The tables of a page by the heading of their first column, a row as a dictionary."""
    tables: dict[str, list[Row]] = {}
    for block in re.findall(r"(?:^\|.*\n)+", (EXPLANATION / page).read_text(encoding="utf-8"), re.MULTILINE):
        head, _, *body = [
            [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]] for line in block.splitlines()
        ]
        tables.setdefault(head[0], []).extend(dict(zip(head, cells, strict=True)) for cells in body)
    return tables


MAP = _tables("paper-map.md")
EQUATIONS = [row for row in MAP["equation"] if "code" in row]
PLACES = [*EQUATIONS, *MAP["algorithm"], *MAP["table"], *MAP["figure"]]


def _find(name: str) -> Any:
    """A function, class or method by its dotted name."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            thing: Any = import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[length:]:
            thing = getattr(thing, attribute)
        return thing
    raise AssertionError(f"{name} does not exist")


def _claimed(docstring: str) -> set[int]:
    """The equations that the first line of a docstring names: `Eq. (11) and (12).`, `Eq. (15) to (17).`"""
    numbers: set[int] = set()
    for first, word, second in re.findall(r"Eq\. \((\d+)\)(?: (and|to) \((\d+)\))?", docstring.partition("\n")[0]):
        numbers |= set(range(int(first), int(second) + 1)) if word == "to" else {int(first), int(second or first)}
    return numbers


def test_every_equation_table_and_figure_is_there() -> None:
    numbers = [int(row["equation"]) for row in MAP["equation"]]
    assert sorted(numbers) == list(range(1, 20))
    assert [int(row["equation"]) for row in EQUATIONS] == list(range(7, 20))
    assert [row["table"] for row in MAP["table"]] == [f"tab{number}" for number in range(1, 8)]
    assert {int(number) for row in MAP["figure"] for number in re.findall(r"\d", row["figure"])} == {1, 2, 3, 4, 5}


@pytest.mark.parametrize("row", EQUATIONS, ids=lambda row: f"Eq. {row['equation']}")
def test_the_docstring_begins_with_the_equation(row: Row) -> None:
    docstring = inspect.getdoc(_find(row["code"].strip("`")))
    assert docstring is not None
    assert docstring.startswith("Eq. (")
    assert int(row["equation"]) in _claimed(docstring)


def _identify(row: Row) -> str:
    return next(iter(row.values()))


@pytest.mark.parametrize("row", PLACES, ids=_identify)
def test_code_and_test_exist(row: Row) -> None:
    assert callable(_find(row["code"].strip("`")))
    path, _, name = row["test"].strip("`").partition("::")
    functions = [node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)]
    assert name in functions


# --- settings -------------------------------------------------------------------------------------------------------

READINGS = _tables("readings.md")["#"]
ASSIGNMENT = re.compile(r"`(?:--set )?(\w+) ?= ?([^`]+)`")


def _assignments(text: str) -> list[tuple[str, str]]:
    """Every `key = a | b` of a text, a value at a time; values are as `--set` would read them."""
    return [
        (key, value.strip().strip('"'))
        for key, values in ASSIGNMENT.findall(text)
        for value in re.split(r"\\?\|", values)
    ]


def test_every_open_point_is_there() -> None:
    assert [int(row["#"]) for row in READINGS] == list(range(1, len(READINGS) + 1))
    assert len(READINGS) == 25


@pytest.mark.parametrize(
    ("key", "value"),
    sorted(
        {
            pair
            for page in ("readings.md", "paper-map.md", "method.md")
            for pair in _assignments((EXPLANATION / page).read_text())
        }
    ),
)
def test_settings_exist_and_take_their_values(key: str, value: str) -> None:
    from csda.config import parse_assignments

    configure(parse_assignments([f"{key}={value}"]))


def test_the_column_of_the_paper_is_its_preset() -> None:
    paper = configure({"preset": "paper"})
    settings = paper.model_dump() | paper.method_settings
    for row in READINGS:
        for key, value in _assignments(row["preset `paper`"]):
            assert str(settings[key]).lower() == value, f"row {row['#']}: {key} is {settings[key]}"


def test_every_setting_that_the_code_marks_as_a_reading_is_explained() -> None:
    marked = {
        setting: mark.row
        for setting, field in (RunConfig.model_fields | METHODS["csda"].settings.model_fields).items()
        for mark in field.metadata
        if isinstance(mark, Reading)
    }
    assert len(marked) == 20
    for setting, number in marked.items():
        assert f"`{setting}" in " ".join(READINGS[number - 1].values()), f"row {number} does not name {setting}"


def test_every_setting_in_which_paper_and_default_differ_is_explained() -> None:
    known = RunConfig.model_fields.keys() | METHODS["csda"].settings.model_fields.keys()
    named = {key for row in READINGS for key, _ in _assignments(" ".join(row.values()))}
    assert named <= known
    assert PRESETS["paper"].methods["csda"].keys() <= named
