"""All that a training takes from a data set: its records, pixels, split and digest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from csda.config import RunConfig
from csda.data import load_dataset, split_dataset
from csda.data.content import content_digest
from csda.data.records import Dataset, Pixels, Record, Split, encode_labels
from csda.data.splits import Begun, move_to_labeled, restore_split
from csda.data.store import open_pixels
from csda.progress import Reporter


@dataclass(frozen=True, slots=True)
class PreparedData:
    """A data set, its pixels [N, H, W, C] in the order of its records, a split of it, and its `content_digest`."""

    dataset: Dataset
    pixels: Pixels
    split: Split
    remarks: tuple[str, ...]
    digest: str

    def encode(self, records: Sequence[Record]) -> npt.NDArray[np.int64]:
        return encode_labels([record.label for record in records], len(self.dataset.classes), self.dataset.multi_label)


def prepare_data(
    config: RunConfig, reporter: Reporter, *, upper_bound: bool = False, begun: Begun | None = None
) -> PreparedData:
    """Read, decode and split. A run that goes on keeps the split that it has `begun` with.

    For the `upper_bound` the unlabeled images whose labels are known become labeled ones.
    """
    dataset = load_dataset(
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
    store = open_pixels(dataset, config.image_size, max_unreadable=config.max_unreadable, progress=reporter.pixels)
    readable = replace(
        dataset, records=tuple(record for record, good in zip(dataset.records, store.readable, strict=True) if good)
    )
    if begun is not None:
        split = restore_split(begun, readable)
    else:
        seed = config.seed if config.split_seed is None else config.split_seed
        split = split_dataset(readable, split=config.split, labels=config.labels, by=config.split_by, seed=seed)
        if upper_bound:
            split = move_to_labeled(split, split.truth)
    unreadable = tuple(f"{record.path}: {reason}; left out" for record, reason in store.unreadable)
    remarks = (*dataset.remarks, *store.remarks, *unreadable, *split.remarks)
    for remark in remarks:
        reporter.note(remark)
    return PreparedData(dataset, store.array, split, remarks, content_digest(dataset))
