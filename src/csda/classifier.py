"""The methods of csda as a scikit-learn classifier."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

from csda.cross_fitting import cross_fit
from csda.data.arrays import take_images, take_labels, unlabeled
from csda.data.cache import digest
from csda.data.decode import fit_array, read_image
from csda.data.prepared import PreparedData
from csda.data.records import Dataset, Record, Split
from csda.engine import choose_device, using
from csda.errors import CsdaError
from csda.features import Extractor, Features
from csda.methods import METHODS
from csda.models.feature_encoder import Standardize, build_body, fold
from csda.models.weights import read_weights
from csda.presets import PRESETS, configure
from csda.progress import Reporter
from csda.trainer import Trainer
from csda.training import learn

Array = npt.NDArray[Any]

IMAGES_AT_A_TIME = 256


class CSDAClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A linear classifier on features that learns from labeled and unlabeled samples.

    `fit(X, y)` takes `y = -1` for samples without a label, as scikit-learn's `SelfTrainingClassifier` does. X are
    feature vectors [N, W], or images as an array [N, H, W, C] or as paths. A pretrained network computes the features
    of images (`csda[pretrained]`). If all samples have labels it is logistic regression. Predictions are made for equal
    class frequencies, so that rare classes are found. If most samples are of one class, this lowers the accuracy.

    Args:
        method: one of `csda methods` that trains a head on features.
        epochs: passes of `steps_per_epoch` steps.
        steps_per_epoch: steps of each.
        image_size: images are resized to squares with this side in pixels.
        device: auto, cpu or cuda.
        random_state: seed of the training, a generator `RandomState`, or None for another training each time.
        settings: further settings of the preset `features` by name.

    Attributes:
        classes_: the classes, sorted.
        coef_: weights [n, W] for the features as given (not standardised).
        intercept_: biases [n].
        n_features_in_: number of features of a sample.
    """

    def __init__(
        self,
        method: str = "self-train",
        *,
        epochs: int = 10,
        steps_per_epoch: int = 40,
        image_size: int = 160,
        device: str = "auto",
        random_state: int | np.random.RandomState | None = 0,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.method = method
        self.epochs = epochs
        self.steps_per_epoch = steps_per_epoch
        self.image_size = image_size
        self.device = device
        self.random_state = random_state
        self.settings = settings

    def fit(self, X: Any, y: Any) -> Self:
        """Learn from samples whose label is in y, and from those where y is −1."""
        with _as_value_errors():
            images, y = take_images(X), y if y is None else take_labels(y)
        if images is None:
            values, labels = validate_data(self, X, y, dtype=np.float64)
        else:
            labels = column_or_1d(y, warn=True)
            if len(images) != len(labels):
                raise ValueError(f"X has {len(images)} images and y has {len(labels)} labels; give one for each")
            values = self._features(images)
            self.n_features_in_ = values.shape[1]
        missing = unlabeled(labels)
        known = labels[~missing]
        if not len(known):
            raise ValueError("y has no label, only -1; label some samples")
        check_classification_targets(known)
        self.classes_, targets = np.unique(known, return_inverse=True)
        self.of_images_ = images is not None
        if len(self.classes_) == 1:
            self.coef_ = np.zeros((1, values.shape[1]))
            self.intercept_ = np.zeros(1)
        else:
            self.coef_, self.intercept_ = self._learn(values, missing, targets)
        return self

    def decision_function(self, X: Any) -> Array:
        """Logits [N, n]; with two classes their difference [N], as scikit-learn defines it."""
        logits = self._logits(X)
        return logits[:, 1] - logits[:, 0] if len(self.classes_) == 2 else logits

    def predict_proba(self, X: Any) -> Array:
        """Probabilities [N, n] in the order of `classes_`."""
        logits = self._logits(X)
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        return np.asarray(powers / powers.sum(axis=1, keepdims=True))

    def predict(self, X: Any) -> Array:
        """The most probable class of each sample."""
        best = self._logits(X).argmax(axis=1)
        return np.asarray(self.classes_[best])

    def _logits(self, X: Any) -> Array:
        check_is_fitted(self)
        with _as_value_errors():
            images = take_images(X)
        if images is not None:
            if not self.of_images_:
                raise ValueError("X are images, but the classifier was fitted to feature vectors; give feature vectors")
            values = self._features(images)
        else:
            values = validate_data(self, X, dtype=np.float64, reset=False)
        return np.asarray(values @ self.coef_.T + self.intercept_)

    def _learn(self, values: Array, missing: Array, targets: Array) -> tuple[Array, Array]:
        """Train the head, and convert it to features that are not standardised."""
        method = self.method if missing.any() else "linear-probe"
        chosen = {
            "preset": "features",
            "method": method,
            "epochs": self.epochs,
            "steps_per_epoch": self.steps_per_epoch,
            "seed": _seed(self.random_state),
            "device": self.device,
            **(self.settings or {}),
        }
        own = METHODS["linear-probe"].settings.model_fields.keys() if method != self.method else None
        if own is not None:  # every sample has a label: logistic regression alone
            common = configure({"preset": "features", "method": method}).model_dump().keys()
            chosen = {name: value for name, value in chosen.items() if name in common | own}
        with _as_value_errors():
            config = configure(chosen)
            data, features = _as_data(values, missing, targets, len(self.classes_))
            with using(choose_device(config.device), "float32", config.time_kernels):
                trainer = Trainer(config, data, features=features)
                cross_fit(trainer, None, learn, Reporter())
                learn(trainer)
        standardize, layer = trainer.model.student[0], trainer.predicting.head[-1]
        assert isinstance(standardize, Standardize)
        assert isinstance(layer, torch.nn.Linear)
        weight, bias = fold(standardize, layer.weight.detach().double(), layer.bias.detach().double())
        return weight.cpu().numpy(), bias.cpu().numpy()

    def _features(self, images: Array | tuple[Path, ...]) -> Array:
        if not len(images):
            raise ValueError("X has no images; give some")
        with _as_value_errors():
            configure({"preset": "features", "image_size": self.image_size, "device": self.device})
            extractor, found = _extractor(self.image_size, self.device), []
            for start in range(0, len(images), IMAGES_AT_A_TIME):
                group = images[start : start + IMAGES_AT_A_TIME]
                found.append(extractor(np.stack([_pixels(image, self.image_size) for image in group])))
        return np.concatenate(found).astype(np.float64)


@contextmanager
def _as_value_errors() -> Iterator[None]:
    """Raise mistakes as scikit-learn does."""
    try:
        yield
    except CsdaError as error:
        raise ValueError(str(error)) from None


def _seed(random_state: Any) -> int:
    """The seed of a training, from what scikit-learn calls a random state."""
    if isinstance(random_state, int | np.integer):
        return int(random_state)
    return int(check_random_state(random_state).randint(2**31))


def _pixels(image: Path | Array, size: int) -> Array:
    return read_image(image, size, 3) if isinstance(image, Path) else fit_array(image, size, 3)


@lru_cache(maxsize=2)
def _extractor(image_size: int, device: str) -> Extractor:
    """The pretrained network of the preset `features`, built once and shared, so that classifiers stay small."""
    preset = PRESETS["features"].run
    weights = read_weights(preset["backbone"], True, None)
    body = build_body(preset["backbone"], image_size, 3, preset["feature_stages"], weights)
    return Extractor(body, choose_device(device), "float32", 256)


def _as_data(values: Array, missing: Array, targets: Array, classes: int) -> tuple[PreparedData, Features]:
    """Feature vectors as training data. The labeled ones also fill the test part, which is not evaluated."""
    labels: list[int | None] = [None] * len(values)
    for row, target in zip(np.flatnonzero(~missing).tolist(), targets.tolist(), strict=True):
        labels[row] = target
    records = tuple(Record(str(row), None, label) for row, label in enumerate(labels))
    labeled = tuple(record for record in records if record.label is not None)
    split = Split(labeled, tuple(record for record in records if record.label is None), (), labeled, {})
    dataset = Dataset("arrays", tuple(map(str, range(classes))), records)
    pixels = np.zeros((len(values), 1, 1, 3), np.uint8)
    features = Features(np.ascontiguousarray(values, dtype=np.float32), {}, "")
    return PreparedData(
        dataset, pixels, split, (), digest(features.array.tobytes(), repr(labels).encode()).hex()
    ), features
