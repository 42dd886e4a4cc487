"""Train a grid of runs and write its table or figure.

An experiment is a TOML file: rows (a method with settings), label budgets, splits, seeds, and what the paper reports.
`reproduce` trains what is missing, continues with what was interrupted, and writes into a folder of the table's name

    summary.csv   a line for each row, budget and split: mean and spread over seeds, beside the paper's figures
    runs.csv      a line for each run: enough to check summary.csv, and to identify the run
    gaps.csv      paired differences over seeds with their intervals: to the baseline, and of csda to every other row
    page.md       the same as a page, which also says what is missing
    figure.svg    a picture (.png where it shows photographs)
    meta.json     the command, commits, machine and date, and the complete settings of every row

and where the picture shows epochs, means over seeds:

    epochs.csv    every figure of an epoch
    guesses.csv   the unlabeled images of each class, those predicted as it, the correct ones, and those in the queue
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from csda.config import RunConfig, Setting
from csda.environment import source_commit
from csda.errors import CsdaError, DataError, RunError
from csda.files import write_csv, write_whole
from csda.methods import METHODS
from csda.presets import configure
from csda.progress import Reporter
from csda.research.blends import SPLIT, make_blend
from csda.research.experiments import Experiment, choose_variant, read_experiment
from csda.research.grid import draw_experiment, write_grid
from csda.research.launch import Launcher, launch
from csda.research.ledger import (
    PLACES,
    ContentFinder,
    Contents,
    Recorded,
    agree,
    digest,
    identify,
    locate,
    read_line,
    read_recorded,
    recall_contents,
    settings_alone,
)
from csda.research.paper import (
    average_epochs,
    count_guesses,
    draw_confusions,
    draw_epochs,
    draw_examples,
    draw_temperatures,
    pick_examples,
    write_photographs,
)
from csda.research.summary import GAPS, compare_rows, format_number, format_page, group, list_columns, summarize
from csda.runs import Run
from csda.training import train


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of the grid with its identity."""

    title: str
    method: str
    labels: str
    split: str
    seed: int
    folder: Path
    data: str
    preset: str | None
    settings: Mapping[str, Any]
    identity: Mapping[str, Any] = field(default_factory=dict)

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


DIVIDING = ("split", "split_by", "split_seed")
"""Settings that divide a data set, together with the number of labels."""

FindContents = Callable[[str, RunConfig], Contents]
"""The digests of the data of each split, by name."""

Found = tuple[Cell, dict[str, Any]]
"""A cell and the row of its run in runs.csv."""


def list_cells(
    experiment: Experiment,
    runs: Path,
    data: str,
    find_contents: FindContents,
    overrides: Mapping[str, Any] | None = None,
    commit: str | None = None,
) -> list[Cell]:
    """Every run of the grid; `overrides` replace settings of the file.

    With a `commit` only folders of runs started at it are used.
    """
    cells = []
    for row, labels, split in experiment.places:
        images, place = _find_place(experiment.splits[split], data)
        place.pop("labels", None)
        # Reports of hundreds of runs are not needed.
        unseen = {"thumbnails": False}
        settings = {**unseen, **experiment.settings, **row.settings, **place, **(overrides or {})}
        for seed in experiment.seeds:
            preset = row.preset or experiment.preset
            cell = Cell(row.name, row.method, labels, split, seed, runs, images, preset, settings)
            config = cell.config
            contents = find_contents(split, config)
            folder = locate(runs, split, config, contents, commit)
            cells.append(replace(cell, folder=folder, identity=identify(config, contents)))
    return cells


def _find_place(place: Mapping[str, Setting], data: str) -> tuple[str, dict[str, Setting]]:
    """The folder of a split's images, and its other settings with the path of its lists."""
    settings = dict(place)
    images = str(Path(data) / str(settings.pop("data"))) if "data" in settings else data
    if "split" in settings:
        settings["split"] = str(Path(images) / str(settings["split"]))
    return images, settings


