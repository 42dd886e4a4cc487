"""Cross-fitting: predictions on labeled images by networks that were not trained on them.

A network memorises the labels that it learns from, so its predictions there say nothing about other images. The labeled
images are divided into K folds, whole groups in one, and each fold is predicted by a network that learned from the
others. That is either a last layer on the features of the network before training, which costs one pass over the
images and K small fits, or a whole network, which costs K trainings on the labels alone.

If validation has too few images, calibration is fitted to out-of-fold predictions of the method itself, which costs K
whole trainings. On frozen features these take seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from csda.config import CIRCUMSTANCES, RunConfig
from csda.data.cache import digest, recall, remember
from csda.data.loader import ImagePool
from csda.data.prepared import PreparedData
from csda.data.records import Record
from csda.data.splits import FEW_VALIDATION
from csda.evaluate import predict_pool
from csda.features import digest_weights
from csda.folders import default_cache
from csda.methods.base import CrossFit
from csda.models.weights import read_weights
from csda.probe import assign_folds, limit_threads
from csda.progress import Reporter
from csda.trainer import Trainer

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Learn = Callable[[Trainer], None]
"""Runs all steps of a training: `csda.training.learn`."""

FOLDS = 5
"""Number of folds for calibration."""

STRENGTHS = (1e-3, 1e-2, 1e-1)
"""Values of C, the inverse penalty. The one with the highest likelihood of the held-out labels is used."""

COMPONENTS = 256
"""Number of principal components of the features that a last layer is fitted on."""


def cross_fit(trainer: Trainer, weights: Mapping[str, Tensor] | None, learn: Learn, reporter: Reporter) -> None:
    """Compute the out-of-fold predictions that a method requests. The encoder starts from `weights`."""
    request = trainer.method.cross_fit
    if request is None:
        return
    labels, folds = _draw_folds(trainer, request.folds, every_image=True)
    if request.network == "head":
        labeled, unlabeled = _fit_heads(trainer, request, labels, folds)
    else:
        labeled, unlabeled = _train_bodies(trainer, request, folds, weights, learn, reporter)
    give = (torch.from_numpy(probs).to(trainer.device, torch.float32) for probs in (labeled, unlabeled))
    trainer.method.take_folds(*give)


def predict_held_out(trainer: Trainer, learn: Learn, reporter: Reporter) -> tuple[Floats, Ints] | None:
    """Predictions and labels of labeled images, each predicted by a training of the same kind without its fold.

    None if the settings do not ask for them. An image is left out if no other fold has its class.
    """
    config, split = trainer.config, trainer.data.split
    few = len(split.val) < FEW_VALIDATION
    if config.calibrate == "validation" or (config.calibrate == "auto" and not (few and config.frozen)):
        return None
    labels, folds = _draw_folds(trainer, FOLDS)
    held_out = folds >= 0
    numbers = np.unique(folds[held_out])
    if len(numbers) < 2:
        return None
    reporter.note(f"calibration: {len(numbers)} trainings, each without a fold of the labeled images")
    weights = None if config.frozen else read_weights(config.backbone, config.pretrained, config.weights)
    probs = np.zeros((len(labels), trainer.task.num_classes))
    own = config.model_copy(update={"choose": "last"})
    for fold in numbers:
        chosen = held_out & (folds == fold)
        learned, predicted = _chosen(split.labeled, ~chosen), _chosen(split.labeled, chosen)
        parts = replace(split, labeled=learned, val=(), test=predicted)
        body = Trainer(own, replace(trainer.data, split=parts), trainer.ranks, weights, trainer.features)
        cross_fit(body, weights, learn, Reporter())
        learn(body)
        with body.engine.arithmetic():
            probs[chosen] = body.evaluator.predict(body.predicting, body.parts.test)
    return probs[held_out], labels[held_out]


def _draw_folds(trainer: Trainer, number: int, *, every_image: bool = False) -> tuple[Ints, Ints]:
    """Labels of the labeled images, and the fold of each by `assign_folds`."""
    records = trainer.data.split.labeled
    labels = trainer.data.encode(records)
    groups = [record.group or record.id for record in records]
    rng = np.random.default_rng(trainer.config.seed)
    return labels, assign_folds(labels, groups, rng, number, every_image=every_image)


def predict_folds(
    features: Floats, labels: Ints, folds: Ints, others: Floats, num_classes: int
) -> tuple[Floats, Floats]:
    """Logistic regression by folds on features [N, d] and labels [N] or [N, K]: out-of-fold predictions, and mean
    predictions on `others`.

    With several labels, each has its own regression. The penalty is the one with the highest likelihood of held-out
    labels.
    """
    scale = np.concatenate([features, others]) if len(others) else features
    mean, deviation = scale.mean(axis=0), scale.std(axis=0) + 1e-3
    features, others = (features - mean) / deviation, (others - mean) / deviation
    _, _, axes = np.linalg.svd(features[:4096], full_matrices=False)
    features, others = features @ axes[:COMPONENTS].T, others @ axes[:COMPONENTS].T
    with limit_threads(features):
        if labels.ndim == 1:
            return predict_folds_of(features, labels, folds, others, num_classes)
        columns = [predict_folds_of(features, labels[:, k], folds, others, 2) for k in range(num_classes)]
    return tuple(np.stack([pair[part][:, 1] for pair in columns], axis=1) for part in (0, 1))  # type: ignore[return-value]


def predict_folds_of(
    features: Floats, labels: Ints, folds: Ints, others: Floats, num_classes: int
) -> tuple[Floats, Floats]:
    """The same for class indices of `num_classes` classes, on features that are not standardised."""
    best: tuple[float, Floats, Floats] | None = None
    for strength in STRENGTHS:
        own, mean = np.zeros((len(labels), num_classes)), np.zeros((len(others), num_classes))
        numbers = np.unique(folds)
        for fold in numbers:
            held_out = folds == fold
            predict = _fit(features[~held_out], labels[~held_out], strength, num_classes)
            own[held_out] = predict(features[held_out])
            if len(others):
                mean += predict(others) / len(numbers)
        likelihood = float(np.log(own[np.arange(len(labels)), labels].clip(1e-6)).mean())
        if best is None or likelihood > best[0]:
            best = likelihood, own, mean
    assert best is not None
    return best[1], best[2]


def _fit(features: Floats, labels: Ints, strength: float, num_classes: int) -> Callable[[Floats], Floats]:
    """Fit logistic regression. Classes without a label get probability 0; a single class gets 1."""
    from sklearn.linear_model import LogisticRegression

    present = np.unique(labels)
    if len(present) == 1:
        return lambda values: np.tile(np.eye(num_classes)[present[0]], (len(values), 1))
    model = LogisticRegression(C=strength, max_iter=200).fit(features, labels)

    def predict(values: Floats) -> Floats:
        probs = np.zeros((len(values), num_classes))
        probs[:, model.classes_] = model.predict_proba(values)
        return probs

    return predict


def _fit_heads(trainer: Trainer, request: CrossFit, labels: Ints, folds: Ints) -> tuple[Floats, Floats]:
    parts = trainer.parts
    others = _features(trainer, parts.unlabeled) if request.unlabeled else np.empty((0, trainer.task.width))
    return predict_folds(_features(trainer, parts.labeled), labels, folds, others, trainer.task.num_classes)


@torch.no_grad()
def _features(trainer: Trainer, pool: ImagePool) -> Floats:
    """Features of the network before training for every image of a pool, [N, d]."""
    model = trainer.model
    training = model.training
    model.eval()
    with trainer.engine.arithmetic():
        batches = pool.batches(trainer.config.eval_batch_size, shuffled=False)
        features = [model.head[0](model.student(batch.view("plain"))).float().cpu() for batch in batches]
    model.train(training)
    return torch.cat(features).double().numpy()


def _train_bodies(
    trainer: Trainer,
    request: CrossFit,
    folds: Ints,
    weights: Mapping[str, Tensor] | None,
    learn: Learn,
    reporter: Reporter,
) -> tuple[Floats, Floats]:
    """Train each network like the method `baseline`, in fewer epochs.

    Their predictions are cached, so that trainings that differ only in how they use these share the networks.
    """
    data, task, split = trainer.data, trainer.task, trainer.data.split
    config = trainer.config.model_copy(
        update={
            "method": "baseline",
            "method_settings": {},
            "epochs": request.epochs,
            "warm_up_epochs": request.epochs,
        }
    )
    labeled = np.zeros((len(folds), task.num_classes))
    unlabeled = np.zeros((len(split.unlabeled) if request.unlabeled else 0, task.num_classes))
    memory = default_cache() / "folds" / _identity(config, data, folds, weights, request)
    if (kept := trainer.ranks.from_first(lambda: recall(memory))) is not None:
        both = np.frombuffer(kept).reshape(-1, task.num_classes).copy()
        return both[: len(labeled)], both[len(labeled) :]
    numbers = np.unique(folds)
    for count, fold in enumerate(numbers, start=1):
        reporter.note(f"predicting labeled images out of fold: network {count} of {len(numbers)}")
        learned, held_out = _chosen(split.labeled, folds != fold), _chosen(split.labeled, folds == fold)
        body = Trainer(
            config,
            replace(data, split=replace(split, labeled=learned, test=held_out)),
            trainer.ranks,
            weights,
            trainer.features,
        )
        learn(body)
        labeled[folds == fold] = _predict(trainer, body, body.parts.test)
        if request.unlabeled:
            unlabeled += _predict(trainer, body, body.parts.unlabeled) / len(numbers)
    if trainer.ranks.first:
        remember(memory, np.concatenate([labeled, unlabeled]).tobytes())
    return labeled, unlabeled


def _identity(
    config: RunConfig, data: PreparedData, folds: Ints, weights: Mapping[str, Tensor] | None, request: CrossFit
) -> str:
    """The cache key of the folds' predictions, from data, split, settings and first weights."""
    settings = config.model_dump(exclude={"data", *CIRCUMSTANCES})
    parts = [[record.id for record in part] for part in (data.split.labeled, data.split.unlabeled)]
    first = "random" if weights is None else digest_weights(weights)
    text = repr((data.digest, parts, folds.tolist(), settings, first, request))
    return digest(text.encode()).hex()


def _chosen(records: Sequence[Record], mask: Iterable[bool]) -> tuple[Record, ...]:
    return tuple(record for record, chosen in zip(records, mask, strict=True) if chosen)


def _predict(trainer: Trainer, body: Trainer, pool: ImagePool) -> Floats:
    """Predictions of the network of a fold, for the class frequencies of all labeled images."""
    config, multi_label = body.config, body.task.multi_label
    with body.engine.arithmetic():
        probs = predict_pool(
            body.predicting, pool, config.eval_batch_size, multi_label=multi_label, views=body.evaluator.views
        )
    scores = torch.from_numpy(probs).clamp(1e-7, 1.0 - 1e-7)
    logits = torch.logit(scores) if multi_label else scores.log()
    return trainer.method.probabilities(logits.to(trainer.device)).double().cpu().numpy()
