"""Encoders for frozen features: the network that gives them, and what a training has in its place once it did."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from csda.models.backbones import build_encoder
from csda.models.dropout import Dropout
from csda.models.encoder import Encoder
from csda.models.mobilenet import Layer


class StageFeatures(Encoder):
    """The last `count` stages of an encoder, each averaged over the image, side by side.

    The features before the classifier are made for the classes of ImageNet; earlier stages say more of other images.
    A last layer that widens them for the classifier is left out.
    """

    def __init__(self, encoder: Encoder, count: int) -> None:
        *stages, _ = encoder
        if isinstance(stages[-1], nn.Sequential) and isinstance(stages[-1][-1], Layer):
            stages[-1] = stages[-1][:-1]
        self.count = min(count, len(stages))
        norms = [[each for each in stage.modules() if isinstance(each, nn.BatchNorm2d)] for stage in stages]
        super().__init__(*stages, width=sum(each[-1].num_features for each in norms[-self.count :]))

    def forward(self, *images: Tensor) -> Tensor:
        values = images[0] if len(images) == 1 else torch.cat(images)
        averages = []
        for stage in self:
            values = stage(values)
            averages.append(values.mean(dim=(2, 3)))
        return torch.cat(averages[-self.count :], dim=1)


def build_body(
    name: str, image_size: int, channels: int, stages: int, weights: Mapping[str, Tensor] | None = None
) -> Encoder:
    """The network that predicts: the encoder of a name, or where it is frozen what gives its features.

    Those are of its last `stages`; with 0, or where a network has no stages, they are those before the classifier.
    Of the encoder's `weights` it takes those of the layers that it has.
    """
    encoder = build_encoder(name, image_size, channels, dropout=0.0)
    body = StageFeatures(encoder, stages) if stages and len(encoder) > 1 else encoder
    if weights is not None:
        body.load_state_dict({key: weights[key] for key in body.state_dict()})
    return body


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
