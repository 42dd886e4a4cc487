"""The pictures of a report. Each function returns a matplotlib figure; `to_svg` turns one into text for a page.

One unit of a figure is one CSS pixel, and colours become CSS variables, so that a page can be light or dark.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any, Literal

import matplotlib
import numpy as np
import numpy.typing as npt
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, PercentFormatter

from csda import metrics
from csda.report.curves import GRID, Coverage, Curve, Reliability
from csda.report.tables import Entry, count_classes, judged_part
from csda.runs import Run

Array = npt.NDArray[np.float64]

PALETTE = {
    "blue": "#0072b2",
    "vermilion": "#d55e00",
    "green": "#009e73",
    "pink": "#cc79a7",
    "amber": "#e69f00",
    "sky": "#56b4e9",
    "olive": "#8a7a1c",
    "grey": "#767676",
    "ink": "#1c2733",
    "muted": "#5d6b7a",
    "line": "#dde3ea",
    "paper": "#fefefe",
}

STYLE: dict[Any, Any] = {
    "axes.edgecolor": PALETTE["line"],
    "axes.labelcolor": PALETTE["muted"],
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.labelsize": 12,
    "figure.dpi": 72,
    "font.size": 12,
    "grid.color": PALETTE["line"],
    "legend.frameon": False,
    "legend.fontsize": 12,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",
    "svg.hashsalt": "csda",
    "text.color": PALETTE["ink"],
    # A class may be called "$x$"; this is a name, not a formula.
    "text.parse_math": False,
    "xtick.color": PALETTE["line"],
    "xtick.labelcolor": PALETTE["muted"],
    "ytick.color": PALETTE["line"],
    "ytick.labelcolor": PALETTE["muted"],
    "xtick.labelsize": 11,
    "ytick.labelsize": 11,
}

_VARIABLES = {colour: f"var(--{name})" for name, colour in PALETTE.items()}
_styled = matplotlib.rc_context(STYLE)

HALF, FULL, NARROW = 410, 980, 360
"""Widths of a picture that shares the page, of one that has it alone, and of the latter on a phone."""


AREAS = 3
"""Largest number of areas in the title of a panel."""

MARGIN = 12
"""Pixels around a picture that is saved as a file."""


def to_svg(figure: Figure, description: str) -> Markup:
    """Convert the figure to an `svg` element with real text and the colours of the page."""
    buffer = io.StringIO()
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        # The browser draws the text, and has the letters that matplotlib's font lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", buffer.getvalue(), flags=re.DOTALL)
    body = svg[svg.index(">", svg.index("<svg")) + 1 :]
    width, height = (round(inches * 72) for inches in figure.get_size_inches())
    opening = Markup(
        '<svg viewBox="0 0 {} {}" style="max-width: {}px" role="img" aria-label="{}" '
        'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'
    ).format(width, height, round(1.2 * width), description)
    # Only tags are changed, because names in the text may contain anything.
    return opening + Markup(re.sub(r"<[^>]*>", _adapt_tag, body))


def alone(svg: Markup) -> str:
    """Convert an `svg` element of a page to a file, which adapts to light or dark mode."""
    css = (resources.files("csda.report") / "style.css").read_text(encoding="utf-8")
    variables = css[: css.index("* {")]
    look = f"<style>{variables}text {{ font-family: system-ui, 'Segoe UI', Roboto, Arial, sans-serif; }}</style>"
    opening, _, body = str(svg).partition(">")
    width, height = (int(each) + 2 * MARGIN for each in re.findall(r'viewBox="0 0 (\d+) (\d+)"', opening)[0])
    opening = re.sub(r'viewBox="[^"]*"', f'viewBox="-{MARGIN} -{MARGIN} {width} {height}"', opening)
    place = f'x="-{MARGIN}" y="-{MARGIN}" width="{width}" height="{height}"'
    return f'{opening}>{look}<rect {place} rx="12" style="fill: var(--paper)"/>{body}'


def _adapt_tag(match: re.Match[str]) -> str:
    """A tag without matplotlib's ids and fonts, and with the colours of the page."""
    tag = re.sub(r'^<g id="[^"]*"', "<g", match[0])
    tag = re.sub(r"font-family: [^;\"]*;? ?", "", tag)
    tag = re.sub(r"\n(?=[Lz\"])", " ", tag)
    return re.sub(r"#[0-9a-f]{6}\b", lambda colour: _VARIABLES.get(colour[0], colour[0]), tag)


