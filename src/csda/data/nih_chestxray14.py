"""`nih_chestxray14`: frontal chest X-rays with fourteen findings, as the NIH Clinical Center distributes them.

`Data_Entry_2017*.csv` and the images in any folders below; images of missing archives are left out. The
images of one patient are a group, and `No Finding` is the empty set of labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from csda.data.csv_files import JOIN, enter, read_table, read_text
from csda.data.records import Dataset, Part, Record
from csda.data.tree import scan_images
from csda.errors import DataError

CLASSES = (
    "Atelectasis", "Cardiomegaly", "Effusion", "Infiltration", "Mass", "Nodule", "Pneumonia", "Pneumothorax",
    "Consolidation", "Edema", "Emphysema", "Fibrosis", "Pleural_Thickening", "Hernia",
)  # fmt: skip

NO_FINDING = "No Finding"

PUBLISHED = {
    "Atelectasis": 11_559, "Cardiomegaly": 2_776, "Effusion": 13_317, "Infiltration": 19_894, "Mass": 5_782,
    "Nodule": 6_331, "Pneumonia": 1_431, "Pneumothorax": 5_302, "Consolidation": 4_667, "Edema": 2_303,
    "Emphysema": 2_516, "Fibrosis": 1_686, "Pleural_Thickening": 3_385, "Hernia": 227, "(none)": 60_361,
    "images": 112_120, "groups": 30_805,
}  # fmt: skip
"""All twelve archives, counted in `Data_Entry_2017_v2020.csv`; Wang et al. (CVPR 2017) describe the set."""


def recognise(root: Path) -> bool:
    return _entries(root) is not None


def load(root: Path, *, lists: Sequence[Path] = ()) -> Dataset:
    """Read the data set. `lists` are the official `train_val_list.txt` and `test_list.txt`."""
    entries = _entries(root)
    if entries is None:
        raise DataError(f"{root} has no Data_Entry_2017 CSV; name the folder that holds it")
    table = read_table(entries)
    image_at, findings_at, patient_at = (table.require(n) for n in ("Image Index", "Finding Labels", "Patient ID"))
    tree = scan_images(root)
    names = {image.rpartition("/")[2] for image in tree.images}
    index = {name: position for position, name in enumerate(CLASSES)}
    rows: dict[str, tuple[int, Record]] = {}
    missing = 0
    for row, cells in table.rows:
        where = f"{entries}, row {row}"
        image, findings = cells[image_at].strip(), cells[findings_at].strip()
        present = [] if findings == NO_FINDING else findings.split(JOIN)
        if not index.keys() >= set(present):
            raise DataError(
                f"{where}: {findings!r} are not findings of ChestX-ray14; the CSV is another one or damaged"
            )
        if image not in names:
            missing += 1
            continue
        label = tuple(sorted({index[name] for name in present}))
        record = Record(image, tree.root / tree.find(image, where), label, cells[patient_at].strip() or None)
        enter(rows, image, record, entries, row)
    if not rows:
        raise DataError(f"{root} holds none of the images that {entries.name} names; unpack the archives there")
    remarks = (f"{missing} images that {entries.name} names are not here and are left out",) if missing else ()
    records = tuple(record for _, record in rows.values())
    dataset = Dataset("nih_chestxray14", CLASSES, records, multi_label=True, root=root, remarks=remarks)
    return _with_lists(dataset, lists) if lists else dataset


def _entries(root: Path) -> Path | None:
    return next(iter(sorted(root.glob("Data_Entry_2017*.csv"))), None)


def _with_lists(dataset: Dataset, lists: Sequence[Path]) -> Dataset:
    parts: dict[str, Part] = {}
    for path in lists:
        if path.stem not in ("train_val_list", "test_list"):
            raise DataError(f"{path}: the official lists are called train_val_list.txt and test_list.txt")
        part: Part = "test" if path.stem == "test_list" else "train"
        for row, image in enumerate(read_text(path).splitlines(), start=1):
            if parts.setdefault(image.strip(), part) != part:
                raise DataError(f"{path}, row {row}: {image} is in both lists; restore them")
    return dataset.in_parts(parts)
