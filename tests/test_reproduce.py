"""Grids of runs: complete, resumable, and their tables checkable from the runs alone."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from statistics import mean, stdev

import pytest

from csda import reproduce
from csda.data import synthetic
from csda.errors import ConfigError, CsdaError
from csda.methods import METHODS
from csda.progress import Reporter
from csda.training import configure

EXPERIMENT = """
title = "A small grid"
labels = ["21"]
seeds = [0, 1]
preset = "quick"

[settings]
tensorboard = false
epochs = 2
warm_up_epochs = 1
steps_per_epoch = 2
batch_size = 8
unlabeled_batch_size = 8

[[rows]]
method = "baseline"
paper = { 21 = [0.5, 0.25] }

[[rows]]
method = "csda"
title = "csda, short queue"
settings = { capacity = 8 }
"""


class Notes(Reporter):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic.load, "__defaults__", (0, 60, 1.0))
    monkeypatch.setattr(synthetic, "VALIDATION", 2)
    monkeypatch.setattr(synthetic, "TEST", 3)

    def train_here(cells: list[reproduce.Cell], jobs: int, side_by_side: int, reporter: Reporter) -> None:
        for cell in cells:
            cell.train()

    # Worker processes would not see the small data set.
    monkeypatch.setattr(reproduce, "_train_all", train_here)


@pytest.mark.usefixtures("_small")
def test_a_grid_becomes_a_table_and_trains_only_what_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "grid.toml"
    file.write_text(EXPERIMENT)
    where = {"data": None, "runs": tmp_path / "runs", "out": tmp_path / "results", "jobs": 1}
    notes = Notes()
    page = reproduce.reproduce(str(file), reporter=notes, **where)
    reproduce.reproduce(str(file), reporter=notes, **where)
    assert [note.split(", ")[1] for note in notes.notes] == ["4 of them to train", "0 of them to train"]

    with (tmp_path / "results" / "grid.csv").open() as lines:
        summary = list(csv.DictReader(lines))
    with (tmp_path / "results" / "grid_runs.csv").open() as lines:
        runs = list(csv.DictReader(lines))
    assert tuple(summary[0]) == reproduce.COLUMNS
    assert [(line["method"], line["seeds"]) for line in summary] == [("baseline", "2"), ("csda, short queue", "2")]
    for line in summary:
        aucs = [float(run["auc"]) for run in runs if run["method"] == line["method"]]
        assert float(line["auc_mean"]) == pytest.approx(mean(aucs), abs=1e-5)
        assert float(line["auc_std"]) == pytest.approx(stdev(aucs), abs=1e-5)
    assert (summary[0]["paper_auc"], summary[0]["paper_mca"]) == ("0.5", "0.25")
    text = page.read_text()
    assert "A small grid" in text
    assert text.count("| csda, short queue |") == 1
    assert json.loads((tmp_path / "results" / "grid.json").read_text())["seeds"] == [0, 1]


def test_paired_differences_are_taken_seed_by_seed() -> None:
    results = [
        {"method": name, "labels": "9", "split": "random", "seed": seed, "auc": auc, "mca": auc / 2}
        for name, aucs in (("a", (0.5, 0.7)), ("b", (0.6, 0.9)))
        for seed, auc in enumerate(aucs)
    ]
    (auc, low, high), (mca, _, _) = reproduce.compare(results, "b", "a", "9", "random")
    assert auc == pytest.approx(0.15)
    assert mca == pytest.approx(0.075)
    assert low == pytest.approx(0.1)
    assert high == pytest.approx(0.2)


def test_a_failing_run_is_named(tmp_path: Path) -> None:
    cell = reproduce.Cell("x", "baseline", "10", "random", 0, tmp_path / "x", str(tmp_path / "none"), "quick", {})
    with pytest.raises(CsdaError, match="x: "):
        reproduce._train_all([cell], 1, 1, Reporter())


@pytest.mark.parametrize("text", ["title = ", "title = 'x'\nlabels = ['9']\nseeds = [1]\nrows = []\nspeed = 1\n"])
def test_a_wrong_experiment_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"wrong\.toml"):
        reproduce.read_experiment(str(file))
    with pytest.raises(ConfigError, match="no such experiment"):
        reproduce.read_experiment("nowhere")


@pytest.mark.parametrize(
    "file", sorted((Path(__file__).parent.parent / "experiments").glob("*.toml")), ids=lambda f: f.stem
)
def test_every_experiment_names_methods_and_settings_that_exist(file: Path) -> None:
    _, experiment = reproduce.read_experiment(str(file))
    for row in experiment.rows:
        assert row.method in METHODS
        configure(
            {"method": row.method, "preset": experiment.preset or "default", **experiment.settings, **row.settings}
        )
