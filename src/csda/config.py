"""What a run is: typed settings, from a preset, a TOML file and `--set`; an unknown key is an error.

Settings that every method has stand in `RunConfig`. A method's own settings are typed in its file; here they travel
as `method_settings`, complete with defaults, so that `config.toml` says all that shaped a run.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from csda.errors import ConfigError

Setting = bool | int | float | str


class Settings(BaseModel):
    """Base of all settings: no unknown key, no change after the start, no NaN."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _as_text(value: object) -> object:
    """300 may come as a number."""
    return str(value) if isinstance(value, int) else value


class RunConfig(Settings):
    """The settings that every method has."""

    data: str = Field("synthetic", description="folder of images, or 'synthetic'")
    source: str | None = Field(None, description="how to read the folder; recognised by its layout when not given")
    split: str | None = Field(None, description="split CSV, or the folder with a set's published lists")
    image_column: str = Field("image", description="of a CSV with labels")
    label_column: str = Field("label", description="of a CSV with labels")
    group_column: str = Field("group", description="of a CSV with labels")
    split_column: str = Field("split", description="of a CSV with labels")
    split_by: Literal["image", "group"] = Field("image", description="what never crosses parts")
    split_seed: int | None = Field(None, ge=0, lt=2**31, description="of the split; the run's seed when not given")
    labels: Annotated[str | None, BeforeValidator(_as_text)] = Field(
        None, description="labels to keep: 300, 10%, 20/class or 10% of groups; all when not given"
    )
    uncertain: Literal["remove", "zeros", "ones"] = Field("remove", description="CheXpert's uncertain cells")
    max_unreadable: float = Field(0.01, ge=0, le=1, description="share of images that may be unreadable")

    method: str = Field("csda", description="one of `csda methods`")
    preset: str = Field("default", description="paper, default or quick")
    seed: int = Field(0, ge=0, lt=2**31)

    epochs: int = Field(40, ge=1)
    steps_per_epoch: int = Field(250, ge=1)
    warm_up_epochs: int = Field(1, ge=1, description="epochs on labels alone at the start")
    image_size: int = Field(128, ge=32)
    batch_size: int = Field(128, ge=2, description="labeled images a step")
    unlabeled_batch_size: int = Field(128, ge=2, description="unlabeled images a step")
    eval_batch_size: int = Field(512, ge=1)

    backbone: str = Field("alexnet", description="alexnet (the paper's) or resnet18")
    dropout: float = Field(0.5, ge=0, lt=1)
    lr: float = Field(0.0128, gt=0, description="of losses that are means; the paper's 1e-4 is for sums over 128")
    lr_decay: float = Field(0.1, gt=0, le=1)
    lr_decay_at: tuple[float, ...] = Field((50 / 256, 125 / 256), description="shares of the epochs")
    ramp: Literal["epoch", "step"] = Field("epoch", description="whether η grows by epoch or by step")

    rotation: float = Field(10.0, ge=0, le=180, description="degrees")
    translation: float = Field(0.1, ge=0, lt=1, description="share of the image")
    flip: bool = Field(False, description="mirror images at random, for pictures without an up and a left")

    prior_correction: Literal["none", "labeled"] = Field(
        "none", description="divide the labeled class frequencies out of the probabilities when scoring"
    )

    device: str = Field("auto", description="auto, cpu or cuda")
    precision: Literal["float32", "tf32", "bf16"] = Field("float32", description="on a GPU bf16 unless chosen")
    resident_share: float = Field(
        0.6, ge=0, le=1, description="of the free device memory for pixels; the others are streamed; 0 streams all"
    )
    cuda_graph: bool = Field(True, description="capture a step and replay it, on a GPU")
    kernels: bool = Field(True, description="use hand-written kernels in a step, on a GPU that has Triton")
    checkpoint_seconds: float = Field(20.0, ge=0, description="least time between checkpoints")
    threads: int = Field(0, ge=0, description="CPU threads; 0 leaves the choice to torch")
    tensorboard: bool = True

    method_settings: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Preset:
    """Defaults under one name. What is not named here is what the method's name fixes, or the default of its class."""

    run: dict[str, Any]
    """Settings that every method has."""
    methods: dict[str, dict[str, Any]]
    """Settings that a method has of its own, by the name of the method; one that is not named here has none."""


# Readings of the paper, for every method that guesses labels and can take alignment and queue.
_PAPER_READING = {"refresh": "epoch", "order": "train_first", "temperature": "adaptive"}
_PAPER_TEACHER = {"teacher_update": "epoch", "teacher_momentum": 0.95}
_DEFAULT_READING = {"order": "train_first", "condition": "prediction"}
_DEFAULT_STUDENT = {"labeled_from": "student", "passes": "two"}
_QUICK_QUEUE = {"capacity": 128, "condition": "prediction", "gamma": 0.0}
_QUICK_LOSS = {"soft": False, "weight": 2.0, "weight_ramp": False}
_FAST_TEACHER = {"teacher_momentum": 0.99}

