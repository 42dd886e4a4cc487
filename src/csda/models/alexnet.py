"""The paper's network: the small AlexNet of the GLM and Neighbor Matching experiments.

Five blocks `Conv(k=4, s=2, p=1) → ReLU → BatchNorm` halve the image five times. Two linear layers with dropout complete
the encoder θ_e with 256 features, and `ReLU → Linear` is the shared head θ_fc. With 128×128 colour images and seven
classes that is 9,691,591 parameters, the paper's 9.692M.
"""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from csda.errors import ConfigError
from csda.models.dropout import Dropout
from csda.models.encoder import Encoder

_CHANNELS = (32, 32, 64, 64, 128)
_HIDDEN = 4096
_FEATURES = 256


class Block(nn.Sequential):
    """`Conv(k=4, s=2, p=1) → ReLU → BatchNorm`."""

    def __init__(self, inputs: int, outputs: int) -> None:
        convolution = nn.Conv2d(inputs, outputs, kernel_size=4, stride=2, padding=1)
        super().__init__(convolution, nn.ReLU(), nn.BatchNorm2d(outputs))


def alexnet(image_size: int, channels: int, dropout: float = 0.5) -> Encoder:
    """The encoder θ_e as a sequence of six stages, images [B, channels, S, S] to features [B, 256]."""
    if image_size < 2 ** len(_CHANNELS):
        raise ConfigError(f"image_size = {image_size} does not fit alexnet, which halves the image five times; give 32")
    blocks = [Block(*sizes) for sizes in pairwise((channels, *_CHANNELS))]
    flat = _CHANNELS[-1] * (image_size // 2 ** len(_CHANNELS)) ** 2
    linear = nn.Sequential(
        nn.Flatten(),
        Dropout(dropout),
        nn.Linear(flat, _HIDDEN),
        nn.ReLU(),
        Dropout(dropout),
        nn.Linear(_HIDDEN, _FEATURES),
    )
    return Encoder(*blocks, linear, width=_FEATURES)
