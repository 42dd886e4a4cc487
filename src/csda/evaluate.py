"""Predictions of a model over whole parts, and what they are worth."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from csda import metrics
from csda.data.batches import ImagePool
from csda.methods.base import Method
from csda.models.two_stream import TwoStream

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


@torch.no_grad()
def predict_pool(model: TwoStream, method: Method, pool: ImagePool, batch_size: int) -> Floats:
    """The student's probabilities [N, n] for every image of a pool, in evaluation mode."""
    with _evaluation(model):
        batches = [method.probabilities(model(images).float()) for images in _images(pool, batch_size)]
    return torch.cat(batches).cpu().numpy()


@torch.no_grad()
def guess_pool(model: TwoStream, method: Method, pool: ImagePool, batch_size: int) -> tuple[Floats, Floats]:
    """The method's pseudo-labels [N, n] for every unlabeled image, before and after alignment."""
    with _evaluation(model):
        pairs = [method.pseudo_labels(model, images) for images in _images(pool, batch_size)]
    raw, aligned = (torch.cat(side).cpu().numpy() for side in zip(*pairs, strict=True))
    return raw, aligned


def score(probs: Floats, labels: Ints, prefix: str) -> dict[str, float]:
    """AUC and MCA of one part; labels [N], or 0/1 [N, K] where MCA is not defined."""
    scores = {f"{prefix}_auc": metrics.auc(probs, labels)}
    if labels.ndim == 1:
        scores[f"{prefix}_mca"] = metrics.mca(probs, labels)
    return scores


def judge_pseudo_labels(raw: Floats, aligned: Floats, truth: Ints) -> tuple[dict[str, float], dict[str, Floats]]:
    """How good pseudo-labels are where the truth is known (−1: unknown), and what alignment changed.

    Gives figures for `metrics.jsonl` and arrays for `history.npz`: the share of flipped guesses of each class, the
    class-wise mean of the aligned guesses (rows by the unaligned guess), and truth against pseudo-label.
    """
    classes = raw.shape[1]
    before, after = raw.argmax(axis=1), aligned.argmax(axis=1)
    members = np.eye(classes)[before]
    counts = members.sum(axis=0)
    safe = np.maximum(counts, 1)
    figures = {"flip_rate": float(np.mean(before != after))}
    arrays = {
        "flips": (members * (before != after)[:, None]).sum(axis=0) / safe,
        "aligned_marginals": (members.T @ aligned) / safe[:, None],
    }
    known = truth >= 0
    if known.any():
        confusion = metrics.confusion(truth[known], after[known], classes)
        recall = np.diag(confusion)[confusion.sum(axis=1) > 0] / confusion.sum(axis=1)[confusion.sum(axis=1) > 0]
        figures |= {
            "pseudo_accuracy": float(np.mean(after[known] == truth[known])),
            "pseudo_mca": float(recall.mean()),
        }
        arrays["pseudo_confusion"] = confusion
    return figures, {key: np.asarray(value, dtype=np.float32) for key, value in arrays.items()}


def _images(pool: ImagePool, batch_size: int) -> Iterator[Tensor]:
    return (pool(indices, "plain") for indices in pool.order(batch_size, shuffled=False))


class _evaluation:
    """Evaluation mode for the length of a block."""

    def __init__(self, model: TwoStream) -> None:
        self.model = model

    def __enter__(self) -> None:
        self.training = self.model.training
        self.model.eval()

    def __exit__(self, *_: object) -> None:
        self.model.train(self.training)
