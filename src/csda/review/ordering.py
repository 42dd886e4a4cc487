"""Which image to label next; NumPy only.

N images, n classes. Images with higher scores come first. `probs` [N, n] has a distribution for each image, or in a
multi-label set one sigmoid per label. `features` [N, W] are those of a frozen network.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
Positions = npt.NDArray[np.intp]

AUDIT_EVERY = 5
"""One image in this many is drawn at random, to measure the accuracy of the predictions."""

NEAR = 64
"""Number of random directions along which distances of features are computed."""

AXES = 64
"""Number of principal directions of features in which variances are computed."""

CANDIDATES = 4000
"""Number of images among which those of `inform` are chosen one by one."""

INFORMED = 400
"""Number of images that `inform` chooses one by one."""

SPREAD = 1000
"""Number of images that are chosen one by one. The others follow by their distance to labeled images."""

ORDERS = {
    "suspicious": "given labels that predictions contradict most first",
    "information": "labels that tell most about all other images first",
    "mix": "unsure images of each class in turn, new groups first",
    "uncertainty": "least certain first",
    "disagreement": "largest differences between prediction and alignment or a second model first",
    "rare": "rare classes first",
    "diversity": "most different from all labeled images first",
    "confidence": "most certain first",
    "random": "in random order",
    "name": "by name",
}
"""Names of the orders, and what each puts first."""

DEFAULTS = ("suspicious", "information", "mix", "diversity", "random")
"""The first order of a list: the first of these that is available. results/review compares orders with random order.
What to use before any label was not measured.
"""


@dataclass(frozen=True, slots=True)
class Pool:
    """The images to choose from.

    `other` are the probabilities after alignment, or those of a second model. `counts` [n] are the labels of each class
    so far, and `labeled_features` [M, W] the features of the labeled images. `given` are the labels of the data set,
    [N] or 0/1 [N, n]; then `probs` come from models that were not trained on these images. `groups` are those of the
    images (a patient, a lesion), and `labeled_groups` those with a labeled image. What is not known is None.
    """

    names: Sequence[str]
    probs: Array | None
    counts: Array
    multi_label: bool = False
    other: Array | None = None
    features: Array | None = None
    labeled_features: Array | None = None
    given: Array | None = None
    groups: Sequence[str | None] | None = None
    labeled_groups: Collection[str | None] = ()
    seed: int = 0

    def orders(self) -> list[str]:
        """The orders that are possible with what is known."""
        known = {"random", "name"}
        if self.given is not None and self.probs is not None:
            known.add("suspicious")
        elif self.probs is not None:
            known |= {"mix", "uncertainty", "rare", "confidence"}
            if self.other is not None:
                known.add("disagreement")
        if self.features is not None:
            known.add("diversity")
            if "mix" in known and self.labeled_features is not None and len(self.labeled_features):
                known.add("information")
        return [name for name in ORDERS if name in known]


def rank(order: str, pool: Pool) -> Positions:
    """Positions of the pool's images in an order. Ties are in a random order by the seed."""
    count = len(pool.names)
    drawn = np.random.default_rng(pool.seed).permutation(count)
    if order == "random":
        return drawn
    if order == "name":
        return np.array(sorted(range(count), key=pool.names.__getitem__), dtype=np.intp)
    if order == "diversity":
        assert pool.features is not None
        return spread(pool.features, pool.labeled_features, first=int(drawn[0]) if count else 0)
    if order == "information":
        assert pool.probs is not None
        assert pool.features is not None
        assert pool.labeled_features is not None
        return inform(pool.features, pool.labeled_features, pool.probs)
    if order == "mix":
        assert pool.probs is not None
        turns = take_turns(closeness(pool.probs, multi_label=pool.multi_label)[drawn])
        return drawn[turns] if pool.groups is None else _new_groups_first(drawn[turns], pool)
    scores = score(order, pool)
    return drawn[np.argsort(-scores[drawn], kind="stable")]


def score(order: str, pool: Pool) -> Floats:
    """The scores of the pool's images in one order [N]."""
    assert pool.probs is not None
    if order == "uncertainty":
        return uncertainty(pool.probs, multi_label=pool.multi_label)
    if order == "confidence":
        return -uncertainty(pool.probs, multi_label=pool.multi_label)
    if order == "suspicious":
        assert pool.given is not None
        return suspicion(pool.probs, pool.given)
    if order == "rare":
        return rarity(pool.probs, pool.counts)
    assert order == "disagreement"
    assert pool.other is not None
    return disagreement(pool.probs, pool.other)


def uncertainty(probs: Array, *, multi_label: bool = False) -> Floats:
    """How similar the probabilities of the two most probable classes are, from 0 to 1 [N].

    With several labels, that of the least certain label: 0 for a probability of 0 or 1, and 1 for 0.5.
    """
    probs = np.asarray(probs, dtype=np.float64)
    if multi_label:
        return np.asarray(1 - np.abs(2 * probs - 1).min(axis=1))
    second, first = np.partition(probs, -2, axis=1)[:, -2:].T
    return np.asarray(1 - (first - second))


