"""Many trainings: in processes of their own and side by side within each, or as tasks of Ray on many machines.

Runs write whole files and resume, so nothing here saves anything: a run that breaks is tried once more, alone and in a
fresh process, from its checkpoint; an interrupted grid continues when it is launched again. Workers end with the
process that launched them, even if that one crashes.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import platform
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from csda.cluster import joined_ray
from csda.errors import CsdaError, RunError, is_out_of_memory

if TYPE_CHECKING:
    from csda.runs import Run

SIDE_BY_SIDE = 4
"""Runs at a time on one GPU, unless told otherwise."""


class Trainable(Protocol):
    """A run that can be sent to another process; `train` continues where an earlier attempt ended."""

    @property
    def folder(self) -> Path: ...
    def train(self) -> Run: ...


Cell = TypeVar("Cell", bound=Trainable)
Note = Callable[[str], None]
Launcher = Literal["processes", "ray"]
Outcome = Any
"""A `Run`, a `CsdaError` that says what to fix, or as text why the run broke and may be tried once more."""


def launch(
    cells: Sequence[Cell],
    *,
    launcher: Launcher = "processes",
    jobs: int | None = None,
    side_by_side: int | None = None,
    minutes: float | None = None,
    note: Note,
) -> Generator[tuple[Cell, Run | CsdaError]]:
    """Train all cells and give each with its run, or with what went wrong, as they end.

    Args:
        cells: what to train, in this order.
        launcher: processes here, or tasks of Ray.
        jobs: how many of these at a time; without a number one process, or as many tasks as Ray has room for. Where
            there are several GPUs, processes take turns.
        side_by_side: runs at a time in each process, or tasks on each GPU of Ray; without a number `SIDE_BY_SIDE` on a
            GPU, one on the CPU.
        minutes: after so many none is begun any more; those that run are waited for.
        note: is told of runs that are tried once more, and how many were not begun.
    """
    retries = Retries(note)
    pending = Pending(len(cells), minutes)
    if launcher == "ray":
        yield from _launch_ray(cells, pending, jobs or len(cells), side_by_side or SIDE_BY_SIDE, retries)
    else:
        import torch

        gpus = torch.cuda.device_count()
        side_by_side = side_by_side or (SIDE_BY_SIDE if gpus else 1)
        yield from _launch_processes(cells, pending, jobs or 1, side_by_side, gpus, retries)
    if pending.left:
        note(f"{pending.left} runs were not begun, since {minutes:g} minutes were over")


class Retries:
    """The numbers of runs that broke and are to be tried once more, each once."""

    def __init__(self, note: Note) -> None:
        self.note = note
        self.waiting: deque[int] = deque()
        self._broken: set[int] = set()

    def judge(self, number: int, cell: Trainable, outcome: Outcome) -> Run | CsdaError | None:
        """What became of a run, or None where it is to be tried once more."""
        if not isinstance(outcome, str):
            return outcome  # type: ignore[no-any-return]
        if number in self._broken:
            return RunError(
                f"broke twice ({outcome}); where memory is short give fewer --jobs or --side-by-side, "
                "or a smaller batch_size"
            )
        self.note(f"{cell.folder.name}: broke ({outcome}) and is tried once more")
        self._broken.add(number)
        self.waiting.append(number)
        return None


class Pending:
    """The numbers of runs that have not been begun, in their order; empty once the time is over."""

    def __init__(self, count: int, minutes: float | None) -> None:
        self._numbers = deque(range(count))
        self._end = math.inf if minutes is None else time.monotonic() + 60.0 * minutes

    def __bool__(self) -> bool:
        return bool(self._numbers) and time.monotonic() < self._end

    def popleft(self) -> int:
        return self._numbers.popleft()

    @property
    def left(self) -> int:
        return len(self._numbers)


def _launch_processes(
    cells: Sequence[Cell], pending: Pending, jobs: int, side_by_side: int, gpus: int, retries: Retries
) -> Iterator[tuple[Cell, Run | CsdaError]]:
    workers = [_Worker(index % gpus if gpus else None) for index in range(jobs)]
    try:
        while pending or retries.waiting or any(worker.numbers for worker in workers):
            while retries.waiting and (idle := [worker for worker in workers if not worker.numbers]):
                number = retries.waiting.popleft()
                # Of runs that failed together one may be the cause, so each is tried alone.
                idle[0].give(number, cells[number], last=True)
            while pending and (free := [w for w in workers if not w.last and len(w.numbers) < side_by_side]):
                number = pending.popleft()
                min(free, key=lambda worker: len(worker.numbers)).give(number, cells[number])
            for worker in _ready(workers):
                for number, outcome in worker.take():
                    if (ended := retries.judge(number, cells[number], outcome)) is not None:
                        yield cells[number], ended
    finally:
        for worker in workers:
            worker.stop()


class _Worker:
    """A process that trains on one device, started when it is first needed, and the numbers of the runs it has."""

    def __init__(self, gpu: int | None) -> None:
        self.gpu = gpu
        self.numbers: set[int] = set()
        self.last = False
        """Whether it takes no more runs, and is replaced once it has none."""
        self._process: multiprocessing.context.SpawnProcess | None = None

    def give(self, number: int, cell: Trainable, *, last: bool = False) -> None:
        if self._process is None or not self._process.is_alive():
            self._start()
        self.numbers.add(number)
        self.last = last
        with suppress(BrokenPipeError):  # it died just now, which shows when its answer is taken
            self.connection.send((number, cell))

    def take(self) -> list[tuple[int, Outcome]]:
        """What has ended: one run, or with the process all that it had."""
        try:
            number, outcome = self.connection.recv()
            ended = [(number, outcome)]
            self.numbers.remove(number)
            # After an error that nobody foresaw the process is not to be trusted, nor is its GPU.
            self.last |= isinstance(outcome, str)
        except (EOFError, ConnectionError):
            ended = [(number, f"its process {self._fate()}") for number in sorted(self.numbers)]
            self.numbers.clear()
        if not self.numbers and self.last:
            self.stop()
        return ended

    def stop(self) -> None:
        """End the process at once; what it was writing is whole or not there."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self.connection.close()
        self._process, self.last = None, False

    def _start(self) -> None:
        self.stop()
        processes = multiprocessing.get_context("spawn")
        self.connection, theirs = processes.Pipe()
        process = processes.Process(target=_work, args=(theirs, self.gpu))
        with _interrupts_held():
            process.start()
            self._process = process
        theirs.close()

    def _fate(self) -> str:
        assert self._process is not None
        self._process.join()
        code = self._process.exitcode or 0
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _ready(workers: Sequence[_Worker]) -> list[_Worker]:
    """Workers from which there is something to take; waits for one, unless none has anything."""
    busy = [worker for worker in workers if worker.numbers]
    ready = wait([worker.connection for worker in busy]) if busy else []  # for nothing it would wait for ever
    return [worker for worker in busy if worker.connection in ready]


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Processes started within never see Ctrl-C, which a terminal sends to all of a group: it is ours to end them."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # started later, it would lift the mask
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _work(orders: Connection[Any, Any], gpu: int | None) -> None:
    """In a worker: train what comes, each run in a thread of its own, until nobody is there to send more."""
    sys.setswitchinterval(0.00005)  # while one run reads, scores or writes, the others launch their steps
    sending = threading.Lock()

    def train(number: int, cell: Trainable) -> None:
        with _place(gpu):
            outcome = _attempt(cell)
        with sending, suppress(OSError):
            orders.send((number, outcome))

    while True:
        try:
            number, cell = orders.recv()
        except (EOFError, ConnectionError):
            os._exit(0)  # threads that train would keep the process
        threading.Thread(target=train, args=(number, cell), daemon=True).start()