@dataclass(frozen=True, slots=True)
class Grid:
    """An experiment on its data: the requested name, the name of its folder, and its runs; with a `commit` only those
    trained at it.
    """

    name: str
    stem: str
    experiment: Experiment
    cells: list[Cell]
    commit: str | None

    def find_lines(self, results: Path) -> list[dict[str, Any] | None]:
        """The row of each cell's run: from its folder, or from a table with a run of the same settings, if the picture
        needs no folder; None if it has not finished.
        """
        recorded = [] if self.experiment.figure else read_recorded(results, self.commit)
        return [_find_line(cell, recorded) for cell in self.cells]


def reproduce(
    names: Sequence[str],
    *,
    data: str | None,
    runs: Path,
    out: Path,
    launcher: Launcher = "processes",
    jobs: int | None = None,
    side_by_side: int | None = None,
    minutes: float | None = None,
    reporter: Reporter,
    overrides: Mapping[str, Any] | None = None,
    labels: Sequence[str] = (),
    seeds: int | None = None,
    preset: str | None = None,
    only_finished: bool = False,
    fresh: bool = False,
) -> list[Path]:
    """Train the missing runs of all experiments together, write their tables, and return their pages.

    `labels`, `seeds` (a number) and `preset` restrict what is trained, `only_finished` trains nothing, and after
    `minutes` no run is started. A table has all runs that exist then, as folders in `runs` or as rows of tables in
    `out`. With `fresh` only runs of the current commit are used, all others are trained again, and an existing table is
    kept until all are complete.
    """
    commit = _require_commit() if fresh else None
    finder = ContentFinder()
    grids = [_open_grid(name, data, runs, out, finder, overrides, only_finished, commit) for name in names]
    chosen: dict[Path, Cell] = {}
    for grid in grids:
        wanted = grid.experiment.seeds[:seeds]
        missing = {
            cell.folder: cell
            for cell, line in zip(grid.cells, grid.find_lines(out), strict=True)
            if line is None
            and cell.seed in wanted
            and (not labels or cell.labels in labels)
            and preset in (None, cell.preset)
            and not only_finished
        }
        reporter.note(f"{grid.stem}: {len(grid.cells)} runs, {len(missing)} of them to train")
        chosen |= missing
    _train_all(list(chosen.values()), launcher, jobs, side_by_side, minutes, reporter)
    pages = [_write_grid(grid, data, runs, out, overrides or {}, reporter) for grid in grids]
    return [page for page in pages if page is not None]


def _require_commit() -> str:
    """The commit that runs trained now are of."""
    commit = source_commit()
    if commit is None:
        raise RunError("--fresh: the commit of these sources is not known; name it in CSDA_COMMIT")
    if commit.endswith("+changed"):
        raise RunError(f"--fresh: the package has been changed since commit {commit[:7]}; commit the changes first")
    return commit


def _open_grid(
    name: str,
    data: str | None,
    runs: Path,
    out: Path,
    finder: ContentFinder,
    overrides: Mapping[str, Any] | None,
    only_finished: bool,
    commit: str | None,
) -> Grid:
    stem, experiment = read_experiment(name)
    source = data or experiment.data
    stem, experiment = choose_variant(stem, experiment, source)
    table = out / stem / "meta.json"
    if source == "synthetic" or Path(source).exists():
        about = None
    elif only_finished and table.is_file():
        about = json.loads(table.read_text(encoding="utf-8"))
    else:
        raise DataError(f"{source}: there is no such folder of images; name it with --data")

    experiment = place_blends(experiment, None if about else Path(source), runs / "blends")

    def find_contents(split: str, config: RunConfig) -> Contents:
        return finder(config) if about is None else recall_contents(about, split)

    return Grid(name, stem, experiment, list_cells(experiment, runs, source, find_contents, overrides, commit), commit)


