"""What a run is: typed settings, from a preset, a TOML file and `--set`; an unknown key is an error.

Settings that every method has stand in `RunConfig`. A method's own settings are typed in its file; here they travel
as `method_settings`, complete with defaults, so that `config.toml` says all that shaped a run.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tomli_w
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from csda.errors import ConfigError

Setting = bool | int | float | str


@dataclass(frozen=True, slots=True)
class Reading:
    """Marks a setting that switches between readings of the paper, with its row in docs/explanation/readings.md."""

    row: int


@dataclass(frozen=True, slots=True)
class Detail:
    """Marks a setting that few will change; `csda methods NAME` shows it only with --all."""


DETAIL = Detail()


class Settings(BaseModel):
    """Base of all settings: no unknown key, no change after the start, no NaN, no true or false for a number."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _number_is_no_truth_value(cls, value: object, info: ValidationInfo) -> object:
        assert info.field_name is not None
        annotation = cls.model_fields[info.field_name].annotation
        if isinstance(value, bool) and annotation is not bool and True not in get_args(annotation):
            raise ValueError("is no value for it; give a number or text")
        return value


def _as_text(value: object) -> object:
    """300 may come as a number."""
    return str(value) if isinstance(value, int) else value


def _device(name: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", name, re.ASCII):
        raise ValueError("is unknown; give auto, cpu or cuda")
    return name


def _rising(shares: tuple[float, ...]) -> tuple[float, ...]:
    if any(later <= earlier for earlier, later in pairwise(shares)):
        raise ValueError("does not rise; give the shares in order")
    return shares


Text = Annotated[str, Field(min_length=1)]
Share = Annotated[float, Field(gt=0, lt=1, strict=True)]


class RunConfig(Settings):
    """The settings that every method has."""

    data: Text = Field("synthetic", description="folder of images, or 'synthetic'")
    source: Annotated[Text | None, DETAIL] = Field(
        None, description="source of the images; by default recognised from the layout of the folder"
    )
    split: Text | None = Field(None, description="split CSV, or folder of split lists")
    image_column: Annotated[Text, DETAIL] = Field("image", description="column of a CSV that names the image")
    label_column: Annotated[Text, DETAIL] = Field("label", description="column of a CSV that has the label")
    group_column: Annotated[Text, DETAIL] = Field("group", description="column of a CSV that has the patient or group")
    split_column: Annotated[Text, DETAIL] = Field("split", description="column of a CSV that names the part")
    split_by: Literal["image", "group"] | None = Field(None, description="whether groups stay in one part")
    split_seed: Annotated[int | None, DETAIL] = Field(
        None, ge=0, lt=2**31, description="seed of the split; by default the seed of the run"
    )
    labels: Annotated[Text | None, BeforeValidator(_as_text)] = Field(
        None, description="300, 10%, 20/class or 10% of groups"
    )
    labels_from: Annotated[Text | None, DETAIL] = Field(
        None, description="run or review folder whose labels.csv adds labels, and whose split is kept"
    )
    val: Annotated[Text | None, BeforeValidator(_as_text), DETAIL] = Field(
        None, description="labeled images for validation: 50, 10%, 5/class, or 0 for none; a tenth when not given"
    )
    uncertain: Annotated[Literal["remove", "zeros", "ones"], DETAIL] = Field(
        "remove", description="how to treat CheXpert's uncertain cells"
    )
    max_unreadable: Annotated[float, DETAIL] = Field(
        0.01, ge=0, le=1, description="share of images that may be unreadable"
    )

    method: Annotated[Text, DETAIL] = Field("csda", description="one of `csda methods`")
    preset: Annotated[Text, DETAIL] = Field("default", description="paper, default, strong, features or quick")
    seed: int = Field(0, ge=0, lt=2**31, description="seed of data, split and training")

    epochs: int = Field(40, ge=1, le=100_000, description="number of epochs")
    steps_per_epoch: int = Field(250, ge=1, le=1_000_000, description="steps per epoch")
    warm_up_epochs: int = Field(1, ge=1, le=100_000, description="first epochs, on labels alone")
    image_size: int = Field(128, ge=32, le=4096, description="side of images in pixels")
    batch_size: int = Field(128, ge=2, le=65_536, description="labeled images per step")
    unlabeled_batch_size: int = Field(128, ge=2, le=65_536, description="unlabeled images per step")
    aspect: Annotated[Literal["squash", "pad", "crop"], DETAIL] = Field(
        "squash", description="how an image becomes a square: squashed, padded with black, or its middle cut out"
    )
    eval_batch_size: Annotated[int, DETAIL] = Field(512, ge=1, le=65_536, description="batch size of the evaluation")

    backbone: Text = Field("alexnet", description="network, also timm:NAME or monai:NAME")
    pretrained: Annotated[bool, DETAIL] = Field(False, description="start from published weights; see `csda weights`")
    weights: Annotated[Text | None, DETAIL] = Field(None, description="file with weights to start from")
    frozen: Annotated[bool, DETAIL] = Field(
        False, description="train a head alone, on features that the network gives once"
    )
    feature_stages: Annotated[int, DETAIL] = Field(
        0,
        ge=0,
        le=100,
        description="stages of a frozen network, from its end, whose averages are the features; 0: those before its "
        "classifier",
    )
    probe_share: Annotated[float, DETAIL] = Field(
        0.0, ge=0, le=1, description="share of the linear probe in the head that predicts, where frozen = true"
    )
    dropout: Annotated[float, DETAIL] = Field(0.5, ge=0, lt=1, description="dropout rate")
    optimizer: Annotated[Literal["sgd", "adam", "adamw"] | None, DETAIL] = Field(
        None, description="optimiser; by default the method's, plain SGD for most"
    )
    lr: float = Field(0.0128, gt=0, le=100, description="learning rate, for mean losses")
    head_lr: Annotated[float | None, DETAIL] = Field(
        None, gt=0, le=100, description="learning rate of the last layer; by default lr"
    )
    weight_decay: Annotated[float, DETAIL] = Field(0.0, ge=0, le=10, description="weight decay, with adamw")
    schedule: Annotated[Literal["steps", "cosine"], DETAIL] = Field(
        "steps", description="learning rate schedule: steps at some epochs, or a cosine to zero"
    )
    lr_warm_up: Annotated[int, DETAIL] = Field(0, ge=0, le=1_000_000, description="warm-up steps of a cosine schedule")
    lr_decay: Annotated[float, DETAIL] = Field(0.1, gt=0, le=1, description="factor of the learning rate at each decay")
    lr_decay_at: Annotated[tuple[Share, ...], AfterValidator(_rising), DETAIL] = Field(
        (50 / 256, 125 / 256), description="shares of the epochs after which the learning rate decays"
    )
    ramp: Annotated[Literal["epoch", "step"], Reading(20)] = Field(
        "epoch", description="whether the weight of the unlabeled loss grows by epoch or by step"
    )

    rotation: Annotated[float, DETAIL] = Field(10.0, ge=0, le=180, description="largest rotation, in degrees")
    translation: Annotated[float, DETAIL] = Field(
        0.1, ge=0, lt=1, description="largest translation, as a share of the image"
    )
    flip: Annotated[bool, DETAIL] = Field(False, description="mirror images at random")
    zoom: Annotated[float, DETAIL] = Field(1.0, ge=1, le=4, description="largest zoom factor")
    border: Annotated[Literal["zeros", "reflection"], DETAIL] = Field(
        "zeros", description="how the border of a moved image is filled"
    )
    color: Annotated[float, DETAIL] = Field(
        0.0, ge=0, le=1, description="strength of changes of brightness, contrast, saturation and tint"
    )
    pictures: Annotated[Literal["skin", "chest", "endoscopy", "generic"] | None, DETAIL] = Field(
        None, description="kind of images, for the augmentation of the preset strong; by default known from the source"
    )

    mixup_alpha: Annotated[float, DETAIL] = Field(
        0.0, ge=0, le=100, description="strength of mixup on labeled images, in every method; 0 switches it off"
    )
    adjust: Annotated[bool, DETAIL] = Field(
        False, description="logit adjustment: add the logarithm of class frequencies to the logits in the loss"
    )
    average: Annotated[float, DETAIL] = Field(
        0.0,
        ge=0,
        lt=1,
        description="momentum of the averaged weights that predict; 0 predicts with the weights themselves",
    )
    choose: Annotated[Literal["best", "last"], DETAIL] = Field(
        "best", description="predict with the best epoch on validation, or with the last epoch"
    )
    test_flips: Annotated[bool, DETAIL] = Field(False, description="average predictions over mirrored images")

    prior_correction: Annotated[Literal["none", "labeled"], DETAIL] = Field(
        "none", description="divide probabilities by the labeled class frequencies when scoring"
    )

    calibrate: Annotated[Literal["auto", "validation", "folds"], DETAIL] = Field(
        "auto",
        description="what calibration is fitted to: validation images, or with folds labeled ones too, each predicted "
        "by a training without its fold; auto takes folds where validation has few images and the network is frozen",
    )
    device: Annotated[str, AfterValidator(_device)] = Field("auto", description="auto, cpu, cuda or cuda:1")
    precision: Literal["float32", "tf32", "bf16"] = Field("float32", description="on a GPU bf16 by default")
    resident_share: Annotated[float, DETAIL] = Field(
        0.6, ge=0, le=1, description="share of the free device memory for pixels; the rest is streamed; 0 streams all"
    )
    cuda_graph: Annotated[bool, DETAIL] = Field(True, description="capture steps in CUDA graphs, on a GPU")
    kernels: Annotated[bool, DETAIL] = Field(True, description="use the package's Triton kernels, on a GPU")
    time_kernels: Annotated[bool, DETAIL] = Field(
        True, description="let cuDNN time its kernels at first use, on a GPU; takes up to a minute"
    )
    checkpoint_seconds: Annotated[float, DETAIL] = Field(
        20.0, ge=0, le=1_000_000, description="shortest time between checkpoints, in seconds"
    )
    threads: Annotated[int, DETAIL] = Field(
        0, ge=0, le=1024, description="CPU threads, up to one a core; 0: as torch has it"
    )
    tensorboard: Annotated[bool, DETAIL] = Field(False, description="write event files for TensorBoard")
    thumbnails: Annotated[bool, DETAIL] = Field(
        True, description="keep small pictures of some images for the report; false where images may not leave"
    )

    method_settings: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Preset:
    """Defaults under one name. What is not named here is what the method's name fixes, or the default of its class."""

    run: dict[str, Any]
    """Settings that every method has."""
    methods: dict[str, dict[str, Any]]
    """Settings that a method has of its own, by the name of the method; one that is not named here has none."""
    method: str = "csda"
    """What is trained where nobody names a method."""


def _alike(methods: Sequence[str], settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The same settings for several methods."""
    return {method: dict(settings) for method in methods}


# A method has no setting twice: what its entry in METHODS fixes is not named here.
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
    # Fine-tuning of a pretrained network. What helps every method is a setting of the run, so that none is ahead by it.
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
    # A head on features of a frozen network: minutes without a GPU. It begins as logistic regression, and what a method
    # makes of unlabeled images moves it from there. Half of what predicts is the linear probe, for every method alike.
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
        # A head on few labels is sure of them all, so that the paper's alignment, by predictions on labeled images,
        # makes guesses too sure. Decision 22 has the draws on which method and settings were chosen.
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
"""Augmentation by the kind of picture, for the preset `strong`: what leaves the class of such an image as it is."""


CIRCUMSTANCES = (
    "preset",
    "device",
    "threads",
    "resident_share",
    "cuda_graph",
    "kernels",
    "time_kernels",
    "checkpoint_seconds",
    "tensorboard",
    "thumbnails",
    "calibrate",
    "max_unreadable",
)
"""Settings that say how a run is executed, or only name others, and so do not tell two runs apart."""


def resolve(
    chosen: Mapping[str, Any], method_settings: type[Settings], method_defaults: Mapping[str, Any]
) -> RunConfig:
    """The preset, then what the method's name stands for, then what was chosen, validated together.

    The epochs on labels alone that a preset has keep their share of the epochs where only these are chosen.
    `method_settings` is the class of the method's own settings, `method_defaults` what its entry in METHODS fixes
    among all settings (`da` is self-training with `align = "da"`, LSSE has a learning rate of its own).
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


def parse_assignments(assignments: Sequence[str]) -> dict[str, Setting]:
    """`key=value` pairs of the command line; a value is read as TOML where it is TOML, as text otherwise."""
    settings: dict[str, Setting] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {assignment!r} is not of the form key=value")
        key = key.strip()
        if key in settings:
            raise ConfigError(f"{key} is set twice; keep one of {key}={settings[key]} and {assignment}")
        try:
            settings[key] = tomllib.loads(f"value = {text}")["value"]
        except ValueError:  # no TOML, or a number of more digits than Python reads
            settings[key] = text.strip()
    return settings


def parse_config(text: str) -> RunConfig:
    """The configuration of a text that `format_config` made, in this version or an older one."""
    try:
        settings = tomllib.loads(text)
        config = RunConfig(**settings)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"not a TOML file ({error}); restore it or start a new run") from None
    except ValidationError as error:
        raise ConfigError(explain_findings(error)) from None
    if missing := {"data", "epochs"} - settings.keys():
        raise ConfigError(f"no {' and no '.join(sorted(missing))} in it; restore it or start a new run")
    return config


def read_config(path: Path) -> RunConfig:
    """The configuration that a run folder holds."""
    try:
        return parse_config(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a TOML file ({error}); restore it or start a new run") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def format_config(config: RunConfig) -> str:
    """TOML text of a configuration; settings that are None are left out."""
    return tomli_w.dumps(config.model_dump(exclude_none=True))


def differences(ours: RunConfig, theirs: RunConfig) -> list[str]:
    """The settings in which two configurations differ, a line each."""
    left, right = ours.model_dump(), theirs.model_dump()
    left |= left.pop("method_settings")
    right |= right.pop("method_settings")
    return [f"{key}: {right.get(key)!r} → {left.get(key)!r}" for key in left | right if left.get(key) != right.get(key)]


def _unknown(key: str, known: list[str], method: str) -> str:
    close = difflib.get_close_matches(key, known, n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else f"`csda methods {method} --all` lists all settings"
    return f"unknown setting {key!r} for method {method!r}: {hint}"


def explain_findings(error: ValidationError, *, nested: bool = False) -> str:
    """pydantic's findings, one for each setting, without its web addresses; with `nested` settings hold others."""
    findings: dict[str, list[str]] = {}
    for finding in error.errors(include_url=False):
        # Beside the setting and a position in its list stand pydantic's names of the kinds that it may be of.
        setting, *place = finding["loc"]
        kept = (part for part in place if isinstance(part, int) or (nested and part not in _KINDS))
        name = ".".join(map(str, (setting, *kept)))
        if finding["type"] in _WITHOUT_VALUE:
            findings.setdefault(f"{name}: {_WITHOUT_VALUE[finding['type']]}", []).append("")
            continue
        words = finding["msg"]
        plain = (
            words.removeprefix("Value error,")
            if finding["type"] == "value_error"
            else f": {words[0].lower()}{words[1:]}"
        )
        findings.setdefault(f"{name} = {_shown(finding['input'])}", []).append(plain)
    return "; ".join(value + ", or".join(words).replace(", or:", ", or") for value, words in findings.items())


_KINDS = frozenset({"bool", "int", "float", "str"})
"""What a `Setting` may be, as pydantic names it beside the place of a finding."""

_WITHOUT_VALUE = {"missing": "missing", "extra_forbidden": "unknown"}


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python does not write out a number of more than 4,300 digits
        return "a number of too many digits"
    return text if len(text) <= 80 else f"{text[:80]}…"
