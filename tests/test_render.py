"""Pages with results follow from their templates and tables, and a changed result changes its page."""

from __future__ import annotations

import csv
import importlib.util
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

from csda.methods import METHODS
from csda.presets import configure

ROOT = Path(__file__).parent.parent


def _renderer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("render", ROOT / "docs" / "render.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["render"] = module
    spec.loader.exec_module(module)
    return module


RENDER = _renderer()
TEMPLATES = RENDER.list_templates()


@pytest.mark.parametrize("name", TEMPLATES)
def test_pages_follow_from_their_templates(name: str) -> None:
    written = (ROOT / name).read_text(encoding="utf-8")
    assert written == RENDER.render(name, ROOT / "results"), "run `make docs`"


@pytest.mark.parametrize("name", RENDER.list_tables())
def test_pages_of_tables_follow_from_their_files(name: str) -> None:
    written = (ROOT / "results" / name / "page.md").read_text(encoding="utf-8")
    assert written == RENDER.render_table(name, ROOT / "results"), "run `make docs`"


def _change(file: Path, column: str, by: float, **where: str) -> None:
    with file.open(newline="", encoding="utf-8") as stream:
        lines = list(csv.DictReader(stream))
    for line in lines:
        if line[column] and all(line[key] == value for key, value in where.items()):
            line[column] = str(float(line[column]) + by)
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)


def test_a_changed_result_changes_its_page_and_a_broken_claim_stops_it(tmp_path: Path) -> None:
    results = tmp_path / "results"
    shutil.copytree(ROOT / "results", results)
    page, gaps = "docs/results.md", results / "table1" / "gaps.csv"
    before = RENDER.render(page, results)
    _change(gaps, "auc_gap", 0.001, method="glm", reference="baseline", labels="all")
    assert RENDER.render(page, results) != before
    _change(gaps, "mca_gap", -0.2, method="csda", reference="baseline", labels="all")
    with pytest.raises(ValueError, match="no longer follows from the files"):
        RENDER.render(page, results)


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_no_figure_of_the_headline_is_typed(page: str, tmp_path: Path) -> None:
    results = tmp_path / "results"
    shutil.copytree(ROOT / "results", results)
    for summary in results.glob("*/summary.csv"):
        columns = summary.read_text(encoding="utf-8").partition("\n")[0].split(",")
        for column in {"auc_mean", "auc_std", "mca_mean", "mca_std", "mca_prior_mean"} & set(columns):
            _change(summary, column, 0.011)
    before, after = (re.findall(r"\b0\.\d{3}", RENDER.render(page, folder)) for folder in (ROOT / "results", results))
    assert len(before) > 25
    assert all(old != new for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("name", "file", "column"),
    [("table3", "runs.csv", "auc"), ("recipe", "runs.csv", "mca"), ("estimators", "summary.csv", "mca_mean")],
)
def test_a_changed_line_changes_the_page_of_its_table(name: str, file: str, column: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "results" / name, tmp_path / name)
    _change(tmp_path / name / file, column, 0.01)
    assert RENDER.render_table(name, tmp_path) != (ROOT / "results" / name / "page.md").read_text(encoding="utf-8")


def test_numbers_are_written_as_pages_have_them() -> None:
    line = {"auc_gap": -0.0156, "auc_low": -0.02, "auc_high": 0.004, "auc_mean": 0.81, "auc_std": None}
    assert RENDER.points(line, "auc") == "−1.6"
    assert RENDER.interval(line, "auc") == "−1.6 [−2.0, +0.4]"
    assert RENDER.spread(line, "auc") == "0.810"
    assert RENDER.fixed(None, 2) == "–"
    assert [RENDER.word(number) for number in (0, 5, 12, 13, 2000)] == ["zero", "five", "twelve", "13", "2,000"]


def test_pages_have_the_settings_of_the_presets() -> None:
    config = configure({"preset": "quick", "method": "csda", "data": "synthetic"})
    assert RENDER.setting("quick", "epochs") == config.epochs
    assert RENDER.setting("quick", "weight", "csda") == config.method_settings["weight"] != 1
    assert RENDER.setting("quick", "weight", "glm") == METHODS["glm"].defaults["weight"]


def test_different_values_are_counted(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("method,seed\na,0\na,1\nb,1\n")
    results = RENDER.Results(tmp_path)
    assert (
        results.count("t.csv", "seed") == results.count("t.csv", "method") == results.count("t.csv", "seed", method="a")
    )
    assert results.count("t.csv", "seed", method="b") == 1


def test_a_line_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("method,auc\na,0.5\n")
    with pytest.raises(ValueError, match="has no line with"):
        RENDER.Results(tmp_path).row("t.csv", method="b")
    assert RENDER.Results(tmp_path).row("t.csv", method="a") == {"method": "a", "auc": 0.5}