def place_blends(experiment: Experiment, data: Path | None, folder: Path) -> Experiment:
    """The experiment with each blend as the data of its split, made in `folder` if the images are at hand."""
    splits = dict(experiment.splits)
    for name, blend in experiment.blends.items():
        place = splits[name]
        made = folder
        if data is not None:
            images, settings = _find_place(place, str(data))
            dividing = {key: settings[key] for key in ("labels", *DIVIDING) if key in settings}
            config = configure({"method": "baseline", "data": images, **dividing})
            made = make_blend(blend, config, None if blend.strangers is None else data / blend.strangers, folder)
        kept = {key: value for key, value in place.items() if key not in DIVIDING}
        splits[name] = kept | {"data": str(made.absolute()), "split": SPLIT}
    return experiment.model_copy(update={"splits": splits})


def _write_grid(
    grid: Grid, data: str | None, runs: Path, out: Path, overrides: Mapping[str, Any], reporter: Reporter
) -> Path | None:
    lines = grid.find_lines(out)
    found = [(cell, line) for cell, line in zip(grid.cells, lines, strict=True) if line is not None]
    if not found:
        raise RunError(f"{grid.stem}: no run of it has finished, in {runs} or in the tables of {out}; train some first")
    _require_same_images(found)
    missing = [_describe(cell) for cell, line in zip(grid.cells, lines, strict=True) if line is None]
    about = out / grid.stem / "meta.json"
    if grid.commit and missing and about.is_file() and json.loads(about.read_text())["commit"] != [grid.commit]:
        reporter.note(
            f"{grid.stem}: {len(found)} of {len(lines)} runs are of commit {grid.commit[:7]}; {out / grid.stem} stays "
            "as it is until all are, so give the same command again, or another --out to see what there is"
        )
        return None
    results = [line for _, line in found]
    summary, gaps = summarize(grid.experiment, results), compare_rows(grid.experiment, results)
    provenance = _provenance(_command(grid.name, data, overrides), found, len(missing))
    folder = out / grid.stem
    folder.mkdir(parents=True, exist_ok=True)
    _write_lines(folder / "runs.csv", _with_presets(grid.experiment, results))
    _write_lines(folder / "summary.csv", _with_presets(grid.experiment, summary), list_columns(grid.experiment))
    _write_lines(folder / "gaps.csv", gaps, GAPS)
    write_whole(folder / "meta.json", json.dumps(provenance, indent=1, ensure_ascii=False) + "\n")
    _draw(folder, grid.experiment, found)
    return write_whole(folder / "page.md", format_page(grid.experiment, results, summary, gaps, provenance, missing))


