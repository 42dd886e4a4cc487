"""Views against a loop over pixels."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from csda.data import augment
from csda.data.augment import Augmentation, Selection, StandIn

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def _pixels(count: int = 4, size: int = 7, channels: int = 3, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, size, size, channels), generator=generator, dtype=torch.uint8)


def _slow_weak(pixels: Tensor, augmentation: Augmentation, generator: torch.Generator) -> np.ndarray:
    """Rotation about the centre, mirroring and translation, bilinear, zeros outside: one pixel after the other."""
    draws = (2 * torch.rand(len(pixels), 5, generator=generator) - 1).double().tolist()
    source = pixels.double().numpy() / 255
    count, size, _, channels = source.shape
    result = np.zeros((count, channels, size, size))
    middle = (size - 1) / 2
    for sample, (turn, right, down, across, along) in enumerate(draws):
        angle = math.radians(augmentation.rotation * turn)
        shift_x, shift_y = (augmentation.translation * size * draw for draw in (right, down))
        sign_x, sign_y = (-1 if augmentation.flip and draw < 0 else 1 for draw in (across, along))
        for row in range(size):
            for column in range(size):
                x, y = sign_x * (column - middle), sign_y * (row - middle)
                source_x = math.cos(angle) * x - math.sin(angle) * y + shift_x + middle
                source_y = math.sin(angle) * x + math.cos(angle) * y + shift_y + middle
                left, top = math.floor(source_x), math.floor(source_y)
                for near_y in (top, top + 1):
                    for near_x in (left, left + 1):
                        if 0 <= near_x < size and 0 <= near_y < size:
                            weight = (1 - abs(source_x - near_x)) * (1 - abs(source_y - near_y))
                            result[sample, :, row, column] += weight * source[sample, near_y, near_x]
    return result


@pytest.mark.parametrize("augmentation", [Augmentation(), Augmentation(180, 0.4, True), Augmentation(0, 0.2)], ids=str)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [7, 8])
def test_weak_is_what_a_loop_over_pixels_gives(augmentation: Augmentation, channels: int, size: int) -> None:
    pixels = _pixels(5, size, channels)
    images = augmentation.weak(Selection(pixels), torch.Generator().manual_seed(3))
    expected = _slow_weak(pixels, augmentation, torch.Generator().manual_seed(3))
    np.testing.assert_allclose(images.numpy(), expected, atol=1e-5)


def test_without_movement_weak_is_plain() -> None:
    pixels = _pixels()
    still = Augmentation(0, 0).weak(Selection(pixels), torch.Generator())
    torch.testing.assert_close(still, augment.plain(pixels), atol=1e-5, rtol=0)
    assert augment.plain(pixels)[1, 2, 3, 4] == pixels[1, 3, 4, 2] / 255


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_draws_are_those_of_rand_stretched(device: str) -> None:
    """So that a seed means the same views as ever."""
    draws = augment.uniform(1000, 12, torch.device(device), torch.Generator(device).manual_seed(1))
    expected = 2 * torch.rand(1000, 12, device=device, generator=torch.Generator(device).manual_seed(1)) - 1
    assert torch.equal(draws, expected)


def test_movement_stays_within_its_bounds() -> None:
    size = 41
    pixels = torch.zeros(300, size, size, 1, dtype=torch.uint8)
    pixels[:, size // 2, size // 2] = 255
    images = Augmentation(0, 0.1).weak(Selection(pixels), torch.Generator().manual_seed(0))
    axis = torch.arange(size, dtype=torch.float32) - size // 2
    for dim in (1, 2):
        offset = (images[:, 0].sum(dim) * axis).sum(1) / images[:, 0].sum((1, 2))
        assert offset.abs().max() <= 0.1 * size + 0.01
        assert offset.min() < -0.08 * size
        assert offset.max() > 0.08 * size


@pytest.mark.parametrize("view", [Augmentation.weak, Augmentation.strong])
def test_views_are_seeded_and_each_sample_has_its_own(view: Any) -> None:
    same = Selection(_pixels(1, 16), torch.zeros(6, dtype=torch.int64))
    augmentation = Augmentation(flip=True)
    first = view(augmentation, same, torch.Generator().manual_seed(1))
    again = view(augmentation, same, torch.Generator().manual_seed(1))
    other = view(augmentation, same, torch.Generator().manual_seed(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    for left in range(6):
        for right in range(left):
            assert not torch.equal(first[left], first[right])


@pytest.mark.parametrize("channels", [1, 3])
def test_strong_stays_in_range_and_moves_more_than_weak(channels: int) -> None:
    pixels = _pixels(64, 16, channels)
    plain = augment.plain(pixels)
    generator = torch.Generator().manual_seed(0)
    strong = Augmentation().strong(Selection(pixels), generator)
    weak = Augmentation().weak(Selection(pixels), generator)
    assert strong.shape == plain.shape
    assert strong.min() >= 0
    assert strong.max() <= 1
    assert (strong - plain).abs().mean() > (weak - plain).abs().mean()


def test_a_selection_is_its_rows_or_what_stands_in() -> None:
    source, other = _pixels(6), _pixels(4, seed=1)
    rows, other_rows = torch.tensor([5, 0, 5, 3, 1]), torch.tensor([2, 0])
    assert Selection(source).pixels() is source
    assert torch.equal(Selection(source, rows).pixels(), source[[5, 0, 5, 3, 1]])
    for real, expected in ((True, source[[5, 0, 5, 3, 1]]), (False, other[[2, 0, 2, 0, 2]])):
        selection = Selection(source, rows, StandIn(other, other_rows, torch.tensor(real)))
        assert torch.equal(selection.pixels(), expected)
    whole = Selection(source, rows, StandIn(other, None, torch.tensor(False)))
    assert torch.equal(whole.pixels(), other[[0, 1, 2, 3, 0]])


def test_cut_out_is_a_grey_square_and_no_larger_than_half_the_image() -> None:
    size = 32
    white = torch.ones(200, 3, size, size)
    generator = torch.Generator().manual_seed(0)
    draws = torch.rand(200, 3, generator=generator) * 2 - 1
    cut = augment._cut_out(white, centre=draws[:, :2], side=0.25 * (draws[:, 2] + 1))
    grey = cut[:, 0] == 0.5
    assert torch.equal(grey, cut[:, 2] == 0.5)
    assert torch.equal((cut == 0.5) | (cut == 1.0), torch.ones_like(cut, dtype=torch.bool))
    rows, columns = grey.any(2), grey.any(1)
    assert torch.equal(grey, rows[:, :, None] & columns[:, None, :])
    assert int(rows.sum(1).max()) <= size // 2
    assert int(rows.sum(1).max()) > size // 4
