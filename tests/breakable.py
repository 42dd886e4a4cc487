"""Runs that break in chosen ways, cheap enough to be sent to many processes, and a real one that is killed midway."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from csda.errors import DataError
from csda.progress import Reporter


@dataclass(frozen=True)
class Breakable:
    """Stands in for a run: breaks in the first so many of its attempts, after all `others` have begun."""

    folder: Path
    breaks: int = 0
    way: str = "kill"
    others: tuple[str, ...] = ()

    def train(self) -> Path:
        self.folder.mkdir(exist_ok=True)
        with (self.folder / "attempts").open("a") as file:
            file.write(f"{os.getpid()}\n")
        while not all(_is_written(self.folder.parent / name / "attempts") for name in self.others):
            time.sleep(0.005)
        if len(self.attempts) > self.breaks:
            self._log("begin")
            self._log("end")
            return self.folder
        if self.way == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.way == "leave":
            os._exit(3)
        if self.way == "refuse":
            raise DataError("no such images")
        if self.way == "raise":
            raise ValueError("the first line\nthe second")
        time.sleep(600)
        raise AssertionError

    @property
    def attempts(self) -> list[str]:
        return (self.folder / "attempts").read_text().split()

    def _log(self, word: str) -> None:
        with (self.folder.parent / "log").open("a") as file:
            file.write(f"{word}\n")
        time.sleep(0.05)


def _is_written(file: Path) -> bool:
    """Not merely opened: whoever is killed between the two would count one attempt too few."""
    return file.exists() and file.stat().st_size > 0


class KillingReporter(Reporter):
    """Writes down the epochs that were trained, and kills the process after one of them, once."""

    def __init__(self, folder: Path, epoch: int) -> None:
        self.file, self.last = folder.with_name(f"{folder.name}.epochs"), epoch

    def epoch(self, row: Mapping[str, Any]) -> None:
        with self.file.open("a") as file:
            file.write(f"{row['epoch']}\n")
        if row["epoch"] == self.last and self.file.read_text().split().count(str(self.last)) == 1:
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class TinyCell:
    """A real training of tiny images; killed after epoch `killed_after`, where there is such an epoch."""

    images: Path
    folder: Path
    method: str = "csda"
    seed: int = 0
    killed_after: int = 0

    def train(self) -> Any:
        from tiny import train_tiny

        reporter = KillingReporter(self.folder, self.killed_after)
        return train_tiny(self.images, self.folder, method=self.method, seed=self.seed, resume=True, reporter=reporter)
