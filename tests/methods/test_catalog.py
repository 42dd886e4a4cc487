"""The tables of methods and settings, as a terminal of a hundred columns shows them."""

from __future__ import annotations

import pytest
from rich.console import Console
from rich.table import Table

from csda.config import RunConfig
from csda.methods import METHODS
from csda.methods.catalog import methods_table, settings_table


def _lines(table: Table) -> list[str]:
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return [line.rstrip() for line in capture.get().splitlines()]


def test_every_method_has_a_line_with_its_paper_and_what_it_needs() -> None:
    lines = dict(zip(METHODS, _lines(methods_table())[2:], strict=False))
    for name, entry in METHODS.items():
        assert [cell.strip() for cell in lines[name].split("  ") if cell][:3] == [name, entry.summary, entry.paper]
    assert lines["baseline"].endswith(" labels")
    assert lines["upper-bound"].endswith("all labels")
    assert lines["csda"].endswith("unlabeled images")
    assert lines["fixmatch"].endswith("unlabeled, one class")


@pytest.mark.parametrize("name", METHODS)
def test_every_setting_of_a_method_has_a_line(name: str) -> None:
    first_words = [line.split(" ")[0] for line in _lines(settings_table(name))]
    settings = {*METHODS[name].settings.model_fields, *RunConfig.model_fields} - {"method_settings"}
    for setting in settings:
        assert first_words.count(setting) == 1, setting


@pytest.mark.parametrize(
    ("name", "setting", "default", "values"),
    [
        ("csda", "align", "csda", "none | da | csda"),
        ("vcq", "align", "none", "none | da | csda"),
        ("glm", "weight", "10", "number"),
        ("glm", "layers", "[0, 2, 4]", "[whole number, …]"),
        ("lsse", "lr", "0.0001", "number"),
        ("csda", "lr_decay_at", "[0.195, 0.488]", "[number, …]"),
        ("csda", "temperature", "1", "adaptive | unlabeled | number"),
        ("fixmatch", "soft", "false", "true | false"),
        ("nm", "source", "–", "text"),
    ],
)
def test_defaults_are_those_of_the_name(name: str, setting: str, default: str, values: str) -> None:
    (line,) = [line for line in _lines(settings_table(name)) if line.split(" ")[0] == setting]
    cells = [cell.strip() for cell in line.split("  ") if cell.strip()]
    assert cells[:3] == [setting, default, values]
