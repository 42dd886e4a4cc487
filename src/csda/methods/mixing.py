"""Mix samples at the input or at a hidden layer. Used by GLM, `mixup`, and other methods with `mix_labels`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated

import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from csda.config import Settings
from csda.errors import ConfigError
from csda.models.two_stream import TwoStream

if TYPE_CHECKING:
    from csda.methods.base import Method, Task


def _distinct(layers: list[int]) -> list[int]:
    if len(set(layers)) < len(layers):
        raise ValueError("has a layer twice; give each once")
    return layers


class MixingSettings(Settings):
    alpha: float = Field(2.0, ge=0.01, le=100, description="larger mixes two images more evenly")
    layers: Annotated[list[Annotated[int, Field(ge=0, le=6, strict=True)]], AfterValidator(_distinct)] = Field(
        [0, 2, 4], min_length=1, description="stages to mix after; 0 is the input"
    )


@dataclass(frozen=True, slots=True)
class Mix:
    """A mix of samples: sample i keeps its share and takes the rest from its partner, after one layer."""

    partners: Tensor
    shares: Tensor
    layer: Tensor

    def __call__(self, values: Tensor) -> Tensor:
        """Mix values [B, …]; labels are mixed like samples."""
        return mix(values, self.partners, self.shares)


class Mixing:
    """Draws mixes, and passes samples through the student with them."""

    def __init__(self, settings: MixingSettings, task: Task) -> None:
        self.alpha, self.layers = settings.alpha, settings.layers
        if max(self.layers) > task.stages and not task.frozen:
            stages = f"{task.stages} stages" if task.stages > 1 else "no stages to mix between"
            raise ConfigError(
                f"layers = {self.layers}: this backbone has {stages}; give layers=[0] to mix images, "
                f"or another backbone"
            )

    def draw(self, usable: Tensor, generator: torch.Generator | None) -> Mix:
        """Draw a mix for all samples; `usable`, bool [B], are the possible partners."""
        device = usable.device
        partners = torch.rand(len(usable), device=device, generator=generator).argsort()
        share = draw_shares(self.alpha, 1, device, generator)
        shares = torch.where(usable[partners], share, 1.0)
        return Mix(partners, shares, torch.randint(len(self.layers), (), device=device, generator=generator))

    def labeled_loss(self, method: Method, model: TwoStream, images: Tensor, labels: Tensor) -> Tensor:
        """L_s of labeled images that are mixed with each other, with their labels."""
        drawn = self.draw(torch.ones(len(labels), dtype=torch.bool, device=labels.device), method.generator)
        return method.labeled_loss(self.logits(model, images, drawn), drawn(method.as_probabilities(labels)))

    def logits(self, model: TwoStream, images: Tensor, drawn: Mix) -> Tensor:
        """Logits of samples that are mixed after the stage `self.layers[drawn.layer]`.

        The choice of the layer stays on the device: at all other layers the shares are 1, which changes nothing.
        """
        values = images
        # All stages between two layers run in one call.
        for begin, end in pairwise(sorted({-1, 0, *self.layers, len(model.student)})):
            if end > 0:
                values = model.student[begin:end](values)
            if end in self.layers:
                shares = torch.where(drawn.layer == self.layers.index(end), drawn.shares, 1.0)
                values = mix(values, drawn.partners, shares)
        logits: Tensor = model.head(values)
        return logits


def draw_shares(alpha: float, count: int, device: torch.device, generator: torch.Generator | None) -> Tensor:
    """The share that each of `count` samples keeps of itself: the larger part of a draw from Beta(α, α).

    Drawn from a symmetric Dirichlet distribution, because torch's sampler of it takes a generator.
    """
    shares = torch._sample_dirichlet(torch.full((count, 2), alpha, device=device), generator)[:, 0]
    return torch.maximum(shares, 1.0 - shares)


def mix(values: Tensor, partners: Tensor, shares: Tensor) -> Tensor:
    """Mix each sample of values [B, …] with its partner; shares [B] are the parts that samples keep."""
    shares = shares.to(values.dtype).view(-1, *(1,) * (values.ndim - 1))
    return shares * values + (1.0 - shares) * values[partners]
