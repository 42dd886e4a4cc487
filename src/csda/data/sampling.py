"""Which images a step sees: the order of a whole epoch, drawn at its start."""

from __future__ import annotations

import torch
from torch import Tensor


def shuffled_passes(count: int, batch_size: int, steps: int, generator: torch.Generator) -> Tensor:
    """Indices [steps, batch_size] of shuffled passes over `count` images, one pass straight after the other."""
    if count == 0:
        return torch.zeros(steps, 0, dtype=torch.int64)
    needed = steps * batch_size
    passes = [torch.randperm(count, generator=generator) for _ in range(-(-needed // count))]
    return torch.cat(passes)[:needed].view(steps, batch_size)