PRESETS: dict[str, Preset] = {
    "paper": Preset(
        run={"epochs": 256},
        methods={
            "csda": _PAPER_READING | _PAPER_TEACHER,
            "vcq": _PAPER_READING | _PAPER_TEACHER,
            "da": _PAPER_READING | _PAPER_TEACHER,
            "self-train": _PAPER_READING | _PAPER_TEACHER,
            "fixmatch": _PAPER_READING | _PAPER_TEACHER,
            "glm": _PAPER_READING | _PAPER_TEACHER,
            "bis": _PAPER_READING | _PAPER_TEACHER,
            "nm": _PAPER_READING,
        },
    ),
    "default": Preset(
        run={},
        methods={
            "csda": _DEFAULT_READING | _DEFAULT_STUDENT | _FAST_TEACHER,
            "vcq": _DEFAULT_READING | _DEFAULT_STUDENT | _FAST_TEACHER,
            "da": _DEFAULT_READING | _DEFAULT_STUDENT | _FAST_TEACHER,
            "self-train": _DEFAULT_READING | _DEFAULT_STUDENT | _FAST_TEACHER,
            "fixmatch": _DEFAULT_READING | _FAST_TEACHER | {"labeled_from": "student"},
            "glm": _DEFAULT_READING | _FAST_TEACHER | {"passes": "two"},
            "bis": _DEFAULT_READING | _FAST_TEACHER | {"labeled_from": "student"},
            "nm": _DEFAULT_READING | {"labeled_from": "student"},
        },
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
            "csda": _QUICK_QUEUE | _FAST_TEACHER | _QUICK_LOSS,
            "vcq": _QUICK_QUEUE | _FAST_TEACHER | _QUICK_LOSS,
            "da": _QUICK_QUEUE | _FAST_TEACHER | _QUICK_LOSS,
            "self-train": _QUICK_QUEUE | _FAST_TEACHER,
            "fixmatch": _QUICK_QUEUE | _FAST_TEACHER,
            "glm": _QUICK_QUEUE | _FAST_TEACHER,
            "bis": _QUICK_QUEUE | _FAST_TEACHER,
            "nm": _QUICK_QUEUE,
        },
    ),
}


def resolve(
    chosen: Mapping[str, Any], method_settings: type[Settings], method_defaults: Mapping[str, Any]
) -> RunConfig:
    """The preset, then what the method's name stands for, then what was chosen, validated together.

    The epochs on labels alone that a preset has keep their share of the epochs where only these are chosen.
    `method_settings` is the class of the method's own settings, `method_defaults` what its entry in METHODS fixes
    among all settings (`da` is self-training with `align = "da"`, LSSE has a learning rate of its own).
    """
    method, name = str(chosen.get("method", "csda")), chosen.get("preset", "default")
    if name not in PRESETS:
        raise ConfigError(f"preset = {name!r} is unknown; choose one of {', '.join(PRESETS)}")
    preset = PRESETS[name]
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
        raise ConfigError(_explain(error)) from None
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
        except tomllib.TOMLDecodeError:
            settings[key] = text.strip()
    return settings


def read_config(path: Path) -> RunConfig:
    """The configuration that a run folder holds."""
    try:
        return RunConfig(**tomllib.loads(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a TOML file ({error}); restore it or start a new run") from None
    except ValidationError as error:
        raise ConfigError(f"{path}: {_explain(error)}") from None


def format_config(config: RunConfig) -> str:
    """TOML text of a configuration; settings that are None are left out."""
    values = config.model_dump(exclude_none=True)
    own = values.pop("method_settings")
    lines = [f"{key} = {_toml(value)}" for key, value in values.items()]
    return "\n".join([*lines, "", "[method_settings]", *(f"{key} = {_toml(value)}" for key, value in own.items()), ""])


def differences(ours: RunConfig, theirs: RunConfig) -> list[str]:
    """The settings in which two configurations differ, a line each."""
    left, right = ours.model_dump(), theirs.model_dump()
    left |= left.pop("method_settings")
    right |= right.pop("method_settings")
    return [f"{key}: {right.get(key)!r} → {left.get(key)!r}" for key in left | right if left.get(key) != right.get(key)]


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = "".join(
            c if c >= " " and c != "\x7f" else f"\\u{ord(c):04x}"
            for c in value.replace("\\", "\\\\").replace('"', '\\"')
        )
        return f'"{escaped}"'
    if isinstance(value, tuple | list):
        return f"[{', '.join(_toml(item) for item in value)}]"
    return repr(value)


def _unknown(key: str, known: list[str], method: str) -> str:
    close = difflib.get_close_matches(key, known, n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else f"`csda methods {method}` lists all settings"
    return f"unknown setting {key!r} for method {method!r}: {hint}"


def _explain(error: ValidationError) -> str:
    """pydantic's findings in a line each, without its web addresses."""
    findings = []
    for finding in error.errors(include_url=False):
        name = ".".join(str(part) for part in finding["loc"])
        findings.append(f"{name} = {finding['input']!r}: {finding['msg'][0].lower()}{finding['msg'][1:]}")
    return "; ".join(findings)
