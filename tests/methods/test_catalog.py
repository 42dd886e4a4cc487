"""The tables of methods and settings, as a terminal shows them."""

from __future__ import annotations

import re

import pytest
from pydantic import Field
from rich.console import Console
from rich.table import Table

from csda.config import Reading, RunConfig
from csda.methods import METHODS
from csda.methods.catalog import list_values, methods_table, settings_table
from csda.presets import PRESETS, configure


def _lines(table: Table, width: int = 100) -> list[str]:
    console = Console(width=width, color_system=None)
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


def _settings(name: str, preset: str = "default", *, every: bool = False, width: int = 100) -> list[str]:
    here, paper = (configure({"method": name, "preset": each}) for each in (preset, "paper"))
    return _lines(settings_table(here, paper, every=every), width)


@pytest.mark.parametrize("name", METHODS)
def test_every_setting_of_a_method_has_a_line(name: str) -> None:
    first_words = [line.split(" ")[0] for line in _settings(name, every=True)]
    settings = {*METHODS[name].settings.model_fields, *RunConfig.model_fields} - {"method_settings"}
    for setting in settings:
        assert first_words.count(setting) == 1, setting


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("preset", PRESETS)
def test_without_readings_and_details_it_fits_a_screen(name: str, preset: str) -> None:
    if preset == "features" and not METHODS[name].on_features:
        return
    lines = _settings(name, preset, width=80)
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert not any(line.endswith("…") for line in lines)
    first_words = {line.split(" ")[0] for line in lines}
    assert first_words >= {"data", "labels", "epochs", "lr"}
    fields = METHODS[name].settings.model_fields | RunConfig.model_fields
    readings = {key for key, field in fields.items() if any(isinstance(mark, Reading) for mark in field.metadata)}
    assert not first_words & {*readings, "kernels"}


def test_readings_of_the_paper_are_a_section_of_their_own() -> None:
    lines = _settings("csda", every=True, width=240)
    blank = [number for number, line in enumerate(lines) if not line]
    assert len(blank) == 2
    section = [line.split(" ")[0] for line in lines[blank[0] + 1 : blank[1]]]
    assert section == [
        key
        for key, field in (METHODS["csda"].settings.model_fields | RunConfig.model_fields).items()
        if any(isinstance(mark, Reading) for mark in field.metadata)
    ]
    assert {"temperature", "teacher_mode", "ramp"} <= set(section)


@pytest.mark.parametrize(
    ("name", "preset", "setting", "cells"),
    [
        ("csda", "default", "align", ["csda", "none | da | csda"]),
        ("vcq", "default", "align", ["none", "none | da | csda"]),
        ("glm", "quick", "weight", ["10", "0 to 1000000"]),
        ("csda", "quick", "weight", ["2", "1", "0 to 1000000"]),
        ("glm", "default", "layers", ["[0, 2, 4]", "[0 to 6, …]"]),
        ("lsse", "quick", "lr", ["0.0001", "above 0 to 100"]),
        ("csda", "quick", "lr", ["0.05", "0.0128", "above 0 to 100"]),
        ("csda", "default", "lr_decay_at", ["[0.195, 0.488]", "[above 0 to below 1, …]"]),
        ("csda", "default", "temperature", ["1", "adaptive", "adaptive | unlabeled | 0 to 10"]),
        ("csda", "paper", "temperature", ["adaptive", "adaptive | unlabeled | 0 to 10"]),
        ("csda", "default", "delta", ["0.25", "0 to 1"]),
        ("csda", "default", "seed", ["0", "0 to 2147483647"]),
        ("csda", "default", "epochs", ["40", "256", "1 to 100000"]),
        ("fixmatch", "default", "soft", ["false", "true | false"]),
        ("nm", "default", "source", ["–", "text"]),
    ],
)
def test_values_are_those_of_a_run_beside_those_of_the_paper(
    name: str, preset: str, setting: str, cells: list[str]
) -> None:
    (line,) = [line for line in _settings(name, preset, every=True, width=240) if line.split(" ")[0] == setting]
    assert [cell.strip() for cell in line.split("  ") if cell.strip()][:-1] == [setting, *cells]


@pytest.mark.parametrize(
    ("kind", "limits", "words"),
    [
        (float, {}, "any number"),
        (float, {"ge": 0}, "0 or more"),
        (float, {"gt": 0}, "above 0"),
        (float, {"le": 2.5}, "up to 2.5"),
        (int, {"gt": 0, "lt": 8}, "above 0 to 7"),
    ],
)
def test_limits_are_words(kind: type, limits: dict[str, float], words: str) -> None:
    assert list_values(kind, Field(**limits).metadata) == [words]


def test_descriptions_are_plain() -> None:
    for name, entry in METHODS.items():
        for key, field in (entry.settings.model_fields | RunConfig.model_fields).items():
            if key != "method_settings":
                assert field.description, f"{name}: {key} is not described"
                assert field.description.isascii(), f"{name}: {key} is described by a symbol"
                assert not re.search(r"\bEq\b|\^|_", field.description), f"{name}: {key}"
