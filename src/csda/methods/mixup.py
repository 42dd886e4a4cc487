"""Labels only, mixed (Zhang et al., "mixup", 2018; at hidden layers, Verma et al., "Manifold Mixup", 2019).

GLM's mixing on labeled images alone: a control for how much of GLM's gain comes from unlabeled images.
"""

from __future__ import annotations

from torch import Tensor

from csda.data.loader import Batch, ImagePool, LabeledBatch
from csda.methods.base import Method, StepOutput, Task
from csda.methods.mixing import Mixing, MixingSettings
from csda.models.two_stream import TwoStream


class Mixup(Method):
    """Cross-entropy on mixed labeled images."""

    def __init__(self, task: Task, settings: MixingSettings) -> None:
        super().__init__(task)
        self.mixing = Mixing(settings, task)

    def step(
        self, model: TwoStream, labeled: LabeledBatch, unlabeled: Batch, pool: ImagePool, progress: Tensor
    ) -> StepOutput:
        loss = self.mixing.labeled_loss(self, model, labeled.weak(), labeled.targets)
        return StepOutput(loss, {"labeled_loss": loss.detach()})
