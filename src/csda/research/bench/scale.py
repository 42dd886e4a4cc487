"""`csda bench scale`: time a `csda` step for more data, classes and queue slots."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from csda.engine import backends, choose_device
from csda.fast.streaming import AHEAD
from csda.presets import configure
from csda.research.bench.noise import CLASSES, UNLABELED, open_trainer, stepper
from csda.research.bench.timing import describe_machine, figure, ratios, time_in_turn

UNLABELED_COUNTS = (10_000, 100_000, 1_000_000)
CLASS_COUNTS = (2, 7, 100, 1_000)
QUEUES = (0.25, 1, 4, 16)
"""Queue capacities, relative to that of the preset."""


def bench_scale(chosen: Mapping[str, Any], *, rounds: int = 5, seconds: float = 120.0) -> dict[str, Any]:
    """Time a step for several numbers of unlabeled images, classes, and queue slots, one changed at a time.

    Each is timed in turn with the preset's step on few images, and given as a ratio to it. Many unlabeled images stay
    in a file, all others are on the device. Measurements that have not begun after `seconds` are listed under
    `left_out`.
    """
    end = time.monotonic() + seconds
    config = configure(chosen)
    with backends(choose_device(config.device), config.precision):
        reference = open_trainer("csda", chosen)
        capacity = reference.config.method_settings["capacity"]
        usual = {"unlabeled": UNLABELED, "classes": CLASSES, "capacity": capacity}
        values = {"unlabeled": UNLABELED_COUNTS, "classes": CLASS_COUNTS}
        values["capacity"] = tuple(round(capacity * times) for times in QUEUES)
        figures: dict[str, Any] = {**describe_machine(reference.device), "reference": usual, "left_out": []}
        for what, value in [(name, value) for name in values for value in values[name]]:
            if time.monotonic() >= end:
                figures["left_out"].append(f"{what} {value}")
                continue
            sizes = usual | {what: value}
            settings = {**chosen, "capacity": sizes.pop("capacity")}
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "pixels" if what == "unlabeled" else None
                case = open_trainer("csda", settings, **sizes, file=file)
                actions = {"reference": stepper(reference), "step": stepper(case)}
                times = time_in_turn(actions, case.device, rounds, prepared=0 if file is None else AHEAD)
                del case, actions
            figures.setdefault(f"{what}_step_ms", {})[str(value)] = figure(times["step"])
            over = figures.setdefault(f"{what}_over_reference", {})
            over[str(value)] = median(ratios(times, "step", "reference"))
        return figures
