"""Predictions over whole parts, and what they are worth."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from csda import metrics
from csda.data.loader import ImagePool
from csda.models.two_stream import TwoStream, probabilities

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


def predict_pool(model: TwoStream, pool: ImagePool, batch_size: int, *, multi_label: bool) -> Floats:
    """The student's probabilities [N, n] for every image of a pool, in order."""
    batches = _over(model, pool, batch_size, lambda images: (probabilities(model(images), multi_label),))
    return batches[0]


def guess_pool(
    model: TwoStream,
    pool: ImagePool,
    batch_size: int,
    pseudo_labels: Callable[[TwoStream, Tensor], tuple[Tensor, Tensor]],
) -> tuple[Floats, Floats]:
    """A method's pseudo-labels [N, n] for every image of a pool, before and after alignment."""
    raw, aligned = _over(model, pool, batch_size, lambda images: pseudo_labels(model, images))
    return raw, aligned


def score(probs: Floats, labels: Ints, prefix: str) -> dict[str, float]:
    """AUC and MCA of one part, whose labels are [N], or 0/1 [N, K] in a multi-label set."""
    return {f"{prefix}_auc": metrics.auc(probs, labels), f"{prefix}_mca": metrics.mca(probs, labels)}


def judge_pseudo_labels(raw: Floats, aligned: Floats, truth: Ints) -> tuple[dict[str, float], dict[str, Floats]]:
    """How good pseudo-labels are where the truth is known (−1: unknown), and what alignment changed.

    Figures for `metrics.jsonl` and arrays for `history.npz`: the share of flipped guesses of each class, the class-wise
    mean of the aligned guesses (a row for each unaligned guess), and truth against pseudo-label. Where an image may
    have several labels, the AUC of the guesses alone.
    """
    if truth.ndim == 2:
        known = (truth >= 0).all(axis=1)
        return {"pseudo_auc": metrics.auc(aligned[known], truth[known])} if known.any() else {}, {}
    classes = raw.shape[1]
    before, after = raw.argmax(axis=1), aligned.argmax(axis=1)
    flipped = before != after
    members = np.eye(classes)[before]
    counts = np.maximum(members.sum(axis=0), 1)
    figures = {"flip_rate": float(flipped.mean())}
    arrays = {"flips": flipped @ members / counts, "aligned_marginals": members.T @ aligned / counts[:, None]}
    known = truth >= 0
    if known.any():
        figures["pseudo_accuracy"] = float((after == truth)[known].mean())
        figures["pseudo_mca"] = metrics.mca(np.eye(classes)[after[known]], truth[known])
        arrays["pseudo_confusion"] = metrics.confusion(truth[known], after[known], classes)
    return figures, {key: np.asarray(value, dtype=np.float32) for key, value in arrays.items()}


@torch.no_grad()
def _over(
    model: TwoStream, pool: ImagePool, batch_size: int, function: Callable[[Tensor], tuple[Tensor, ...]]
) -> list[Floats]:
    """Apply a function to plain views of all images, in evaluation mode."""
    training = model.training
    model.eval()
    results = [function(batch.view("plain")) for batch in pool.batches(batch_size, shuffled=False)]
    model.train(training)
    return [torch.cat(columns).cpu().numpy() for columns in zip(*results, strict=True)]
