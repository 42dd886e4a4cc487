"""Evaluate a model on labeled images from elsewhere: its scores, and the effect of other class frequencies."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.table import Table
from rich.text import Text

from csda import metrics
from csda.calibration import estimate_frequencies, measure, predicted_frequencies
from csda.data.splits import label_text
from csda.errors import explained
from csda.files import write_csv, write_whole
from csda.report.tables import (
    Array,
    Estimate,
    Scores,
    count_classes,
    count_images,
    score_images,
    terse,
    terser,
    title_table,
)
from csda.runs import Run


@dataclass(frozen=True, slots=True)
class Shift:
    """Accuracy and MCA for one assumption about the class frequencies."""

    name: str
    accuracy: Estimate
    mca: Estimate


@dataclass(frozen=True, slots=True)
class External:
    """The scores of a run on images from elsewhere, beside those on its own test images.

    Frequencies are those of the training labels, of the run's test part, of the new images, and of the new images as
    estimated without their labels.
    """

    run: Run
    name: str
    ids: list[str]
    labels: npt.NDArray[np.int64]
    probs: Array
    scores: Scores
    own_scores: Scores
    counts: tuple[int, ...]
    frequencies: dict[str, tuple[float, ...]]
    shifts: tuple[Shift, ...]
    calibration: dict[str, Any]
    remarks: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        def of(estimate: Estimate | None) -> list[float | None] | None:
            values = None if estimate is None else (estimate.value, estimate.low, estimate.high)
            return None if values is None else [None if np.isnan(value) else float(value) for value in values]

        def scores_of(scores: Scores) -> dict[str, Any]:
            by_class = {name: getattr(scores, name) for name in ("recall", "precision", "class_auc")}
            return {
                "auc": of(scores.auc),
                "mca": of(scores.mca),
                **{name: list(map(of, values)) for name, values in by_class.items()},
            }

        return {
            "run": self.run.folder.name,
            "data": self.name,
            "images": len(self.ids),
            "classes": list(self.run.classes),
            "counts": list(self.counts),
            "scores": scores_of(self.scores),
            "own_test_scores": scores_of(self.own_scores),
            "frequencies": {name: list(values) for name, values in self.frequencies.items()},
            "shift": {each.name: {"accuracy": of(each.accuracy), "mca": of(each.mca)} for each in self.shifts},
            "calibration": self.calibration,
            "remarks": list(self.remarks),
        }


def measure_external(
    run: Run, name: str, ids: list[str], labels: npt.NDArray[np.int64], probs: Array, remarks: tuple[str, ...] = ()
) -> External:
    """Score probabilities [N, n] by the labels of the images. The run's own predictions are scored in the same way."""
    multi_label = run.multi_label
    counts = labels.sum(axis=0) if multi_label else np.bincount(labels, minlength=len(run.classes))
    fitted = run.calibration
    calibrated = probs if fitted is None else fitted.scale(probs)
    frequencies = _frequencies(run, counts / len(labels))
    own_probs, own_labels = run.predictions.part("test")
    held_out = run.predictions.probs if fitted is None else fitted.scale(run.predictions.probs)
    before = predicted_frequencies(held_out, run.predictions.labels, np.array(frequencies["trained on"]))
    estimated = estimate_frequencies(calibrated, before, multi_label=multi_label)
    frequencies["estimated"] = tuple(estimated.tolist())
    adjusted = metrics.shift_frequencies(calibrated, before, np.array(frequencies["here"]), multi_label=multi_label)
    guessed = metrics.shift_frequencies(calibrated, before, estimated, multi_label=multi_label)
    views = [
        Shift("the run's own test images", _accuracy(own_probs, own_labels), _mca(own_probs, own_labels)),
        Shift("here", _accuracy(probs, labels), _mca(probs, labels)),
    ]
    if not multi_label:
        ratio = np.array(frequencies["the run's test images"]) / np.maximum(frequencies["here"], 1e-12)
        weighted = _accuracy(probs, labels, ratio[labels])
        views.append(Shift("here, weighted to the run's frequencies", weighted, views[1].mca))
    views += [
        Shift("here, told the frequencies", _accuracy(adjusted, labels), _mca(adjusted, labels)),
        Shift("here, frequencies estimated", _accuracy(guessed, labels), _mca(guessed, labels)),
    ]
    absent = [name for name, count in zip(run.classes, counts, strict=True) if not count]
    if absent:
        remarks = (*remarks, f"no image of {', '.join(absent)} here, so nothing is known about these")
    return External(
        run,
        name,
        ids,
        labels,
        probs,
        score_images(labels, probs),
        score_images(own_labels, own_probs),
        tuple(int(count) for count in counts),
        frequencies,
        tuple(views),
        _calibration(run, calibrated, labels),
        remarks,
    )


