"""A grid of runs and the table that comes of it.

An experiment is a TOML file: rows (a method with settings), label budgets, splits, seeds, and what the paper reports.
`reproduce` trains what is missing, goes on with what was interrupted, and writes

    NAME.csv        a line for each row and budget: mean and spread over seeds, beside the paper's figures
    NAME_runs.csv   a line for each run: enough to check every number of the first
    NAME.md         the same as a page, with the paired difference to the first row
    NAME.svg        a picture: every seed, and what became of each class
    NAME.json       the command, commit, machine and date
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
from pydantic import Field, ValidationError

from csda import metrics
from csda.config import Settings
from csda.data import load_dataset
from csda.errors import ConfigError, CsdaError
from csda.launch import launch
from csda.progress import Reporter
from csda.report.grid import draw_grid, write_grid
from csda.runs import Run, write_csv, write_whole
from csda.training import train

FIGURES = ("auc", "mca", "auc_last20", "mca_last20", "auc_prior", "mca_prior")
COLUMNS = (
    "method", "labels", "split", "seeds", "auc_mean", "auc_std", "mca_mean", "mca_std",
    "auc_last20_mean", "mca_last20_mean", "mca_prior_mean", "paper_auc", "paper_mca",
)  # fmt: skip


class Row(Settings):
    """A line of the table: a method with settings, under a title; `paper` maps a budget to the paper's AUC and MCA."""

    method: str
    title: str = ""
    settings: dict[str, Any] = Field(default_factory=dict)
    paper: dict[str, tuple[float, float]] = Field(default_factory=dict)


class Experiment(Settings):
    """What a file in experiments/ holds."""

    title: str
    note: str = ""
    data: str = "synthetic"
    preset: str | None = None
    labels: list[str]
    seeds: list[int]
    splits: dict[str, str] = Field(default_factory=lambda: {"random": ""}, description="a name, and a file or folder")
    settings: dict[str, Any] = Field(default_factory=dict)
    rows: list[Row]


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of the grid."""

    title: str
    method: str
    labels: str
    split: str
    seed: int
    folder: Path
    data: str
    preset: str | None
    settings: Mapping[str, Any]

    def train(self) -> Run:
        return train(
            self.data,
            method=self.method,
            preset=self.preset,
            labels=self.labels,
            seed=self.seed,
            out=self.folder,
            settings=self.settings,
            resume=True,
            reporter=Reporter(),
        )


def read_experiment(name: str) -> tuple[str, Experiment]:
    """An experiment by its name in ./experiments, or by its file."""
    path = Path(name) if name.endswith(".toml") else Path("experiments") / f"{name}.toml"
    try:
        return path.stem, Experiment(**tomllib.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        known = ", ".join(sorted(file.stem for file in Path("experiments").glob("*.toml"))) or "none here"
        raise ConfigError(f"{path}: no such experiment; there are: {known}") from None
    except (tomllib.TOMLDecodeError, ValidationError) as error:
        raise ConfigError(f"{path}: {error}") from None


def list_cells(name: str, experiment: Experiment, runs: Path, data: str | None) -> list[Cell]:
    """Every run of the grid; rows that differ in a setting have folders that say so."""
    cells = []
    for row in experiment.rows:
        title = row.title or row.method
        for labels in experiment.labels:
            for split, file in experiment.splits.items():
                for seed in experiment.seeds:
                    stem = f"{title}_{labels}_{split}_{seed}".replace("/", "-").replace(" ", "-")
                    settings = experiment.settings | row.settings | ({"split": file} if file else {})
                    folder = runs / name / "".join(c if c.isalnum() or c in "._-=" else "-" for c in stem)
                    source = data or experiment.data
                    cells.append(
                        Cell(title, row.method, labels, split, seed, folder, source, experiment.preset, settings)
                    )
    return cells


def reproduce(
    name: str,
    *,
    data: str | None,
    runs: Path,
    out: Path,
    jobs: int | None = None,
    side_by_side: int | None = None,
    reporter: Reporter,
) -> Path:
    """Train what is missing of an experiment and write its table; the Markdown file is returned."""
    stem, experiment = read_experiment(name)
    cells = list_cells(stem, experiment, runs, data)
    missing = [cell for cell in cells if not (cell.folder / "result.json").is_file()]
    reporter.note(f"{stem}: {len(cells)} runs, {len(missing)} of them to train")
    _train_all(missing, jobs, side_by_side, reporter)
    results = [{**_describe(cell), **_result(Run(cell.folder))} for cell in cells]
    out.mkdir(parents=True, exist_ok=True)
    summary = summarize(experiment, results)
    write_csv(out / f"{stem}_runs.csv", list(results[0]), _cells(results, results[0]))
    write_csv(out / f"{stem}.csv", COLUMNS, _cells(summary, COLUMNS))
    provenance = _provenance(cells)
    write_whole(out / f"{stem}.json", json.dumps(provenance, indent=1) + "\n")
    _draw(out / f"{stem}.svg", experiment, results, Run(cells[0].folder))
    page = out / f"{stem}.md"
    write_whole(page, format_page(experiment, results, summary, provenance))
    return page


def summarize(experiment: Experiment, results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Mean and spread over seeds of each row, budget and split."""
    lines = []
    for row in experiment.rows:
        for labels in experiment.labels:
            for split in experiment.splits:
                runs = _select(results, row.title or row.method, labels, split)
                values = {figure: [run[figure] for run in runs if run[figure] is not None] for figure in FIGURES}
                means = {figure: mean(some) if some else None for figure, some in values.items()}
                spreads = {figure: stdev(some) if len(some) > 1 else None for figure, some in values.items()}
                paper = row.paper.get(labels, (None, None))
                lines.append(
                    {
                        "method": row.title or row.method,
                        "labels": labels,
                        "split": split,
                        "seeds": len(runs),
                        "auc_mean": means["auc"],
                        "auc_std": spreads["auc"],
                        "mca_mean": means["mca"],
                        "mca_std": spreads["mca"],
                        "auc_last20_mean": means["auc_last20"],
                        "mca_last20_mean": means["mca_last20"],
                        "mca_prior_mean": means["mca_prior"],
                        "paper_auc": paper[0],
                        "paper_mca": paper[1],
                    }
                )
    return lines


