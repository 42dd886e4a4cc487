"""How things are timed: in turn, warmed up, on a GPU by its own clock."""

from __future__ import annotations

import json
import platform
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import csda
from csda.data.store import available_cores
from csda.engine import name_device
from csda.runs import source_commit, write_whole

Action = Callable[[], object]

WARM_UP = 6
"""Calls before the first that counts: kernels are chosen and graphs captured in them."""

REPEATS_ON_GPU = 10
"""Calls within one measurement on a GPU, so that the host is ahead of the device as it is in a training."""

LEAST_ROUNDS = 3


class Deadline:
    """A time after which nothing new is begun."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self._end


class Times:
    """Milliseconds of each action, one a round."""

    def __init__(self, milliseconds: dict[str, list[float]]) -> None:
        self.milliseconds = milliseconds

    def figure(self, name: str) -> dict[str, float]:
        return figure(self.milliseconds[name])

    def median(self, name: str) -> float:
        return median(self.milliseconds[name])

    def ratio(self, above: str, *below: str) -> float:
        return median(self.ratios(above, *below))

    def ratios(self, above: str, *below: str) -> list[float]:
        """One action's time over that of others together, in each round."""
        rounds = zip(self.milliseconds[above], *(self.milliseconds[name] for name in below), strict=True)
        return [whole / sum(parts) for whole, *parts in rounds]


def figure(values: list[float]) -> dict[str, float]:
    """A figure with its spread, in the form in which all are kept."""
    return {"mean": fmean(values), "std": stdev(values) if len(values) > 1 else 0.0, "n": len(values)}


def time_in_turn(
    actions: Mapping[str, Action],
    device: torch.device,
    rounds: int,
    deadline: Deadline | None = None,
    *,
    prepared: int = 0,
) -> Times:
    """Time actions one after the other, `rounds` times, so that what disturbs one disturbs all.

    After the deadline no more than the least number of rounds is made. What so many calls need may have been `prepared`
    while others had their turn; these calls come first and do not count.
    """
    for action in actions.values():
        for _ in range(WARM_UP):
            action()
    times = Times({name: [] for name in actions})
    for done in range(rounds):
        if done >= LEAST_ROUNDS and deadline is not None and deadline.passed:
            break
        for name, action in actions.items():
            for _ in range(prepared):
                action()
            times.milliseconds[name].append(_milliseconds(action, device))
    return times


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
    """Seconds on the clock that an action takes, the work of a GPU included where one is named."""
    begun = time.perf_counter()
    action()
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun


def as_graph(action: Action, device: torch.device, generator: torch.Generator) -> Action:
    """The action as a replay of its CUDA graph, its draws from `generator`; without a GPU the action itself."""
    if device.type != "cuda":
        return action
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            action()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph, stream=stream):
        action()

    def replay(_reads: Action = action) -> None:  # a graph does not hold what it reads
        graph.replay()

    return replay


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Where figures were measured, and with what."""
    return {
        # Without the places of one machine.
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
    for key, value in figures.items():
        named = value.items() if isinstance(value, Mapping) and not _is_figure(value) else [("", value)]
        for name, each in named:
            table.add_row(": ".join(filter(None, (key.replace("_", " "), name))), _text(each))
    Console().print(table)


def _is_figure(value: Mapping[str, Any]) -> bool:
    return value.keys() == {"mean", "std", "n"}


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        if _is_figure(value):
            return f"{value['mean']:.4g} ± {value['std']:.2g} (n = {value['n']})"
        return ", ".join(f"{name} {_text(each)}" for name, each in value.items())
    if isinstance(value, float):
        return f"{value:.4g}"
    return ", ".join(map(_text, value)) if isinstance(value, list) else str(value)
