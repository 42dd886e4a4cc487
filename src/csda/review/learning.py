"""A linear probe on frozen features, trained in seconds on the labels so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from csda.data.prepared import PreparedData
from csda.data.records import Dataset, Split
from csda.data.store import open_pixels
from csda.engine import choose_device
from csda.features import open_features
from csda.models.weights import read_weights
from csda.presets import configure
from csda.probe import Probe, assign_folds, fit_probe
from csda.progress import Reporter

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Learned:
    """A probe, with the mean and scale that standardise its features."""

    probe: Probe
    mean: Floats
    scale: Floats
    multi_label: bool

    def predict(self, features: Array) -> Floats:
        """Probabilities [N, n] of features [N, W]."""
        logits = standardize(features, self.mean, self.scale) @ self.probe.weight.T + self.probe.bias
        return to_probs(logits, self.multi_label)


class _Progress(Reporter):
    """Reports the share of the features that has been computed."""

    def __init__(self, tell: Callable[[float], None]) -> None:
        self.tell = tell

    def pixels(self, done: int, total: int) -> None:
        self.tell(0.2 * done / max(total, 1))

    def features(self, done: int, total: int) -> None:
        self.tell(0.2 + 0.8 * done / max(total, 1))


def read_features(dataset: Dataset, tell: Callable[[float], None]) -> npt.NDArray[np.float32]:
    """Features [N, W] of a data set by the frozen network of the preset `features`, computed unless the cache has them.

    `tell` is called with the share that is done. An unreadable image gets the features of a black one.
    """
    config = configure({"data": str(dataset.root or "synthetic"), "preset": "features", "method": "linear-probe"})
    weights = read_weights(config.backbone, config.pretrained, config.weights)
    assert weights is not None
    reporter = _Progress(tell)
    store = open_pixels(dataset, config.image_size, aspect=config.aspect, max_unreadable=1.0, progress=reporter.pixels)
    data = PreparedData(dataset, store.array, Split((), (), (), (), {}), (), "", store.keys)
    return open_features(config, data, weights, choose_device(config.device), reporter).array


def learn(
    features: Array,
    labeled: Array,
    labels: Ints,
    num_classes: int,
    groups: Sequence[str | None] | None = None,
    seed: int = 0,
) -> Learned:
    """Train the probe on some rows of the features.

    `labeled` are positions in `features` [N, W], with the labels [M] or 0/1 [M, K]. Features are standardised over all
    rows.
    """
    mean, deviation = features.mean(axis=0, dtype=np.float64), features.std(axis=0, dtype=np.float64)
    scale = 1 / np.maximum(deviation, 0.01 * max(float(deviation.mean()), 1e-6))
    values = standardize(features[labeled], mean, scale)
    return Learned(fit_probe(values, labels, num_classes, groups, seed=seed), mean, scale, labels.ndim == 2)


def learn_again(learned: Learned, features: Array, labels: Ints) -> Learned:
    """A probe for class indices [M] and features [M, W], with the standardisation and regularisation of an earlier one.
    This saves the cross-validation, which is most of the work.
    """
    from sklearn.linear_model import LogisticRegression

    values = standardize(features, learned.mean, learned.scale)
    model = LogisticRegression(C=learned.probe.strength, class_weight="balanced", max_iter=500, tol=1e-4)
    model.fit(values, labels)
    rows, offsets = model.coef_, model.intercept_
    if len(rows) == 1:
        rows, offsets = np.stack([-rows[0], rows[0]]) / 2, np.array([-offsets[0], offsets[0]]) / 2
    weight, bias = np.zeros_like(learned.probe.weight), np.full_like(learned.probe.bias, -30.0)
    weight[model.classes_], bias[model.classes_] = rows, offsets
    return replace(learned, probe=replace(learned.probe, weight=weight, bias=bias))


def leave_out(
    learned: Learned,
    features: Array,
    labels: Ints,
    groups: Sequence[str | None] | None = None,
    seed: int = 0,
) -> Floats:
    """Out-of-fold probabilities [M, n] of features [M, W], each by a regression on the other folds with the
    regularisation of the probe. NaN for an image that is in no fold, because it is the only one of its class.
    """
    values, num_classes = standardize(features, learned.mean, learned.scale), len(learned.probe.bias)
    from sklearn.linear_model import LogisticRegression

    folds = assign_folds(labels, groups, np.random.default_rng(seed))
    if values.shape[0] < values.shape[1]:
        left, lengths, _ = np.linalg.svd(values, full_matrices=False)
        values = left * lengths
    probs = np.full((len(values), num_classes), np.nan)
    columns = [labels] if labels.ndim == 1 else list(labels.T)
    for fold in np.unique(folds[folds >= 0]):
        held = folds == fold
        for position, column in enumerate(columns):
            known = np.unique(column[~held])
            found = np.zeros((held.sum(), num_classes if labels.ndim == 1 else 2))
            if len(known) == 1:
                found[:, known[0]] = 1
            else:
                model = LogisticRegression(C=learned.probe.strength, class_weight="balanced", max_iter=200, tol=1e-3)
                found[:, known] = model.fit(values[~held], column[~held]).predict_proba(values[held])
            if labels.ndim == 1:
                probs[held] = found
            else:
                probs[held, position] = found[:, 1]
    return probs


def align(labeled_probs: Floats, labels: Ints, probs: Floats) -> Floats | None:
    """Eq. (10) for probabilities [N, n], with λ^x from out-of-fold predictions; None if a class has no label.

    The row of an image without such a prediction is uniform.
    """
    count = probs.shape[1]
    if labels.ndim == 2 or len(np.unique(labels)) < count:
        return None
    import torch

    from csda.marginals import ClassMarginals

    marginals = ClassMarginals(count).double()
    known = np.where(np.isfinite(labeled_probs), labeled_probs, 1 / count)
    marginals.start(torch.from_numpy(known), torch.from_numpy(labels))
    unlabeled = torch.from_numpy(probs)
    for _ in range(60):  # until the moving average has converged
        marginals.update_unlabeled(unlabeled)
    return np.asarray(marginals.align(unlabeled).numpy())


def standardize(features: Array, mean: Floats, scale: Floats) -> Floats:
    return np.asarray((features - mean) * scale, dtype=np.float64)


def to_probs(logits: Floats, multi_label: bool) -> Floats:
    if multi_label:
        return np.asarray(1 / (1 + np.exp(-np.clip(logits, -60, 60))))
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=1, keepdims=True))
