"""Predict whole parts of a split, score them, and make the final files of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from csda import calibration, metrics
from csda.calibration import Calibration
from csda.data.loader import ImagePool, Parts
from csda.data.prepared import PreparedData
from csda.data.records import encode_labels
from csda.data.splits import label_text
from csda.models.averaged_views import PLAIN, ViewChoice
from csda.models.two_stream import TwoStream, probabilities

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
PseudoLabels = Callable[[TwoStream, Tensor], tuple[Tensor, Tensor]]
"""Gives a method's pseudo-labels for images, before and after alignment."""

LAST = 20
"""Number of last epochs that `auc_last20` and `mca_last20` are averaged over."""


@dataclass(frozen=True, slots=True)
class Conclusions:
    """Contents of the final files of a run: rows of predictions.csv and pseudo_labels.csv, and the others."""

    predictions: list[list[str]]
    pseudo_labels: list[list[str]]
    result: dict[str, Any]
    calibration: Calibration | None
    thumbnails: Mapping[str, npt.NDArray[Any]] | None = None


class Evaluator:
    """Scores the parts of one data set.

    Args:
        data: the set and its split.
        batch_size: number of images per batch.
        prior_correction: whether to divide probabilities by the labeled class frequencies before scoring.
        views: the views of an image that its prediction is the mean over.

    Attributes:
        balanced: whether training already left class frequencies out of predictions, so there is nothing to divide by.
    """

    def __init__(
        self,
        data: PreparedData,
        batch_size: int,
        *,
        prior_correction: bool,
        views: ViewChoice = PLAIN,
    ) -> None:
        self.classes, self.multi_label = data.dataset.classes, data.dataset.multi_label
        self.split = data.split
        self.batch_size = batch_size
        self.prior_correction, self.views = prior_correction, views
        self.balanced = False
        labeled = data.encode(self.split.labeled)
        counts = labeled.sum(0) if self.multi_label else np.bincount(labeled, minlength=len(self.classes))
        self.class_counts: tuple[int, ...] = tuple(counts.tolist())
        self.frequencies = counts.astype(np.float32) / np.float32(len(labeled))
        self.val_labels, self.test_labels = data.encode(self.split.val), data.encode(self.split.test)
        truth = [self.split.truth.get(record.id) for record in self.split.unlabeled]
        self.truth = encode_labels(truth, len(self.classes), self.multi_label)

    def predict(self, model: TwoStream, pool: ImagePool) -> Floats:
        """Probabilities [N, n] of the student for every image of a pool, with prior correction if it is set."""
        probs = predict_pool(model, pool, self.batch_size, multi_label=self.multi_label, views=self.views)
        return self._corrected(probs).astype(np.float32) if self.prior_correction else probs

    def evaluate(
        self, model: TwoStream, parts: Parts, pseudo_labels: PseudoLabels | None, guessing: TwoStream | None = None
    ) -> tuple[dict[str, float], dict[str, Floats]]:
        """Figures and arrays of this epoch. The pseudo-labels of `guessing` are judged if there are any."""
        arrays = {"val_probs": self.predict(model, parts.val), "test_probs": self.predict(model, parts.test)}
        figures = score(arrays["val_probs"], self.val_labels, "val")
        figures |= score(arrays["test_probs"], self.test_labels, "test")
        # With several labels per image, pseudo-labels are only compared with the truth.
        judgeable = not self.multi_label or (self.truth >= 0).any()
        if pseudo_labels is not None and len(parts.unlabeled) and judgeable:
            raw, aligned = guess_pool(guessing or model, parts.unlabeled, self.batch_size, pseudo_labels)
            judged, further = judge_pseudo_labels(raw, aligned, self.truth)
            figures, arrays = figures | judged, arrays | further
        return figures, arrays

    def conclude(
        self,
        rows: Sequence[Mapping[str, Any]],
        best: int,
        arrays: Mapping[str, npt.NDArray[Any]],
        unlabeled_probs: Floats,
        control: Mapping[str, Mapping[str, float]] | None = None,
        held_out: tuple[npt.NDArray[Any], npt.NDArray[Any]] | None = None,
    ) -> Conclusions:
        """Predictions, pseudo-labels and the result at the `best` epoch, with its `arrays`.

        `rows` are the figures of all epochs, `control` the figures of models to compare with. Calibration is fitted to
        validation and `held_out` predictions with their labels.
        """
        predictions = []
        for part, records in (("val", self.split.val), ("test", self.split.test)):
            probs = arrays[f"{part}_probs"]
            for record, decision, row in zip(records, self._decide(probs), probs, strict=True):
                predictions.append([record.id, part, label_text(record.label, self.classes), decision, *_digits(row)])
        decisions = self._decide(unlabeled_probs)
        pseudo_labels = [
            [record.id, decision, *_digits(row[[row.argmax()]]), *_digits(row)]
            for record, decision, row in zip(self.split.unlabeled, decisions, unlabeled_probs, strict=True)
        ]
        test_probs = arrays["test_probs"]
        corrected = test_probs if self.prior_correction or self.balanced else self._corrected(test_probs)
        result = {
            "best_epoch": best,
            **{name: rows[best - 1].get(f"test_{name}") for name in ("auc", "mca")},
            **{f"{name}_last20": _mean([row.get(f"test_{name}") for row in rows[-LAST:]]) for name in ("auc", "mca")},
            "seconds": sum(row["seconds"] for row in rows),
            "auc_prior": metrics.auc(corrected, self.test_labels),
            "mca_prior": metrics.mca(corrected, self.test_labels),
            **({"control": {name: dict(figures) for name, figures in control.items()}} if control else {}),
        }
        return Conclusions(predictions, pseudo_labels, result, self._calibrate(arrays["val_probs"], held_out))

    def _calibrate(
        self, val_probs: npt.NDArray[Any], held_out: tuple[npt.NDArray[Any], npt.NDArray[Any]] | None
    ) -> Calibration | None:
        if held_out is None:
            return calibration.fit(val_probs, self.val_labels) if len(self.val_labels) else None
        probs, labels = (np.concatenate(each) for each in zip(held_out, (val_probs, self.val_labels), strict=True))
        return calibration.fit(probs, labels, "validation and out-of-fold" if len(val_probs) else "out-of-fold")

    def _corrected(self, probs: Floats) -> metrics.Floats:
        return metrics.prior_corrected(probs, self.frequencies, multi_label=self.multi_label)

    def _decide(self, probs: Floats) -> list[str]:
        return [label_text(label, self.classes) for label in metrics.decide(probs, self.multi_label)]


