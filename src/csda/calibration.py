"""Calibrated probabilities, and sets of classes with a stated coverage; NumPy only.

A temperature T is fitted to predictions on images that the network was not trained on. Calibrated probabilities are
proportional to p^(1/T); with several labels per image, p^(1/T) is normalised with (1 − p)^(1/T) (Guo et al., 2017). The
order of the classes of an image does not change.

A conformal set holds every class with a score 1 − p up to a limit. The limit of a class is the ⌈(m + 1) c⌉-th smallest
score of its m images. New images of this class, drawn from the same distribution, have their class in the set with a
probability of at least c, the coverage (Vovk et al., 2005; Sadinle et al., 2019). A class with too few images is pooled
with the next more frequent one, and the coverage holds for the pool. The most probable class is always in the set, so
no set is empty. With several labels per image, each label has its own set: absent, present or both.

The same images choose the best epoch, the temperature and the limits, so with few images the coverage is slightly too
optimistic. Out-of-fold predictions come from models trained on fewer labels, so limits fitted to them are slightly too
wide.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from csda import metrics
from csda.errors import ConfigError

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]

FORMAT = 1
COVERAGES = (0.8, 0.9, 0.95)
"""Coverages for which limits are stored."""

COVERAGE = 0.9
"""The default coverage."""

LEAST = 5
"""A label gets its own threshold if at least this many images have it, and at least this many do not."""

SMALLEST = 1e-12
HOTTEST = 20.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Largest scores within a set, for one coverage: [n]; with several labels per image [n][2], absent and present.

    `pools` lists the classes that were pooled; with several labels per image, the labels with both sides pooled.
    `counts` are the numbers of images behind each limit.
    """

    coverage: float
    limits: tuple[Any, ...]
    counts: tuple[Any, ...]
    pools: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Calibration:
    """Fitted values and the number of images behind them; `before` and `after` are NLL and calibration error there."""

    fitted_on: str
    images: int
    multi_label: bool
    temperature: float
    thresholds: tuple[float, ...] | None
    """For each label, the calibrated probability from which on it is predicted; None if an image has one class."""
    levels: tuple[Limits, ...]
    before: Mapping[str, float]
    after: Mapping[str, float]
    remarks: tuple[str, ...] = ()

    def scale(self, probs: Array) -> Floats:
        """Calibrated probabilities."""
        return metrics.scale_temperature(probs, self.temperature, multi_label=self.multi_label)

    def decide(self, calibrated: Array) -> npt.NDArray[np.intp]:
        """From calibrated probabilities, the most probable class [N], or 0/1 [N, n] by the labels' thresholds."""
        if self.thresholds is None:
            return np.asarray(calibrated.argmax(axis=-1))
        return (calibrated >= np.array(self.thresholds)).astype(np.intp)

    def sets(self, calibrated: Array, coverage: float = COVERAGE) -> npt.NDArray[np.bool_]:
        """The classes in the set of each image, bool [N, n]; with several labels [N, n, 2], absent and present."""
        limits = np.array(self.level(coverage).limits)
        # Limits are in double precision, so that the image that defines a limit is within it.
        scores = _scores(np.asarray(calibrated, dtype=np.float64), self.multi_label)
        within: npt.NDArray[np.bool_] = scores <= limits + 1e-9
        decided = self.decide(calibrated)
        sides = np.eye(2, dtype=bool)[decided] if self.multi_label else np.eye(within.shape[1], dtype=bool)[decided]
        return within | sides

    def unsure(self, calibrated: Array, coverage: float = COVERAGE) -> npt.NDArray[np.bool_]:
        """Whether the set of an image holds more than one class, or the set of one of its labels both sides."""
        sizes = self.sets(calibrated, coverage).sum(axis=-1)
        return np.asarray((sizes > 1).any(axis=-1) if self.multi_label else sizes > 1)

    def level(self, coverage: float) -> Limits:
        for level in self.levels:
            if math.isclose(level.coverage, coverage):
                return level
        known = ", ".join(f"{level.coverage:g}" for level in self.levels)
        raise ConfigError(
            f"coverage = {coverage:g} has no limits in this model, which has {known or 'none'}; choose among these"
            if known
            else f"this model was fitted to {self.images} images, too few for any coverage; leave sets out"
        )

    @property
    def coverages(self) -> tuple[float, ...]:
        return tuple(level.coverage for level in self.levels)

    def as_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **json.loads(json.dumps(asdict(self)))}