def closeness(probs: Array, *, multi_label: bool = False) -> Floats:
    """How close each image is to the decision boundary of each class [N, n]: minus the absolute logarithm of the ratio
    between its probability and that of the best other class.
    """
    probs = np.clip(np.asarray(probs, dtype=np.float64), 1e-9, 1.0)
    if multi_label:
        return np.asarray(-np.abs(np.log(probs) - np.log(np.maximum(1 - probs, 1e-9))))
    largest = probs.argmax(axis=1)
    second, first = np.partition(probs, -2, axis=1)[:, -2:].T
    others = np.repeat(first[:, None], probs.shape[1], axis=1)
    others[np.arange(len(probs)), largest] = second
    return np.asarray(-np.abs(np.log(probs) - np.log(others)))


def take_turns(scores: Array) -> Positions:
    """An order in which the columns of scores [N, n] take turns: each takes its best image that is left."""
    orders = [iter(column) for column in np.argsort(-scores, axis=0, kind="stable").T.tolist()]
    taken = np.zeros(len(scores), dtype=bool)
    turns: list[int] = []
    while len(turns) < len(scores):
        for order in orders:
            chosen = next((place for place in order if not taken[place]), None)
            if chosen is not None:
                taken[chosen] = True
                turns.append(chosen)
    return np.array(turns, dtype=np.intp)


def _new_groups_first(ranked: Positions, pool: Pool) -> Positions:
    """The same order, but first one image of each group without a label."""
    assert pool.groups is not None
    seen = set(pool.labeled_groups)
    first: list[int] = []
    others: list[int] = []
    for place in ranked.tolist():
        group = pool.groups[place]
        (others if group is not None and group in seen else first).append(place)
        seen.add(group)
    return np.array(first + others, dtype=np.intp)


def disagreement(probs: Array, other: Array) -> Floats:
    """Total variation between two predictions [N], from 0 if they are equal to 1."""
    return np.asarray(np.abs(np.asarray(probs, dtype=np.float64) - other).sum(axis=1) / 2)


def rarity(probs: Array, counts: Array) -> Floats:
    """Expected rarity [N]: the probabilities weighted by 1 / (number of labels + 1) of each class."""
    weights = 1 / (np.asarray(counts, dtype=np.float64) + 1)
    return np.asarray(np.asarray(probs, dtype=np.float64) @ (weights / weights.max()))


def suspicion(probs: Array, given: Array) -> Floats:
    """How strongly out-of-fold predictions contradict the given label [N]; −2 without a prediction.

    As in confident learning (Northcutt et al., 2021) the probabilities of a class are compared with their mean over its
    own images. The score is the largest such difference of another class minus that of the given class.
    """
    probs = np.asarray(probs, dtype=np.float64)
    known = np.asarray(np.isfinite(probs).all(axis=1))
    result = np.full(len(probs), -2.0)
    if given.ndim == 2:
        result[known] = np.abs(given - probs)[known].max(axis=1)
        return result
    count = probs.shape[1]
    own_class = np.zeros((len(probs), count), dtype=bool)
    own_class[np.arange(len(probs)), given] = True
    members = own_class & known[:, None]
    means = np.array([probs[members[:, k], k].mean() if members[:, k].any() else 1.0 for k in range(count)])
    above = probs - means
    own = np.take_along_axis(above, given[:, None], axis=1)[:, 0]
    others = np.where(own_class, -np.inf, above).max(axis=1)
    result[known] = (others - own)[known]
    return result


def spread(features: Array, labeled: Array | None, first: int = 0, most: int = SPREAD) -> Positions:
    """Farthest-first order: each image is the one with the largest distance to all labeled images and all before it.

    After `most` images the others follow by this distance. Distances are computed along `NEAR` random directions.
    """
    points, known = _directions(features, labeled)
    count = len(points)
    nearest = np.full(count, np.inf, dtype=np.float32)
    for start in range(0, len(known), 256):
        block = known[start : start + 256]
        squares = (points**2).sum(1)[:, None] - 2 * points @ block.T + (block**2).sum(1)[None]
        np.minimum(nearest, squares.min(axis=1), out=nearest)
    order: list[int] = []
    taken = np.zeros(count, dtype=bool)
    for _ in range(min(most, count)):
        chosen = first if not order and not len(known) else int(np.where(taken, -np.inf, nearest).argmax())
        order.append(chosen)
        taken[chosen] = True
        np.minimum(nearest, ((points - points[chosen]) ** 2).sum(axis=1), out=nearest)
    (rest,) = np.nonzero(~taken)
    return np.concatenate([np.array(order, dtype=np.intp), rest[np.argsort(-nearest[rest], kind="stable")]])