def external_tables(external: External) -> list[Table]:
    """The table of a run's own test images for these images, then class frequencies and the effect of their shift."""
    run, scores = external.run, external.scores
    table = title_table(f"{run.folder.name} on {len(external.ids):,} images of {external.name}")
    for heading in ("images", "recall", "precision", "AUC"):
        table.add_column(heading, justify="right", no_wrap=True)
    for position, name in enumerate(run.classes):
        values = (scores.recall[position], scores.precision[position], scores.class_auc[position])
        count = f"{external.counts[position]} few" if values[0].few else str(external.counts[position])
        table.add_row(Text(name), count, *(Text(terser(value)) for value in values))
    table.add_section()
    for name, means, style in (
        ("MCA, AUC" if run.multi_label else "mean", scores, "bold"),
        ("its own test images", external.own_scores, None),
    ):
        table.add_row(name, "", *map(Text, (terser(means.mca), "", terser(means.auc))), style=style)

    frequencies = title_table("Class frequencies")
    frequencies.caption = None
    for heading in external.frequencies:
        frequencies.add_column(heading, justify="right", no_wrap=True)
    for position, name in enumerate(run.classes):
        shares = (values[position] for values in external.frequencies.values())
        frequencies.add_row(Text(name), *(f"{share:.3f}" for share in shares))

    shifts = title_table("Effect of the shift of class frequencies")
    shifts.caption = None
    for heading in ("accuracy", "MCA"):
        shifts.add_column(heading, justify="right", no_wrap=True)
    for each in external.shifts:
        shifts.add_row(each.name, Text(terse(each.accuracy)), Text(terse(each.mca)))
    return [table, frequencies, shifts]


def describe_calibration(external: External) -> str:
    """Sentences on whether calibration and coverage hold on these images."""
    found = external.calibration
    if not found:
        return "The run is not calibrated."
    text = (
        f"The model is calibrated on {found['fitted_on']}. Its calibration error is {found['calibration_error']:.3f} "
        f"on these images and {found['own_calibration_error']:.3f} on those."
    )
    for level in found["levels"]:
        low, high = level["interval"]
        text += (
            f" Sets with a coverage of {level['promised']:.0%} contain the class in {level['covered']:.1%} "
            f"[{low:.1%}, {high:.1%}] of the cases."
        )
    return text


def write_external(external: External, folder: Path) -> Path:
    """Write evaluation.json, predictions.csv and report.html into a folder, and return the page."""
    from csda.report.page import open_environment

    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
    classes = external.run.classes
    decided = metrics.decide(external.probs, external.run.multi_label)
    truth = [tuple(np.flatnonzero(row).tolist()) if external.run.multi_label else int(row) for row in external.labels]
    rows = [
        [image, label_text(label, classes), label_text(predicted, classes), *(f"{value:.9g}" for value in probs)]
        for image, label, predicted, probs in zip(external.ids, truth, decided, external.probs, strict=True)
    ]
    write_csv(folder / "predictions.csv", ("id", "label", "predicted", *classes), rows)
    write_whole(folder / "evaluation.json", json.dumps(external.as_json(), indent=1, ensure_ascii=False) + "\n")
    page = open_environment().get_template("external.html").render(
        title=f"{external.run.folder.name} on {external.name}",
        multi_label=external.run.multi_label,
        external=external,
        promises=describe_calibration(external),
    )  # fmt: skip
    return write_whole(folder / "report.html", page)


def _frequencies(run: Run, here: Array) -> dict[str, tuple[float, ...]]:
    counts, images = count_classes(run), count_images(run)
    # With adjusted logits or prior correction, a network predicts for equal class frequencies.
    balanced = run.config["adjust"] or run.config["prior_correction"] != "none"
    even = 0.5 if run.multi_label else 1 / len(counts)
    return {
        "trained on": tuple(even if balanced else count.labeled / images["labeled"] for count in counts),
        "the run's test images": tuple(count.test / images["test"] for count in counts),
        "here": tuple(here.tolist()),
    }


def _calibration(run: Run, calibrated: Array, labels: npt.NDArray[np.int64]) -> dict[str, Any]:
    fitted = run.calibration
    if fitted is None:
        return {}
    levels = []
    for level in fitted.levels:
        sets = fitted.sets(calibrated, level.coverage)
        chosen = labels[..., None].astype(np.int64)
        held = np.take_along_axis(sets, chosen, axis=-1)[..., 0].astype(np.float64)
        covered = held.mean(axis=-1) if run.multi_label else held
        low, high = metrics.bootstrap_interval(_weighted_mean, covered)
        levels.append(
            {"promised": level.coverage, "covered": float(covered.mean()), "interval": [float(low), float(high)]}
        )
    error = measure(calibrated, labels)["calibration_error"]
    return {
        "fitted_on": f"{fitted.images} {fitted.fitted_on} images",
        "calibration_error": error,
        "own_calibration_error": fitted.after["calibration_error"],
        "levels": levels,
    }


def _accuracy(probs: Array, labels: npt.NDArray[np.int64], importance: Array | None = None) -> Estimate:
    hits = (metrics.predict(probs, labels.ndim == 2) == labels).astype(np.float64)
    hits = hits.mean(axis=1) if labels.ndim == 2 else hits
    factors = np.ones(len(hits)) if importance is None else importance

    def mean(hits: Array, factors: Array, weights: Array) -> Array:
        total = weights * factors
        return np.asarray((total @ hits) / total.sum(axis=-1))

    return _estimate(mean, hits, factors)


def _mca(probs: Array, labels: npt.NDArray[np.int64]) -> Estimate:
    return score_images(labels, probs).mca


def _estimate(statistic: Callable[..., Array], *arrays: Array) -> Estimate:
    (value,) = statistic(*arrays, weights=np.ones((1, len(arrays[0]))))
    low, high = metrics.bootstrap_interval(statistic, *arrays)
    return Estimate(float(value), float(low), float(high))


def _weighted_mean(values: Array, weights: Array) -> Array:
    return np.asarray((weights @ values) / weights.sum(axis=-1))
