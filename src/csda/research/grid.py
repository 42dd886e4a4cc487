"""Figures of a grid of runs: over label counts, over many rows, or each seed and class of a few rows.

A filled mark was measured here, an open one of the same colour is the paper's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.offsetbox import AnnotationBbox, OffsetImage
from matplotlib.ticker import MaxNLocator, PercentFormatter

from csda.data import load_dataset
from csda.data.records import Pixels
from csda.files import write_whole
from csda.report.figures import PALETTE, STYLE, alone, to_svg
from csda.report.tables import choose_colours
from csda.research.experiments import Experiment
from csda.research.summary import Line, average, group, list_classes, summarize

_styled = matplotlib.rc_context(STYLE)
WIDTH = 10.6
"""Width of a picture in inches of 72 pixels, about that of the text in the documentation."""

_COLOURS = ("vermilion", "blue", "green", "amber", "pink", "sky", "olive", "grey")


def draw_experiment(experiment: Experiment, results: Sequence[Line]) -> Figure:
    """Draw the picture for the shape of a grid: over budgets, over many rows, or of a few rows in detail.

    `results` are the lines of runs.csv.
    """
    names = [row.name for row in experiment.rows if any(line["method"] == row.name for line in results)]
    if experiment.cases:
        return draw_rows(results, names, {name: [] for name in names}, list(experiment.splits))
    if len(experiment.labels) > 1 and len(names) > len(_COLOURS):
        means = average_budgets(results, experiment.labels)
        return draw_rows(means, names, {name: [] for name in names}, list(experiment.splits), "means over budgets")
    if len(experiment.labels) > 1:
        return draw_budgets(summarize(experiment, results), names, experiment.labels, list(experiment.splits))
    labels, splits = experiment.labels[0], list(experiment.splits)
    if len(names) > 4:
        paper = {row.name: row.paper.get(labels, []) for row in experiment.rows}
        return draw_rows(results, names, paper, [name for name in splits if any(r["split"] == name for r in results)])
    shown = [line for line in results if (line["labels"], line["split"]) == (labels, splits[0])]
    classes = list_classes(results)
    examples = None
    if experiment.data == "synthetic":
        dataset = load_dataset("synthetic", seed=experiment.seeds[0])
        first = {record.label: position for position, record in reversed(list(enumerate(dataset.records)))}
        assert dataset.draw is not None
        images = dataset.draw([first[label] for label in range(len(classes))], 64)
        examples = dict(zip(classes, images, strict=True))
    return draw_grid(shown, names, classes, examples)


@_styled
def draw_grid(
    results: Sequence[Line],
    titles: Sequence[str],
    classes: Sequence[str],
    examples: Mapping[str, Pixels] | None = None,
) -> Figure:
    """MCA of every seed, with its mean, and mean recall of each class, for each row of a grid.

    `results` are the lines of runs.csv of one budget and split; `examples` an image [H, W, 3] of each class.
    """
    figure = Figure(figsize=(WIDTH, 1.6 + 0.62 * len(classes)), layout="constrained")
    seeds, recalls = figure.subplots(1, 2, width_ratios=(1, 1.4))
    for row, title in enumerate(titles):
        runs = [run for run in results if run["method"] == title]
        colour = PALETTE[_COLOURS[row % len(_COLOURS)]]
        _draw_seeds(seeds, row, [run["mca"] for run in runs], colour)
        means = [np.mean([run[f"recall_{name}"] for run in runs]) for name in classes]
        places = np.arange(len(classes)) + 0.7 * ((row + 0.5) / len(titles) - 0.5)
        recalls.barh(places, means, 0.62 / len(titles), color=colour, label=title)
    seeds.set_yticks(range(len(titles)), titles)
    seeds.invert_yaxis()
    seeds.set_title("MCA, a dot for each seed")
    recalls.set_yticks(range(len(classes)), classes)
    recalls.invert_yaxis()
    recalls.set_xlim(0, 1)
    recalls.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    recalls.set_title("Mean recall of each class")
    recalls.grid(visible=False, axis="y")
    if examples is not None:
        for place, name in enumerate(classes):
            image = OffsetImage(examples[name], zoom=0.6)
            recalls.add_artist(
                AnnotationBbox(image, (0, place), (-78, 0), boxcoords="offset points", frameon=False, pad=0)
            )
        recalls.tick_params(axis="y", pad=6)
        recalls.set_ylabel(" ", labelpad=44)
    figure.legend(*recalls.get_legend_handles_labels(), loc="outside lower center", ncols=min(4, len(titles)))
    return figure


def colour_rows(titles: Collection[str]) -> dict[str, str]:
    """A colour for each row: the method's own, if it has one, else the next free one."""
    return {title: PALETTE[colour] for title, colour in zip(titles, choose_colours(titles, _COLOURS), strict=True)}


