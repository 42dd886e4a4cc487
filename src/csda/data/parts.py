"""From a data set and a split to what training iterates: pixels of each part on the device, or streamed to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from csda.data.augment import Augmentation
from csda.data.batches import ImagePool, LabeledSet, StreamedPool
from csda.data.cache import physical_memory
from csda.data.records import Dataset, Pixels, Record, Split, encode_labels
from csda.data.streaming import HostPixels
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

    @property
    def streamed(self) -> tuple[str, ...]:
        """The parts that stay on the host."""
        pools = {"unlabeled": self.unlabeled, "val": self.val, "test": self.test}
        return tuple(name for name, pool in pools.items() if isinstance(pool, StreamedPool))


def open_parts(
    dataset: Dataset,
    pixels: Pixels,
    split: Split,
    device: torch.device,
    augmentation: Augmentation,
    resident_share: float = 1.0,
) -> Parts:
    """Divide the pixels [N, H, W, C] of the set's records into parts.

    They move to the device, part by part, while they fill no more than a share of its free memory. What does not fit
    is streamed. The labeled part always moves.
    """
    for name, records in (("labeled", split.labeled), ("validation", split.val), ("test", split.test)):
        if not records:
            raise DataError(f"{dataset.name}: the {name} part is empty; label more images or give a split with --split")
    row = {record.id: position for position, record in enumerate(dataset.records)}
    generator = torch.Generator(device)

    def on_host(records: Sequence[Record]) -> HostPixels:
        return HostPixels(pixels, np.array([row[record.id] for record in records], dtype=np.int64), device)

    labeled = on_host(split.labeled)
    budget = max(0.0, resident_share * free_memory(device) - labeled.bytes)

    def pool(records: Sequence[Record]) -> ImagePool:
        nonlocal budget
        host = on_host(records)
        if host.bytes > budget:
            return StreamedPool(host, augmentation, generator)
        budget -= host.bytes
        return ImagePool(host.load(), augmentation, generator)

    labels = encode_labels([record.label for record in split.labeled], len(dataset.classes), dataset.multi_label)
    targets = torch.from_numpy(labels).to(device)
    return Parts(
        LabeledSet(labeled.load(), targets.float() if dataset.multi_label else targets, augmentation, generator),
        pool(split.unlabeled),
        pool(split.val),
        pool(split.test),
    )


def free_memory(device: torch.device) -> int:
    """Bytes that can still be taken on the device; on the CPU, what the system can spare without swapping."""
    if device.type == "cuda":
        # torch keeps what it once took, and gives it out again.
        spare = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + spare
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return physical_memory()
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")), physical_memory())
