"""`kvasir_capsule`: frames of capsule endoscopy, as Smedsrud et al. (2021) distribute them.

One folder a class with files `<video>_<frame>.jpg`, all in `labelled_images`. The frames of one video are a group.
Without lists 20 % are for the test and 10 % for validation at random, as in the paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from csda.data.listing import clean_names, fold_name, read_table
from csda.data.records import Dataset, Part, Record
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


def recognise(root: Path) -> bool:
    images = _images(root)
    known = {fold_name(name) for name in CLASSES}
    return images.is_dir() and sum(fold_name(path.name) in known for path in images.iterdir()) > len(known) / 2


def load(root: Path, *, lists: Sequence[Path] = ()) -> Dataset:
    """Reads the set; of two official lists the first is trained on and the second is the test.

    The lists leave out three classes of which there are too few frames, and so does the set read with them.
    """
    tree = scan_images(_images(root))
    folders = {image: image.partition("/")[0] for image in tree.images if "/" in image}
    clean = clean_names((folder, f"{tree.root}/{folder}") for folder in folders.values())
    if not clean:
        raise DataError(f"{tree.root} has no class folders with images; name the folder that holds labelled_images")
    published = {fold_name(name): name for name in CLASSES}
    named = {raw: published.get(fold_name(name), name) for raw, name in clean.items()}
    classes = tuple(sorted(set(named.values())))
    records: dict[str, Record] = {}
    for image, folder in folders.items():
        frame = image.rpartition("/")[2]
        record = Record(frame, tree.root / image, classes.index(named[folder]), _video(frame))
        if records.setdefault(frame, record) is not record:
            raise DataError(f"{tree.root}: {frame} lies in {folder} and in {records[frame].path}; keep one of the two")
    dataset = Dataset("kvasir_capsule", classes, tuple(records.values()), root=root)
    return _with_lists(dataset, lists) if lists else dataset


def _images(root: Path) -> Path:
    return root / "labelled_images" if (root / "labelled_images").is_dir() else root


def _video(frame: str) -> str | None:
    return frame.rpartition(".")[0].rpartition("_")[0] or None


def _with_lists(dataset: Dataset, lists: Sequence[Path]) -> Dataset:
    """Parts by the official lists; these have class names of their own, each of which must stand for one folder."""
    if len(lists) != 2:
        raise DataError(
            f"{lists[0].parent}: expected two lists, one to train on and one for the test, not {len(lists)}"
        )
    known = {record.id: record for record in dataset.records}
    parts: dict[str, Part] = {}
    folder_class: dict[str, int] = {}
    pairs: tuple[tuple[Part, Path], ...] = (("train", lists[0]), ("test", lists[1]))
    for part, path in pairs:
        table = read_table(path)
        frame_at, label_at = table.require("filename"), table.require("label")
        for row, cells in table.rows:
            where = f"{path}, row {row}"
            frame, name = cells[frame_at].strip(), cells[label_at].strip()
            if frame not in known:
                raise DataError(f"{where}: {frame} is no image of {dataset.root}")
            label = known[frame].label
            assert isinstance(label, int)
            if folder_class.setdefault(name, label) != label:
                raise DataError(
                    f"{where}: {frame} is called {name} and lies in {dataset.classes[label]}, others of that name "
                    f"lie in {dataset.classes[folder_class[name]]}"
                )
            if parts.setdefault(frame, part) != part:
                raise DataError(f"{where}: {frame} is in both lists")
    kept = sorted(set(folder_class.values()))
    records = tuple(
        replace(record, label=kept.index(record.label), part=parts[record.id])
        for record in dataset.records
        if record.id in parts and isinstance(record.label, int)
    )
    left_out = len(dataset.records) - len(records)
    remarks = (f"{left_out} frames are in no list and are left out",) if left_out else ()
    return replace(dataset, classes=tuple(dataset.classes[i] for i in kept), records=records, remarks=remarks)
