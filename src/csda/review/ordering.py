"""Which image to label next; NumPy only.

N images, n classes. Scores are higher for images that help more. `probs` [N, n] are a distribution each, or one sigmoid
a label in a multi-label set; `features` [N, W] are those of a frozen network.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
Positions = npt.NDArray[np.intp]

AUDIT_EVERY = 5
"""One image in so many is drawn at random, to judge the model by."""

NEAR = 64
"""Directions in which distances of features are taken."""

SPREAD = 1000
"""Images that are spread one by one; the others follow by their distance from what is labeled."""

ORDERS = {
    "mix": "uncertain, disagreed upon and of rare classes, together",
    "uncertainty": "least certain first",
    "disagreement": "where alignment changes the prediction most",
    "rare": "rare classes first",
    "diversity": "far from all that is labeled",
    "confidence": "most certain first",
    "random": "in random order",
    "name": "by name",
}
"""Names of the orders, and what each puts first."""

DEFAULT = "mix"


@dataclass(frozen=True, slots=True)
class Pool:
    """What is known of the images to choose from.

    `aligned` are the probabilities after alignment, `counts` [n] the labels that each class has so far, and
    `labeled_features` [M, W] the features of the images with a label. What is not known is None.
    """

    names: Sequence[str]
    probs: Array | None
    counts: Array
    multi_label: bool = False
    aligned: Array | None = None
    features: Array | None = None
    labeled_features: Array | None = None
    seed: int = 0

    def orders(self) -> list[str]:
        """The orders that what is known allows."""
        known = {"random", "name"}
        if self.probs is not None:
            known |= {"uncertainty", "rare", "confidence", "mix"}
            if self.aligned is not None:
                known.add("disagreement")
        if self.features is not None:
            known.add("diversity")
        return [name for name in ORDERS if name in known]


def rank(order: str, pool: Pool) -> Positions:
    """Positions of the pool's images, those that help most first; ties in an order drawn by the seed."""
    count = len(pool.names)
    drawn = np.random.default_rng(pool.seed).permutation(count)
    if order == "random":
        return drawn
    if order == "name":
        return np.array(sorted(range(count), key=pool.names.__getitem__), dtype=np.intp)
    if order == "diversity":
        assert pool.features is not None
        return spread(pool.features, pool.labeled_features, first=int(drawn[0]) if count else 0)
    scores = score(order, pool)
    return drawn[np.argsort(-scores[drawn], kind="stable")]


def score(order: str, pool: Pool) -> Floats:
    """How much each image of the pool helps, by one order [N]."""
    assert pool.probs is not None
    if order == "uncertainty":
        return uncertainty(pool.probs, multi_label=pool.multi_label)
    if order == "confidence":
        return -uncertainty(pool.probs, multi_label=pool.multi_label)
    if order == "rare":
        return rarity(pool.probs, pool.counts)
    if order == "disagreement":
        assert pool.aligned is not None
        return disagreement(pool.probs, pool.aligned)
    parts = [uncertainty(pool.probs, multi_label=pool.multi_label), rarity(pool.probs, pool.counts)]
    if pool.aligned is not None:
        parts.append(disagreement(pool.probs, pool.aligned))
    return np.asarray(np.mean([_quantiles(part) for part in parts], axis=0), dtype=np.float64)


def uncertainty(probs: Array, *, multi_label: bool = False) -> Floats:
    """Entropy as a share of the largest there is [N]; in a multi-label set that of the least certain label."""
    probs = np.asarray(probs, dtype=np.float64)
    if multi_label:
        return np.asarray(_entropy(np.stack([probs, 1 - probs], axis=-1)).max(axis=-1) / np.log(2))
    return np.asarray(_entropy(probs) / np.log(probs.shape[1]))


def disagreement(probs: Array, aligned: Array) -> Floats:
    """Total variation between two predictions [N]: from 0 where they are the same to 1."""
    return np.asarray(np.abs(np.asarray(probs, dtype=np.float64) - aligned).sum(axis=1) / 2)


def rarity(probs: Array, counts: Array) -> Floats:
    """Expected rarity [N]: the probabilities weighed by how few labels each class has."""
    weights = 1 / (np.asarray(counts, dtype=np.float64) + 1)
    return np.asarray(np.asarray(probs, dtype=np.float64) @ (weights / weights.max()))


def spread(features: Array, labeled: Array | None, first: int = 0, most: int = SPREAD) -> Positions:
    """Farthest-first order: each image is the one farthest from all labeled ones and all before it.

    After `most` images the others follow by that distance. Distances are taken along `NEAR` random directions.
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


def neighbours(features: Array, labeled: Array, count: int = 5) -> tuple[Positions, Floats]:
    """Of one image's features [W], the nearest rows of `labeled` [M, W] by cosine, and their similarity."""
    similarity = _unit(np.asarray(labeled, dtype=np.float64)) @ _unit(np.asarray(features, dtype=np.float64))
    nearest = np.argsort(-similarity, kind="stable")[:count]
    return nearest, similarity[nearest]


def interleave(order: Positions, audit: Positions) -> tuple[Positions, npt.NDArray[np.bool_]]:
    """The images as they are shown, and which of them are audited.

    `audit` is a random permutation of all images. Every `AUDIT_EVERY`-th image shown is the next of its beginning, and
    these never come in another place: however far somebody gets, what was audited is a random sample of all images and
    not of those that an order picked.
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
    """A permutation that is the same whenever the same images are opened."""
    digest = hashlib.blake2b("\n".join(names).encode("utf-8", "backslashreplace"), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest)).permutation(len(names))


def _entropy(probs: Floats) -> Floats:
    return np.asarray(-(probs * np.log(np.clip(probs, 1e-12, 1))).sum(axis=-1))


def _quantiles(values: Floats) -> Floats:
    """Ranks from 0 to 1, equal values sharing theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    middle = np.cumsum(counts) - (counts + 1) / 2
    return np.asarray(middle[inverse] / max(len(values) - 1, 1))


def _directions(features: Array, labeled: Array | None) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Both, of unit length and along a few random directions."""
    width = features.shape[1]
    known = np.empty((0, width), dtype=np.float32) if labeled is None else labeled
    points, others = (_unit(np.asarray(part, dtype=np.float32)) for part in (features, known))
    if width > NEAR:
        along = np.random.default_rng(0).normal(size=(width, NEAR)).astype(np.float32) / np.sqrt(NEAR)
        points, others = points @ along.astype(np.float32), others @ along.astype(np.float32)
    return points, others


def _unit(values: Array) -> Array:
    return np.asarray(values / np.maximum(np.linalg.norm(values, axis=-1, keepdims=True), 1e-12))
