"""Time functions in turn, after warm-up, on a GPU with CUDA events."""

from __future__ import annotations

import json
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import csda
from csda.data.store import available_cores
from csda.engine import name_device
from csda.environment import source_commit
from csda.files import write_whole

Action = Callable[[], object]

WARM_UP = 6
"""Number of warm-up calls, in which kernels are chosen and graphs captured."""

REPEATS_ON_GPU = 10
"""Calls in one measurement on a GPU, so that the host is ahead of the device as in a training."""


def figure(values: list[float]) -> dict[str, float]:
    """A figure as mean, standard deviation and number of measurements."""
    return {"mean": fmean(values), "std": stdev(values) if len(values) > 1 else 0.0, "n": len(values)}


def time_in_turn(
    actions: Mapping[str, Action], device: torch.device, rounds: int, *, prepared: int = 0
) -> dict[str, list[float]]:
    """Milliseconds of actions, timed in turn `rounds` times, so that disturbances affect all.

    The first `prepared` calls are not timed, because their inputs may have been prepared in advance.
    """
    for action in actions.values():
        for _ in range(WARM_UP):
            action()
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            for _ in range(prepared):
                action()
            times[name].append(_milliseconds(action, device))
    return times


def ratios(times: Mapping[str, list[float]], above: str, below: str) -> list[float]:
    """The ratio of two actions' times in each round."""
    return [whole / part for whole, part in zip(times[above], times[below], strict=True)]


def _milliseconds(action: Action, device: torch.device) -> float:
    if device.type != "cuda":
        return 1e3 * time_once(action)
    stream = torch.cuda.current_stream(device)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record(stream)
    for _ in range(REPEATS_ON_GPU):
        action()
    end.record(stream)
    end.synchronize()
    return float(begin.elapsed_time(end)) / REPEATS_ON_GPU


def time_once(action: Action, device: torch.device | None = None) -> float:
    """Wall-clock seconds of an action, including work on the GPU `device`."""
    begun = time.perf_counter()
    action()
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun


def describe_machine(device: torch.device) -> dict[str, Any]:
    """The machine and versions of a measurement."""
    return {
        # Without paths of this machine.
        "command": shlex.join(["csda", *(Path(word).name if word.startswith("/") else word for word in sys.argv[1:])]),
        "commit": source_commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {
            "device": name_device(device),
            "cores": available_cores(),
            "threads": torch.get_num_threads(),
            "platform": platform.platform(),
        },
        "versions": {
            "csda": csda.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
        },
    }


def keep(figures: Mapping[str, Any], out: Path) -> None:
    """Write figures as JSON."""
    write_whole(out, json.dumps(figures, indent=1) + "\n")


def show(figures: Mapping[str, Any]) -> None:
    """Print figures as a table."""
    table = Table("what", "figure")
    for name, text in _rows("", figures):
        table.add_row(name, text)
    Console().print(table)


def _rows(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """A figure, or each of several, by name and as text."""
    if not isinstance(value, Mapping):
        yield name, f"{value:.4g}" if isinstance(value, float) else str(value)
    elif value.keys() == {"mean", "std", "n"}:
        yield name, f"{value['mean']:.4g} ± {value['std']:.2g} (n = {value['n']})"
    else:
        for key, each in value.items():
            yield from _rows(f"{name}: {key}" if name else key.replace("_", " "), each)