def from_json(content: Any, classes: int) -> Calibration:
    """Read the output of `as_json`; raises `ValueError` for anything else."""
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"no calibration of format {FORMAT}")
    fields = {name: value for name, value in content.items() if name != "format"}
    try:
        levels = tuple(
            Limits(
                float(level["coverage"]),
                _tuples(level["limits"]),
                _tuples(level["counts"]),
                tuple(tuple(map(int, pool)) for pool in level["pools"]),
            )
            for level in fields.pop("levels")
        )
        thresholds = fields.pop("thresholds")
        calibration = Calibration(
            **fields | {"remarks": tuple(fields["remarks"])},
            levels=levels,
            thresholds=None if thresholds is None else tuple(map(float, thresholds)),
        )
        wide = (classes, 2) if calibration.multi_label else (classes,)
        sound = (
            math.isfinite(calibration.temperature)
            and calibration.temperature > 0
            and all(np.shape(level.limits) == wide and np.isfinite(level.limits).all() for level in levels)
            and all(isinstance(remark, str) for remark in calibration.remarks)
            and (thresholds is not None) == calibration.multi_label
            and (thresholds is None or (len(thresholds) == classes and np.isfinite(thresholds).all()))
        )
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    if not sound:
        raise ValueError(f"not a calibration of {classes} classes")
    return calibration


def fit(probs: Array, labels: Array, fitted_on: str = "validation") -> Calibration:
    """Fit temperature, thresholds and limits to predictions [N, n] on images that the network was not trained on.

    Labels are class indices [N], or 0/1 [N, n] where an image may have several.
    """
    multi_label = labels.ndim == 2
    probs = np.asarray(probs, dtype=np.float64)
    temperature = fit_temperature(probs, labels)
    calibrated = metrics.scale_temperature(probs, temperature, multi_label=multi_label)
    remarks = []
    levels = [level for coverage in COVERAGES if (level := _fit_limits(calibrated, labels, coverage)) is not None]
    if not any(math.isclose(level.coverage, COVERAGE) for level in levels):
        remarks.append(
            f"{len(labels)} images are too few for sets that cover {COVERAGE:.0%}; no image is marked as unsure"
        )
    if not multi_label and (absent := int((np.bincount(labels, minlength=probs.shape[1]) == 0).sum())):
        remarks.append(f"{absent} of the classes have no image here, so the coverage does not hold for them")
    return Calibration(
        fitted_on,
        len(labels),
        multi_label,
        temperature,
        tuple(_fit_thresholds(calibrated, labels)) if multi_label else None,
        tuple(levels),
        measure(probs, labels),
        measure(calibrated, labels),
        tuple(remarks),
    )


def fit_temperature(probs: Array, labels: Array) -> float:
    """The temperature T that minimises the negative log-likelihood, with a standard normal prior on log T.

    Without the prior, a few images that are all classified correctly would give T = 0. With many images it has no
    effect.
    """
    multi_label = labels.ndim == 2
    logits = np.log(_sides(np.asarray(probs, dtype=np.float64), multi_label).clip(SMALLEST))
    chosen = labels[..., None].astype(np.int64)

    def cost(log_temperature: float) -> float:
        logs = _log_softmax(logits / math.exp(log_temperature))
        return float(-np.take_along_axis(logs, chosen, axis=-1).sum() + log_temperature**2 / 2)

    low, high = -math.log(HOTTEST), math.log(HOTTEST)
    golden = (math.sqrt(5) - 1) / 2
    left, right = high - golden * (high - low), low + golden * (high - low)
    left_cost, right_cost = cost(left), cost(right)
    while high - low > 1e-6:
        if left_cost < right_cost:
            high, right, right_cost = right, left, left_cost
            left = high - golden * (high - low)
            left_cost = cost(left)
        else:
            low, left, left_cost = left, right, right_cost
            right = low + golden * (high - low)
            right_cost = cost(right)
    return math.exp((low + high) / 2)


def measure(probs: Array, labels: Array) -> dict[str, float]:
    """Mean negative log-likelihood of the labels, and the expected calibration error."""
    return {"nll": metrics.log_loss(probs, labels), "calibration_error": metrics.calibration_error(probs, labels)}


def estimate_frequencies(probs: Array, before: Array, *, multi_label: bool = False, rounds: int = 1000) -> Floats:
    """Class frequencies of unlabeled images by expectation maximisation (Saerens et al., 2002).

    `probs` are calibrated for the frequencies `before`. The appearance of each class is assumed to be the same in both
    sets. √N images with the frequencies `before` are added to the N images: otherwise predictions that hardly tell
    classes apart would give frequencies of 0 or 1.
    """
    before = np.asarray(before, dtype=np.float64)
    estimate, images, added = before, len(probs), math.sqrt(len(probs))
    for _ in range(rounds):
        found = metrics.shift_frequencies(probs, before, estimate, multi_label=multi_label).mean(axis=0)
        following = (images * found + added * before) / (images + added)
        if np.abs(following - estimate).max() < 1e-7:
            break
        estimate = following
    return estimate


