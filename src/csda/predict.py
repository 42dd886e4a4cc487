"""A trained model, used."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from csda import metrics
from csda.data.augment import Augmentation
from csda.data.decode import read_image
from csda.data.loader import ImagePool
from csda.data.records import Pixels
from csda.engine import choose_device
from csda.errors import DataError, RunError
from csda.evaluate import Floats, predict_pool
from csda.models.backbones import build_encoder
from csda.models.two_stream import TwoStream
from csda.runs import Run


class Predictor:
    """The model of a run at its best validation epoch.

    Attributes:
        classes: names of the columns that `predict` returns.
        multi_label: whether a row holds independent probabilities rather than a distribution.
        image_size: side of the images that the network sees; others are resized to it.
    """

    def __init__(self, run: Run, device: str = "auto") -> None:
        weights, metadata = run.read_weights()
        try:
            model = json.loads(metadata["csda"])
        except (KeyError, ValueError):
            raise RunError(
                f"{run.folder / 'model.safetensors'}: not a model of csda; restore it or train anew"
            ) from None
        self.classes: tuple[str, ...] = tuple(model["classes"])
        self.multi_label: bool = model["multi_label"]
        self.image_size: int = model["image_size"]
        self.channels: int = model["channels"]
        self._frequencies = model["class_frequencies"]
        encoder = build_encoder(model["backbone"], self.image_size, self.channels, dropout=0.0)
        self._model = TwoStream(encoder, len(self.classes))
        # The teacher is not part of a finished model, and predicting leaves it out.
        expected = {k: value.shape for k, value in self._model.state_dict().items() if not k.startswith("teacher.")}
        if {k: value.shape for k, value in weights.items()} != expected:
            raise RunError(f"{run.folder / 'model.safetensors'}: not the weights of a {model['backbone']}; train anew")
        self._model.load_state_dict(weights, strict=False)
        self._model.to(choose_device(device)).eval()

    def predict(self, images: Sequence[str | Path] | Pixels, batch_size: int = 256) -> Floats:
        """Probabilities [N, n] for image files, or for uint8 images [N, H, W, C] of the model's own size."""
        if isinstance(images, np.ndarray):
            expected = (self.image_size, self.image_size, self.channels)
            if images.dtype != np.uint8 or images.shape[1:] != expected:
                raise DataError(
                    f"images are {images.dtype} {list(images.shape)}; give uint8 [N, {', '.join(map(str, expected))}]"
                )
            return self._predict(images, batch_size)
        rows = [np.empty((0, len(self.classes)), dtype=np.float32)]
        for start in range(0, len(images), batch_size):
            paths = images[start : start + batch_size]
            pixels = np.stack([read_image(Path(path), self.image_size, self.channels) for path in paths])
            rows.append(self._predict(pixels, batch_size))
        return np.concatenate(rows)

    def _predict(self, pixels: Pixels, batch_size: int) -> Floats:
        device = next(self._model.parameters()).device
        pool = ImagePool(torch.from_numpy(pixels).to(device), Augmentation(), torch.Generator(device))
        probs = predict_pool(self._model, pool, batch_size, multi_label=self.multi_label)
        if self._frequencies is not None:
            frequencies = np.array(self._frequencies)
            probs = metrics.prior_corrected(probs, frequencies, multi_label=self.multi_label).astype(np.float32)
        return probs


def load(run_folder: str | Path, device: str = "auto") -> Predictor:
    """The model of a finished (or still running) run."""
    return Predictor(Run(run_folder), device)
