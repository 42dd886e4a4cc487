"""GLM (Gyawali et al., "Semi-Supervised Medical Image Classification with Global Latent Mixing", 2020).

Labeled and unlabeled samples are mixed with each other, labels included, at the input or at a hidden layer that is
drawn anew each step, so that the whole network learns to be linear between samples. A guess is the mean prediction
for two augmentations of an image.

Departures: losses are means, as in all methods here, and cross-entropy is that of the task, where the published code
sums and has the binary one throughout; one fresh view of an unlabeled image is trained on, not the two that were
guessed from; guesses are made in evaluation mode; all samples go through BatchNorm together.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from csda.data.batches import Batch
from csda.losses import consistency_loss
from csda.methods.base import Task
from csda.methods.self_training import Guesses, SelfTraining, SelfTrainingSettings
from csda.models.two_stream import TwoStream


class GLMSettings(SelfTrainingSettings):
    alpha: float = Field(2.0, gt=0, description="α of Beta(α, α), the shares in a mix")
    layers: list[Annotated[int, Field(ge=0, le=6)]] = Field(
        [0, 2, 4], min_length=1, description="stages after which to mix, one drawn each step; 0 is the input"
    )
    labeled_from: Literal["teacher"] = Field("teacher", description="whose predictions make λ^x")


class GLM(SelfTraining):
    """Self-training on mixed samples."""

    def __init__(self, task: Task, settings: GLMSettings) -> None:
        super().__init__(task, settings)
        self.alpha, self.layers = settings.alpha, settings.layers

    def guess(
        self, model: TwoStream, labeled_images: Tensor, targets: Tensor, unlabeled: Batch
    ) -> tuple[Tensor, Tensor]:
        probs = self.predict(model, labeled_images, unlabeled.weak(), unlabeled.weak())
        labeled_probs, first, second = probs.split((len(labeled_images), len(unlabeled), len(unlabeled)))
        return labeled_probs, (first + second) / 2.0

    def learn(
        self, model: TwoStream, labeled_images: Tensor, labels: Tensor, samples: Batch, guesses: Guesses
    ) -> tuple[Tensor, Tensor]:
        targets, mask = guesses()
        images = torch.cat((labeled_images, samples.weak()))
        targets = torch.cat((self.as_probabilities(labels), targets))
        usable = torch.cat((mask.new_ones(len(labels)), mask))

        partners = torch.rand(len(images), device=images.device, generator=self.generator).argsort()
        # Beta(α, α) is the first of two shares of a symmetric Dirichlet, whose sampler takes a generator.
        share = torch._sample_dirichlet(torch.full((2,), self.alpha, device=images.device), self.generator)[0]
        # The larger share is the sample's own, so that it keeps its side, labeled or not; and all of it where the
        # partner is an empty slot of a queue.
        shares = torch.where(usable[partners], torch.maximum(share, 1.0 - share), 1.0)
        layer = torch.randint(len(self.layers), (), device=images.device, generator=self.generator)
        logits = self.mixed_logits(model, images, partners, shares, layer)
        targets = mix(targets, partners, shares)
        count = len(labels)
        return (
            self.labeled_loss(logits[:count], targets[:count]),
            self.unlabeled_loss(logits[count:], targets[count:], mask),
        )

    def mixed_logits(self, model: TwoStream, images: Tensor, partners: Tensor, shares: Tensor, layer: Tensor) -> Tensor:
        """Logits of samples that are mixed after the stage `self.layers[layer]`.

        The choice stays on the device: at the other layers a sample's share is 1, which changes nothing.
        """
        values = images
        # What lies between two layers runs in one go.
        for begin, end in pairwise(sorted({-1, 0, *self.layers, len(model.student)})):
            if end > 0:
                values = model.student[begin:end](values)
            if end in self.layers:
                values = mix(values, partners, torch.where(layer == self.layers.index(end), shares, 1.0))
        logits: Tensor = model.head(values)
        return logits

    def unlabeled_loss(self, logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
        return consistency_loss(self.probabilities(logits.float()), targets, mask)


def mix(values: Tensor, partners: Tensor, shares: Tensor) -> Tensor:
    """Each sample of values [B, …] with its partner, shares [B] being what the sample itself keeps."""
    shares = shares.to(values.dtype).view(-1, *(1,) * (values.ndim - 1))
    return shares * values + (1.0 - shares) * values[partners]
