"""A linear probe: logistic regression on features, with its regularisation chosen by cross-validation on labeled
images.

It is the control for every training on a pretrained network, and the start of a head on frozen features.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Groups = Sequence[object] | Ints | None
"""The group of each image; an image with None is a group of its own."""
Balance = Literal["weights", "prior", "none"]
"""How class frequencies are removed from predictions: class weights in the loss, division by the prior, or not."""

STRENGTHS: tuple[float, ...] = tuple(10.0 ** (power / 2) for power in range(-10, 3))
"""Values of C to choose from, for standardised features."""

PATIENCE = 2
"""How many larger values of C are tried after the best one. The largest take most of the time."""

FOLDS = 5
MANY_VALUES = 4_000_000
"""Size of a feature matrix from which on a second thread is faster."""
MOST_CHOOSING = 2000
"""Largest number of images for cross-validation. More cost time and hardly change the choice."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A linear head, weights [n, W] and biases [n], and its regularisation.

    `penalty` [n] is the weight of ½‖w‖² of each row relative to the mean loss. `strength` is scikit-learn's C, averaged
    over labels if each has its own.
    """

    weight: Array
    bias: Array
    penalty: Array
    strength: float


def fit_probe(
    features: npt.NDArray[np.floating],
    targets: Ints,
    num_classes: int,
    groups: Groups = None,
    balance: Balance = "weights",
    seed: int = 0,
) -> Probe:
    """Fit the probe to standardised features [N, W] and class indices [N], or 0/1 [N, K] with a regression per label.

    Images of one of the `groups` are in one fold of the cross-validation. If N < W the regression is computed in the
    N-dimensional space of the features, which gives the same result.
    """
    values = np.asarray(features, np.float64)
    with limit_threads(values):
        return _fit_labels(values, targets, num_classes, groups, balance, seed)


def limit_threads(values: Array) -> AbstractContextManager[object]:
    """One thread for small matrices: those that share them wait for each other, on a busy machine twenty times as long
    as the work takes."""
    from threadpoolctl import threadpool_limits

    limits: AbstractContextManager[object] = threadpool_limits(1 if values.size < MANY_VALUES else None)
    return limits


def _fit_labels(values: Array, targets: Ints, num_classes: int, groups: Groups, balance: Balance, seed: int) -> Probe:
    turn: Array | None = None
    if len(values) < values.shape[1]:
        left, lengths, turn = np.linalg.svd(values, full_matrices=False)
        values = left * lengths
    if targets.ndim == 1:
        probe = _fit_one(values, targets, num_classes, groups, balance, seed)
    else:
        labels = [_fit_one(values, targets[:, label], 2, groups, balance, seed) for label in range(num_classes)]
        # The logit of a label is the difference of the two classes, present and absent.
        probe = Probe(
            np.stack([each.weight[1] - each.weight[0] for each in labels]),
            np.stack([each.bias[1] - each.bias[0] for each in labels]),
            np.stack([each.penalty[0] / 2.0 for each in labels]),
            float(np.mean([each.strength for each in labels])),
        )
    return probe if turn is None else Probe(probe.weight @ turn, probe.bias, probe.penalty, probe.strength)


def _fit_one(values: Array, targets: Ints, num_classes: int, groups: Groups, balance: Balance, seed: int) -> Probe:
    counts = np.bincount(targets, minlength=num_classes)
    if (counts > 0).sum() == 1:  # a label of all images or of none
        bias = np.log((counts + 0.5) / (counts.sum() + 0.5 * num_classes))
        return Probe(np.zeros((num_classes, values.shape[1])), bias, np.full(num_classes, 1.0 / len(values)), 1.0)
    strength = choose_strength(values, targets, num_classes, groups, balance, seed)
    weight, bias = _Regression(values, targets, num_classes, balance).fit(strength, tolerance=1e-5)
    # With two classes scikit-learn penalises the difference of the rows; each row is half of it.
    rows = 2.0 if num_classes == 2 else 1.0
    return Probe(weight, bias, np.full(num_classes, rows / (strength * len(values))), strength)


def choose_strength(
    values: Array, targets: Ints, num_classes: int, groups: Groups, balance: Balance, seed: int = 0
) -> float:
    """Choose the C with the smallest loss on held-out images, with equal weights of the classes."""
    rng = np.random.default_rng(seed)
    folds = assign_folds(targets, groups, rng)
    if not (folds >= 0).any():
        return 1e-3
    if len(values) > MOST_CHOOSING:
        # Frequent classes are cut first, so that rare ones keep all images.
        kept = np.sort(_even_sample(targets, MOST_CHOOSING, rng))
        values, targets, folds = values[kept], targets[kept], folds[kept]
    counts = np.bincount(targets[folds >= 0], minlength=num_classes)
    known = counts > 0
    parts = [folds == fold for fold in np.unique(folds[folds >= 0])]
    regressions = [_Regression(values[~held], targets[~held], num_classes, balance) for held in parts]
    losses: list[float] = []
    for strength in STRENGTHS:
        sums = np.zeros(num_classes)
        for held, regression in zip(parts, regressions, strict=True):
            weight, bias = regression.fit(strength, tolerance=1e-3)
            logits = values[held] @ weight.T + bias
            logits -= logits.max(axis=1, keepdims=True)
            logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
            own = -logs[np.arange(len(logs)), targets[held]]
            sums += np.bincount(targets[held], own, minlength=num_classes)
        losses.append(float((sums[known] / counts[known]).mean()))
        if len(losses) - np.argmin(losses) > PATIENCE:
            break
    return STRENGTHS[int(np.argmin(losses))]


def assign_folds(
    labels: Ints,
    groups: Groups,
    rng: np.random.Generator,
    folds: int = FOLDS,
    *,
    every_image: bool = False,
) -> Ints:
    """Assign each image to a fold, whole groups together, each class spread evenly; −1 for images that are in no fold.

    Labels are class indices [N], or 0/1 [N, K], where images without any label count as a class. A class with fewer
    groups than folds is missing in some folds. A class with a single group is in no fold, so it is always trained on,
    unless `every_image` is set.
    """
    members: dict[object, list[int]] = {}
    for place in rng.permutation(len(labels)).tolist():
        group = None if groups is None else groups[place]
        members.setdefault(place if group is None else group, []).append(place)
    classes = (
        np.eye(int(labels.max()) + 1, dtype=np.int64)[labels]
        if labels.ndim == 1
        else np.column_stack((labels, ~labels.any(axis=1)))
    )
    counts = classes.sum(axis=0)
    groups_of = np.zeros(len(counts), np.int64)
    for places in members.values():
        groups_of += classes[places].any(axis=0)
    assigned = np.full(len(labels), -1, np.int64)
    filled = np.zeros((folds, len(counts)))
    # Groups of rare classes first; those of frequent classes then even out the sizes.
    for places in sorted(members.values(), key=lambda own: counts[classes[own].any(axis=0)].min()):
        own = classes[places].sum(axis=0)
        if not every_image and (groups_of[own > 0] == 1).any():
            continue
        rarest = int(np.where(own > 0, counts, counts.max() + 1).argmin())
        fold = min(range(folds), key=lambda each: (filled[each, rarest], filled[each].sum()))
        assigned[places] = fold
        filled[fold] += own
    return assigned


class _Regression:
    """scikit-learn's logistic regression on one set of images, fitted for several C in turn."""

    def __init__(self, values: Array, targets: Ints, num_classes: int, balance: Balance) -> None:
        from sklearn.linear_model import LogisticRegression

        self.values, self.targets, self.num_classes = values, targets, num_classes
        self.model: Any = LogisticRegression(
            class_weight="balanced" if balance == "weights" else None, max_iter=500, warm_start=True
        )
        frequencies = np.bincount(targets, minlength=num_classes) / len(targets)
        self.shift = np.log(np.maximum(frequencies, 1e-12)) if balance == "prior" else np.zeros(num_classes)

    def fit(self, strength: float, tolerance: float) -> tuple[Array, Array]:
        """Weights [n, W] and biases [n]; a class without images gets a bias that excludes it."""
        import warnings

        from sklearn.exceptions import ConvergenceWarning

        self.model.set_params(C=strength, tol=tolerance)
        # Those that cross-validation looks at may be few where all images are many.
        with limit_threads(self.values), warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # 500 iterations are close enough
            self.model.fit(self.values, self.targets)
        weight = np.zeros((self.num_classes, self.values.shape[1]))
        bias = np.full(self.num_classes, -30.0)
        rows, offsets = self.model.coef_, self.model.intercept_
        if len(rows) == 1:
            rows, offsets = np.stack([-rows[0], rows[0]]) / 2.0, np.array([-offsets[0], offsets[0]]) / 2.0
        weight[self.model.classes_], bias[self.model.classes_] = rows, offsets
        return weight, bias - np.where(bias > -30.0, self.shift, 0.0)


def _even_sample(targets: Ints, most: int, rng: np.random.Generator) -> Ints:
    """Indices of at most `most` images, with class sizes as equal as possible."""
    order = rng.permutation(len(targets))
    ranks = np.empty(len(targets), np.int64)
    for label in np.unique(targets):
        own = order[targets[order] == label]
        ranks[own] = np.arange(len(own))
    return np.argsort(ranks, kind="stable")[:most]
