"""How a step executes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, ParamSpec, Protocol

import torch
from torch import Tensor

P = ParamSpec("P")
Precision = Literal["float32", "tf32", "bf16"]


class Output(Protocol):
    """What a step gives: a loss to minimise and figures to write down."""

    @property
    def loss(self) -> Tensor: ...
    @property
    def logs(self) -> dict[str, Tensor]: ...


def choose_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


class Engine:
    """Forward, backward and update, one step after the other, with figures summed on the device."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device, precision: Precision) -> None:
        self.optimizer = optimizer
        self.device = device
        self.bf16 = precision == "bf16"
        if device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "float32"
        self._sums: dict[str, Tensor] = {}
        self._steps = 0

    def step(self, compute: Callable[P, Output], *inputs: P.args, **named: P.kwargs) -> None:
        """Minimise what `compute` returns for these inputs by one update."""
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            output = compute(*inputs, **named)
        output.loss.backward()
        self.optimizer.step()
        for name, value in {"loss": output.loss.detach(), **output.logs}.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        self._steps += 1

    def figures(self) -> dict[str, float]:
        """Means of all figures since the last call: the one copy to the host in an epoch."""
        if not self._sums:
            return {}
        means = torch.stack(list(self._sums.values())).double() / self._steps
        figures = dict(zip(self._sums, means.tolist(), strict=True))
        self._sums, self._steps = {}, 0
        return figures
