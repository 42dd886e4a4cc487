"""Run many trainings, in several processes and threads, or as Ray tasks on several machines.

Runs write their own files and resume, so this module stores nothing. A run that fails is tried once more from its
checkpoint, alone in a new process. An interrupted grid continues when it is launched again. Workers end with the
process that launched them, even if it crashes.
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
"""Default number of parallel runs on a GPU."""


class Trainable(Protocol):
    """A run that can be sent to another process; `train` continues an earlier attempt."""

    @property
    def folder(self) -> Path: ...
    def train(self) -> Run: ...


Cell = TypeVar("Cell", bound=Trainable)
Note = Callable[[str], None]
Launcher = Literal["processes", "ray"]
Outcome = Any
"""A `Run`, a `CsdaError`, or the text of an unexpected error, after which the run may be tried once more."""


def launch(
    cells: Sequence[Cell],
    *,
    launcher: Launcher = "processes",
    jobs: int | None = None,
    side_by_side: int | None = None,
    minutes: float | None = None,
    note: Note,
) -> Generator[tuple[Cell, Run | CsdaError]]:
    """Train all cells; yield each with its run or error when it ends.

    Args:
        cells: what to train, in this order.
        launcher: processes here, or tasks of Ray.
        jobs: number of processes or tasks; None for one process, or as many tasks as Ray has room for. Processes are
            distributed over the GPUs.
        side_by_side: parallel runs in each process, or tasks on each GPU of Ray; None for `SIDE_BY_SIDE` on a GPU, one
            on the CPU.
        minutes: no run is started after this time; those that have started are completed.
        note: prints remarks on runs that are tried once more or were not started.
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
        note(f"{pending.left} runs were not started, because {minutes:g} minutes were over")


class Retries:
    """The runs that failed and will be tried once more."""

    def __init__(self, note: Note) -> None:
        self.note = note
        self.waiting: deque[int] = deque()
        self._broken: set[int] = set()

    def judge(self, number: int, cell: Trainable, outcome: Outcome) -> Run | CsdaError | None:
        """The outcome of a run, or None if it will be tried once more."""
        if not isinstance(outcome, str):
            return outcome  # type: ignore[no-any-return]
        if number in self._broken:
            return RunError(
                f"failed twice ({outcome}); if memory is short give fewer --jobs or --side-by-side, "
                "or a smaller batch_size"
            )
        self.note(f"{cell.folder.name}: failed ({outcome}) and is tried once more")
        self._broken.add(number)
        self.waiting.append(number)
        return None


class Pending:
    """The runs that have not been started, in order; empty when the time is over."""

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
                # If several runs failed together, one may be the cause, so each is tried alone.
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
    """A process that trains on one device, started when it is first needed, and its current runs."""

    def __init__(self, gpu: int | None) -> None:
        self.gpu = gpu
        self.numbers: set[int] = set()
        self.last = False
        """Whether it gets no more runs and is replaced when its runs have ended."""
        self._process: multiprocessing.context.SpawnProcess | None = None

    def give(self, number: int, cell: Trainable, *, last: bool = False) -> None:
        if self._process is None or not self._process.is_alive():
            self._start()
        self.numbers.add(number)
        self.last = last
        with suppress(BrokenPipeError):  # it died just now, which is noticed when its answer is read
            self.connection.send((number, cell))

    def take(self) -> list[tuple[int, Outcome]]:
        """The runs that have ended: one, or all if the process ended."""
        try:
            number, outcome = self.connection.recv()
            ended = [(number, outcome)]
            self.numbers.remove(number)
            # After an unexpected error the state of the process and its GPU is unknown.
            self.last |= isinstance(outcome, str)
        except (EOFError, ConnectionError):
            ended = [(number, f"its process {self._fate()}") for number in sorted(self.numbers)]
            self.numbers.clear()
        if not self.numbers and self.last:
            self.stop()
        return ended

    def stop(self) -> None:
        """End the process at once; its files are complete or absent."""
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
    """Wait for and return workers with something to read; empty if none is busy."""
    busy = [worker for worker in workers if worker.numbers]
    ready = wait([worker.connection for worker in busy]) if busy else []  # without connections it would wait forever
    return [worker for worker in busy if worker.connection in ready]


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """A context in which started processes ignore Ctrl-C, which a terminal sends to the whole group; this process ends
    them.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # started later, it would unblock the signal
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _work(orders: Connection[Any, Any], gpu: int | None) -> None:
    """In a worker: train each run that is sent in its own thread, until the connection closes."""
    sys.setswitchinterval(0.00005)  # so that other runs continue while one reads, scores or writes
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
            os._exit(0)  # otherwise training threads would keep the process alive
        threading.Thread(target=train, args=(number, cell), daemon=True).start()


def _place(gpu: int | None) -> AbstractContextManager[object]:
    """The context in which a thread trains: its worker's GPU and its own stream."""
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
        # A worker that trains one run and ends frees its memory and clears GPU errors.
        task = ray.remote(num_cpus=1, num_gpus=gpus, max_calls=1, max_retries=0)(_attempt_in)
        running: dict[Any, int] = {}
        while pending or retries.waiting or running:
            while (pending or retries.waiting) and len(running) < jobs:
                number = (retries.waiting or pending).popleft()
                running[task.remote(Path.cwd(), cells[number])] = number
            if not running:  # the time is over
                break
            (ready, *_), _ = ray.wait(list(running))
            number = running.pop(ready)
            try:
                outcome = ray.get(ready)
            except ray.exceptions.RayError as error:  # the worker or its machine is gone
                outcome = f"{type(error).__name__}: {str(error).splitlines()[-1]}"
            if (ended := retries.judge(number, cells[number], outcome)) is not None:
                yield cells[number], ended


def _attempt_in(folder: Path, cell: Trainable) -> Outcome:
    """In a Ray worker: train a run. Relative paths refer to the folder of the calling process."""
    try:
        os.chdir(folder)
    except OSError:
        return RunError(f"{folder}: not there on {platform.node()}; workers of Ray need it under the same path")
    return _attempt(cell)
