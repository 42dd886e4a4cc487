"""Progress output: bars on a terminal, plain lines in a log."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from csda.errors import explained


class Reporter:
    """Prints nothing. Base class of the others; used when `csda.train` is called from a program."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    @property
    def silent(self) -> bool:
        """Whether notes are discarded, so that they need not be computed."""
        return type(self).note is Reporter.note

    def note(self, text: str) -> None:
        """A sentence that a user should read."""

    def pixels(self, done: int, total: int) -> None:
        """`done` of `total` images have been decoded."""

    def features(self, done: int, total: int) -> None:
        """The features of `done` of `total` images have been computed."""

    def images(self, done: int, total: int) -> None:
        """`done` of `total` images have been predicted."""

    def begin(self, epochs: int, steps: int, done_epochs: int) -> None:
        """The training begins, or continues after `done_epochs`."""

    def step(self) -> None:
        """A step has ended."""

    def epoch(self, row: Mapping[str, Any]) -> None:
        """An epoch has ended with these figures."""


class LogReporter(Reporter):
    """Prints plain lines, for log files."""

    def note(self, text: str) -> None:
        print(text, flush=True)

    def begin(self, epochs: int, steps: int, done_epochs: int) -> None:
        self.epochs = epochs

    def epoch(self, row: Mapping[str, Any]) -> None:
        figures = "  ".join(
            f"{name} {value:.4f}" for name, value in row.items() if name in _SHOWN and value is not None
        )
        print(f"epoch {row['epoch']}/{self.epochs}  {figures}  {row['seconds']:.1f} s", flush=True)


class BarReporter(Reporter):
    """Shows progress bars for pixels, features and training, with the latest AUC and MCA and the time left."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
            console=self.console,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        # A second training gets its own bars.
        for task in self._tasks.values():
            self.progress.remove_task(task)
        self._tasks.clear()
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    def note(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False)

    def pixels(self, done: int, total: int) -> None:
        self.progress.update(self._task("pixels", total), completed=done)

    def features(self, done: int, total: int) -> None:
        self.progress.update(self._task("features", total), completed=done)

    def images(self, done: int, total: int) -> None:
        self.progress.update(self._task("images", total), completed=done, figures=f"{done:,} of {total:,}")

    def begin(self, epochs: int, steps: int, done_epochs: int) -> None:
        self._steps_shown = time.monotonic()
        self.progress.update(self._task("training", epochs * steps), completed=done_epochs * steps)
        self._pending = 0

    def step(self) -> None:
        self._pending += 1
        if time.monotonic() - self._steps_shown > 0.1:
            self.progress.update(self._task("training", None), advance=self._pending)
            self._steps_shown, self._pending = time.monotonic(), 0

    def epoch(self, row: Mapping[str, Any]) -> None:
        shown = (f"{label} {row[name]:.3f}" for name, label in _BAR_FIGURES.items() if row.get(name) is not None)
        self.progress.update(self._task("training", None), advance=self._pending, figures="  ".join(shown))
        self._pending = 0

    def _task(self, name: str, total: int | None) -> TaskID:
        if name not in self._tasks:
            self._tasks[name] = self.progress.add_task(name, total=total, figures="")
        return self._tasks[name]


class EventWriter:
    """Writes TensorBoard event files of a run; a resumed run hides the epochs that it computes again."""

    def __init__(self, run_folder: Path, epochs_done: int) -> None:
        self._folder = run_folder / "tensorboard"
        self._open(epochs_done + 1)

    def _open(self, epoch: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        with explained(self._folder):
            self._writer = SummaryWriter(str(self._folder), purge_step=epoch)

    def write(self, row: Mapping[str, Any]) -> None:
        # If the folder was deleted, the writing thread would fail and print a traceback.
        if not self._folder.is_dir():
            self._open(row["epoch"])
        with explained(self._folder):
            for name, value in row.items():
                if isinstance(value, float) and math.isfinite(value):
                    self._writer.add_scalar(name.replace("_", "/", 1), value, row["epoch"])
            self._writer.flush()

    def close(self) -> None:
        if not self._folder.is_dir():
            return
        with explained(self._folder):
            self._writer.close()


_BAR_FIGURES = {"val_auc": "AUC", "val_mca": "MCA"}
_SHOWN = {"loss", "val_auc", "val_mca", "pseudo_accuracy", "pseudo_auc"}


def choose_reporter(quiet: bool) -> Reporter:
    """Bars on a terminal; plain lines elsewhere or with `quiet`."""
    return LogReporter() if quiet or not sys.stderr.isatty() else BarReporter()


def format_duration(seconds: float) -> str:
    """A duration in its two largest units.

    >>> format_duration(80), format_duration(7), format_duration(5400)
    ('1 min 20 s', '7 s', '1 h 30 min')
    """
    minutes, seconds = divmod(max(1, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
