"""Layers whose channels are padded to a multiple of eight."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MULTIPLE = 8
"""GPUs are fast if the number of channels is a multiple of eight. For one or three channels they use far slower
kernels.
"""


class PaddedConvTranspose2d(nn.ConvTranspose2d):
    """`nn.ConvTranspose2d` without output padding, computed with additional channels of zeros."""

    def forward(self, values: Tensor) -> Tensor:  # type: ignore[override]
        assert self.bias is not None
        missing = -self.out_channels % MULTIPLE
        weight, bias = F.pad(self.weight, (0, 0, 0, 0, 0, missing)), F.pad(self.bias, (0, missing))
        stride, padding = self.stride, self.padding
        return F.conv_transpose2d(values, weight, bias, stride, padding)[:, : self.out_channels]  # type: ignore[arg-type]


class PaddedLinear(nn.Linear):
    """`nn.Linear` computed with additional outputs of zeros."""

    def forward(self, values: Tensor) -> Tensor:
        missing = -self.out_features % MULTIPLE
        weight, bias = F.pad(self.weight, (0, 0, 0, missing)), F.pad(self.bias, (0, missing))
        return F.linear(values, weight, bias)[:, : self.out_features]


def pad_outputs(head: nn.Sequential) -> None:
    """Replace the last layer of a head if the number of its outputs is no multiple of eight. Its weights are kept."""
    layer = head[-1]
    if type(layer) is nn.Linear and layer.out_features % MULTIPLE:
        with torch.device("meta"):
            made = PaddedLinear(layer.in_features, layer.out_features)
        made.weight, made.bias = layer.weight, layer.bias
        head[-1] = made


def pad_channels(method: nn.Module) -> None:
    """Replace transposed convolutions whose number of channels is not a multiple of eight. Their weights are kept."""
    for module in list(method.modules()):
        for name, child in module.named_children():
            if type(child) is nn.ConvTranspose2d and child.out_channels % MULTIPLE:
                setattr(module, name, _padded(child))


def _padded(layer: nn.ConvTranspose2d) -> PaddedConvTranspose2d:
    stride, padding = layer.stride, layer.padding
    with torch.device("meta"):
        made = PaddedConvTranspose2d(layer.in_channels, layer.out_channels, layer.kernel_size, stride, padding)  # type: ignore[arg-type]
    made.weight, made.bias = layer.weight, layer.bias
    return made
