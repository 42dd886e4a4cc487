"""Run independent parts of a step at the same time, on two CUDA streams.

Alignment and queue are about a hundred kernels of a few microseconds. They use little of the GPU, so beside the passes
of a network they take almost no extra time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from csda.methods.self_training import SelfTraining
from csda.models.two_stream import TwoStream

Result = TypeVar("Result")


class _Thread(threading.local):
    """The second stream of this thread, and the work on it."""

    stream: torch.cuda.Stream | None = None
    forked = False
    in_step = False

    def __init__(self) -> None:
        self.kept: list[object] = []


_thread = _Thread()


class Pending(Tensor):
    """A tensor that the second stream may still be computing. Its first use waits for that stream."""

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        join()
        with torch._C.DisableTorchFunctionSubclass():
            return function(*tree_map(_plain, args), **tree_map(_plain, kwargs or {}))


def beside(function: Callable[..., Result], device: torch.device) -> Callable[..., Result]:
    """Wrap a function so that within a step it runs on a second stream, beside the code after the call.

    The function sees everything that was written before the call. The first use of a returned tensor waits for the
    function; everything else that it writes is complete after `join`. Its arguments are kept until then, because memory
    that the first stream frees could be reused while the second stream still reads it.
    """

    def call(*arguments: Any) -> Result:
        if not _thread.in_step:
            return function(*arguments)
        current = torch.cuda.current_stream(device)
        # The devices of streams are compared, because "cuda" and "cuda:0" are one device but not equal.
        if _thread.stream is None or _thread.stream.device != current.device:
            join()
            _thread.stream = torch.cuda.Stream(current.device)
        _thread.stream.wait_stream(current)
        _thread.forked = True
        _thread.kept.extend(arguments)
        with torch.cuda.stream(_thread.stream):
            result: Result = tree_map(_pending, function(*arguments))
        return result

    return call


def join() -> None:
    """Let the current stream wait for the second one."""
    if _thread.forked:
        assert _thread.stream is not None
        torch.cuda.current_stream(_thread.stream.device).wait_stream(_thread.stream)
        _thread.forked = False
        _thread.kept.clear()


@contextmanager
def overlapping() -> Iterator[None]:
    """A context in which functions wrapped by `beside` use the second stream. Its end waits for all of them."""
    _thread.in_step = True
    try:
        yield
    finally:
        _thread.in_step = False
        join()


def overlap_halves(model: TwoStream, method: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Run the teacher's half of a self-training step beside the student's half.

    Without a queue, the teacher predicts while the student passes its images, because neither needs the other before
    the loss. If the queue is updated after the student has trained, as in Algorithm 1, the update is for the next step
    and runs beside the backward pass. If the queue is updated first, the student needs it at once, and nothing runs in
    parallel.
    """
    if not isinstance(method, SelfTraining):
        return
    settings, queue = method.settings, method.refinement.queue
    if queue is None and settings.teacher == "ema":
        method.choose = beside(method.choose, device)  # type: ignore[method-assign]
    elif queue is not None and settings.order == "train_first":
        method.guess_align_queue = beside(method.guess_align_queue, device)  # type: ignore[method-assign]
    else:
        return
    model.average_weights = beside(model.average_weights, device)  # type: ignore[method-assign]
    if settings.labeled_from == "student":
        method.observe = beside(method.observe, device)  # type: ignore[method-assign]
    # The teacher predicts with the student's head, which the update changes.
    optimizer.register_step_pre_hook(lambda *_: join())


def _pending(value: Any) -> Any:
    return value.as_subclass(Pending) if isinstance(value, Tensor) else value


def _plain(value: Any) -> Any:
    return value.as_subclass(Tensor) if isinstance(value, Pending) else value
