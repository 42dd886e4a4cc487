"""Every method by name. Several names may be one class with other settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from csda.config import Settings
from csda.methods.base import Method, Task
from csda.methods.baseline import Baseline
from csda.methods.self_training import SelfTraining, SelfTrainingSettings


@dataclass(frozen=True, slots=True)
class Entry:
    """A method as the command line knows it; `defaults` are the settings that make the name what it is."""

    build: Callable[[Task, Any], Method]
    settings: type[Settings]
    summary: str
    paper: str
    defaults: dict[str, Any] = field(default_factory=dict)
    uses_unlabeled: bool = True
    uses_truth: bool = False
    """Trains with the labels of the unlabeled part: an upper bound, not a method."""


METHODS: dict[str, Entry] = {
    "baseline": Entry(Baseline, Settings, "the labels alone", "–", uses_unlabeled=False),
    "upper-bound": Entry(
        Baseline, Settings, "the labels of all images, for comparison", "–", uses_unlabeled=False, uses_truth=True
    ),
    "vcq": Entry(
        SelfTraining,
        SelfTrainingSettings,
        "self-training with the Variable Condition Queue, no alignment",
        "Huang et al. 2023",
        {"align": "none"},
    ),
    "csda": Entry(
        SelfTraining,
        SelfTrainingSettings,
        "class-specific distribution alignment with the Variable Condition Queue",
        "Huang et al. 2023",
    ),
}
