"""Several processes that train one model together, started by `torchrun`.

All processes run the same program on the same whole batches with the same random numbers, so alignment, queue and
losses need no communication. Only the networks' work is divided: each process passes its part of the images through the
network, the outputs are gathered, and gradients flow back the same way. A step gives the same result as in one process,
except for the order of sums.

Every process computes the same loss. Gradients are summed over processes and divided by their number.
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
    "stopped, because another process of this training ended or all were told to stop; "
    "continue with --resume and its folder as --out, on any number of processes"
)
_TRAININGS = itertools.count()
_store: Any = None
"""torch's store, through which the processes met. It still works when some of them have ended."""


class Ranks:
    """The rank of this process, and communication with the others; by default a single process.

    Attributes:
        rank: number of this process, from 0; only the first one writes and prints.
        size: number of processes.
        local_rank: number of this process on its machine; None for a single process.
        count: number of samples that the processes share at the moment; None if each sees all of them.
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
        """Apply a network to all samples of the tensors [B, …]; each process computes its part."""
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
        """This process's rows of values [B, …] inside of `map`; all rows outside."""
        return values if self.count is None else values[self.span(len(values))]

    def span(self, count: int) -> slice:
        """The positions of this process's part of `count` samples."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def sum(self, values: Tensor) -> Tensor:
        """Add up dense tensors over the processes, in place."""
        with _explained():
            dist.all_reduce(values)
        return values

    def average_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Average the gradients over the processes, in place and in one message."""
        if self.alone:
            return
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        tensors = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat = self.sum(torch.cat([tensor.flatten() for tensor in tensors])).div_(self.size)
        parts = flat.split([tensor.numel() for tensor in tensors])
        torch._foreach_copy_(tensors, [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)])

    def from_first(self, compute: Callable[[], Result]) -> Result:
        """Compute a value in the first process and give it to all."""
        if self.alone:
            return compute()
        box: list[Any] = [compute() if self.first else None]
        with _explained():
            dist.broadcast_object_list(box)
        result: Result = box[0]
        return result

    def require_same(self, value: str, what: str) -> None:
        """Raise a `DataError` in every process if one has another value than the first."""
        if self.alone:
            return
        values: list[Any] = [None] * self.size
        with _explained():
            dist.all_gather_object(values, hashlib.sha256(value.encode(errors="surrogateescape")).digest())
        if others := [str(rank) for rank, its in enumerate(values) if its != values[0]]:
            raise DataError(
                f"{what} of process {', '.join(others)} differ from those of process 0; "
                "give all processes the same data, under the same path"
            )


class _Gather(torch.autograd.Function):
    """Gather the parts of all processes; the gradient of a part is summed over all processes."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: Ranks, count: int) -> Tensor:
        ctx.ranks = ranks
        # Parts have different lengths or are empty, so each process adds its part into zeros.
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
    """Join the processes that `torchrun` started, if it did, for the time of a training."""
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
                # The store outlives processes that torchrun restarts, and their addresses in it are stale.
                _store = PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT')}", store)
            store = PrefixStore(f"training {next(_TRAININGS)}", _store)
            # Without the name of a backend torch takes gloo for the CPU and NCCL for GPUs.
            dist.init_process_group(store=store, rank=rank, world_size=size)
    with _told_to_stop():
        yield Ranks(rank, size, local_rank)
    # After an error the other processes are gone, and a shutdown could wait forever.
    if ours:
        dist.destroy_process_group()


def is_first() -> bool:
    """Whether this process is single or the first of several: the one that reports."""
    return not _launched() or os.environ["RANK"] == "0"


def _launched() -> bool:
    return all(name in os.environ for name in _VARIABLES)


def stops_first() -> bool:
    """Whether this process is the first that stops. It prints the reason."""
    try:
        return _store is None or _store.add("csda: stopped", 1) == 1
    except RuntimeError:  # the process with the store is gone, too
        return True


_GONE = re.compile(
    r"connection (closed|reset|refused|was)|peer|broken pipe|timed? ?out|read error|pair closure|socket|abort|"
    r"unhandled system error|remote process|connectfullmesh",
    re.IGNORECASE,
)
"""Error messages of gloo, NCCL and the store when another process is gone."""


@contextmanager
def _explained() -> Iterator[None]:
    """Replace errors that mean that another process has ended; others stay."""
    try:
        yield
    except RuntimeError as error:
        # The engine handles errors of CUDA graph capture.
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise
        if not isinstance(error, dist.DistError) and not _GONE.search(str(error)):
            raise
        raise RunError(_ENDED) from None


@contextmanager
def _told_to_stop() -> Iterator[None]:
    """`torchrun` ends all processes when one has died; let them print the reason."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise RunError(_ENDED)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except BaseException:
        # It is about to print why it stops.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise
    signal.signal(signal.SIGTERM, before)
