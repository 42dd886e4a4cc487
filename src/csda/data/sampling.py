"""The order of the images of an epoch, drawn at its start."""

from __future__ import annotations

import torch
from torch import Tensor


def shuffled_passes(count: int, batch_size: int, steps: int, generator: torch.Generator) -> Tensor:
    """Indices [steps, batch_size] of consecutive shuffled passes over `count` images."""
    if count == 0:
        return torch.zeros(steps, 0, dtype=torch.int64)
    needed = steps * batch_size
    passes = [torch.randperm(count, generator=generator) for _ in range(-(-needed // count))]
    return torch.cat(passes)[:needed].view(steps, batch_size)


def balancing_weights(labels: Tensor) -> Tensor:
    """Weights [N] to draw every class equally often, and every image within a class.

    Labels are classes, int64 [N], or 0/1 [N, K], where each label is a class and images without any are another.
    """
    if labels.ndim == 1:
        members = torch.nn.functional.one_hot(labels).double()
    else:
        members = torch.cat((labels, labels.sum(1, keepdim=True) == 0), dim=1).double()
    return (members / members.sum(0).clamp(min=1)).sum(1)


def bilateral_draws(order: Tensor, labels: Tensor, progress: Tensor, generator: torch.Generator) -> Tensor:
    """BiS: indices [steps, B] of a random sampler, increasingly replaced by class-balanced draws.

    A share α = 1 − (t/T)² of each batch stays random, where t/T is its `progress` [steps].
    """
    steps, batch_size = order.shape
    drawn = torch.multinomial(balancing_weights(labels), order.numel(), replacement=True, generator=generator)
    kept = ((1.0 - progress.square()) * batch_size).round()
    return torch.where(torch.arange(batch_size) < kept[:, None], order, drawn.view(steps, batch_size))
