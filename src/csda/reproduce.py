"""A grid of runs and the table, or the figure, that comes of it.

An experiment is a TOML file: rows (a method with settings), label budgets, splits, seeds, and what the paper reports.
`reproduce` trains what is missing, goes on with what was interrupted, and writes

    NAME.csv        a line for each row, budget and split: mean and spread over seeds, beside the paper's figures
    NAME_runs.csv   a line for each run: enough to check every number of the first, and to know the run again
    NAME_gaps.csv   paired differences over seeds with their intervals: to the baseline, and of csda to every other row
    NAME.md         the same as a page, which also says what is missing
    NAME.svg        a picture (.png where it shows photographs)
    NAME.json       the command, commit, machine and date, and the complete settings of every row
"""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal

import numpy as np
from pydantic import Field, ValidationError

from csda import metrics
from csda.config import RunConfig, Setting, Settings
from csda.data import load_dataset, recognise
from csda.data.decode import read_image
from csda.data.listing import JOIN, NONE_PRESENT
from csda.errors import ConfigError, CsdaError, DataError, RunError
from csda.launch import Launcher, launch
from csda.ledger import PLACES, agree, digest, digest_split, identify, locate, read_recorded, settings_alone
from csda.methods import METHODS
from csda.progress import Reporter
from csda.report.grid import draw_budgets, draw_grid, draw_rows, write_grid
from csda.report.paper import Example, draw_confusions, draw_examples, draw_temperatures, write_photographs
from csda.runs import Run, write_csv, write_whole
from csda.training import configure, train

FIGURES = ("auc", "mca", "auc_last20", "mca_last20", "auc_prior", "mca_prior")
COLUMNS = (
    "method", "labels", "split", "seeds", "auc_mean", "auc_std", "mca_mean", "mca_std",
    "auc_last20_mean", "mca_last20_mean", "mca_prior_mean", "paper_auc", "paper_mca",
)  # fmt: skip
GAPS = (
    "method", "reference", "labels", "split", "seeds",
    "auc_gap", "auc_low", "auc_high", "mca_gap", "mca_low", "mca_high",
)  # fmt: skip


class Row(Settings):
    """A line of the table: a method with settings, under a title; `paper` maps a budget to the paper's AUC and MCA.

    `labels` are the row's own budgets, where it has fewer than the table; `preset` is its own, too.
    """

    method: str
    title: str = ""
    preset: str | None = None
    labels: list[str] | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    paper: dict[str, list[float]] = Field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.title or self.method


class Variant(Settings):
    """What differs when the experiment runs on another data set than its own, such as the paper's."""

    title: str | None = None
    note: str | None = None
    labels: list[str] | None = None
    splits: dict[str, dict[str, Setting]] | None = None


class Experiment(Settings):
    """What a file in experiments/ holds.

    `splits` are settings by a name; a `split` among them is a file or folder inside that of the data. `on` has a
    variant for a source by its name; the tables of a variant are called after it. A `figure` names the picture that the
    paper makes of these runs; others get one by their shape.
    """

    title: str
    note: str = ""
    data: str = "synthetic"
    preset: str | None = None
    labels: list[str]
    seeds: list[int]
    splits: dict[str, dict[str, Setting]] = Field({"random": {}})
    settings: dict[str, Any] = Field(default_factory=dict)
    figure: Literal["confusion", "temperature", "examples"] | None = None
    rows: list[Row]
    on: dict[str, Variant] = Field(default_factory=dict)


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

    @property
    def config(self) -> RunConfig:
        chosen = {"data": self.data, "method": self.method, "labels": self.labels, "seed": self.seed}
        return configure(chosen | ({"preset": self.preset} if self.preset else {}) | dict(self.settings))


Found = tuple[Cell, dict[str, Any]]
"""A cell and what is known of its run, a line of NAME_runs.csv."""

Against = dict[tuple[str, str, str, str], Mapping[str, Any]]
"""Lines of NAME_gaps.csv by row, reference, budget and split."""


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


