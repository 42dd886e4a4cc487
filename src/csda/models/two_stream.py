"""Teacher θ_e¹ and student θ_e² with a common head θ_fc (the paper's Section 3.4 and Figure 2)."""

from __future__ import annotations

from copy import deepcopy
from typing import Self

import torch
from torch import Tensor, nn

from csda.distributed import Ranks
from csda.errors import ConfigError
from csda.models.batch_norm import SharedBatchNorm2d
from csda.models.dropout import Dropout
from csda.models.encoder import Encoder


def probabilities(logits: Tensor, multi_label: bool) -> Tensor:
    """Softmax, or in a multi-label set a sigmoid for each label, in float32."""
    return torch.sigmoid(logits.float()) if multi_label else torch.softmax(logits.float(), dim=-1)


class TwoStream(nn.Module):
    """Two encoders of one architecture and a common head.

    The student and the head are trained by gradient. The teacher is a moving average of the student, including
    BatchNorm statistics. It predicts in evaluation mode, or with `teacher_trains` with batch statistics and dropout, as
    in the code of Neighbor Matching. The head of a frozen network has no ReLU before it (`rectified` is false).
    """

    def __init__(
        self, encoder: Encoder, num_outputs: int, *, teacher_trains: bool = False, rectified: bool = True
    ) -> None:
        super().__init__()
        self.student = encoder
        self.teacher = deepcopy(encoder).requires_grad_(False)
        self.head = nn.Sequential(nn.ReLU() if rectified else nn.Identity(), nn.Linear(encoder.width, num_outputs))
        self.num_outputs = num_outputs
        self.teacher_trains = teacher_trains
        self.ranks = Ranks()

    def forward(self, *images: Tensor) -> Tensor:
        """Logits of the student, which is trained and predicts in the end.

        Several tensors of images pass as one batch and share BatchNorm statistics.
        """
        return self.ranks.map(lambda *parts: self.head(self.student(*parts)), *images)

    def forward_apart(self, *images: Tensor) -> Tensor:
        """Logits of the student for tensors of images, each with its own BatchNorm statistics."""
        if self.ranks.alone:
            logits: Tensor = self.head(self.student.forward_apart(*images))
            return logits
        body, tail = self.student.split()
        values = torch.cat([self.ranks.map(body, part) for part in images])
        return self.ranks.map(lambda part: self.head(tail(part)), values)

    @torch.no_grad()
    def teach(self, *images: Tensor) -> Tensor:
        """Logits of the teacher, from which pseudo-labels are made."""
        return self.ranks.map(lambda *parts: self.head(self.teacher(*parts)), *images)

    @torch.no_grad()
    def guess(self, *images: Tensor) -> Tensor:
        """Logits of the student in evaluation mode, without gradient."""
        training = self.student.training
        self.student.eval()
        logits: Tensor = self(*images)
        self.student.train(training)
        return logits

    @torch.no_grad()
    def start_teacher(self) -> None:
        """Copy the student, after its labels-only epoch, to the teacher."""
        for ours, theirs in zip(_state(self.teacher), _state(self.student), strict=True):
            ours.copy_(theirs)

    @torch.no_grad()
    def update_teacher(self, momentum: float) -> None:
        """Eq. (11) for the teacher: θ_e¹ ← ω θ_e¹ + (1 − ω) θ_e², BatchNorm's statistics included."""
        if statistics := _statistics(self.teacher):
            torch._foreach_lerp_(statistics, _statistics(self.student), 1.0 - momentum)
        self.average_weights(momentum)

    @torch.no_grad()
    def average_weights(self, momentum: float) -> None:
        """The weights' part of `update_teacher`."""
        if weights := tuple(self.teacher.parameters()):
            torch._foreach_lerp_(weights, tuple(self.student.parameters()), 1.0 - momentum)

    @torch.no_grad()
    def follow(self, other: TwoStream, momentum: float) -> None:
        """Average student and head with those of another model: ours ← m · ours + (1 − m) · theirs."""
        for ours, theirs in ((self.student, other.student), (self.head, other.head)):
            if state := _state(ours):
                torch._foreach_lerp_(state, _state(theirs), 1.0 - momentum)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.teacher.train(mode and self.teacher_trains)
        return self

    def draw_from(self, generator: torch.Generator) -> None:
        """Let dropout draw from this generator."""
        for module in self.modules():
            if isinstance(module, Dropout):
                module.generator = generator

    def share(self, ranks: Ranks) -> None:
        """Divide the images of each pass among several processes."""
        self.ranks = ranks
        for module in list(self.modules()):
            if isinstance(module, Dropout):
                module.ranks = ranks
            for name, child in module.named_children():
                if type(child) is nn.BatchNorm2d:
                    setattr(module, name, SharedBatchNorm2d(child, ranks))
                elif isinstance(child, nn.modules.batchnorm._BatchNorm):
                    raise ConfigError(
                        f"this backbone has its own BatchNorm, {type(child).__name__}, which several processes "
                        "cannot share; train in one process, or choose another backbone"
                    )


def _state(encoder: nn.Module) -> list[Tensor]:
    return [*encoder.parameters(), *_statistics(encoder)]


def _statistics(encoder: nn.Module) -> list[Tensor]:
    return [buffer for buffer in encoder.buffers() if buffer.is_floating_point()]