@_styled
def draw_budgets(
    summary: Sequence[Line], titles: Sequence[str], budgets: Sequence[str], splits: Sequence[str]
) -> Figure:
    """AUC and MCA of each row over the budgets that have runs: mean and standard deviation over seeds, a line for each
    split.

    `summary` are the lines of summary.csv.
    """
    budgets = [labels for labels in budgets if any(line["labels"] == labels for line in summary)]
    several = len(splits) > 1
    figure = Figure(figsize=(WIDTH, 1 + (3.0 if several else 4.2) * len(splits)), layout="constrained")
    colours = colour_rows(titles)
    panels = figure.subplots(len(splits), 2, squeeze=False, sharey="col").flat
    for axes, (split, name) in zip(panels, product(splits, ("auc", "mca")), strict=True):
        for row, title in enumerate(titles):
            lines = {line["labels"]: line for line in summary if (line["method"], line["split"]) == (title, split)}
            places = np.array([place for place, labels in enumerate(budgets) if labels in lines], dtype=float)
            places += 0.36 * ((row + 0.5) / len(titles) - 0.5)
            own = [lines[labels] for labels in budgets if labels in lines]
            _draw_series(axes, places, own, name, colours[title], title)
        axes.set_xticks(range(len(budgets)), [labels.replace(" ", "\n", 1) for labels in budgets])
        axes.set_xlim(-0.5, len(budgets) - 0.5)
        axes.grid(visible=False, axis="x")
        axes.set_title(f"{name.upper()}, {split}" if several else name.upper())
        axes.set_xlabel("labels")
    _add_legend(figure, axes, summary)
    return figure


def _draw_series(
    axes: Axes, places: npt.NDArray[np.float64], lines: Sequence[Line], name: str, colour: str, title: str
) -> None:
    means = [line[f"{name}_mean"] for line in lines]
    spreads = [line[f"{name}_std"] or 0.0 for line in lines]
    width = 2.4 if title == "csda" else 1.2
    axes.errorbar(places, means, spreads, fmt="o-", color=colour, label=title, linewidth=width, markersize=6)
    paper = [line[f"paper_{name}"] for line in lines]
    known = [place for place, value in enumerate(paper) if value is not None]
    axes.plot(places[known], [paper[place] for place in known], "o", markersize=6, **_open(colour))


def average_budgets(results: Sequence[Line], budgets: Sequence[str]) -> list[dict[str, Any]]:
    """The mean over budgets of each row, split and seed with runs at all budgets."""
    runs = group(((run["method"], run["split"], run["seed"]), run) for run in results)
    return [
        {"method": title, "split": split, "seed": seed, **{name: average(own, name) for name in ("auc", "mca")}}
        for (title, split, seed), own in runs.items()
        if {run["labels"] for run in own} == set(budgets)
    ]


@_styled
def draw_rows(
    results: Sequence[Line],
    titles: Sequence[str],
    paper: Mapping[str, Sequence[float]],
    splits: Sequence[str],
    explained: str = "dots are seeds, bars means",
) -> Figure:
    """AUC and MCA of each row: every seed, the mean, and the paper's value; for grids with many rows.

    `results` are the lines of runs.csv of one budget, or of `average_budgets`; each split has its own panels.
    """
    size = (WIDTH, 1.4 + 0.38 * len(titles) * len(splits))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(splits), 2, sharey=True, squeeze=False).flat
    kinds = product(splits, enumerate(("auc", "mca")))
    for axes, (split, (position, name)) in zip(panels, kinds, strict=True):
        for row, title in enumerate(titles):
            colour = PALETTE["vermilion" if row == 0 else "blue"]
            runs = [run for run in results if (run["method"], run["split"]) == (title, split)]
            _draw_seeds(axes, row, [run[name] for run in runs], colour)
            known = paper[title][position : position + 1]
            axes.plot(known, [row] * len(known), "D", **_open(colour))
        axes.set_yticks(range(len(titles)), titles)
        axes.set_ylim(len(titles) - 0.4, -0.6)
        axes.xaxis.set_major_locator(MaxNLocator(5))  # more would run into each other
        axes.set_title(name.upper() + (f", {split}" if len(splits) > 1 else ""))
    axes.plot([], [], linestyle="none", label=explained)
    if any(paper.values()):
        axes.plot([], [], "D", label="the paper", **_open(PALETTE["ink"]))
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def _draw_seeds(axes: Axes, row: int, scores: Sequence[float], colour: str) -> None:
    """A dot for each seed of a row, and a bar at their mean."""
    axes.plot(scores, [row] * len(scores), "o", color=colour, alpha=0.35, markeredgewidth=0)
    if scores:
        axes.plot([np.mean(scores)] * 2, [row - 0.3, row + 0.3], color=colour, linewidth=3)


def _open(colour: str) -> dict[str, Any]:
    return {"markerfacecolor": "none", "markeredgecolor": colour, "markeredgewidth": 1.4, "linestyle": "none"}


def _add_legend(figure: Figure, axes: Axes, summary: Sequence[Line]) -> None:
    if any(line["paper_auc"] is not None for line in summary):
        axes.plot([], [], "o", label="open: the paper", **_open(PALETTE["ink"]))
    handles, labels = axes.get_legend_handles_labels()
    # A letter is about 1/12 inch wide, and a line with its gap as much as nine letters.
    fitting = int(12 * figure.get_figwidth() / (9 + max(map(len, labels))))
    figure.legend(handles, labels, loc="outside lower center", ncols=min(8, len(labels), max(1, fitting)))


def write_grid(figure: Figure, path: Path, description: str) -> None:
    """Save the picture as an SVG for light and dark mode, with the same bytes for the same numbers."""
    write_whole(path, alone(to_svg(figure, description)))
