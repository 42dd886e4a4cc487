"""Runs that lack something: interrupted, without a test or validation part, a class missing, a model that has learned
nothing. Each has a report that says so."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from csda import metrics
from csda.errors import RunError
from csda.report import run_table, tables, write_report
from csda.runs import Run, open_run
from drawn_runs import write_rows

FEW = ("melanoma", "nevus", "vascular")
MakeRun = Callable[..., Path]
Change = Callable[[list[str]], Sequence[str] | None]


def change_rows(path: Path, change: Change) -> None:
    """Change or, by None, leave out rows of a CSV."""
    with path.open(newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    write_rows(path, header, [changed for row in rows if (changed := change(row)) is not None])


def interrupt(folder: Path, epochs: int) -> None:
    """What a run has after so many epochs."""
    run = Run(folder)
    history = run.history
    (folder / "history").mkdir()
    for k in range(epochs):
        np.savez(
            folder / "history" / f"{k + 1:05d}.npz", **{key: history[key][k] for key in history if key != "epochs"}
        )
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join(lines[:epochs]) + "\n")
    for name in ("history.npz", "predictions.csv", "pseudo_labels.csv", "result.json"):
        (folder / name).unlink()


def test_an_interrupted_run_is_reported_as_far_as_it_got(make_run: MakeRun) -> None:
    folder = make_run("csda", epochs=6, classes=FEW)
    whole = Run(folder)
    areas = [row["val_auc"] for row in whole.metrics[:4]]
    best = areas.index(max(areas))
    expected, labels = whole.history["test_probs"][best], whole.labels_of("test")
    interrupt(folder, 4)
    run = open_run(folder)
    assert tables.score(run).mca.value == pytest.approx(metrics.mca(expected, labels))
    assert tables.warn(run)[0].startswith("The run has not finished: these are its results after 4 of 6 epochs")
    page = write_report(folder).read_text()
    assert "has not finished" in page
    assert "Pseudo-labels" in page  # what the epochs say about them
    assert f"<code>csda train --out {folder} --resume</code>" in page
    assert "<small>of 6</small>" in page
    assert (folder / "figures" / "learning-auc.svg").is_file()
    assert not run.finished


def test_a_run_without_an_epoch_has_nothing_to_report(make_run: MakeRun) -> None:
    folder = make_run("csda", epochs=2, classes=FEW)
    interrupt(folder, 1)
    (folder / "metrics.jsonl").unlink()
    with pytest.raises(RunError, match="no epoch has ended yet"):
        write_report(folder)


@pytest.mark.parametrize("damage", ["shape", "range", "missing"])
def test_a_damaged_epoch_is_named(make_run: MakeRun, damage: str) -> None:
    folder = make_run("baseline", epochs=1, classes=FEW)
    run = Run(folder)
    arrays = {key: run.history[key][0] for key in ("val_probs", "test_probs")}
    interrupt(folder, 1)
    if damage == "shape":
        arrays["test_probs"] = arrays["test_probs"][1:]
    elif damage == "range":
        arrays["test_probs"] = arrays["test_probs"] + 3
    else:
        del arrays["test_probs"]
    np.savez(folder / "history" / "00001.npz", **arrays)
    with pytest.raises(RunError, match=r"history/00001\.npz: damaged"):
        write_report(folder)


def test_without_a_test_part_validation_is_judged(make_run: MakeRun) -> None:
    folder = make_run("csda", epochs=2, classes=FEW)
    for name in ("split.csv", "predictions.csv"):
        change_rows(folder / name, lambda row: None if row[1] == "test" else row)
    run = Run(folder)
    probs, labels = run.predictions.part("val")
    assert tables.score(run).mca.value == pytest.approx(metrics.mca(probs, labels))
    page = write_report(folder).read_text()
    assert "There is no test part" in page
    assert "<th>Validation</th><th>Recall</th>" in page
    assert "no temperature could be fitted" in page


def test_without_a_validation_part(make_run: MakeRun) -> None:
    folder = make_run("baseline", epochs=2, classes=FEW)
    for name in ("split.csv", "predictions.csv"):
        change_rows(folder / name, lambda row: None if row[1] == "val" else row)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [json.dumps(row | {"val_auc": None, "val_mca": None}) for row in rows]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    page = write_report(folder).read_text()
    assert "There is no validation part" in page
    assert "the last one" in page


def test_a_class_that_is_missing_is_named(make_run: MakeRun) -> None:
    folder = make_run("csda", epochs=2, classes=FEW)
    for name in ("split.csv", "predictions.csv"):
        change_rows(folder / name, lambda row: None if row[1] == "test" and row[2] == "vascular" else row)
        change_rows(folder / name, lambda row: None if row[2] == "melanoma" and row[0] > "test-0009" else row)
    change_rows(folder / "split.csv", lambda row: None if row[1] == "labeled" and row[2] == "melanoma" else row)
    page = write_report(folder).read_text()
    assert "No test image is of vascular: nothing is known about these classes." in page
    assert "No labeled image is of melanoma: the model cannot know these classes." in page
    assert re.search(r'<td data-label="Test">\d <small class="few">few</small></td>', page)
    recall = tables.score(Run(folder)).recall[-1]
    assert (str(recall), recall.interval, recall.count) == ("–", "", 0)


def test_one_class_for_everything_is_the_first_sentence(make_run: MakeRun) -> None:
    folder = make_run("csda", epochs=2, classes=FEW)

    def nevus(row: list[str]) -> list[str]:
        return [*row[:3], "nevus", "0.01", "0.98", "0.01"]

    change_rows(folder / "predictions.csv", nevus)
    run = Run(folder)
    sentence = "The model predicts nevus for every test image."
    assert tables.warn(run)[0] == sentence
    page = write_report(folder).read_text()
    assert page.index(sentence) < page.index('class="lead"')


def test_a_model_from_before_the_first_pseudo_label_says_so(make_run: MakeRun) -> None:
    folder = make_run("csda", epochs=4, classes=FEW)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    # The third epoch has a queue, but nothing in it yet.
    filled = [{}, {"filled": 0.0, "unlabeled_loss": 0.0}, {"filled": 0.0, "unlabeled_loss": 0.0}, {"filled": 0.2}]
    lines = [json.dumps(row | more) for row, more in zip(rows, filled, strict=True)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    result = json.loads((folder / "result.json").read_text())
    for best, warned in ((3, True), (4, False)):
        (folder / "result.json").write_text(json.dumps(result | {"best_epoch": best}))
        sentences = tables.warn(Run(folder))
        assert any("before the first pseudo-label in epoch 4" in each for each in sentences) is warned


def test_two_test_images_do_not_make_a_point(make_run: MakeRun) -> None:
    """Recalls of 0 of 1 and 1 of 1 image, and a mean of them, have intervals that say how little that is."""
    folder = make_run("baseline", classes=("yes", "no"), epochs=2)
    kept = {"test-0000", "test-0001"}
    for name in ("split.csv", "predictions.csv"):
        change_rows(folder / name, lambda row: None if row[1] == "test" and row[0] not in kept else row)
    change_rows(folder / "predictions.csv", lambda row: [*row[:3], "yes", "0.9", "0.1"] if row[1] == "test" else row)
    scores = tables.score(Run(folder))
    assert [each.value for each in scores.recall] == [1, 0]
    for each in scores.recall:
        np.testing.assert_allclose((each.low, each.high), metrics.wilson_interval(each.value, 1))
        assert each.few
    assert scores.mca.low < 0.25
    assert scores.mca.high > 0.75
    assert "Only 20 validation images chose the epoch" in tables.warn(Run(folder))[1]
    assert run_table(Run(folder)).columns[2]._cells[0].plain == "1 few"


def test_one_image_decides_no_comparison(make_run: MakeRun) -> None:
    folders = [make_run("baseline", classes=("yes", "no"), epochs=2), make_run("csda", classes=("yes", "no"), epochs=2)]
    for folder, guess in zip(folders, ("no", "yes"), strict=True):
        for name in ("split.csv", "predictions.csv"):
            change_rows(folder / name, lambda row: None if row[1] == "test" and row[0] != "test-0000" else row)
        probs = ["0.9", "0.1"] if guess == "yes" else ["0.1", "0.9"]
        change_rows(
            folder / "predictions.csv",
            lambda row, guess=guess, probs=probs: [*row[:3], guess, *probs] if row[1] == "test" else row,
        )
    gap = tables.compare(Run(folders[1]), Run(folders[0]))
    assert gap is not None
    assert (gap.recall[0].value, gap.recall[0].verdict) == (1, "unclear")


def test_controls_stand_beside_the_number(make_run: MakeRun) -> None:
    folder = make_run("csda", epochs=2, classes=FEW)
    result = json.loads((folder / "result.json").read_text())
    control = {"linear_probe": {"auc": 0.8125, "mca": 0.4375}}
    (folder / "result.json").write_text(json.dumps(result | {"control": control}))
    page = write_report(folder).read_text()
    assert "Another control, linear probe on frozen features: AUC 0.812 and MCA 0.438." in page
    assert f"gives an MCA of {tables.score(Run(folder)).prior_mca}" in page
    assert "This is one seed on one split." in page
    for damaged in ({"control": 3}, {"control": {"linear_probe": 3}}, {"control": {"linear_probe": {"auc": "x"}}}):
        (folder / "result.json").write_text(json.dumps(result | damaged))
        with pytest.raises(RunError, match="control is not a number"):
            _ = Run(folder).result
