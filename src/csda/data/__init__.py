"""Sources of images, splits, and pixels."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from csda.data.csv_files import read_table
from csda.data.records import Dataset, Split
from csda.data.splits import make_split, read_split
from csda.errors import ConfigError, DataError

SOURCES: dict[str, tuple[str, ...]] = {
    "synthetic": ("seed",),
    "ham10000": ("lists", "labels"),
    "chexpert": ("lists", "labels", "uncertain"),
    "nih_chestxray14": ("lists",),
    "kvasir_capsule": ("lists",),
    "folder": ("image_column", "label_column", "group_column", "split_column"),
}
"""Sources, each a module of the same name, with the settings that its `load` takes."""


def load_dataset(
    path: str | Path | None = None,
    source: str | None = None,
    *,
    split: str | Path | Sequence[str | Path] | None = None,
    labels: str | int | None = None,
    seed: int = 0,
    uncertain: Literal["remove", "zeros", "ones"] = "remove",
    image_column: str = "image",
    label_column: str = "label",
    group_column: str = "group",
    split_column: str = "split",
) -> Dataset:
    """Read the records of a data set. `path` is a folder; None or `synthetic` is the drawn set.

    The source is recognised from the files unless it is given. `split` is a data set's published lists or their folder,
    and `labels` chooses among them; a split CSV is read by `split_dataset`. Settings that the source does not have are
    refused.
    """
    root = None if path is None or str(path) == "synthetic" else Path(path)
    name = source or recognise(root)
    if name not in SOURCES:
        raise ConfigError(f"source = {name!r} is unknown; choose one of {', '.join(SOURCES)}")
    files = split_files(split)
    common: dict[str, Any] = {"seed": seed, "labels": None if labels is None else str(labels)}
    special: dict[str, tuple[Any, Any]] = {
        "lists": ([] if is_split_csv(files) else files, []),
        "uncertain": (uncertain, "remove"),
        "image_column": (image_column, "image"),
        "label_column": (label_column, "label"),
        "group_column": (group_column, "group"),
        "split_column": (split_column, "split"),
    }
    for setting, (value, default) in special.items():
        if value != default and setting not in SOURCES[name]:
            raise ConfigError(
                f"--split: the source {name} has no published lists; give a CSV with the columns id, split and label"
                if setting == "lists"
                else f"the source {name} has no setting `{setting}`; leave it out, or choose another source"
            )
    given = common | {setting: value for setting, (value, _) in special.items()}
    options = {setting: given[setting] for setting in SOURCES[name]}
    load = import_module(f"csda.data.{name}").load
    dataset: Dataset = load(**options) if name == "synthetic" else load(_existing(root, name), **options)
    return dataset


def split_dataset(
    dataset: Dataset,
    *,
    split: str | Path | Sequence[str | Path] | None = None,
    labels: str | int | None = None,
    by: Literal["image", "group"] | None = None,
    seed: int = 0,
    val: str | int | None = None,
) -> Split:
    """Divide a data set by a split CSV, if `split` is one, else by its lists and at random."""
    files = split_files(split)
    if is_split_csv(files):
        if val is not None:
            raise ConfigError(f"val = {val}: {files[0]} says which images are for validation; leave val out")
        return read_split(files[0], dataset)
    return make_split(dataset, labels, by=by, seed=seed, val=val)


def recognise(root: Path | None) -> str:
    """The source with the layout of the folder; `folder` if no other fits."""
    if root is None:
        return "synthetic"
    if root.is_dir():
        for name in SOURCES:
            if name not in ("synthetic", "folder") and import_module(f"csda.data.{name}").recognise(root):
                return name
    return "folder"


def split_files(split: str | Path | Sequence[str | Path] | None) -> list[Path]:
    """The files of `--split`: one, several (a list, or separated by commas), or all lists in a folder."""
    if split is None:
        return []
    if isinstance(split, str) and not Path(split).exists():
        split = split.split(",")
    files: list[Path] = []
    for path in [split] if isinstance(split, str | Path) else split:
        path = Path(path)
        if path.is_dir():
            files += sorted(file for file in path.iterdir() if file.suffix.lower() in (".txt", ".csv"))
        elif path.is_file():
            files.append(path)
        else:
            raise DataError(f"{path}: there is no such file or folder to read the split from")
    if not files:
        raise DataError(f"{split}: the folder holds no list; lists end in .txt or .csv")
    return files


def is_split_csv(files: Sequence[Path]) -> bool:
    """Whether this is a split CSV, rather than published lists."""
    if len(files) != 1 or files[0].suffix.lower() != ".csv":
        return False
    return {"id", "split"} <= set(read_table(files[0]).columns)


def _existing(root: Path | None, source: str) -> Path:
    if root is None:
        raise ConfigError(f"the source {source} needs the folder of its images")
    if not root.exists():
        here = "" if root.is_absolute() else f" in {Path.cwd()}"
        raise DataError(f"{root}: there is no such folder{here}; correct the path")
    if root.is_file() and (source != "folder" or root.suffix.lower() != ".csv"):
        raise DataError(f"{root} is a file; name the folder with the images, unpacked, or a CSV with their labels")
    return root
