"""Dropout with a run's own generator, so that parallel runs do not affect each other."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from csda.distributed import Ranks


class Dropout(nn.Module):
    """Zeroes values at random with probability `rate` while training, and scales the others up.

    `generator` gives the random numbers; None for torch's default. With several processes, each draws for all samples
    of a batch and uses its part, so that the generators stay equal.
    """

    generator: torch.Generator | None = None

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.ranks = Ranks()

    def forward(self, values: Tensor) -> Tensor:
        if not self.training or self.rate == 0.0:
            return values
        kept = values.new_empty(self.ranks.count or len(values), *values.shape[1:])
        kept.bernoulli_(1.0 - self.rate, generator=self.generator).div_(1.0 - self.rate)
        return values * self.ranks.part(kept)

    def extra_repr(self) -> str:
        return f"rate={self.rate}"
