"""Several processes that train one model together, started by `torchrun`.

All of them run the same program on the same whole batches, with the same draws, so that alignment, queue and losses
need to know nothing of each other's. What is shared among them is the networks' work: each process passes its part of
the images, the outputs are gathered, and gradients flow back the same way. So a step gives what it gives in one
process, except for the order of sums.

Every process computes the same loss. Its gradients are those of the sum over the processes, divided by their number.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from csda.errors import DataError, RunError

Result = TypeVar("Result")

_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_ENDED = (
    "stopped, since another process of this training ended or all were told to; "
    "it goes on with --resume and its folder as --out, on any number of processes"
)
_TRAININGS = itertools.count()
_store: Any = None
"""The store through which the processes met; it still works when some of them have ended."""


class Ranks:
    """This process among those that train together; by default a single process.

    Attributes:
        rank: this process, counted from 0; the first one writes and speaks.
        size: how many there are.
        local_rank: this process among those of its machine, None on its own.
        count: of how many samples the networks see a part at the moment; None where they see all of them.
    """

    def __init__(self, rank: int = 0, size: int = 1, local_rank: int | None = None) -> None:
        self.rank = rank
        self.size = size
        self.local_rank = local_rank
        self.count: int | None = None

    @property
    def alone(self) -> bool:
        return self.local_rank is None

    @property
    def first(self) -> bool:
        return self.rank == 0

    def map(self, network: Callable[..., Tensor], *samples: Tensor) -> Tensor:
        """What a network gives for all samples, tensors [B, …] one after the other; each process passes its part."""
        if self.alone:
            return network(*samples)
        together = torch.cat(samples)
        self.count = len(together)
        try:
            part = network(self.part(together))
        finally:
            self.count = None
        gathered: Tensor = _Gather.apply(part, self, len(together))  # type: ignore[no-untyped-call]
        return gathered

    def part(self, values: Tensor) -> Tensor:
        """The rows of values [B, …] that are this process's, while the networks see parts; else all of them."""
        return values if self.count is None else values[self.span(len(values))]

    def span(self, count: int) -> slice:
        """This process's part of so many samples, by their position."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def sum(self, values: Tensor) -> Tensor:
        """Add up dense values over the processes, in place."""
        with _explained():
            dist.all_reduce(values)
        return values

    def average_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """The mean of the gradients over the processes, in place and in one message."""
        if self.alone:
            return
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        tensors = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat = self.sum(torch.cat([tensor.flatten() for tensor in tensors])).div_(self.size)
        parts = flat.split([tensor.numel() for tensor in tensors])
        torch._foreach_copy_(tensors, [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)])

    def from_first(self, compute: Callable[[], Result]) -> Result:
        """What the first process computes, for all of them."""
        if self.alone:
            return compute()
        box: list[Any] = [compute() if self.first else None]
        with _explained():
            dist.broadcast_object_list(box)
        result: Result = box[0]
        return result

    def require_same(self, value: str, what: str) -> None:
        """A `DataError` in every process where one has another value than the first."""
        if self.alone:
            return
        values: list[Any] = [None] * self.size
        with _explained():
            dist.all_gather_object(values, hashlib.sha256(value.encode(errors="surrogateescape")).digest())
        if others := [str(rank) for rank, its in enumerate(values) if its != values[0]]:
            raise DataError(
                f"{what} of process {', '.join(others)} are not those of process 0; "
                "give all processes the same data, under the same path"
            )


class _Gather(torch.autograd.Function):
    """The parts of all processes, one after the other; the gradient of a part comes from all of them."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: Ranks, count: int) -> Tensor:
        ctx.ranks = ranks
        # A sum with zeros takes parts of different lengths, and empty ones.
        gathered = part.new_zeros(count, *part.shape[1:])
        gathered[ranks.span(count)] = part
        return ranks.sum(gathered)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        gradient = ctx.ranks.sum(gradient.clone(memory_format=torch.contiguous_format))
        return gradient[ctx.ranks.span(len(gradient))], None, None


@contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """Meet the processes that `torchrun` started, where it did, for the time of a training."""
    global _store
    if not _launched():
        yield Ranks()
        return
    rank, local_rank, size = (int(os.environ[name]) for name in _VARIABLES[:3])
    ours = not dist.is_initialized()
    if ours:
        with _explained():
            if _store is None:
                store, *_ = next(rendezvous("env://"))
                # The store outlives processes that torchrun starts again, and their addresses in it are stale.
                _store = PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT')}", store)
            store = PrefixStore(f"training {next(_TRAININGS)}", _store)
            # Without the name of a backend there is gloo for the CPU and, where there are GPUs, NCCL for them.
            dist.init_process_group(store=store, rank=rank, world_size=size)
    with _told_to_stop():
        yield Ranks(rank, size, local_rank)
    # After an error the other processes are gone, and a shutdown could wait for ever.
    if ours:
        dist.destroy_process_group()


def is_first() -> bool:
    """Whether this process is on its own, or the first of those that train together: the one that reports."""
    return not _launched() or os.environ["RANK"] == "0"


def _launched() -> bool:
    return all(name in os.environ for name in _VARIABLES)


def stops_first() -> bool:
    """Whether this process is the first that stops, and so the one that says why."""
    try:
        return _store is None or _store.add("csda: stopped", 1) == 1
    except RuntimeError:  # whoever kept the store is gone, too
        return True


_GONE = re.compile(
    r"connection (closed|reset|refused|was)|peer|broken pipe|timed? ?out|read error|pair closure|socket|abort|"
    r"unhandled system error|remote process|connectfullmesh",
    re.IGNORECASE,
)
"""What gloo, NCCL and the store say when another process is not there any more."""


@contextmanager
def _explained() -> Iterator[None]:
    """Say so where another process has ended; all other errors stay what they are."""
    try:
        yield
    except RuntimeError as error:
        # What cannot be captured in a CUDA graph is the engine's business.
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise
        if not isinstance(error, dist.DistError) and not _GONE.search(str(error)):
            raise
        raise RunError(_ENDED) from None


@contextmanager
def _told_to_stop() -> Iterator[None]:
    """`torchrun` ends all processes when one has died; let them say so."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise RunError(_ENDED)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except BaseException:
        # It is about to report why it stops.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise
    signal.signal(signal.SIGTERM, before)
