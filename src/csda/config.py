"""Typed settings of a run, from a TOML file and `--set`. An unknown key is an error.

`RunConfig` has the settings of every method. A method's own settings are typed in its file and stored here as
`method_settings`, with all defaults, so that `config.toml` is complete.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
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
    """Marks a setting that is rarely changed; `csda methods NAME` shows it only with --all."""


DETAIL = Detail()


MAX_TOML = 1 << 16
"""Largest number of characters in a file of settings."""


class Settings(BaseModel):
    """Base class of settings: frozen, and unknown keys, NaN and booleans for numbers are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _number_is_no_truth_value(cls, value: object, info: ValidationInfo) -> object:
        assert info.field_name is not None
        annotation = cls.model_fields[info.field_name].annotation
        if isinstance(value, bool) and annotation is not bool and True not in get_args(annotation):
            raise ValueError("is not a value of this setting; give a number or text")
        return value


def _as_text(value: object) -> object:
    """A setting such as 300 may be given as a number."""
    return str(value) if isinstance(value, int) else value


def _device(name: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", name, re.ASCII):
        raise ValueError("is unknown; give auto, cpu or cuda")
    return name


def _rising(shares: tuple[float, ...]) -> tuple[float, ...]:
    if any(later <= earlier for earlier, later in pairwise(shares)):
        raise ValueError("is not in increasing order; give the shares in order")
    return shares


Text = Annotated[str, Field(min_length=1)]
Share = Annotated[float, Field(gt=0, lt=1, strict=True)]


class RunConfig(Settings):
    """The settings that every method has."""

    data: Text = Field("synthetic", description="folder of images, or 'synthetic'")
    source: Annotated[Text | None, DETAIL] = Field(
        None, description="format of the data set; recognised from its files unless given"
    )
    split: Text | None = Field(None, description="split CSV, or folder of split lists")
    image_column: Annotated[Text, DETAIL] = Field("image", description="column of a CSV with the image file")
    label_column: Annotated[Text, DETAIL] = Field("label", description="column of a CSV with the label")
    group_column: Annotated[Text, DETAIL] = Field(
        "group", description="column of a CSV with the patient or another group"
    )
    split_column: Annotated[Text, DETAIL] = Field(
        "split", description="column of a CSV with the part: train, val, test or unlabeled"
    )
    split_by: Literal["image", "group"] | None = Field(None, description="whether groups stay in one part")
    split_seed: Annotated[int | None, DETAIL] = Field(
        None, ge=0, lt=2**31, description="seed of the split; the seed of the run unless given"
    )
    labels: Annotated[Text | None, BeforeValidator(_as_text)] = Field(
        None, description="300, 10%, 20/class or 10% of groups"
    )
    labels_from: Annotated[Text | None, DETAIL] = Field(
        None, description="run or review folder: use its split, and add the labels of its labels.csv"
    )
    val: Annotated[Text | None, BeforeValidator(_as_text), DETAIL] = Field(
        None, description="labeled images for validation: 50, 10%, 5/class, or 0 for none; 10% unless given"
    )
    uncertain: Annotated[Literal["remove", "zeros", "ones"], DETAIL] = Field(
        "remove", description="how to treat CheXpert's uncertain cells"
    )
    max_unreadable: Annotated[float, DETAIL] = Field(
        0.01, ge=0, le=1, description="largest share of unreadable images that is accepted"
    )

    method: Annotated[Text, DETAIL] = Field("csda", description="one of `csda methods`")
    preset: Annotated[Text, DETAIL] = Field("default", description="paper, default, strong, features or quick")
    seed: int = Field(0, ge=0, lt=2**31, description="seed of data, split and training")

    epochs: int = Field(40, ge=1, le=100_000, description="number of epochs")
    steps_per_epoch: int = Field(250, ge=1, le=1_000_000, description="steps per epoch")
    warm_up_epochs: int = Field(1, ge=1, le=100_000, description="first epochs, on labels alone")
    image_size: int = Field(128, ge=32, le=4096, description="side of the resized images in pixels")
    batch_size: int = Field(128, ge=2, le=65_536, description="labeled images per step")
    unlabeled_batch_size: int = Field(128, ge=2, le=65_536, description="unlabeled images per step")
    aspect: Annotated[Literal["squash", "pad", "crop"], DETAIL] = Field(
        "squash", description="how an image becomes a square: squashed, padded with black, or cropped in the middle"
    )
    eval_batch_size: Annotated[int, DETAIL] = Field(512, ge=1, le=65_536, description="batch size of the evaluation")

    backbone: Text = Field("alexnet", description="network, also timm:NAME or monai:NAME")
    pretrained: Annotated[bool, DETAIL] = Field(False, description="start from published weights; see `csda weights`")
    weights: Annotated[Text | None, DETAIL] = Field(None, description="file with weights to start from")
    frozen: Annotated[bool, DETAIL] = Field(
        False, description="train only a head, on features that the network computes once"
    )
    feature_stages: Annotated[int, DETAIL] = Field(
        0,
        ge=0,
        le=100,
        description="stages of a frozen network, from its end, whose averages are the features; 0: those before its "
        "classifier",
    )
    feature_views: Annotated[Literal["plain", "zoomed", "mirrored"], DETAIL] = Field(
        "plain",
        description="views whose frozen features are averaged: the image; zoomed: and its middle, enlarged; mirrored: "
        "and its mirror images",
    )
    probe_share: Annotated[float, DETAIL] = Field(
        0.0, ge=0, le=1, description="share of the linear probe in the head that predicts, with frozen = true"
    )
    dropout: Annotated[float, DETAIL] = Field(0.5, ge=0, lt=1, description="dropout rate")
    optimizer: Annotated[Literal["sgd", "adam", "adamw"] | None, DETAIL] = Field(
        None, description="optimiser; that of the method unless given, plain SGD for most"
    )
    lr: float = Field(0.0128, gt=0, le=100, description="learning rate, for mean losses")
    head_lr: Annotated[float | None, DETAIL] = Field(
        None, gt=0, le=100, description="learning rate of the last layer; lr unless given"
    )
    weight_decay: Annotated[float, DETAIL] = Field(0.0, ge=0, le=10, description="weight decay, with adamw")
    schedule: Annotated[Literal["steps", "cosine"], DETAIL] = Field(
        "steps",
        description="learning rate schedule: a decay at some epochs, or a cosine to zero",
    )
    lr_warm_up: Annotated[int, DETAIL] = Field(0, ge=0, le=1_000_000, description="warm-up steps of a cosine schedule")
    lr_decay: Annotated[float, DETAIL] = Field(0.1, gt=0, le=1, description="factor of the learning rate at each decay")
    lr_decay_at: Annotated[tuple[Share, ...], AfterValidator(_rising), DETAIL] = Field(
        (50 / 256, 125 / 256), description="shares of the epochs after which the learning rate decays"
    )
    ramp: Annotated[Literal["epoch", "step"], Reading(20)] = Field(
        "epoch", description="whether the weight of the unlabeled loss grows every epoch or every step"
    )

    rotation: Annotated[float, DETAIL] = Field(10.0, ge=0, le=180, description="largest rotation, in degrees")
    translation: Annotated[float, DETAIL] = Field(
        0.1, ge=0, lt=1, description="largest translation, as a share of the image"
    )
    flip: Annotated[bool, DETAIL] = Field(False, description="mirror images at random, left to right and top to bottom")
    zoom: Annotated[float, DETAIL] = Field(1.0, ge=1, le=4, description="largest zoom factor")
    enlarge: Annotated[float, DETAIL] = Field(
        1.0, ge=1, le=4, description="largest further factor of enlarging the middle of training images"
    )
    border: Annotated[Literal["zeros", "reflection"], DETAIL] = Field(
        "zeros", description="how pixels from outside of a moved image are filled"
    )
    color: Annotated[float, DETAIL] = Field(
        0.0, ge=0, le=1, description="strength of random changes of brightness, contrast, saturation and tint"
    )
    pictures: Annotated[Literal["skin", "chest", "endoscopy", "generic"] | None, DETAIL] = Field(
        None,
        description="kind of images, for the augmentation of the preset strong; known from the source unless given",
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
    test_flips: Annotated[bool, DETAIL] = Field(
        False, description="average predictions over mirrored copies of each image"
    )
    test_middle: Annotated[bool, DETAIL] = Field(
        False, description="average predictions over each image and its enlarged middle"
    )

    prior_correction: Annotated[Literal["none", "labeled"], DETAIL] = Field(
        "none", description="divide probabilities by the labeled class frequencies when scoring"
    )

    calibrate: Annotated[Literal["auto", "validation", "folds"], DETAIL] = Field(
        "auto",
        description="what calibration is fitted to: validation images, or with folds also labeled images, each "
        "predicted by a training without its fold; auto takes folds if validation is small and the network is frozen",
    )
    device: Annotated[str, AfterValidator(_device)] = Field("auto", description="auto, cpu, cuda or cuda:1")
    precision: Literal["float32", "tf32", "bf16"] = Field("float32", description="bf16 on a GPU by default")
    resident_share: Annotated[float, DETAIL] = Field(
        0.6,
        ge=0,
        le=1,
        description="share of the free device memory to use for pixels; others are streamed from the "
        "host; 0 streams all",
    )
    cuda_graph: Annotated[bool, DETAIL] = Field(True, description="capture steps in CUDA graphs on a GPU")
    kernels: Annotated[bool, DETAIL] = Field(True, description="use the package's Triton kernels on a GPU")
    time_kernels: Annotated[bool, DETAIL] = Field(
        True, description="let cuDNN time its kernels at first use on a GPU, which takes up to a minute"
    )
    checkpoint_seconds: Annotated[float, DETAIL] = Field(
        20.0, ge=0, le=1_000_000, description="shortest time between checkpoints, in seconds"
    )
    threads: Annotated[int, DETAIL] = Field(
        0, ge=0, le=1024, description="CPU threads, at most one per core; 0 for torch's default"
    )
    tensorboard: Annotated[bool, DETAIL] = Field(False, description="write TensorBoard event files")
    thumbnails: Annotated[bool, DETAIL] = Field(
        True,
        description="store small pictures of some images for the report; false if images must not leave their place",
    )

    method_settings: dict[str, Any] = Field(default_factory=dict)


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
"""Settings that do not change what a run computes: how it executes, or a name for other settings."""


def parse_assignments(assignments: Sequence[str]) -> dict[str, Setting]:
    """Read `key=value` pairs of the command line. A value that is not TOML is text."""
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
        except ValueError:  # not TOML, or a number with more digits than Python reads
            settings[key] = text.strip()
    return settings


def load_toml(text: str) -> dict[str, Any]:
    """Parse a TOML text. All that cannot be read is a `ValueError`, also a text that is too long or too deep."""
    if len(text) > MAX_TOML:
        raise ValueError(f"{len(text):,} characters, more than the {MAX_TOML:,} of any settings")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("too many brackets within each other") from None


def parse_config(text: str) -> RunConfig:
    """Read a text that `format_config` of this version or an older one wrote."""
    try:
        settings = load_toml(text)
        config = RunConfig(**settings)
    except ValidationError as error:
        raise ConfigError(explain_findings(error)) from None
    except ValueError as error:
        raise ConfigError(f"not a TOML file ({error}); restore it or start a new run") from None
    if missing := {"data", "epochs"} - settings.keys():
        raise ConfigError(f"no {' and no '.join(sorted(missing))} in it; restore it or start a new run")
    return config


def read_config(path: Path) -> RunConfig:
    """Read config.toml of a run folder."""
    try:
        return parse_config(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a TOML file ({error}); restore it or start a new run") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def format_config(config: RunConfig) -> str:
    """Write a configuration as TOML. Settings that are None are left out."""
    return tomli_w.dumps(config.model_dump(exclude_none=True))


def differences(ours: RunConfig, theirs: RunConfig) -> list[str]:
    """The settings that differ between two configurations, one per line."""
    left, right = ours.model_dump(), theirs.model_dump()
    left |= left.pop("method_settings")
    right |= right.pop("method_settings")
    return [f"{key}: {right.get(key)!r} → {left.get(key)!r}" for key in left | right if left.get(key) != right.get(key)]


def explain_findings(error: ValidationError, *, nested: bool = False) -> str:
    """pydantic's error messages, one per setting, without web addresses. With `nested`, settings contain others."""
    findings: dict[str, list[str]] = {}
    for finding in error.errors(include_url=False):
        # After the setting and a position in its list come pydantic's names of the allowed types.
        setting, *place = finding["loc"]
        kept = (part for part in place if isinstance(part, int) or (nested and part not in _KINDS))
        name = ".".join(map(str, (setting, *kept)))
        if finding["type"] in _WITHOUT_VALUE:
            findings.setdefault(f"{name}: {_WITHOUT_VALUE[finding['type']]}", []).append("")
            continue
        own = _IN_OUR_WORDS.get(finding["type"])
        limits = {
            key: f"{limit:g}" if isinstance(limit, float) else limit for key, limit in finding.get("ctx", {}).items()
        }
        words = finding["msg"] if own is None else own.format(**limits)
        plain = (
            words.removeprefix("Value error,")
            if finding["type"] == "value_error"
            else f": {words[0].lower()}{words[1:]}"
        )
        findings.setdefault(f"{name} = {_shown(finding['input'])}", []).append(plain)
    return "; ".join(value + ", or".join(words).replace(", or:", ", or") for value, words in findings.items())


_KINDS = frozenset({"bool", "int", "float", "str"})
"""pydantic's names of the types that a `Setting` may have."""

_IN_OUR_WORDS = {
    **dict.fromkeys(("bool_parsing", "bool_type"), "give true or false"),
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float"), "give a whole number"),
    **dict.fromkeys(("float_parsing", "float_type"), "give a number"),
    **dict.fromkeys(("list_type", "tuple_type"), "give a list, such as [0.2, 0.5]"),
    "finite_number": "give a finite number",
    "string_type": "give a text",
    "literal_error": "choose {expected}",
    "greater_than": "give more than {gt}",
    "greater_than_equal": "give at least {ge}",
    "less_than": "give less than {lt}",
    "less_than_equal": "give at most {le}",
    "too_short": "give at least {min_length} of them",
}
"""Messages for pydantic's types of errors. Others keep pydantic's own message."""

_WITHOUT_VALUE = {"missing": "missing", "extra_forbidden": "unknown"}


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python does not print numbers of more than 4,300 digits
        return "a number with too many digits"
    return text if len(text) <= 80 else f"{text[:80]}…"