@_styled
def draw_learning_curves(entries: Sequence[Entry], metric: str) -> Figure:
    """`metric` ("auc" or "mca") over epochs: test solid, validation dotted, a dot at the epoch whose model is kept."""
    figure, axes = _canvas(HALF, 320)
    for entry in entries:
        best = entry.run.result["best_epoch"]
        epochs, test = read_series(entry.run, f"test_{metric}")
        _, validation = read_series(entry.run, f"val_{metric}")
        axes.plot(epochs, test, "-", **_line(entry, "test"))
        axes.plot(epochs, validation, ":", **_line(entry, "validation"))
        chosen, fill = epochs == best, PALETTE[entry.colour]
        axes.plot(epochs[chosen], test[chosen], "o", color=fill, markersize=8, markeredgecolor=PALETTE["paper"])
        if len(entries) == 1:
            axes.axvline(best, color=PALETTE["muted"], linewidth=1, linestyle=(0, (2, 3)))
    return _finish(figure, axes, metric.upper())


@_styled
def draw_classes(entries: Sequence[Entry], *, narrow: bool = False) -> Figure:
    """Recall of each class, or AUC of each label, with its interval. The class with the most labels is on top."""
    multi_label = entries[0].run.multi_label
    counts = count_classes(entries[0].run)
    order = sorted(range(len(counts)), key=lambda i: counts[i].labeled)
    spacing = 0.62 / max(len(entries) - 1, 2)
    # A single run with one class per image has its confusion matrix in the other half.
    width = NARROW if narrow else FULL if len(entries) > 1 or multi_label else HALF
    height = 90 + len(counts) * max(38, 16 * len(entries))
    figure, axes = _canvas(width, max(height, _confusion_height(len(counts))) if width == HALF else height)
    for k, entry in enumerate(entries):
        places = np.arange(len(order)) - spacing * (k - (len(entries) - 1) / 2)
        figures = [entry.scores.by_class(multi_label=multi_label)[i] for i in order]
        colour = PALETTE[entry.colour]
        lows, highs = [each.low for each in figures], [each.high for each in figures]
        axes.hlines(places, lows, highs, color=colour, linewidth=3, alpha=0.4)
        axes.plot([each.value for each in figures], places, "o", color=colour, markersize=7, label=entry.name)
    axes.set_yticks(range(len(order)), [f"{_shorten(counts[i].name)}\n{counts[i].labeled} labeled" for i in order])
    title = "AUC of each label" if multi_label else "Recall of each class"
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.6, len(order) - 0.4), title=title)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0, labelcolor=PALETTE["ink"])
    if multi_label:
        axes.axvline(0.5, color=PALETTE["muted"], linewidth=1, linestyle=(0, (2, 3)))
    else:
        axes.xaxis.set_major_formatter(PercentFormatter(1))
    if len(entries) > 1:
        _legend(figure, axes, columns=1 if narrow else 3)
    return figure


@_styled
def draw_confusion(entry: Entry, title: str) -> Figure:
    """Rows are the truth, columns the prediction; a cell's colour and percentage are its share of the row."""
    n = len(entry.run.classes)
    probs, labels = entry.run.predictions.part(judged_part(entry.run))
    matrix = metrics.confusion(labels, metrics.predict(probs), n)
    figure, axes = _canvas(HALF, _confusion_height(n))
    fill_confusion(axes, matrix, entry.run.classes, PALETTE[entry.colour], counts=n <= 7)
    axes.set_title(title)
    return figure


def _confusion_height(classes: int) -> int:
    """Height of a confusion matrix and of the picture beside it."""
    return min(430, 150 + 48 * classes)


def fill_confusion(
    axes: Axes, matrix: npt.NDArray[np.int64], classes: Sequence[str], colour: str, *, counts: bool
) -> None:
    """Draw a cell for each pair of classes, with its share of the row and optionally its count."""
    n = len(classes)
    totals = matrix.sum(axis=1)
    names = [_shorten(name, 18) for name in classes]
    for i in range(n):
        for j in range(n):
            share = matrix[i, j] / max(totals[i], 1)
            # At most half opaque, so that the text is legible in light and in dark mode.
            look: dict[str, Any] = {"color": colour, "alpha": 0.04 + 0.5 * share, "linewidth": 0}
            axes.add_patch(Rectangle((j - 0.47, i - 0.47), 0.94, 0.94, **look))
            ink = PALETTE["ink" if share >= 0.1 else "muted"]
            place: dict[str, Any] = {"ha": "center", "va": "center", "color": ink}
            if matrix[i, j]:
                axes.text(j, i - (0.14 if counts else 0), f"{share:.0%}", fontsize=9 if n > 8 else 12, **place)
            if matrix[i, j] and counts:
                axes.text(j, i + 0.24, str(matrix[i, j]), fontsize=9, **place)
    axes.set(xlim=(-0.5, n - 0.5), ylim=(n - 0.5, -0.5), xlabel="predicted", ylabel="true")
    axes.set_xticks(range(n), names, rotation=35, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(n), names)
    axes.tick_params(length=0, labelcolor=PALETTE["ink"])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)


