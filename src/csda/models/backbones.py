"""Encoders by name. Each is a function of image size, channels and dropout, and a line in `BACKBONES`."""

from __future__ import annotations

import difflib
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from csda.errors import ConfigError, is_out_of_memory
from csda.models import efficientnet
from csda.models.adapters import LIBRARIES, adapt, is_adapted
from csda.models.alexnet import alexnet
from csda.models.dropout import Dropout
from csda.models.encoder import Encoder
from csda.models.mobilenet import mobilenet_v2


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions beside a shortcut (He et al., 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs))
        self.second = nn.Sequential(nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs))
        self.shortcut = (
            nn.Identity()
            if stride == 1 and inputs == outputs
            else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        )

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(images))) + self.shortcut(images))


def resnet18(image_size: int, channels: int, dropout: float = 0.5) -> Encoder:
    """ResNet-18 (He et al., 2016) with random weights, and its 512 features projected to 256."""
    stem = nn.Sequential(
        nn.Conv2d(channels, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    )
    stages = [stem]
    for inputs, outputs, stride in ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)):
        stages.append(nn.Sequential(ResidualBlock(inputs, outputs, stride), ResidualBlock(outputs, outputs, 1)))
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), Dropout(dropout), nn.Linear(512, 256))
    return Encoder(*stages, pool, width=256)


VECTORS = "vectors:"
"""Followed by a width. There is no network, because samples are feature vectors."""

BACKBONES: dict[str, Callable[[int, int, float], Encoder]] = {
    "alexnet": alexnet,
    "resnet18": resnet18,
    **{name: efficientnet.builder(name) for name in efficientnet.SCALES},
    "mobilenet_v2": mobilenet_v2,
}


def build_encoder(name: str, image_size: int, channels: int, dropout: float) -> Encoder:
    """The encoder of a name, for square images of this size."""
    if name.startswith(VECTORS) and name.removeprefix(VECTORS).isdecimal():
        return Encoder(nn.Identity(), width=int(name.removeprefix(VECTORS)))
    if is_adapted(name):
        return adapt(name, image_size, channels, dropout)
    if name not in BACKBONES:
        close = difflib.get_close_matches(name, BACKBONES, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        others = [f"{library}:NAME" for library in LIBRARIES]
        raise ConfigError(f"backbone = {name!r} is unknown; {hint}choose one of {', '.join((*BACKBONES, *others))}")
    return BACKBONES[name](image_size, channels, dropout)


def check_encoder(name: str, image_size: int, channels: int, dropout: float) -> None:
    """Refuse an unknown backbone or image size, by a pass through the network on torch's meta device."""
    with torch.device("meta"):
        encoder = build_encoder(name, image_size, channels, dropout).eval()
    if is_adapted(name) or name.startswith(VECTORS):  # `adapt` has passed an image already, or there are no images
        return
    try:
        with torch.no_grad():
            features = encoder.to_empty(device="cpu")(torch.zeros(1, channels, image_size, image_size))
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        reason = str(error).splitlines()[0]
        raise ConfigError(f"image_size = {image_size} does not fit backbone {name}: {reason}") from None
    if features.shape != (1, encoder.width):
        raise ConfigError(
            f"backbone {name} gives features {list(features.shape[1:])} and says width = {encoder.width}; correct it"
        )
