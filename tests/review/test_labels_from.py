"""Labels that were decided on the page go into the next training, and into a table."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from csda.cli import app
from csda.data import load_dataset
from csda.data.decisions import DecisionLog, Entry
from csda.errors import CsdaError, DataError
from csda.review.session import open_folder
from csda.runs import Run
from csda.training import train
from tiny import COUNTS, SETTINGS, InterruptedReporter


def _decide(folder: Path, *entries: Entry) -> None:
    log = DecisionLog(folder)
    for entry in entries:
        log.append([entry], "me")
    log.close()


@pytest.fixture
def reviewed(tiny_run: Run, tmp_path: Path) -> Run:
    """Four unlabeled images got a label, one of them a wrong one, one was flagged, and a given label was changed."""
    folder = Path(shutil.copytree(tiny_run.folder, tmp_path / "run"))
    one, two, three, four, five, six = [row.id for row in tiny_run.split if row.split == "unlabeled"][:6]
    given = next(row.id for row in tiny_run.split if row.split == "labeled" and row.label == "common")
    _decide(
        folder,
        Entry(one, "label", "common"),
        Entry(one, "label", "rare"),
        Entry(two, "label", "label"),
        Entry(three, "label", "common"),
        Entry(four, "label", "rare"),
        Entry(four, "undo", undoes=5),
        Entry(five, "flag"),
        Entry(six, "skip"),
        Entry(given, "label", "rare"),
    )
    return Run(folder)


def _parts(run: Run) -> dict[str, dict[str, str]]:
    return {
        part: {row.id: row.label for row in run.split if row.split == part}
        for part in ("labeled", "unlabeled", "val", "test")
    }


def test_a_training_goes_on_with_what_was_decided(reviewed: Run, tmp_path: Path) -> None:
    run = train(labels_from=reviewed.folder, out=tmp_path / "next")
    before, after = _parts(reviewed), _parts(run)
    one, two, three, four, five, six = list(before["unlabeled"])[:6]
    assert (after["val"], after["test"]) == (before["val"], before["test"])
    assert {image: after["labeled"][image] for image in (one, two, three)} == {
        one: "rare",
        two: "label",
        three: "common",
    }
    assert {four, six} <= after["unlabeled"].keys()
    assert all(five not in part for part in after.values())
    changed = {image for image, label in before["labeled"].items() if after["labeled"][image] != label}
    assert len(changed) == 1
    assert run.settings.epochs == reviewed.settings.epochs
    assert run.settings.method_settings == reviewed.settings.method_settings
    (remark,) = [text for text in run.remarks if text.startswith("labels from")]
    assert "3 more images have a label (common 1, label 1, rare 1)" in remark
    assert "1 label is changed" in remark
    assert "1 image is left out as unusable" in remark
    # and on from there, though a label is not the one that the folder says
    _decide(run.folder, Entry(four, "label", "common"))
    third = train(labels_from=run.folder, out=tmp_path / "third", method="baseline")
    assert _parts(third)["labeled"] == {**after["labeled"], four: "common"}
    assert third.settings.method == "baseline"


def test_it_resumes_though_more_was_decided_since(reviewed: Run, tmp_path: Path) -> None:
    whole = train(labels_from=reviewed.folder, out=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(labels_from=reviewed.folder, out=tmp_path / "cut", reporter=InterruptedReporter(2))
    last = [row.id for row in reviewed.split if row.split == "unlabeled"][-1]
    _decide(reviewed.folder, Entry(last, "label", "rare"))
    resumed = train(out=tmp_path / "cut", resume=True)
    assert _parts(resumed) == _parts(whole)
    assert (resumed.folder / "model.safetensors").read_bytes() == (whole.folder / "model.safetensors").read_bytes()


def test_the_held_out_parts_are_not_touched(reviewed: Run, tmp_path: Path) -> None:
    test = next(row.id for row in reviewed.split if row.split == "test")
    _decide(reviewed.folder, Entry(test, "label", "rare"))
    with pytest.raises(DataError, match="validation or test image"):
        train(labels_from=reviewed.folder, out=tmp_path / "next")
    assert not (tmp_path / "next").exists()


@pytest.mark.parametrize(
    ("entry", "words"),
    [(Entry("nowhere.png", "label", "rare"), "no image"), (Entry("rare/00.png", "label", "mole"), "no class")],
)
def test_decisions_that_do_not_fit(reviewed: Run, tmp_path: Path, entry: Entry, words: str) -> None:
    kept = [row.id for row in reviewed.split if row.split in ("labeled", "unlabeled")]
    image = entry.image if entry.image.startswith("nowhere") else kept[0]
    _decide(reviewed.folder, Entry(image, "label", entry.label))
    with pytest.raises(DataError, match=words):
        train(labels_from=reviewed.folder, out=tmp_path / "next")


def test_a_run_without_a_review_is_refused(tiny_run: Run, tmp_path: Path) -> None:
    with pytest.raises(CsdaError, match="review"):
        train(labels_from=tiny_run.folder, out=tmp_path / "next")
    with pytest.raises(CsdaError, match="missing or damaged"):
        train(labels_from=tmp_path, out=tmp_path / "next")


@pytest.fixture
def unlabeled_folder(tiny_images: Path, tmp_path: Path) -> Path:
    """All images in one folder, whose names do not say the class."""
    folder = tmp_path / "images"
    folder.mkdir()
    for path in tiny_images.rglob("*.png"):
        shutil.copy(path, folder / f"{path.parent.name[0]}{path.name}")
    return folder


def test_labeling_begins_from_nothing(unlabeled_folder: Path, tmp_path: Path) -> None:
    names = {"c": "common", "l": "label", "r": "rare"}
    session = open_folder(unlabeled_folder, tmp_path / "review", list(names.values()))
    for number, name in enumerate(session.names):
        if number % 3 == 1:
            continue
        session.decide([number], "label", [session.classes.index(names[name[0]])])
    session.decide([0], "flag", [])
    session.close()
    run = train(labels_from=tmp_path / "review", out=tmp_path / "run", settings={**SETTINGS, "tensorboard": False})
    assert run.classes == ("common", "label", "rare")
    assert len(run.split) == sum(COUNTS.values()) - 1
    assert all(row.label in ("", names[row.id[0]]) for row in run.split)
    assert sum(row.split == "unlabeled" for row in run.split) == len(range(1, sum(COUNTS.values()), 3))
    with pytest.raises(CsdaError, match="other images or classes"):
        open_folder(unlabeled_folder, tmp_path / "review", ["a", "b"])


def test_the_table_is_read_back(reviewed: Run, tiny_images: Path, tmp_path: Path) -> None:
    """By `csda train`, as the same split; and by anybody who reads CSV."""
    images = Path(shutil.copytree(tiny_images, tmp_path / "images"))
    words = ["labels", "export", str(reviewed.folder), "--out", str(images / "labels.csv")]
    assert CliRunner().invoke(app, words).exit_code == 0
    with (images / "labels.csv").open(newline="") as file:
        rows = {row["image"]: row for row in csv.DictReader(file)}
    one, two, three, _, five, _ = [row.id for row in reviewed.split if row.split == "unlabeled"][:6]
    assert [rows[image]["label"] for image in (one, two, three)] == ["rare", "label", "common"]
    assert rows[one]["who"] == "me"
    assert five not in rows
    dataset = load_dataset(images)
    found = {record.id: (record.part, record.label) for record in dataset.records if record.id != five}
    index = {name: position for position, name in enumerate(dataset.classes)}
    assert found == {
        image: (row["split"], index[row["label"]] if row["label"] else None) for image, row in rows.items()
    }
    printed = CliRunner().invoke(app, ["labels", "export", str(reviewed.folder), "--prefix", "http://images/"])
    assert printed.stdout.splitlines()[1].startswith("http://images/")


def test_the_report_says_what_changed(reviewed: Run, tiny_images: Path, tmp_path: Path) -> None:
    words = ["train", "--labels-from", str(reviewed.folder), "--out", str(tmp_path / "next"), "-q"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "What the new labels changed" in done.stdout
    assert "labels from the review of" in (tmp_path / "next" / "report.html").read_text()
    assert "Compared with" in (tmp_path / "next" / "labels.html").read_text()


def test_a_folder_without_labels_needs_classes(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "images" / "a.png")
    with pytest.raises(CsdaError, match="--classes"):
        open_folder(tmp_path / "images", tmp_path / "review")
    assert not (tmp_path / "review" / "labels.csv").exists()
    with pytest.raises(CsdaError, match="two names"):
        open_folder(tmp_path / "images", tmp_path / "review", ["a"])


def test_what_a_source_sets_aside_is_not_offered(tmp_path: Path, tiny_images: Path) -> None:
    for part in ("train", "test"):
        shutil.copytree(tiny_images / "rare", tmp_path / "images" / part / "rare")
        shutil.copytree(tiny_images / "label", tmp_path / "images" / part / "label")
    session = open_folder(tmp_path / "images", tmp_path / "review")
    assert {name.split("/")[0] for name in session.names} == {"train"}
    session.close()
