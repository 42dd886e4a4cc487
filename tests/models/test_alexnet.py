"""The paper's network, by its own figures."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from csda.errors import ConfigError
from csda.models.alexnet import alexnet
from csda.models.backbones import BACKBONES, build_encoder, check_encoder
from csda.models.encoder import Encoder
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
@pytest.mark.parametrize(("size", "channels"), [(32, 1), (64, 3), (47, 3)])
def test_every_backbone_takes_every_size(name: str, size: int, channels: int) -> None:
    encoder = build_encoder(name, size, channels, 0.5)
    assert encoder(torch.rand(2, channels, size, size)).shape == (2, encoder.width)
    check_encoder(name, size, channels, 0.5)


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"backbone = 'alexnett' is unknown; did you mean alexnet\? choose one of"):
        build_encoder("alexnett", 32, 3, 0.5)
    with pytest.raises(ConfigError, match=r"image_size = 24 does not fit alexnet, which halves the image"):
        check_encoder("alexnet", 24, 3, 0.5)
    monkeypatch.setitem(BACKBONES, "wrong", lambda *_: Encoder(nn.Flatten(), width=7))
    with pytest.raises(ConfigError, match=r"backbone wrong gives features \[3072\] and says width = 7"):
        check_encoder("wrong", 32, 3, 0.5)


def test_parts_that_pass_apart_share_what_has_no_batch_norm() -> None:
    encoder = build_encoder("alexnet", 32, 3, 0.0)
    body, tail = encoder.split()
    assert (len(body), len(tail)) == (5, 1)
    whole = Encoder(nn.Sequential(*encoder), width=256)
    body, tail = whole.split()
    assert (len(body), len(tail)) == (1, 0)
    images = torch.rand(2, 3, 32, 32), torch.rand(3, 3, 32, 32)
    torch.testing.assert_close(whole.forward_apart(*images), encoder.forward_apart(*images))
