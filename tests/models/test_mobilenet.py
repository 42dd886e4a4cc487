"""MobileNetV2 and EfficientNet-Lite, against a plain reading of their papers' tables."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from csda.models.backbones import build_encoder
from csda.models.encoder import Encoder
from csda.models.mobilenet import PaddedAtTheEnd

BLOCKS = {
    "mobilenet_v2": "1-3-16-1 6-3-24-2 6-3-24-1 6-3-32-2 6-3-32-1 6-3-32-1 6-3-64-2 6-3-64-1 6-3-64-1 6-3-64-1 "
    "6-3-96-1 6-3-96-1 6-3-96-1 6-3-160-2 6-3-160-1 6-3-160-1 6-3-320-1",
    "efficientnet_lite0": "1-3-16-1 6-3-24-2 6-3-24-1 6-5-40-2 6-5-40-1 6-3-80-2 6-3-80-1 6-3-80-1 "
    "6-5-112-1 6-5-112-1 6-5-112-1 6-5-192-2 6-5-192-1 6-5-192-1 6-5-192-1 6-3-320-1",
    "efficientnet_lite1": "1-3-16-1 6-3-24-2 6-3-24-1 6-3-24-1 6-5-40-2 6-5-40-1 6-5-40-1 6-3-80-2 6-3-80-1 6-3-80-1 "
    "6-3-80-1 6-5-112-1 6-5-112-1 6-5-112-1 6-5-112-1 6-5-192-2 6-5-192-1 6-5-192-1 6-5-192-1 6-5-192-1 6-3-320-1",
    "efficientnet_lite2": "1-3-16-1 6-3-24-2 6-3-24-1 6-3-24-1 6-5-48-2 6-5-48-1 6-5-48-1 6-3-88-2 6-3-88-1 6-3-88-1 "
    "6-3-88-1 6-5-120-1 6-5-120-1 6-5-120-1 6-5-120-1 6-5-208-2 6-5-208-1 6-5-208-1 6-5-208-1 6-5-208-1 6-3-352-1",
}
"""Expansion, kernel, channels and stride of each block."""
every_one = pytest.mark.parametrize("name", sorted(BLOCKS))


def _column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None, None]


def _normalize(name: str, images: Tensor) -> Tensor:
    if name == "mobilenet_v2":
        return (images - _column(0.485, 0.456, 0.406)) / _column(0.229, 0.224, 0.225)
    return (255 * images - 127) / 128


def _random(name: str, monkeypatch: pytest.MonkeyPatch) -> Encoder:
    """With weights of all layers drawn and statistics that fit them, in double precision from the start."""
    monkeypatch.setattr(torch, "tensor", partial(torch.tensor, dtype=torch.float64))
    torch.manual_seed(0)
    encoder = build_encoder(name, 64, 3, dropout=0.5).double()
    for module in encoder.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0.0, 0.3)
    encoder(torch.rand(16, 3, 64, 64, dtype=torch.float64))
    return encoder.eval()


def _window(values: Tensor, kernel: int, stride: int, *, at_the_end: bool) -> Tensor:
    """Padding as each framework documents it, one side at a time."""
    for axis in (2, 3):
        side = values.shape[axis]
        before = after = kernel // 2
        if at_the_end:
            rest = side % stride or stride
            total = max(kernel - rest, 0)
            before, after = total // 2, total - total // 2
        shape = list(values.shape)
        zeros = [values.new_zeros(*shape[:axis], count, *shape[axis + 1 :]) for count in (before, after)]
        values = torch.cat((zeros[0], values, zeros[1]), dim=axis)
    return values


def _read_table(name: str, encoder: Encoder, images: Tensor) -> Tensor:
    """The network layer by layer, from the state dict in its order."""
    tensors = iter([value for key, value in encoder.state_dict().items() if not key.endswith("num_batches_tracked")])
    lite = name.startswith("efficientnet_lite")

    def layer(values: Tensor, kernel: int, stride: int, groups: int = 1) -> Tensor:
        weight = next(tensors)
        assert weight.shape[1:] == (values.shape[1] // groups, kernel, kernel)
        values = F.conv2d(_window(values, kernel, stride, at_the_end=lite), weight, stride=stride, groups=groups)
        scale, shift, mean, variance = (next(tensors)[:, None, None] for _ in range(4))
        return (values - mean) / torch.sqrt(variance + (1e-3 if lite else 1e-5)) * scale + shift

    values = layer(_normalize(name, images), 3, 2).clamp(0, 6)
    for block in BLOCKS[name].split():
        expansion, kernel, outputs, stride = map(int, block.split("-"))
        hidden = layer(values, 1, 1).clamp(0, 6) if expansion > 1 else values
        assert hidden.shape[1] == expansion * values.shape[1]
        hidden = layer(hidden, kernel, stride, groups=hidden.shape[1]).clamp(0, 6)
        result = layer(hidden, 1, 1)
        assert result.shape[1] == outputs
        values = values + result if result.shape == values.shape else result
    features = layer(values, 1, 1).clamp(0, 6).mean(dim=(2, 3))
    assert next(tensors, None) is None
    return features


@every_one
@pytest.mark.parametrize("size", [32, 64, 75])
def test_the_network_is_that_of_the_table(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, images = _random(name, monkeypatch), torch.rand(2, 3, size, size, dtype=torch.float64)
    features = encoder(images)
    assert features.std() > 0.01
    torch.testing.assert_close(features, _read_table(name, encoder, images))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("mobilenet_v2", 3_504_872),
        ("efficientnet_lite0", 4_652_008),
        ("efficientnet_lite1", 5_416_680),
        ("efficientnet_lite2", 6_092_072),
    ],
)
def test_the_network_has_the_published_parameters(name: str, parameters: int) -> None:
    """With those of a classifier of a thousand classes."""
    encoder = build_encoder(name, 64, 3, dropout=0.5)
    assert sum(parameter.numel() for parameter in encoder.parameters()) == parameters - 1_281_000


@every_one
def test_a_grey_image_is_one_whose_colours_are_equal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    grey = torch.rand(2, 1, 40, 40, dtype=torch.float64)
    encoder = _random(name, monkeypatch)
    assert torch.equal(encoder(grey), encoder(grey.repeat(1, 3, 1, 1)))


@every_one
def test_stages_halve_the_image_where_alexnet_does(name: str) -> None:
    """So that the layers at which samples are mixed mean the same."""
    values = torch.rand(2, 3, 64, 64)
    paper = values
    for stage, block in zip(build_encoder(name, 64, 3, 0.5), build_encoder("alexnet", 64, 3, 0.5), strict=True):
        values, paper = stage(values), block(paper)
        assert values.shape[2:] == paper.shape[2:]


@every_one
def test_dropout_leaves_out_features_in_training_alone(name: str) -> None:
    images = torch.rand(8, 3, 64, 64)
    shares: dict[bool, float] = {}
    encoder = build_encoder(name, 64, 3, dropout=0.5)
    plain: Callable[[Tensor], Tensor] = encoder[:-1]
    for training in (True, False):
        encoder.train(training)
        pooled = plain(images).mean(dim=(2, 3))
        shares[training] = (encoder[-1](plain(images))[pooled > 0] == 0).float().mean().item()
    assert shares[True] == pytest.approx(0.5, abs=0.05)
    assert shares[False] == 0


def test_padding_at_the_end_keeps_the_size_that_the_stride_divides() -> None:
    convolution = PaddedAtTheEnd(1, 1, 5, 2, bias=False)
    nn.init.ones_(convolution.weight)
    for side, places in ((6, 3), (7, 4)):
        assert convolution(torch.ones(1, 1, side, side)).shape[2:] == (places, places)
    # One row and column of zeros before an even side of six, two after it.
    assert convolution(torch.ones(1, 1, 6, 6))[0, 0].tolist() == [[16, 20, 12], [20, 25, 15], [12, 15, 9]]
