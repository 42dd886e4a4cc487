"""Runs are known again by what they compute, and told of in a line."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import pytest

from csda import ledger, metrics
from csda.errors import RunError
from csda.runs import Run
from csda.training import configure


def test_a_setting_that_an_older_run_did_not_know_has_its_default() -> None:
    ours = ledger.identify(configure({"method": "csda", "preset": "default", "labels": "9"}))
    older = {name: value for name, value in ours.items() if name not in ("evict", "ramp")}
    assert ledger.agree(ours, older)
    assert not ledger.agree(ours | {"evict": "least_confident"}, older)
    assert not ledger.agree(ours, older | {"seed": 1})
    assert not ledger.agree(ours, older | {"no_longer_known": 1})


def test_groups_that_the_training_did_not_see_are_scored_apart(tiny_run: Run, tmp_path: Path) -> None:
    shutil.copytree(tiny_run.folder, tmp_path / "run")
    assert ledger._unseen(tiny_run) == {"auc_unseen": None, "mca_unseen": None}
    with (tmp_path / "run" / "split.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    test = [row for row in rows if row["split"] == "test"]
    unlabeled = next(row for row in rows if row["split"] == "unlabeled")
    unlabeled["group"] = "a"
    for row in test[::2]:
        row["group"] = "a"
    with (tmp_path / "run" / "split.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    left = {row["id"] for row in test[1::2]}
    chosen = [position for position, name in enumerate(tiny_run.predictions.ids) if name in left]
    expected = metrics.mca(tiny_run.predictions.probs[chosen], tiny_run.predictions.labels[chosen])
    assert ledger._unseen(Run(tmp_path / "run"))["mca_unseen"] == pytest.approx(expected)


def test_a_folder_that_was_copied_in_part_is_named(tiny_run: Run, tmp_path: Path) -> None:
    shutil.copytree(tiny_run.folder, tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    with pytest.raises(RunError, match=r"run: metrics\.jsonl has 0 epochs and result\.json speaks of epoch \d"):
        ledger.read_line(Run(tmp_path / "run"))
