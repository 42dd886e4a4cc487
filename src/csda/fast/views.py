"""Augmentation by kernels that read uint8 pixels where they are, without gathering a batch first."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from csda.data.augment import Augmentation, Selection
from csda.fast import kernels


@dataclass(frozen=True, slots=True)
class FusedAugmentation(Augmentation):
    """The views of `Augmentation`, each computed by one kernel, in the dtype of autocast."""

    def weak_view(self, images: Selection, draws: Tensor) -> Tensor:
        from csda.fast import warp

        return warp.weak(*contiguous(images), draws, *self.weak_reach, self.flip, kernels.matrix_dtype())

    def strong_view(self, images: Selection, draws: Tensor) -> Tensor:
        from csda.fast import warp

        return warp.strong(*contiguous(images), draws, *self.strong_reach, self.flip, kernels.matrix_dtype())


def contiguous(images: Selection) -> Selection:
    """The same images without gaps in memory. If a copy is needed, only these images are copied."""
    tensors = (images.source, images.rows, *(images.stand_in or ()))
    dense = all(tensor is None or tensor.is_contiguous() for tensor in tensors)
    return images if dense else Selection(images.pixels().contiguous())
