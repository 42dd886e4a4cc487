"""MobileNetV2 (Sandler et al., "MobileNetV2: Inverted Residuals and Linear Bottlenecks", 2018).

Its blocks widen their input by a 1×1 convolution, apply a depthwise convolution, and narrow the result.
EfficientNet-Lite has the same blocks. The first layer normalises the images.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from csda.models.dropout import Dropout
from csda.models.encoder import Encoder

_STEM = 32
_FEATURES = 1280


class Group(NamedTuple):
    """A sequence of blocks of one width; the first has the stride."""

    expansion: int
    outputs: int
    blocks: int
    stride: int
    kernel: int = 3


_STAGES = (
    [Group(1, 16, 1, 1)],
    [Group(6, 24, 2, 2)],
    [Group(6, 32, 3, 2)],
    [Group(6, 64, 4, 2), Group(6, 96, 3, 1)],
    [Group(6, 160, 3, 2), Group(6, 320, 1, 1)],
)
_NORMALIZATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and deviation of ImageNet's colours."""


class Normalize(nn.Module):
    """Images in [0, 1], [B, 1 or 3, H, W], to (x − mean) / deviation with three channels; grey is repeated."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, mean: Sequence[float], deviation: Sequence[float]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean)[:, None, None], persistent=False)
        self.register_buffer("deviation", torch.tensor(deviation)[:, None, None], persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        return (images.expand(-1, 3, -1, -1) - self.mean) / self.deviation


class PaddedAtTheEnd(nn.Conv2d):
    """A convolution with the padding of TensorFlow: if it is odd, the end of a row or column gets more."""

    def forward(self, values: Tensor) -> Tensor:
        kernel, stride = self.kernel_size[0], self.stride[0]
        high, wide = ((-(-side // stride) - 1) * stride + kernel - side for side in values.shape[2:])
        return super().forward(F.pad(values, (wide // 2, wide - wide // 2, high // 2, high - high // 2)))


class Layer(nn.Sequential):
    """`Conv → BatchNorm → ReLU6`, the last only if `active`; `tensorflow` selects its padding and BatchNorm."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int = 1,
        stride: int = 1,
        *,
        groups: int = 1,
        active: bool = True,
        tensorflow: bool,
    ) -> None:
        convolution = (
            PaddedAtTheEnd(inputs, outputs, kernel, stride, groups=groups, bias=False)
            if tensorflow and stride > 1
            else nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
        )
        norm = nn.BatchNorm2d(outputs, eps=1e-3 if tensorflow else 1e-5)
        super().__init__(convolution, norm, *([nn.ReLU6(inplace=True)] if active else []))


class InvertedResidual(nn.Module):
    """Widen, depthwise convolution, narrow; added to the input if the shapes are equal."""

    def __init__(
        self, inputs: int, outputs: int, expansion: int, kernel: int, stride: int, *, tensorflow: bool
    ) -> None:
        super().__init__()
        hidden = inputs * expansion
        widen = [Layer(inputs, hidden, tensorflow=tensorflow)] if expansion > 1 else []
        self.layers = nn.Sequential(
            *widen,
            Layer(hidden, hidden, kernel, stride, groups=hidden, tensorflow=tensorflow),
            Layer(hidden, outputs, active=False, tensorflow=tensorflow),
        )
        self.adds = stride == 1 and inputs == outputs

    def forward(self, values: Tensor) -> Tensor:
        result: Tensor = self.layers(values)
        return values + result if self.adds else result


def build_stages(
    normalize: Normalize, stages: Sequence[Sequence[Group]], dropout: float, *, tensorflow: bool
) -> Encoder:
    """An encoder of five stages that halve the image and one that pools, like AlexNet's."""
    modules, width = [], _STEM
    for stage in stages:
        blocks = nn.Sequential()
        for expansion, outputs, count, stride, kernel in stage:
            for place in range(count):
                step = 1 if place else stride
                blocks.append(InvertedResidual(width, outputs, expansion, kernel, step, tensorflow=tensorflow))
                width = outputs
        modules.append(blocks)
    modules[0] = nn.Sequential(normalize, Layer(3, _STEM, 3, 2, tensorflow=tensorflow), *modules[0])
    modules[-1].append(Layer(width, _FEATURES, tensorflow=tensorflow))
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), Dropout(dropout))
    return Encoder(*modules, pool, width=_FEATURES)


def mobilenet_v2(image_size: int, channels: int, dropout: float = 0.5) -> Encoder:
    """MobileNetV2 of width 1 without its classifier: images of any size to 1,280 features."""
    return build_stages(Normalize(*_NORMALIZATION), _STAGES, dropout, tensorflow=False)


def torchvision_names() -> Iterator[str]:
    """torchvision's names of the convolutions and norms, in the order of the network."""
    yield from ("features.0.0", "features.0.1")
    expansions = [group.expansion for stage in _STAGES for group in stage for _ in range(group.blocks)]
    for number, expansion in enumerate(expansions, start=1):
        active = 1 if expansion == 1 else 2
        layers = [*(f"{layer}.{part}" for layer in range(active) for part in (0, 1)), active, active + 1]
        yield from (f"features.{number}.conv.{layer}" for layer in layers)
    yield from (f"features.{len(expansions) + 1}.0", f"features.{len(expansions) + 1}.1")