def choose_variant(stem: str, experiment: Experiment, data: str) -> tuple[str, Experiment]:
    """The experiment as it is on this data set: its own, or one that has a variant of it."""
    source = recognise(None if data == "synthetic" else Path(data))
    if source not in experiment.on:
        return stem, experiment
    changes = experiment.on[source].model_dump(exclude_none=True)
    return f"{stem}_{source}", experiment.model_copy(update=changes)


def list_cells(experiment: Experiment, runs: Path, data: str, overrides: Mapping[str, Any] | None = None) -> list[Cell]:
    """Every run of the grid; `overrides` are settings that win over those of the file."""
    cells = []
    for row in experiment.rows:
        for labels in row.labels or experiment.labels:
            for split, where in experiment.splits.items():
                place = where | ({"split": str(Path(data) / str(where["split"]))} if "split" in where else {})
                settings = {**experiment.settings, **row.settings, **place, **(overrides or {})}
                for seed in experiment.seeds:
                    preset = row.preset or experiment.preset
                    cell = Cell(row.name, row.method, labels, split, seed, runs, data, preset, settings)
                    cells.append(replace(cell, folder=locate(runs, split, cell.config)))
    return cells


def reproduce(
    name: str,
    *,
    data: str | None,
    runs: Path,
    out: Path,
    launcher: Launcher = "processes",
    jobs: int | None = None,
    side_by_side: int | None = None,
    reporter: Reporter,
    overrides: Mapping[str, Any] | None = None,
    labels: Sequence[str] = (),
    seeds: int | None = None,
    only_finished: bool = False,
) -> Path:
    """Train what is missing of an experiment and write its table; the Markdown file is returned.

    `labels` and `seeds`, a number of them, restrict what is trained, and `only_finished` trains nothing. The table has
    every run that there is then, as a folder in `runs` or as a line of a table in `out`.
    """
    stem, experiment = read_experiment(name)
    source = data or experiment.data
    stem, experiment = choose_variant(stem, experiment, source)
    cells = list_cells(experiment, runs, source, overrides)
    lines = _find_lines(cells, out, folders_alone=experiment.figure is not None)
    chosen = {
        cell.folder: cell
        for seed in experiment.seeds[:seeds]
        for cell, line in zip(cells, lines, strict=True)
        if line is None and cell.seed == seed and (not labels or cell.labels in labels) and not only_finished
    }
    reporter.note(f"{stem}: {len(cells)} runs, {len(chosen)} of them to train")
    if chosen and source != "synthetic" and not Path(source).exists():
        raise DataError(f"{source}: there is no such folder of images; name it with --data")
    _train_all(list(chosen.values()), launcher, jobs, side_by_side, reporter)
    lines = _find_lines(cells, out, folders_alone=experiment.figure is not None)
    found = [(cell, line) for cell, line in zip(cells, lines, strict=True) if line is not None]
    if not found:
        raise RunError(f"{stem}: no run of it has finished, in {runs} or in the tables of {out}; train some first")
    _require_same_images(found)
    missing = [cell for cell, line in zip(cells, lines, strict=True) if line is None]
    about = _provenance(_command(name, data, overrides or {}), found, len(missing))
    return _write_all(out, stem, experiment, found, missing, about)


def _write_all(
    out: Path,
    stem: str,
    experiment: Experiment,
    found: Sequence[Found],
    missing: Sequence[Cell],
    about: Mapping[str, Any],
) -> Path:
    results = [line for _, line in found]
    summary = summarize(experiment, results)
    gaps = compare_rows(experiment, results)
    columns = list(dict.fromkeys(column for line in results for column in line))
    out.mkdir(parents=True, exist_ok=True)
    write_csv(out / f"{stem}_runs.csv", columns, _cells(results, columns))
    write_csv(out / f"{stem}.csv", COLUMNS, _cells(summary, COLUMNS))
    write_csv(out / f"{stem}_gaps.csv", GAPS, _cells(gaps, GAPS))
    write_whole(out / f"{stem}.json", json.dumps(about, indent=1, ensure_ascii=False) + "\n")
    _draw(out / stem, experiment, found)
    return write_whole(out / f"{stem}.md", format_page(experiment, results, summary, gaps, about, missing))


