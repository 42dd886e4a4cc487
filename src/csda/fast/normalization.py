"""BatchNorm, ReLU6 and the shortcut of a block in Triton, for activations that lie in memory as [B, H, W, C].

torch reads an activation once for the statistics, once to normalise, once for ReLU6 and once for the shortcut, and as
often in the backward pass. Here there are two passes in each direction: one for the sums, one for everything else. Each
program of the first pass writes its partial sums, and each program of the second adds up all of them in a fixed order.
So results are the same bit by bit in every run, and no kernel is needed in between. Sums are in float32 and relative to
the first row, so that a mean far from zero does not reduce the precision.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from csda.fast.kernels import launching, tile_width


class Tiles(NamedTuple):
    """How a pass over [M, C] is divided: values and channels per tile, warps, pipeline stages, programs."""

    values: int
    channels: int
    warps: int
    stages: int
    programs: int


# Chosen by measurement on an H200.
SUMS = Tiles(2048, 32, 4, 3, 528)
"""Passes that leave sums."""
WHOLE = Tiles(4096, 32, 4, 1, 528)
"""Passes that write an activation."""
SHARES = 32
"""Sums of so many programs are added up by each program of the next pass; more are added up in a pass between them."""


class Grid(NamedTuple):
    """Programs along rows and along channels, and rows and channels per tile."""

    shares: int
    groups: int
    rows: int
    channels: int


def cut(number: int, channels: int, tiles: Tiles) -> Grid:
    """The division of a pass over `number` rows with this number of channels."""
    width = tile_width(channels, tiles.channels)
    rows = tiles.values // width
    groups = triton.cdiv(channels, width)
    shares = max(1, min(tiles.programs // groups, triton.cdiv(number, rows)))
    return Grid(shares, groups, rows, width)


@triton.jit
def _total(sums, which, shares, channel, inside, CHANNELS, SHARES: tl.constexpr):
    """One of the two sums [shares, 2, CHANNELS], added up over the shares."""
    share = tl.arange(0, SHARES)[:, None]
    mask = inside[None, :] & (share < shares)
    return tl.sum(tl.load(sums + (share * 2 + which) * CHANNELS + channel[None, :], mask, 0.0), 0)


@triton.jit
def _measure(values, sums, number, EIGHTHS, ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr):
    """The sum and the sum of squares of each channel, relative to the first row."""
    CHANNELS = EIGHTHS * 8  # so the compiler knows that rows begin at multiples of 16 bytes
    share = tl.program_id(0)
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = channel < CHANNELS
    origin = tl.load(values + channel, inside, 0.0).to(tl.float32)[None, :]
    first = tl.zeros([ROWS, WIDTH], tl.float32)
    second = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in tl.range(share * ROWS, number, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        mask = (row < number)[:, None] & inside[None, :]
        value = tl.load(values + row[:, None] * CHANNELS + channel[None, :], mask, 0.0).to(tl.float32)
        value = tl.where(mask, value - origin, 0.0)
        first += value
        second += value * value
    tl.store(sums + share * 2 * CHANNELS + channel, tl.sum(first, 0), inside)
    tl.store(sums + (share * 2 + 1) * CHANNELS + channel, tl.sum(second, 0), inside)


@triton.jit
def _normalize(
    values, sums, gamma, beta, running_mean, running_variance, tracked, statistics, shortcut, results,
    shares, number, EIGHTHS, momentum, eps, TRAINING: tl.constexpr, ACTIVE: tl.constexpr, ADDS: tl.constexpr,
    SHARES: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """γ (x − μ) / √(σ² + ε) + β, limited to [0, 6] if ACTIVE, plus a shortcut if ADDS.

    `statistics` [2, C] receives μ and 1 / √(σ² + ε). With TRAINING these are those of the batch, and the running
    statistics are updated.
    """
    CHANNELS = EIGHTHS * 8
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = channel < CHANNELS
    leads = tl.program_id(0) == 0
    if TRAINING:
        shift = _total(sums, 0, shares, channel, inside, CHANNELS, SHARES) / number
        variance = tl.maximum(_total(sums, 1, shares, channel, inside, CHANNELS, SHARES) / number - shift * shift, 0.0)
        mean = tl.load(values + channel, inside, 0.0).to(tl.float32) + shift
        if leads:
            old = tl.load(running_mean + channel, inside, 0.0)
            tl.store(running_mean + channel, old + momentum * (mean - old), inside)
            old = tl.load(running_variance + channel, inside, 0.0)
            unbiased = variance * (number / (number - 1.0))
            tl.store(running_variance + channel, old + momentum * (unbiased - old), inside)
            if tl.program_id(1) == 0:
                tl.store(tracked, tl.load(tracked) + 1)
    else:
        mean = tl.load(running_mean + channel, inside, 0.0)
        variance = tl.load(running_variance + channel, inside, 0.0)
    inverse = 1.0 / tl.sqrt(variance + eps)
    if leads:
        tl.store(statistics + channel, mean, inside)
        tl.store(statistics + CHANNELS + channel, inverse, inside)
    scale = tl.load(gamma + channel, inside, 0.0) * inverse
    offset = (tl.load(beta + channel, inside, 0.0) - mean * scale)[None, :]
    scale = scale[None, :]
    for start in tl.range(tl.program_id(0) * ROWS, number, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        mask = (row < number)[:, None] & inside[None, :]
        place = row[:, None] * CHANNELS + channel[None, :]
        result = tl.load(values + place, mask, 0.0).to(tl.float32) * scale + offset
        if ACTIVE:
            result = tl.minimum(tl.maximum(result, 0.0), 6.0)
        if ADDS:
            result += tl.load(shortcut + place, mask, 0.0).to(tl.float32)
        tl.store(results + place, result.to(results.dtype.element_ty), mask)


@triton.jit
def _gather(sums, totals, shares, CHANNELS, SHARES: tl.constexpr, WIDTH: tl.constexpr):
    """Add up the sums of all shares."""
    place = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    inside = place < 2 * CHANNELS
    total = tl.zeros([SHARES, WIDTH], tl.float32)
    for start in range(0, shares, SHARES):
        share = (start + tl.arange(0, SHARES))[:, None]
        total += tl.load(sums + share * 2 * CHANNELS + place[None, :], inside[None, :] & (share < shares), 0.0)
    tl.store(totals + place, tl.sum(total, 0), inside)


@triton.jit
def _passed(gradients, values, place, mask, scale, offset, mean, inverse, ACTIVE: tl.constexpr):
    """The gradient of the normalised value, zero where ReLU6 is constant, and (x − μ) / √(σ² + ε)."""
    gradient = tl.load(gradients + place, mask, 0.0).to(tl.float32)
    value = tl.load(values + place, mask, 0.0).to(tl.float32)
    if ACTIVE:
        result = value * scale + offset
        gradient = tl.where((result > 0.0) & (result < 6.0), gradient, 0.0)
    return gradient, (value - mean) * inverse


@triton.jit
def _collect(
    gradients, values, statistics, gamma, beta, sums, number, EIGHTHS,
    ACTIVE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The sum of the gradient, and of its product with the standardised value."""
    CHANNELS = EIGHTHS * 8
    share = tl.program_id(0)
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = channel < CHANNELS
    mean = tl.load(statistics + channel, inside, 0.0)
    inverse = tl.load(statistics + CHANNELS + channel, inside, 0.0)
    scale = tl.load(gamma + channel, inside, 0.0) * inverse
    offset = (tl.load(beta + channel, inside, 0.0) - mean * scale)[None, :]
    scale, mean, inverse = scale[None, :], mean[None, :], inverse[None, :]
    first = tl.zeros([ROWS, WIDTH], tl.float32)
    second = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in tl.range(share * ROWS, number, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        mask = (row < number)[:, None] & inside[None, :]
        place = row[:, None] * CHANNELS + channel[None, :]
        gradient, standard = _passed(gradients, values, place, mask, scale, offset, mean, inverse, ACTIVE)
        first += gradient
        second += gradient * standard
    tl.store(sums + share * 2 * CHANNELS + channel, tl.sum(first, 0), inside)
    tl.store(sums + (share * 2 + 1) * CHANNELS + channel, tl.sum(second, 0), inside)


@triton.jit
def _go_back(
    gradients, values, statistics, gamma, beta, sums, gamma_gradient, beta_gradient, results, shares, number, EIGHTHS,
    TRAINING: tl.constexpr, ACTIVE: tl.constexpr,
    SHARES: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradients of x, γ and β. In training x also changes the statistics of the batch."""
    CHANNELS = EIGHTHS * 8
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = channel < CHANNELS
    mean = tl.load(statistics + channel, inside, 0.0)
    inverse = tl.load(statistics + CHANNELS + channel, inside, 0.0)
    scale = tl.load(gamma + channel, inside, 0.0) * inverse
    offset = (tl.load(beta + channel, inside, 0.0) - mean * scale)[None, :]
    total = _total(sums, 0, shares, channel, inside, CHANNELS, SHARES)
    product = _total(sums, 1, shares, channel, inside, CHANNELS, SHARES)
    if tl.program_id(0) == 0:
        tl.store(beta_gradient + channel, total, inside)
        tl.store(gamma_gradient + channel, product, inside)
    scale, mean, inverse = scale[None, :], mean[None, :], inverse[None, :]
    total, product = (total / number)[None, :], (product / number)[None, :]
    for start in tl.range(tl.program_id(0) * ROWS, number, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        mask = (row < number)[:, None] & inside[None, :]
        place = row[:, None] * CHANNELS + channel[None, :]
        gradient, standard = _passed(gradients, values, place, mask, scale, offset, mean, inverse, ACTIVE)
        if TRAINING:
            gradient = gradient - total - standard * product
        tl.store(results + place, (gradient * scale).to(results.dtype.element_ty), mask)


def _sums(kernel: Any, arguments: tuple[Any, ...], number: int, channels: int, *flags: bool) -> Tensor:
    """The sums [shares, 2, C] that a pass computes, reduced to a few shares."""
    grid = cut(number, channels, SUMS)
    # Programs that take four tiles each cost less than a pass that adds up more shares.
    if (few := triton.cdiv(number, 4 * grid.rows)) <= SHARES:
        grid = grid._replace(shares=few)
    device = arguments[0].device
    sums = torch.empty(grid.shares, 2, channels, dtype=torch.float32, device=device)
    kernel[grid[:2]](
        *arguments, sums, number, channels // 8, *flags, grid.rows, grid.channels, SUMS.stages, num_warps=SUMS.warps
    )
    if grid.shares <= SHARES:
        return sums
    totals = torch.empty(1, 2, channels, dtype=torch.float32, device=device)
    _gather[(triton.cdiv(2 * channels, 16),)](sums, totals, grid.shares, channels, 128, 16)
    return totals


class _Norm(torch.autograd.Function):
    """`normalize` with its gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        gamma: Tensor,
        beta: Tensor,
        shortcut: Tensor | None,
        norm: nn.BatchNorm2d,
        active: bool,
    ) -> Tensor:
        channels, number = values.shape[1], values.numel() // values.shape[1]
        statistics = torch.empty(2, channels, dtype=torch.float32, device=values.device)
        results = torch.empty_like(values)
        grid = cut(number, channels, WHOLE)
        with launching(values):
            sums = _sums(_measure, (values,), number, channels) if norm.training else statistics[None]
            _normalize[grid[:2]](
                values, sums, gamma, beta, norm.running_mean, norm.running_var, norm.num_batches_tracked, statistics,
                values if shortcut is None else shortcut, results, len(sums), number, channels // 8,
                norm.momentum, norm.eps, norm.training, active, shortcut is not None,
                SHARES, grid.rows, grid.channels, WHOLE.stages, num_warps=WHOLE.warps,
            )  # fmt: skip
        ctx.save_for_backward(values, gamma, beta, statistics)
        ctx.training, ctx.active = norm.training, active
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        values, gamma, beta, statistics = ctx.saved_tensors
        channels, number = values.shape[1], values.numel() // values.shape[1]
        gradient = gradient.to(values.dtype).contiguous(memory_format=torch.channels_last)
        gamma_gradient, beta_gradient, results = (torch.empty_like(each) for each in (gamma, beta, values))
        known = gradient, values, statistics, gamma, beta
        grid = cut(number, channels, WHOLE)
        with launching(values):
            sums = _sums(_collect, known, number, channels, ctx.active)
            _go_back[grid[:2]](
                *known, sums, gamma_gradient, beta_gradient, results, len(sums), number, channels // 8,
                ctx.training, ctx.active, SHARES, grid.rows, grid.channels, WHOLE.stages, num_warps=WHOLE.warps,
            )  # fmt: skip
        return results, gamma_gradient, beta_gradient, gradient if ctx.needs_input_grad[3] else None, None, None


def normalize(values: Tensor, norm: nn.BatchNorm2d, *, active: bool, shortcut: Tensor | None = None) -> Tensor:
    """Apply `norm` to values [B, C, H, W], which lie in memory as [B, H, W, C]; C is a multiple of 8.

    ReLU6 follows if `active`. Then `shortcut`, with the same memory layout, is added. Running statistics are updated as
    in torch.
    """
    result: Tensor = _Norm.apply(values, norm.weight, norm.bias, shortcut, norm, active)
    return result
