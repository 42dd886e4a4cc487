"""AUC, MCA, recalls, curves, calibration and their intervals; NumPy only.

N images, n classes. Labels are class indices [N], or 0/1 [N, n] in a multi-label set, where probabilities are one
sigmoid per label and a label is predicted at 0.5. Every metric takes `weights`, the number of times each image counts,
with any leading axes: [S, N] gives the metric of S resamples at once. Undefined values, such as the AUC of a class
without images, are NaN and left out of means.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any, overload

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]


def predict(probs: Array, multi_label: bool = False) -> npt.NDArray[np.intp]:
    """The most probable class [N]; in a multi-label set each label's 0/1 [N, n]."""
    return (probs >= 0.5).astype(np.intp) if multi_label else probs.argmax(axis=-1)


def decide(probs: Array, multi_label: bool = False) -> list[int | tuple[int, ...]]:
    """The predicted class of each image, or in a multi-label set the tuple of its predicted labels.

    >>> probs = np.array([[0.2, 0.8], [0.6, 0.5]])
    >>> decide(probs), decide(probs, multi_label=True)
    ([1, 0], [(1,), (0, 1)])
    """
    predicted = predict(probs, multi_label)
    return [tuple(np.flatnonzero(row).tolist()) if multi_label else int(row) for row in predicted]


@overload
def roc_auc(scores: Array, positive: Array) -> float: ...
@overload
def roc_auc(scores: Array, positive: Array, weights: Array) -> Floats: ...
def roc_auc(scores: Array, positive: Array, weights: Array | None = None) -> float | Floats:
    """Probability that a positive image scores above a negative one, a tie counting half."""
    positive = np.asarray(positive, dtype=bool)
    counts = np.ones(len(scores)) if weights is None else np.asarray(weights, dtype=np.float64)
    order = np.flatnonzero(~positive)[np.argsort(scores[~positive])]
    below = np.zeros((*counts.shape[:-1], len(order) + 1))
    np.cumsum(counts[..., order], axis=-1, out=below[..., 1:])
    lower = np.searchsorted(scores[order], scores[positive], side="left")
    upper = np.searchsorted(scores[order], scores[positive], side="right")
    positive_counts = counts[..., positive]
    beaten = np.einsum("...i,...i->...", positive_counts, below[..., lower] + below[..., upper]) / 2
    area = _divide(beaten, positive_counts.sum(axis=-1) * below[..., -1])
    return float(area) if weights is None else area


def per_class_auc(probs: Array, labels: Array, weights: Array | None = None) -> Floats:
    """One-vs-rest AUC of each class [..., n]."""
    counts = np.ones(len(probs)) if weights is None else weights
    columns = zip(probs.T, _indicators(labels, probs.shape[1]).T, strict=True)
    return np.stack([roc_auc(scores, positive, counts) for scores, positive in columns], axis=-1)


@overload
def auc(probs: Array, labels: Array) -> float: ...
@overload
def auc(probs: Array, labels: Array, weights: Array) -> Floats: ...
def auc(probs: Array, labels: Array, weights: Array | None = None) -> float | Floats:
    """Unweighted mean of the one-vs-rest AUC over the classes that have one."""
    mean = _mean(per_class_auc(probs, labels, weights))
    return float(mean) if weights is None else mean


def recall(probs: Array, labels: Array, weights: Array | None = None) -> Floats:
    """Share of each class's images that are predicted as it [..., n]."""
    truth, predicted = _truth_and_predicted(probs, labels)
    return _share(truth & predicted, truth, weights)


def precision(probs: Array, labels: Array, weights: Array | None = None) -> Floats:
    """Share of the images predicted as each class that belong to it [..., n]."""
    truth, predicted = _truth_and_predicted(probs, labels)
    return _share(truth & predicted, predicted, weights)