def _with_presets(experiment: Experiment, lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Add a column with the presets of rows, if rows have presets."""
    names = {row.name: row.title or row.method for row in experiment.rows}
    presets = experiment.presets
    return [
        {"method": names[line["method"]], "preset": presets[line["method"]]}
        | {name: value for name, value in line.items() if name not in ("method", "preset")}
        if presets
        else dict(line)
        for line in lines
    ]


def _find_line(cell: Cell, recorded: Sequence[Recorded]) -> dict[str, Any] | None:
    if (cell.folder / "result.json").is_file():
        line = read_line(Run(cell.folder))
    elif (known := next((one for one in recorded if agree(cell.identity, one.identity)), None)) is not None:
        line = known.line
    else:
        return None
    return line | _describe(cell) | {"settings": digest(settings_alone(cell.identity))}


def _describe(cell: Cell) -> dict[str, Any]:
    """The first columns of its row."""
    return {"method": cell.title, "labels": cell.labels, "split": cell.split, "seed": cell.seed}


def _train_all(
    cells: Sequence[Cell],
    launcher: Launcher,
    jobs: int | None,
    side_by_side: int | None,
    minutes: float | None,
    reporter: Reporter,
) -> None:
    """Train the missing runs. If some fail, an error names them after all others have ended."""
    cells = sorted(cells, key=_turn)
    launched = launch(
        cells, launcher=launcher, jobs=jobs, side_by_side=side_by_side, minutes=minutes, note=reporter.note
    )
    failures = []
    with closing(launched) as ended:
        for done, (cell, run) in enumerate(ended, start=1):
            if isinstance(run, CsdaError):
                failures.append(f"{cell.folder.name}: {run}")
            else:
                figures = f"AUC {format_number(run.result['auc'])}, MCA {format_number(run.result['mca'])}"
                reporter.note(f"{done}/{len(cells)} {cell.folder.name}: {figures}")
    if failures:
        raise CsdaError("; ".join(failures))


def _turn(cell: Cell) -> tuple[int, int, str, int]:
    """The order of training: long runs first, so that none is left at the end; then seed by seed, so that an
    interrupted grid has all splits; within a split, larger batches first.
    """
    config, own = cell.config, cell.config.method_settings
    unlabeled = METHODS[config.method].uses_unlabeled
    images = own["capacity"] if own.get("queue") == "vcq" else config.unlabeled_batch_size * unlabeled
    return -config.epochs * config.steps_per_epoch, cell.seed, cell.split, -images


def _require_same_images(found: Sequence[Found]) -> None:
    """Refuse to compare runs on different images or parts."""
    seen: dict[tuple[object, ...], Found] = {}
    for cell, line in found:
        seed = cell.config.seed if cell.config.split_seed is None else cell.config.split_seed
        place = cell.labels, cell.split, seed, METHODS[cell.method].uses_truth
        other, other_line = seen.setdefault(place, (cell, line))
        if other_line["images"] != line["images"]:
            raise RunError(
                f"{cell.title} and {other.title} at {cell.labels} labels, split {cell.split}, were given different "
                f"images; train one of them again on the same data ({cell.folder}, {other.folder})"
            )


def _provenance(command: str, found: Sequence[Found], missing: int) -> dict[str, Any]:
    whole = {column: sorted({line[column] for _, line in found}) for column in ("commit", "machine", "torch")}
    several = len({cell.identity["data"] for cell, _ in found}) > 1
    own = [place for place in PLACES if "split" in place or (place == "data" and several)]
    return {
        "command": command,
        "date": max(line["date"] for _, line in found),
        **whole,
        "seeds": sorted({cell.seed for cell, _ in found}),
        "runs": len(found),
        "missing": missing,
        "data": found[0][0].identity["data"],
        "splits": {
            cell.split: {place: cell.identity[place] for place in own if place in cell.identity} for cell, _ in found
        },
        "settings": {line["settings"]: settings_alone(cell.identity) for cell, line in found},
    }


def _command(name: str, data: str | None, overrides: Mapping[str, Any]) -> str:
    """The command without paths of this machine."""
    words = ["csda", "reproduce", Path(name).name, *(["--data", Path(data).name] if data else [])]
    return shlex.join(words + [word for key, value in overrides.items() for word in ("--set", f"{key}={value}")])


def _write_lines(path: Path, lines: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None) -> None:
    """Write rows as CSV, with all their columns unless columns are given."""
    columns = columns or list(dict.fromkeys(column for line in lines for column in line))
    shown = ([line.get(column) for column in columns] for line in lines)
    cells = [[f"{value:.6g}" if isinstance(value, float) else value for value in line] for line in shown]
    write_csv(path, columns, cells)


def _draw(folder: Path, experiment: Experiment, found: Sequence[Found]) -> None:
    """Draw the paper's figure, or a picture of the grid; write the numbers of a picture of epochs."""
    picture = folder / "figure.svg"
    if experiment.figure is None:
        write_grid(draw_experiment(experiment, [line for _, line in found]), picture, experiment.title)
        return
    places = group(((cell.title, cell.labels, cell.split), Run(cell.folder)) for cell, _ in found)
    runs = group((title, run) for (title, *_), own in places.items() for run in own)
    if experiment.figure == "examples":
        write_photographs(draw_examples(pick_examples(runs, found[0][0].config)), folder / "figure.png")
    else:
        draw = {"confusion": draw_confusions, "temperature": draw_temperatures, "epochs": draw_epochs}
        write_grid(draw[experiment.figure](runs), picture, experiment.title)
    if experiment.figure == "epochs":
        for kind, tell in (("epochs", average_epochs), ("guesses", count_guesses)):
            lines = [
                {"method": method, "labels": labels, "split": split, "seeds": len(own), **line}
                for (method, labels, split), own in places.items()
                for line in tell(own)
            ]
            if lines:
                _write_lines(folder / f"{kind}.csv", lines)
