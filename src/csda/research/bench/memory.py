"""`csda bench memory`: peak memory of short trainings on the CPU."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from csda.errors import ConfigError
from csda.presets import PRESETS
from csda.research.bench.timing import describe_machine, figure
from csda.runs import Run

SHORT = (
    "labels=50%",
    "epochs=2",
    "warm_up_epochs=1",
    "steps_per_epoch=1",
    "threads=1",
    "device=cpu",
    "thumbnails=false",
)
"""Settings of the trainings. The first epoch trains on labels alone, the second on unlabeled images, too."""

BYTES = 1 if sys.platform == "darwin" else 1024
"""The unit in which the system counts the memory of a process."""

MEASURE = """
import resource, subprocess, sys
code = subprocess.run(sys.argv[1:], stdout=sys.stderr).returncode
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(code)
"""
"""A small program between this process and the measured one, whose peak would otherwise include this one's memory."""


def bench_memory(data: Path | None, presets: Sequence[str], rounds: int) -> Iterator[dict[str, Any]]:
    """Peak memory of a training with each preset, in a process of its own; yields the figures after each preset.

    The method is that of the preset. Without `data` the images are drawn.
    """
    if unknown := [preset for preset in presets if preset not in PRESETS]:
        raise ConfigError(f"preset = {unknown[0]!r} is unknown; choose among {', '.join(PRESETS)}")
    figures: dict[str, Any] = {**describe_machine(torch.device("cpu")), "peak_megabytes": {}}
    for preset in presets:
        with tempfile.TemporaryDirectory() as folder:
            peaks = [_peak(data, preset, Path(folder) / str(count)) / 1e6 for count in range(rounds)]
            run = Run(Path(folder) / "0")
            figures["images"] = len(run.split)
            figures["peak_megabytes"][preset] = {"method": run.settings.method, **figure(peaks)}
        yield figures


def _peak(data: Path | None, preset: str, out: Path) -> int:
    """The largest memory of a training in bytes, as the system counts it."""
    settings = (word for setting in SHORT for word in ("--set", setting))
    command = [sys.executable, "-m", "csda", "train", *([] if data is None else [str(data)])]
    command += ["--preset", preset, "--out", str(out), "--quiet", *settings]
    try:
        return peak_memory(command)
    except subprocess.CalledProcessError as error:
        last = error.stderr.strip().rpartition("\n")[2]
        raise ConfigError(f"the training with preset {preset} failed: {last}") from None


def peak_memory(command: Sequence[str]) -> int:
    """The largest memory of a command in bytes, as the system counts it."""
    measured = [sys.executable, "-S", "-c", MEASURE, *command]
    done = subprocess.run(measured, capture_output=True, text=True, errors="replace", check=True)
    return int(done.stdout) * BYTES
