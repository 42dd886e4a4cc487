"""All methods by name. Several names may be one class with different settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from csda.config import Settings
from csda.errors import ConfigError
from csda.methods.base import Method, Task
from csda.methods.baseline import Baseline
from csda.methods.bis import BiS, BiSSettings
from csda.methods.fixmatch import FixMatch, FixMatchSettings
from csda.methods.glm import GLM, GLMSettings
from csda.methods.linear_probe import LinearProbe, LinearProbeSettings
from csda.methods.lsse import LSSE, LSSESettings
from csda.methods.mixing import MixingSettings
from csda.methods.mixup import Mixup
from csda.methods.neighbor_matching import NeighborMatching, NeighborMatchingSettings
from csda.methods.self_training import SelfTraining, SelfTrainingSettings


@dataclass(frozen=True, slots=True)
class Entry:
    """A method of the command line; `defaults` are the settings that its name fixes."""

    build: Callable[[Task, Any], Method]
    settings: type[Settings]
    summary: str
    paper: str
    defaults: dict[str, Any] = field(default_factory=dict)
    uses_unlabeled: bool = True
    uses_truth: bool = False
    """Whether it trains with the true labels of the unlabeled part, as an upper bound."""
    multi_label: bool = True
    """Whether it supports several labels per image."""
    on_features: bool = True
    """Whether it can learn from features instead of images."""
    steps: bool = True
    """Whether it is trained in steps; otherwise it is a head on frozen features that is fitted directly."""


_PLAIN = {"align": "none", "queue": "none", "teacher": "none"}
"""Settings without CSDA: the student predicts pseudo-labels for the current batch and learns from them unchanged."""

METHODS: dict[str, Entry] = {
    "baseline": Entry(Baseline, Settings, "the labels alone", "–", uses_unlabeled=False),
    "upper-bound": Entry(Baseline, Settings, "all labels, for comparison", "–", uses_unlabeled=False, uses_truth=True),
    "mixup": Entry(Mixup, MixingSettings, "the labels alone, mixed", "Verma et al. 2019", uses_unlabeled=False),
    "linear-probe": Entry(
        LinearProbe,
        LinearProbeSettings,
        "logistic regression on frozen features",
        "–",
        {
            "backbone": "efficientnet_lite0",
            "pretrained": True,
            "frozen": True,
            "feature_stages": 3,
            "probe_share": 0.0,
            "choose": "last",
            "epochs": 1,
            "warm_up_epochs": 1,
            "steps_per_epoch": 1,
        },
        uses_unlabeled=False,
        steps=False,
    ),
    "self-train": Entry(
        SelfTraining,
        SelfTrainingSettings,
        "soft labels from the model itself",
        "Grandvalet & Bengio 2004",
        {**_PLAIN, "soft": True, "weight": 1.0, "weight_ramp": True},
    ),
    "fixmatch": Entry(
        FixMatch,
        FixMatchSettings,
        "confident labels for strong views",
        "Sohn et al. 2020",
        {**_PLAIN, "soft": False, "weight": 1.0, "weight_ramp": False, "passes": "one"},
        multi_label=False,
    ),
    "glm": Entry(
        GLM,
        GLMSettings,
        "samples mixed, at hidden layers too",
        "Gyawali et al. 2020",
        {**_PLAIN, "soft": True, "weight": 10.0, "weight_ramp": True, "labeled_from": "teacher"},
    ),
    "nm": Entry(
        NeighborMatching,
        NeighborMatchingSettings,
        "labels from feature neighbours",
        "Wang et al. 2021",
        {
            "align": "none",
            "queue": "none",
            "soft": True,
            "weight": 1.0,
            "weight_ramp": True,
            "passes": "two",
            "teacher_update": "step",
            "teacher_momentum": 0.999,
        },
    ),
    "bis": Entry(
        BiS,
        BiSSettings,
        "FixMatch, more and more class-balanced",
        "He et al. 2021",
        {**_PLAIN, "soft": False, "weight": 1.0, "weight_ramp": False, "passes": "one"},
    ),
    "lsse": Entry(
        LSSE,
        LSSESettings,
        "an ensemble over a random latent space",
        "Gyawali et al. 2019",
        {"lr": 1e-4, "weight": 30.0},
        on_features=False,
    ),
    "da": Entry(
        SelfTraining,
        SelfTrainingSettings,
        "class-agnostic alignment, no queue",
        "Berthelot et al. 2020",
        {"align": "da", "queue": "none"},
    ),
    "vcq": Entry(
        SelfTraining,
        SelfTrainingSettings,
        "Variable Condition Queue, no alignment",
        "Huang et al. 2023",
        {"align": "none"},
    ),
    "csda": Entry(
        SelfTraining,
        SelfTrainingSettings,
        "class-specific alignment and the queue",
        "Huang et al. 2023",
    ),
    "csda-folds": Entry(
        SelfTraining,
        SelfTrainingSettings,
        "class-specific alignment, out of fold",
        "this project",
        {
            "queue": "none",
            "teacher": "none",
            "labeled_from": "folds",
            "condition": "truth",
            "against": "labeled",
            "shrinkage": 3.0,
        },
    ),
}


def build_method(name: str, task: Task, settings: Mapping[str, Any]) -> Method:
    """The method of a name for a task, with its own settings by name."""
    entry = METHODS[name]
    if task.multi_label and not entry.multi_label:
        several = ", ".join(other for other, its in METHODS.items() if its.multi_label and its.uses_unlabeled)
        raise ConfigError(f"method = {name!r} needs one class per image, but this set has several; choose {several}")
    return entry.build(task, entry.settings(**settings))
