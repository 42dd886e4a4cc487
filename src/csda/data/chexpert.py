"""`chexpert`: chest X-rays with fourteen observations, as Irvin et al. (2019) distribute them.

`train.csv` and `valid.csv` with a column `Path` that begins with the name of the distribution. Only frontal views are
read, and the images of one patient are a group. An empty cell counts as absent. A row with an uncertain cell (-1) is
removed as in the paper, or the cell is read as 0 or 1.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from csda.data.csv_files import enter, read_flags, read_table, sort_lists
from csda.data.records import Dataset, Part, Record
from csda.errors import DataError
from csda.files import open_regular

CLASSES = (
    "No Finding", "Enlarged Cardiomediastinum", "Cardiomegaly", "Lung Opacity", "Lung Lesion", "Edema",
    "Consolidation", "Pneumonia", "Atelectasis", "Pneumothorax", "Pleural Effusion", "Pleural Other", "Fracture",
    "Support Devices",
)  # fmt: skip

LATENT_MIXING_ORDER = (
    "Pleural Effusion", "Support Devices", "Pneumonia", "Fracture", "Atelectasis", "Lung Opacity",
    "Enlarged Cardiomediastinum", "Pneumothorax", "Edema", "Cardiomegaly", "Consolidation", "No Finding",
    "Lung Lesion", "Pleural Other",
)  # fmt: skip
"""The labels in the order of the lists of the GLM paper (Gyawali et al. 2020)."""

CELLS = {"": 0, "0": 0, "0.0": 0, "1": 1, "1.0": 1, "-1": -1, "-1.0": -1}

Uncertain = Literal["remove", "zeros", "ones"]


@dataclass(frozen=True, slots=True)
class _View:
    """A frontal image; `label` is None if it is removed for an uncertain cell."""

    path: str
    label: tuple[int, ...] | None

    @property
    def patient(self) -> str:
        return self.path.split("/")[1]

    @property
    def list_name(self) -> str:
        """Its name in the lists: without its folder, and with `_` for `/`."""
        return self.path.partition("/")[2].replace("/", "_")


def recognise(root: Path) -> bool:
    try:
        with open_regular(_home(root) / "train.csv") as file:
            return b"Frontal/Lateral" in file.read(4096).partition(b"\n")[0]
    except OSError:
        return False


def load(
    root: Path, *, uncertain: Uncertain = "remove", lists: Sequence[Path] = (), labels: str | None = None
) -> Dataset:
    """Read the data set. `lists` are those of the GLM paper; `labels` chooses one (100 to 500).

    Their unlabeled list was not published: it is every frontal training image without uncertain cells that is in no
    list. For other numbers of labels, labeled images are drawn from all training images.
    """
    home = _home(root)
    training = _read_views(home / "train.csv", uncertain)
    if not training:
        raise DataError(f"{home / 'train.csv'} has no frontal view; restore the file")
    if not (home / training[0].path).is_file():
        raise DataError(f"{home / training[0].path} is missing; unpack the images beside train.csv")
    if lists:
        return _with_lists(root, training, lists, labels)
    official = _read_views(home / "valid.csv", uncertain) if (home / "valid.csv").is_file() else []
    records = [_record(home, view, "train") for view in training if view.label is not None]
    records += [_record(home, view, "val") for view in official if view.label is not None]
    removed = len(training) + len(official) - len(records)
    remarks = (f"{removed} images with uncertain labels are left out",) if removed else ()
    return Dataset("chexpert", CLASSES, tuple(records), multi_label=True, root=root, remarks=remarks)


def _home(root: Path) -> Path:
    """The folder with the tables: this one, or the distribution's own below it."""
    below = [path.parent for path in sorted(root.glob("CheXpert-v1.0*/train.csv"))]
    return root if (root / "train.csv").is_file() or len(below) != 1 else below[0]


def _record(home: Path, view: _View, part: Part) -> Record:
    return Record(view.path, home / view.path, view.label, view.patient, part)


