"""How a step executes: eagerly, or on a GPU as one CUDA graph.

A step of these small networks is some hundred kernels of a few microseconds each. Launched one by one they wait for the
host; captured once and replayed they do not. Capture asks that a step copies nothing to the host and keeps its shapes,
which is the contract of all methods. What a pass between steps repeats for each batch is captured likewise.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from csda import replay
from csda.distributed import Ranks
from csda.errors import ConfigError
from csda.fast import kernels, streams
from csda.fast.linear import Linear, in_step

Precision = Literal["float32", "tf32", "bf16"]

_EAGER_STEPS = 3
"""Real steps before capture, in which cuDNN chooses its kernels and the optimiser makes its state."""

_EAGER_CALLS = 16
"""Calls before what a pass repeats is captured: for a short one it does not pay that all others hold still."""


class Crowd:
    """The threads of this process that train, of which one at a time may ask the others to hold still.

    Runs that train side by side, each in a thread and on a stream of its own, do not disturb each other but for one
    thing: while a thread captures a graph, what others send to the device spoils it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._moving = 0
        self._someone_alone = False
        self._here = threading.local()

    @contextmanager
    def member(self) -> Iterator[None]:
        """This thread uses the device from here on, and holds still only in `make_way`."""
        self._move()
        try:
            yield
        finally:
            self._rest()

    def make_way(self) -> None:
        """Wait here while another thread needs the device for itself."""
        if self._someone_alone and self._is_moving():
            self._rest()
            self._move()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """No other member moves meanwhile."""
        was_moving = self._is_moving()
        if was_moving:
            self._rest()
        with self._changed:
            self._changed.wait_for(lambda: not self._someone_alone)
            self._someone_alone = True
            self._changed.wait_for(lambda: self._moving == 0)
        try:
            yield
        finally:
            with self._changed:
                self._someone_alone = False
                self._changed.notify_all()
            if was_moving:
                self._move()

    def _is_moving(self) -> bool:
        return getattr(self._here, "moving", False)

    def _move(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._someone_alone)
            self._moving += 1
        self._here.moving = True

    def _rest(self) -> None:
        self._here.moving = False
        with self._changed:
            self._moving -= 1
            self._changed.notify_all()


CROWD = Crowd()


class Output(Protocol):
    """What a step gives: a loss to minimise and figures to write down."""

    @property
    def loss(self) -> Tensor: ...
    @property
    def logs(self) -> dict[str, Tensor]: ...


Compute = Callable[..., Output]


def choose_device(name: str, local_rank: int | None = None) -> torch.device:
    """The device by its name; `auto` is a GPU where there is one, and processes of one machine take one GPU each."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device = {name!r} is unknown; give auto, cpu or cuda") from None
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        raise ConfigError(f"device = {name!r} is not available here; give auto or cpu")
    if device.type == "cuda" and device.index is None and local_rank is not None:
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(f"GPU {local_rank} does not exist here; start one process for each, or give device=cpu")
        device = torch.device("cuda", local_rank)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device = {name!r} does not exist; there are {torch.cuda.device_count()}, counted from 0")
    return device


def name_device(device: torch.device) -> str:
    """What a person would call it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


def make_optimizer(
    name: Literal["sgd", "adam"], parameters: list[nn.Parameter], device: torch.device
) -> torch.optim.Optimizer:
    """Plain SGD, as the paper has it, or Adam; on a GPU the learning rate is a tensor that a graph can read."""
    rate = torch.zeros((), device=device) if device.type == "cuda" else 0.0
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=rate, fused=device.type == "cuda")
    return torch.optim.Adam(parameters, lr=rate, capturable=device.type == "cuda", fused=device.type == "cuda")


