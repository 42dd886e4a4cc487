"""Copies of data sets with other unlabeled images: classes thinned or repeated, and images of no class."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from pydantic import Field

from csda.config import RunConfig, Settings
from csda.data import load_dataset
from csda.data.cache import digest
from csda.data.prepared import load_configured, split_configured
from csda.data.records import Dataset, Record, Split
from csda.data.splits import PARTS, SplitRow, label_text
from csda.errors import ConfigError, DataError, explained
from csda.files import write_csv

SPLIT = "lists/split.csv"
"""The split inside of the folder. A second CSV beside the images' table would be taken for another table."""


class Blend(Settings):
    """Changes of the unlabeled images of a split.

    `kept` has the number of copies of each unlabeled image of a class: 0.3 keeps a random 30 %, 2 doubles all.
    `strangers` is another data set, and `share` the part of all unlabeled images that its images become.
    """

    kept: dict[str, float] = Field(default_factory=dict)
    strangers: str | None = None
    share: float = Field(0.1, gt=0, lt=1)


def make_blend(blend: Blend, config: RunConfig, strangers: Path | None, folder: Path) -> Path:
    """Make the folder of a configuration's data set with this change, unless it exists.

    Each image is a copy of its file. Labeled, validation and test images are those of the configuration.
    """
    dataset = load_configured(config)
    if dataset.multi_label or dataset.root is None:
        raise DataError(f"{config.data}: unlabeled images are changed in folders with one class per image alone")
    if unknown := set(blend.kept) - set(dataset.classes):
        raise ConfigError(f"kept: no class is called {min(unknown)!r}; there are {', '.join(dataset.classes)}")
    split = split_configured(dataset, config)
    others = () if strangers is None else load_dataset(strangers).records
    names = [(record.id, part) for part, records in split.parts() for record in records]
    described = repr((blend, names, [record.id for record in others], str(dataset.root), str(strangers)))
    made = folder / digest(described.encode()).hex()
    if made.is_dir():
        return made
    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder) as temporary:
            _write(Path(temporary) / "blend", list(_choose(blend, dataset, split, others)))
            (Path(temporary) / "blend").replace(made)
    return made


def _choose(
    blend: Blend, dataset: Dataset, split: Split, others: tuple[Record, ...]
) -> Iterator[tuple[Path, SplitRow]]:
    """The file of each image, and its row: a new name, the part, the label if known, and the group."""
    rng = np.random.default_rng(0)
    number = unlabeled = 0
    for part, records in split.parts():
        for record in records:
            label = record.label if part != "unlabeled" else split.truth.get(record.id)
            text, copies = label_text(label, dataset.classes), 1
            if part == "unlabeled":
                copies = int(blend.kept.get(text, 1.0) + rng.random())
                unlabeled += copies
            assert record.path is not None
            for _ in range(copies):
                number += 1
                yield record.path, SplitRow(f"{part}/{number:06d}{record.path.suffix}", part, text, record.group or "")
    wanted = round(unlabeled * blend.share / (1.0 - blend.share)) if others else 0
    if wanted > len(others):
        raise DataError(f"{len(others)} other images are too few: a share of {blend.share:g} takes {wanted}")
    for position in sorted(rng.choice(len(others), wanted, replace=False).tolist() if wanted else []):
        path = others[position].path
        assert path is not None
        yield path, SplitRow(f"strangers/{position:06d}{path.suffix}", "unlabeled", "", "")


def _write(folder: Path, chosen: list[tuple[Path, SplitRow]]) -> None:
    for name in (*PARTS, "strangers", "lists"):
        (folder / name).mkdir(parents=True)
    for path, row in chosen:
        shutil.copyfile(path, folder / row.id)
    grouped = any(row.group for _, row in chosen)
    columns = ("image", "label", "group") if grouped else ("image", "label")
    write_csv(folder / "labels.csv", columns, [(row.id, row.label, row.group)[: len(columns)] for _, row in chosen])
    write_csv(folder / SPLIT, ("id", "split"), [(row.id, row.split) for _, row in chosen])
