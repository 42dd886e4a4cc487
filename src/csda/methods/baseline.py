"""Labels only. On a split with the unlabeled part moved to labeled, this is the upper bound."""

from __future__ import annotations

from torch import Tensor

from csda.config import Settings
from csda.data.loader import Batch, ImagePool, LabeledBatch
from csda.methods.base import Method, StepOutput, Task
from csda.models.two_stream import TwoStream


class Baseline(Method):
    """Cross-entropy on the labeled images, L_s of Eq. (18), and nothing else."""

    def __init__(self, task: Task, settings: Settings) -> None:
        super().__init__(task)

    def step(
        self, model: TwoStream, labeled: LabeledBatch, unlabeled: Batch, pool: ImagePool, progress: Tensor
    ) -> StepOutput:
        return self.warm_up(model, labeled)