def restore_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Take up saved state, but for the learning rate: a graph reads the tensor that the optimiser was made with."""
    rates = [group["lr"] for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


@dataclass(slots=True)
class _Program:
    """One kind of step: the names and sums of its figures and, once captured, its graph and the inputs it reads.

    What a pass repeats is one, too, without figures.
    """

    names: tuple[str, ...] = ()
    sums: Tensor | None = None
    steps: int = 0
    graph: torch.cuda.CUDAGraph | None = None
    inputs: tuple[Tensor, ...] = ()


class Engine:
    """Forward, backward and update, with the figures summed on the device.

    Args:
        optimizer: updates what the loss reaches.
        device: where everything lives.
        precision: float32, tf32 in matrix products and convolutions, or bf16 by autocast.
        generator: the one source of randomness of a step; None is torch's own.
        capture: whether to use a CUDA graph; without a GPU steps are always eager.
        own_kernels: whether to use hand-written kernels, which need a GPU, too.
        ranks: processes that compute the same loss together, over which gradients are averaged.
        layers: those that may keep their weights in bfloat16, too, where kernels can then update them by plain SGD.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        precision: Precision = "float32",
        *,
        generator: torch.Generator | None = None,
        capture: bool = True,
        own_kernels: bool = True,
        ranks: Ranks | None = None,
        layers: Sequence[Linear] = (),
    ) -> None:
        self.optimizer = optimizer
        self.device = device
        self.precision = precision
        self.generator = generator
        self.capture = capture and device.type == "cuda"
        self.own_kernels = own_kernels
        self.ranks = ranks or Ranks()
        simple = precision == "bf16" and own_kernels and self.ranks.alone and isinstance(optimizer, torch.optim.SGD)
        self.layers = [layer for layer in layers if simple and kernels.usable(layer.weight)]
        for layer in self.layers:
            layer.keep_rounded()
        self.remark: str | None = None
        """Why steps are eager although a graph was wanted."""
        self._programs: dict[object, _Program] = {}
        self._current: _Program | None = None
        if device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "float32"
            torch.backends.cudnn.benchmark = True
            self._stream = torch.cuda.Stream(device)

    def step(self, compute: Compute, *inputs: Tensor) -> None:
        """Minimise what `compute(*inputs)` returns by one update."""
        program = self._current = self._programs.setdefault(compute, _Program())
        self._run(program, lambda *given: self._execute(program, compute, given), inputs, _EAGER_STEPS)

    @contextmanager
    def arithmetic(self) -> Iterator[None]:
        """In passes between steps networks compute as in a step, and what is repeated for each batch is captured."""
        with self._arithmetic(), replay.repeated_by(self._repeat):
            yield

    @contextmanager
    def _arithmetic(self) -> Iterator[None]:
        """Networks compute in the run's precision, and with its kernels."""
        # Autocast would keep its copies of the weights from one replay to the next.
        half = torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16", cache_enabled=False)
        with half, kernels.allowed(self.own_kernels):
            yield

    def figures(self) -> dict[str, float]:
        """Means over the steps since the last call: the one copy to the host in an epoch."""
        program = self._current
        assert program is not None
        assert program.sums is not None
        *sums, count = program.sums.tolist()
        program.sums.zero_()
        return {name: value / count for name, value in zip(program.names, sums, strict=True)}

    def _repeat(self, function: Callable[..., None], *arguments: object) -> None:
        """`replay.repeat` of passes between steps; processes that share a pass call each other in between, eagerly."""
        if not self.ranks.alone:
            function(*arguments)
            return
        places = [place for place, value in enumerate(arguments) if isinstance(value, Tensor)]
        inputs = tuple(value for value in arguments if isinstance(value, Tensor))
        fixed = tuple(value.shape if isinstance(value, Tensor) else value for value in arguments)

        def execute(*given: Tensor) -> None:
            filled = dict(zip(places, given, strict=True))
            function(*(filled.get(place, value) for place, value in enumerate(arguments)))

        self._run(self._programs.setdefault((function, fixed), _Program()), execute, inputs, _EAGER_CALLS)

    def _run(self, program: _Program, execute: Callable[..., None], inputs: tuple[Tensor, ...], eager: int) -> None:
        """Once more: so often eagerly, and from then on as a graph."""
        CROWD.make_way()
        if not self.capture:
            execute(*inputs)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._stream):
                for layer in self.layers:
                    layer.renew()  # a graph cannot tell what was written between steps
                if program.graph is None and program.steps >= eager:
                    self._try_capture(program, execute, inputs)
                if program.graph is None:
                    execute(*inputs)
                else:
                    for ours, given in zip(program.inputs, inputs, strict=True):
                        ours.copy_(given)
                    program.graph.replay()
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
        program.steps += 1

    def _execute(self, program: _Program, compute: Compute, inputs: tuple[Tensor, ...]) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with self._arithmetic(), in_step(self.layers):
            output = compute(*inputs)
        values = {"loss": output.loss.detach(), **output.logs}
        with streams.beside(self.device, *values.values()):
            figures = torch.stack([*values.values(), torch.ones_like(output.loss)]).double()
            if program.sums is None:
                program.names, program.sums = tuple(values), torch.zeros_like(figures)
            program.sums.add_(figures)
        output.loss.backward()
        self.ranks.average(self._gradients())
        streams.join()  # the teacher's head is the student's, which now changes
        self.optimizer.step()
        for layer in self.layers:
            layer.descend(self.optimizer.param_groups[0]["lr"])

    def _gradients(self) -> list[Tensor]:
        parameters = (parameter for group in self.optimizer.param_groups for parameter in group["params"])
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def _try_capture(self, program: _Program, execute: Callable[..., None], inputs: tuple[Tensor, ...]) -> None:
        program.inputs = tuple(value.clone() for value in inputs)
        graph = torch.cuda.CUDAGraph()
        source = self.generator or torch.cuda.default_generators[torch.cuda.current_device()]
        before = source.clone_state()
        graph.register_generator_state(source)
        self.optimizer.zero_grad(set_to_none=True)
        try:
            # Not by torch.cuda.graph, which first waits until the device is idle and gives back all free memory: of the
            # threads beside this one, each may have sent a second's work ahead, which goes on meanwhile.
            with CROWD.alone():
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    execute(*program.inputs)
                finally:
                    graph.capture_end()
            program.graph = graph
        except RuntimeError as error:
            self.capture = False
            self.remark = f"steps run eagerly, since capture in a CUDA graph failed: {str(error).splitlines()[0]}"
            # A capture that broke off leaves the generator waiting for its end.
            source.graphsafe_set_state(before.graphsafe_get_state())
