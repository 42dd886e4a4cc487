"""Run independent parts of a step at the same time, on two CUDA streams.

Alignment and queue are a hundred kernels of a few microseconds. They wait for each other, not for the hardware, so
beside the passes of a network they cost almost nothing.
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
    """The second stream of this thread, and what is running on it."""

    stream: torch.cuda.Stream | None = None
    forked = False
    in_step = False

    def __init__(self) -> None:
        self.kept: list[object] = []


_thread = _Thread()


class Pending(Tensor):
    """A tensor that the second stream may still be computing; whatever uses it first waits for that stream."""

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        join()
        with torch._C.DisableTorchFunctionSubclass():
            return function(*tree_map(_plain, args), **tree_map(_plain, kwargs or {}))


def beside(function: Callable[..., Result], device: torch.device) -> Callable[..., Result]:
    """The function, called within a step on a second stream, beside what follows there.

    It sees all that was written before the call. Tensors that it returns wait for it when they are used; what else it
    writes is there after `join`. Its arguments are kept until then, since memory that is free for the first stream is
    not free for the second.
    """

    def call(*arguments: Any) -> Result:
        if not _thread.in_step:
            return function(*arguments)
        current = torch.cuda.current_stream(device)
        # Asked of the stream, since "cuda" and "cuda:0" are one device and not equal.
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
    """Wait for the second stream: what follows sees its results."""
    if _thread.forked:
        assert _thread.stream is not None
        torch.cuda.current_stream(_thread.stream.device).wait_stream(_thread.stream)
        _thread.forked = False
        _thread.kept.clear()


@contextmanager
def overlapping() -> Iterator[None]:
    """Within this context functions of `beside` use the second stream; at its end all of them are joined."""
    _thread.in_step = True
    try:
        yield
    finally:
        _thread.in_step = False
        join()


def overlap_halves(model: TwoStream, method: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Let the teacher's half of a self-training step run beside the student's.

    Without a queue the teacher guesses while the student passes its images: neither needs the other before the loss.
    With a queue that is renewed after the training, as Algorithm 1 has it, what is renewed is for the next step and
    runs beside the backward pass. Where the queue is renewed first, the student needs it at once.
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
