"""Samples and labels given from Python: images, files or feature vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL.Image import Image

from csda.data.decode import Aspect, fit_array, is_grey
from csda.data.records import Dataset, Pixels, Record
from csda.errors import DataError

Array = npt.NDArray[Any]

SOURCE = "arrays"
"""The values of `data` and `source` in a run on samples from Python."""

CHANNELS = (1, 3, 4)


@dataclass(frozen=True, slots=True)
class Samples:
    """Images [N, H, W, C], feature vectors [N, W] as float32, or files, and the class of each, None if unknown."""

    values: Array | tuple[Path, ...]
    classes: tuple[str, ...]
    labels: tuple[int | None, ...]

    @property
    def vectors(self) -> npt.NDArray[np.float32] | None:
        return self.values if isinstance(self.values, np.ndarray) and self.values.ndim == 2 else None

    def as_dataset(self, aspect: Aspect) -> Dataset:
        """Convert to a data set. Images are made square by `aspect`."""
        if not isinstance(self.values, np.ndarray):
            records = [Record(str(path), path, label) for path, label in zip(self.values, self.labels, strict=True)]
            return Dataset(SOURCE, self.classes, tuple(records))
        values, vectors = self.values, self.vectors
        channels = 3 if vectors is None and values.shape[-1] > 1 and not all(map(is_grey, values[..., :3])) else 1

        def draw(positions: Sequence[int], size: int) -> Pixels:
            if vectors is not None:
                return np.zeros((len(positions), 1, 1, 1), np.uint8)
            return np.stack([fit_array(values[position], size, channels, aspect) for position in positions])

        content = blake2b(f"{values.dtype} {values.shape} {aspect}".encode(), digest_size=16)
        content.update(np.ascontiguousarray(values).data)
        records = [Record(str(position), None, label) for position, label in enumerate(self.labels)]
        return Dataset(SOURCE, self.classes, tuple(records), draw=draw, drawn_with=content.hexdigest())


def take_samples(X: Any, y: Any) -> Samples:
    """Check X and y of `CSDAClassifier.fit` and convert them; y is −1 for samples without a label."""
    labels = take_labels(y)
    if labels.ndim != 1:
        raise DataError(f"y has the shape {list(labels.shape)}; give one label for each sample, -1 where there is none")
    values = _take_values(X)
    if len(values) != len(labels):
        raise DataError(f"X has {len(values)} samples and y has {len(labels)} labels; give one for each")
    missing = unlabeled(labels)
    if missing.all():
        raise DataError("y has no label, only -1; label some samples")
    classes, targets = np.unique(labels[~missing], return_inverse=True)
    if len(classes) == 1:
        raise DataError(f"y has one class, {classes[0]}; label samples of another class, too")
    known = iter(targets.tolist())
    return Samples(values, tuple(map(str, classes)), tuple(None if gone else next(known) for gone in missing))


def take_images(X: Any) -> Array | tuple[Path, ...] | None:
    """Images as an array [N, H, W, C], or as paths; None if X are something else.

    Paths may be in a list, an array, or a column of a table.
    """
    if not isinstance(X, np.ndarray | Sequence) and getattr(X, "ndim", None) == 1:
        X = np.asarray(X)
    if isinstance(X, np.ndarray) and X.dtype.kind not in "OUS":
        if X.ndim == 3:
            raise DataError(f"X has the shape {list(X.shape)}; give images [N, H, W, C], grey ones with C of 1")
        if X.ndim == 4 and X.shape[-1] not in CHANNELS:
            raise DataError(f"X has the shape {list(X.shape)}; give images [N, H, W, C] with C of 1, 3 or 4")
        return X if X.ndim == 4 else None
    if not isinstance(X, np.ndarray | Sequence) or not len(X):
        return None
    if all(isinstance(each, str | Path) for each in X):
        return tuple(Path(each) for each in X)
    if isinstance(X[0], Image) or getattr(X[0], "ndim", 0) > 1:
        raise DataError("X is a list of images; give their paths, or one array [N, H, W, C] of one size")
    return None


def take_labels(y: Any) -> Array:
    """Labels as an array, in which texts stay texts and −1 stays a number."""
    labels = np.asarray(y)
    if labels.dtype.kind == "U" and labels.ndim == 1 and not all(isinstance(label, str) for label in y):
        labels = np.array(y, dtype=object)  # of texts and numbers NumPy makes texts
    if labels.dtype.kind in "OU" and labels.ndim == 1:
        if "-1" in labels.tolist():
            raise DataError(
                "y has the text '-1'; give an array of objects, with the number -1 for samples without a label"
            )
        kinds = {isinstance(label, str) for label in labels[~unlabeled(labels)]}
        if len(kinds) == 2 or any(label is None for label in labels):
            raise DataError("y has texts beside other labels, or None; give one kind, and -1 where there is no label")
    return labels


def unlabeled(labels: Array) -> npt.NDArray[np.bool_]:
    """Where labels are −1; in an array of objects with texts, where they are the number −1."""
    if labels.dtype.kind == "O":
        return np.array([isinstance(label, int | np.integer) and label == -1 for label in labels], dtype=bool)
    return np.asarray(labels == -1) if labels.dtype.kind in "iuf" else np.zeros(len(labels), dtype=bool)


def _take_values(X: Any) -> Array | tuple[Path, ...]:
    images = take_images(X)
    if isinstance(images, tuple) and len(set(images)) < len(images):
        twice = next(path for position, path in enumerate(images) if path in images[:position])
        raise DataError(f"{twice}: named twice in X; name each file once")
    if images is not None:
        return images
    try:
        vectors = np.ascontiguousarray(X, dtype=np.float32)
    except (TypeError, ValueError):
        vectors = np.empty(0, np.float32)
    if vectors.ndim != 2 or not vectors.size:
        raise DataError("X is neither images [N, H, W, C], nor paths, nor feature vectors [N, W]; give one of these")
    if not np.isfinite(vectors).all():
        raise DataError("X has features that are not finite; remove these samples, or fill them in")
    return vectors