def _place(gpu: int | None) -> AbstractContextManager[object]:
    """Where a thread trains: on its worker's GPU, in a stream of its own."""
    if gpu is None:
        return nullcontext()
    import torch

    return torch.cuda.stream(torch.cuda.Stream(gpu))


def _attempt(cell: Trainable) -> Outcome:
    try:
        return cell.train()
    except CsdaError as error:
        return error
    except Exception as error:
        if not is_out_of_memory(error):
            traceback.print_exc()
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _launch_ray(
    cells: Sequence[Cell], pending: Pending, jobs: int, side_by_side: int, retries: Retries
) -> Iterator[tuple[Cell, Run | CsdaError]]:
    with joined_ray() as ray:
        gpus = 1 / side_by_side if ray.cluster_resources().get("GPU") else 0
        # A worker that trains one run and ends leaves nothing behind, neither memory nor errors of its GPU.
        task = ray.remote(num_cpus=1, num_gpus=gpus, max_calls=1, max_retries=0)(_attempt_in)
        running: dict[Any, int] = {}
        while pending or retries.waiting or running:
            while (pending or retries.waiting) and len(running) < jobs:
                number = (retries.waiting or pending).popleft()
                running[task.remote(Path.cwd(), cells[number])] = number
            if not running:  # time has run out just now
                break
            (ready, *_), _ = ray.wait(list(running))
            number = running.pop(ready)
            try:
                outcome = ray.get(ready)
            except ray.exceptions.RayError as error:  # the worker was killed, or its machine is gone
                outcome = f"{type(error).__name__}: {str(error).splitlines()[-1]}"
            if (ended := retries.judge(number, cells[number], outcome)) is not None:
                yield cells[number], ended


def _attempt_in(folder: Path, cell: Trainable) -> Outcome:
    """In a worker of Ray, which starts in a folder of its own; the paths of a run may be relative to ours."""
    try:
        os.chdir(folder)
    except OSError:
        return RunError(f"{folder}: not there on {platform.node()}; workers of Ray need it under the same path")
    return _attempt(cell)
