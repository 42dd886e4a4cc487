"""The picture of a grid of runs: every seed of every row, and what became of each class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.offsetbox import AnnotationBbox, OffsetImage
from matplotlib.ticker import PercentFormatter

from csda.data.records import Pixels
from csda.report.figures import PALETTE, STYLE

_COLOURS = ("vermilion", "blue", "green", "amber", "pink", "sky", "olive", "grey")


def draw_grid(
    results: Sequence[Mapping[str, Any]],
    titles: Sequence[str],
    classes: Sequence[str],
    examples: Mapping[str, Pixels] | None = None,
) -> Figure:
    """MCA of every seed, with its mean, and mean recall of each class, for each row of a grid.

    `results` are the lines of NAME_runs.csv of one budget and split; `examples` an image [H, W, 3] of each class.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(13.6, 1.6 + 0.62 * len(classes)), facecolor="white", layout="constrained")
        seeds, recalls = figure.subplots(1, 2, width_ratios=(1, 1.4))
        for row, title in enumerate(titles):
            runs = [run for run in results if run["method"] == title]
            colour = PALETTE[_COLOURS[row % len(_COLOURS)]]
            scores = np.array([run["mca"] for run in runs], dtype=float)
            seeds.plot(scores, np.full(len(scores), row), "o", color=colour, alpha=0.35, markeredgewidth=0)
            seeds.plot([scores.mean()] * 2, [row - 0.3, row + 0.3], color=colour, linewidth=3)
            means = [np.mean([run[f"recall_{name}"] for run in runs]) for name in classes]
            places = np.arange(len(classes)) + 0.7 * ((row + 0.5) / len(titles) - 0.5)
            recalls.barh(places, means, 0.62 / len(titles), color=colour, label=title)
        seeds.set_yticks(range(len(titles)), titles)
        seeds.invert_yaxis()
        seeds.set_title("MCA on the test images, a dot for each seed")
        recalls.set_yticks(range(len(classes)), classes)
        recalls.invert_yaxis()
        recalls.set_xlim(0, 1)
        recalls.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        recalls.set_title("Mean share of each class that is recognised")
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


def write_grid(figure: Figure, path: Path) -> None:
    """Save the picture as SVG, the same bytes for the same numbers."""
    with matplotlib.rc_context(STYLE | {"svg.fonttype": "path"}):
        figure.savefig(path, format="svg", metadata={"Date": None})