def compare(
    results: Sequence[Mapping[str, Any]], title: str, reference: str, labels: str, split: str
) -> list[list[float]]:
    """For AUC and MCA: the mean paired difference to a reference over seeds, and its 95 % bootstrap interval."""
    ours, theirs = ({run["seed"]: run for run in _select(results, one, labels, split)} for one in (title, reference))
    rows = []
    for figure in ("auc", "mca"):
        gaps = np.array([ours[seed][figure] - theirs[seed][figure] for seed in ours if seed in theirs])
        rows.append([float(gaps.mean()), *(float(bound) for bound in metrics.paired_interval(gaps))])
    return rows


def format_page(
    experiment: Experiment,
    results: Sequence[Mapping[str, Any]],
    summary: Sequence[Mapping[str, Any]],
    provenance: Mapping[str, Any],
) -> str:
    """The table as Markdown, with the paired difference to its first row in points."""
    reference = experiment.rows[0].title or experiment.rows[0].method
    lines = [
        f"# {experiment.title}",
        "",
        *([experiment.note.strip(), ""] if experiment.note else []),
        f"Made by `{provenance['command']}` on {provenance['date']}, trained at commit {provenance['commit']}, "
        f"{provenance['device']}, torch {provenance['torch']}. Test figures at the epoch of best validation AUC, mean "
        f"± standard deviation over seeds; differences to *{reference}* in points, paired by seed, with 95 % "
        "bootstrap intervals.",
        "",
        "| method | labels | split | seeds | AUC | MCA | ΔAUC | ΔMCA | last 20 epochs | MCA ÷ prior | paper |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for line in summary:
        if line["method"] == reference or line["mca_mean"] is None:
            gaps = ["", ""]
        else:
            pairs = compare(results, line["method"], reference, line["labels"], line["split"])
            gaps = [f"{100 * gap:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]" for gap, low, high in pairs]
        paper = f"{line['paper_auc']:.4f} / {line['paper_mca']:.4f}" if line["paper_auc"] is not None else ""
        cells = [
            line["method"],
            line["labels"],
            line["split"],
            str(line["seeds"]),
            _spread(line["auc_mean"], line["auc_std"]),
            _spread(line["mca_mean"], line["mca_std"]),
            *gaps,
            f"{_number(line['auc_last20_mean'])} / {_number(line['mca_last20_mean'])}",
            _number(line["mca_prior_mean"]),
            paper,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _train_all(cells: Sequence[Cell], jobs: int | None, side_by_side: int | None, reporter: Reporter) -> None:
    """Train what is missing; a run that fails is named after all others have had their turn."""
    # Runs on the same pixels come together, so that those side by side share them.
    cells = sorted(cells, key=lambda cell: (cell.split, cell.seed))
    failures = []
    with closing(launch(cells, jobs=jobs, side_by_side=side_by_side, note=reporter.note)) as ended:
        for done, (cell, run) in enumerate(ended, start=1):
            if isinstance(run, CsdaError):
                failures.append(f"{cell.folder.name}: {run}")
            else:
                figures = f"AUC {_number(run.result['auc'])}, MCA {_number(run.result['mca'])}"
                reporter.note(f"{done}/{len(cells)} {cell.folder.name}: {figures}")
    if failures:
        raise CsdaError("; ".join(failures))


def _describe(cell: Cell) -> dict[str, Any]:
    return {"method": cell.title, "labels": cell.labels, "split": cell.split, "seed": cell.seed}


def _result(run: Run) -> dict[str, Any]:
    figures = {figure: run.result.get(figure) for figure in (*FIGURES, "best_epoch", "seconds")}
    recalls = metrics.recall(*run.predictions.part("test"))
    return figures | {f"recall_{name}": float(recall) for name, recall in zip(run.classes, recalls, strict=True)}


def _draw(path: Path, experiment: Experiment, results: Sequence[Mapping[str, Any]], run: Run) -> None:
    """The picture of the first budget and split; a drawn set shows an image of each class."""
    examples = None
    if run.config["data"] == "synthetic":
        dataset = load_dataset("synthetic", seed=run.config["seed"])
        first = {record.label: position for position, record in reversed(list(enumerate(dataset.records)))}
        assert dataset.draw is not None
        images = dataset.draw([first[label] for label in range(len(run.classes))], 64)
        examples = dict(zip(run.classes, images, strict=True))
    labels, split = experiment.labels[0], next(iter(experiment.splits))
    titles = [row.title or row.method for row in experiment.rows]
    shown = [line for line in results if (line["labels"], line["split"]) == (labels, split)]
    write_grid(draw_grid(shown, titles, run.classes, examples), path)


def _select(results: Iterable[Mapping[str, Any]], title: str, labels: str, split: str) -> list[Mapping[str, Any]]:
    return [run for run in results if (run["method"], run["labels"], run["split"]) == (title, labels, split)]


def _provenance(cells: Sequence[Cell]) -> dict[str, Any]:
    environments = [Run(cell.folder).environment for cell in cells]
    last = max(environments, key=lambda environment: environment["started"])
    return {
        "command": " ".join(["csda", *sys.argv[1:]]),
        "date": last["started"][:10],
        "commit": ", ".join(sorted({str(environment["commit"]) for environment in environments})),
        "device": ", ".join(sorted({str(environment["device_name"]) for environment in environments})),
        **{key: last[key] for key in ("csda", "python", "torch", "numpy", "platform", "cores", "threads")},
        "seeds": sorted({cell.seed for cell in cells}),
    }


def _cells(lines: Iterable[Mapping[str, Any]], columns: Iterable[str]) -> list[list[object]]:
    columns = list(columns)
    shown = ([line[column] for column in columns] for line in lines)
    return [[f"{value:.6g}" if isinstance(value, float) else value for value in line] for line in shown]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _spread(value: float | None, deviation: float | None) -> str:
    return _number(value) if deviation is None else f"{_number(value)} ± {_number(deviation)}"
