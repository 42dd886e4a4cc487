"""Capture a function in a CUDA graph once and replay it.

A step of a small network launches some hundred kernels of a few microseconds each. Launched one by one, the GPU waits
for the host between them. A replayed graph launches all of them at once. The captured function must copy nothing to the
host and keep its shapes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from csda.fast.linear import Linear

EAGER_STEPS = 3
"""Eager calls of a step before its capture. In these cuDNN chooses its kernels and the optimiser makes its state."""

EAGER_BATCHES = 16
"""Eager calls of a pass over a part before its capture, because a capture pauses all other threads."""


class CaptureGate:
    """Pauses the other training threads of this process while one of them captures a CUDA graph.

    Several trainings can share a process, each in its own thread and on its own stream. If another thread sent work to
    the device during a capture, the capture would fail.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self._capturing = False
        self._thread = threading.local()

    @contextmanager
    def training(self) -> Iterator[None]:
        """A context in which this thread uses the device. It pauses only in `pause`."""
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def pause(self) -> None:
        """Wait while another thread captures."""
        if self._capturing and self._is_running():
            self._leave()
            self._enter()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """A context in which all other training threads are paused."""
        was_running = self._is_running()
        if was_running:
            self._leave()
        with self._changed:
            self._changed.wait_for(lambda: not self._capturing)
            self._capturing = True
            self._changed.wait_for(lambda: self._running == 0)
        try:
            yield
        finally:
            with self._changed:
                self._capturing = False
                self._changed.notify_all()
            if was_running:
                self._enter()

    def _is_running(self) -> bool:
        return getattr(self._thread, "running", False)

    def _enter(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._capturing)
            self._running += 1
        self._thread.running = True

    def _leave(self) -> None:
        self._thread.running = False
        with self._changed:
            self._running -= 1
            self._changed.notify_all()


GATE = CaptureGate()


@dataclass(slots=True)
class Program:
    """A function with fixed arguments: the number of its calls and, once captured, its graph and its input tensors."""

    calls: int = 0
    graph: torch.cuda.CUDAGraph | None = None
    inputs: tuple[Tensor, ...] = ()


class Graphs:
    """Calls functions eagerly at first, then captures and replays them on its own stream.

    `layers` keep rounded copies of their weights. These are renewed before every call.
    """

    def __init__(
        self,
        device: torch.device,
        generator: torch.Generator | None,
        layers: Sequence[Linear] = (),
        *,
        enabled: bool = True,
    ) -> None:
        self.device = device
        self.generator = generator
        self.layers = layers
        self.enabled = enabled
        self.remark: str | None = None
        """Why functions run eagerly although they should have been captured."""
        self.before_capture: Callable[[], None] = lambda: None
        self.programs: dict[object, Program] = {}
        self._stream = torch.cuda.Stream(device) if enabled else None

    def run(self, function: Callable[..., None], *arguments: object, eager: int) -> None:
        """Call `function(*arguments)`, or replay its graph. The first `eager` calls are not captured."""
        GATE.pause()
        if not self.enabled:
            function(*arguments)
            return
        inputs = tuple(value for value in arguments if isinstance(value, Tensor))
        fixed = tuple(value.shape if isinstance(value, Tensor) else value for value in arguments)
        program = self.programs.setdefault((function, fixed), Program())

        def execute(given: tuple[Tensor, ...]) -> None:
            tensors = iter(given)
            function(*(next(tensors) if isinstance(value, Tensor) else value for value in arguments))

        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            for layer in self.layers:
                layer.renew()  # the weights may have changed between calls
            if program.graph is None and program.calls >= eager:
                self._capture(program, execute, inputs)
            if program.graph is None:
                execute(inputs)
            else:
                for ours, given in zip(program.inputs, inputs, strict=True):
                    ours.copy_(given)
                program.graph.replay()
        torch.cuda.current_stream(self.device).wait_stream(self._stream)
        program.calls += 1

    def _capture(
        self, program: Program, execute: Callable[[tuple[Tensor, ...]], None], inputs: tuple[Tensor, ...]
    ) -> None:
        program.inputs = tuple(value.clone() for value in inputs)
        graph = torch.cuda.CUDAGraph()
        source = self.generator or torch.cuda.default_generators[torch.cuda.current_device()]
        before = source.clone_state()
        graph.register_generator_state(source)
        self.before_capture()
        try:
            # Not torch.cuda.graph, which first waits until the device is idle and returns all free memory. Other
            # threads may have submitted work for a second, which may continue meanwhile.
            with GATE.exclusive():
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    execute(program.inputs)
                finally:
                    graph.capture_end()
            program.graph = graph
        except RuntimeError as error:
            self.enabled = False
            self.remark = f"steps run eagerly, because capture in a CUDA graph failed: {str(error).splitlines()[0]}"
            # After a failed capture the generator would still wait for the end of the capture.
            source.graphsafe_set_state(before.graphsafe_get_state())
