"""Figures 3, 4 and 5 of the paper, and learning curves, drawn from run folders."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from PIL import Image

from csda import metrics
from csda.config import RunConfig
from csda.data.csv_files import JOIN, NONE_PRESENT
from csda.data.decode import read_image
from csda.data.prepared import load_configured
from csda.data.records import Pixels
from csda.files import write_whole
from csda.report.figures import PALETTE, STYLE, fill_confusion, marginal_distances, read_series
from csda.report.tables import COLOURS, METHOD_COLOURS
from csda.research.grid import WIDTH, colour_rows
from csda.research.summary import average
from csda.runs import Run

Array = npt.NDArray[np.float64]
Runs = Mapping[str, Sequence[Run]]
"""The runs of each row of an experiment, one for each seed."""

CURVES = (0.1, 0.3, 0.5, 0.7, 1.0)
"""Temperatures to show: the constant ones of the paper, and a low one."""

EXAMPLES = 7
"""Largest number of images in Figure 5."""

EPOCH_TITLES = {
    "test_auc": "test AUC",
    "test_mca": "test MCA",
    "val_auc": "validation AUC",
    "labeled_loss": "loss on the labeled images",
    "pseudo_accuracy": "share of guesses that are right",
    "pseudo_auc": "AUC of the guesses",
}


@dataclass(frozen=True, slots=True)
class Example:
    """An image [H, W, 3], its labels, and each method's most probable labels with their probabilities."""

    image: Pixels
    truth: tuple[str, ...]
    guesses: Mapping[str, Sequence[tuple[str, float]]]


