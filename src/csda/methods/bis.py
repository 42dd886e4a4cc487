"""BiS (He et al., "Rethinking Re-Sampling in Imbalanced Semi-Supervised Learning", 2021), Bi-Sampling on FixMatch.

Features are learned best from the natural class distribution, a classifier from a balanced one. So training moves from
the first to the second: a share α = 1 − (t/T)² of the labeled batch is drawn at random and the rest class-balanced, and
a pseudo-label is kept with a probability that falls with α from 1 to (reversed class frequency)^(1/3).

Departures beside those of FixMatch: frequencies are those of the labeled images, while the published code takes those
of its artificial unlabeled set; one strong view per step, not two. In a multi-label set, which the paper does not have,
each label has two classes with their own threshold, frequencies and mask.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from csda.methods.base import Task
from csda.methods.fixmatch import FixMatch, FixMatchSettings


class BiSSettings(FixMatchSettings):
    exponent: float = Field(
        1 / 3,
        ge=0,
        le=10,
        description="larger keeps frequent classes less often",
    )


class BiS(FixMatch):
    """FixMatch with two samplers of labeled images and a mask by reversed class frequency."""

    sampling = "bilateral"
    reversed_rates: Tensor

    def __init__(self, task: Task, settings: BiSSettings) -> None:
        super().__init__(task, settings)
        counts = torch.tensor(task.class_counts, dtype=torch.float32)
        if task.multi_label:
            counts = torch.stack((task.num_labeled - counts, counts), dim=-1)
        self.register_buffer("reversed_rates", reversed_frequencies(counts) ** settings.exponent, persistent=False)

    def admit(self, aligned: Tensor, mask: Tensor, progress: Tensor) -> Tensor:
        random_share = 1.0 - progress.square()
        rates = random_share + (1.0 - random_share) * self.reversed_rates
        if not self.task.multi_label:
            kept = self._uniform(aligned[:, 0]) < rates[aligned.argmax(dim=-1)]
            return super().admit(aligned, mask, progress) & kept
        confident = torch.maximum(aligned, 1.0 - aligned) >= self.threshold
        kept = self._uniform(aligned) < torch.where(aligned > 0.5, rates[:, 1], rates[:, 0])
        return mask[:, None] & confident & kept

    def _uniform(self, like: Tensor) -> Tensor:
        return torch.rand(like.shape, device=like.device, generator=self.generator)

    def unlabeled_loss(self, logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
        """The loss of FixMatch; in a multi-label set with a mask for each label, [B, K]."""
        if not self.task.multi_label:
            return super().unlabeled_loss(logits, targets, mask)
        logits = self.adjusted_by_guesses(logits, targets, mask).float()
        terms = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
        return terms.masked_fill(~mask, 0).sum(dim=-1).mean()


def reversed_frequencies(counts: Tensor) -> Tensor:
    """For counts [..., n]: the most frequent class gets the relative frequency of the least frequent, and so on."""
    ordered = counts.sort(dim=-1).values
    rank = counts.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    return ordered.gather(-1, rank) / ordered[..., -1:]
