"""Presets, and the configuration that a run on this machine gets: preset, method and chosen settings together."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from csda.config import RunConfig, Settings, explain_findings
from csda.data import recognise
from csda.data.stratification import Budget
from csda.errors import ConfigError
from csda.methods import METHODS, Entry
from csda.models.backbones import VECTORS
from csda.models.feature_encoder import Views
from csda.models.weights import PUBLISHED, find_weights


@dataclass(frozen=True, slots=True)
class Preset:
    """Named defaults. Other settings have the value that the method's entry fixes, or the default of their class."""

    run: dict[str, Any]
    """Settings that every method has."""
    methods: dict[str, dict[str, Any]]
    """A method's own settings, by the name of the method."""
    method: str = "csda"
    """The method, unless one is given."""


def _alike(methods: Sequence[str], settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The same settings for several methods."""
    return {method: dict(settings) for method in methods}


# What a method's entry in METHODS fixes is not repeated here.
PRESETS: dict[str, Preset] = {
    "paper": Preset(
        run={"epochs": 256},
        methods={
            **_alike(
                ("csda", "vcq", "da", "self-train", "fixmatch", "glm", "bis"),
                {
                    "refresh": "epoch",
                    "order": "train_first",
                    "temperature": "adaptive",
                    "teacher_update": "epoch",
                    "teacher_momentum": 0.95,
                },
            ),
            "nm": {"refresh": "epoch", "order": "train_first", "temperature": "adaptive"},
        },
    ),
    "default": Preset(
        run={},
        methods={
            **_alike(
                ("csda", "vcq", "da", "self-train"),
                {
                    "order": "train_first",
                    "condition": "prediction",
                    "labeled_from": "student",
                    "passes": "two",
                    "teacher_momentum": 0.99,
                },
            ),
            **_alike(
                ("fixmatch", "bis"),
                {
                    "order": "train_first",
                    "condition": "prediction",
                    "labeled_from": "student",
                    "teacher_momentum": 0.99,
                },
            ),
            "glm": {
                "order": "train_first",
                "condition": "prediction",
                "passes": "two",
                "teacher_momentum": 0.99,
            },
            "nm": {"order": "train_first", "condition": "prediction", "labeled_from": "student"},
        },
    ),
    # Fine-tuning of a pretrained network. What helps every method is a setting of the run, so that comparisons are
    # fair.
    "strong": Preset(
        run={
            "backbone": "efficientnet_lite0",
            "pretrained": True,
            "dropout": 0.5,
            "image_size": 160,
            "epochs": 10,
            "steps_per_epoch": 200,
            "warm_up_epochs": 2,
            "batch_size": 64,
            "unlabeled_batch_size": 128,
            "optimizer": "adamw",
            "lr": 5e-4,
            "head_lr": 2.5e-3,
            "weight_decay": 0.1,
            "schedule": "cosine",
            "lr_warm_up": 100,
            "mixup_alpha": 0.4,
            "adjust": True,
            "average": 0.998,
            "choose": "last",
            "time_kernels": False,
        },
        methods={
            **_alike(
                ("csda", "vcq", "da"),
                {"capacity": 128, "condition": "prediction", "passes": "two", "teacher_momentum": 0.99},
            ),
            "self-train": {"passes": "two"},
            "csda-folds": {"passes": "two", "guesses_from": "folds", "fold_network": "body"},
        },
        method="self-train",
    ),
    # A head on features of a frozen network, which takes minutes without a GPU. It starts as logistic regression, and
    # the method trains it from there. For every method the head that predicts is half the linear probe (decision 23).
    "features": Preset(
        run={
            "backbone": "efficientnet_lite0",
            "pretrained": True,
            "frozen": True,
            "feature_stages": 3,
            "probe_share": 0.5,
            "dropout": 0.0,
            "image_size": 160,
            "epochs": 10,
            "steps_per_epoch": 20,
            "warm_up_epochs": 1,
            "batch_size": 128,
            "unlabeled_batch_size": 256,
            "optimizer": "adam",
            "lr": 1e-3,
            "schedule": "cosine",
            "adjust": True,
            "average": 0.98,
            "choose": "last",
        },
        methods={
            **_alike(("csda", "vcq", "da"), {"capacity": 256, "condition": "prediction", "passes": "two"}),
            "self-train": {"passes": "two"},
            "csda-folds": {"passes": "two", "guess_temperature": 0.85},
        },
        # With few labels a head predicts all of them with confidence near 1, so the paper's alignment, which uses these
        # predictions, makes pseudo-labels too confident. Decision 23 has the draws on which the settings were chosen.
        method="self-train",
    ),
    "quick": Preset(
        run={
            "epochs": 30,
            "steps_per_epoch": 40,
            "warm_up_epochs": 8,
            "image_size": 32,
            "batch_size": 64,
            "unlabeled_batch_size": 64,
            "lr": 0.05,
            "flip": True,
        },
        methods={
            **_alike(
                ("csda", "vcq", "da"),
                {
                    "capacity": 128,
                    "condition": "prediction",
                    "gamma": 0.0,
                    "teacher_momentum": 0.99,
                    "soft": False,
                    "weight": 2.0,
                    "weight_ramp": False,
                },
            ),
            **_alike(
                ("self-train", "fixmatch", "glm", "bis"),
                {"capacity": 128, "condition": "prediction", "gamma": 0.0, "teacher_momentum": 0.99},
            ),
            "nm": {"capacity": 128, "condition": "prediction", "gamma": 0.0},
        },
    ),
}


PICTURES: dict[str, dict[str, Any]] = {
    "skin": {"rotation": 180.0, "flip": True, "zoom": 1.2, "color": 0.1, "border": "reflection", "test_flips": True},
    "endoscopy": {
        "rotation": 180.0,
        "flip": True,
        "zoom": 1.2,
        "color": 0.1,
        "border": "reflection",
        "test_flips": True,
    },
    "chest": {"rotation": 10.0, "zoom": 1.1, "color": 0.1, "border": "reflection"},
    "generic": {"rotation": 15.0, "zoom": 1.2, "color": 0.1, "border": "reflection"},
}
"""Augmentation for each kind of picture, for the preset `strong`: changes that keep the class of such an image."""

KINDS = {
    "ham10000": "skin",
    "chexpert": "chest",
    "nih_chestxray14": "chest",
    "kvasir_capsule": "endoscopy",
}
"""The kind of pictures of each source."""

VIEWS: dict[str, Views] = {"skin": "zoomed", "chest": "zoomed"}
"""Views whose frozen features are averaged, for each kind of picture where that helps (decision 26)."""


def configure(chosen: Mapping[str, Any]) -> RunConfig:
    """Make the complete configuration of a run on this machine.

    Unless chosen, the preset is `strong` with a GPU and `features` without one, the precision is bf16 on a GPU, and the
    drawn set keeps 150 labels. With the preset `strong`, the augmentation depends on the kind of pictures, and a CPU
    gets a shorter schedule on smaller images. If the pretrained weights of these presets are not installed and were not
    requested, a GPU starts from random weights and a CPU uses the preset `quick`.
    """
    preset = str(chosen.get("preset", _default_preset(chosen)))
    name = str(chosen.get("method", PRESETS[preset].method if preset in PRESETS else "csda"))
    if name not in METHODS:
        raise ConfigError(f"method = {name!r} is unknown; choose one of {', '.join(METHODS)}")
    entry = METHODS[name]
    if not entry.steps:  # in a grid of runs it may be given a number of labels, which it ignores
        chosen = {key: value for key, value in chosen.items() if key not in ("epochs", "steps_per_epoch")}
    basis: dict[str, Any] = {"preset": preset, "method": name}
    if (
        torch.cuda.is_available()
        and chosen.get("device") != "cpu"
        and torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        basis["precision"] = "bf16"
    if chosen.get("data", "synthetic") == "synthetic":
        basis["labels"] = "150"
    run = PRESETS[preset].run if preset in PRESETS else {}
    frozen = chosen.get("frozen", entry.defaults.get("frozen", run.get("frozen", False)))
    if frozen and not str(chosen.get("backbone", "")).startswith(VECTORS):
        basis["feature_views"] = VIEWS.get(_kind_of_pictures(chosen), "plain")
    if preset == "strong":
        if not frozen:
            basis |= _strong_basis(chosen)
        if (lacks_weights(chosen) or _has_no_weights(chosen)) and "pretrained" not in entry.defaults:
            basis["pretrained"] = False
    config = resolve(basis | dict(chosen), entry.settings, entry.defaults)
    _require_fitting(config, entry, chosen)
    return config


def _require_fitting(config: RunConfig, entry: Entry, chosen: Mapping[str, Any]) -> None:
    """Refuse settings that do not fit each other."""
    for key, budget in (("labels", config.labels), ("val", config.val)):
        try:
            if budget is not None and (key, budget) != ("val", "0"):
                Budget.parse(budget)
        except ConfigError as error:
            raise ConfigError(f"{key} = {budget!r}: {error}") from None
    if config.val == "0" and config.choose == "best":
        raise ConfigError("val = 0 leaves no image to choose the best epoch by; give choose=last, or another val")
    if config.frozen:
        _require_head(config, entry)
    elif alone := [
        name
        for name in ("feature_stages", "feature_views", "probe_share")
        if chosen.get(name, "plain") not in (0, "plain")
    ]:
        raise ConfigError(f"{alone[0]} needs frozen = true: it is of frozen features alone")
    if config.adjust and config.prior_correction != "none":
        raise ConfigError(
            "adjust = true already removes the class frequencies from predictions; leave prior_correction out"
        )
    own = config.method_settings
    observes = any(own.get(part, "none") != "none" for part in ("align", "queue"))
    if config.mixup_alpha and own.get("labeled_from") == "student" and observes:
        raise ConfigError(
            "with mixup_alpha the student has no unmixed labeled image to compute λ^x from; "
            "choose labeled_from=teacher or labeled_from=start"
        )
    if entry.uses_unlabeled and config.warm_up_epochs >= config.epochs:
        raise ConfigError(
            f"warm_up_epochs = {config.warm_up_epochs} on labels alone leave none of epochs = {config.epochs} "
            f"to {config.method}; give fewer of the first, or more of the second"
        )


def _require_head(config: RunConfig, entry: Entry) -> None:
    """Refuse settings that a head on frozen features cannot have."""
    if not config.pretrained and config.weights is None:
        raise ConfigError("frozen = true needs trained weights; give pretrained=true, or weights=FILE")
    if not entry.on_features:
        raise ConfigError(f"method = {config.method!r} needs images, not their features; give frozen=false")
    if config.test_flips:
        raise ConfigError("test_flips mirrors images, but frozen = true has only their features; leave one out")
    if config.test_middle:
        raise ConfigError("test_middle enlarges images, but frozen = true has only features; give feature_views=zoomed")


def _default_preset(chosen: Mapping[str, Any]) -> str:
    """The default preset for images of the user on this machine; drawn images have other defaults."""
    if chosen.get("data", "synthetic") == "synthetic":
        return "default" if torch.cuda.is_available() else "quick"
    if torch.cuda.is_available() and chosen.get("device") != "cpu":
        return "strong"
    entry = METHODS.get(str(chosen.get("method")))
    on_features = entry is None or entry.on_features
    frozen = chosen.get("frozen", True) and chosen.get("pretrained", True) and not _has_no_weights(chosen)
    return "features" if on_features and frozen and not lacks_weights(chosen) else "quick"


def _has_no_weights(chosen: Mapping[str, Any]) -> bool:
    """Whether the chosen network has no published weights and no weights were given."""
    backbone = str(chosen.get("backbone", PRESETS["features"].run["backbone"]))
    return backbone not in PUBLISHED and not backbone.startswith("timm:") and "weights" not in chosen


def lacks_weights(chosen: Mapping[str, Any]) -> bool:
    """Whether the presets' pretrained weights are not installed, and no weights were requested."""
    if chosen.keys() & {"backbone", "pretrained", "weights", "frozen"}:
        return False
    try:
        find_weights(PRESETS["features"].run["backbone"])
    except ConfigError:
        return True
    return False


def remark_on_weights(chosen: Mapping[str, Any], config: RunConfig) -> str | None:
    """What a training does if the preset's pretrained weights are not installed, and how to get them."""
    if not lacks_weights(chosen):
        return None
    if config.preset == "strong":
        instead = "the network begins with random weights"
    elif "preset" not in chosen and config.preset == "quick" and config.data != "synthetic":
        instead = "this trains a small network, the preset quick"
    else:
        return None
    backbone = PRESETS["features"].run["backbone"]
    return f"Pretrained weights are not installed, so {instead}; better: {PUBLISHED[backbone].way}"


def _strong_basis(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the preset `strong` that depend on the source of the images and on the device."""
    pictures = _kind_of_pictures(chosen)
    basis = {"pictures": pictures, **PICTURES[pictures]}
    if chosen.get("device") == "cpu" or not torch.cuda.is_available():
        basis |= {"image_size": 128, "epochs": 12, "steps_per_epoch": 25}
    return basis


def _kind_of_pictures(chosen: Mapping[str, Any]) -> str:
    """The kind of pictures that was chosen, or that of the source of the images."""
    data, source = str(chosen.get("data", "synthetic")), chosen.get("source")
    pictures = chosen.get("pictures") or KINDS.get(
        str(source or recognise(None if data == "synthetic" else Path(data))), "generic"
    )
    if pictures not in PICTURES:
        raise ConfigError(f"pictures = {pictures!r} is unknown; choose one of {', '.join(PICTURES)}")
    return str(pictures)


def resolve(
    chosen: Mapping[str, Any], method_settings: type[Settings], method_defaults: Mapping[str, Any]
) -> RunConfig:
    """Combine the preset, the defaults of the method's entry, and the chosen settings, and validate them together.

    If only `epochs` is chosen, `warm_up_epochs` of the preset keeps its share of them. `method_settings` is the class
    of the method's own settings. `method_defaults` are the settings that its entry in METHODS fixes: `da` is
    self-training with `align = "da"`, LSSE has its own learning rate.
    """
    name = str(chosen.get("preset", "default"))
    if name not in PRESETS:
        raise ConfigError(f"preset = {name!r} is unknown; choose one of {', '.join(PRESETS)}")
    preset = PRESETS[name]
    method = str(chosen.get("method", preset.method))
    run: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for key, value in {**preset.run, **method_defaults, **preset.methods.get(method, {}), **chosen}.items():
        if key in RunConfig.model_fields and key != "method_settings":
            run[key] = value
        elif key in method_settings.model_fields:
            own[key] = value
        else:
            raise ConfigError(_unknown(key, [*RunConfig.model_fields, *method_settings.model_fields], method))
    try:
        config = RunConfig(**run, method_settings=method_settings(**own).model_dump())
    except ValidationError as error:
        raise ConfigError(explain_findings(error)) from None
    if "epochs" in chosen and "warm_up_epochs" in preset.run.keys() - chosen.keys():
        scaled = round(config.epochs * preset.run["warm_up_epochs"] / preset.run["epochs"])
        return config.model_copy(update={"warm_up_epochs": max(1, min(scaled, config.epochs - 1))})
    return config


def _unknown(key: str, known: list[str], method: str) -> str:
    close = difflib.get_close_matches(key, known, n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else f"`csda methods {method} --all` lists all settings"
    return f"unknown setting {key!r} for method {method!r}: {hint}"
