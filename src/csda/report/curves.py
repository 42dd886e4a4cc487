"""The curves of a report as numbers: ROC, precision-recall, reliability and coverage, with 95 % intervals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from csda import calibration, metrics
from csda.report.tables import Entry, Estimate, judged_part
from csda.runs import Run

Array = npt.NDArray[np.float64]
Positives = npt.NDArray[np.bool_]

GRID = np.linspace(0, 1, 101)
"""Positions at which the bands of curves are computed."""
SAMPLES = 400
BINS = 10
SPECIFICITIES = (0.8, 0.9, 0.95)


@dataclass(frozen=True, slots=True)
class Curve:
    """A curve of one class, a band around it at the positions of the grid, and the area below it."""

    x: Array
    y: Array
    low: Array
    high: Array
    area: Estimate
    prevalence: float


@dataclass(frozen=True, slots=True)
class Reliability:
    """The share of correct decisions in bins of confidence, and the calibration error [0, 1]."""

    confidence: Array
    hits: Array
    low: Array
    high: Array
    counts: npt.NDArray[np.int64]
    error: float


@dataclass(frozen=True, slots=True)
class Coverage:
    """The most confident decisions: increasing shares of all, and the share of them that is correct."""

    kept: Array
    right: Array
    low: Array
    high: Array


def roc_curves(entry: Entry) -> list[Curve | None]:
    """The curve of each class, with the AUC of the scores; None if all images or none are of the class."""
    classes = zip(_each_class(entry.run), entry.scores.class_auc, strict=True)
    return [None if known is None else _roc(*known, area) for known, area in classes]


def precision_recall_curves(entry: Entry) -> list[Curve | None]:
    """The curve of each class; None if all images or none are of the class."""
    return [None if known is None else _precision_recall(*known) for known in _each_class(entry.run)]


def reliabilities(run: Run) -> tuple[Reliability, Reliability | None, float | None]:
    """Reliability before and after temperature scaling, and the temperature; None if none could be fitted."""
    probs, labels = run.predictions.part(judged_part(run))
    before, temperature = _reliability(probs, labels), fit_temperature(run)
    if temperature is None:
        return before, None, None
    scaled = metrics.scale_temperature(probs, temperature, multi_label=run.multi_label)
    return before, _reliability(scaled, labels), temperature


def fit_temperature(run: Run) -> float | None:
    """The temperature fitted to the validation images; None without these, or if the run is scored on them."""
    if judged_part(run) == "val":
        return None
    if run.calibration is not None:
        return run.calibration.temperature
    probs, labels = run.predictions.part("val")
    return calibration.fit_temperature(probs, labels) if len(labels) else None


def coverage(run: Run) -> Coverage:
    """Coverage of the decisions, the most confident first. With several labels per image each label is a decision."""
    confidence, hits = metrics.confidence_and_hits(*run.predictions.part(judged_part(run)))
    kept, right = metrics.coverage_curve(confidence, hits)
    counts = np.round(kept * len(hits))
    low, high = metrics.wilson_interval(np.round(right * counts), counts)
    return Coverage(kept, right, low, high)


def sensitivities(run: Run) -> list[tuple[float, list[Estimate]]]:
    """For a task with two classes: for some specificities, the sensitivity for each class."""
    probs, labels = run.predictions.part(judged_part(run))
    if run.multi_label or len(run.classes) != 2 or len(np.unique(labels)) != 2:
        return []
    rows = []
    for specificity in SPECIFICITIES:
        estimates = []
        for name in range(2):
            positive = labels == name

            def measure(
                scores: Array, weights: Array, positive: Positives = positive, at: float = specificity
            ) -> Array:
                return metrics.sensitivity_at(at, scores, positive, weights)

            value = float(metrics.sensitivity_at(specificity, probs[:, name], positive))
            low, high = metrics.bootstrap_interval(measure, probs[:, name], samples=SAMPLES, strata=labels)
            estimates.append(Estimate(value, float(low), float(high), count=int(positive.sum())))
        rows.append((specificity, estimates))
    return rows


def _each_class(run: Run) -> list[tuple[Array, Positives] | None]:
    """The scores of all images for each class, and which images are of the class; None if all are or none."""
    probs, labels = run.predictions.part(judged_part(run))
    n = len(run.classes)
    truth = labels.astype(bool) if run.multi_label else np.equal.outer(labels, np.arange(n))
    return [(probs[:, name], truth[:, name]) if 0 < truth[:, name].sum() < len(truth) else None for name in range(n)]


def _roc(scores: Array, positive: Positives, area: Estimate) -> Curve:
    def at_grid(scores: Array, weights: Array) -> Array:
        false, true, _ = metrics.roc_curve(scores, positive, weights)
        return metrics.curve_at(GRID, false, true)

    x, y, _ = metrics.roc_curve(scores, positive)
    return Curve(x, y, *_resample(at_grid, scores, positive), area, float(positive.mean()))


def _precision_recall(scores: Array, positive: Positives) -> Curve:
    def at_grid(scores: Array, weights: Array) -> Array:
        recalls, precisions, _ = metrics.precision_recall_curve(scores, positive, weights)
        return _precision_at(recalls, precisions)

    def average(scores: Array, weights: Array) -> Array:
        return metrics.average_precision(scores, positive, weights)

    x, y, _ = metrics.precision_recall_curve(scores, positive)
    value, bounds = metrics.average_precision(scores, positive), _resample(average, scores, positive)
    area = Estimate(float(value), float(bounds[0]), float(bounds[1]), count=int(positive.sum()))
    return Curve(x, y, *_resample(at_grid, scores, positive), area, float(positive.mean()))


def _resample(measure: Callable[..., Array], scores: Array, positive: Positives) -> tuple[Array, Array]:
    low, high = metrics.bootstrap_interval(measure, scores, samples=SAMPLES, strata=positive.astype(np.intp))
    return low, high


def _precision_at(recalls: Array, precisions: Array) -> Array:
    """The precision at the first point that reaches each recall of the grid [..., G]."""
    rows = zip(recalls.reshape(-1, recalls.shape[-1]), precisions.reshape(-1, precisions.shape[-1]), strict=True)
    values = [
        precision[np.minimum(np.searchsorted(recall, GRID - 1e-12), len(recall) - 1)] for recall, precision in rows
    ]
    return np.stack(values).reshape(*recalls.shape[:-1], len(GRID))


def _reliability(probs: Array, labels: npt.NDArray[np.int64]) -> Reliability:
    confidence, hits = metrics.confidence_and_hits(probs, labels)
    sure, right, counts = metrics.reliability(confidence, hits, BINS)
    low, high = metrics.wilson_interval(np.round(np.nan_to_num(right) * counts), counts)
    return Reliability(sure, right, low, high, counts, metrics.calibration_error(probs, labels, BINS))
