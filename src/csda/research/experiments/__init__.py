"""The definition of an experiment: a grid of runs, the paper's figures, and changes for other data sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from csda.config import Setting, Settings, explain_findings, load_toml
from csda.data import recognise
from csda.errors import ConfigError
from csda.files import open_regular
from csda.research.blends import Blend

HERE = Path(__file__).parent


class Row(Settings):
    """A row of the table: a title and a method with settings. `paper` maps a budget to the paper's AUC and MCA.

    `labels` and `splits` are the row's own budgets and splits, if it has fewer than the table. `preset` is the row's
    own preset, which also names a row without a title.
    """

    method: str
    title: str = ""
    preset: str | None = None
    labels: list[str] | None = None
    splits: list[str] | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    paper: dict[str, list[float]] = Field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.title or (f"{self.method}, {self.preset}" if self.preset else self.method)


class Variant(Settings):
    """Changes for another data set than the experiment's own."""

    title: str | None = None
    note: str | None = None
    labels: list[str] | None = None
    splits: dict[str, dict[str, Setting]] | None = None


class Experiment(Settings):
    """The content of a TOML file of this folder.

    `splits` are settings by name. A `split` among them is a file or folder inside the data folder. A split may have its
    own `data`, a folder inside that of `--data`, and number of `labels`. `blends` change the unlabeled images of splits
    that have both. `on` has variants by source; their tables are named after them. `figure` names the picture of these
    runs; without it the shape of the grid decides.
    """

    title: str
    note: str = ""
    data: str = "synthetic"
    preset: str | None = None
    labels: list[str] = Field(default_factory=list)
    seeds: list[int]
    splits: dict[str, dict[str, Setting]] = Field({"random": {}}, validate_default=True)
    blends: dict[str, Blend] = Field(default_factory=dict)
    settings: dict[str, Any] = Field(default_factory=dict)
    figure: Literal["confusion", "temperature", "examples", "epochs"] | None = None
    rows: list[Row]
    on: dict[str, Variant] = Field(default_factory=dict)

    @field_validator("splits")
    @classmethod
    def _have_labels(cls, splits: dict[str, dict[str, Setting]], info: ValidationInfo) -> dict[str, dict[str, Setting]]:
        expected = 0 if info.data.get("labels") else len(splits)
        if sum("labels" in settings for settings in splits.values()) != expected:
            raise ValueError("is ambiguous; give labels once for all splits, or in each of them")
        return splits

    @model_validator(mode="after")
    def _rows_are_on_known_splits(self) -> Self:
        known = {*self.splits, *(name for variant in self.on.values() for name in variant.splits or {})}
        for row in self.rows:
            if unknown := set(row.splits or ()) - known:
                raise ConfigError(f"row {row.name}: no split {', '.join(sorted(unknown))}; correct it, or add it")
        return self

    @model_validator(mode="after")
    def _blends_are_of_splits(self) -> Self:
        for name in self.blends:
            if not {"data", "labels"} <= self.splits.get(name, {}).keys():
                raise ConfigError(f"blend {name}: no split of this name has its own data and labels; correct it")
        return self

    @property
    def places(self) -> list[tuple[Row, str, str]]:
        """All rows at each of their budgets on each split, in the order of the tables."""
        if not self.labels:
            every = [(row, labels, split) for row in self.rows for split, labels in self.cases.items()]
        else:
            every = [
                (row, labels, split)
                for row in self.rows
                for labels in row.labels or self.labels
                for split in self.splits
            ]
        return [place for place in every if place[0].splits is None or place[2] in place[0].splits]

    @property
    def cases(self) -> dict[str, str]:
        """The labels of each split that has its own."""
        return {name: str(settings["labels"]) for name, settings in self.splits.items() if "labels" in settings}

    @property
    def presets(self) -> dict[str, str | None]:
        """The preset of each row that has its own, by name."""
        own = any(row.preset for row in self.rows)
        return {row.name: row.preset or self.preset for row in self.rows} if own else {}


def read_experiment(name: str) -> tuple[str, Experiment]:
    """Read an experiment of this folder by name, or any by its file."""
    path = Path(name) if name.endswith(".toml") else HERE / f"{name}.toml"
    try:
        with open_regular(path) as file:
            return path.stem, Experiment(**load_toml(file.readall().decode()))
    except FileNotFoundError:
        known = ", ".join(sorted(file.stem for file in HERE.glob("*.toml")))
        raise ConfigError(f"{name}: no such experiment; there are: {known}") from None
    except ValidationError as error:
        raise ConfigError(f"{path}: {explain_findings(error, nested=True)}; correct it") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not a TOML file ({error}); correct it") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({(error.strerror or str(error)).lower()})") from None


def choose_variant(stem: str, experiment: Experiment, data: str) -> tuple[str, Experiment]:
    """The experiment for this data set, with the changes of its variant."""
    source = recognise(None if data == "synthetic" else Path(data))
    if source not in experiment.on:
        return stem, experiment
    changes = experiment.on[source].model_dump(exclude_none=True)
    return f"{stem}_{source}", experiment.model_copy(update=changes)
