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
"""Layers with at least this many weights keep a rounded copy. In the paper's network these are all but the head."""


class Linear(nn.Linear):
    """`nn.Linear` that can also keep its weight rounded to bfloat16.

    Autocast rounds the weight in every pass and converts its gradient back to float32 for the optimiser. Within
    `in_step`, passes multiply with a copy that is already rounded. The gradient of the copy is used for the weight
    (over several passes, their sum in bfloat16), and `descend` updates weight and copy in one kernel. Everywhere else,
    and without a copy, this is `nn.Linear`.
    """

    rounded: Tensor | None = None
    in_step = False
    _seen: tuple[int, int] | None = None
    """Address and version of the weight when it was last rounded. Kernels and graph replays do not raise the version.
    """

    @classmethod
    def of(cls, layer: nn.Linear) -> Linear:
        """A layer that shares the weights of a layer of torch."""
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
        """Allocate the copy. It is filled before it is first read."""
        learns = self.weight.requires_grad
        self.rounded = torch.empty_like(self.weight, dtype=torch.bfloat16, requires_grad=learns)
        self._seen = None

    @torch.no_grad()
    def renew(self) -> None:
        """Round the weight again, unless only `descend` and `follow` have written to it since the last time."""
        assert self.rounded is not None
        current = self.weight.data_ptr(), self.weight._version
        if current == self._seen:
            return
        self.rounded.copy_(self.weight)
        # During a capture nothing is executed, so the copy is not up to date yet.
        if not (self.weight.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._seen = current

    @torch.no_grad()
    def descend(self, rate: Tensor) -> None:
        """The end of a step: weight − rate · gradient. The optimiser has seen no gradient of this weight."""
        assert self.rounded is not None
        if self.rounded.grad is not None:
            from csda.fast.update import descend

            descend(self.weight, self.rounded.grad, rate, self.rounded)
            self.rounded.grad = None  # freed here, because a capture must not free memory of an eager step
            return
        if self.weight.grad is not None:
            # Passes without autocast gave the weight a gradient, and a fused optimiser does not raise its version.
            self._seen = None
        self.renew()

    @torch.no_grad()
    def follow(self, other: Linear, share: float) -> None:
        """Move the weight by this share of the way to the other layer's weight, as lerp does."""
        assert self.rounded is not None
        from csda.fast.update import average

        average(self.weight, other.weight, share, self.rounded)


def keep_rounded(model: TwoStream, optimizer: torch.optim.SGD) -> list[Linear]:
    """Replace the large linear layers of both encoders by layers that keep their weights rounded; return these.

    The optimiser sees no gradient of their weights. After each of its steps the layers update themselves.
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
    """`TwoStream.average_weights` for layers that keep their weights rounded. The rounded copies are updated, too."""
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
    """A context in which these layers multiply with the copies of their weights. `descend` must follow it."""
    for layer in layers:
        assert layer.rounded is not None
        layer.rounded.grad = None
        layer.in_step = True
    try:
        yield
    finally:
        for layer in layers:
            layer.in_step = False
