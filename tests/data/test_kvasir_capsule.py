"""Kvasir-Capsule: the official lists where they are, on made images, and the same layout in small."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from csda.data import kvasir_capsule, load_dataset, recognise, split_dataset
from csda.data.kvasir_capsule import CLASSES, PUBLISHED
from csda.data.tree import ImageTree
from csda.errors import DataError

FOLDERS = {
    "Blood": "Blood - fresh", "Erythematous": "Erythema", "Foreign Bodies": "Foreign Body",
    "Ileo-cecal valve": "Ileocecal Valve", "Normal": "Normal Clean Mucosa",
}  # fmt: skip
"""Where the folders have other names than the lists."""


@pytest.fixture
def kvasir(tmp_path: Path, make_images: Callable[..., Path]) -> Path:
    """Ten frames of each class, two of each of five videos."""
    frames = [f"labelled_images/{name}/video{v}_{10 * c + f}.jpg" for c, name in enumerate(CLASSES) for v in range(5)
              for f in range(2)]  # fmt: skip
    root = make_images(tmp_path / "kvasir", frames)
    for fold, videos in (("split_0.csv", "012"), ("split_1.csv", "34")):
        rows = [f"video{v}_{10 * c + f}.jpg,{'Normal' if 'Normal' in CLASSES[c] else CLASSES[c]}\n" for v in videos
                for c in range(3, len(CLASSES)) for f in range(2)]  # fmt: skip
        (root / fold).write_text("filename,label\n" + "".join(rows))
    return root


def test_real_lists(real_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All frames that the lists name, as if they lay in the folders of their classes."""
    lists = real_data / "kvasir_capsule" / "official_splits"
    images = []
    for path in sorted(lists.glob("*.csv")):
        with path.open() as file:
            images += [
                f"{FOLDERS.get(line['label'], line['label'])}/{line['filename']}" for line in csv.DictReader(file)
            ]
    monkeypatch.setattr(kvasir_capsule, "scan_images", lambda root: ImageTree(root, tuple(images), ()))
    dataset = load_dataset(tmp_path, "kvasir_capsule", split=lists)
    assert len(dataset.records) == 47_161
    assert Counter(record.part for record in dataset.records) == {"train": 23_061, "test": 24_100}
    count = Counter(dataset.classes[record.label] for record in dataset.records)  # type: ignore[index]
    few = ("Ampulla of vater", "Blood - hematin", "Polyp")
    assert count == {name: PUBLISHED[name] for name in CLASSES if name not in few}
    assert dataset.remarks == ("8 frames lie in two class folders and count as two images",)
    split = split_dataset(dataset, labels="5%")
    assert [len(records) for _, records in split.parts()] == [1038, 19_717, 2306, 24_100]


def test_made_set_by_image_and_by_video(kvasir: Path) -> None:
    assert recognise(kvasir) == recognise(kvasir / "labelled_images") == "kvasir_capsule"
    dataset = load_dataset(kvasir)
    assert dataset.classes == CLASSES
    assert dataset.records[0].id == "Ampulla of vater/video0_0.jpg"
    assert {record.group for record in dataset.records} == {f"video{v}" for v in range(5)}
    split = split_dataset(dataset, by="image")
    assert [len(records) for _, records in split.parts()] == [98, 0, 14, 28]
    (remark,) = split.remarks
    assert "5 of 5 test groups also occur in training" in remark
    by_video = split_dataset(dataset, by="group")
    assert [len(records) for _, records in by_video.parts()] == [84, 0, 28, 28]
    assert by_video.remarks == ()
    assert split_dataset(dataset) == by_video


def test_made_lists(kvasir: Path) -> None:
    folds = [kvasir / "split_0.csv", kvasir / "split_1.csv"]
    dataset = load_dataset(kvasir, split=folds)
    assert dataset.classes == CLASSES[3:]
    assert Counter(record.part for record in dataset.records) == {"train": 66, "test": 44}
    assert {record.group for record in dataset.records if record.part == "test"} == {"video3", "video4"}
    assert Counter(record.part for record in load_dataset(kvasir, split=folds[::-1]).records) == {
        "test": 66,
        "train": 44,
    }
    assert dataset.remarks == ("30 images are in no list and left out",)
    with pytest.raises(DataError, match="expected two lists"):
        load_dataset(kvasir, split=folds[:1])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("video9_1.jpg,Ulcer", "row 46: video9_1.jpg is no image of"),
        ("video0_41.jpg,Erosion", "row 46: video0_41.jpg is in both lists"),
        (
            "video4_41.jpg,Ulcer",
            "row 46: video4_41.jpg is called Ulcer and lies in Erosion/video4_41.jpg, unlike others",
        ),
    ],
)
def test_list_that_cannot_be(line: str, message: str, kvasir: Path) -> None:
    with (kvasir / "split_1.csv").open("a") as file:
        file.write(line)
    with pytest.raises(DataError, match=message):
        load_dataset(kvasir, split=[kvasir / "split_0.csv", kvasir / "split_1.csv"])


def test_frame_in_two_classes(kvasir: Path, make_images: Callable[..., Path]) -> None:
    make_images(kvasir / "labelled_images" / "Ulcer", ["video3_43.jpg", "video4_40.jpg"])
    with (kvasir / "split_1.csv").open("a") as file:
        file.write("video4_40.jpg,Ulcer\n")
    dataset = load_dataset(kvasir, split=[kvasir / "split_0.csv", kvasir / "split_1.csv"])
    twice = [record for record in dataset.records if record.id.endswith("video4_40.jpg")]
    assert [dataset.classes[record.label] for record in twice] == ["Erosion", "Ulcer"]  # type: ignore[index]
    assert {record.part for record in twice} == {"test"}
    assert dataset.remarks[0] == "1 frames lie in two class folders and count as two images"
