"""Views computed from uint8 pixels by one Triton kernel: affine map, bilinear sampling and colour changes.

`csda.data.augment` defines the views and draws their parameters. These kernels give the same images.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from csda.fast.kernels import launching

BLOCK = 256
"""Pixels that a program computes at a time."""


@triton.jit
def _find(source, rows, stand_in, stand_in_rows, number, real, sample, SIZE: tl.constexpr):
    """The address of the image of a sample. It is computed with 64 bits because a part may have more than 2³¹ bytes."""
    row = sample
    if rows is not None:
        row = tl.load(rows + sample)
    image = source + row.to(tl.int64) * SIZE
    if stand_in is not None:
        row = sample % number
        if stand_in_rows is not None:
            row = tl.load(stand_in_rows + row)
        image = tl.where(tl.load(real), image, stand_in + row.to(tl.int64) * SIZE)
    return image


@triton.jit
def _affine(draws, rotation, translation, FLIP: tl.constexpr):
    """The first two rows of an affine map, from five random numbers in [−1, 1): angle, two shifts, two signs."""
    angle = tl.load(draws) * rotation
    right = tl.load(draws + 1) * translation
    down = tl.load(draws + 2) * translation
    cosine, sine = tl.cos(angle), tl.sin(angle)
    across, along = 1.0, 1.0
    if FLIP:
        across = tl.where(tl.load(draws + 3) < 0.0, -1.0, 1.0)
        along = tl.where(tl.load(draws + 4) < 0.0, -1.0, 1.0)
    return cosine * across, -sine * along, right, sine * across, cosine * along, down


@triton.jit
def _float(number):
    """A whole number below 2²³ as a float, by setting its bits. On a GPU a conversion takes four times as long."""
    return (number.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def _sample(
    image, channel, pixel, xx, xy, x0, yx, yy, y0,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """One channel at the positions of an affine map: bilinear, zeros outside, values in [0, 1]."""
    across = (2.0 * _float(pixel % WIDTH) + 1.0) * (1.0 / WIDTH) - 1.0
    along = (2.0 * _float(pixel // WIDTH) + 1.0) * (1.0 / HEIGHT) - 1.0
    x = ((xx * across + xy * along + x0 + 1.0) * WIDTH - 1.0) / 2.0
    y = ((yx * across + yy * along + y0 + 1.0) * HEIGHT - 1.0) / 2.0
    left, top = tl.floor(x), tl.floor(y)
    part_x, part_y = x - left, y - top
    column, row = left.to(tl.int32), top.to(tl.int32)
    first = image + (row * WIDTH + column) * CHANNELS + channel
    inside = pixel < HEIGHT * WIDTH
    in_left, in_right = inside & (column >= 0) & (column < WIDTH), inside & (column >= -1) & (column < WIDTH - 1)
    in_top, in_bottom = (row >= 0) & (row < HEIGHT), (row >= -1) & (row < HEIGHT - 1)
    upper_left = _float(tl.load(first, in_left & in_top, 0))
    upper_right = _float(tl.load(first + CHANNELS, in_right & in_top, 0))
    lower_left = _float(tl.load(first + WIDTH * CHANNELS, in_left & in_bottom, 0))
    lower_right = _float(tl.load(first + (WIDTH + 1) * CHANNELS, in_right & in_bottom, 0))
    upper = upper_left * (1.0 - part_x) + upper_right * part_x
    lower = lower_left * (1.0 - part_x) + lower_right * part_x
    return (upper * (1.0 - part_y) + lower * part_y) * (1.0 / 255.0)


@triton.jit
def _weak(
    source, rows, stand_in, stand_in_rows, number, real, draws, views, rotation, translation,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, FLIP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(0)
    xx, xy, x0, yx, yy, y0 = _affine(draws + sample * 5, rotation, translation, FLIP)
    image = _find(source, rows, stand_in, stand_in_rows, number, real, sample, HEIGHT * WIDTH * CHANNELS)
    pixel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target = views + sample.to(tl.int64) * (HEIGHT * WIDTH * CHANNELS) + pixel
    for channel in tl.static_range(CHANNELS):
        value = _sample(image, channel, pixel, xx, xy, x0, yx, yy, y0, HEIGHT, WIDTH, CHANNELS)
        tl.store(target + channel * (HEIGHT * WIDTH), value.to(views.dtype.element_ty), pixel < HEIGHT * WIDTH)


@triton.jit
def _strong(
    source, rows, stand_in, stand_in_rows, number, real, draws, views, rotation, translation,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, FLIP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(0)
    draws += sample * 12
    xx, xy, x0, yx, yy, y0 = _affine(draws, rotation, translation, FLIP)
    image = _find(source, rows, stand_in, stand_in_rows, number, real, sample, HEIGHT * WIDTH * CHANNELS)
    left_out = tl.minimum(((tl.load(draws + 5) + 1.0) * 1.5).to(tl.int32), 2)
    brightness = tl.where(left_out == 0, 1.0, 1.0 + 0.9 * tl.load(draws + 6))
    contrast = tl.where(left_out == 1, 1.0, 1.0 + 0.9 * tl.load(draws + 7))
    saturation = tl.where(left_out == 2, 1.0, 1.0 + 0.9 * tl.load(draws + 8))

    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, HEIGHT * WIDTH, BLOCK):
        pixel = start + tl.arange(0, BLOCK)
        for channel in tl.static_range(CHANNELS):
            total += _sample(image, channel, pixel, xx, xy, x0, yx, yy, y0, HEIGHT, WIDTH, CHANNELS)
    average = tl.sum(total, 0) * brightness / (HEIGHT * WIDTH * CHANNELS)

    centre_x, centre_y = tl.load(draws + 9), tl.load(draws + 10)
    side = 0.25 * (tl.load(draws + 11) + 1.0)
    for start in range(0, HEIGHT * WIDTH, BLOCK):
        pixel = start + tl.arange(0, BLOCK)
        across = (2.0 * _float(pixel % WIDTH) + 1.0) / WIDTH - 1.0
        along = (2.0 * _float(pixel // WIDTH) + 1.0) / HEIGHT - 1.0
        kept = (tl.abs(across - centre_x) > side) | (tl.abs(along - centre_y) > side)
        inside = pixel < HEIGHT * WIDTH
        target = views + sample.to(tl.int64) * (HEIGHT * WIDTH * CHANNELS) + pixel
        kind = views.dtype.element_ty
        red = _sample(image, 0, pixel, xx, xy, x0, yx, yy, y0, HEIGHT, WIDTH, CHANNELS)
        red = average + (red * brightness - average) * contrast
        if CHANNELS == 1:
            tl.store(target, tl.where(kept, tl.minimum(tl.maximum(red, 0.0), 1.0), 0.5).to(kind), inside)
        else:
            green = _sample(image, 1, pixel, xx, xy, x0, yx, yy, y0, HEIGHT, WIDTH, CHANNELS)
            green = average + (green * brightness - average) * contrast
            blue = _sample(image, 2, pixel, xx, xy, x0, yx, yy, y0, HEIGHT, WIDTH, CHANNELS)
            blue = average + (blue * brightness - average) * contrast
            grey = (red + green + blue) / 3.0
            red = tl.minimum(tl.maximum(grey + (red - grey) * saturation, 0.0), 1.0)
            green = tl.minimum(tl.maximum(grey + (green - grey) * saturation, 0.0), 1.0)
            blue = tl.minimum(tl.maximum(grey + (blue - grey) * saturation, 0.0), 1.0)
            tl.store(target, tl.where(kept, red, 0.5).to(kind), inside)
            tl.store(target + HEIGHT * WIDTH, tl.where(kept, green, 0.5).to(kind), inside)
            tl.store(target + 2 * HEIGHT * WIDTH, tl.where(kept, blue, 0.5).to(kind), inside)


def weak(
    source: Tensor,
    rows: Tensor | None,
    stand_in: tuple[Tensor, Tensor | None, Tensor] | None,
    draws: Tensor,
    rotation: float,
    translation: float,
    flip: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Views [B, C, H, W] of a `csda.data.augment.Selection` with one or three channels; `draws` [B, 5] are in [−1, 1).

    `rotation` in radians and `translation` in half image widths are the largest values, for a draw of 1.
    """
    views, (height, width, channels) = _views(source, draws, dtype)
    grid = (len(draws), triton.cdiv(height * width, BLOCK))
    with launching(source):
        _weak[grid](
            source, rows, *_others(stand_in), draws, views, rotation, translation,
            height, width, channels, flip, BLOCK, num_warps=4,
        )  # fmt: skip
    return views


def strong(
    source: Tensor,
    rows: Tensor | None,
    stand_in: tuple[Tensor, Tensor | None, Tensor] | None,
    draws: Tensor,
    rotation: float,
    translation: float,
    flip: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Like `weak`, with colour changes and a cut-out; `draws` [B, 12]."""
    views, (height, width, channels) = _views(source, draws, dtype)
    with launching(source):
        _strong[(len(draws),)](
            source, rows, *_others(stand_in), draws, views, rotation, translation,
            height, width, channels, flip, BLOCK, num_warps=8,
        )  # fmt: skip
    return views


def _others(stand_in: tuple[Tensor, Tensor | None, Tensor] | None) -> tuple[Any, ...]:
    """Source, rows and number of the substitute images, and whether the real images are used instead."""
    if stand_in is None:
        return None, None, None, None
    source, rows, real = stand_in
    return source, rows, len(source if rows is None else rows), real


def _views(source: Tensor, draws: Tensor, dtype: torch.dtype) -> tuple[Tensor, tuple[int, int, int]]:
    _, height, width, channels = source.shape
    views = torch.empty(len(draws), channels, height, width, dtype=dtype, device=source.device)
    return views, (height, width, channels)
