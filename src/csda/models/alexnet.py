"""The paper's network: a small AlexNet, the one of the GLM and Neighbor Matching experiments.

Five blocks `Conv(k=4, s=2, p=1) → ReLU → BatchNorm` halve the image five times; two linear layers with dropout end
the encoder θ_e in 256 features, and `ReLU → Linear` is the shared head θ_fc. With 128×128 colour images and seven
classes that is 9,691,591 parameters, the paper's 9.692M.
"""

from __future__ import annotations

from torch import nn

from csda.models.dropout import Dropout

FEATURES = 256
_CHANNELS = (32, 32, 64, 64, 128)
_HIDDEN = 4096


def alexnet(image_size: int, channels: int, dropout: float = 0.5) -> nn.Sequential:
    """The encoder θ_e as a sequence of six stages, images [B, channels, S, S] to features [B, 256]."""
    blocks = []
    for inputs, outputs in zip((channels, *_CHANNELS), _CHANNELS, strict=False):
        convolution = nn.Conv2d(inputs, outputs, kernel_size=4, stride=2, padding=1)
        blocks.append(nn.Sequential(convolution, nn.ReLU(), nn.BatchNorm2d(outputs)))
    flat = _CHANNELS[-1] * (image_size // 2 ** len(_CHANNELS)) ** 2
    linear = nn.Sequential(
        nn.Flatten(),
        Dropout(dropout),
        nn.Linear(flat, _HIDDEN),
        nn.ReLU(),
        Dropout(dropout),
        nn.Linear(_HIDDEN, FEATURES),
    )
    return nn.Sequential(*blocks, linear)
