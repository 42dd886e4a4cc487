"""BatchNorm over the images of several processes, which also works on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from csda.distributed import Ranks

_AXES = (0, 2, 3)


class SharedBatchNorm2d(nn.BatchNorm2d):
    """Replaces a BatchNorm, with the same weights, statistics and names. Means are over the images of all processes."""

    def __init__(self, ordinary: nn.BatchNorm2d, ranks: Ranks) -> None:
        super().__init__(ordinary.num_features, ordinary.eps, ordinary.momentum)
        self.weight, self.bias = ordinary.weight, ordinary.bias
        self.load_state_dict(ordinary.state_dict())
        self.ranks = ranks

    def forward(self, values: Tensor) -> Tensor:
        if not self.training or self.ranks.count is None:
            return super().forward(values)
        number = self.ranks.count * values.shape[2] * values.shape[3]
        with torch.no_grad():
            mean, variance = _moments(values, number, self.ranks)
            self.get_buffer("num_batches_tracked").add_(1)
            self.get_buffer("running_mean").lerp_(mean, self.momentum or 0.0)
            self.get_buffer("running_var").lerp_(variance * (number / (number - 1)), self.momentum or 0.0)
        normalized: Tensor = _Normalize.apply(  # type: ignore[no-untyped-call]
            values, self.weight, self.bias, mean, torch.rsqrt(variance + self.eps), number, self.ranks
        )
        return normalized


def _moments(values: Tensor, number: int, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Mean and variance [C] of each channel over all processes, from those of each process, in one message."""
    values = _wide(values)
    parts = values.new_zeros(ranks.size, 3, values.shape[1])
    if len(values):
        variance, mean = torch.var_mean(values, _AXES, correction=0)
        share = torch.full_like(mean, values.numel() / values.shape[1] / number)
        parts[ranks.rank] = torch.stack((mean, variance, share))
    means, variances, shares = ranks.sum(parts).unbind(1)
    mean = (shares * means).sum(0)
    return mean, (shares * (variances + (means - mean).square())).sum(0)


class _Normalize(torch.autograd.Function):
    """y = (x − mean) · scale · weight + bias, where mean and scale = 1/σ [C] depend on the x of all processes."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, scale: Tensor, number: int, ranks: Ranks
    ) -> Tensor:
        ctx.save_for_backward(values, weight, mean, scale)
        ctx.number, ctx.ranks = number, ranks
        factor = weight * scale
        return torch.addcmul(_channels(bias - mean * factor), _wide(values), _channels(factor)).to(values.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        values, weight, mean, scale = ctx.saved_tensors
        normal = (_wide(values) - _channels(mean)) * _channels(scale)
        gradient = _wide(gradient)
        sums = torch.stack((gradient.sum(_AXES), (gradient * normal).sum(_AXES)))
        # Gradients of the weights are those of this part, as in all layers; mean and scale depend on all parts.
        bias_gradient, weight_gradient = sums.clone()
        mean_gradient, mean_product = ctx.ranks.sum(sums) / ctx.number
        inner = gradient - _channels(mean_gradient) - normal * _channels(mean_product)
        return (
            (inner * _channels(weight * scale)).to(values.dtype),
            weight_gradient,
            bias_gradient,
            None,
            None,
            None,
            None,
        )


def _wide(values: Tensor) -> Tensor:
    """Convert to at least float32, because bf16 has too few digits for sums."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _channels(values: Tensor) -> Tensor:
    return values[:, None, None]
