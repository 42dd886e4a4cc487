"""The class of all encoders."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Encoder(nn.Sequential):
    """Images [B, C, H, W] to features [B, width], in one or more stages. Several tensors pass as one batch.

    A method that works between stages slices it, as any `nn.Sequential`.
    """

    def __init__(self, *stages: nn.Module, width: int = 0) -> None:
        super().__init__(*stages)
        self.width = width

    def forward(self, *images: Tensor) -> Tensor:
        values = images[0] if len(images) == 1 else torch.cat(images)
        for stage in self:
            values = stage(values)
        return values

    def forward_apart(self, *images: Tensor) -> Tensor:
        """The same, but each tensor has its own BatchNorm statistics."""
        body, tail = self.split()
        features: Tensor = tail(torch.cat([body(part) for part in images]))
        return features

    def split(self) -> tuple[nn.Sequential, nn.Sequential]:
        """The stages up to the last with BatchNorm, and the others, where samples are independent."""
        with_norm = [place for place, stage in enumerate(self) if any(map(_is_norm, stage.modules()))]
        end = with_norm[-1] + 1 if with_norm else 0
        stages = list(self)
        return nn.Sequential(*stages[:end]), nn.Sequential(*stages[end:])


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm)
