"""Depthwise convolutions in Triton, for activations that lie in memory as [B, H, W, C].

Every channel has its own filter of K × K weights, so most of the time is spent on reading and writing activations. A
program computes a tile of pixels and channels, so most reads of neighbouring pixels come from the cache. Padding is
done by index, including the uneven padding of TensorFlow. Weights are read in float32, as [K, K, C].
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from csda.fast.kernels import launching, tile_width


class Tiles(NamedTuple):
    """How a pass is divided: values and channels per tile, warps, and programs that sum up a gradient."""

    values: int
    channels: int
    warps: int
    programs: int


# Chosen by measurement on an H200.
FILTER = {3: Tiles(4096, 32, 4, 0), 5: Tiles(2048, 32, 4, 0)}
CORRELATE = Tiles(1024, 32, 4, 2112)


@triton.jit
def _filter(
    values, weights, results, count, height, width, out_height, out_width, top, left, EIGHTHS,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, BACKWARD: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The convolution, or with BACKWARD its transpose, which takes gradients [.., height, width, C] of its results.

    `count` pixels of [.., out_height, out_width, C] are written.
    """
    CHANNELS = EIGHTHS * 8  # so the compiler knows that pixels begin at multiples of 16 bytes
    pixel = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = channel < CHANNELS
    x = pixel % out_width
    y = pixel // out_width % out_height
    image = (pixel // (out_width * out_height)) * height
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    for row in tl.static_range(KERNEL):
        for column in tl.static_range(KERNEL):
            if BACKWARD:
                above, before = y + top - row, x + left - column
                source_y, source_x = above // STRIDE, before // STRIDE
                seen = (above >= 0) & (before >= 0) & (source_y < height) & (source_x < width)
                if STRIDE > 1:
                    seen = seen & (above % STRIDE == 0) & (before % STRIDE == 0)
            else:
                source_y, source_x = y * STRIDE + row - top, x * STRIDE + column - left
                seen = (source_y >= 0) & (source_x >= 0) & (source_y < height) & (source_x < width)
            mask = (seen & (pixel < count))[:, None] & inside[None, :]
            place = ((image + source_y) * width + source_x)[:, None] * CHANNELS + channel[None, :]
            value = tl.load(values + place, mask, 0.0).to(tl.float32)
            weight = tl.load(weights + (row * KERNEL + column) * CHANNELS + channel, inside, 0.0)
            total += value * weight[None, :]
    place = pixel[:, None] * CHANNELS + channel[None, :]
    tl.store(results + place, total.to(results.dtype.element_ty), (pixel < count)[:, None] & inside[None, :])


@triton.jit
def _product(values, gradient, image, y, x, tap, channel, mask, height, width, CHANNELS):
    """The gradient times the input value under this filter weight."""
    source_x = x + tap
    seen = mask & ((y >= 0) & (y < height) & (source_x >= 0) & (source_x < width))[:, None]
    place = ((image + y) * width + source_x)[:, None] * CHANNELS + channel[None, :]
    return gradient * tl.load(values + place, seen, 0.0).to(tl.float32)


@triton.jit
def _correlate(
    values, gradients, sums, count, height, width, out_height, out_width, top, left, EIGHTHS,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Partial sums [programs, KERNEL, KERNEL, C] of the gradient of the weights. A program handles one row of the
    filter.
    """
    CHANNELS = EIGHTHS * 8
    share = tl.program_id(0)
    row = tl.program_id(2)
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = channel < CHANNELS
    first = tl.zeros([ROWS, WIDTH], tl.float32)
    second = tl.zeros([ROWS, WIDTH], tl.float32)
    third = tl.zeros([ROWS, WIDTH], tl.float32)
    fourth = tl.zeros([ROWS, WIDTH], tl.float32)
    fifth = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(share * ROWS, count, tl.num_programs(0) * ROWS):
        pixel = start + tl.arange(0, ROWS)
        mask = (pixel < count)[:, None] & inside[None, :]
        x = pixel % out_width * STRIDE - left
        y = pixel // out_width % out_height * STRIDE - top + row
        image = pixel // (out_width * out_height) * height
        place = pixel[:, None] * CHANNELS + channel[None, :]
        gradient = tl.load(gradients + place, mask, 0.0).to(tl.float32)
        first += _product(values, gradient, image, y, x, 0, channel, mask, height, width, CHANNELS)
        second += _product(values, gradient, image, y, x, 1, channel, mask, height, width, CHANNELS)
        third += _product(values, gradient, image, y, x, 2, channel, mask, height, width, CHANNELS)
        if KERNEL == 5:
            fourth += _product(values, gradient, image, y, x, 3, channel, mask, height, width, CHANNELS)
            fifth += _product(values, gradient, image, y, x, 4, channel, mask, height, width, CHANNELS)
    sums += (share * KERNEL + row) * KERNEL * CHANNELS + channel
    tl.store(sums, tl.sum(first, 0), inside)
    tl.store(sums + CHANNELS, tl.sum(second, 0), inside)
    tl.store(sums + 2 * CHANNELS, tl.sum(third, 0), inside)
    if KERNEL == 5:
        tl.store(sums + 3 * CHANNELS, tl.sum(fourth, 0), inside)
        tl.store(sums + 4 * CHANNELS, tl.sum(fifth, 0), inside)


@triton.jit
def _add_up(sums, results, shares, CHANNELS, TAPS: tl.constexpr, SHARES: tl.constexpr, WIDTH: tl.constexpr):
    """The sum of the partial sums, in the order of the weights [C, K · K]."""
    tap = tl.program_id(1)
    channel = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    inside = (channel < CHANNELS)[None, :]
    total = tl.zeros([SHARES, WIDTH], tl.float32)
    for start in range(0, shares, SHARES):
        share = (start + tl.arange(0, SHARES))[:, None]
        place = (share * TAPS + tap) * CHANNELS + channel[None, :]
        total += tl.load(sums + place, inside & (share < shares), 0.0)
    tl.store(results + channel * TAPS + tap, tl.sum(total, 0), channel < CHANNELS)


class _Depthwise(torch.autograd.Function):
    """`convolve` with its gradients."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, weight: Tensor, stride: int, before: tuple[int, int], size: tuple[int, int]
    ) -> Tensor:
        shape = *values.shape[:2], *size
        results = torch.empty(shape, dtype=values.dtype, device=values.device, memory_format=torch.channels_last)
        with launching(values):
            _launch_filter(values, weight, results, stride, before, backward=False)
        ctx.save_for_backward(values, weight)
        ctx.stride, ctx.before = stride, before
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        values, weight = ctx.saved_tensors
        gradient = gradient.to(values.dtype).contiguous(memory_format=torch.channels_last)
        inputs, weights = None, None
        with launching(values):
            if ctx.needs_input_grad[0]:
                inputs = torch.empty_like(values)
                _launch_filter(gradient, weight, inputs, ctx.stride, ctx.before, backward=True)
            if ctx.needs_input_grad[1]:
                weights = _weight_gradient(values, gradient, weight, ctx.stride, ctx.before)
        return inputs, weights, None, None, None


def _launch_filter(
    values: Tensor, weight: Tensor, results: Tensor, stride: int, before: tuple[int, int], *, backward: bool
) -> None:
    channels, kernel = weight.shape[0], weight.shape[-1]
    tiles = FILTER[kernel]
    width = tile_width(channels, tiles.channels)
    count, rows = results.numel() // channels, tiles.values // width
    weight = weight.view(channels, -1).t().contiguous()
    _filter[triton.cdiv(count, rows), triton.cdiv(channels, width)](
        values, weight, results, count, *values.shape[2:], *results.shape[2:], *before, channels // 8,
        kernel, stride, backward, rows, width, num_warps=tiles.warps,
    )  # fmt: skip


def _weight_gradient(values: Tensor, gradient: Tensor, weight: Tensor, stride: int, before: tuple[int, int]) -> Tensor:
    channels, kernel = weight.shape[0], weight.shape[-1]
    width = tile_width(channels, CORRELATE.channels)
    groups = triton.cdiv(channels, width)
    count, rows = gradient.numel() // channels, CORRELATE.values // width
    shares = max(1, min(triton.cdiv(count, rows), CORRELATE.programs // (groups * kernel)))
    sums = torch.empty(shares, kernel * kernel, channels, dtype=torch.float32, device=values.device)
    _correlate[shares, groups, kernel](
        values, gradient, sums, count, *values.shape[2:], *gradient.shape[2:], *before, channels // 8,
        kernel, stride, rows, width, num_warps=CORRELATE.warps,
    )  # fmt: skip
    result = torch.empty_like(weight)
    _add_up[groups, kernel * kernel](sums, result, shares, channels, kernel * kernel, 32, width)
    return result


def convolve(values: Tensor, weight: Tensor, stride: int, before: tuple[int, int], size: tuple[int, int]) -> Tensor:
    """Filter each channel of values [B, C, H, W], which lie in memory as [B, H, W, C], by its weights [C, 1, K, K].

    `before` is the number of rows and columns of zeros above and to the left. `size` is the size of the result; the
    missing rows and columns below and to the right are zeros, too. K is 3 or 5, C a multiple of 8.
    """
    result: Tensor = _Depthwise.apply(values, weight, stride, before, size)
    return result
