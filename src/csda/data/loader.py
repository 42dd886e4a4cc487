"""The parts of a split, with images on the device or streamed to it, and their augmented views."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from csda.data.augment import Augmentation, Selection, StandIn
from csda.data.cache import Values, physical_memory
from csda.data.records import Dataset, Pixels, Record, Split, encode_labels
from csda.errors import DataError

View = Literal["weak", "strong", "plain"]
Positions = npt.NDArray[np.int64]

LOADED_ROWS = 256
"""Number of images that are moved to the device at a time."""


class ImagePool:
    """The images of one part: uint8 pixels [N, H, W, C] on the device and no label.

    `pool(indices, view)` augments again in each call. Instead of pixels there may be features [N, W], with
    `FeatureViews`.
    """

    streamed = False
    """Whether the pixels stay on the host."""

    def __init__(self, pixels: Tensor, augmentation: Augmentation, generator: torch.Generator) -> None:
        self.pixels = pixels
        self.augmentation = augmentation
        self.generator = generator

    def __len__(self) -> int:
        return len(self.pixels)

    def __call__(self, indices: Tensor, view: View) -> Tensor:
        return self.batch(indices).view(view)

    def batch(self, indices: Tensor, pixels: Tensor | None = None) -> Batch:
        """The images at these indices; their `pixels` [B, H, W, C] can be given if already fetched."""
        return Batch(indices, self.select(indices, pixels), self.augmentation, self.generator)

    def select(self, indices: Tensor, pixels: Tensor | None) -> Selection:
        return Selection(self.pixels, indices) if pixels is None else Selection(pixels)

    def prefetch(self, batches: Tensor) -> Iterator[Tensor] | None:
        """Yield the pixels of batches, given as rows of indices; None if they are on the device."""
        return None

    def batches(self, batch_size: int, *, shuffled: bool) -> Iterator[Batch]:
        """One pass over the part; the last batch may be smaller."""
        for indices, pixels in self.fetch(batch_size, shuffled=shuffled):
            yield self.batch(indices, pixels)

    def fetch(self, batch_size: int, *, shuffled: bool) -> Iterator[tuple[Tensor, Tensor | None]]:
        """The arguments of `batch` for one pass over the part."""
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


class LabeledSet(ImagePool):
    """The labeled images: a pool with targets, int64 [N], or float 0/1 [N, K] in a multi-label set."""

    def __init__(self, pixels: Tensor, targets: Tensor, augmentation: Augmentation, generator: torch.Generator) -> None:
        super().__init__(pixels, augmentation, generator)
        self.targets = targets

    def batch(self, indices: Tensor, pixels: Tensor | None = None) -> LabeledBatch:
        images = self.select(indices, pixels)
        return LabeledBatch(indices, images, self.augmentation, self.generator, self.targets[indices])


class Batch:
    """Some images of a part. Each call of a view draws a new augmentation."""

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
        """The images, uint8 [B, H, W, C], gathered when this is called."""
        return self.images.pixels()

    def view(self, view: View) -> Tensor:
        if view == "weak":
            return self._augmentation.weak(self.images, self._generator)
        if view == "strong":
            return self._augmentation.strong(self.images, self._generator)
        return self._augmentation.plain(self.images)

    def weak(self) -> Tensor:
        return self.view("weak")

    def strong(self) -> Tensor:
        return self.view("strong")

    def where(self, real: Tensor, others: Batch) -> Batch:
        """This batch if `real`, a 0-dim bool on the device, is true, else one of the other images in turn."""
        images = self.images._replace(stand_in=StandIn(others.images.source, others.images.rows, real))
        return Batch(self.indices, images, self._augmentation, self._generator)


class LabeledBatch(Batch):
    """A batch of the labeled part with its targets."""

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
    """The four parts of a split, in its order."""

    labeled: LabeledSet
    unlabeled: ImagePool
    val: ImagePool
    test: ImagePool

    def seed(self, seed: int) -> None:
        """Seed the generator of augmentation and dropout."""
        self.labeled.generator.manual_seed(seed)

    @property
    def streamed(self) -> tuple[str, ...]:
        """The names of the parts that stay on the host."""
        pools = {"unlabeled": self.unlabeled, "val": self.val, "test": self.test}
        return tuple(name for name, pool in pools.items() if pool.streamed)


class OpenPool(Protocol):
    """Makes a pool from rows of an array on the host."""

    def __call__(
        self,
        pixels: Pixels,
        rows: Positions,
        device: torch.device,
        augmentation: Augmentation,
        generator: torch.Generator,
    ) -> ImagePool: ...


def open_parts(
    dataset: Dataset,
    pixels: Values,
    split: Split,
    augmentation: Augmentation,
    generator: torch.Generator,
    resident_share: float = 1.0,
    open_streamed: OpenPool | None = None,
) -> Parts:
    """Divide the pixels [N, H, W, C] of the set's records, or features [N, W], into parts, on the generator's device.

    Parts are moved to the device as long as they fit into a share of its free memory. Others are streamed by
    `open_streamed`. The labeled part is always moved.
    """
    for name, records in (("labeled", split.labeled), ("test", split.test)):
        if not records:
            raise DataError(
                f"{dataset.root or dataset.name}: the {name} part is empty; label more images or give a split with "
                "--split"
            )
    device = generator.device
    position = {record.id: row for row, record in enumerate(dataset.records)}
    budget = resident_share * free_memory(device)

    def rows_of(records: Sequence[Record]) -> Positions:
        return np.array([position[record.id] for record in records], dtype=np.int64)

    def pool(records: Sequence[Record]) -> ImagePool:
        nonlocal budget
        rows = rows_of(records)
        size = len(rows) * pixels[:1].nbytes
        if size <= budget:
            budget -= size
            return ImagePool(_load(pixels, rows, device), augmentation, generator)
        if open_streamed is None:
            raise DataError(
                f"{dataset.root or dataset.name}: {size / 2**30:.1f} GB of pixels do not fit into the memory of "
                f"{device}; csda.fast, which streams them, is not installed, so choose a smaller image_size"
            )
        return open_streamed(pixels, rows, device, augmentation, generator)

    labels = encode_labels([record.label for record in split.labeled], len(dataset.classes), dataset.multi_label)
    targets = torch.from_numpy(labels).to(device)
    labeled = _load(pixels, rows_of(split.labeled), device)
    budget = max(0.0, budget - labeled.nbytes)
    return Parts(
        LabeledSet(labeled, targets.float() if dataset.multi_label else targets, augmentation, generator),
        pool(split.unlabeled),
        pool(split.val),
        pool(split.test),
    )


def _load(pixels: Values, rows: Positions, device: torch.device) -> Tensor:
    """Copy rows of an array, which may be mapped from a file, to the device, without a full copy on the host."""
    dtype = torch.float32 if pixels.dtype == np.float32 else torch.uint8
    images = torch.empty((len(rows), *pixels.shape[1:]), dtype=dtype, device=device)
    for start in range(0, len(rows), LOADED_ROWS):
        part = slice(start, start + LOADED_ROWS)
        images[part].copy_(torch.from_numpy(pixels[rows[part]]))
    return images


def free_memory(device: torch.device) -> int:
    """Free memory of the device in bytes; on the CPU, the memory that is available without swapping."""
    if device.type == "cuda":
        # Memory that torch has reserved can be used again.
        spare = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + spare
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return physical_memory()
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")), physical_memory())
