"""`kvasir_capsule`: frames of capsule endoscopy, as Smedsrud et al. (2021) distribute them.

One folder per class with files `<video>_<frame>.jpg`, all in `labelled_images`. The frames of one video are a group.
Without lists, 20 % for test and 10 % for validation are drawn at random, as in the paper.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from csda.data.csv_files import clean_names, fold_name, read_table
from csda.data.records import Dataset, Label, Part, Record
from csda.data.tree import scan_images
from csda.errors import DataError

PUBLISHED = {
    "Ampulla of vater": 10, "Angiectasia": 866, "Blood - fresh": 446, "Blood - hematin": 12, "Erosion": 506,
    "Erythema": 159, "Foreign body": 776, "Ileocecal valve": 4_189, "Lymphangiectasia": 592,
    "Normal clean mucosa": 34_338, "Polyp": 55, "Pylorus": 1_529, "Reduced mucosal view": 2_906, "Ulcer": 854,
    "images": 47_238,
}  # fmt: skip
"""Smedsrud et al., "Kvasir-Capsule, a video capsule endoscopy dataset", Scientific Data 8:142 (2021)."""

CLASSES = tuple(name for name in PUBLISHED if name != "images")

PARTS: tuple[Part, Part] = ("train", "test")
"""The parts of the first and the second list."""


def recognise(root: Path) -> bool:
    images = _images(root)
    known = {fold_name(name) for name in CLASSES}
    return images.is_dir() and sum(fold_name(path.name) in known for path in images.iterdir()) > len(known) / 2


def load(root: Path, *, lists: Sequence[Path] = ()) -> Dataset:
    """Read the data set. Of two official lists the first is for training and the second for test.

    The lists leave out three classes with too few frames, so these are left out here, too.
    """
    tree = scan_images(_images(root))
    folders = {image: image.partition("/")[0] for image in tree.images if "/" in image}
    clean = clean_names((folder, f"{tree.root}/{folder}") for folder in folders.values())
    if not clean:
        raise DataError(f"{tree.root} has no class folders with images; name the folder that holds labelled_images")
    published = {fold_name(name): name for name in CLASSES}
    named = {raw: published.get(fold_name(name), name) for raw, name in clean.items()}
    classes = tuple(sorted(set(named.values())))
    index = {raw: classes.index(name) for raw, name in named.items()}
    records = tuple(Record(image, tree.root / image, index[folder], _video(image)) for image, folder in folders.items())
    twice = len(records) - len({_frame(record.id) for record in records})
    remarks = (f"{twice} frames lie in two class folders and count as two images",) if twice else ()
    dataset = Dataset("kvasir_capsule", classes, records, root=root, remarks=remarks)
    return _with_lists(dataset, lists) if lists else dataset


def _images(root: Path) -> Path:
    return root / "labelled_images" if (root / "labelled_images").is_dir() else root


def _frame(image: str) -> str:
    return image.rpartition("/")[2]


def _video(image: str) -> str | None:
    return _frame(image).rpartition(".")[0].rpartition("_")[0] or None


def _with_lists(dataset: Dataset, lists: Sequence[Path]) -> Dataset:
    """Assign parts by the official lists.

    Their class names differ from the folder names; each must map to one folder.
    """
    if len(lists) != len(PARTS):
        raise DataError(f"{lists[0].parent}: expected two lists, for training and test, not {len(lists)}")
    by_frame: dict[str, list[Record]] = defaultdict(list)
    for record in dataset.records:
        by_frame[_frame(record.id)].append(record)
    entries: list[tuple[Part, str, str, str]] = []
    for part, path in zip(PARTS, lists, strict=True):
        table = read_table(path)
        frame_at, label_at = table.require("filename"), table.require("label")
        entries += [(part, f"{path}, row {row}", cells[frame_at].strip(), cells[label_at]) for row, cells in table.rows]

    meant: dict[str, Label] = {}
    for _, where, frame, name in entries:
        if frame not in by_frame:
            raise DataError(f"{where}: {frame} is no image of {dataset.root}; restore the list")
        if len(by_frame[frame]) == 1 and (label := by_frame[frame][0].label) is not None:
            meant.setdefault(name, label)
    parts: dict[str, Part] = {}
    for part, where, frame, name in entries:
        image = next((record.id for record in by_frame[frame] if record.label == meant.get(name)), None)
        if image is None:
            raise DataError(f"{where}: {frame} is called {name} and lies in {by_frame[frame][0].id}, unlike others")
        if parts.setdefault(image, part) != part:
            raise DataError(f"{where}: {frame} is in both lists; restore them")
    kept = {label: position for position, label in enumerate(sorted(set(meant.values())))}
    listed = dataset.in_parts(parts)
    records = (replace(record, label=kept[record.label]) for record in listed.records if record.label is not None)
    classes = (name for label, name in enumerate(dataset.classes) if label in kept)
    return replace(listed, classes=tuple(classes), records=tuple(records))