Readers = dict[str, Callable[[Run], Array]]

PSEUDO_LABELS: Readers = {
    "recall": lambda run: _diagonal_share(run.history["pseudo_confusion"], axis=2),
    "precision": lambda run: _diagonal_share(run.history["pseudo_confusion"], axis=1),
}
"""Recall (solid) and precision (dashed) of the pseudo-labels of each class over epochs."""

QUEUE: Readers = {"queued": lambda run: run.history["queue_counts"]}
"""Samples of each class in the queue over epochs."""

ALIGNMENT: Readers = {
    "temperature": lambda run: run.history["temperatures"],
    "share flipped": lambda run: run.history["flips"],
}
"""Temperature (solid) of each class, and how many of its predictions alignment flipped (dashed), over epochs."""


def find_moving(entries: Sequence[Entry], readers: Readers) -> list[int]:
    """The classes whose lines change over the epochs, or whose single point is not zero."""

    def moves(values: Array) -> bool:
        known = values[np.isfinite(values)]
        return bool(np.ptp(known) > 0 if len(known) > 1 else known.any())

    series = [read(entry.run) for entry in entries for read in readers.values()]
    return [i for i in range(len(entries[0].run.classes)) if any(moves(values[:, i]) for values in series)]


@_styled
def draw_by_class(
    entries: Sequence[Entry], readers: Readers, chosen: Sequence[int], *, shares: bool = False, narrow: bool = False
) -> Figure:
    """A small panel for each chosen class, with a line for each entry and reader. All panels have the same scale."""
    names = [entries[0].run.classes[i] for i in chosen]
    columns = 2 if narrow else 4
    legend = _legend_height(len(entries) * len(readers), columns)
    figure, panels = _panels(names, narrow=narrow, foot=max(40, 4 + legend))
    for i, axes in zip(chosen, panels, strict=True):
        for entry in entries:
            for (name, read), style in zip(readers.items(), ("-", "--"), strict=False):
                axes.plot(entry.run.history["epochs"], read(entry.run)[:, i], style, **_line(entry, name))
        _over_epochs(axes, label="")
        axes.tick_params(labelbottom=True)
    panels[0].set_ylim(*((-0.04, 1.04) if shares else (0, None)))
    _legend(figure, panels[0], columns, place="lower left")
    return figure


@_styled
def draw_curves(
    entries: Sequence[Entry], curves: Sequence[Sequence[Curve | None]], kind: str, *, narrow: bool = False
) -> Figure:
    """ROC (`kind` "roc") or precision-recall curves of each class: a line with its 95 % band for each entry."""
    classes = entries[0].run.classes
    known = [i for i in range(len(classes)) if any(each[i] is not None for each in curves)]
    columns = 2 if narrow else 4
    legend = _legend_height(len(entries), columns) if len(entries) > 1 else 0
    figure, panels = _panels([classes[i] for i in known], narrow=narrow, square=True, foot=30 + legend)
    for i, axes in zip(known, panels, strict=True):
        areas = []
        for entry, each in zip(entries, curves, strict=True):
            if (curve := each[i]) is None:
                continue
            colour = PALETTE[entry.colour]
            axes.fill_between(GRID, curve.low, curve.high, color=colour, alpha=0.18, linewidth=0)
            axes.plot(*_thinned(curve), color=colour, linewidth=1.6, drawstyle="steps-post", label=entry.name)
            areas.append(f"{curve.area} {curve.area.interval}" if entry.alone else f"{curve.area}")
            level = curve.prevalence
        if kind == "roc":
            axes.plot([0, 1], [0, 1], color=PALETTE["muted"], linewidth=1, linestyle=(0, (2, 3)))
        else:
            axes.axhline(level, color=PALETTE["muted"], linewidth=1, linestyle=(0, (2, 3)))
        axes.set_title(f"{_shorten(classes[i], 20)}\n{', '.join(areas[:AREAS])}", fontsize=11, fontweight="normal")
        axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
        axes.xaxis.set_major_formatter(PercentFormatter(1))
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.set_xticks([0, 0.5, 1])
        axes.set_yticks([0, 0.5, 1])
        axes.tick_params(labelbottom=True)
    horizontal, vertical = ("false positive rate", "true positive rate") if kind == "roc" else ("recall", "precision")
    look: dict[str, Any] = {"fontsize": 12, "color": PALETTE["muted"]}
    points = figure.get_figheight() * 72
    figure.supxlabel(horizontal, y=(8 + legend) / points, va="bottom", **look)
    figure.supylabel(vertical, x=2 / (figure.get_figwidth() * 72), ha="left", **look)
    if legend:
        _legend(figure, panels[0], columns, place="lower left")
    return figure


