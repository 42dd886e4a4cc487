"""Runs are known again by what they compute, and told of in a line."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from csda import metrics
from csda.errors import RunError
from csda.presets import configure
from csda.research import ledger
from csda.runs import Run
from tiny import make_images


def test_a_setting_that_an_older_run_did_not_know_has_its_default() -> None:
    ours = ledger.identify(configure({"method": "csda", "preset": "default", "labels": "9"}), {"data": "0123"})
    older = {name: value for name, value in ours.items() if name not in ("evict", "ramp")}
    assert ledger.agree(ours, older)
    assert not ledger.agree(ours | {"evict": "least_confident"}, older)
    assert not ledger.agree(ours, older | {"seed": 1})
    assert not ledger.agree(ours, older | {"no_longer_known": 1})
    assert not ledger.agree(ours, older | {"data": "4567"})


def test_a_probe_of_before_there_were_stages_is_not_one_of_today() -> None:
    """The method names three stages, and a line that names none had the features before the classifier."""
    ours, before = (
        ledger.identify(configure({"method": "linear-probe", "preset": "features", "labels": "9", **more}), {})
        for more in ({}, {"feature_stages": 0})
    )
    assert "feature_stages" not in before
    assert ledger.agree(ours, ours)
    assert ledger.agree(before, before)
    assert not ledger.agree(ours, before)


def test_lists_are_known_by_what_they_say(tmp_path: Path) -> None:
    def find(**settings: str) -> ledger.Contents:
        return ledger.ContentFinder()(configure({"data": str(tmp_path / "images"), **settings}))

    make_images(tmp_path / "images")
    whole = find()
    assert set(whole) == {"data"}
    for name, parts in (("one", "val"), ("two", "val"), ("three", "test")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lists.csv").write_text(f"id,split,label\nrare/00.png,{parts},rare\n")
    one, two, three = (find(split=str(tmp_path / name)) for name in ("one", "two", "three"))
    assert one["data"] == whole["data"]
    assert one == two != three


def test_parts_that_a_set_names_itself_divide_it(tmp_path: Path) -> None:
    def find(part: str) -> ledger.Contents:
        (images / "labels.csv").write_text(f"image,label,split\nrare/00.png,a,{part}\nrare/01.png,b,train\n")
        return ledger.ContentFinder()(configure({"data": str(images)}))

    images = make_images(tmp_path / "images")
    one, other = find("val"), find("test")
    assert one["data"] == other["data"]
    assert one["split"] != other["split"]


def test_groups_that_the_training_did_not_see_are_scored_apart(tiny_run: Run, tmp_path: Path) -> None:
    assert ledger._by_group(tiny_run) == {"auc_unseen": None, "mca_unseen": None, "mca_leak": None}
    test = [row.id for row in tiny_run.split if row.split == "test"]
    unlabeled = next(row.id for row in tiny_run.split if row.split == "unlabeled")
    run = _regroup(tiny_run, tmp_path / "run", dict.fromkeys([unlabeled, *test[::2]], "a"))
    left = set(test[1::2])
    chosen = [position for position, name in enumerate(tiny_run.predictions.ids) if name in left]
    expected = metrics.mca(tiny_run.predictions.probs[chosen], tiny_run.predictions.labels[chosen])
    assert ledger._by_group(run)["mca_unseen"] == pytest.approx(expected)


def _regroup(run: Run, folder: Path, groups: dict[str, str]) -> Run:
    """A copy of a run whose images are of these groups, and all others of none."""
    shutil.copytree(run.folder, folder)
    (folder / "manifest.json").unlink(missing_ok=True)
    _rewrite(folder / "split.csv", lambda row: [*row[:3], groups.get(row[0], "")])
    return Run(folder)


def _rewrite(path: Path, change: Callable[[list[str]], list[str]]) -> None:
    with path.open(newline="") as lines:
        head, *rows = csv.reader(lines)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([head, *map(change, rows)])


def test_what_labeled_groups_add_is_counted_image_by_image(tiny_run: Run, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    shutil.copytree(tiny_run.folder, tmp_path / "run")
    (tmp_path / "run" / "manifest.json").unlink()
    _rewrite(tmp_path / "run" / "predictions.csv", lambda row: [*row[:4], *map(str, draw.random(len(row) - 4))])
    run = Run(tmp_path / "run")
    ids = {part: [row.id for row in run.split if row.split == part] for part in ("labeled", "unlabeled", "test")}
    truth = dict(zip(run.predictions.ids, run.predictions.labels.tolist(), strict=True))
    guess = dict(zip(run.predictions.ids, run.predictions.probs.argmax(axis=1).tolist(), strict=True))
    groups = {ids["labeled"][0]: "known", ids["unlabeled"][0]: "met"}
    for place, name in enumerate(ids["test"]):
        groups[name] = ("known", "met", f"alone {place}")[place % 3]
    classes = sorted({truth[name] for name in ids["test"]})
    expected = 0.0
    for label in classes:
        own = [name for name in ids["test"] if truth[name] == label]
        known, met, alone = (
            [guess[name] == label for name in own if groups[name].startswith(kind)]
            for kind in ("known", "met", "alone")
        )
        if known:
            others = met or alone
            expected += len(known) / len(own) * (sum(known) / len(known) - sum(others) / len(others))
    assert len(classes) > 1
    assert expected != 0
    leak = ledger._by_group(_regroup(run, tmp_path / "known", groups))["mca_leak"]
    assert leak == pytest.approx(expected / len(classes))
    assert ledger.read_line(run)["mca_leak"] is None
    unlabeled_alone = {name: group for name, group in groups.items() if group != "known"}
    assert ledger.read_line(_regroup(run, tmp_path / "met", unlabeled_alone))["mca_leak"] is None
    without_test = _regroup(run, tmp_path / "empty", groups)
    for name in ("predictions.csv", "split.csv"):
        _rewrite(tmp_path / "empty" / name, lambda row: [row[0], row[1].replace("test", "val"), *row[2:]])
    assert ledger.read_line(without_test)["mca_leak"] is None
    everything = dict.fromkeys([*ids["labeled"], *ids["test"]], "known")
    assert ledger.read_line(_regroup(run, tmp_path / "all", everything))["mca_leak"] is None


def test_a_folder_that_was_copied_in_part_is_named(tiny_run: Run, tmp_path: Path) -> None:
    shutil.copytree(tiny_run.folder, tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    (tmp_path / "run" / "manifest.json").unlink()
    with pytest.raises(RunError, match=r"run/result\.json: damaged \(best_epoch = \d of 0 epochs\)"):
        ledger.read_line(Run(tmp_path / "run"))
