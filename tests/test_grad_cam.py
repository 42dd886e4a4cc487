"""Grad-CAM against its formula on networks whose gradient is known, and thumbnails against the images themselves."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from csda import examples, thumbnails
from csda.grad_cam import SIDE, grad_cam
from csda.models.backbones import build_encoder
from csda.models.encoder import Encoder
from csda.models.two_stream import TwoStream
from csda.report.gallery import collect
from csda.runs import Run
from tiny import train_tiny


class Pooled(nn.Module):
    """Means over the image: the gradient of each feature map is the same everywhere."""

    def forward(self, values: Tensor) -> Tensor:
        return values.mean(dim=(2, 3))


class Patches(nn.Module):
    """A sequence of patches, as a vision transformer has it."""

    def forward(self, values: Tensor) -> Tensor:
        return values.flatten(2).transpose(1, 2)


def _model(*stages: nn.Module, width: int) -> TwoStream:
    torch.manual_seed(0)
    return TwoStream(Encoder(*stages, width=width), 3)


def test_maps_are_those_of_the_formula() -> None:
    """With features f = mean(A) and a head that is linear where f > 0, α_k = W_ck [f_k > 0] / cells."""
    convolution = nn.Conv2d(1, 4, 3, padding=1)
    model = _model(convolution, Pooled(), width=4)
    images, classes = torch.rand(5, 1, 9, 9), torch.tensor([0, 1, 2, 1, 0])
    maps = grad_cam(model, images, classes)
    assert maps is not None
    with torch.no_grad():
        activations = convolution(images)
        weights = model.head[1].weight[classes] * (activations.mean(dim=(2, 3)) > 0) / 81
        expected = (weights[:, :, None, None] * activations).sum(dim=1).relu()
        expected /= expected.amax(dim=(1, 2), keepdim=True).clamp_min(1e-12)
    torch.testing.assert_close(maps, expected)
    frozen = grad_cam(model.requires_grad_(False), images, classes)
    assert frozen is not None
    torch.testing.assert_close(frozen, expected)


def test_a_map_points_at_what_decides() -> None:
    """A network that looks for light: the map is where the light is, for the class that it speaks for."""
    convolution = nn.Conv2d(1, 1, 1, bias=False)
    model = _model(convolution, Pooled(), width=1)
    with torch.no_grad():
        convolution.weight.fill_(1.0)
        model.head[1].weight.copy_(torch.tensor([[1.0], [-1.0], [0.0]]))
    image = torch.zeros(1, 1, 8, 8)
    image[..., 2:4, 5:7] = 1.0
    found = grad_cam(model, image.repeat(2, 1, 1, 1), torch.tensor([0, 1]))
    assert found is not None
    torch.testing.assert_close(found[0], image[0, 0])
    assert found[1].abs().max() == 0


@pytest.mark.parametrize("size", [32, 64, 128])
def test_the_deepest_layer_with_enough_cells_is_taken(size: int) -> None:
    model = TwoStream(build_encoder("alexnet", size, 3, 0.5), 4).train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    maps = grad_cam(model, torch.rand(2, 3, size, size), torch.tensor([0, 3]))
    assert maps is not None
    assert maps.shape[1:] == (8, 8)
    assert maps.shape[1] >= SIDE
    assert model.training
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_network_of_patches_has_no_map() -> None:
    model = _model(nn.Sequential(nn.Conv2d(3, 4, 4, stride=4), Patches(), nn.Flatten()), width=4 * 64)
    assert grad_cam(model, torch.rand(2, 3, 32, 32), torch.tensor([0, 1])) is None


def test_a_run_keeps_the_images_that_its_report_shows(tiny_run: Run, tiny_images: Path) -> None:
    kept = tiny_run.thumbnails
    probs, labels = tiny_run.predictions.part("test")
    ids = [row.id for row in tiny_run.split if row.split == "test"]
    unlabeled, guesses = list(tiny_run.pseudo_labels), np.array(list(tiny_run.pseudo_labels.values()))
    expected = {ids[row] for row in examples.choose_judged(probs, labels)}
    expected |= {unlabeled[row] for row in examples.choose_unlabeled(guesses)}
    assert kept.pictures.keys() == expected
    seen = {(ids[row], name) for pairs in examples.choose_seen(probs, labels) for row, name in pairs}
    assert kept.maps.keys() == seen
    for name, content in kept.pictures.items():
        with Image.open(tiny_images / name) as original, Image.open(io.BytesIO(content)) as picture:
            assert picture.format == "WEBP"
            # Larger than the 32 pixels of the file, since the page shows it larger.
            assert picture.size == (thumbnails.SIZE, thumbnails.SIZE)
            colours = [np.asarray(each.convert("RGB"), dtype=float).mean(axis=(0, 1)) for each in (original, picture)]
            np.testing.assert_allclose(*colours, atol=6)


def test_no_image_is_kept_where_none_may_leave(tiny_images: Path, tmp_path: Path) -> None:
    run = train_tiny(tiny_images, tmp_path / "run", thumbnails=False)
    assert not (run.folder / "thumbnails.npz").exists()
    assert run.thumbnails.pictures == {}
    assert not collect(run)


def test_the_number_and_bytes_of_thumbnails_are_bounded() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (300, 300, 3), dtype=np.uint8)
    content = thumbnails.encode_picture(noise)
    with Image.open(io.BytesIO(content)) as picture:
        assert picture.size == (thumbnails.SIZE, thumbnails.SIZE)
    many = [(str(k), content) for k in range(examples.IMAGES)]
    kept = thumbnails._within_bytes(many)
    assert 0 < len(kept) < len(many)  # noise is what compresses least
    assert sum(len(each) for _, each in kept) <= thumbnails.BYTES
