"""The data of a training: records, pixels, split and digest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from csda.config import RunConfig
from csda.data import load_dataset, split_dataset
from csda.data.arrays import SOURCE, Samples
from csda.data.content import content_digest, hash_contents, require_unchanged
from csda.data.duplicates import remark_duplicates
from csda.data.folder import load_unlabeled
from csda.data.records import Dataset, Pixels, Record, Split, encode_labels
from csda.data.reviewed import REVIEW_FILE, decided_dataset, decided_split, has_split, read_review, relabel
from csda.data.splits import FEW_VALIDATION, Begun, leave_out, list_split, move_to_labeled, restore_split
from csda.data.store import file_keys, open_pixels
from csda.errors import DataError
from csda.progress import Reporter


@dataclass(frozen=True, slots=True)
class PreparedData:
    """A data set, its pixels [N, H, W, C] in the order of its records, a split of it, and its `content_digest`.

    `keys` are the cache keys of the rows of pixels.
    """

    dataset: Dataset
    pixels: Pixels
    split: Split
    remarks: tuple[str, ...]
    digest: str
    keys: Sequence[bytes] = ()

    def encode(self, records: Sequence[Record]) -> npt.NDArray[np.int64]:
        return encode_labels([record.label for record in records], len(self.dataset.classes), self.dataset.multi_label)


def require_unlabeled(dataset: Dataset, split: Split, method: str) -> None:
    """Refuse a split without unlabeled images, for a method that learns from them."""
    if not split.unlabeled:
        raise DataError(
            f"{dataset.root or dataset.name}: no unlabeled images for method {method!r}; "
            "keep only some labels with --labels, or train the method 'baseline'"
        )


def prepare_data(
    config: RunConfig,
    reporter: Reporter,
    *,
    upper_bound: bool = False,
    begun: Begun | None = None,
    samples: Samples | None = None,
    require_same: Callable[[str, str], None] = lambda value, what: None,
) -> PreparedData:
    """Read, split and decode a data set. A resumed run keeps its split, `begun`, and needs the same data. The data is
    that of the configuration, or `samples` given from Python. For the `upper_bound`, unlabeled images with known labels
    become labeled. `require_same(value, what)` raises an error if a value differs between processes that train
    together.
    """
    dataset = load_configured(config) if samples is None else samples.as_dataset(config.aspect)
    # The split is drawn over all records, so that an unreadable file does not change the part of others.
    if begun is not None:
        split = restore_split(begun, relabel(dataset, begun.split, begun.path) if config.labels_from else dataset)
    else:
        split = split_configured(dataset, config)
        if upper_bound:
            split = move_to_labeled(split, split.truth)
    keys = file_keys(dataset)
    contents = hash_contents(dataset, fresh=begun is not None, keys=keys)
    digest = content_digest(dataset, contents)
    require_same(digest, f"{config.data}: images, labels or groups")
    require_same(repr(list(list_split(split, dataset.classes))), f"{config.data}: the parts of the split")
    if begun is not None and digest != (begun.digest or digest):
        raise DataError(
            f"{config.data}: images, labels or groups are not those that the run began with; restore them, "
            f"or start a new run with another --out"
        )
    store = open_pixels(
        dataset,
        config.image_size,
        aspect=config.aspect,
        max_unreadable=config.max_unreadable,
        progress=reporter.pixels,
    )
    require_unchanged(dataset, keys)
    if begun is not None:
        _require_all(begun, store.unreadable)
    split = leave_out(split, store.unreadable, dataset)
    unreadable = tuple(f"{record.path}: {reason}; left out" for record, reason in store.unreadable)
    require_same(repr(unreadable), f"{config.data}: the images that cannot be read")
    twice = remark_duplicates(dataset, contents, split)
    remarks = (*dataset.remarks, *store.remarks, *unreadable, *split.remarks, *twice)
    for remark in remarks:
        reporter.note(remark)
    if 0 < len(split.val) < FEW_VALIDATION and config.choose == "best":
        reporter.note(
            f"only {len(split.val)} validation images choose the epoch, which is almost random: label more, or "
            "give choose=last"
        )
    return PreparedData(dataset, store.array, split, remarks, digest, store.keys)


def load_configured(config: RunConfig) -> Dataset:
    """The records of a configuration's data set, without labels added in a review."""
    if config.source == SOURCE:
        raise DataError("this run was trained on arrays given from Python; give them again: csda.train(X, y, …)")
    if config.labels_from is not None and not has_split(review := Path(config.labels_from)):
        classes = read_review(review)["classes"] if (review / REVIEW_FILE).is_file() else None
        if classes is not None:
            return load_unlabeled(Path(config.data), classes)
    return load_dataset(
        config.data,
        config.source,
        split=config.split,
        labels=config.labels,
        seed=config.seed,
        uncertain=config.uncertain,
        image_column=config.image_column,
        label_column=config.label_column,
        group_column=config.group_column,
        split_column=config.split_column,
    )


def split_configured(dataset: Dataset, config: RunConfig) -> Split:
    """Split the data set by the configuration, or like the run that labels are taken from."""
    if config.labels_from is not None:
        if has_split(review := Path(config.labels_from)):
            return decided_split(dataset, review)
        dataset = decided_dataset(dataset, review)
    seed = config.seed if config.split_seed is None else config.split_seed
    return split_dataset(
        dataset, split=config.split, labels=config.labels, by=config.split_by, seed=seed, val=config.val
    )


def _require_all(begun: Begun, unreadable: Sequence[tuple[Record, str]]) -> None:
    """Refuse to continue a run if images that it began with cannot be read."""
    members = {row.id for row in begun.split}
    for record, reason in unreadable:
        if record.id in members:
            raise DataError(
                f"{record.path}: {reason}, but the run began with this image; restore it, or start a new run"
            )