@matplotlib.rc_context(STYLE)
def draw_confusions(runs: Runs) -> Figure:
    """Figure 3: confusion matrices of the test images, one for each row, summed over seeds."""
    classes = next(iter(runs.values()))[0].classes
    columns = min(2, len(runs))
    rows = -(-len(runs) // columns)
    figure = Figure(figsize=(WIDTH, 5.0 * rows), layout="constrained")
    panels = [*figure.subplots(rows, columns, squeeze=False).flat]
    for axes in panels[len(runs) :]:
        axes.remove()
    for place, (axes, (name, own)) in enumerate(zip(panels, runs.items(), strict=False)):
        matrix = sum_confusions(own)
        recalls = matrix.diagonal() / np.maximum(matrix.sum(axis=1), 1)
        fill_confusion(axes, matrix, classes, PALETTE[METHOD_COLOURS.get(name, "green")], counts=False)
        seeds = "" if len(own) == 1 else f", {len(own)} seeds"
        axes.set_title(f"{name}: mean recall {recalls.mean():.3f}{seeds}")
        if place % columns:
            axes.set_ylabel("")
            axes.set_yticklabels([])
    return figure


def sum_confusions(runs: Sequence[Run]) -> npt.NDArray[np.int64]:
    """Confusion matrix [n, n], summed over runs."""
    total = np.zeros((len(runs[0].classes),) * 2, dtype=np.int64)
    for run in runs:
        probs, labels = run.predictions.part("test")
        total += metrics.confusion(labels, metrics.predict(probs), len(run.classes))
    return total


@matplotlib.rc_context(STYLE)
def draw_temperatures(runs: Runs) -> Figure:
    """Figure 4: the effect of T on a row, AUC and MCA over epochs by temperature, and the distances after alignment."""
    figure = Figure(figsize=(WIDTH, 8.6), layout="constrained")
    (shape, auc), (mca, distance) = figure.subplots(2, 2)
    first = next(iter(runs.values()))[0]
    _draw_shapes(shape, len(first.classes))
    tempered = {name: own for name, own in runs.items() if own[0].config["method_settings"]["align"] == "csda"}
    colours = dict(zip(tempered, (PALETTE[colour] for colour in COLOURS), strict=False))
    for axes, letter, figure_name in ((auc, "b", "auc"), (mca, "c", "mca")):
        for name, own in tempered.items():
            _draw_column(axes, own, f"test_{figure_name}", colours[name], name)
        axes.set(title=f"{letter}  test {figure_name.upper()} by temperature", xlabel="epoch")
    for name, own in runs.items():
        settings = own[0].config["method_settings"]
        agnostic = settings["align"] == "da"
        if agnostic or settings["temperature"] in (1.0, "adaptive"):
            distances = np.stack([marginal_distances(run, "aligned") for run in own])
            label = "DA" if agnostic else f"CSDA, {name}"
            colour = PALETTE["ink"] if agnostic else colours[name]
            _draw_band(distance, own[0].history["epochs"].astype(float), distances, colour, label)
    distance.set(title="d  distance to λˣ after alignment (Frobenius)", xlabel="epoch")
    distance.set_ylim(bottom=0)
    for axes, columns in ((auc, 2), (mca, 2), (distance, 1)):
        if axes.lines:  # some runs may have no values for a panel
            axes.legend(ncols=columns)
    return figure


@matplotlib.rc_context(STYLE)
def draw_epochs(runs: Runs) -> Figure:
    """Test AUC and MCA, the labeled loss, and the accuracy of pseudo-labels, over the epochs of each row.

    With several labels per image, validation AUC instead of MCA, and the AUC of the pseudo-labels.
    """
    multi_label = next(iter(runs.values()))[0].multi_label
    guessed = "pseudo_auc" if multi_label else "pseudo_accuracy"
    guess = {name: own for name, own in runs.items() if any(guessed in row for row in own[0].metrics)}
    columns = ["test_auc", "val_auc" if multi_label else "test_mca", "labeled_loss", *([guessed] if guess else [])]
    figure = Figure(figsize=(WIDTH, 8.4), layout="constrained")
    panels = [*figure.subplots(2, 2).flat]
    for axes in panels[len(columns) :]:
        axes.remove()
    colours = colour_rows(runs)
    for axes, column in zip(panels, columns, strict=False):
        for name, own in (guess if column == guessed else runs).items():
            _draw_column(axes, own, column, colours[name], name)
        axes.set(title=EPOCH_TITLES[column], xlabel="epoch", xscale="log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
        axes.set_xlim(left=1)
    panels[2].set_yscale("log")
    panels[2].yaxis.set_major_formatter("{x:g}")
    panels[2].yaxis.set_minor_locator(LogLocator(subs=(2, 5)))  # labels also where there is less than a decade
    panels[2].yaxis.set_minor_formatter("{x:g}")
    panels[0].legend()
    return figure


def average_epochs(runs: Sequence[Run]) -> list[dict[str, float | None]]:
    """A row for each epoch: means over runs of the figures in `metrics.jsonl`, except for the seconds."""
    columns = dict.fromkeys(key for run in runs for row in run.metrics for key in row if key != "seconds")
    epochs = zip(*(run.metrics for run in runs), strict=True)
    return [{key: average(rows, key) for key in columns} for rows in epochs]


def count_guesses(runs: Sequence[Run]) -> list[dict[str, float | str]]:
    """A row for each epoch and class, as means over runs: the unlabeled images of the class, those with its
    pseudo-label, the correct ones of these, and those in the queue, if there is one.
    """
    if "pseudo_confusion" not in runs[0].history:
        return []
    mean = np.mean([run.history["pseudo_confusion"] for run in runs], axis=0)
    counts = {"images": mean.sum(axis=2), "guessed": mean.sum(axis=1), "right": np.diagonal(mean, axis1=1, axis2=2)}
    if "queue_counts" in runs[0].history:
        counts["queued"] = np.mean([run.history["queue_counts"] for run in runs], axis=0)
    return [
        {"epoch": epoch, "class": name, **{key: float(values[at, i]) for key, values in counts.items()}}
        for at, epoch in enumerate(runs[0].history["epochs"].tolist())
        if not np.isnan(mean[at]).any()
        for i, name in enumerate(runs[0].classes)
    ]


def temper_entry(entry: Array, temperature: float, n: int) -> Array:
    """An entry of Normalize(λ^T) as a function of the entry in λ, a row of n with equal other entries."""
    own, others = entry**temperature, (n - 1) * ((1 - entry) / (n - 1)) ** temperature
    return np.asarray(own / (own + others), dtype=np.float64)


def _draw_shapes(axes: Axes, n: int) -> None:
    entry = np.linspace(0, 1, 201)
    for temperature, colour in zip(CURVES, ("grey", *COLOURS), strict=False):
        axes.plot(entry, temper_entry(entry, temperature, n), color=PALETTE[colour], label=f"T = {temperature:g}")
    axes.set(title=f"a  an entry of λˣ before and after, n = {n}", xlabel="λ", ylabel="Normalize(λᵀ)")
    axes.legend()


def _draw_column(axes: Axes, runs: Sequence[Run], column: str, colour: str, label: str) -> None:
    """A column of metrics.jsonl over epochs, for several seeds."""
    curves = [read_series(run, column) for run in runs]
    _draw_band(axes, curves[0][0], np.stack([values for _, values in curves]), colour, label)


def _draw_band(axes: Axes, epochs: Array, values: Array, colour: str, label: str) -> None:
    """The mean of several seeds [S, E] over epochs, and their range."""
    seen = ~np.isnan(values).all(axis=0)
    epochs, values = epochs[seen], values[:, seen]
    axes.plot(epochs, np.nanmean(values, axis=0), color=colour, label=label)
    if len(values) > 1:
        lows, highs = np.nanmin(values, axis=0), np.nanmax(values, axis=0)
        axes.fill_between(epochs, lows, highs, color=colour, alpha=0.12, linewidth=0)


def pick_examples(runs: Runs, config: RunConfig) -> list[Example]:
    """Random unlabeled images: one of each class, or some with a label if an image may have several.

    `config` has the path of the images, because runs may have been trained elsewhere.
    """
    firsts = {name: own[0] for name, own in runs.items()}
    run = next(iter(firsts.values()))
    index = {name: position for position, name in enumerate(run.classes)}
    truth = {image: label for image, label in run.truth.items() if label != NONE_PRESENT}
    order = np.random.default_rng(0).permutation(sorted(truth)).tolist()
    if run.multi_label:
        chosen = order[:EXAMPLES]
    else:
        of_class = {truth[image]: image for image in reversed(order)}
        chosen = [of_class[name] for name in run.classes[:EXAMPLES] if name in of_class]
    dataset = load_configured(config)
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


@matplotlib.rc_context(STYLE)
def draw_examples(examples: Sequence[Example]) -> Figure:
    """Figure 5: images with their labels, then each method's prediction, the last in bold."""
    methods = list(examples[0].guesses)
    longest = max(len(each) for example in examples for each in example.guesses.values())
    height = 1.75 + 0.24 * longest * (1 + len(methods))
    figure = Figure(figsize=(1.95 * len(examples) + 0.9, height), facecolor="white")
    left, width = 0.9 / figure.get_figwidth(), 1.95 / figure.get_figwidth()
    top, step = (height - 1.75) / height, 0.24 / height
    places = [top - number * longest * step for number in range(1 + len(methods))]
    for column, example in enumerate(examples):
        axes = figure.add_axes((left + column * width, top, 0.92 * width, 1.7 / height))
        axes.imshow(example.image)
        axes.axis("off")
        rows = [[(name, None) for name in example.truth], *example.guesses.values()]
        for number, (place, entries) in enumerate(zip(places, rows, strict=True)):
            for position, (name, probability) in enumerate(entries):
                right = name in example.truth
                colour = "ink" if probability is None else "green" if right else "vermilion"
                text = name if probability is None else f"{name} {probability:.2f}"
                figure.text(
                    left + (column + 0.46) * width,
                    place - (position + 0.55) * step,
                    text,
                    ha="center",
                    va="center",
                    color=PALETTE[colour],
                    fontsize=11 if len(text) < 20 else 9,
                    fontweight="bold" if number == len(methods) else "normal",
                )
    for name, place in zip(("truth", *methods), places, strict=True):
        figure.text(0.1 / figure.get_figwidth(), place - 0.55 * step, name, va="center", color=PALETTE["muted"])
    return figure


def write_photographs(figure: Figure, path: Path) -> None:
    """Save a picture of photographs as PNG."""
    buffer, small = io.BytesIO(), io.BytesIO()
    figure.savefig(buffer, format="png", dpi=90, metadata={"Software": None})
    Image.open(buffer).convert("RGB").save(small, "PNG", optimize=True)
    write_whole(path, small.getvalue())