def _read_views(path: Path, uncertain: Uncertain) -> list[_View]:
    """The frontal views of a table, each once."""
    table = read_table(path)
    path_at, side_at = table.require("Path"), table.require("Frontal/Lateral")
    label_at = [table.require(name) for name in CLASSES]
    rows: dict[str, tuple[int, _View]] = {}
    for row, cells in table.rows:
        where = f"{path}, row {row}"
        if cells[side_at].strip() not in ("Frontal", "Lateral"):
            raise DataError(f"{where}: {cells[side_at]!r} is neither Frontal nor Lateral; restore the file")
        if cells[side_at].strip() == "Lateral":
            continue
        image = re.search(r"(?:train|valid)/[^/]+/[^/]+/[^/]+$", cells[path_at].strip())
        if image is None or ".." in image[0].split("/"):
            raise DataError(
                f"{where}: {cells[path_at]!r} is not a path of CheXpert (train/patient00001/study1/view1_…)"
            )
        values = [CELLS.get(cells[position].strip()) for position in label_at]
        if None in values:
            name = CLASSES[values.index(None)]
            raise DataError(f"{where}: column `{name}` must be 1, 0, -1 or empty; restore the file")
        positive = (1, -1) if uncertain == "ones" else (1,)
        label = tuple(position for position, value in enumerate(values) if value in positive)
        view = _View(image[0], None if uncertain == "remove" and -1 in values else label)
        enter(rows, view.path, view, path, row)
    return [view for _, view in rows.values()]


# --- the lists of the GLM paper -------------------------------------------------------------------------------------


def _with_lists(root: Path, training: list[_View], lists: Sequence[Path], labels: str | None) -> Dataset:
    """Assign parts by `train_100.txt` …, `train_500_val_5000.txt` and `train_500_test_10000.txt`."""
    pattern = r"train_(?P<number>\d+)(?:_(?P<held>val|test)_\d+)?(?P<unl>)"
    names = "train_100, …_val_5000 or …_test_10000"
    held_out, labeled, _, chosen = sort_lists(lists, pattern, names, labels)
    # The labeled lists are nested. Images that are only in a larger list are left out, so that all budgets have the
    # same unlabeled images.
    larger: Part | None = None if chosen else "train"
    sorted_lists: list[tuple[Part | None, Path]] = [*held_out.items()]
    sorted_lists += [("labeled", labeled[chosen])] if chosen else []
    sorted_lists += [(larger, path) for number, path in labeled.items() if number != chosen]
    views = {view.list_name: view for view in training}
    parts: dict[str, Part | None] = {}
    relabeled: dict[str, tuple[int, ...]] = {}
    for part, path in sorted_lists:
        for row, name, flags in read_flags(path, len(CLASSES)):
            if name not in views:
                raise DataError(f"{path}, row {row}: {name} is not a frontal view of train.csv; restore the list")
            if parts.setdefault(name, part) in held_out and parts[name] != part:
                raise DataError(f"{path}, row {row}: {name} is in the {parts[name]} list, too; restore the lists")
            relabeled.setdefault(name, tuple(sorted(CLASSES.index(LATENT_MIXING_ORDER[flag]) for flag in flags)))

    home = _home(root)
    records = []
    for name, view in views.items():
        view = replace(view, label=relabeled.get(name, view.label))
        place = parts.get(name, "unlabeled" if chosen else "train")
        if view.label is not None and place is not None:
            records.append(_record(home, view, place))
    differing = sum(views[name].label not in (None, label) for name, label in relabeled.items())
    remarks = [f"{len(training) - len(records)} training images with uncertain labels or in other lists are left out"]
    if differing:
        remarks.append(f"{differing} images have other labels in the lists than in train.csv; the lists are used")
    return Dataset("chexpert", CLASSES, tuple(records), True, root, tuple(remarks), listed=bool(chosen))
