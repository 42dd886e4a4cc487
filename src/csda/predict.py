"""A trained model, used."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from csda import metrics
from csda.data.augment import Augmentation
from csda.data.decode import Aspect, read_image
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
        self._file = run.folder / "model.safetensors"
        weights, metadata = run.read_weights()
        try:
            model = json.loads(metadata["csda"])
            self.classes: tuple[str, ...] = tuple(model["classes"])
            self.multi_label: bool = model["multi_label"]
            self.image_size: int = model["image_size"]
            self.channels: int = model["channels"]
            self._frequencies = model["class_frequencies"]
            self._flips: bool = model.get("flips", False)
            self._aspect: Aspect = model.get("aspect", "squash")
            frozen: bool = model.get("frozen", False)
            encoder = build_encoder(model["backbone"], self.image_size, self.channels, dropout=0.0)
        except (LookupError, TypeError, ValueError) as error:
            raise RunError(
                f"{self._file}: not a model of csda ({type(error).__name__}: {error}); restore it or train anew"
            ) from None
        self._model = TwoStream(encoder, len(self.classes), rectified=not frozen)
        # The teacher is not part of a finished model, and predicting leaves it out.
        expected = {k: value.shape for k, value in self._model.state_dict().items() if not k.startswith("teacher.")}
        if {k: value.shape for k, value in weights.items()} != expected:
            raise RunError(f"{self._file}: not the weights of a {model['backbone']}; restore it or train anew")
        self._model.load_state_dict(weights, strict=False)
        self._model.to(choose_device(device)).eval()

    def predict(self, images: str | Path | Sequence[str | Path] | Pixels, batch_size: int = 256) -> Floats:
        """Probabilities [N, n] for image files, or for uint8 images [N, H, W, C] of the model's own size.

        A single file gives one row.
        """
        if isinstance(images, str | Path):
            images = [images]
        if isinstance(images, np.ndarray):
            expected = (self.image_size, self.image_size, self.channels)
            if images.dtype != np.uint8 or images.shape[1:] != expected:
                raise DataError(
                    f"images are {images.dtype} {list(images.shape)}; give uint8 [N, {', '.join(map(str, expected))}]"
                )
            return self._predict(images, batch_size)
        probs, problems = self.predict_files([Path(path) for path in images], batch_size)
        for problem in problems.values():
            raise problem
        return probs

    def predict_files(self, paths: Sequence[Path], batch_size: int = 256) -> tuple[Floats, dict[int, DataError]]:
        """Probabilities [N, n] for files, NaN where one cannot be used, and what is wrong with it by its position."""
        probs = np.full((len(paths), len(self.classes)), np.nan, dtype=np.float32)
        problems: dict[int, DataError] = {}
        for start in range(0, len(paths), batch_size):
            pixels = {}
            for position, path in enumerate(paths[start : start + batch_size], start=start):
                try:
                    pixels[position] = read_image(path, self.image_size, self.channels, self._aspect)
                except DataError as error:
                    problems[position] = error
            if pixels:
                probs[list(pixels)] = self._predict(np.stack(list(pixels.values())), batch_size)
        return probs, problems

    def _predict(self, pixels: Pixels, batch_size: int) -> Floats:
        device = next(self._model.parameters()).device
        pool = ImagePool(torch.from_numpy(pixels).to(device), Augmentation(), torch.Generator(device))
        probs = predict_pool(self._model, pool, batch_size, multi_label=self.multi_label, flips=self._flips)
        if self._frequencies is not None:
            frequencies = np.array(self._frequencies)
            probs = metrics.prior_corrected(probs, frequencies, multi_label=self.multi_label).astype(np.float32)
        if not np.isfinite(probs).all():
            raise RunError(f"{self._file}: gives predictions that are not finite; restore it or train anew")
        return probs


def load(run_folder: str | Path, device: str = "auto") -> Predictor:
    """The model of a finished (or still running) run."""
    return Predictor(Run(run_folder), device)
