"""GLM (Gyawali et al., "Semi-Supervised Medical Image Classification with Global Latent Mixing", 2020).

Labeled and unlabeled samples and their labels are mixed with each other, at the input or at a hidden layer that is
drawn in each step, so that the network learns to be linear between samples. A pseudo-label is the mean prediction for
two augmented views of an image.

Departures: losses are means, as in all methods here, not sums; training uses one new view of an unlabeled image, not
the two that gave its pseudo-label; all samples go through BatchNorm together. Four more can be undone by a setting
each: the cross-entropy is that of the task; pseudo-labels are predicted in evaluation mode; they are not sharpened,
which the published code does for exclusive classes; and their weight grows to 10, not to 75, with which the loss on
labels only grows (docs/decisions/0015-the-weight-of-glm.md).
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from csda.data.loader import Batch
from csda.losses import consistency_loss
from csda.methods.base import Task
from csda.methods.self_training import SelfTraining, SelfTrainingSettings
from csda.models.two_stream import TwoStream


class GLMSettings(SelfTrainingSettings):
    sharpen: float = Field(1.0, ge=0.1, le=1, description="below 1, pseudo-labels are sharpened")
    guess_mode: Literal["eval", "train"] = Field("eval", description="BatchNorm and dropout for pseudo-labels")
    binary: bool = Field(False, description="sigmoid for each class, not softmax")
    labeled_from: Literal["teacher"] = Field(
        "teacher", description="network whose predictions make the labeled averages"
    )
    mix_labels: Literal[True] = Field(True, description="partners of labeled samples: other labeled ones, or any")


class GLM(SelfTraining):
    """Self-training on mixed samples."""

    def __init__(self, task: Task, settings: GLMSettings) -> None:
        super().__init__(task, settings)
        self.sharpen = 1.0 if task.multi_label else settings.sharpen
        self.binary = settings.binary and not task.multi_label
        self.guesses_in_training = settings.guess_mode == "train" and settings.teacher == "none"

    def guess(
        self, model: TwoStream, labeled_images: Tensor, targets: Tensor, unlabeled: Batch
    ) -> tuple[Tensor, Tensor]:
        views = unlabeled.weak(), unlabeled.weak()
        labeled_images = self.observed_by_teacher(labeled_images)
        if self.guesses_in_training:
            with torch.no_grad():
                probs = self.probabilities(model.forward_apart(*views))
            labeled_probs = self.predict(model, labeled_images) if len(labeled_images) else probs[:0]
        else:
            probs = self.predict(model, labeled_images, *views)
            labeled_probs, probs = probs.split((len(labeled_images), 2 * len(unlabeled)))
        first, second = probs.chunk(2)
        guesses = (first + second) / 2.0
        if self.sharpen < 1.0:
            guesses = guesses ** (1.0 / self.sharpen)
            guesses = guesses / guesses.sum(dim=-1, keepdim=True)
        return labeled_probs, guesses

    def learn(
        self,
        model: TwoStream,
        labeled_images: Tensor,
        labels: Tensor,
        samples: Batch,
        targets: Tensor,
        mask: Tensor,
    ) -> tuple[Tensor, Tensor]:
        assert self.mixing is not None
        images = torch.cat((labeled_images, samples.weak()))
        targets = torch.cat((self.as_probabilities(labels), targets))
        usable = torch.cat((mask.new_ones(len(labels)), mask))

        mix = self.mixing.draw(usable, self.generator)
        logits, targets = self.mixing.logits(model, images, mix), mix(targets)
        count = len(labels)
        return (
            self.labeled_loss(logits[:count], targets[:count]),
            self.unlabeled_loss(logits[count:], targets[count:], mask),
        )

    def labeled_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        if not self.binary:
            return super().labeled_loss(logits, targets)
        targets = targets if targets.is_floating_point() else self.as_probabilities(targets)
        with torch.autocast(logits.device.type, enabled=False):
            loss = F.binary_cross_entropy(self.probabilities(logits), targets, reduction="none")
        return loss.sum(dim=-1).mean()

    def unlabeled_loss(self, logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
        return consistency_loss(self.probabilities(logits), targets, mask)
