"""Blocks `Conv(4, 2, 1) → ReLU → BatchNorm` in Triton. Each activation is written once; no normalised copy is written.

With r = ReLU(conv + bias) a block computes y = s·(r − μ) + β for each channel, where s = γ/√(σ² + ε). Only r is stored,
as [B, H, W, C] in bfloat16; sums are in float32.

- The next convolution reads r: s is multiplied into its weights, and −μ and β become a constant for each output
  channel. The border is zero in y but not in r, so the constant depends on which borders a position touches: 4 × 4
  cases.
- The sums for μ and σ² are computed together with r, and those for BatchNorm's gradient together with the gradient of
  y. Each program writes its partial sum and a small kernel adds these up in a fixed order, so results are the same bit
  by bit in every run.
- The gradient of the weights is also computed from r: s·(G − μ·D) + β·D, where G is the product of gradients with r and
  D the sum of the gradients at positions where a filter weight is inside the image.

A batch may consist of segments with separate batch statistics, as if each were a batch of its own. All are computed by
the same launches: a program works within one segment, and everything that depends on statistics has a leading axis of
segments.

The first block has one or three input channels. `_pack` adds a border and pads to four channels, the last of them ones.
The "weight" of this channel has the gradient of the bias.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from csda.fast.kernels import launching

PACKED = 4
"""Channels of a packed image."""


class Tiles(NamedTuple):
    """How a kernel divides its work: rows per tile, depth of a matrix product, warps, pipeline stages, programs."""

    rows: int
    depth: int
    warps: int
    stages: int
    programs: int


# Chosen by measurement on an H200, by input and output channels of the convolution.
FORWARD = {
    (4, 32): Tiles(128, 64, 4, 1, 660),
    (32, 32): Tiles(128, 64, 4, 3, 396),
    (32, 64): Tiles(128, 64, 4, 3, 264),
    (64, 64): Tiles(128, 64, 4, 3, 264),
    (64, 128): Tiles(64, 64, 4, 4, 264),
}
INPUT_GRADIENT = {
    (32, 32): Tiles(128, 32, 4, 6, 264),
    (32, 64): Tiles(64, 64, 4, 3, 396),
    (64, 64): Tiles(64, 64, 4, 3, 264),
    (64, 128): Tiles(64, 64, 4, 3, 264),
}
WEIGHT_GRADIENT = {
    (4, 32): Tiles(128, 64, 4, 1, 528),
    (32, 32): Tiles(64, 128, 4, 3, 264),
    (32, 64): Tiles(64, 128, 4, 3, 264),
    (64, 64): Tiles(64, 128, 4, 3, 264),
    (64, 128): Tiles(64, 128, 4, 3, 132),
}
BLOCK = 1024
"""Elements that a program of an elementwise kernel computes at a time."""
REDUCERS = 264
"""Number of programs of those elementwise kernels that also compute sums."""


@triton.jit
def _pack(
    images, packed, stride_image, stride_channel, stride_row, stride_column, count,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Convert images of any layout [B, CHANNELS, HEIGHT, WIDTH] to [B, HEIGHT + 2, WIDTH + 2, 4], with a border of
    zeros.
    """
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = pixel % (WIDTH + 2) - 1
    y = pixel // (WIDTH + 2) % (HEIGHT + 2) - 1
    image = pixel // ((WIDTH + 2) * (HEIGHT + 2))
    inside = (x >= 0) & (x < WIDTH) & (y >= 0) & (y < HEIGHT) & (pixel < count)
    source = images + image.to(tl.int64) * stride_image + y * stride_row + x * stride_column
    kind = packed.dtype.element_ty
    first = tl.load(source, inside, 0.0).to(kind)
    second = tl.zeros_like(first)
    third = tl.zeros_like(first)
    if CHANNELS == 3:
        second = tl.load(source + stride_channel, inside, 0.0).to(kind)
        third = tl.load(source + 2 * stride_channel, inside, 0.0).to(kind)
    # joined from the last axis upward: (first, second), (third, one)
    pair = tl.join(tl.join(first, third), tl.join(second, tl.full([BLOCK], 1.0, kind)))
    values = tl.reshape(pair, [BLOCK, 4])
    target = packed + pixel[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(target, values, (pixel < count)[:, None])


@triton.jit
def _prepare(
    weight, bias, statistics, beta, forward_weight, table, backward_weight,
    stride_output, stride_input, stride_row, stride_column,
    INPUTS: tl.constexpr, CHANNELS: tl.constexpr, OUTPUTS: tl.constexpr, FOLD: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Arrange the weights of one output channel for the kernels, and compute the constants of the 16 border cases.

    `forward_weight` [16·CHANNELS, OUTPUTS] is scaled by the BatchNorm before it, for each segment separately.
    `backward_weight` [2, 6, OUTPUTS, 2·CHANNELS] has, for each parity of a row and for two rows and three columns of
    gradients, the weights for an even and an odd column.
    """
    output = tl.program_id(0)
    segment = tl.program_id(1)
    statistics += segment * (3 * CHANNELS)
    forward_weight += segment * (16 * CHANNELS * OUTPUTS)
    table += segment * (16 * OUTPUTS)
    channel = tl.arange(0, CHANNELS)[None, :]
    tap = tl.arange(0, 16)[:, None]
    row, column = tap // 4, tap % 4
    source = weight + output * stride_output + channel * stride_input + row * stride_row + column * stride_column
    plain = tl.load(source, (channel < INPUTS) & (tap < 16), 0.0).to(tl.float32)
    kind = forward_weight.dtype.element_ty
    constant = tl.load(bias + output) + tl.zeros([16], tl.float32)
    scaled = plain.to(kind)
    if FOLD:
        scaled = (plain * tl.load(statistics + 2 * CHANNELS + channel)).to(kind)
        mean = tl.load(statistics + channel)
        of_tap = tl.sum(plain * tl.load(beta + channel) - scaled.to(tl.float32) * mean, 1)
        case = tl.arange(0, 16)[:, None]
        top, bottom, left, right = case // 4 % 2, case // 8, case % 2, case // 2 % 2
        number = tl.arange(0, 16)[None, :]
        lost = (
            ((top == 1) & (number // 4 == 0))
            | ((bottom == 1) & (number // 4 == 3))
            | ((left == 1) & (number % 4 == 0))
            | ((right == 1) & (number % 4 == 3))
        )
        constant += tl.sum(tl.where(lost, 0.0, of_tap[None, :]), 1)
    tl.store(forward_weight + (tap * CHANNELS + channel) * OUTPUTS + output, scaled)
    tl.store(table + tl.arange(0, 16) * OUTPUTS + output, constant)
    if BACKWARD:
        # Independent of statistics, so all segments write the same values.
        down, across = (row + 1) % 2, (column + 1) % 2
        part = (down * 2 + row // 2) * 3 + across - column // 2 + 1
        target = backward_weight + (part * OUTPUTS + output) * (2 * CHANNELS) + channel
        tl.store(target + across * CHANNELS, plain.to(kind))
        # Gradients one column to the left affect only even columns, those one to the right only odd ones.
        empty = tl.arange(0, 8)[:, None]
        part = empty // 2 * 3 + empty % 2 * 2
        target = backward_weight + (part * OUTPUTS + output) * (2 * CHANNELS) + channel
        tl.store(target + (1 - empty % 2) * CHANNELS, tl.zeros([8, CHANNELS], kind))


@triton.jit
def _share(counts, starts):
    """The segment of this program, its first row and number of rows, the index of the program within the segment, and
    the number of programs of the segment.

    `counts` are the numbers of rows of the segments, `starts` the first programs of all segments but the first.
    """
    program = tl.program_id(0)
    segment, first, count = 0, 0, counts[0]
    start, end = 0, tl.num_programs(0)
    for later in tl.static_range(1, len(counts)):
        beyond = program >= starts[later - 1]
        segment = tl.where(beyond, later, segment)
        first = tl.where(beyond, first + count, first)
        count = tl.where(beyond, counts[later], count)
        start = tl.where(beyond, starts[later - 1], start)
        end = tl.where(beyond, end, tl.minimum(end, starts[later - 1]))
    return segment, first, count, program - start, end - start


@triton.jit
def _before(position, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr):
    """Number of input values of a convolution before the image that begins at this position of its output."""
    packed = position // (HEIGHT * WIDTH) * ((2 * HEIGHT + 2) * (2 * WIDTH + 2) * 4)
    return packed if CHANNELS == 4 else position * (4 * CHANNELS)


@triton.jit
def _thin(values, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WARPS: tl.constexpr):
    """Partial sums over the rows of a matrix product: rows of one thread only, so threads exchange nothing."""
    return tl.sum(tl.sum(tl.reshape(values, [ROWS // (16 * WARPS), WARPS, 2, 8, COLUMNS]), 2), 0)


@triton.jit
def _window(
    inputs, image, row, column, inside, begin,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """LANES of the 16·CHANNELS input values of a filter at some positions, from `begin` on."""
    if CHANNELS == 4:
        lane = tl.arange(0, LANES)
        pitch: tl.constexpr = (2 * WIDTH + 2) * 4
        start = (image * (2 * HEIGHT + 2) + 2 * row) * pitch + column * 8
        lane = lane // 16 * pitch + lane % 16
        seen = inside[:, None]
    else:
        # With % the compiler would not recognise the alignment.
        filter_row = begin // (4 * CHANNELS)
        lane = begin - filter_row * (4 * CHANNELS) + tl.arange(0, LANES)
        y = 2 * row - 1 + filter_row
        start = ((image * (2 * HEIGHT) + y) * (2 * WIDTH) + 2 * column - 1) * CHANNELS
        seen = (inside & (y >= 0) & (y < 2 * HEIGHT))[:, None]
        seen = seen & ((column > 0)[:, None] | (lane >= CHANNELS)[None, :])
        seen = seen & ((column < WIDTH - 1)[:, None] | (lane < 3 * CHANNELS)[None, :])
    return tl.load(inputs + start[:, None] + lane[None, :], seen, 0.0)


@triton.jit
def _forward(
    inputs, weight, table, outputs, partial, counts, starts,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, OUTPUTS: tl.constexpr, SUMS: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """ReLU(conv + constant) at all positions [B, HEIGHT, WIDTH], and this program's Σr and Σr² of each channel."""
    segment, first, count, program, programs = _share(counts, starts)
    inputs += _before(first, HEIGHT, WIDTH, CHANNELS)
    weight += segment * (16 * CHANNELS * OUTPUTS)
    table += segment * (16 * OUTPUTS)
    outputs += first * OUTPUTS
    output = tl.arange(0, OUTPUTS)
    total = tl.zeros([WARPS, 8, OUTPUTS], tl.float32)
    squares = tl.zeros([WARPS, 8, OUTPUTS], tl.float32)
    if CHANNELS == 4:
        filters = tl.load(weight + tl.arange(0, 64)[:, None] * OUTPUTS + output[None, :])
        constant = tl.load(table + output)[None, :]
    for tile in tl.range(program, tl.cdiv(count, ROWS), programs, num_stages=STAGES):
        position = tile * ROWS + tl.arange(0, ROWS)
        column = position % WIDTH
        row = position // WIDTH % HEIGHT
        image = position // (WIDTH * HEIGHT)
        inside = position < count
        if CHANNELS == 4:
            window = _window(inputs, image, row, column, inside, 0, HEIGHT, WIDTH, CHANNELS, 64)
            result = tl.dot(window, filters, input_precision="ieee") + constant
        else:
            case = (row == 0) * 4 + (row == HEIGHT - 1) * 8 + (column == 0) * 1 + (column == WIDTH - 1) * 2
            result = tl.load(table + case[:, None] * OUTPUTS + output[None, :])
            for step in tl.range(0, 16 * CHANNELS // DEPTH, num_stages=STAGES):
                window = _window(inputs, image, row, column, inside, step * DEPTH, HEIGHT, WIDTH, CHANNELS, DEPTH)
                deep = step * DEPTH + tl.arange(0, DEPTH)
                filters = tl.load(weight + deep[:, None] * OUTPUTS + output[None, :])
                result = tl.dot(window, filters, result, input_precision="ieee")
        result = tl.maximum(result, 0.0)
        place = position[:, None] * OUTPUTS + output[None, :]
        tl.store(outputs + place, result.to(outputs.dtype.element_ty), inside[:, None])
        if SUMS:
            result = tl.where(inside[:, None], result, 0.0)
            total += _thin(result, ROWS, OUTPUTS, WARPS)
            squares += _thin(result * result, ROWS, OUTPUTS, WARPS)
    if SUMS:
        target = partial + tl.program_id(0) * (2 * OUTPUTS) + output
        tl.store(target, tl.sum(tl.sum(total, 0), 0))
        tl.store(target + OUTPUTS, tl.sum(tl.sum(squares, 0), 0))


@triton.jit
def _statistics(
    partial, gamma, running_mean, running_variance, batches, statistics, counts, ends, momentum, epsilon,
    CHANNELS: tl.constexpr, TRAINING: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Mean, 1/√(variance + ε) and γ times that: from the programs' sums in training, else from the running statistics.

    Running statistics are updated segment by segment, as by separate passes.
    """
    channel = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    kept_mean = tl.load(running_mean + channel)
    kept_variance = tl.load(running_variance + channel)
    begin = 0
    for segment in tl.static_range(len(counts)):
        mean, variance = kept_mean, kept_variance
        if TRAINING:
            total = tl.zeros([GROUP], tl.float32)
            squares = tl.zeros([GROUP], tl.float32)
            for start in range(begin, ends[segment], ROWS):
                program = start + tl.arange(0, ROWS)
                source = partial + program[:, None] * (2 * CHANNELS) + channel[None, :]
                total += tl.sum(tl.load(source, (program < ends[segment])[:, None], 0.0), 0)
                squares += tl.sum(tl.load(source + CHANNELS, (program < ends[segment])[:, None], 0.0), 0)
            begin = ends[segment]
            number = counts[segment] * 1.0
            mean = total / number
            variance = tl.maximum(squares / number - mean * mean, 0.0)
            kept_mean += momentum * (mean - kept_mean)
            kept_variance += momentum * (variance * number / (number - 1.0) - kept_variance)
        deviation = 1.0 / tl.sqrt(variance + epsilon)
        target = statistics + segment * (3 * CHANNELS) + channel
        tl.store(target, mean)
        tl.store(target + CHANNELS, deviation)
        tl.store(target + 2 * CHANNELS, deviation * tl.load(gamma + channel))
    if TRAINING:
        tl.store(running_mean + channel, kept_mean)
        tl.store(running_variance + channel, kept_variance)
        if tl.program_id(0) == 0:
            tl.store(batches, tl.load(batches) + len(counts))


@triton.jit
def _normalize(values, statistics, beta, normalized, counts, starts, CHANNELS: tl.constexpr, ROWS: tl.constexpr):
    """s·(r − μ) + β."""
    segment, first, count, program, _ = _share(counts, starts)
    values += first * CHANNELS
    statistics += segment * (3 * CHANNELS)
    normalized += first * CHANNELS
    place = program * (ROWS * CHANNELS) + tl.arange(0, ROWS * CHANNELS)
    inside = place < count * CHANNELS
    channel = place % CHANNELS
    value = tl.load(values + place, inside, 0.0).to(tl.float32) - tl.load(statistics + channel)
    value = value * tl.load(statistics + 2 * CHANNELS + channel) + tl.load(beta + channel)
    tl.store(normalized + place, value.to(normalized.dtype.element_ty), inside)


@triton.jit
def _receive(
    gradient, values, statistics, arranged, partial, stride_image, stride_channel, stride_row, stride_column,
    counts, starts,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Convert the gradient of y from any layout to [B, HEIGHT, WIDTH, CHANNELS], and compute this program's sums for
    BatchNorm.
    """
    segment, first, count, program, programs = _share(counts, starts)
    values += first * CHANNELS
    arranged += first * CHANNELS
    channel = tl.arange(0, CHANNELS)[None, :]
    mean = tl.load(statistics + segment * (3 * CHANNELS) + channel)
    total = tl.zeros([CHANNELS], tl.float32)
    product = tl.zeros([CHANNELS], tl.float32)
    for tile in range(program, tl.cdiv(count, ROWS), programs):
        position = tile * ROWS + tl.arange(0, ROWS)[:, None]
        column = position % WIDTH
        row = position // WIDTH % HEIGHT
        image = ((first + position) // (WIDTH * HEIGHT)).to(tl.int64)
        source = image * stride_image + row * stride_row + column * stride_column + channel * stride_channel
        rounded = tl.load(gradient + source, position < count, 0.0).to(arranged.dtype.element_ty)
        tl.store(arranged + position * CHANNELS + channel, rounded, position < count)
        value = tl.load(values + position * CHANNELS + channel, position < count, 0.0).to(tl.float32)
        total += tl.sum(rounded.to(tl.float32), 0)
        product += tl.sum(rounded.to(tl.float32) * (value - mean), 0)
    target = partial + tl.program_id(0) * (2 * CHANNELS) + tl.arange(0, CHANNELS)
    tl.store(target, total)
    tl.store(target + CHANNELS, product)


@triton.jit
def _gradient_statistics(
    partial, gamma, statistics, coefficients, gamma_gradient, beta_gradient, counts, ends,
    CHANNELS: tl.constexpr, COPIES: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """BatchNorm's gradients from the programs' sums, and a, b, c with dL/dr = a·dL/dy + b·r + c."""
    channel = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    begin = 0
    gamma_sum = tl.zeros([GROUP], tl.float32)
    beta_sum = tl.zeros([GROUP], tl.float32)
    for segment in tl.static_range(len(counts)):
        total = tl.zeros([GROUP], tl.float32)
        product = tl.zeros([GROUP], tl.float32)
        for start in range(begin, ends[segment], ROWS):
            program = start + tl.arange(0, ROWS)
            inside = (program < ends[segment])[:, None]
            for copy in tl.static_range(COPIES):
                source = partial + program[:, None] * (2 * COPIES * CHANNELS) + (copy * CHANNELS + channel)[None, :]
                total += tl.sum(tl.load(source, inside, 0.0), 0)
                product += tl.sum(tl.load(source + COPIES * CHANNELS, inside, 0.0), 0)
        begin = ends[segment]
        place = segment * (3 * CHANNELS) + channel
        mean = tl.load(statistics + place)
        deviation = tl.load(statistics + place + CHANNELS)
        scale = tl.load(statistics + place + 2 * CHANNELS)
        product *= deviation
        number = counts[segment] * 1.0
        slope = -scale * deviation * product / number
        tl.store(coefficients + place, scale)
        tl.store(coefficients + place + CHANNELS, slope)
        tl.store(coefficients + place + 2 * CHANNELS, -scale * total / number - slope * mean)
        gamma_sum += product
        beta_sum += total
    tl.store(gamma_gradient + channel, gamma_sum)
    tl.store(beta_gradient + channel, beta_sum)


@triton.jit
def _through_norm(
    gradient, values, coefficients, result, partial, counts, starts,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Convert the gradient of y to that of the convolution, and sum it up for each filter weight where that is inside
    the image.
    """
    segment, first, count, program, programs = _share(counts, starts)
    gradient += first * CHANNELS
    values += first * CHANNELS
    coefficients += segment * (3 * CHANNELS)
    result += first * CHANNELS
    channel = tl.arange(0, CHANNELS)[None, :]
    scale = tl.load(coefficients + channel)
    slope = tl.load(coefficients + CHANNELS + channel)
    offset = tl.load(coefficients + 2 * CHANNELS + channel)
    tap = tl.arange(0, 16)[:, None]
    sums = tl.zeros([16, CHANNELS], tl.float32)
    for tile in range(program, tl.cdiv(count, ROWS), programs):
        position = tile * ROWS + tl.arange(0, ROWS)
        place = position[:, None] * CHANNELS + channel
        inside = (position < count)[:, None]
        value = tl.load(values + place, inside, 0.0).to(tl.float32)
        given = tl.load(gradient + place, inside, 0.0).to(tl.float32)
        passed = tl.where(value > 0.0, scale * given + slope * value + offset, 0.0).to(result.dtype.element_ty)
        tl.store(result + place, passed, inside)
        column = (position % WIDTH)[None, :]
        row = (position // WIDTH % HEIGHT)[None, :]
        lost = ((row == 0) & (tap // 4 == 0)) | ((row == HEIGHT - 1) & (tap // 4 == 3))
        lost = lost | ((column == 0) & (tap % 4 == 0)) | ((column == WIDTH - 1) & (tap % 4 == 3))
        seen = tl.where(lost, 0.0, 1.0).to(result.dtype.element_ty)
        sums = tl.dot(seen, passed, sums, input_precision="ieee")
    tl.store(partial + (tl.program_id(0) * 16 + tap) * CHANNELS + channel, sums)


@triton.jit
def _input_gradient(
    gradient, weight, values, statistics, result, partial, counts, starts,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, OUTPUTS: tl.constexpr, SUMS: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """The gradient of a convolution's input, for two columns of a row at a time, and its sums for BatchNorm.

    Row 2i + p of the input depends on rows i + p − a of the gradient, a = 0 and 1, through filter row 2a + 1 − p.
    """
    segment, first, count, program, programs = _share(counts, starts)
    gradient += first * OUTPUTS
    values += first * (4 * CHANNELS)
    result += first * (4 * CHANNELS)
    both = tl.arange(0, 2 * CHANNELS)
    total = tl.zeros([WARPS, 8, 2 * CHANNELS], tl.float32)
    product = tl.zeros([WARPS, 8, 2 * CHANNELS], tl.float32)
    if SUMS:
        mean = tl.load(statistics + segment * (3 * CHANNELS) + both % CHANNELS)[None, :]
    for unit in range(program, 2 * tl.cdiv(count, ROWS), programs):
        parity = unit % 2
        position = unit // 2 * ROWS + tl.arange(0, ROWS)
        column = position % WIDTH
        row = position // WIDTH % HEIGHT
        image = position // (WIDTH * HEIGHT)
        line = (image * HEIGHT + row) * 2 + parity
        place = (line * WIDTH + column)[:, None] * (2 * CHANNELS) + both[None, :]
        inside = (position < count)[:, None]
        if SUMS:
            # Loaded early, because this takes long.
            value = tl.load(values + place, inside, 0.0)
        passed = tl.zeros([ROWS, 2 * CHANNELS], tl.float32)
        for step in tl.range(0, 6 * OUTPUTS // DEPTH, num_stages=STAGES):
            part = step * DEPTH // OUTPUTS
            lane = step * DEPTH - part * OUTPUTS + tl.arange(0, DEPTH)
            y = row + parity - part // 3
            x = column + part % 3 - 1
            seen = (position < count) & (y >= 0) & (y < HEIGHT) & (x >= 0) & (x < WIDTH)
            start = ((image * HEIGHT + y) * WIDTH + x) * OUTPUTS
            given = tl.load(gradient + start[:, None] + lane[None, :], seen[:, None], 0.0)
            deep = parity * (6 * OUTPUTS) + step * DEPTH + tl.arange(0, DEPTH)
            filters = tl.load(weight + deep[:, None] * (2 * CHANNELS) + both[None, :])
            passed = tl.dot(given, filters, passed, input_precision="ieee")
        tl.store(result + place, passed.to(result.dtype.element_ty), inside)
        if SUMS:
            total += _thin(passed, ROWS, 2 * CHANNELS, WARPS)
            product += _thin(passed * (value.to(tl.float32) - mean), ROWS, 2 * CHANNELS, WARPS)
    if SUMS:
        target = partial + tl.program_id(0) * (4 * CHANNELS) + both
        tl.store(target, tl.sum(tl.sum(total, 0), 0))
        tl.store(target + 2 * CHANNELS, tl.sum(tl.sum(product, 0), 0))


@triton.jit
def _weight_gradient(
    inputs, gradient, values, coefficients, partial, counts, starts,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """This program's partial sum of the products [16·CHANNELS, OUTPUTS] of a convolution's inputs and gradients.

    In the first block the gradient is that of y. It is passed through BatchNorm and ReLU here.
    """
    segment, first, count, program, programs = _share(counts, starts)
    inputs += _before(first, HEIGHT, WIDTH, CHANNELS)
    gradient += first * OUTPUTS
    values += first * OUTPUTS
    coefficients += segment * (3 * OUTPUTS)
    output = tl.arange(0, OUTPUTS)
    group = tl.program_id(1)
    result = tl.zeros([LANES, OUTPUTS], tl.float32)
    if CHANNELS == 4:
        scale = tl.load(coefficients + output)[None, :]
        slope = tl.load(coefficients + OUTPUTS + output)[None, :]
        offset = tl.load(coefficients + 2 * OUTPUTS + output)[None, :]
    for tile in tl.range(program, tl.cdiv(count, ROWS), programs, num_stages=STAGES):
        position = tile * ROWS + tl.arange(0, ROWS)
        column = position % WIDTH
        row = position // WIDTH % HEIGHT
        image = position // (WIDTH * HEIGHT)
        inside = position < count
        place = position[:, None] * OUTPUTS + output[None, :]
        given = tl.load(gradient + place, inside[:, None], 0.0)
        window = _window(inputs, image, row, column, inside, group * LANES, HEIGHT, WIDTH, CHANNELS, LANES)
        if CHANNELS == 4:
            value = tl.load(values + place, inside[:, None], 0.0).to(tl.float32)
            passed = tl.where(value > 0.0, scale * given.to(tl.float32) + slope * value + offset, 0.0)
            given = passed.to(gradient.dtype.element_ty)
        result = tl.dot(tl.trans(window), given, result, input_precision="ieee")
    deep = tl.program_id(0) * (16 * CHANNELS) + group * LANES + tl.arange(0, LANES)
    tl.store(partial + deep[:, None] * OUTPUTS + output[None, :], result)


@triton.jit
def _collect(
    partial, tap_sums, statistics, beta, weight_gradient, bias_gradient, share_ends, ends,
    stride_output, stride_input, stride_row, stride_column,
    INPUTS: tl.constexpr, CHANNELS: tl.constexpr, OUTPUTS: tl.constexpr, FOLD: tl.constexpr,
    GROUP: tl.constexpr, SHARES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The gradient of weight and bias from all partial sums: s·(G − μ·D) + β·D if a BatchNorm came before."""
    output = tl.arange(0, OUTPUTS)[None, :]
    lane = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    tap = tl.program_id(0) * GROUP // CHANNELS
    channel = (lane % CHANNELS)[:, None]
    share_begin, begin = 0, 0
    weight_sum = tl.zeros([GROUP, OUTPUTS], tl.float32)
    bias_sum = tl.zeros([OUTPUTS], tl.float32)
    for segment in tl.static_range(len(share_ends)):
        product = tl.zeros([GROUP, OUTPUTS], tl.float32)
        for start in range(share_begin, share_ends[segment], SHARES):
            share = start + tl.arange(0, SHARES)[:, None, None]
            source = partial + (share * (16 * CHANNELS) + lane[None, :, None]) * OUTPUTS + output[None, :, :]
            product += tl.sum(tl.load(source, share < share_ends[segment], 0.0), 0)
        share_begin = share_ends[segment]
        if CHANNELS != 4:
            seen = tl.zeros([OUTPUTS], tl.float32)
            for start in range(begin, ends[segment], ROWS):
                program = start + tl.arange(0, ROWS)[:, None]
                source = tap_sums + (program * 16 + tap) * OUTPUTS + output
                seen += tl.sum(tl.load(source, program < ends[segment], 0.0), 0)
            begin = ends[segment]
            bias_sum += seen
            if FOLD:
                mean = tl.load(statistics + segment * (3 * CHANNELS) + channel)
                scale = tl.load(statistics + segment * (3 * CHANNELS) + 2 * CHANNELS + channel)
                product = scale * (product - mean * seen[None, :]) + tl.load(beta + channel) * seen[None, :]
        weight_sum += product
    if CHANNELS == 4:
        tap = lane[:, None] // CHANNELS
        tl.store(bias_gradient + output + channel * 0, weight_sum, (tap == 5) & (channel == 3))
    # The filter weight (1, 1) is inside the image at every position.
    elif (tap == 5) & (tl.program_id(0) * GROUP % CHANNELS == 0):
        tl.store(bias_gradient + tl.arange(0, OUTPUTS), bias_sum)
    target = output * stride_output + channel * stride_input + tap // 4 * stride_row + tap % 4 * stride_column
    tl.store(weight_gradient + target, weight_sum, channel < INPUTS)


class _Shares(NamedTuple):
    """The results of the programs of a launch, a row for each, and the index after the last row of each segment."""

    rows: Tensor
    ends: tuple[int, ...]


class _Saved(NamedTuple):
    """Tensors for the backward pass of a block: its input, r, statistics of the BatchNorm before it, and its own."""

    inputs: Tensor
    values: Tensor
    before: Tensor
    statistics: Tensor
    backward_weight: Tensor


def run_blocks(
    inputs: Sequence[Tensor],
    norms: Sequence[nn.BatchNorm2d],
    parameters: Sequence[Tensor],
    dtype: torch.dtype,
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """Consecutive blocks, from images or one normalised input [B, C, H, W] to the normalised output of the last.

    `parameters` are weight, bias, γ and β of each block. `norms` have the running statistics and say whether to train.
    With `sizes`, which add up to B, the batch is divided into segments of these sizes with separate batch statistics,
    and the running statistics are updated by each in order. Without, the whole batch has common statistics.
    """
    with launching(inputs[0]):
        values = pack(inputs, dtype) if parameters[0].shape[1] < PACKED else inputs[0]
        # Running statistics are the same for all.
        segments = tuple(sizes) if sizes and norms[0].training else (len(values),)
        normalized: Tensor = _Blocks.apply(values, segments, norms, dtype, *parameters)
    return normalized


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        sizes: tuple[int, ...],
        norms: Sequence[nn.BatchNorm2d],
        dtype: torch.dtype,
        *parameters: Tensor,
    ):
        blocks = [parameters[start : start + 4] for start in range(0, len(parameters), 4)]
        training, needs_input = norms[0].training, ctx.needs_input_grad[0]
        first = blocks[0][0].shape[1] < PACKED
        values = inputs if first else inputs.permute(0, 2, 3, 1).to(dtype).contiguous()
        height, width = values.shape[1] - 2 * first, values.shape[2] - 2 * first
        statistics, beta = torch.empty(0, device=inputs.device), torch.empty(0, device=inputs.device)
        kept: list[Tensor] = []
        for depth, ((weight, bias, gamma, own_beta), norm) in enumerate(zip(blocks, norms, strict=True)):
            height, width = height // 2, width // 2
            channels = PACKED if weight.shape[1] < PACKED else weight.shape[1]
            backward = training and (depth > 0 or needs_input)
            filters, table, backward_filters = _prepared(
                weight, bias, statistics, beta, dtype, channels, len(sizes), backward
            )
            outputs, shares = _convolve(values, filters, table, sizes, height, width, training)
            own = _measure(shares, norm, gamma, _counts(sizes, outputs), training)
            kept += (values, outputs, statistics, own, backward_filters)
            values, statistics, beta = outputs, own, own_beta
        ctx.save_for_backward(*kept, *parameters)
        ctx.sizes, ctx.needs_input, ctx.input_dtype = sizes, needs_input, inputs.dtype
        return _normalized(values, statistics, beta, sizes).permute(0, 3, 1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor):
        length = len(_Saved._fields)
        tensors = ctx.saved_tensors
        number = len(tensors) // (length + 4)
        kept = [_Saved(*tensors[start : start + length]) for start in range(0, length * number, length)]
        blocks = [tensors[start : start + 4] for start in range(length * number, len(tensors), 4)]
        with launching(gradient):
            given, sums = _arrange(gradient, kept[-1], ctx.sizes)
            results: list[Tensor] = []
            for depth in reversed(range(number)):
                saved, (weight, _, gamma, beta) = kept[depth], blocks[depth]
                counts = _counts(ctx.sizes, saved.values)
                coefficients, gamma_gradient, beta_gradient = _norm_gradients(sums, gamma, saved.statistics, counts)
                tap_sums = sums
                if saved.inputs.shape[-1] != PACKED:
                    given, tap_sums = _pass_norm(given, saved.values, coefficients, counts)
                shares = _weight_shares(saved, given, coefficients, counts)
                before = blocks[depth - 1][3] if depth else beta
                weight_gradient, bias_gradient = _collected(shares, tap_sums, saved, before, weight, fold=depth > 0)
                results = [weight_gradient, bias_gradient, gamma_gradient, beta_gradient, *results]
                if depth > 0 or ctx.needs_input:
                    given, sums = _input_gradients(given, saved, counts, sums=depth > 0)
        inputs = given.permute(0, 3, 1, 2).to(ctx.input_dtype) if ctx.needs_input else None
        return inputs, None, None, None, *results


def pack(images: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Join all images [B, 1 or 3, H, W] to one tensor [B, H + 2, W + 2, 4], with a border of zeros and ones in the last
    channel.
    """
    sizes = [len(part) for part in images]
    _, channels, height, width = images[0].shape
    packed = torch.empty(sum(sizes), height + 2, width + 2, PACKED, dtype=dtype, device=images[0].device)
    for part, place in zip(images, packed.split(sizes), strict=True):
        count = place.numel() // PACKED
        _pack[(triton.cdiv(count, BLOCK),)](part, place, *part.stride(), count, height, width, channels, BLOCK)
    return packed


def _counts(sizes: Iterable[int], values: Tensor) -> tuple[int, ...]:
    """Number of rows of each segment in values [B, H, W, C]."""
    return tuple(size * values.shape[1] * values.shape[2] for size in sizes)


def _ends(counts: Sequence[int], rows: int, programs: int, passes: int = 1) -> tuple[int, ...]:
    """The index after the last program of each segment. Each segment has at least one, in proportion to its tiles."""
    tiles = [passes * triton.cdiv(count, rows) for count in counts]
    programs = min(programs, sum(tiles))
    ends = [0]
    for done in accumulate(tiles):
        ends.append(max(ends[-1] + 1, round(programs * done / sum(tiles))))
    return tuple(ends[1:])


def _prepared(
    weight: Tensor,
    bias: Tensor,
    statistics: Tensor,
    beta: Tensor,
    dtype: torch.dtype,
    channels: int,
    segments: int,
    backward: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    outputs = len(weight)
    filters = torch.empty(segments, 16 * channels, outputs, dtype=dtype, device=weight.device)
    table = torch.empty(segments, 16, outputs, dtype=torch.float32, device=weight.device)
    shape = (2, 6, outputs, 2 * channels) if backward else (0,)
    backward_filters = torch.empty(shape, dtype=dtype, device=weight.device)
    _prepare[(outputs, segments)](
        weight, bias, statistics, beta, filters, table, backward_filters, *weight.stride(),
        weight.shape[1], channels, outputs, len(statistics) > 0, backward, num_warps=4,
    )  # fmt: skip
    return filters, table, backward_filters


def _convolve(
    values: Tensor, filters: Tensor, table: Tensor, sizes: tuple[int, ...], height: int, width: int, sums: bool
) -> tuple[Tensor, _Shares]:
    channels, outputs = values.shape[-1], filters.shape[-1]
    tiles = FORWARD[channels, outputs]
    result = torch.empty(len(values), height, width, outputs, dtype=values.dtype, device=values.device)
    counts = _counts(sizes, result)
    ends = _ends(counts, tiles.rows, tiles.programs)
    partial = torch.empty(ends[-1] if sums else 0, 2, outputs, dtype=torch.float32, device=values.device)
    _forward[(ends[-1],)](
        values, filters, table, result, partial, counts, ends[:-1], height, width, channels, outputs, sums,
        tiles.rows, tiles.depth, tiles.stages, tiles.warps, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return result, _Shares(partial, ends)


def _measure(shares: _Shares, norm: nn.BatchNorm2d, gamma: Tensor, counts: tuple[int, ...], training: bool) -> Tensor:
    channels, group = len(gamma), 4
    statistics = torch.empty(len(counts), 3, channels, dtype=torch.float32, device=gamma.device)
    _statistics[(channels // group,)](
        shares.rows, gamma, norm.running_mean, norm.running_var, norm.num_batches_tracked, statistics,
        counts, shares.ends, norm.momentum, norm.eps, channels, training, group, 512, num_warps=8,
    )  # fmt: skip
    return statistics


def _normalized(values: Tensor, statistics: Tensor, beta: Tensor, sizes: tuple[int, ...]) -> Tensor:
    channels = values.shape[-1]
    counts, rows = _counts(sizes, values), BLOCK // channels
    ends = _ends(counts, rows, sum(counts))
    normalized = torch.empty_like(values)
    _normalize[(ends[-1],)](values, statistics, beta, normalized, counts, ends[:-1], channels, rows)
    return normalized


def _arrange(gradient: Tensor, saved: _Saved, sizes: tuple[int, ...]) -> tuple[Tensor, _Shares]:
    _, height, width, channels = saved.values.shape
    counts, rows = _counts(sizes, saved.values), 2 * BLOCK // channels
    ends = _ends(counts, rows, REDUCERS)
    arranged = torch.empty_like(saved.values)
    partial = torch.empty(ends[-1], 2, channels, dtype=torch.float32, device=gradient.device)
    _receive[(ends[-1],)](
        gradient, saved.values, saved.statistics, arranged, partial, *gradient.stride(), counts, ends[:-1],
        height, width, channels, rows,
    )  # fmt: skip
    return arranged, _Shares(partial, ends)


def _norm_gradients(
    sums: _Shares, gamma: Tensor, statistics: Tensor, counts: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    channels, group = len(gamma), 4
    coefficients = torch.empty_like(statistics)
    gamma_gradient, beta_gradient = torch.empty_like(gamma), torch.empty_like(gamma)
    _gradient_statistics[(channels // group,)](
        sums.rows, gamma, statistics, coefficients, gamma_gradient, beta_gradient, counts, sums.ends,
        channels, sums.rows.shape[-1] // channels, group, 512, num_warps=8,
    )  # fmt: skip
    return coefficients, gamma_gradient, beta_gradient


def _pass_norm(given: Tensor, values: Tensor, coefficients: Tensor, counts: tuple[int, ...]) -> tuple[Tensor, _Shares]:
    _, height, width, channels = values.shape
    rows = 4 * BLOCK // channels
    ends = _ends(counts, 4 * rows, REDUCERS)
    result = torch.empty_like(values)
    partial = torch.empty(ends[-1], 16, channels, dtype=torch.float32, device=values.device)
    _through_norm[(ends[-1],)](
        given, values, coefficients, result, partial, counts, ends[:-1], height, width, channels, rows
    )
    return result, _Shares(partial, ends)


def _weight_shares(saved: _Saved, given: Tensor, coefficients: Tensor, counts: tuple[int, ...]) -> _Shares:
    _, height, width, outputs = saved.values.shape
    channels = saved.inputs.shape[-1]
    tiles = WEIGHT_GRADIENT[channels, outputs]
    groups = 16 * channels // tiles.depth
    ends = _ends(counts, tiles.rows, tiles.programs // groups)
    partial = torch.empty(ends[-1], 16 * channels, outputs, dtype=torch.float32, device=given.device)
    _weight_gradient[(ends[-1], groups)](
        saved.inputs, given, saved.values, coefficients, partial, counts, ends[:-1], height, width, channels, outputs,
        tiles.rows, tiles.depth, tiles.stages, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return _Shares(partial, ends)


def _collected(
    shares: _Shares, tap_sums: _Shares, saved: _Saved, beta: Tensor, weight: Tensor, *, fold: bool
) -> tuple[Tensor, Tensor]:
    outputs, channels = len(weight), saved.inputs.shape[-1]
    group = 1 if channels == PACKED else 4
    weight_gradient = torch.empty_like(weight)
    bias_gradient = torch.empty(outputs, dtype=weight.dtype, device=weight.device)
    _collect[(16 * channels // group,)](
        shares.rows, tap_sums.rows, saved.before, beta, weight_gradient, bias_gradient, shares.ends, tap_sums.ends,
        *weight_gradient.stride(), weight.shape[1], channels, outputs, fold, group, 64 // group, 8 * BLOCK // outputs,
    )  # fmt: skip
    return weight_gradient, bias_gradient


def _input_gradients(given: Tensor, saved: _Saved, counts: tuple[int, ...], *, sums: bool) -> tuple[Tensor, _Shares]:
    _, height, width, outputs = given.shape
    channels = saved.inputs.shape[-1]
    tiles = INPUT_GRADIENT[channels, outputs]
    ends = _ends(counts, tiles.rows, tiles.programs, passes=2)
    result = torch.empty_like(saved.inputs)
    partial = torch.empty(ends[-1] if sums else 0, 2, 2 * channels, dtype=torch.float32, device=given.device)
    _input_gradient[(ends[-1],)](
        given, saved.backward_weight, saved.inputs, saved.before, result, partial, counts, ends[:-1],
        height, width, channels, outputs, sums,
        tiles.rows, tiles.depth, tiles.stages, tiles.warps, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return result, _Shares(partial, ends)
