"""Encoders for frozen features: the network that computes them, and the one that replaces it in a training on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from csda.models.averaged_views import ViewChoice
from csda.models.backbones import build_encoder
from csda.models.dropout import Dropout
from csda.models.encoder import Encoder
from csda.models.mobilenet import Layer

Views = Literal["plain", "zoomed", "mirrored"]


class StageFeatures(Encoder):
    """The last `count` stages of an encoder, each averaged over the image, side by side.

    The features before the classifier are specific to the classes of ImageNet; earlier stages are better for other
    images. A last layer that widens them for the classifier is left out.
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


class MeanOfViews(Encoder):
    """The mean features of an image and of its enlarged middle, or of an image and its three mirror images."""

    def __init__(self, encoder: Encoder, views: Literal["zoomed", "mirrored"]) -> None:
        if views not in ("zoomed", "mirrored"):
            raise ValueError(f"views = {views!r}; give zoomed or mirrored")
        super().__init__(encoder, width=encoder.width)
        self.choice = ViewChoice(flips=views == "mirrored", middle=views == "zoomed")

    def forward(self, *images: Tensor) -> Tensor:
        values = images[0] if len(images) == 1 else torch.cat(images)
        image, *others = self.choice.take(values)
        # The plain view comes last, because Grad-CAM shows the last feature map that it finds.
        return torch.stack([self[0](view) for view in (*others, image)]).mean(dim=0)


def build_body(
    name: str,
    image_size: int,
    channels: int,
    stages: int,
    weights: Mapping[str, Tensor] | None = None,
    views: Views = "plain",
) -> Encoder:
    """The network before the head: the encoder of a name, or the part of it that computes frozen features.

    Features are averages of its last `stages`. With 0, or if the network has no stages, they are those before the
    classifier. From `weights` of the encoder it loads those of its own layers. With other `views` than the plain one
    it averages over them.
    """
    encoder = build_encoder(name, image_size, channels, dropout=0.0)
    body = StageFeatures(encoder, stages) if stages and len(encoder) > 1 else encoder
    if weights is not None:
        body.load_state_dict({key: weights[key] for key in body.state_dict()})
    return body if views == "plain" else MeanOfViews(body, views)


class Standardize(nn.Module):
    """Subtract the mean of each feature and multiply by `scale`, which makes its standard deviation 1."""

    mean: Tensor
    scale: Tensor

    def __init__(self, mean: Tensor, deviation: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        # A feature that hardly varies would become noise.
        self.register_buffer("scale", 1.0 / deviation.clamp_min(0.01 * deviation.mean().clamp_min(1e-6)))

    def forward(self, features: Tensor) -> Tensor:
        return (features - self.mean) * self.scale


def feature_encoder(mean: Tensor, deviation: Tensor, dropout: float) -> Encoder:
    """Features [B, W] to standardised features, with dropout."""
    return Encoder(Standardize(mean, deviation), Dropout(dropout), width=len(mean))


@torch.no_grad()
def fold(standardize: Standardize, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Convert a linear layer [n, W], [n] for standardised features to one for the original features."""
    folded = weight.double() * standardize.scale.double()
    return folded.to(weight.dtype), (bias.double() - folded @ standardize.mean.double()).to(bias.dtype)
