"""The encoder of a training on frozen features, which are already computed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from csda.models.dropout import Dropout
from csda.models.encoder import Encoder


class Standardize(nn.Module):
    """Features less their mean, times `scale`, which makes the deviation of each 1."""

    mean: Tensor
    scale: Tensor

    def __init__(self, mean: Tensor, deviation: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        # A feature that hardly varies would be all noise.
        self.register_buffer("scale", 1.0 / deviation.clamp_min(0.01 * deviation.mean().clamp_min(1e-6)))

    def forward(self, features: Tensor) -> Tensor:
        return (features - self.mean) * self.scale


def feature_encoder(mean: Tensor, deviation: Tensor, dropout: float) -> Encoder:
    """Features [B, W] to standardised ones, of which a step leaves some out."""
    return Encoder(Standardize(mean, deviation), Dropout(dropout), width=len(mean))


@torch.no_grad()
def fold(standardize: Standardize, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """A linear layer [n, W], [n] for features as they are, instead of one for standardised features."""
    folded = weight.double() * standardize.scale.double()
    return folded.to(weight.dtype), (bias.double() - folded @ standardize.mean.double()).to(bias.dtype)
