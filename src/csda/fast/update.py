"""Gradient descent and moving average of large weights. One Triton kernel also writes the bfloat16 copy of the result.

The results equal those of torch's fused SGD, of its lerp and of a cast.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from csda.fast.kernels import launching

BLOCK = 1024
"""Weights per program."""


@triton.jit
def _descend(weights, gradients, rate, copies, number, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < number
    weight = tl.load(weights + place, inside)
    gradient = tl.load(gradients + place, inside).to(tl.float32)
    weight = tl.fma(-tl.load(rate), gradient, weight)
    tl.store(weights + place, weight, inside)
    tl.store(copies + place, weight.to(copies.dtype.element_ty), inside)


@triton.jit
def _average(weights, others, share, copies, number, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < number
    weight = tl.load(weights + place, inside)
    other = tl.load(others + place, inside)
    # Like lerp, from the nearer end.
    way = other - weight
    weight = tl.where(share < 0.5, tl.fma(share, way, weight), tl.fma(share - 1.0, way, other))
    tl.store(weights + place, weight, inside)
    tl.store(copies + place, weight.to(copies.dtype.element_ty), inside)


def descend(weight: Tensor, gradient: Tensor, rate: Tensor, copy: Tensor) -> None:
    """Subtract rate · gradient from a float32 weight in place, and write the rounded result into the copy.

    `rate` is on the device, so that a graph reads its current value. The other tensors have the memory order of the
    weight.
    """
    with launching(weight):
        _descend[_programs(weight)](weight, gradient, rate, copy, weight.numel(), BLOCK)


def average(weight: Tensor, other: Tensor, share: float, copy: Tensor) -> None:
    """Move a float32 weight in place by a share of the way to the other weight, and write the rounded result into the
    copy.
    """
    with launching(weight):
        _average[_programs(weight)](weight, other, share, copy, weight.numel(), BLOCK)


def _programs(weight: Tensor) -> tuple[int]:
    return (triton.cdiv(weight.numel(), BLOCK),)
