"""The paper's network, by its own figures."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from csda.errors import ConfigError
from csda.models.alexnet import alexnet
from csda.models.backbones import BACKBONES, build_encoder
from csda.models.two_stream import TwoStream


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def test_the_network_has_the_papers_parameters() -> None:
    model = TwoStream(alexnet(128, 3), 7)
    assert _count(model) == 9_691_591


def test_the_network_has_the_papers_multiply_adds() -> None:
    model = TwoStream(alexnet(128, 3), 7).eval()
    counted = []

    def count(module: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        if isinstance(module, nn.Conv2d):
            counted.append(output[0].numel() * module.weight[0].numel())
        else:
            counted.append(output[0].numel() * inputs[0][0].numel())

    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_hook(count)
    model(torch.zeros(1, 3, 128, 128))
    assert sum(counted) == 47_187_712


@pytest.mark.parametrize("name", sorted(BACKBONES))
@pytest.mark.parametrize(("size", "channels"), [(32, 1), (64, 3)])
def test_every_backbone_takes_every_size(name: str, size: int, channels: int) -> None:
    encoder = build_encoder(name, size, channels, 0.5)
    assert encoder(torch.rand(2, channels, size, size)).shape == (2, 256)
    assert isinstance(encoder, nn.Sequential)


@pytest.mark.parametrize(("name", "size"), [("vgg", 32), ("alexnet", 48)])
def test_what_does_not_fit_is_refused(name: str, size: int) -> None:
    with pytest.raises(ConfigError):
        build_encoder(name, size, 3, 0.5)
