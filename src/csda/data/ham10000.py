"""`ham10000`: dermoscopy of seven kinds of skin lesions, as Tschandl, Rosendahl and Kittler (2018) distribute it.

`HAM10000_metadata.csv` (`lesion_id,image_id,dx,…`) and the images in `HAM10000_images_part_1` and `_2`. The images of
one lesion are a group. Without lists the paper's rule is used: 50 test and 10 validation images of each class at
random, the rest for training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from csda.data.csv_files import enter, read_flags, read_table, sort_lists
from csda.data.records import Dataset, Part, Record
from csda.data.tree import ImageTree, scan_images
from csda.errors import DataError

CLASSES = ("MEL", "NV", "BCC", "AKIEC", "BKL", "DF", "VASC")

PUBLISHED = {
    "MEL": 1113, "NV": 6705, "BCC": 514, "AKIEC": 327, "BKL": 1099, "DF": 115, "VASC": 142,
    "images": 10_015, "groups": 7_470,
}  # fmt: skip
"""Tschandl et al., "The HAM10000 dataset", Scientific Data 5:180161 (2018), Table 1 and the metadata file."""


def recognise(root: Path) -> bool:
    return _metadata(root) is not None


def load(root: Path, *, lists: Sequence[Path] = (), labels: str | None = None) -> Dataset:
    """Read the data set. `lists` are those of the Neighbor Matching paper; `labels` chooses one of their budgets.

    For other numbers of labels, labeled images are drawn from all training images.
    """
    metadata = _metadata(root)
    if metadata is None:
        raise DataError(f"{root} has no HAM10000_metadata.csv; name the folder that holds it")
    table = read_table(metadata)
    lesion_at, image_at, diagnosis_at = (table.require(name) for name in ("lesion_id", "image_id", "dx"))
    tree = _scan(root)
    index = {name.lower(): position for position, name in enumerate(CLASSES)}
    rows: dict[str, tuple[int, Record]] = {}
    for row, cells in table.rows:
        where = f"{metadata}, row {row}"
        image, diagnosis = cells[image_at].strip(), cells[diagnosis_at].strip().lower()
        if diagnosis not in index:
            raise DataError(f"{where}: {diagnosis!r} is not a diagnosis of HAM10000 ({', '.join(index)})")
        path = tree.root / tree.find(image, where)
        record = Record(image, path, index[diagnosis], cells[lesion_at].strip() or None)
        enter(rows, image, record, metadata, row)
    records = tuple(record for _, record in rows.values())
    dataset = Dataset("ham10000", CLASSES, records, root=root, held_out=("50/class", "10/class"))
    return _with_lists(dataset, lists, labels) if lists else dataset


def _metadata(root: Path) -> Path | None:
    return next((path for path in sorted(root.glob("HAM10000_metadata*")) if path.is_file()), None)


def _scan(root: Path) -> ImageTree:
    """Only the images in the two parts, if they exist, because a common archive has every image twice."""
    trees = [scan_images(folder) for folder in sorted(root.glob("HAM10000_images_part_*")) if folder.is_dir()]
    if not trees:
        return scan_images(root)
    return ImageTree(root, tuple(f"{tree.root.name}/{image}" for tree in trees for image in tree.images), ())


# --- the lists of the Neighbor Matching paper -----------------------------------------------------------------------


def _with_lists(dataset: Dataset, lists: Sequence[Path], labels: str | None) -> Dataset:
    """Assign parts by `Train350.txt`, `Train_unl350.txt`, …, `Val.txt` and `Test.txt`."""
    pattern = r"train(?P<unl>_unl)?(?P<number>\d+)|(?P<held>val|test)"
    held_out, labeled, unlabeled, chosen = sort_lists(lists, pattern, "Train350, Train_unl350, Val or Test", labels)
    parts: dict[str, tuple[Part, str]] = {}
    known = {record.id: record for record in dataset.records}
    for part, path in held_out.items():
        _assign(parts, known, part, path)
    rest: Part = "unlabeled" if chosen else "train"
    if chosen:
        _assign(parts, known, "labeled", labeled[chosen])
        unlabeled = {number: path for number, path in unlabeled.items() if number == chosen}
        labeled = {}
    for path in (*labeled.values(), *unlabeled.values()):
        _assign(parts, known, rest, path)
    if not unlabeled:
        parts = dict.fromkeys(known, (rest, "")) | parts
    return replace(dataset.in_parts({image: part for image, (part, _) in parts.items()}), listed=bool(chosen))


def _assign(parts: dict[str, tuple[Part, str]], known: Mapping[str, Record], part: Part, path: Path) -> None:
    for row, name, flags in read_flags(path, len(CLASSES)):
        where = f"{path}, row {row}"
        image = name.rpartition(".")[0] or name
        if image not in known:
            raise DataError(f"{where}: {name} is not an image of the data set; restore the list")
        if flags != [known[image].label]:
            raise DataError(f"{where}: {name} has another label in the metadata; restore the list")
        other, other_where = parts.setdefault(image, (part, where))
        if other != part:
            raise DataError(f"{where}: {name} is in the {other} part, too ({other_where}); restore the lists")
