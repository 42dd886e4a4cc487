"""From a data set and a split to what training iterates: pixels of each part on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from csda.data.augment import Augmentation
from csda.data.batches import ImagePool, LabeledSet
from csda.data.records import Dataset, Pixels, Record, Split, encode_labels
from csda.errors import DataError


@dataclass(frozen=True, slots=True)
class Parts:
    """The four parts of a split, in the split's order."""

    labeled: LabeledSet
    unlabeled: ImagePool
    val: ImagePool
    test: ImagePool

    def seed(self, seed: int) -> None:
        """All draws from here on, augmentation and dropout, come from this seed."""
        self.labeled.generator.manual_seed(seed)


def open_parts(
    dataset: Dataset, pixels: Pixels, split: Split, device: torch.device, augmentation: Augmentation
) -> Parts:
    """Move the pixels [N, H, W, C] of the set's records to the device, part by part."""
    for name, records in (("labeled", split.labeled), ("validation", split.val), ("test", split.test)):
        if not records:
            raise DataError(f"{dataset.name}: the {name} part is empty; label more images or give a split with --split")
    row = {record.id: position for position, record in enumerate(dataset.records)}
    generator = torch.Generator(device)

    def resident(records: Sequence[Record]) -> torch.Tensor:
        rows = np.array([row[record.id] for record in records], dtype=np.int64)
        return torch.from_numpy(pixels[rows]).to(device)

    labels = encode_labels([record.label for record in split.labeled], len(dataset.classes), dataset.multi_label)
    targets = torch.from_numpy(labels).to(device)
    return Parts(
        LabeledSet(
            resident(split.labeled), targets.float() if dataset.multi_label else targets, augmentation, generator
        ),
        ImagePool(resident(split.unlabeled), augmentation, generator),
        ImagePool(resident(split.val), augmentation, generator),
        ImagePool(resident(split.test), augmentation, generator),
    )
