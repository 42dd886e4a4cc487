"""Which images each step sees: the order of a whole epoch, drawn at its start."""

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


def balancing_weights(labels: Tensor) -> Tensor:
    """Weights [N] with which every class is drawn equally often, and within it every image.

    Labels are classes, int64 [N], or 0/1 [N, K], for which each label is a class, and to have none of them is another.
    """
    if labels.ndim == 1:
        members = torch.nn.functional.one_hot(labels).double()
    else:
        members = torch.cat((labels, labels.sum(1, keepdim=True) == 0), dim=1).double()
    return (members / members.sum(0).clamp(min=1)).sum(1)


def bilateral_draws(order: Tensor, labels: Tensor, progress: Tensor, generator: torch.Generator) -> Tensor:
    """BiS: the indices [steps, B] of a random sampler, replaced more and more by class-balanced draws.

    A share α = 1 − (t/T)² of each batch stays random, t/T being its `progress` [steps].
    """
    steps, batch_size = order.shape
    drawn = torch.multinomial(balancing_weights(labels), order.numel(), replacement=True, generator=generator)
    kept = ((1.0 - progress.square()) * batch_size).round()
    return torch.where(torch.arange(batch_size) < kept[:, None], order, drawn.view(steps, batch_size))
