"""The parts of a split: their images on the device, or streamed to it, and the views that a step asks for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from csda.data import augment
from csda.data.augment import Augmentation, Selection, StandIn
from csda.data.cache import physical_memory
from csda.data.records import Dataset, Pixels, Record, Split, encode_labels
from csda.errors import DataError
from csda.fast.streaming import HostPixels

View = Literal["weak", "strong", "plain"]


class ImagePool:
    """The images of one part: uint8 pixels [N, H, W, C] on the device and no label.

    `pool(indices, view)` augments afresh.
    """

    def __init__(self, pixels: Tensor, augmentation: Augmentation, generator: torch.Generator) -> None:
        self.pixels = pixels
        self.augmentation = augmentation
        self.generator = generator

    def __len__(self) -> int:
        return len(self.pixels)

    def __call__(self, indices: Tensor, view: View) -> Tensor:
        return self.batch(indices).view(view)

    def batch(self, indices: Tensor, pixels: Tensor | None = None) -> Batch:
        """The images at these positions, whose `pixels` [B, H, W, C] may be at hand already."""
        return Batch(indices, self.select(indices, pixels), self.augmentation, self.generator)

    def select(self, indices: Tensor, pixels: Tensor | None) -> Selection:
        return Selection(self.pixels, indices) if pixels is None else Selection(pixels)

    def batches(self, batch_size: int, *, shuffled: bool) -> Iterator[Batch]:
        """One pass over the part; the last batch may be smaller."""
        for indices, pixels in self.fetch(batch_size, shuffled=shuffled):
            yield self.batch(indices, pixels)

    def fetch(self, batch_size: int, *, shuffled: bool) -> Iterator[tuple[Tensor, Tensor | None]]:
        """What `batch` takes, for one pass over the part."""
        for indices in self.order(batch_size, shuffled=shuffled):
            yield indices, None

    def order(self, batch_size: int, *, shuffled: bool) -> Iterator[Tensor]:
        """Indices of one pass over the part, in batches; the last one may be smaller."""
        device = self.generator.device
        count = len(self)
        order = (
            torch.randperm(count, device=device, generator=self.generator)
            if shuffled
            else torch.arange(count, device=device)
        )
        return iter(order.split(batch_size))

    def first(self, count: int) -> ImagePool:
        return ImagePool(self.pixels[:count], self.augmentation, self.generator)


class StreamedPool(ImagePool):
    """The images of a part that stays on the host; what is known to be needed is brought ahead of time.

    A batch whose pixels are not at hand is fetched while the host waits, so a step that asks for one cannot be
    captured in a CUDA graph.
    """

    def __init__(self, host: HostPixels, augmentation: Augmentation, generator: torch.Generator) -> None:
        self.host = host
        self.augmentation = augmentation
        self.generator = generator

    def __len__(self) -> int:
        return len(self.host)

    def select(self, indices: Tensor, pixels: Tensor | None) -> Selection:
        return Selection(self.host.take(indices) if pixels is None else pixels)

    def fetch(self, batch_size: int, *, shuffled: bool) -> Iterator[tuple[Tensor, Tensor | None]]:
        order = list(self.order(batch_size, shuffled=shuffled))
        on_host = torch.cat(order).cpu().split(batch_size)
        return zip(order, self.host.stream(on_host), strict=True)

    def first(self, count: int) -> ImagePool:
        return StreamedPool(self.host.first(count), self.augmentation, self.generator)


class LabeledSet(ImagePool):
    """The labeled images: a pool that also knows its targets, int64 [N], or float 0/1 [N, K] in a multi-label set."""

    def __init__(self, pixels: Tensor, targets: Tensor, augmentation: Augmentation, generator: torch.Generator) -> None:
        super().__init__(pixels, augmentation, generator)
        self.targets = targets

    def batch(self, indices: Tensor, pixels: Tensor | None = None) -> LabeledBatch:
        images = self.select(indices, pixels)
        return LabeledBatch(indices, images, self.augmentation, self.generator, self.targets[indices])


class Batch:
    """Some images of a part. Each view is drawn when it is asked for, and anew each time."""

    def __init__(
        self, indices: Tensor, images: Selection, augmentation: Augmentation, generator: torch.Generator
    ) -> None:
        self.indices = indices
        self.images = images
        self._augmentation = augmentation
        self._generator = generator

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def pixels(self) -> Tensor:
        """The images themselves, uint8 [B, H, W, C], brought together when they are asked for."""
        return self.images.pixels()

    def view(self, view: View) -> Tensor:
        if view == "weak":
            return augment.weak(self.images, self._augmentation, self._generator)
        if view == "strong":
            return augment.strong(self.images, self._augmentation, self._generator)
        return augment.plain(self.pixels)

    def weak(self) -> Tensor:
        return self.view("weak")

    def strong(self) -> Tensor:
        return self.view("strong")

    def where(self, real: Tensor, others: Batch) -> Batch:
        """This batch where `real`, a 0-dim bool on the device, is true; otherwise it shows the others in turn."""
        images = self.images._replace(stand_in=StandIn(others.images.source, others.images.rows, real))
        return Batch(self.indices, images, self._augmentation, self._generator)


class LabeledBatch(Batch):
    """A batch of the labeled part, with its targets."""

    def __init__(
        self,
        indices: Tensor,
        images: Selection,
        augmentation: Augmentation,
        generator: torch.Generator,
        targets: Tensor,
    ) -> None:
        super().__init__(indices, images, augmentation, generator)
        self.targets = targets


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