@_styled
def draw_reliability(entry: Entry, before: Reliability, after: Reliability | None) -> Figure:
    """Share of correct decisions by confidence, as predicted and after temperature scaling."""
    figure, axes = _canvas(HALF, 360)
    axes.plot([0, 1], [0, 1], color=PALETTE["muted"], linewidth=1, linestyle=(0, (2, 3)))
    looks = [(before, "grey", "as predicted", "s"), (after, entry.colour, "after scaling", "o")]
    for reliability, colour, name, marker in looks:
        if reliability is None:
            continue
        full = reliability.counts > 0
        places, values = reliability.confidence[full], reliability.hits[full]
        axes.vlines(
            places, reliability.low[full], reliability.high[full], color=PALETTE[colour], linewidth=3, alpha=0.4
        )
        axes.plot(
            places, values, f"-{marker}", color=PALETTE[colour], markersize=6, linewidth=1.2,
            label=f"{name}: error {reliability.error:.3f}",
        )  # fmt: skip
    axes.set(xlim=(0, 1.02), ylim=(0, 1.02), xlabel="confidence", ylabel="share that is right", title="Reliability")
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    _legend(figure, axes, columns=1)
    return figure


@_styled
def draw_coverage(entries: Sequence[Entry], coverages: Sequence[Coverage]) -> Figure:
    """Share of correct decisions among the most confident ones, against the share that is kept."""
    figure, axes = _canvas(HALF, 360)
    for entry, coverage in zip(entries, coverages, strict=True):
        chosen = np.unique(np.linspace(0, len(coverage.kept) - 1, min(len(coverage.kept), 160)).astype(int))
        # The first few decisions have wide intervals, which would determine the scale.
        chosen = chosen[coverage.kept[chosen] >= 0.05] if (coverage.kept >= 0.05).any() else chosen
        kept, colour = coverage.kept[chosen], PALETTE[entry.colour]
        axes.fill_between(kept, coverage.low[chosen], coverage.high[chosen], color=colour, alpha=0.18, linewidth=0)
        axes.plot(kept, coverage.right[chosen], color=colour, label=entry.name)
    axes.set(xlim=(0, 1.01), xlabel="share of decisions made by the model", ylabel="share of these that is right")
    axes.set_title("Coverage against accuracy")
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    if len(entries) > 1:
        _legend(figure, axes, columns=2)
    return figure


SUMMARY = {
    "pseudo_accuracy": ("accuracy", "-"),
    "pseudo_mca": ("mean over classes", "--"),
    "flip_rate": ("flipped", ":"),
    "pseudo_auc": ("AUC", "-"),
}
"""Figures over all pseudo-labels, with their name and style."""


@_styled
def draw_pseudo_summary(entries: Sequence[Entry]) -> Figure:
    """Accuracy of all pseudo-labels, its mean over classes, and the share that alignment changed; their AUC with
    several labels per image.
    """
    figure, axes = _canvas(HALF, 300)
    for entry in entries:
        for key, (name, style) in SUMMARY.items():
            epochs, values = read_series(entry.run, key)
            if (values > 0).any():
                axes.plot(epochs, values, style, **_line(entry, name))
    if not entries[0].run.multi_label:
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    return _finish(figure, axes, "All pseudo-labels", columns=1 if len(entries) > 1 else 2)


@_styled
def draw_distances(entries: Sequence[Entry]) -> Figure:
    """Frobenius distance of the unlabeled class marginals to the labeled ones, before and after alignment."""
    figure, axes = _canvas(HALF, 300)
    for entry in entries:
        for key, name, style in (("unlabeled", "before", "--"), ("aligned", "after", "-")):
            axes.plot(entry.run.history["epochs"], marginal_distances(entry.run, key), style, **_line(entry, name))
    axes.set_ylim(bottom=0)
    return _finish(figure, axes, "Distance to the labeled marginals")


