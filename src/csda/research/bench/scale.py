"""`csda bench scale`: what the step of `csda` grows with."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from csda.engine import backends, choose_device
from csda.fast.streaming import AHEAD
from csda.research.bench.noise import CLASSES, UNLABELED, open_trainer, refuse_fixed, stepper
from csda.research.bench.timing import Deadline, describe_machine, time_in_turn
from csda.training import configure

UNLABELED_COUNTS = (10_000, 100_000, 1_000_000)
CLASS_COUNTS = (2, 7, 100, 1_000)
CAPACITIES = (128, 512, 2_048, 8_192)
CAPACITIES_ON_CPU = (32, 128, 512)


def bench_scale(
    chosen: Mapping[str, Any],
    *,
    unlabeled: Sequence[int] | None = None,
    classes: Sequence[int] | None = None,
    capacities: Sequence[int] | None = None,
    rounds: int = 5,
    seconds: float = 120.0,
) -> dict[str, Any]:
    """Step time against the number of unlabeled images, of classes, and the length of the queue, one at a time.

    Each is timed in turn with the preset's step on few images, over which it is given. Many unlabeled images stay in a
    file, all others are on the device. What the deadline of so many `seconds` leaves no time for is named under
    `left_out`.
    """
    refuse_fixed(chosen)
    config = configure(chosen)
    with backends(choose_device(config.device), config.precision):
        return _measure(chosen, unlabeled, classes, capacities, rounds, Deadline(seconds))


def _measure(
    chosen: Mapping[str, Any],
    unlabeled: Sequence[int] | None,
    classes: Sequence[int] | None,
    capacities: Sequence[int] | None,
    rounds: int,
    deadline: Deadline,
) -> dict[str, Any]:
    reference = open_trainer("csda", chosen)
    device, capacity = reference.device, reference.config.method_settings["capacity"]
    capacities = capacities or (CAPACITIES if device.type == "cuda" else CAPACITIES_ON_CPU)
    cases: list[tuple[str, int, int, int, int]] = [
        *(("unlabeled", count, count, CLASSES, capacity) for count in unlabeled or UNLABELED_COUNTS),
        *(("classes", count, UNLABELED, count, capacity) for count in classes or CLASS_COUNTS),
        *(("capacity", count, UNLABELED, CLASSES, count) for count in capacities),
    ]
    figures: dict[str, Any] = {
        **describe_machine(device),
        "reference": {"unlabeled": UNLABELED, "classes": CLASSES, "capacity": capacity},
    }
    left_out = []
    for what, value, images, kinds, slots in cases:
        if deadline.passed:
            left_out.append(f"{what} {value}")
            continue
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "pixels" if what == "unlabeled" else None
            case = open_trainer("csda", {**chosen, "capacity": slots}, unlabeled=images, classes=kinds, file=file)
            actions = {"reference": stepper(reference), "step": stepper(case)}
            times = time_in_turn(actions, device, rounds, deadline, prepared=0 if file is None else AHEAD)
            del case, actions
        figures.setdefault(f"{what}_step_ms", {})[str(value)] = times.figure("step")
        figures.setdefault(f"{what}_over_reference", {})[str(value)] = times.ratio("step", "reference")
    return figures | {"left_out": left_out}
