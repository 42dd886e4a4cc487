"""Dropout whose draws come from a run's own generator, so that runs side by side do not disturb each other."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Dropout(nn.Module):
    """Zeroes values at random with probability `rate` while training, and scales the others up.

    `generator` is where the draws come from; None is torch's own.
    """

    generator: torch.Generator | None = None

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, values: Tensor) -> Tensor:
        if not self.training or self.rate == 0.0:
            return values
        kept = torch.empty_like(values).bernoulli_(1.0 - self.rate, generator=self.generator)
        return values * kept.div_(1.0 - self.rate)

    def extra_repr(self) -> str:
        return f"rate={self.rate}"