@overload
def mca(probs: Array, labels: Array) -> float: ...
@overload
def mca(probs: Array, labels: Array, weights: Array) -> Floats: ...
def mca(probs: Array, labels: Array, weights: Array | None = None) -> float | Floats:
    """Mean class accuracy: the mean recall over the classes present.

    In a multi-label set each label is a problem of two classes, present and absent, and both recalls enter the mean.
    """
    recalls = recall(probs, labels, weights)
    if labels.ndim == 2:
        truth, predicted = _truth_and_predicted(probs, labels)
        recalls = np.concatenate([recalls, _share(~truth & ~predicted, ~truth, weights)], axis=-1)
    mean = _mean(recalls)
    return float(mean) if weights is None else mean


def confusion(labels: Array, predicted: Array, n: int) -> npt.NDArray[np.int64]:
    """Number of images of each class (row) and prediction (column) [n, n]."""
    return np.bincount(labels * n + predicted, minlength=n * n).reshape(n, n).astype(np.int64)


def shift_frequencies(probs: Array, before: Array, after: Array, *, multi_label: bool = False) -> Floats:
    """Convert probabilities to other class frequencies: p · after / before, normalised.

    A class with a frequency of 0 before does not change. In a multi-label set each label has two classes, present and
    absent; a label of all images or of none does not change.
    """
    probs, before, after = (np.asarray(each, dtype=np.float64) for each in (probs, before, after))
    known = (before > 0) & (before < 1) if multi_label else before > 0
    usual = 0.5 if multi_label else 1.0
    before, after = np.where(known, before, usual), np.where(known, after, usual)
    present = probs * after / before
    total = present + (1 - probs) * (1 - after) / (1 - before) if multi_label else present.sum(axis=-1, keepdims=True)
    return np.asarray(present / total.clip(1e-12), dtype=np.float64)


def prior_corrected(probs: Array, frequencies: Array, *, multi_label: bool = False) -> Floats:
    """Probabilities for equal class frequencies: divided by the labeled class frequencies and normalised."""
    balanced = np.full(np.shape(frequencies), 0.5 if multi_label else 1.0)
    return shift_frequencies(probs, frequencies, balanced, multi_label=multi_label)


