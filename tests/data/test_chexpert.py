"""CheXpert: the real lists of the GLM paper where they are, and the layout of the distribution in small."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from csda.data import load_dataset, recognise, split_dataset
from csda.data.chexpert import CLASSES, LATENT_MIXING_ORDER
from csda.data.csv_files import read_flags
from csda.errors import ConfigError, DataError

HEADER = f"Path,Sex,Age,Frontal/Lateral,AP/PA,{','.join(CLASSES)}\n"
ROWS = 60


def path(patient: int, view: str = "view1_frontal", folder: str = "train") -> str:
    return f"{folder}/patient{patient:05d}/study1/{view}.jpg"


def row(image: str, cells: dict[str, str], side: str = "Frontal") -> str:
    return f"CheXpert-v1.0-small/{image},Male,60,{side},AP,{','.join(cells.get(name, '') for name in CLASSES)}\n"


def finding(patient: int) -> dict[str, str]:
    return {CLASSES[patient % 14]: "1.0", CLASSES[(patient + 1) % 14]: "0.0"}


@pytest.fixture
def chexpert(tmp_path: Path, make_images: Callable[..., Path]) -> Path:
    """Patients 1 to 60 with a frontal view each; a lateral view, an uncertain one, and two images of valid.csv."""
    names = [path(p) for p in range(1, ROWS + 1)] + [
        path(61),
        path(1, "view2_lateral"),
        path(70, folder="valid"),
        path(71, folder="valid"),
    ]
    root = make_images(tmp_path / "CheXpert-v1.0-small", names)
    (root / "train.csv").write_text(
        HEADER
        + "".join(row(path(p), finding(p)) for p in range(1, ROWS + 1))
        + row(path(61), {"Edema": "-1.0", "Fracture": "1.0"})
        + row(path(1, "view2_lateral"), finding(1), "Lateral")
    )
    (root / "valid.csv").write_text(
        HEADER + row(path(70, folder="valid"), {"Edema": "1.0"}) + row(path(71, folder="valid"), {})
    )
    return root


def write_list(file: Path, patients: range) -> None:
    file.parent.mkdir(exist_ok=True)
    lines = []
    for patient in patients:
        positive = CLASSES[patient % 14]
        flags = " ".join("1" if name == positive else "0" for name in LATENT_MIXING_ORDER)
        lines.append(f"{path(patient).removeprefix('train/').replace('/', '_')} {flags}\n")
    file.write_text("".join(lines))


@pytest.fixture
def lists(tmp_path: Path) -> Path:
    folder = tmp_path / "lists"
    write_list(folder / "train_10.txt", range(1, 16))
    write_list(folder / "train_20.txt", range(1, 21))
    write_list(folder / "train_20_val_5.txt", range(21, 35))
    write_list(folder / "train_20_test_10.txt", range(35, 50))
    return folder


# --- real lists -----------------------------------------------------------------------------------------------------


def test_real_lists_on_a_made_set(real_data: Path, tmp_path: Path) -> None:
    """Sizes, order of the labels, and patients of the lists, with a train.csv that names just their images."""
    folder = real_data / "chexpert" / "splits_latent_mixing"
    entries = {file.stem: read_flags(file, 14) for file in folder.glob("*.txt")}
    assert {stem: len(rows) for stem, rows in entries.items()} == {
        "train_100": 3737, "train_200": 4697, "train_300": 5591, "train_400": 6472, "train_500": 7311,
        "train_500_val_5000": 5001, "train_500_test_10000": 10_001,
    }  # fmt: skip
    names = {name: flags for rows in entries.values() for _, name, flags in rows}
    root = tmp_path / "CheXpert-v1.0-small"
    rows = []
    for name, flags in names.items():
        image = "train/" + name.replace("_", "/", 2)
        rows.append(row(image, {LATENT_MIXING_ORDER[flag]: "1.0" for flag in flags}))
    first = root / "train" / next(iter(names)).replace("_", "/", 2)
    first.parent.mkdir(parents=True)
    first.touch()
    (root / "train.csv").write_text(HEADER + "".join(rows) + row(path(99999), {}))
    for labels, images in ((100, 3737), (500, 7311)):
        dataset = load_dataset(root, split=folder, labels=labels)
        split = split_dataset(dataset, labels=labels)
        assert [len(records) for _, records in split.parts()] == [images, 1, 5001, 10_001]
        assert not any("other labels" in remark for remark in dataset.remarks)
        count = Counter(CLASSES[index] for record in split.labeled for index in record.label or ())  # type: ignore[union-attr]
        assert count["Pleural Effusion"] == count["Support Devices"] == labels
    assert count["Pleural Other"] == 250, "the rarest label has fewer"
    assert "440 of 3691 test groups also occur in training" in split.remarks[-1]


# --- made -----------------------------------------------------------------------------------------------------------


def test_made_set(chexpert: Path) -> None:
    assert recognise(chexpert) == recognise(chexpert.parent) == "chexpert"
    dataset = load_dataset(chexpert.parent)
    assert (dataset.classes, dataset.multi_label) == (CLASSES, True)
    assert Counter(record.part for record in dataset.records) == {"train": ROWS, "val": 2}
    first, last = dataset.records[0], dataset.records[-1]
    assert (first.id, first.label, first.group) == (path(1), (1,), "patient00001")
    assert first.path is not None
    assert first.path.is_file()
    assert last.label == ()
    assert dataset.remarks == ("1 images with uncertain labels are left out",)


@pytest.mark.parametrize(("uncertain", "label"), [("zeros", (12,)), ("ones", (5, 12))])
def test_uncertain_cells(uncertain: str, label: tuple[int, ...], chexpert: Path) -> None:
    records = {r.id: r for r in load_dataset(chexpert, uncertain=uncertain).records}  # type: ignore[arg-type]
    assert records[path(61)].label == label
    assert path(1, "view2_lateral") not in records


def test_made_lists(chexpert: Path, lists: Path) -> None:
    dataset = load_dataset(chexpert, split=lists, labels=10)
    split = split_dataset(dataset, labels=10)
    assert [len(records) for _, records in split.parts()] == [15, 11, 14, 15]
    assert [record.label for record in split.labeled] == [(patient % 14,) for patient in range(1, 16)]
    assert {record.id for record in split.unlabeled} == {path(patient) for patient in range(50, 61)}
    assert dataset.remarks == ("6 training images with uncertain labels or in other lists are left out",)


def test_made_lists_with_another_number_of_labels(chexpert: Path, lists: Path) -> None:
    split = split_dataset(load_dataset(chexpert, split=lists, labels=18), labels=18)
    assert [len(records) for _, records in split.parts()] == [18, 13, 14, 15]


def test_labels_of_the_lists_count(chexpert: Path, lists: Path) -> None:
    (lists / "train_10.txt").write_text(
        "".join(f"patient{p:05d}_study1_view1_frontal.jpg {' '.join('1' * 14)}\n" for p in (1, 2))
    )
    dataset = load_dataset(chexpert, split=lists, labels=10)
    assert dataset.records[0].label == tuple(range(14))
    assert dataset.remarks[1] == "2 images have other labels in the lists than in train.csv; the lists are used"


def test_lists_that_cannot_be(chexpert: Path, lists: Path) -> None:
    write_list(lists / "train_10.txt", range(30, 40))
    with pytest.raises(DataError, match=r"train_10.txt, row 1: patient00030_.* is in the val list, too"):
        load_dataset(chexpert, split=lists, labels=10)
    write_list(lists / "train_10.txt", range(900, 901))
    with pytest.raises(DataError, match=r"train_10.txt, row 1: patient00900_.* is not a frontal view of train.csv"):
        load_dataset(chexpert, split=lists, labels=10)
    (lists / "train_20_val_5.txt").unlink()
    with pytest.raises(DataError, match="need at least one train file, a val and a test file"):
        load_dataset(chexpert, split=lists, labels=10)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (row(path(80), {"Edema": "maybe"}), "row 64: column `Edema` must be 1, 0, -1 or empty"),
        (row(path(80), {}, "Oblique"), "row 64: 'Oblique' is neither Frontal nor Lateral"),
        (row("train/../secret/x.jpg", {}), "row 64: .* is not a path of CheXpert"),
        (row(path(2), {"Edema": "1.0"}), "row 64: differs from row 3 for"),
    ],
)
def test_table_that_cannot_be(line: str, message: str, chexpert: Path) -> None:
    with (chexpert / "train.csv").open("a") as file:
        file.write(line)
    with pytest.raises(DataError, match=message):
        load_dataset(chexpert)


def test_images_that_are_not_there(chexpert: Path) -> None:
    (chexpert / path(1)).unlink()
    with pytest.raises(DataError, match=r"is missing; unpack the images beside train\.csv"):
        load_dataset(chexpert)


def test_setting_of_another_source_is_refused(tmp_path: Path, make_images: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="the source folder has no setting `uncertain`"):
        load_dataset(make_images(tmp_path, ["a/1.png"]), uncertain="ones")
