"""What an experiment is: a grid of runs, what the paper reports of it, and what differs on other data."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, ValidationInfo, field_validator

from csda.config import Setting, Settings, explain_findings
from csda.data import recognise
from csda.errors import ConfigError

HERE = Path(__file__).parent


class Row(Settings):
    """A line of the table: a method with settings, under a title; `paper` maps a budget to the paper's AUC and MCA.

    `labels` are the row's own budgets, where it has fewer than the table; `preset` is its own, too, and a row without
    a title is called after it.
    """

    method: str
    title: str = ""
    preset: str | None = None
    labels: list[str] | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    paper: dict[str, list[float]] = Field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.title or (f"{self.method}, {self.preset}" if self.preset else self.method)


class Variant(Settings):
    """What differs when the experiment runs on another data set than its own, such as the paper's."""

    title: str | None = None
    note: str | None = None
    labels: list[str] | None = None
    splits: dict[str, dict[str, Setting]] | None = None


class Experiment(Settings):
    """What a TOML file of this folder holds.

    `splits` are settings by a name; a `split` among them is a file or folder inside that of the data. Each of them may
    be a case of its own, with its `data`, a set inside the folder that `--data` names, and its number of `labels`. `on`
    has a variant for a source by its name; the tables of a variant are called after it. A `figure` names the picture
    that is made of these runs, the paper's or our own; others get one by their shape.
    """

    title: str
    note: str = ""
    data: str = "synthetic"
    preset: str | None = None
    labels: list[str] = Field(default_factory=list)
    seeds: list[int]
    splits: dict[str, dict[str, Setting]] = Field({"random": {}}, validate_default=True)
    settings: dict[str, Any] = Field(default_factory=dict)
    figure: Literal["confusion", "temperature", "examples", "epochs"] | None = None
    rows: list[Row]
    on: dict[str, Variant] = Field(default_factory=dict)

    @field_validator("splits")
    @classmethod
    def _have_labels(cls, splits: dict[str, dict[str, Setting]], info: ValidationInfo) -> dict[str, dict[str, Setting]]:
        expected = 0 if info.data.get("labels") else len(splits)
        if sum("labels" in settings for settings in splits.values()) != expected:
            raise ValueError("is unclear; give labels once for all splits, or in each of them")
        return splits

    @property
    def places(self) -> list[tuple[Row, str, str]]:
        """Every row at each of its budgets on each split, in the order of the tables."""
        if not self.labels:
            return [(row, labels, split) for row in self.rows for split, labels in self.cases.items()]
        return [
            (row, labels, split) for row in self.rows for labels in row.labels or self.labels for split in self.splits
        ]

    @property
    def cases(self) -> dict[str, str]:
        """The labels of each split, where these are its own."""
        return {name: str(settings["labels"]) for name, settings in self.splits.items() if "labels" in settings}

    @property
    def presets(self) -> dict[str, str | None]:
        """The preset of each row by its name, where a row has its own."""
        own = any(row.preset for row in self.rows)
        return {row.name: row.preset or self.preset for row in self.rows} if own else {}


def read_experiment(name: str) -> tuple[str, Experiment]:
    """An experiment of this folder by its name, or any by its file."""
    path = Path(name) if name.endswith(".toml") else HERE / f"{name}.toml"
    try:
        return path.stem, Experiment(**tomllib.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        known = ", ".join(sorted(file.stem for file in HERE.glob("*.toml")))
        raise ConfigError(f"{name}: no such experiment; there are: {known}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a TOML file ({error}); correct it") from None
    except ValidationError as error:
        raise ConfigError(f"{path}: {explain_findings(error, nested=True)}; correct it") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({(error.strerror or str(error)).lower()})") from None


def choose_variant(stem: str, experiment: Experiment, data: str) -> tuple[str, Experiment]:
    """The experiment as it is on this data set: its own, or one that has a variant of it."""
    source = recognise(None if data == "synthetic" else Path(data))
    if source not in experiment.on:
        return stem, experiment
    changes = experiment.on[source].model_dump(exclude_none=True)
    return f"{stem}_{source}", experiment.model_copy(update=changes)