def predict_pool(
    model: TwoStream, pool: ImagePool, batch_size: int, *, multi_label: bool, views: ViewChoice = PLAIN
) -> Floats:
    """The student's probabilities [N, n] for every image of a pool, the mean over its `views`."""
    if not len(pool):
        return np.empty((0, model.num_outputs), dtype=np.float32)

    return _over(model, pool, batch_size, lambda images: (predict_images(model, images, multi_label, views),))[0]


def predict_images(model: nn.Module, images: Tensor, multi_label: bool, views: ViewChoice) -> Tensor:
    """Probabilities [B, n] of a network, the mean over `views` of each image."""
    return torch.stack([probabilities(model(view), multi_label) for view in views.take(images)]).mean(dim=0)


def guess_pool(
    model: TwoStream,
    pool: ImagePool,
    batch_size: int,
    pseudo_labels: PseudoLabels,
) -> tuple[Floats, Floats]:
    """A method's pseudo-labels [N, n] for every image of a pool, before and after alignment."""
    raw, aligned = _over(model, pool, batch_size, lambda images: pseudo_labels(model, images))
    return raw, aligned


def score(probs: Floats, labels: Ints, prefix: str) -> dict[str, float]:
    """AUC and MCA of one part with labels [N], or 0/1 [N, K] in a multi-label set; NaN if it is empty."""
    if not len(labels):
        return {f"{prefix}_auc": np.nan, f"{prefix}_mca": np.nan}
    return {f"{prefix}_auc": metrics.auc(probs, labels), f"{prefix}_mca": metrics.mca(probs, labels)}


def judge_pseudo_labels(raw: Floats, aligned: Floats, truth: Ints) -> tuple[dict[str, float], dict[str, Floats]]:
    """Score pseudo-labels if the truth is known (−1: unknown), and count the changes by alignment.

    Returns figures for `metrics.jsonl` and arrays for `history.npz`: the share of pseudo-labels of each class that
    alignment changed to another class, the mean aligned pseudo-label for each class before alignment, and the confusion
    matrix of truth and pseudo-label. With several labels per image, only the AUC of the pseudo-labels.
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
    """Apply a function to plain (not augmented) views of all images, in evaluation mode."""
    training = model.training
    model.eval()
    results = [function(batch.view("plain")) for batch in pool.batches(batch_size, shuffled=False)]
    model.train(training)
    return [torch.cat(columns).cpu().numpy() for columns in zip(*results, strict=True)]


def _digits(probs: Floats) -> list[str]:
    """Nine significant digits, which restore a float32 exactly."""
    return [f"{value:.9g}" for value in probs]


def _mean(values: Sequence[float | None]) -> float | None:
    """Mean of the defined figures. Undefined ones are NaN, or None if read from a file."""
    known = [value for value in values if value is not None and not np.isnan(value)]
    return sum(known) / len(known) if known else None
