"""Layers with padded channels against torch's."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn

from csda.fast.padded import PaddedConvTranspose2d, PaddedLinear, pad_channels, pad_outputs


@pytest.mark.parametrize("channels", [3, 1, 8])
def test_channels_of_zeros_change_neither_pixels_nor_gradients(channels: int) -> None:
    torch.manual_seed(0)
    ours = nn.Sequential(nn.ConvTranspose2d(4, channels, 4, 2, 1)).double()
    theirs = deepcopy(ours)
    weights = list(ours.parameters())
    pad_channels(ours)
    assert isinstance(ours[0], PaddedConvTranspose2d) == (channels % 8 != 0)
    assert [id(weight) for weight in ours.parameters()] == [id(weight) for weight in weights]
    values = torch.rand(2, 4, 6, 6, dtype=torch.float64, requires_grad=True)
    twin = values.detach().clone().requires_grad_()
    torch.testing.assert_close(ours(values), theirs(twin))
    ours(values).square().sum().backward()
    theirs(twin).square().sum().backward()
    torch.testing.assert_close(values.grad, twin.grad)
    for parameter, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)


@pytest.mark.parametrize("outputs", [7, 1, 8])
def test_outputs_of_zeros_change_neither_logits_nor_gradients(outputs: int) -> None:
    torch.manual_seed(0)
    ours = nn.Sequential(nn.ReLU(), nn.Linear(5, outputs)).double()
    theirs = deepcopy(ours)
    weights = list(ours.parameters())
    pad_outputs(ours)
    assert isinstance(ours[1], PaddedLinear) == (outputs % 8 != 0)
    assert [id(weight) for weight in ours.parameters()] == [id(weight) for weight in weights]
    values = torch.randn(3, 5, dtype=torch.float64)
    torch.testing.assert_close(ours(values), theirs(values))
    ours(values).square().sum().backward()
    theirs(values).square().sum().backward()
    for parameter, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)
