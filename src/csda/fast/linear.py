"""Linear layers that read and write their large weights as rarely as possible in a bfloat16 step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from csda.fast import kernels
from csda.models.two_stream import TwoStream

LARGE = 2**18
"""Layers with at least this many weights keep a second copy: in the paper's network all but the head."""


class Linear(nn.Linear):
    """`nn.Linear` that can keep its weight rounded to bfloat16, too.

    Autocast rounds the weight in every pass and makes its gradient float32 again for the optimiser. Within `in_step`
    passes multiply with a copy that is already rounded; the copy's gradient is the weight's, of several passes the sum
    in bfloat16, and `descend` updates both in one kernel. Everywhere else, and without a copy, this is `nn.Linear`.
    """

    rounded: Tensor | None = None
    in_step = False
    _seen: tuple[int, int] | None = None
    """Where the weight lay when it was rounded, and its version, which kernels and replays do not raise."""

    @classmethod
    def of(cls, layer: nn.Linear) -> Linear:
        """A layer with the weights of one of torch's."""
        with torch.device("meta"):
            made = cls(layer.in_features, layer.out_features, bias=layer.bias is not None)
        made.weight, made.bias = layer.weight, layer.bias
        return made

    def forward(self, values: Tensor) -> Tensor:
        if not self.in_step or kernels.matrix_dtype() != torch.bfloat16:
            return super().forward(values)
        self.renew()
        assert self.rounded is not None
        return F.linear(values, self.rounded, self.bias)

    def keep_rounded(self) -> None:
        """Make room for a copy; it is filled before it is read."""
        learns = self.weight.requires_grad
        self.rounded = torch.empty_like(self.weight, dtype=torch.bfloat16, requires_grad=learns)
        self._seen = None

    @torch.no_grad()
    def renew(self) -> None:
        """Round the weight again if anything but `descend` and `follow` may have written to it."""
        assert self.rounded is not None
        current = self.weight.data_ptr(), self.weight._version
        if current == self._seen:
            return
        self.rounded.copy_(self.weight)
        # What is captured in a graph has not happened yet.
        if not (self.weight.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._seen = current

    @torch.no_grad()
    def descend(self, rate: Tensor) -> None:
        """The end of a step, after an optimiser that saw no gradient of this weight: weight − rate · gradient."""
        assert self.rounded is not None
        if self.rounded.grad is not None:
            from csda.fast.update import descend

            descend(self.weight, self.rounded.grad, rate, self.rounded)
            self.rounded.grad = None  # now, since a capture is no time to let go of what an eager step left
            return
        if self.weight.grad is not None:
            # Passes without autocast gave it one, and a fused optimiser leaves no version either.
            self._seen = None
        self.renew()

    @torch.no_grad()
    def follow(self, other: Linear, share: float) -> None:
        """Move by this share of the way to the other's weight, as lerp does."""
        assert self.rounded is not None
        from csda.fast.update import average

        average(self.weight, other.weight, share, self.rounded)


def keep_rounded(model: TwoStream, optimizer: torch.optim.SGD) -> list[Linear]:
    """Replace the large linear layers of both encoders by ones that keep their weights rounded; gives these.

    After each step of the optimiser, to which their weights have no gradient, they descend by themselves.
    """
    layers = [*_replace(model.student), *_replace(model.teacher)]
    for layer in layers:
        layer.keep_rounded()

    def descend(*_: object) -> None:
        for layer in layers:
            layer.descend(optimizer.param_groups[0]["lr"])

    optimizer.register_step_post_hook(descend)
    return layers


def _replace(encoder: nn.Module) -> list[Linear]:
    layers = []
    for module in list(encoder.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear and child.weight.numel() >= LARGE:
                layers.append(Linear.of(child))
                setattr(module, name, layers[-1])
    return layers


@torch.no_grad()
def average_weights(model: TwoStream, momentum: float) -> None:
    """`TwoStream.average_weights` where layers keep their weights rounded: their average is rounded with it."""
    pairs: dict[Tensor, Tensor] = dict(zip(model.teacher.parameters(), model.student.parameters(), strict=True))
    students = [module for module in model.student.modules() if isinstance(module, Linear)]
    teachers = [module for module in model.teacher.modules() if isinstance(module, Linear)]
    for ours, theirs in zip(teachers, students, strict=True):
        ours.follow(theirs, 1.0 - momentum)
        del pairs[ours.weight]
    if pairs:
        torch._foreach_lerp_(tuple(pairs), tuple(pairs.values()), 1.0 - momentum)


@contextmanager
def in_step(layers: Sequence[Linear]) -> Iterator[None]:
    """Within this context layers that have copies of their weights multiply with them, and `descend` is to follow."""
    for layer in layers:
        assert layer.rounded is not None
        layer.rounded.grad = None
        layer.in_step = True
    try:
        yield
    finally:
        for layer in layers:
            layer.in_step = False
