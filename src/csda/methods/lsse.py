"""LSSE (Gyawali et al., "Semi-Supervised Learning by Disentangling and Self-Ensembling over Stochastic Latent Space",
2019).

A variational auto-encoder gives each image a normal distribution in latent space. Predictions from samples of it are
averaged over all visits of an image, and the average is the target for the next prediction.

Departures: the latent mean is the features of the common encoder, not 60 features of a separate network, so that all
methods predict with the same network; auto-encoder and classifier are trained together, not one after the other; the
ensemble has only unlabeled images; and its unit of time is a visit, not an epoch, because an epoch here is not a pass
over the data.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from csda.config import Settings
from csda.data.loader import Batch, ImagePool, LabeledBatch
from csda.losses import consistency_loss
from csda.methods.base import Method, StepOutput, Task
from csda.models.two_stream import TwoStream


class LSSESettings(Settings):
    weight: float = Field(
        30.0, ge=0, le=1e6, description="weight of the consistency loss, times the labeled share of the images"
    )
    momentum: float = Field(0.6, ge=0, lt=1, description="momentum of the average prediction of an image")
    reconstruction: float = Field(
        1.0, ge=0, le=1e6, description="weight of the auto-encoder's loss, a mean over pixels"
    )
    beta: float = Field(1.0, ge=0, le=1e6, description="weight of the KL divergence in that loss")


class LSSE(Method):
    """Temporal ensembling over the stochastic latent space of an auto-encoder."""

    optimizer = "adam"
    ensemble: Tensor
    visits: Tensor

    def __init__(self, task: Task, settings: LSSESettings) -> None:
        super().__init__(task)
        self.settings = settings
        self.log_variance = nn.Linear(task.width, task.width)
        self.decoder = decoder(task.width, task.image_size, task.channels)
        self.register_buffer("ensemble", torch.zeros(task.num_unlabeled, task.num_classes))
        self.register_buffer("visits", torch.zeros(task.num_unlabeled))

    def step(
        self, model: TwoStream, labeled: LabeledBatch, unlabeled: Batch, pool: ImagePool, progress: Tensor
    ) -> StepOutput:
        images = torch.cat((labeled.weak(), unlabeled.weak()))
        mean = model.ranks.map(model.student, images).float()
        log_variance = self.log_variance(mean).float().clamp(-10.0, 10.0)
        noise = torch.randn(mean.shape, device=mean.device, generator=self.generator)
        latent = mean + torch.exp(0.5 * log_variance) * noise
        labeled_logits, logits = model.head(latent).split((len(labeled), len(unlabeled)))

        targets, known = self.recall(unlabeled.indices)
        self.remember(unlabeled.indices, self.probabilities(logits.detach()))
        supervised = self.labeled_loss(labeled_logits, labeled.targets)
        agreement = self.unlabeled_loss(logits, targets, known)
        evidence = self.evidence_loss(images, latent, mean, log_variance)
        labeled_share = self.task.num_labeled / (self.task.num_labeled + self.task.num_unlabeled)
        weight = self.settings.weight * labeled_share * torch.exp(-5.0 * (1.0 - progress).square())
        return StepOutput(
            supervised + weight * agreement + self.settings.reconstruction * evidence,
            {
                "labeled_loss": supervised.detach(),
                "unlabeled_loss": agreement.detach(),
                "reconstruction_loss": evidence.detach(),
            },
        )

    def recall(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """The ensemble's predictions [B, n], corrected for their start at zero; bool [B], whether there are any yet."""
        visits = self.visits[indices]
        began = 1.0 - self.settings.momentum ** visits.clamp(min=1.0)
        return self.ensemble[indices] / began[:, None], visits > 0

    def remember(self, indices: Tensor, probs: Tensor) -> None:
        """Average the predictions [B, n] into those of earlier visits."""
        self.ensemble[indices] = torch.lerp(probs, self.ensemble[indices], self.settings.momentum)
        self.visits[indices] = self.visits[indices] + 1.0

    def unlabeled_loss(self, logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
        return consistency_loss(self.probabilities(logits), targets, mask) / self.task.num_classes

    def evidence_loss(self, images: Tensor, latent: Tensor, mean: Tensor, log_variance: Tensor) -> Tensor:
        """The negative evidence lower bound per pixel of images [B, C, S, S]: reconstruction and KL divergence."""
        size = images.shape[-1]  # the decoder's is the next multiple of 32
        reconstruction = F.binary_cross_entropy_with_logits(self.decoder(latent)[..., :size, :size].float(), images)
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1.0 - log_variance).sum(dim=-1).mean()
        return reconstruction + self.settings.beta * divergence / math.prod(images.shape[1:])


def decoder(width: int, image_size: int, channels: int) -> nn.Sequential:
    """The encoder's mirror image: latent [B, width] to the logits of an image [B, channels, S, S]."""
    side = -(-image_size // 32)
    widths = (128, 64, 64, 32, 32, channels)
    layers: list[nn.Module] = [nn.Linear(width, widths[0] * side**2), nn.Unflatten(1, (widths[0], side, side))]
    for inputs, outputs in pairwise(widths):
        layers += [nn.ReLU(), nn.ConvTranspose2d(inputs, outputs, kernel_size=4, stride=2, padding=1)]
    # The same memory format as the encoder's activations.
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]
