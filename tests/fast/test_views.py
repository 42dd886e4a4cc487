"""Views by the kernels against the plain ones."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

from csda.data.augment import Augmentation, Selection, StandIn
from csda.data.loader import ImagePool
from csda.fast.views import FusedAugmentation, contiguous

Kind = Literal["weak", "strong"]

both = pytest.mark.parametrize("kind", ["weak", "strong"])


def _pixels(channels: int, device: torch.device, count: int = 6, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 20, 20, channels), generator=generator, dtype=torch.uint8).to(device)


def _sampled(kind: Kind, images: Selection, augmentation: Augmentation) -> Tensor:
    """What the kernels make of the images, on any device."""
    fused = FusedAugmentation(augmentation.rotation, augmentation.translation, augmentation.flip)
    return _view(kind, fused, images)


def _view(kind: Kind, augmentation: Augmentation, images: Selection) -> Tensor:
    generator = torch.Generator(images.source.device).manual_seed(3)
    return augmentation.weak(images, generator) if kind == "weak" else augmentation.strong(images, generator)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("augmentation", [Augmentation(), Augmentation(180, 0.4, True)], ids=str)
def test_views_are_those_of_the_plain_code(device: torch.device, channels: int, augmentation: Augmentation) -> None:
    images = Selection(_pixels(channels, device))
    weak, strong = _view("weak", augmentation, images), _view("strong", augmentation, images)
    torch.testing.assert_close(_sampled("weak", images, augmentation), weak, atol=3e-5, rtol=0)
    # On the edge of the cut-out rounding decides.
    assert ((_sampled("strong", images, augmentation) - strong).abs() > 1e-4).float().mean() < 0.002


@pytest.mark.parametrize("channels", [1, 3])
@both
def test_rows_are_read_where_they_lie(device: torch.device, channels: int, kind: Kind) -> None:
    images = Selection(_pixels(channels, device), torch.tensor([4, 1, 4, 0], device=device))
    gathered = Selection(images.pixels())
    assert torch.equal(_sampled(kind, images, Augmentation()), _sampled(kind, gathered, Augmentation()))


@pytest.mark.parametrize("real", [True, False])
@pytest.mark.parametrize("number", [1, 3])
@both
def test_others_stand_in_where_the_device_says_so(device: torch.device, kind: Kind, number: int, real: bool) -> None:
    """Rows of both sources, all of both, and more images than stand in."""
    source, other = _pixels(3, device, 4), _pixels(3, device, number, seed=1)
    flag = torch.tensor(real, device=device)
    rows, other_rows = torch.tensor([3, 1, 3, 0], device=device), torch.arange(number, device=device).flip(0)
    for images in (
        Selection(source, rows, StandIn(other, other_rows, flag)),
        Selection(source, None, StandIn(other, None, flag)),
    ):
        gathered = Selection(images.pixels())
        assert torch.equal(_sampled(kind, images, Augmentation()), _sampled(kind, gathered, Augmentation()))


@pytest.mark.parametrize("real", [True, False])
@both
def test_a_batch_is_never_gathered(
    device: torch.device, kind: Kind, real: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pool(seed: int) -> ImagePool:
        return ImagePool(_pixels(3, device, seed=seed), FusedAugmentation(), torch.Generator(device).manual_seed(4))

    indices, others = torch.tensor([3, 1, 3], device=device), torch.tensor([5, 2], device=device)
    flag = torch.tensor(real, device=device)
    expected = pool(0)(indices, kind) if real else pool(1)(others[[0, 1, 0]], kind)
    batch = pool(0).batch(indices).where(flag, pool(1).batch(others))
    monkeypatch.setattr(Selection, "pixels", None)
    assert torch.equal(batch.view(kind), expected)


@both
def test_a_part_may_have_more_than_two_gigabytes(device: torch.device, kind: Kind) -> None:
    pixels = _pixels(3, device, 1)
    row = 2**31 // pixels.numel() + 1
    # Memory that nobody writes to is not taken from the system.
    source = torch.empty(row + 1, *pixels.shape[1:], dtype=torch.uint8, device=device)
    source[row] = pixels[0]
    images = Selection(source, torch.tensor([row], device=device))
    assert torch.equal(_sampled(kind, images, Augmentation()), _sampled(kind, Selection(pixels), Augmentation()))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@both
def test_a_captured_view_reads_rows_and_choice_anew(kind: Kind) -> None:
    device = torch.device("cuda")
    source, other = _pixels(3, device), _pixels(3, device, 4, seed=1)
    rows, real = torch.tensor([2, 0, 2], device=device), torch.tensor(True, device=device)
    images = Selection(source, rows, StandIn(other, None, real))
    _sampled(kind, images, Augmentation())
    from csda.fast import warp

    draws = torch.zeros(3, 12 if kind == "strong" else 5, device=device)
    view = warp.weak if kind == "weak" else warp.strong
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        views = view(*images, draws, 0.0, 0.0, False, torch.float32)
    for values, choice in (([5, 5, 1], True), ([4, 3, 2], False)):
        rows.copy_(torch.tensor(values))
        real.fill_(choice)
        graph.replay()
        expected = view(Selection(images.pixels()).source, None, None, draws, 0.0, 0.0, False, torch.float32)
        assert torch.equal(views, expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@both
def test_views_are_half_as_wide_under_autocast(kind: Kind) -> None:
    device = torch.device("cuda")
    images = Selection(_pixels(3, device))
    exact = _sampled(kind, images, Augmentation())
    with torch.autocast("cuda", torch.bfloat16):
        half = _sampled(kind, images, Augmentation())
    assert (exact.dtype, half.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(half.float(), exact, atol=2**-8, rtol=0)


def test_a_strided_source_is_not_copied_as_a_whole() -> None:
    source = _pixels(3, torch.device("cpu"))
    strided = source.transpose(1, 2)
    rows, real = torch.tensor([4, 1]), torch.tensor(True)
    assert contiguous(Selection(source, rows)).source is source
    for selection in (
        Selection(strided, rows),
        Selection(source, torch.tensor([[4, 0], [1, 0]])[:, 0]),
        Selection(source, rows, StandIn(strided, rows, real)),
    ):
        dense = contiguous(selection)
        assert len(dense.source) == dense.size == 2
        assert dense.source.is_contiguous()
        assert torch.equal(dense.pixels(), selection.pixels())