def summarize(experiment: Experiment, results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Mean and spread over seeds of each row, budget and split that has a run."""
    lines = []
    for row in experiment.rows:
        for labels in row.labels or experiment.labels:
            for split in experiment.splits:
                runs = _select(results, row.name, labels, split)
                if not runs:
                    continue
                means = {figure: _mean(runs, figure) for figure in FIGURES}
                spreads = {figure: _deviation(runs, figure) for figure in ("auc", "mca")}
                paper = [*row.paper.get(labels, []), None, None]
                lines.append(
                    {
                        "method": row.name,
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


def compare_rows(experiment: Experiment, results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every row against the first, and csda against every other, at each budget and on average over all of them."""
    names = [row.name for row in experiment.rows]
    pairs = [(name, names[0]) for name in names[1:]]
    if "csda" in names[1:]:
        pairs += [("csda", name) for name in names[1:] if name != "csda"]
    lines = []
    for title, reference in pairs:
        budgets = [[labels] for labels in experiment.labels]
        for some in [*budgets, experiment.labels] if len(budgets) > 1 else budgets:
            for split in experiment.splits:
                gaps = compare(results, title, reference, some, split)
                if gaps is not None:
                    labels = some[0] if len(some) == 1 else "all"
                    lines.append({"method": title, "reference": reference, "labels": labels, "split": split} | gaps)
    return lines


def compare(
    results: Sequence[Mapping[str, Any]], title: str, reference: str, budgets: Sequence[str], split: str
) -> dict[str, Any] | None:
    """The mean paired difference to a reference over the seeds that both have at all budgets, with its 95 % bootstrap
    interval where there are two seeds or more."""
    runs = {
        (run["method"], run["labels"], run["seed"]): run
        for run in results
        if run["split"] == split and run["labels"] in budgets
    }
    seeds = sorted({seed for *_, seed in runs})
    shared = [s for s in seeds if all((name, labels, s) in runs for name in (title, reference) for labels in budgets)]
    if not shared:
        return None
    gaps: dict[str, Any] = {"seeds": len(shared)}
    for figure in ("auc", "mca"):
        differences = np.array(
            [
                mean(runs[title, labels, s][figure] - runs[reference, labels, s][figure] for labels in budgets)
                for s in shared
            ]
        )
        low, high = metrics.paired_interval(differences) if len(shared) > 1 else (None, None)
        gaps |= {f"{figure}_gap": float(differences.mean()), f"{figure}_low": low, f"{figure}_high": high}
    return gaps


def format_page(
    experiment: Experiment,
    results: Sequence[Mapping[str, Any]],
    summary: Sequence[Mapping[str, Any]],
    gaps: Sequence[Mapping[str, Any]],
    about: Mapping[str, Any],
    missing: Sequence[Cell],
) -> str:
    """The page of a table: what was run, the table, csda against the others, and what is missing."""
    reference = experiment.rows[0].name
    against: Against = {(gap["method"], gap["reference"], gap["labels"], gap["split"]): gap for gap in gaps}
    lines = [
        f"# {experiment.title}",
        "",
        *([experiment.note.strip(), ""] if experiment.note else []),
        f"Made by `{about['command']}`; {_count(about['runs'], 'run')}, the last of {about['date']}, at commit "
        f"{', '.join(about['commit'])}, on {'; '.join(about['machine'])}, torch {', '.join(about['torch'])}. Test "
        f"figures at the epoch of best validation AUC, mean ± standard deviation over seeds; differences to "
        f"*{reference}* in points, paired by seed, with 95 % bootstrap intervals, in bold where zero is outside.",
        "",
    ]
    if missing:
        lines += [f"**Incomplete: {_count(len(missing), 'run')} of this grid are missing**, listed at the end.", ""]
    seen = any(run.get("auc_unseen") is not None for run in results)
    titles = ["method", "labels", "split", "seeds", "AUC", "MCA", "ΔAUC", "ΔMCA", "last 20 epochs", "MCA ÷ prior"]
    titles += ["validation, last 20", *(["unseen groups"] if seen else [])]
    titles += ["paper", "paper ΔAUC / ΔMCA"] if any(line["paper_auc"] is not None for line in summary) else []
    lines += _table_head(titles)
    first = {(line["labels"], line["split"]): line for line in summary if line["method"] == reference}
    for line in summary:
        runs = _select(results, line["method"], line["labels"], line["split"])
        place = line["labels"], line["split"]
        gap = against.get((line["method"], reference, *place))
        cells = [
            line["method"],
            line["labels"],
            line["split"],
            str(line["seeds"]),
            _spread(line["auc_mean"], line["auc_std"]),
            _spread(line["mca_mean"], line["mca_std"]),
            *_points(gap),
            f"{_number(line['auc_last20_mean'])} / {_number(line['mca_last20_mean'])}",
            _number(line["mca_prior_mean"]),
            f"{_number(_mean(runs, 'val_auc_last20'))} / {_number(_mean(runs, 'val_mca_last20'))}",
        ]
        if seen:
            cells.append(f"{_number(_mean(runs, 'auc_unseen'))} / {_number(_mean(runs, 'mca_unseen'))}")
        lines.append(_table_row([*cells, *_paper(line, first.get(place))][: len(titles)]))
    lines += ["", *_format_against(gaps, "csda", reference), *_format_budgets(experiment, summary, against)]
    lines += [*_format_findings(experiment, results), *_format_missing(missing)]
    return "\n".join(lines).rstrip() + "\n"


def _format_against(gaps: Sequence[Mapping[str, Any]], title: str, reference: str) -> list[str]:
    """A section with the differences of one row to all but the first, which has them in its own table."""
    own = [gap for gap in gaps if gap["method"] == title and gap["labels"] != "all" and gap["reference"] != reference]
    if not own:
        return []
    lines = [
        f"## {title} against the others",
        "",
        *_table_head(["against", "labels", "split", "seeds", "ΔAUC", "ΔMCA"]),
    ]
    for gap in own:
        lines.append(_table_row([gap["reference"], gap["labels"], gap["split"], str(gap["seeds"]), *_points(gap)]))
    return [*lines, ""]


def _format_budgets(experiment: Experiment, summary: Sequence[Mapping[str, Any]], against: Against) -> list[str]:
    """A section with the means over all budgets of the rows that have them all."""
    if len(experiment.labels) == 1:
        return []
    reference = experiment.rows[0].name
    lines = []
    for row in experiment.rows:
        for split in experiment.splits:
            own = [line for line in summary if (line["method"], line["split"]) == (row.name, split)]
            if len(own) == len(experiment.labels):
                figures = [_number(mean(line[f"{figure}_mean"] for line in own)) for figure in ("auc", "mca")]
                gap = against.get((row.name, reference, "all", split))
                lines.append(_table_row([row.name, split, *figures, *_points(gap)]))
    head = ["## Mean over budgets", "", *_table_head(["method", "split", "AUC", "MCA", "ΔAUC", "ΔMCA"])]
    return [*head, *lines, ""] if lines else []


def _format_findings(experiment: Experiment, results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sections with the mean AUC of each label, where an image may have several."""
    classes = _classes(results)
    if any(run["mca_prior"] is not None for run in results):
        return []
    lines = []
    for labels in experiment.labels:
        for split in experiment.splits:
            rows = {row.name: runs for row in experiment.rows if (runs := _select(results, row.name, labels, split))}
            lines += [f"## AUC of each label, {labels} labeled, split {split}", "", *_table_head(["", *rows])]
            for name in classes:
                cells = [_number(_mean(runs, f"class_auc_{name}")) for runs in rows.values()]
                lines.append(_table_row([name, *cells]))
            lines.append("")
    return lines


def _format_missing(missing: Sequence[Cell]) -> list[str]:
    seeds: dict[tuple[str, str, str], list[str]] = {}
    for cell in missing:
        seeds.setdefault((cell.title, cell.split, cell.labels), []).append(str(cell.seed))
    budgets: dict[tuple[str, str, str], list[str]] = {}
    for (title, split, labels), some in seeds.items():
        budgets.setdefault((title, split, ", ".join(some)), []).append(labels)
    lines = [
        f"- {title}, {', '.join(labels)} labels, split {split}: seeds {some}"
        for (title, split, some), labels in budgets.items()
    ]
    return ["## Missing", "", *lines] if lines else []


def _train_all(
    cells: Sequence[Cell], launcher: Launcher, jobs: int | None, side_by_side: int | None, reporter: Reporter
) -> None:
    """Train what is missing; a run that fails is named after all others have had their turn."""
    # Long runs first, so that none is left over at the end; then those on the same pixels, to share them side by side.
    cells = sorted(cells, key=lambda cell: (-cell.config.epochs * cell.config.steps_per_epoch, cell.split, cell.seed))
    failures = []
    with closing(launch(cells, launcher=launcher, jobs=jobs, side_by_side=side_by_side, note=reporter.note)) as ended:
        for done, (cell, run) in enumerate(ended, start=1):
            if isinstance(run, CsdaError):
                failures.append(f"{cell.folder.name}: {run}")
            else:
                figures = f"AUC {_number(run.result['auc'])}, MCA {_number(run.result['mca'])}"
                reporter.note(f"{done}/{len(cells)} {cell.folder.name}: {figures}")
    if failures:
        raise CsdaError("; ".join(failures))


def _find_lines(cells: Sequence[Cell], results: Path, *, folders_alone: bool) -> list[dict[str, Any] | None]:
    """What is known of each cell's run: from its folder, or else from a table that tells of a run with the same
    settings; None where it has not finished."""
    recorded = [] if folders_alone else read_recorded(results)
    lines: list[dict[str, Any] | None] = []
    for cell in cells:
        identity = identify(cell.config)
        if (cell.folder / "result.json").is_file():
            known = [_read_line(Run(cell.folder))]
        else:
            known = [one.line for one in recorded if agree(identity, one.identity)]
        described = _describe(cell) | {"settings": digest(settings_alone(identity))}
        lines.append(known[0] | described if known else None)
    return lines


def _describe(cell: Cell) -> dict[str, Any]:
    return {"method": cell.title, "labels": cell.labels, "split": cell.split, "seed": cell.seed}


def _read_line(run: Run) -> dict[str, Any]:
    """A line of NAME_runs.csv, from the small files of a run; numbers have the digits that the file keeps."""
    probs, labels = run.predictions.part("test")
    last = run.metrics[-20:]
    chosen = run.metrics[run.result["best_epoch"] - 1]
    figures = {figure: run.result.get(figure) for figure in (*FIGURES, "best_epoch", "seconds")}
    figures |= {f"val_{name}": chosen[f"val_{name}"] for name in ("auc", "mca")}
    figures |= {f"val_{name}_last20": _mean(last, f"val_{name}") for name in ("auc", "mca")}
    figures |= _unseen(run)
    for prefix, values in (
        ("recall", metrics.recall(probs, labels)),
        ("class_auc", metrics.per_class_auc(probs, labels)),
    ):
        pairs = zip(run.classes, values.tolist(), strict=True)
        figures |= {f"{prefix}_{name}": value for name, value in pairs}
    environment = run.environment
    gpu = environment["device"].startswith("cuda")
    cores = "" if gpu else f", {environment['threads']} of {environment['cores']} cores"
    return {"method": "", "labels": "", "split": "", "seed": 0} | {
        **{name: _rounded(value) if isinstance(value, float) else value for name, value in figures.items()},
        "settings": "",
        "images": digest_split(run),
        "commit": str(environment["commit"]),
        "machine": f"{environment['device_name']}{cores}",
        "torch": environment["torch"],
        "date": environment["started"][:10],
    }


def _rounded(value: float) -> float | None:
    """As it stands in the file; what is not defined is left empty."""
    return None if np.isnan(value) else float(f"{value:.6g}")


def _unseen(run: Run) -> dict[str, float | None]:
    """AUC and MCA on the test images whose group is in neither the labeled nor the unlabeled part; None where no test
    group is."""
    trained = {row.group for row in run.split if row.split in ("labeled", "unlabeled")} - {""}
    crossing = {row.id for row in run.split if row.split == "test" and row.group in trained}
    if not crossing:
        return {"auc_unseen": None, "mca_unseen": None}
    ids = np.array(run.predictions.ids)[run.predictions.splits == "test"]
    unseen = np.array([name not in crossing for name in ids])
    probs, labels = (values[unseen] for values in run.predictions.part("test"))
    return {"auc_unseen": metrics.auc(probs, labels), "mca_unseen": metrics.mca(probs, labels)}


def _require_same_images(found: Sequence[Found]) -> None:
    """Runs that a table compares were given the same images in the same parts."""
    seen: dict[tuple[object, ...], Found] = {}
    for cell, line in found:
        seed = cell.config.seed if cell.config.split_seed is None else cell.config.split_seed
        place = cell.labels, cell.split, seed, METHODS[cell.method].uses_truth
        other, other_line = seen.setdefault(place, (cell, line))
        if other_line["images"] != line["images"]:
            raise RunError(
                f"{cell.title} and {other.title} at {cell.labels} labels, split {cell.split}, were given different "
                f"images; train one of them anew on the same data ({cell.folder}, {other.folder})"
            )


def _draw(path: Path, experiment: Experiment, found: Sequence[Found]) -> None:
    """The picture of a grid: the paper's figure, or one by its shape."""
    results = [line for _, line in found]
    names = [row.name for row in experiment.rows if any(line["method"] == row.name for line in results)]
    svg = path.with_name(f"{path.name}.svg")
    if experiment.figure is not None:
        runs = {name: [Run(cell.folder) for cell, _ in found if cell.title == name] for name in names}
        if experiment.figure == "examples":
            write_photographs(draw_examples(_pick_examples(runs)), path.with_name(f"{path.name}.png"))
        else:
            write_grid({"confusion": draw_confusions, "temperature": draw_temperatures}[experiment.figure](runs), svg)
        return
    if len(experiment.labels) > 1:
        lines = summarize(experiment, results)
        write_grid(draw_budgets(lines, names, experiment.labels, list(experiment.splits)), svg)
        return
    labels, split = experiment.labels[0], next(iter(experiment.splits))
    shown = [line for line in results if (line["labels"], line["split"]) == (labels, split)]
    if len(names) > 4:
        paper = {row.name: row.paper.get(labels, []) for row in experiment.rows}
        write_grid(draw_rows(shown, names, paper), svg)
        return
    examples = None
    classes = _classes(results)
    if experiment.data == "synthetic":
        dataset = load_dataset("synthetic", seed=experiment.seeds[0])
        first = {record.label: position for position, record in reversed(list(enumerate(dataset.records)))}
        assert dataset.draw is not None
        images = dataset.draw([first[label] for label in range(len(classes))], 64)
        examples = dict(zip(classes, images, strict=True))
    write_grid(draw_grid(shown, names, classes, examples), svg)


def _pick_examples(runs: Mapping[str, Sequence[Run]], number: int = 7) -> list[Example]:
    """Unlabeled images at random, whatever is said of them: one of each class, or some with a label where an image may
    have several."""
    firsts = {name: own[0] for name, own in runs.items()}
    run = next(iter(firsts.values()))
    index = {name: position for position, name in enumerate(run.classes)}
    truth = {image: label for image, label in run.truth.items() if label != NONE_PRESENT}
    order = np.random.default_rng(0).permutation(sorted(truth)).tolist()
    if run.multi_label:
        chosen = order[:number]
    else:
        of_class = {truth[image]: image for image in reversed(order)}
        chosen = [of_class[name] for name in run.classes[:number] if name in of_class]
    config = run.settings
    dataset = load_dataset(config.data, config.source, split=config.split, labels=config.labels, seed=config.seed)
    positions = {record.id: position for position, record in enumerate(dataset.records)}
    examples = []
    for image in chosen:
        path = dataset.records[positions[image]].path
        if path is None:
            assert dataset.draw is not None
            (pixels,) = dataset.draw([positions[image]], 128)
        else:
            pixels = read_image(path, 128, 3)
        labels = tuple(sorted(truth[image].split(JOIN) if run.multi_label else [truth[image]], key=index.__getitem__))
        guesses = {}
        for name, one in firsts.items():
            probs = one.pseudo_labels[image]
            likeliest = np.argsort(-probs, kind="stable")[: len(labels)]
            guesses[name] = [(run.classes[position], float(probs[position])) for position in likeliest]
        examples.append(Example(pixels, labels, guesses))
    return examples


def _classes(results: Sequence[Mapping[str, Any]]) -> list[str]:
    return [column.removeprefix("recall_") for column in results[0] if column.startswith("recall_")]


def _select(results: Iterable[Mapping[str, Any]], title: str, labels: str, split: str) -> list[Mapping[str, Any]]:
    return [run for run in results if (run["method"], run["labels"], run["split"]) == (title, labels, split)]


def _command(name: str, data: str | None, overrides: Mapping[str, Any]) -> str:
    """The command without the places of one machine."""
    words = ["csda", "reproduce", Path(name).name, *(["--data", Path(data).name] if data else [])]
    return shlex.join(words + [word for key, value in overrides.items() for word in ("--set", f"{key}={value}")])


def _provenance(command: str, found: Sequence[Found], missing: int) -> dict[str, Any]:
    identities = [(cell, identify(cell.config)) for cell, _ in found]
    whole = {column: sorted({line[column] for _, line in found}) for column in ("commit", "machine", "torch")}
    return {
        "command": command,
        "date": max(line["date"] for _, line in found),
        **whole,
        "seeds": sorted({cell.seed for cell, _ in found}),
        "runs": len(found),
        "missing": missing,
        "data": identities[0][1]["data"],
        "splits": {
            cell.split: {name: identity[name] for name in PLACES if name.startswith("split") and name in identity}
            for cell, identity in identities
        },
        "settings": {line["settings"]: settings_alone(identity)
                     for (_, line), (_, identity) in zip(found, identities, strict=True)},
    }  # fmt: skip


def _cells(lines: Iterable[Mapping[str, Any]], columns: Iterable[str]) -> list[list[object]]:
    columns = list(columns)
    shown = ([line.get(column) for column in columns] for line in lines)
    return [[f"{value:.6g}" if isinstance(value, float) else value for value in line] for line in shown]


def _mean(runs: Iterable[Mapping[str, Any]], figure: str) -> float | None:
    values = [run[figure] for run in runs if run.get(figure) is not None]
    return mean(values) if values else None


def _deviation(runs: Iterable[Mapping[str, Any]], figure: str) -> float | None:
    values = [run[figure] for run in runs if run[figure] is not None]
    return stdev(values) if len(values) > 1 else None


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _spread(value: float | None, deviation: float | None) -> str:
    return _number(value) if deviation is None else f"{_number(value)} ± {_number(deviation)}"


def _points(gap: Mapping[str, Any] | None) -> list[str]:
    """The differences in AUC and MCA in points, in bold where the interval leaves zero out."""
    if gap is None:
        return ["", ""]
    cells = []
    for figure in ("auc", "mca"):
        value, low, high = (gap[f"{figure}_{part}"] for part in ("gap", "low", "high"))
        text = f"{100 * value:+.1f}"
        if low is not None:
            text = f"**{text}**" if low * high > 0 else text
            text += f" [{100 * low:+.1f}, {100 * high:+.1f}]"
        cells.append(text)
    return cells


def _paper(line: Mapping[str, Any], reference: Mapping[str, Any] | None) -> list[str]:
    """What the paper has for a line, and its difference to the reference in points."""
    figures = [line["paper_auc"], line["paper_mca"]]
    known = [value for value in figures if value is not None]
    gaps = []
    if reference is not None and reference["method"] != line["method"]:
        theirs = [reference["paper_auc"], reference["paper_mca"]]
        pairs = zip(figures, theirs, strict=True)
        gaps = [f"{100 * (own - other):+.1f}" for own, other in pairs if own is not None and other is not None]
    return [" / ".join(_number(value) for value in known), " / ".join(gaps)]


def _table_head(titles: Sequence[str]) -> list[str]:
    return [_table_row(titles), _table_row(["---"] * len(titles)).replace(" ", "")]


def _table_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
