"""Models behind the page: that of a run, which predicts and says where it looks, and one that learns from labels."""

from __future__ import annotations

import io
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from PIL import Image

from csda.data.decode import read_image, read_picture
from csda.data.records import Record
from csda.data.splits import label_text
from csda.errors import ConfigError
from csda.runs import Run

if TYPE_CHECKING:
    from csda.predict import Predictor

MAP = 224
"""Pixels of a side of a picture of where the network looks."""

COLOURS = np.array([(0, 0, 0), (86, 40, 120), (213, 94, 0), (255, 225, 120)], dtype=np.float64)
"""Of a map from nothing to most."""


class RunAdvisor:
    """The model of a finished run, loaded when first asked."""

    can_predict = True
    can_refresh = False
    has_attention = True

    def __init__(self, run: Run) -> None:
        self._run, self._lock = run, threading.Lock()
        self._predictor: Predictor | None = None

    def predict(self, content: bytes) -> tuple[str, list[float]]:
        """The label that the model gives an image file, and the probabilities of the classes."""
        with self._lock, tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "image"
            path.write_bytes(content)
            predictor = self._loaded()
            probs = predictor.predict([path])
            (label,) = predictor.judge(probs).labels
        return label_text(label, predictor.classes), [float(value) for value in probs[0]]

    def attention(self, record: Record, label: int) -> bytes:
        """Grad-CAM of an image for a class, as a picture on black to be laid over it."""
        import torch

        from csda.data.augment import plain
        from csda.grad_cam import grad_cam

        with self._lock:
            predictor = self._loaded()
            if record.path is None:
                raise ConfigError("drawn images have no file to look at")
            pixels = read_image(record.path, predictor.image_size, predictor.channels)
            images = plain(torch.from_numpy(pixels[None]).to(predictor.device))
            found = grad_cam(predictor.model, images, torch.tensor([label], device=predictor.device))
        if found is None:
            raise ConfigError("this network has no map of features to look at")
        # The network saw the image squashed to a square; the map is stretched back to its shape.
        width, height = read_picture(record.path, MAP).size
        return _colour(found[0].cpu().numpy(), width, height)

    def refresh(self) -> int:
        raise ConfigError("train on with the labels instead: csda train --labels-from")

    def _loaded(self) -> Predictor:
        if self._predictor is None:
            from csda.predict import Predictor

            self._predictor = Predictor(self._run)
        return self._predictor


def _colour(values: npt.NDArray[np.float32], width: int, height: int) -> bytes:
    grey = Image.fromarray(np.rint(values * 255).astype(np.uint8)).resize((width, height), Image.Resampling.BICUBIC)
    places = np.asarray(grey, dtype=np.float64) / 255 * (len(COLOURS) - 1)
    pixels = np.stack([np.interp(places, np.arange(len(COLOURS)), COLOURS[:, k]) for k in range(3)], axis=-1)
    buffer = io.BytesIO()
    Image.fromarray(np.rint(pixels).astype(np.uint8)).save(buffer, "WEBP", quality=80)
    return buffer.getvalue()
