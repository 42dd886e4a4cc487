"""Layers of MobileNetV2 and similar networks by kernels: depthwise convolutions, BatchNorm with ReLU6 and shortcut."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from csda.fast import kernels
from csda.fast.padded import MULTIPLE
from csda.models.mobilenet import InvertedResidual, Layer, PaddedAtTheEnd


class FusedLayer(nn.Sequential):
    """The modules of a `Layer`, computed by kernels where these support the values."""

    def __init__(self, layer: nn.Module) -> None:
        assert isinstance(layer, Layer)
        super().__init__(*layer)
        convolution = self[0]
        assert isinstance(convolution, nn.Conv2d)
        self.depthwise = (
            convolution.groups == convolution.in_channels == convolution.out_channels
            and convolution.kernel_size[0] in (3, 5)
        )

    def forward(self, values: Tensor, shortcut: Tensor | None = None) -> Tensor:
        convolution, norm, active = self[0], self[1], len(self) > 2
        assert isinstance(convolution, nn.Conv2d)
        if self.depthwise and _dense(values):
            values = _filter(convolution, values)
        elif kernels.supported(values.device) and values.shape[1] % MULTIPLE:
            values = _with_more_channels(convolution, values)
        else:
            values = convolution(values)
        if _dense(values) and type(norm) is nn.BatchNorm2d and (shortcut is None or _dense(shortcut)):
            from csda.fast.normalization import normalize

            return normalize(values, norm, active=active, shortcut=shortcut)
        for module in list(self)[1:]:
            values = module(values)
        return values if shortcut is None else shortcut + values


class FusedResidual(nn.Module):
    """An `InvertedResidual` whose last layer adds the shortcut."""

    def __init__(self, block: InvertedResidual) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(FusedLayer(layer) for layer in block.layers))
        self.adds = block.adds

    def forward(self, values: Tensor) -> Tensor:
        *layers, last = self.layers
        result = values
        for layer in layers:
            result = layer(result)
        fused: Tensor = last(result, values if self.adds else None)
        return fused


def fuse_layers(module: nn.Module) -> bool:
    """Replace the layers and blocks of a network; return whether there were any. Weights and their names stay."""
    found = False
    for name, child in module.named_children():
        if isinstance(child, InvertedResidual | Layer):
            fused = FusedLayer(child) if isinstance(child, Layer) else FusedResidual(child)
            module.add_module(name, fused.train(child.training))
            found = True
        else:
            found |= fuse_layers(child)
    return found


def _dense(values: Tensor) -> bool:
    """Whether the kernels can read these values: bfloat16 on a GPU, channels last, their number a multiple of 8."""
    return (
        values.dtype == torch.bfloat16
        and kernels.supported(values.device)
        and values.shape[1] % MULTIPLE == 0
        and values.numel() < 2**31  # the kernels count in 32 bits
        and values.is_contiguous(memory_format=torch.channels_last)
    )


def _filter(convolution: nn.Conv2d, values: Tensor) -> Tensor:
    from csda.fast.depthwise import convolve

    (top, bottom), (left, right) = (_padding(convolution, side) for side in values.shape[2:])
    kernel, stride = convolution.kernel_size[0], convolution.stride[0]
    height = (values.shape[2] + top + bottom - kernel) // stride + 1
    width = (values.shape[3] + left + right - kernel) // stride + 1
    return convolve(values, convolution.weight, stride, (top, left), (height, width))


def _with_more_channels(convolution: nn.Conv2d, values: Tensor) -> Tensor:
    """The convolution of images, padded with channels of zeros, because a GPU has faster kernels for eight channels."""
    missing = -values.shape[1] % MULTIPLE
    down, across = (_padding(convolution, side) for side in values.shape[2:])
    dtype = kernels.matrix_dtype()
    padded = F.pad(values.to(dtype), (*across, *down, 0, missing)).contiguous(memory_format=torch.channels_last)
    weight = F.pad(convolution.weight, (0, 0, 0, 0, 0, missing))
    return F.conv2d(padded, weight, stride=convolution.stride)


def _padding(convolution: nn.Conv2d, side: int) -> tuple[int, int]:
    """Number of zeros before and after a row or column of this length."""
    kernel, stride = convolution.kernel_size[0], convolution.stride[0]
    if not isinstance(convolution, PaddedAtTheEnd):
        return int(convolution.padding[0]), int(convolution.padding[0])
    missing = max((-(-side // stride) - 1) * stride + kernel - side, 0)
    return missing // 2, missing - missing // 2
