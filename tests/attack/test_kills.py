"""Real processes killed at any moment: what resumes ends with the same predictions, byte for byte."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from csda import runs
from csda.runs import Run
from tiny import arguments, train_tiny

# A process that has imported everything once and is forked for each training.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["csda.training", "csda.data.folder", "torch._dynamo", "torch.utils.tensorboard"])

SEED = 22

WRITES = (
    "config.toml",
    "split.csv",
    "truth.csv",
    "manifest.json",
    "environment.json",
    "00001.npz",
    "metrics.jsonl",
    "model.safetensors",
    "checkpoint.pt",
    "00002.npz",
    "metrics.jsonl",
    "checkpoint.pt",
    "00003.npz",
    "checkpoint.pt",
    "history.npz",
    "predictions.csv",
    "pseudo_labels.csv",
    "manifest.json",
    "result.json",
)
"""Every kind of write in the order of a run."""


def _train(images: Path, out: Path, settings: dict[str, Any], killed_at: str | None = None) -> None:
    write = runs.write_whole

    def write_half(path: Path, content: str | bytes) -> Path:
        if path.name == killed_at:
            data = content.encode() if isinstance(content, str) else content
            path.with_name(f".{path.name}.writing").write_bytes(data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return write(path, content)

    runs.write_whole = write_half
    train_tiny(images, out, resume=True, **settings)


def _start(*arguments: Any) -> multiprocessing.process.BaseProcess:
    process = PROCESSES.Process(target=_train, args=arguments)
    process.start()
    return process


def test_killed_in_the_middle_of_every_write(tiny_images: Path, tiny_run: Run, tmp_path: Path) -> None:
    out = tmp_path / "run"
    for name in WRITES:
        process = _start(tiny_images, out, {"tensorboard": True}, name)
        process.join(60)
        assert process.exitcode == -signal.SIGKILL, f"{name} was never written"
        assert not (out / "result.json").exists()
    process = _start(tiny_images, out, {"tensorboard": True})
    process.join(60)
    assert process.exitcode == 0
    for name in ("predictions.csv", "pseudo_labels.csv", "split.csv", "truth.csv", "config.toml", "model.safetensors"):
        assert (out / name).read_bytes() == (tiny_run.folder / name).read_bytes(), name
    assert not list(out.rglob(".*.writing"))
    finished = Run(out)
    assert [row["epoch"] for row in finished.metrics] == [1, 2, 3]
    for row, other in zip(finished.metrics, tiny_run.metrics, strict=True):
        assert row | {"seconds": 0} == other | {"seconds": 0}
    assert finished.history.keys() == tiny_run.history.keys()


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
    process.join(60)
    duration = time.monotonic() - started
    moments = random.Random(SEED)
    kills = 0
    while not (out / "result.json").exists():
        process = _start(tiny_images, out, settings)
        # After six attempts it may end, so that a slow machine does too.
        process.join(60 if kills >= 6 else moments.uniform(0, duration))
        if process.exitcode is None:
            process.kill()
            kills += 1
            process.join()
        else:
            assert process.exitcode == 0
    for name in ("predictions.csv", "pseudo_labels.csv", "model.safetensors"):
        assert (out / name).read_bytes() == (whole / name).read_bytes(), f"{kills} kills"


def _command(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "csda", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_ctrl_c_leaves_a_run_that_resumes(tiny_images: Path, tmp_path: Path) -> None:
    out, settings = tmp_path / "run", {"epochs": 12, "tensorboard": "false"}
    process = _command(*arguments(tiny_images, out, settings))
    _wait_for(out / "checkpoint.pt", process)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert "No GPU: preset quick, 12 epochs of 4 steps on 32×32 images, about" in output
    assert process.returncode == 130
    assert errors.startswith("\ncsda: interrupted; a training or a table of predictions goes on with --resume")
    assert errors.count("\n") == 2
    assert not (out / "result.json").exists()
    written = len(Run(out).metrics)

    process = _command("train", "--out", str(out), "--resume")
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert output.count("epoch ") in (12 - written, 13 - written)
    assert (out / "report.html").is_file()
    whole = train_tiny(tiny_images, tmp_path / "whole", **settings)
    assert (out / "predictions.csv").read_bytes() == (whole.folder / "predictions.csv").read_bytes()
