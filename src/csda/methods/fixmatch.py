"""FixMatch (Sohn et al., "FixMatch: Simplifying Semi-Supervised Learning with Consistency and Confidence", 2020).

The prediction on a weak view, if it is confident, gives the target class for a strong view of the same image.

Departures: as many unlabeled images per step as for other methods, not seven times the labeled ones; predictions in
evaluation mode; plain SGD and no averaged weights. With a queue, the threshold applies to the queued samples.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from csda import losses
from csda.methods.base import Task
from csda.methods.self_training import SelfTraining, SelfTrainingSettings


class FixMatchSettings(SelfTrainingSettings):
    threshold: float = Field(0.95, ge=0, le=1, description="least confidence of a pseudo-label")


class FixMatch(SelfTraining):
    """Self-training with a threshold on predictions of weak views, trained on strong views."""

    trained_view = "strong"

    def __init__(self, task: Task, settings: FixMatchSettings) -> None:
        super().__init__(task, settings)
        self.threshold = settings.threshold

    def admit(self, aligned: Tensor, mask: Tensor, progress: Tensor) -> Tensor:
        return mask & (aligned.amax(dim=-1) >= self.threshold)

    def unlabeled_loss(self, logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
        """The paper's ℓ_u: the sum over the admitted samples, divided by the number of all samples."""
        logits = self.adjusted_by_guesses(logits, targets, mask).float()
        return losses.unlabeled_loss(logits, targets, mask, torch.full_like(mask.sum(), len(mask)))