def bootstrap_interval(
    statistic: Callable[..., Any],
    *arrays: Array,
    samples: int = 1000,
    seed: int = 0,
    level: float = 0.95,
    strata: Array | None = None,
) -> Floats:
    """Percentile interval of `statistic(*arrays, weights)` under resampling of images: [2, ...], low and high.

    With `strata` [N] images are resampled within each stratum, so that no class is lost. The draws depend only on
    `seed` and `strata`, so a statistic of two models' probabilities gets a paired interval.

    >>> probs, labels = np.array([[0.9, 0.1], [0.4, 0.6], [0.3, 0.7], [0.2, 0.8]]), np.array([0, 0, 1, 1])
    >>> low, high = bootstrap_interval(mca, probs, labels, strata=labels)
    >>> float(low), float(high)
    (0.5, 1.0)
    """
    generator = np.random.default_rng(seed)
    size = len(arrays[0])
    strata = np.zeros(size, dtype=np.intp) if strata is None else strata
    # In blocks, because the weights of a large test set may not fit into memory.
    block = max(1, 2**22 // size)
    values = [
        statistic(*arrays, weights=_resample(strata, min(block, samples - start), generator))
        for start in range(0, samples, block)
    ]
    return _percentiles(np.concatenate(values), level)


def wilson_interval(hits: npt.ArrayLike, counts: npt.ArrayLike, level: float = 0.95) -> Floats:
    """Wilson's score interval of shares hits / counts: [2, ...], low and high; NaN if the count is 0.

    Unlike a bootstrap interval it has a width even if all or none of a few images are hits.

    >>> wilson_interval(np.array([0, 2]), np.array([2, 2])).round(3).tolist()
    [[0.0, 0.342], [0.658, 1.0]]
    """
    hits, counts = np.asarray(hits, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    z = NormalDist().inv_cdf((1 + level) / 2)
    share = _divide(hits, counts)
    centre = _divide(hits + z * z / 2, counts + z * z)
    spread = _divide(share * (1 - share) * counts + z * z / 4, (counts + z * z) ** 2)
    half = z * np.sqrt(spread)
    # Exact at the ends, where rounding would leave 1e-17.
    low = np.where(hits == 0, 0.0, np.clip(centre - half, 0, 1))
    high = np.where(hits == counts, 1.0, np.clip(centre + half, 0, 1))
    return np.where(counts > 0, np.stack([low, high]), np.nan)


def mean_interval(hits: Array, counts: Array, level: float = 0.95) -> Floats:
    """Interval of the mean of independent shares hits / counts [n], from their Wilson intervals: low and high.

    Square-and-add (Zou and Donner, 2008): the distances of the shares to their bounds add up like standard errors.
    Shares with a count of 0 are left out.
    """
    hits, counts = np.asarray(hits, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    known = counts > 0
    if not known.any():
        return np.array([np.nan, np.nan])
    shares = hits[known] / counts[known]
    low, high = wilson_interval(hits[known], counts[known], level)
    below, above = (np.sqrt(((shares - bound) ** 2).sum()) / len(shares) for bound in (low, high))
    return np.array([max(shares.mean() - below, 0.0), min(shares.mean() + above, 1.0)])


def difference_interval(ours: Array, theirs: Array, level: float = 0.95) -> Floats:
    """Interval of the difference of two shares of the same images, with hits 0/1 [N] each: low and high.

    Newcombe (1998), method 10: square-and-add of the Wilson bounds, with the correlation of the two. Unlike a bootstrap
    interval it includes 0 if the models differ on a single image.
    """
    ours, theirs = np.asarray(ours, dtype=bool), np.asarray(theirs, dtype=bool)
    count = len(ours)
    if not count:
        return np.array([np.nan, np.nan])
    p, q = ours.mean(), theirs.mean()
    (low_p, high_p), (low_q, high_q) = (wilson_interval(each.sum(), count, level) for each in (ours, theirs))
    both, neither = (ours & theirs).sum(), (~ours & ~theirs).sum()
    only_ours, only_theirs = (ours & ~theirs).sum(), (~ours & theirs).sum()
    scale = math.sqrt(ours.sum() * (~ours).sum() * theirs.sum() * (~theirs).sum())
    excess = float(both * neither - only_ours * only_theirs)
    # Newcombe's continuity correction of a positive correlation.
    correlation = max(excess - count / 2, 0.0) / scale if excess > 0 else excess / scale if scale else 0.0

    def distance(first: float, second: float) -> float:
        return math.sqrt(max(first**2 + second**2 - 2 * correlation * first * second, 0.0))

    low = p - q - distance(float(p - low_p), float(high_q - q))
    high = p - q + distance(float(high_p - p), float(q - low_q))
    return np.array([max(low, -1.0), min(high, 1.0)])


def roc_curve(scores: Array, positive: Array, weights: Array | None = None) -> tuple[Floats, Floats, Floats]:
    """False positive rate, true positive rate [..., T + 1] and their decreasing thresholds [T + 1].

    The first threshold is infinite, so a curve begins at (0, 0). Images with the same score share a threshold.
    """
    thresholds, false, true = _counts_above(scores, positive, weights)
    return _divide(false, false[..., -1:]), _divide(true, true[..., -1:]), thresholds


def precision_recall_curve(
    scores: Array, positive: Array, weights: Array | None = None
) -> tuple[Floats, Floats, Floats]:
    """Recall, precision [..., T] and their decreasing thresholds [T]."""
    thresholds, false, true = _counts_above(scores, positive, weights)
    return _divide(true, true[..., -1:])[..., 1:], _divide(true, true + false)[..., 1:], thresholds[1:]


def average_precision(scores: Array, positive: Array, weights: Array | None = None) -> Floats:
    """Area under the precision-recall curve as a step function: the mean precision at each positive image."""
    recalls, precisions, _ = precision_recall_curve(scores, positive, weights)
    steps = np.diff(recalls, prepend=0.0, axis=-1)
    return np.asarray((steps * np.nan_to_num(precisions)).sum(axis=-1), dtype=np.float64)


def curve_at(grid: Array, x: Array, y: Array) -> Floats:
    """The highest y of a curve with increasing x [..., T] at or before each point of the grid [..., G]."""
    flat_x, flat_y = x.reshape(-1, x.shape[-1]), np.maximum.accumulate(y.reshape(-1, y.shape[-1]), axis=-1)
    places = [np.searchsorted(row, grid + 1e-12, side="right") - 1 for row in flat_x]
    values = [
        np.where(place >= 0, row[np.maximum(place, 0)], np.nan) for row, place in zip(flat_y, places, strict=True)
    ]
    return np.stack(values).reshape(*x.shape[:-1], len(grid))


def sensitivity_at(specificity: float, scores: Array, positive: Array, weights: Array | None = None) -> Floats:
    """The largest true positive rate with a true negative rate of at least `specificity` [...]."""
    false, true, _ = roc_curve(scores, positive, weights)
    return curve_at(np.array([1 - specificity]), false, true)[..., 0]


def confidence_and_hits(probs: Array, labels: Array) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """The probability of each decision and whether it was right, both [M], to measure calibration.

    A decision is the class of an image; in a multi-label set, each label is a decision, present or absent.
    """
    probs = np.asarray(probs, dtype=np.float64)
    multi_label = labels.ndim == 2
    sure = np.maximum(probs, 1 - probs) if multi_label else probs.max(axis=-1, initial=0.0)
    return sure.ravel(), (predict(probs, multi_label) == labels).ravel()


def reliability(confidence: Array, hits: Array, bins: int = 10) -> tuple[Floats, Floats, npt.NDArray[np.int64]]:
    """Mean confidence, share of hits and count in each of equally wide bins of confidence, (0, 0.1], (0.1, 0.2] …"""
    place = np.clip(np.ceil(np.asarray(confidence) * bins - 1e-12).astype(np.intp) - 1, 0, bins - 1)
    counts = np.bincount(place, minlength=bins)
    sums = [np.bincount(place, weights=np.asarray(values, dtype=np.float64), minlength=bins) for values in
            (confidence, hits)]  # fmt: skip
    return _divide(sums[0], counts), _divide(sums[1], counts), counts.astype(np.int64)


def calibration_error(probs: Array, labels: Array, bins: int = 10) -> float:
    """Expected calibration error: the gap between confidence and share of hits, averaged over the decisions."""
    confidence, hits = confidence_and_hits(probs, labels)
    sure, right, counts = reliability(confidence, hits, bins)
    gaps = np.where(counts > 0, np.abs(sure - right), 0.0)
    return float(_divide((gaps * counts).sum(), counts.sum()))


def scale_temperature(probs: Array, temperature: float, *, multi_label: bool = False) -> Floats:
    """Probabilities of the logits divided by a temperature. Above 1 they are less confident; the order stays."""
    probs = np.clip(np.asarray(probs, dtype=np.float64), 1e-12, 1.0)
    if multi_label:
        logits = (np.log(probs) - np.log(np.clip(1 - probs, 1e-12, 1.0))) / temperature
        return np.asarray(1 / (1 + np.exp(-logits)), dtype=np.float64)
    logits = np.log(probs) / temperature
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True), dtype=np.float64)


def log_loss(probs: Array, labels: Array) -> float:
    """Mean negative logarithm of the probability of the truth, over images, or over all labels of a multi-label set."""
    probs = np.clip(np.asarray(probs, dtype=np.float64), 1e-12, 1 - 1e-12)
    chosen = np.where(labels == 1, probs, 1 - probs) if labels.ndim == 2 else probs[np.arange(len(labels)), labels]
    return float(-np.log(chosen).mean())


def coverage_curve(confidence: Array, hits: Array) -> tuple[Floats, Floats]:
    """Share of decisions kept, most confident first, and share of hits among them [M].

    Equal confidences are kept together.
    """
    order = np.argsort(-np.asarray(confidence), kind="stable")
    ranked, kept = np.asarray(confidence)[order], np.arange(1, len(order) + 1)
    right = np.cumsum(np.asarray(hits, dtype=np.float64)[order])
    last = np.append(ranked[1:] != ranked[:-1], True)[: len(order)]
    return kept[last] / max(len(order), 1), right[last] / kept[last]


def paired_interval(differences: Array, samples: int = 10000, seed: int = 0, level: float = 0.95) -> Floats:
    """Percentile interval of the mean of paired differences, one per seed, under resampling of seeds: low and high."""
    differences = np.asarray(differences, dtype=np.float64)
    draws = np.random.default_rng(seed).integers(len(differences), size=(samples, len(differences)))
    return _percentiles(differences[draws].mean(axis=1), level)


def _counts_above(scores: Array, positive: Array, weights: Array | None) -> tuple[Floats, Floats, Floats]:
    """Decreasing thresholds [T + 1], from infinity, and the negatives and positives counted above each [..., T + 1]."""
    scores, positive = np.asarray(scores, dtype=np.float64), np.asarray(positive, dtype=bool)
    counts = np.ones(len(scores)) if weights is None else np.asarray(weights, dtype=np.float64)
    order = np.argsort(-scores, kind="stable")
    last = np.flatnonzero(np.append(np.diff(scores[order]) != 0, True)[: len(order)])

    def above(chosen: Array) -> Floats:
        sums = np.cumsum((counts * chosen)[..., order], axis=-1)[..., last]
        return np.concatenate([np.zeros((*sums.shape[:-1], 1)), sums], axis=-1)

    return np.append(np.inf, scores[order][last]), above(~positive), above(positive)


def _resample(strata: Array, samples: int, generator: np.random.Generator) -> Floats:
    """The number of times each image is drawn in each resample [samples, N]."""
    weights = np.empty((samples, len(strata)))
    for stratum in np.unique(strata):
        (members,) = np.nonzero(strata == stratum)
        draws = generator.integers(len(members), size=(samples, len(members)))
        cells = draws + len(members) * np.arange(samples)[:, None]
        weights[:, members] = np.bincount(cells.ravel(), minlength=cells.size).reshape(cells.shape)
    return weights


def _percentiles(values: Floats, level: float) -> Floats:
    """Low and high percentile of the defined values along the first axis; NaN if none is defined."""
    undefined = np.isnan(values).all(axis=0)
    bounds = np.nanpercentile(np.where(undefined, 0.0, values), [50 * (1 - level), 50 * (1 + level)], axis=0)
    return np.where(undefined, np.nan, bounds)


def _indicators(labels: Array, n: int) -> npt.NDArray[np.bool_]:
    return labels.astype(bool) if labels.ndim == 2 else np.equal.outer(labels, np.arange(n))


def _truth_and_predicted(probs: Array, labels: Array) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    n = probs.shape[1]
    return _indicators(labels, n), _indicators(predict(probs, multi_label=labels.ndim == 2), n)


def _share(hits: Array, of: Array, weights: Array | None) -> Floats:
    weights = np.ones(len(of)) if weights is None else weights
    return _divide(weights @ hits.astype(np.float64), weights @ of.astype(np.float64))


def _mean(values: Floats) -> Floats:
    defined = ~np.isnan(values)
    return _divide(np.where(defined, values, 0.0).sum(axis=-1), defined.sum(axis=-1))


def _divide(numerator: Array, denominator: Array) -> Floats:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.true_divide(numerator, denominator), dtype=np.float64)
