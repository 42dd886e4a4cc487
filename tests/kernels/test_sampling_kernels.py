"""Views by the kernels against the plain ones."""

from __future__ import annotations

import math

import pytest
import torch

from csda import kernels
from csda.data import augment
from csda.data.augment import Augmentation


def _pixels(channels: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (6, 20, 20, channels), generator=generator, dtype=torch.uint8).to(device)


def _uniform(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    return augment._uniform(rows, columns, device, torch.Generator(device).manual_seed(3))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("augmentation", [Augmentation(), Augmentation(180, 0.4, True)], ids=str)
def test_views_are_those_of_the_plain_code(device: torch.device, channels: int, augmentation: Augmentation) -> None:
    from csda.kernels import sampling

    pixels = _pixels(channels, device)
    flip = augmentation.flip
    with kernels.allowed(False):
        weak, strong = (
            view(pixels, augmentation, torch.Generator(device).manual_seed(3))
            for view in (augment.weak, augment.strong)
        )
    rotation, translation = math.radians(augmentation.rotation), 2 * augmentation.translation
    views = sampling.weak(pixels, _uniform(6, 5, device), rotation, translation, flip, torch.float32)
    torch.testing.assert_close(views, weak, atol=3e-5, rtol=0)
    rotation, translation = max(rotation, math.radians(30)), max(translation, 0.4)
    views = sampling.strong(pixels, _uniform(6, 12, device), rotation, translation, flip, torch.float32)
    # On the edge of the cut-out rounding decides.
    assert ((views - strong).abs() > 1e-4).float().mean() < 0.002


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("view", [augment.weak, augment.strong])
def test_views_are_half_as_wide_under_autocast(view: object) -> None:
    assert callable(view)
    device = torch.device("cuda")
    pixels = _pixels(3, device)
    exact = view(pixels, Augmentation(), torch.Generator(device).manual_seed(0))
    with torch.autocast("cuda", torch.bfloat16):
        half = view(pixels, Augmentation(), torch.Generator(device).manual_seed(0))
    assert (exact.dtype, half.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(half.float(), exact, atol=2**-8, rtol=0)
