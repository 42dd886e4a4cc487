"""AUC, MCA, recalls and their intervals; NumPy only.

N images, n classes. Labels are class indices [N], or 0/1 [N, n] in a multi-label set, where probabilities are one
sigmoid a label and a label is predicted at 0.5. Every metric takes `weights`, how often each image counts, with any
leading axes: [S, N] gives the metric of S resamples at once. What cannot be computed, such as the AUC of a class
that no image has, is NaN and is left out of means.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]


def predict(probs: Array, multi_label: bool = False) -> npt.NDArray[np.intp]:
    """The most probable class [N]; in a multi-label set each label's 0/1 [N, n]."""
    return (probs >= 0.5).astype(np.intp) if multi_label else probs.argmax(axis=-1)


def decide(probs: Array, multi_label: bool = False) -> list[int | tuple[int, ...]]:
    """What `predict` says of each image as a label: its class, or in a multi-label set the labels that are present.

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
    """Share of each class's images that are recognised [..., n]."""
    truth, predicted = _truth_and_predicted(probs, labels)
    return _share(truth & predicted, truth, weights)


def precision(probs: Array, labels: Array, weights: Array | None = None) -> Floats:
    """Share of the images predicted as each class that are of it [..., n]."""
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
    """Images of each class (row) by what they were taken for (column) [n, n]."""
    return np.bincount(labels * n + predicted, minlength=n * n).reshape(n, n).astype(np.int64)


def prior_corrected(probs: Array, frequencies: Array, *, multi_label: bool = False) -> Floats:
    """What a balanced prior would predict: the softmax divided by the labeled class frequencies, normalised again.

    In a multi-label set each label is a problem of two classes, present and absent, and both are divided; a label that
    no labeled image has, or every one, is left as it is.
    """
    probs = np.asarray(probs, dtype=np.float64)
    if multi_label:
        frequencies = np.where((frequencies > 0) & (frequencies < 1), frequencies, 0.5)
    present = probs / frequencies
    total = present + (1 - probs) / (1 - frequencies) if multi_label else present.sum(axis=-1, keepdims=True)
    return np.asarray(present / total, dtype=np.float64)


def bootstrap_interval(
    statistic: Callable[..., Any],
    *arrays: Array,
    samples: int = 1000,
    seed: int = 0,
    level: float = 0.95,
    strata: Array | None = None,
) -> Floats:
    """Percentile interval of `statistic(*arrays, weights)` under resampling of images: [2, ...], low and high.

    With `strata` [N] images are redrawn within each stratum, so that no class vanishes. The draws depend on `seed`
    and `strata` alone: a statistic that takes two models' probabilities gets a paired interval.

    >>> probs, labels = np.array([[0.9, 0.1], [0.4, 0.6], [0.3, 0.7], [0.2, 0.8]]), np.array([0, 0, 1, 1])
    >>> low, high = bootstrap_interval(mca, probs, labels, strata=labels)
    >>> float(low), float(high)
    (0.5, 1.0)
    """
    generator = np.random.default_rng(seed)
    size = len(arrays[0])
    strata = np.zeros(size, dtype=np.intp) if strata is None else strata
    # Blocks keep the weights of a large test set from filling the memory.
    block = max(1, 2**22 // size)
    values = [
        statistic(*arrays, weights=_resample(strata, min(block, samples - start), generator))
        for start in range(0, samples, block)
    ]
    return _percentiles(np.concatenate(values), level)


def paired_interval(differences: Array, samples: int = 10000, seed: int = 0, level: float = 0.95) -> Floats:
    """Percentile interval of the mean of paired differences, one a seed, under resampling of seeds: low and high."""
    differences = np.asarray(differences, dtype=np.float64)
    draws = np.random.default_rng(seed).integers(len(differences), size=(samples, len(differences)))
    return _percentiles(differences[draws].mean(axis=1), level)


def _resample(strata: Array, samples: int, generator: np.random.Generator) -> Floats:
    """How often each image is drawn in each of the samples [samples, N]."""
    weights = np.empty((samples, len(strata)))
    for stratum in np.unique(strata):
        (members,) = np.nonzero(strata == stratum)
        draws = generator.integers(len(members), size=(samples, len(members)))
        cells = draws + len(members) * np.arange(samples)[:, None]
        weights[:, members] = np.bincount(cells.ravel(), minlength=cells.size).reshape(cells.shape)
    return weights


def _percentiles(values: Floats, level: float) -> Floats:
    """Low and high of the defined values along the first axis; NaN where none is defined."""
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
