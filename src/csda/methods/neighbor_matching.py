"""NM (Wang et al., "Neighbor Matching for Semi-Supervised Learning", 2021).

The pseudo-label of an unlabeled image comes from labeled images with similar features of the teacher. A memory keeps
the latest features of each class, if the teacher's prediction is about right, and these vote with weights softmax(100 ·
cosine).

Departures: the teacher starts as a copy after the labels-only epoch and predicts in evaluation mode, while the
published code averages from random weights, with batch statistics. While the memory is empty, the teacher's own
prediction is the pseudo-label. With alignment, λ^x comes from the teacher's own predictions, because labeled images
would find themselves in the memory. In a multi-label set, which the paper does not have, an image is kept under each of
its labels, or under "none", and neighbours vote with all their labels.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from csda.condition_queue import MAX_CAPACITY
from csda.data.loader import Batch
from csda.methods.base import Task
from csda.methods.self_training import SelfTraining, SelfTrainingSettings
from csda.models.two_stream import TwoStream


class NeighborMatchingSettings(SelfTrainingSettings):
    memory: int = Field(128, ge=1, le=MAX_CAPACITY, description="half the features in the memory")
    enter: float = Field(0.3, ge=0, le=1, description="least confidence to be kept if wrong")
    sharpness: float = Field(100.0, gt=0, le=10_000, description="larger gives near neighbours more weight")
    teacher: Literal["ema"] = Field("ema", description="network that computes the features")


class NeighborMatching(SelfTraining):
    """Self-training with pseudo-labels from labeled neighbours."""

    features: Tensor
    labels: Tensor
    filled: Tensor

    def __init__(self, task: Task, settings: NeighborMatchingSettings) -> None:
        super().__init__(task, settings)
        self.enter, self.sharpness = settings.enter, settings.sharpness
        classes = task.num_classes + task.multi_label
        slots = max(1, 2 * (settings.memory // classes))
        self.register_buffer("features", torch.zeros(classes, slots, task.width))
        self.register_buffer("labels", torch.zeros(classes, slots, task.num_classes))
        self.register_buffer("filled", torch.zeros(classes, slots, dtype=torch.bool))

    @torch.no_grad()
    def guess(
        self, model: TwoStream, labeled_images: Tensor, targets: Tensor, unlabeled: Batch
    ) -> tuple[Tensor, Tensor]:
        features, probs = self._look(model, labeled_images, unlabeled.weak())
        labeled_features, unlabeled_features = features.split((len(targets), len(unlabeled)))
        labeled_probs, unlabeled_probs = probs.split((len(targets), len(unlabeled)))
        self.remember(labeled_features, labeled_probs, targets)
        return labeled_probs, self.propagate(unlabeled_features, unlabeled_probs)

    def pseudo_labels(self, model: TwoStream, images: Tensor) -> tuple[Tensor, Tensor]:
        probs = self.propagate(*self._look(model, images))
        return probs, self.refinement.align(probs)

    def remember(self, features: Tensor, probs: Tensor, targets: Tensor) -> None:
        """Add unit features [B, w] to the memory of their classes if p_y ≥ 0.3 or y is predicted; drop the oldest."""
        labels = self.as_probabilities(targets)
        members = labels > 0.5
        if self.task.multi_label:
            members = torch.cat((members, ~members.any(dim=-1, keepdim=True)), dim=-1)
            probs = torch.cat((probs, 1.0 - probs.amax(dim=-1, keepdim=True)), dim=-1)
            predicted = probs > 0.5
        else:
            predicted = (probs.argmax(dim=-1) == targets)[:, None]
        enters = members & ((probs >= self.enter) | predicted)

        # A row per class: the batch, newest first, then the memory. Slot k takes the k-th entry that exists.
        count = torch.cat((enters.flip(0).T, self.filled), dim=1).cumsum(dim=1)
        slots = torch.arange(1, self.filled.shape[1] + 1, device=count.device).repeat(len(count), 1)
        stays = torch.searchsorted(count, slots).clamp_(max=count.shape[1] - 1)
        for held, new in ((self.features, features), (self.labels, labels)):
            candidates = torch.cat((new.flip(0).expand(len(held), -1, -1), held), dim=1)
            held.copy_(candidates.gather(1, stays[:, :, None].expand_as(held)))
        torch.le(slots, count[:, -1:], out=self.filled)

    def propagate(self, features: Tensor, fallback: Tensor) -> Tensor:
        """The neighbours' labels by softmax(100 · cosine) for unit features [B, w]; `fallback` if there are none."""
        filled = self.filled.flatten()
        empty = torch.where(filled, 0.0, -1e9)
        # In float32, because errors of bf16 in the cosines would be multiplied by 100.
        with torch.autocast(features.device.type, enabled=False):
            cosines = torch.addmm(empty, features, self.features.flatten(0, 1).T, alpha=self.sharpness)
            return torch.where(filled.any(), cosines.softmax(dim=-1) @ self.labels.flatten(0, 1), fallback)

    def _look(self, model: TwoStream, *images: Tensor) -> tuple[Tensor, Tensor]:
        """The teacher's features [B, width], scaled to length 1, and its predictions."""
        features = model.ranks.map(model.teacher, *images)
        return F.normalize(features.float(), dim=-1), self.probabilities(model.head(features))
