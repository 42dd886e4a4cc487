"""What all encoders have in common."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Encoder(nn.Sequential):
    """Images [B, C, S, S] to features, by stages that a method can work between; several tensors pass as one batch."""

    def forward(self, *images: Tensor) -> Tensor:
        values = images[0] if len(images) == 1 else torch.cat(images)
        for stage in self:
            values = stage(values)
        return values

    def forward_apart(self, *images: Tensor) -> Tensor:
        """The same for tensors that have statistics of BatchNorm of their own.

        The last stage has none to take, so there they go together.
        """
        features: Tensor = self[-1](torch.cat([self[:-1](part) for part in images]))
        return features
