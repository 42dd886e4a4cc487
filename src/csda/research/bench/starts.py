"""Whole trainings: start-up time, and the speed-up of eight at once over one after the other."""

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

    Compiled kernels, pixels and the files of Python are cached by a first start that does not count. Where `data` is
    all labeled and no number of labels was chosen, a tenth of it keeps them.
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
        raise RunError("a training ended before its first step; its own message stands above")
    return seconds


def measure_seeds(method: str, chosen: Mapping[str, Any]) -> dict[str, float]:
    """How many times faster eight seeds are side by side than one after the other.

    Each trains an epoch and is evaluated, in a thread and, on a GPU, a stream of its own, as a launched grid does it.
    """
    trainers = [open_trainer(method, {**chosen, "seed": seed}) for seed in range(SEEDS)]
    for trainer in trainers:
        _train_epoch(trainer)

    def train(threads: int) -> None:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(_train_epoch, trainers))

    return figure([time_once(lambda: train(1)) / time_once(lambda: train(SEEDS)) for _ in range(REPEATS)])


def _train_epoch(trainer: Trainer) -> None:
    """An epoch, and its evaluation, which waits for the device."""
    gpu = trainer.device.type == "cuda"
    with torch.cuda.stream(torch.cuda.Stream(trainer.device)) if gpu else nullcontext():
        trainer.begin_epoch(1)
        for inputs in trainer.sample(1):
            trainer.engine.run(update, trainer, trainer.step, *inputs)
        with trainer.engine.arithmetic():
            trainer.evaluate(guesses=METHODS[trainer.config.method].uses_unlabeled)
