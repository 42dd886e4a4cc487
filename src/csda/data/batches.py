"""Pixels on the device, and the views of them that a step asks for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from csda.data import augment
from csda.data.augment import Augmentation

View = Literal["weak", "strong", "plain"]


class ImagePool:
    """The images of one part: uint8 pixels [N, H, W, C] and no label. `pool(indices, view)` augments afresh."""

    def __init__(self, pixels: Tensor, augmentation: Augmentation, generator: torch.Generator) -> None:
        self.pixels = pixels
        self.augmentation = augmentation
        self.generator = generator

    def __len__(self) -> int:
        return len(self.pixels)

    def __call__(self, indices: Tensor, view: View) -> Tensor:
        return self.batch(indices).view(view)

    def batch(self, indices: Tensor) -> Batch:
        return Batch(indices, self.pixels[indices], self.augmentation, self.generator)

    def order(self, batch_size: int, *, shuffled: bool) -> Iterator[Tensor]:
        """Indices of one pass over the part, in batches; the last one may be smaller."""
        device = self.pixels.device
        count = len(self)
        order = (
            torch.randperm(count, device=device, generator=self.generator)
            if shuffled
            else torch.arange(count, device=device)
        )
        return iter(order.split(batch_size))


class LabeledSet(ImagePool):
    """The labeled images: a pool that also knows its targets, int64 [N], or float 0/1 [N, K] in a multi-label set."""

    def __init__(self, pixels: Tensor, targets: Tensor, augmentation: Augmentation, generator: torch.Generator) -> None:
        super().__init__(pixels, augmentation, generator)
        self.targets = targets

    def batch(self, indices: Tensor) -> LabeledBatch:
        return LabeledBatch(indices, self.pixels[indices], self.augmentation, self.generator, self.targets[indices])


class Batch:
    """Some images of a part. Each view is drawn when it is asked for, and anew each time."""

    def __init__(self, indices: Tensor, pixels: Tensor, augmentation: Augmentation, generator: torch.Generator) -> None:
        self.indices = indices
        self.pixels = pixels
        self._augmentation = augmentation
        self._generator = generator

    def __len__(self) -> int:
        return len(self.indices)

    def view(self, view: View) -> Tensor:
        if view == "weak":
            return augment.weak(self.pixels, self._augmentation, self._generator)
        if view == "strong":
            return augment.strong(self.pixels, self._augmentation, self._generator)
        return augment.plain(self.pixels)

    def weak(self) -> Tensor:
        return self.view("weak")

    def strong(self) -> Tensor:
        return self.view("strong")


class LabeledBatch(Batch):
    """A batch of the labeled part, with its targets."""

    def __init__(
        self,
        indices: Tensor,
        pixels: Tensor,
        augmentation: Augmentation,
        generator: torch.Generator,
        targets: Tensor,
    ) -> None:
        super().__init__(indices, pixels, augmentation, generator)
        self.targets = targets