def inform(features: Array, labeled: Array, probs: Array) -> Positions:
    """Images [N] whose labels would reduce the variance of the predictions for all images most.

    The variance is that of a linear model on the principal directions of the features, as in optimal design: an image
    with features x adds u x xᵀ to the precision, where u = Σ p(1 − p) is large if its label is uncertain. The images
    of all classes together count the same. `INFORMED` images are chosen one by one, each with the largest reduction
    that is left; the others follow by the reduction at the beginning.
    """
    if not len(features):
        return np.empty(0, dtype=np.intp)
    points, known = _principal(features, labeled)
    probs = np.asarray(probs, dtype=np.float64)
    unsure = (probs * (1 - probs)).sum(axis=1)
    weights = (probs / np.maximum(probs.sum(axis=0), 1e-12)).sum(axis=1) * unsure
    covariance = np.linalg.inv(np.eye(points.shape[1]) + unsure.mean() * known.T @ known)
    wanted = (points * weights[:, None]).T @ points
    along = points @ covariance
    reduced, variance = np.einsum("nd,nd->n", along @ wanted, along), np.einsum("nd,nd->n", along, points)
    ranked = np.argsort(-unsure * reduced / (1 + unsure * variance), kind="stable")
    chosen = ranked[:CANDIDATES]
    points, unsure, reduced, variance = points[chosen], unsure[chosen], reduced[chosen], variance[chosen]
    taken: list[int] = []
    left = np.ones(len(chosen), dtype=bool)
    for _ in range(min(INFORMED, len(chosen))):
        place = int(np.where(left, unsure * reduced / (1 + unsure * variance), -1.0).argmax())
        taken.append(place)
        left[place] = False
        # Sherman-Morrison: the covariance with this image, and what follows for all others.
        step = covariance @ points[place]
        scale = unsure[place] / (1 + unsure[place] * points[place] @ step)
        toward = points @ step
        reduced = (
            reduced - 2 * scale * toward * (points @ (covariance @ (wanted @ step)))
            + scale**2 * (step @ wanted @ step) * toward**2
        )  # fmt: skip
        variance = variance - scale * toward**2
        covariance = covariance - scale * np.outer(step, step)
    first = chosen[taken]
    return np.concatenate([first, ranked[~np.isin(ranked, first)]])


def _principal(features: Array, labeled: Array) -> tuple[Floats, Floats]:
    """Both along the principal directions of the features, with mean 0 and variance 1 along each."""
    mean, deviation = features.mean(axis=0, dtype=np.float64), features.std(axis=0, dtype=np.float64)
    scale = 1 / np.maximum(deviation, 0.01 * max(float(deviation.mean()), 1e-6))
    sample = (features[:: max(1, len(features) // CANDIDATES)] - mean) * scale
    values, vectors = np.linalg.eigh(sample.T @ sample / len(sample))
    along = vectors[:, ::-1][:, :AXES] / np.sqrt(np.maximum(values[::-1][:AXES], 1e-9 * max(float(values[-1]), 1e-9)))
    return ((features - mean) * scale) @ along, ((labeled - mean) * scale) @ along


def neighbours(features: Array, labeled: Array, count: int = 5) -> tuple[Positions, Floats]:
    """The rows of `labeled` [M, W] with the highest cosine similarity to one image's features [W], and their
    similarity.
    """
    similarity = _unit(np.asarray(labeled, dtype=np.float64)) @ _unit(np.asarray(features, dtype=np.float64))
    nearest = np.argsort(-similarity, kind="stable")[:count]
    return nearest, similarity[nearest]


def interleave(order: Positions, audit: Positions) -> tuple[Positions, npt.NDArray[np.bool_]]:
    """The order of display, and which images are audited.

    `audit` is a random permutation of all images. Every `AUDIT_EVERY`-th image shown is the next of its beginning, and
    these images are shown nowhere else. So at any time the audited images are a random sample of all images, not of
    those that an order put first.
    """
    sample = audit[: len(audit) // AUDIT_EVERY]
    held_back = np.zeros(len(order), dtype=bool)
    held_back[sample] = True
    picked = order[~held_back[order]]
    audited = np.zeros(len(order), dtype=bool)
    audited[AUDIT_EVERY - 1 :: AUDIT_EVERY] = True
    shown = np.empty(len(order), dtype=np.intp)
    shown[audited], shown[~audited] = sample, picked
    return shown, audited


def audit_order(names: Sequence[str]) -> Positions:
    """A permutation that is the same each time for the same images."""
    digest = hashlib.blake2b("\n".join(names).encode("utf-8", "backslashreplace"), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest)).permutation(len(names))


def _directions(features: Array, labeled: Array | None) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Both, scaled to unit length and projected on a few random directions."""
    width = features.shape[1]
    known = np.empty((0, width), dtype=np.float32) if labeled is None else labeled
    points, others = (_unit(np.asarray(part, dtype=np.float32)) for part in (features, known))
    if width > NEAR:
        along = np.random.default_rng(0).normal(size=(width, NEAR)).astype(np.float32) / np.sqrt(NEAR)
        points, others = points @ along.astype(np.float32), others @ along.astype(np.float32)
    return points, others


def _unit(values: Array) -> Array:
    return np.asarray(values / np.maximum(np.linalg.norm(values, axis=-1, keepdims=True), 1e-12))