def predicted_frequencies(probs: Array, labels: Array, frequencies: Array) -> Floats:
    """The mean prediction on images with these class frequencies, from labeled images with others.

    It differs from the frequencies if the model is biased; then it is what predictions are to be divided by to convert
    them to other frequencies (Alexandari et al., 2020). A class without an image counts as predicted correctly.
    """
    if labels.ndim == 1:
        rows = np.eye(probs.shape[1])
        for name in np.unique(labels):
            rows[name] = probs[labels == name].mean(axis=0)
        return np.asarray(frequencies @ rows, dtype=np.float64)
    counts = np.stack([len(labels) - labels.sum(axis=0), labels.sum(axis=0)])
    sums = np.stack([(probs * (1 - labels)).sum(axis=0), (probs * labels).sum(axis=0)])
    absent, present = np.where(counts, sums / counts.clip(1), [[0.0], [1.0]])
    return np.asarray(frequencies * present + (1 - frequencies) * absent, dtype=np.float64)


def quantile(scores: Array, coverage: float) -> float | None:
    """The ⌈(m + 1) c⌉-th smallest of m scores; None if m is too small."""
    place = math.ceil((len(scores) + 1) * coverage - 1e-9)
    return None if place > len(scores) else float(np.sort(scores)[place - 1])


def pool_classes(counts: Sequence[int], coverage: float) -> list[list[int]]:
    """Groups of classes with enough images, rare ones pooled with the next more frequent; empty if not possible."""
    groups: list[list[int]] = []
    pending: list[int] = []
    for position in np.argsort(counts, kind="stable").tolist():
        pending.append(position)
        if quantile(np.zeros(sum(counts[each] for each in pending)), coverage) is not None:
            groups.append(pending)
            pending = []
    if pending and groups:  # the group of the most frequent class is complete if any is
        groups[-1] += pending
    return groups


def _fit_limits(calibrated: Floats, labels: Array, coverage: float) -> Limits | None:
    scores = _scores(calibrated, labels.ndim == 2)
    if labels.ndim == 1:
        counts = np.bincount(labels, minlength=calibrated.shape[1]).tolist()
        own = scores[np.arange(len(labels)), labels]
        limits: list[Any] = [0.0] * len(counts)
        behind: list[Any] = [0] * len(counts)
        groups = pool_classes(counts, coverage)
        for group in groups:
            members = own[np.isin(labels, group)]
            for position in group:
                limits[position], behind[position] = quantile(members, coverage), len(members)
        pools = tuple(tuple(group) for group in groups if len(group) > 1)
        return Limits(coverage, tuple(limits), tuple(behind), pools) if groups else None
    if quantile(np.zeros(len(labels)), coverage) is None:
        return None
    limits, behind, pooled = [], [], []
    for label, column in enumerate(labels.T):
        sides = [scores[column == side, label, side] for side in (0, 1)]
        if any(quantile(side, coverage) is None for side in sides):
            sides = [np.concatenate(sides)] * 2
            pooled.append((label,))
        limits.append(tuple(quantile(side, coverage) for side in sides))
        behind.append(tuple(len(side) for side in sides))
    return Limits(coverage, tuple(limits), tuple(behind), tuple(pooled))


def _fit_thresholds(calibrated: Floats, labels: Array) -> list[float]:
    """For each label the threshold with the best mean of the two recalls; 0.5 if either side has too few images."""
    thresholds = []
    for scores, truth in zip(calibrated.T, labels.T.astype(bool), strict=True):
        if min(truth.sum(), (~truth).sum()) < LEAST:
            thresholds.append(0.5)
            continue
        order = np.argsort(scores)
        sorted_scores, sorted_truth = scores[order], truth[order]
        # Cut before position i: all images from i on are predicted as present.
        missed = np.concatenate([[0], np.cumsum(sorted_truth)]) / truth.sum()
        rejected = np.concatenate([[0], np.cumsum(~sorted_truth)]) / (~truth).sum()
        edges = np.concatenate([[0.0], sorted_scores, [1.0]])
        possible = np.concatenate([[True], sorted_scores[1:] > sorted_scores[:-1], [True]])
        gain = np.where(possible, rejected - missed, -1.0)
        best = int(gain.argmax())
        thresholds.append(float((edges[best] + edges[best + 1]) / 2))
    return thresholds


def _sides(probs: Floats, multi_label: bool) -> Floats:
    """Distributions along the last axis: over the classes, or over (absent, present) for each label."""
    return np.stack([1 - probs, probs], axis=-1) if multi_label else probs


def _scores(calibrated: Floats, multi_label: bool) -> Floats:
    return np.asarray(1 - _sides(calibrated, multi_label), dtype=np.float64)


def _log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)), dtype=np.float64)


def _tuples(values: Any) -> tuple[Any, ...]:
    return tuple(_tuples(value) if isinstance(value, list) else value for value in values)
