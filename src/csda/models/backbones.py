"""Encoders by name. Each is a sequence of stages, so that a method can work between them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from csda.errors import ConfigError
from csda.models.alexnet import FEATURES, alexnet
from csda.models.dropout import Dropout
from csda.models.encoder import Encoder


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
    """ResNet-18 without pretrained weights, its features projected to the same 256 as the paper's encoder."""
    stem = nn.Sequential(
        nn.Conv2d(channels, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    )
    stages = [stem]
    for inputs, outputs, stride in ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)):
        stages.append(nn.Sequential(ResidualBlock(inputs, outputs, stride), ResidualBlock(outputs, outputs, 1)))
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), Dropout(dropout), nn.Linear(512, FEATURES))
    return Encoder(*stages, pool)


BACKBONES: dict[str, Callable[[int, int, float], Encoder]] = {"alexnet": alexnet, "resnet18": resnet18}


def build_encoder(name: str, image_size: int, channels: int, dropout: float) -> Encoder:
    if name not in BACKBONES:
        raise ConfigError(f"backbone = {name!r} is unknown; choose one of {', '.join(BACKBONES)}")
    if image_size < 32 or image_size % 32:
        raise ConfigError(
            f"image_size = {image_size} does not fit: the network halves the image five times, so give a multiple of 32"
        )
    return BACKBONES[name](image_size, channels, dropout)