def marginal_distances(run: Run, key: str) -> Array:
    """Frobenius distance of the class-wise "unlabeled" or "aligned" marginals to the labeled ones in each epoch [E].

    A class that was not predicted has no aligned marginal, so its row is left out of both.
    """
    history = run.history
    predicted = history["aligned_marginals"].sum(axis=-1, keepdims=True) > 0
    gaps = np.where(predicted, history[f"{key}_marginals"] - history["labeled_marginals"], 0)
    distances = np.sqrt((gaps**2).sum(axis=(-2, -1)))
    return np.where(predicted.any(axis=(-2, -1)), distances, np.nan)


def _panels(names: Sequence[str], *, narrow: bool, square: bool = False, foot: int = 40) -> tuple[Figure, list[Axes]]:
    """A small panel for each name, on common scales: four in a row, or two on a narrow page.

    Positions are computed here, because matplotlib's layout engines take longer than the rest of a report.
    """
    across = 2 if narrow else 4
    columns = min(across, len(names))
    rows = -(-len(names) // columns)
    left, right, gap = (62, 16, 34) if square else (44, 10, 16)
    # Titles of two lines; labels of the axes and a legend below, at the foot.
    above, below = (40, 22) if square else (26, 22)
    width = ((NARROW if narrow else FULL) - left - right - gap * (across - 1)) / across
    height = width if square else 92.0
    size = (left + right + columns * width + gap * (columns - 1), rows * (above + height + below) + foot)
    figure = Figure(figsize=(size[0] / 72, size[1] / 72))
    grid = figure.subplots(
        rows,
        columns,
        sharex=True,
        sharey=True,
        squeeze=False,
        gridspec_kw={
            "left": left / size[0],
            "right": 1 - right / size[0],
            "top": 1 - above / size[1],
            "bottom": (foot + below) / size[1],
            "wspace": gap / width,
            "hspace": (above + below) / height,
        },
    )
    panels = list(grid.flat)
    for axes in panels[len(names) :]:
        axes.set_visible(False)
    for axes, name in zip(panels, names, strict=False):
        axes.set_title(_shorten(name, 22), fontsize=12, fontweight="normal")
    return figure, panels[: len(names)]


def _thinned(curve: Curve) -> tuple[Array, Array]:
    """The points of a curve, without those that are too close to be distinguished in a panel."""
    if len(curve.x) <= 150:
        return curve.x, curve.y
    chosen = np.unique(np.r_[0, np.searchsorted(curve.x, np.linspace(0, 1, 120)), len(curve.x) - 1])
    chosen = chosen[chosen < len(curve.x)]
    return curve.x[chosen], curve.y[chosen]


def _canvas(width: int, height: int) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width / 72, height / 72), layout="constrained")
    return figure, figure.subplots()


def _line(entry: Entry, name: str) -> dict[str, Any]:
    """Arguments of a line: its colour is that of the run, and its label has the run's name if there are several."""
    return {"color": PALETTE[entry.colour], "label": name if entry.alone else f"{entry.name}, {name}"}


def _legend(
    figure: Figure,
    axes: Axes,
    columns: int,
    place: Literal["outside lower left", "lower left"] = "outside lower left",
) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc=place, ncols=columns, handlelength=1.6, columnspacing=1.4)


def _legend_height(lines: int, columns: int) -> int:
    """Height in pixels of a legend with this number of lines."""
    return 8 + 18 * -(-lines // columns)


def _finish(figure: Figure, axes: Axes, title: str, columns: int = 2) -> Figure:
    """Finish a picture over epochs."""
    _over_epochs(axes)
    axes.set_title(title)
    _legend(figure, axes, columns)
    return figure


def _over_epochs(axes: Axes, label: str = "epoch") -> None:
    axes.set_xlabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    axes.grid(visible=False, axis="x")
    for line in axes.get_lines():
        # A line with a single point is invisible.
        if np.isfinite(np.asarray(line.get_ydata(), dtype=float)).sum() == 1 and line.get_marker() == "None":
            line.set(marker="o", markersize=4)


def read_series(run: Run, key: str) -> tuple[Array, Array]:
    """A column of metrics.jsonl over epochs, NaN where it is missing."""
    values = [np.nan if row.get(key) is None else row[key] for row in run.metrics]
    return np.array([row["epoch"] for row in run.metrics], dtype=float), np.array(values, dtype=float)


def _diagonal_share(confusions: Array, axis: int) -> Array:
    totals = confusions.sum(axis=axis)
    shares = np.full(totals.shape, np.nan)
    np.divide(np.diagonal(confusions, axis1=1, axis2=2), totals, out=shares, where=totals > 0)
    return shares


def _shorten(name: str, length: int = 24) -> str:
    return name if len(name) <= length else name[: length - 1] + "…"
