"""HAM10000: the real files where they are, and the same layout in small."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from csda.data import load_dataset, recognise, split_dataset
from csda.data.ham10000 import CLASSES, PUBLISHED
from csda.data.records import Dataset
from csda.errors import DataError

MakeImages = Callable[..., Path]

IMAGES = 280
"""Forty of each class, in the order of the classes over and over; two images a lesion."""


def name(number: int) -> str:
    return f"ISIC_{24306 + number:07d}"


def write_list(path: Path, numbers: list[int]) -> None:
    path.parent.mkdir(exist_ok=True)
    flags = (" ".join("1" if number % 7 == position else "0" for position in range(7)) for number in numbers)
    path.write_text("".join(f"{name(number)}.jpg  {row} \n" for number, row in zip(numbers, flags, strict=True)))


@pytest.fixture
def ham(tmp_path: Path, make_images: MakeImages) -> Path:
    """The layout of the distribution, with lists as those of the Neighbor Matching paper; three images are in none."""
    root = make_images(
        tmp_path / "ham", [f"HAM10000_images_part_{1 + number % 2}/{name(number)}.jpg" for number in range(IMAGES)]
    )
    rows = [f"HAM_{number // 14 * 7 + number % 7:07d},{name(number)},{CLASSES[number % 7].lower()},histo,60.0,male,back"
            for number in range(IMAGES)]  # fmt: skip
    (root / "HAM10000_metadata.csv").write_text(
        "lesion_id,image_id,dx,dx_type,age,sex,localization\n" + "\n".join(rows) + "\n"
    )
    numbers = list(range(IMAGES - 3))
    lists = root / "lists"
    write_list(lists / "Test.txt", numbers[:28] + numbers[42:49])  # the last seven lesions go on in training
    write_list(lists / "Val.txt", numbers[28:42])
    write_list(lists / "Train20.txt", numbers[49:68])
    write_list(lists / "Train_unl20.txt", numbers[68:])
    write_list(lists / "Train40.txt", numbers[237:])
    write_list(lists / "Train_unl40.txt", numbers[49:237])
    return root


def count(dataset: Dataset) -> dict[str, int]:
    counts = Counter(record.label for record in dataset.records)
    return {name: counts[position] for position, name in enumerate(dataset.classes)}


def sizes(root: Path, lists: object, labels: int | None) -> dict[str, int]:
    dataset = load_dataset(root, split=lists, labels=labels)  # type: ignore[arg-type]
    return {part: len(records) for part, records in split_dataset(dataset, labels=labels).parts()}


# --- real -----------------------------------------------------------------------------------------------------------


def test_published_counts(real_data: Path) -> None:
    dataset = load_dataset(real_data / "ham10000")
    assert dataset.name == "ham10000"
    assert dataset.classes == ("MEL", "NV", "BCC", "AKIEC", "BKL", "DF", "VASC")
    found = count(dataset) | {"images": len(dataset.records), "groups": len({r.group for r in dataset.records})}
    assert found == PUBLISHED
    assert all(record.path is not None and record.path.is_file() for record in dataset.records[::500])


@pytest.mark.parametrize(("labels", "rows"), [(350, 349), (600, 599), (800, 799), (1200, 1199)])
def test_published_lists(labels: int, rows: int, real_data: Path) -> None:
    root = real_data / "ham10000"
    dataset = load_dataset(root, split=root / "splits_neighbor_matching", labels=labels)
    split = split_dataset(dataset, split=root / "splits_neighbor_matching", labels=labels)
    assert {part: len(records) for part, records in split.parts()} == {
        "labeled": rows, "unlabeled": 10_015 - 4 - 69 - 349 - rows, "val": 69, "test": 349,
    }  # fmt: skip
    assert dataset.remarks == ("4 images are in no list and left out",)
    assert split.remarks == (
        "split by image although groups are known: 25 of 68 validation groups and 176 of 330 test groups also occur in "
        "training, 13 in validation and test",
    )
    assert len(split.truth) == len(split.unlabeled)


def test_175_labels_are_drawn_in_the_pool_of_the_lists(real_data: Path) -> None:
    root = real_data / "ham10000"
    dataset = load_dataset(root, split=root / "splits_neighbor_matching", labels=175)
    split = split_dataset(dataset, labels=175, seed=3)
    assert [len(records) for _, records in split.parts()] == [175, 9420, 69, 349]
    assert Counter(record.label for record in split.labeled) == {0: 19, 1: 121, 2: 8, 3: 5, 4: 19, 5: 1, 6: 2}
    assert {record.id for record in split.test} == {
        line.split(".")[0] for line in (root / "splits_neighbor_matching/Test.txt").read_text().splitlines()
    }


def test_rule_of_the_paper_on_the_real_set(real_data: Path) -> None:
    split = split_dataset(load_dataset(real_data / "ham10000"), labels=800, by="group")
    assert [len(records) for _, records in split.parts()] == [800, 8795, 70, 350]
    assert split.remarks == ()


# --- made -----------------------------------------------------------------------------------------------------------


def test_made_set(ham: Path) -> None:
    assert recognise(ham) == "ham10000"
    dataset = load_dataset(ham)
    assert count(dataset) == dict.fromkeys(CLASSES, 40)
    assert len({record.group for record in dataset.records}) == IMAGES // 2
    assert dataset.records[8].id == name(8)
    assert dataset.records[8].path == ham / "HAM10000_images_part_1" / f"{name(8)}.jpg"


def test_second_copy_in_a_common_archive_is_not_seen(ham: Path, make_images: MakeImages) -> None:
    make_images(ham / "ham10000_images_part_1_copy", [f"{name(0)}.jpg"])
    assert len(load_dataset(ham).records) == IMAGES


def test_made_lists(ham: Path) -> None:
    assert sizes(ham, ham / "lists", 20) == {"labeled": 19, "unlabeled": 209, "val": 14, "test": 35}
    assert sizes(ham, ham / "lists", 40) == {"labeled": 40, "unlabeled": 188, "val": 14, "test": 35}
    dataset = load_dataset(ham, split=ham / "lists", labels=20)
    assert dataset.remarks == ("3 images are in no list and left out",)
    assert split_dataset(dataset).remarks == (
        "split by image although groups are known: 0 of 7 validation groups and 7 of 21 test groups also occur in "
        "training",
    )


def test_made_lists_with_another_number_of_labels(ham: Path) -> None:
    assert sizes(ham, ham / "lists", 30) == {"labeled": 30, "unlabeled": 198, "val": 14, "test": 35}
    assert sizes(ham, ham / "lists", None) == {"labeled": 228, "unlabeled": 0, "val": 14, "test": 35}


def test_made_lists_one_by_one(ham: Path) -> None:
    files = [ham / "lists" / file for file in ("Train20.txt", "Train_unl20.txt", "Val.txt", "Test.txt")]
    assert sizes(ham, files, None) == {"labeled": 19, "unlabeled": 209, "val": 14, "test": 35}
    assert sizes(ham, ",".join(map(str, files)), None) == {"labeled": 19, "unlabeled": 209, "val": 14, "test": 35}
    del files[1]
    assert sizes(ham, files, 20) == {"labeled": 19, "unlabeled": 212, "val": 14, "test": 35}
    with pytest.raises(DataError, match="need at least one train file, a val and a test file"):
        load_dataset(ham, split=files[:2])


def test_list_that_cannot_be(ham: Path) -> None:
    lists = ham / "lists"
    write_list(lists / "Val.txt", [9999])
    with pytest.raises(DataError, match=r"Val.txt, row 1: ISIC_0034305.jpg is not an image of the data set"):
        load_dataset(ham, split=lists)
    write_list(lists / "Val.txt", [0, 1])
    with pytest.raises(DataError, match=r"row 1: .* is in the test part, too"):
        load_dataset(ham, split=lists)
    (lists / "Val.txt").write_text(f"{name(50)}.jpg 0 0 0 0 0 0 1\n")
    with pytest.raises(DataError, match=r"Val.txt, row 1: .* has another label in the metadata"):
        load_dataset(ham, split=lists)
    (lists / "Extra.txt").touch()
    with pytest.raises(DataError, match=r"Extra.txt: its name does not say which part it is"):
        load_dataset(ham, split=lists)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (f"HAM_1,{name(0)},melanom,,,,", "row 282: 'melanom' is not a diagnosis of HAM10000"),
        ("HAM_1,ISIC_9999999,mel,,,,", "row 282: no image is called 'ISIC_9999999'"),
        (f"HAM_1,{name(0)},mel,,,,", f"row 282: differs from row 2 for {name(0)}"),
    ],
)
def test_metadata_that_cannot_be(row: str, message: str, ham: Path) -> None:
    with (ham / "HAM10000_metadata.csv").open("a") as file:
        file.write(row + "\n")
    with pytest.raises(DataError, match=message):
        load_dataset(ham)


def test_source_that_the_folder_is_not(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no HAM10000_metadata\.csv"):
        load_dataset(tmp_path, "ham10000")
