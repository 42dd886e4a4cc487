"""ChestX-ray14: the real files where they are, and the same layout in small."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from csda.data import load_dataset, recognise, split_dataset
from csda.data.nih_chestxray14 import CLASSES, PUBLISHED
from csda.errors import DataError

HEADER = (
    "Image Index,Finding Labels,Follow-up #,Patient ID,Patient Age,Patient Gender,View Position,"
    "OriginalImage[Width,Height],OriginalImagePixelSpacing[x,y]\n"
)


def row(patient: int, visit: int, findings: str) -> str:
    return f"{patient:08d}_{visit:03d}.png,{findings},{visit},{patient},57,M,PA,2682,2749,0.143,0.143\n"


@pytest.fixture
def nih(tmp_path: Path, make_images: Callable[..., Path]) -> Path:
    rows = [(1, 0, "Hernia|Mass"), (1, 1, "No Finding"), (2, 0, "Mass"), (3, 0, "Atelectasis"), (4, 0, "Edema")]
    root = make_images(tmp_path, [f"images_001/images/{p:08d}_{visit:03d}.png" for p, visit, _ in rows[:-1]])
    (root / "Data_Entry_2017_v2020.csv").write_text(HEADER + "".join(row(*entry) for entry in rows))
    return root


def test_real_counts(real_data: Path) -> None:
    dataset = load_dataset(real_data / "nih_chestxray14")
    assert (dataset.name, dataset.multi_label, len(dataset.records)) == ("nih_chestxray14", True, 4999)
    assert len({record.group for record in dataset.records}) == 1335
    count = Counter(CLASSES[index] for record in dataset.records for index in record.label or ())  # type: ignore[union-attr]
    assert {name: count[name] for name in ("Infiltration", "Effusion", "Atelectasis", "Pneumonia", "Hernia")} == {
        "Infiltration": 830, "Effusion": 487, "Atelectasis": 460, "Pneumonia": 65, "Hernia": 27,
    }  # fmt: skip
    assert sum(record.label == () for record in dataset.records) == 2754


def test_parts_of_table6_are_as_the_results_count_them(real_data: Path) -> None:
    dataset = load_dataset(real_data / "nih_chestxray14")
    for labels, labeled in (("5% of groups", 313), ("50% of groups", 1923)):
        split = split_dataset(dataset, labels=labels, by="group", seed=0)
        assert (len(split.labeled), len(split.val), len(split.test)) == (labeled, 500, 1000)
        assert len({record.group for record in split.val}) == 89


@pytest.mark.parametrize("by", ["image", "group"])
def test_every_finding_is_in_every_part_of_the_real_set(by: str, real_data: Path) -> None:
    split = split_dataset(load_dataset(real_data / "nih_chestxray14"), labels="10%", by=by)  # type: ignore[arg-type]
    assert [len(records) for _, records in split.parts()] == [350, 3149, 500, 1000]
    for part in (split.labeled, split.val, split.test):
        assert {index for record in part for index in record.label or ()} == set(range(14))  # type: ignore[union-attr]


def test_made_set(nih: Path) -> None:
    assert recognise(nih) == "nih_chestxray14"
    dataset = load_dataset(nih)
    assert {record.id: (record.label, record.group) for record in dataset.records} == {
        "00000001_000.png": ((4, 13), "1"),
        "00000001_001.png": ((), "1"),
        "00000002_000.png": ((4,), "2"),
        "00000003_000.png": ((0,), "3"),
    }
    assert dataset.remarks == ("1 images that Data_Entry_2017_v2020.csv names are not here and are left out",)
    assert set(CLASSES) | {"(none)", "images", "groups"} == set(PUBLISHED)


def test_official_lists(nih: Path) -> None:
    (nih / "train_val_list.txt").write_text("00000001_000.png\n00000001_001.png\n00000009_000.png\n")
    (nih / "test_list.txt").write_text("00000002_000.png")
    dataset = load_dataset(nih, split=[nih / "train_val_list.txt", nih / "test_list.txt"])
    assert [record.part for record in dataset.records] == ["train", "train", "test"]
    assert dataset.remarks[-1] == "1 image is in no list and left out"
    (nih / "test_list.txt").write_text("00000001_000.png")
    with pytest.raises(DataError, match=r"test_list.txt, row 1: 00000001_000.png is in both lists"):
        load_dataset(nih, split=[nih / "train_val_list.txt", nih / "test_list.txt"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (row(5, 0, "Measles"), "row 7: 'Measles' are not findings of ChestX-ray14"),
        (row(1, 0, "Mass"), "row 7: differs from row 2 for 00000001_000.png"),
        ("00000001_002.png,Mass\n", "row 7: 2 cells where the header has 11"),
    ],
)
def test_entries_that_cannot_be(line: str, message: str, nih: Path) -> None:
    with (nih / "Data_Entry_2017_v2020.csv").open("a") as file:
        file.write(line)
    with pytest.raises(DataError, match=message):
        load_dataset(nih)


def test_no_image_at_all(tmp_path: Path) -> None:
    (tmp_path / "Data_Entry_2017.csv").write_text(HEADER + row(1, 0, "Mass"))
    with pytest.raises(DataError, match="holds none of the images"):
        load_dataset(tmp_path)
