"""Time whole trainings: the start, and eight in parallel compared with eight in turn."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from csda.errors import RunError
from csda.methods import METHODS
from csda.research.bench.noise import open_trainer
from csda.research.bench.timing import figure, time_once
from csda.trainer import Trainer
from csda.training import update

SEEDS = 8
REPEATS = 3

_FIRST_STEP = """
import json, os, sys
import torch
from csda.progress import Reporter
from csda.training import train

class FirstStep(Reporter):
    def step(self):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        print("done", flush=True)
        os._exit(0)

train(settings=json.loads(sys.argv[1]), out=sys.argv[2], reporter=FirstStep())
"""


def measure_start(chosen: Mapping[str, Any], data: Path | None) -> dict[str, float]:
    """Seconds from the start of a process to the end of its first step of `csda` on `data`, or on the drawn set.

    A first start, which is not timed, fills the caches of kernels, pixels and Python files. If all of `data` is labeled
    and no number of labels is chosen, a tenth keeps its labels.
    """
    chosen = dict(chosen) if data is None else {"labels": "10%", **chosen, "data": str(data)}
    _start_once(chosen)
    return figure([_start_once(chosen) for _ in range(REPEATS)])


def _start_once(chosen: Mapping[str, Any]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", _FIRST_STEP, json.dumps(chosen), str(Path(folder) / "run")]
        begun = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            answer = process.stdout.readline()
            seconds = time.perf_counter() - begun
    if not answer:
        raise RunError("a training ended before its first step; see its message above")
    return seconds


def measure_seeds(method: str, chosen: Mapping[str, Any]) -> dict[str, float]:
    """The speed-up of eight seeds in parallel over eight in turn.

    Each trains and evaluates an epoch in its own thread and, on a GPU, stream, as in a grid.
    """
    trainers = [open_trainer(method, {**chosen, "seed": seed}) for seed in range(SEEDS)]
    for trainer in trainers:
        _train_epoch(trainer)

    def train(threads: int) -> None:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(_train_epoch, trainers))

    return figure([time_once(lambda: train(1)) / time_once(lambda: train(SEEDS)) for _ in range(REPEATS)])


def _train_epoch(trainer: Trainer) -> None:
    """Train and evaluate an epoch; the evaluation waits for the device."""
    gpu = trainer.device.type == "cuda"
    with torch.cuda.stream(torch.cuda.Stream(trainer.device)) if gpu else nullcontext():
        trainer.begin_epoch(1)
        for inputs in trainer.sample(1):
            trainer.engine.run(update, trainer, trainer.step, *inputs)
        with trainer.engine.arithmetic():
            trainer.evaluate(guesses=METHODS[trainer.config.method].uses_unlabeled)
