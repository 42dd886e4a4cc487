"""Real processes killed at any moment: what resumes ends with the same predictions, byte for byte."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from commands import Command
from csda.models.backbones import BACKBONES
from csda.runs import Run
from tiny import arguments, small, train_tiny

# A process that has imported everything once and is forked for each training.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["csda.training", "csda.data.folder", "torch._dynamo", "torch.utils.tensorboard"])

SEED = 22


def _train(images: Path, out: Path, settings: dict[str, Any]) -> None:
    BACKBONES["small"] = small
    os.environ["CSDA_CACHE"] = str(out.parent / "cache")  # the server of forks has that of the test which started it
    train_tiny(images, out, resume=True, backbone="small", **settings)


def _start(*arguments: Any) -> multiprocessing.process.BaseProcess:
    process = PROCESSES.Process(target=_train, args=arguments)
    process.start()
    return process


@pytest.mark.parametrize(
    "settings",
    [
        {"epochs": 6},
        {"epochs": 6, "refresh": "epoch", "order": "train_first", "teacher_update": "epoch", "rebuild": True},
        {"epochs": 6, "method": "baseline", "checkpoint_seconds": 0.2},
    ],
    ids=["csda", "refresh by epoch", "baseline, few checkpoints"],
)
def test_killed_at_random_moments(settings: dict[str, Any], tiny_images: Path, tmp_path: Path) -> None:
    whole, out = tmp_path / "whole", tmp_path / "killed"
    started = time.monotonic()
    process = _start(tiny_images, whole, settings)
    process.join()
    duration = time.monotonic() - started
    moments = random.Random(SEED)
    kills = 0
    while not (out / "result.json").exists():
        process = _start(tiny_images, out, settings)
        # After four kills it may end, so that a slow machine does too.
        process.join(240 if kills >= 4 else moments.uniform(0, duration))
        if process.exitcode is None:
            process.kill()
            kills += 1
            process.join()
        else:
            assert process.exitcode == 0
    for name in ("predictions.csv", "pseudo_labels.csv", "model.safetensors"):
        assert (out / name).read_bytes() == (whole / name).read_bytes(), f"{kills} kills"


@contextmanager
def _command(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "csda", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 200
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_ctrl_c_leaves_a_run_that_resumes(csda: Command, tiny_images: Path, tmp_path: Path) -> None:
    out, settings = tmp_path / "run", {"epochs": 6, "tensorboard": "false"}
    with _command(*arguments(tiny_images, out, settings)) as process:
        _wait_for(out / "checkpoint.pt", process)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate()
    assert "No GPU: preset quick, 6 epochs of 4 steps on 32×32 images, about" in output
    assert process.returncode == 130
    assert errors.startswith("\ncsda: interrupted; continue a training or a table of predictions with --resume")
    assert errors.count("\n") == 2
    assert not (out / "result.json").exists()
    written = len(Run(out).metrics)

    code, output, errors = csda("train", "--out", out, "--resume")
    assert (code, errors) == (0, "")
    assert output.count("epoch ") in (6 - written, 7 - written)
    assert (out / "report.html").is_file()
    whole = train_tiny(tiny_images, tmp_path / "whole", **settings)
    assert (out / "predictions.csv").read_bytes() == (whole.folder / "predictions.csv").read_bytes()
