"""The models behind the page: the model of a run, for predictions and Grad-CAM, and a probe that learns from the
labels.
"""

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
from csda.review.session import Said, Session
from csda.runs import Run

if TYPE_CHECKING:
    from csda.predict import Predictor

MAP = 224
"""Side of a Grad-CAM picture in pixels."""

COLOURS = np.array([(0, 0, 0), (86, 40, 120), (213, 94, 0), (255, 225, 120)], dtype=np.float64)
"""Colours of a map, from no evidence to most."""


class Advisor:
    """The model of a run, and a probe on frozen features.

    The model is loaded when it is first used. Features are computed in the background. When they are complete, the page
    has neighbours, an order by diversity and suspicious labels. In a folder without a training the predictions are
    those of the probe.
    """

    def __init__(self, session: Session, run: Run | None = None) -> None:
        self._session, self._run, self._lock = session, run, threading.Lock()
        self._predictor: Predictor | None = None
        self.progress: float | None = None
        """Share of the features that is there; None where there will be none."""
        self.problem: str | None = None

    @property
    def can_predict(self) -> bool:
        return self._run is not None

    @property
    def can_refresh(self) -> bool:
        """Whether the features are complete."""
        return self.progress == 1.0

    @property
    def has_attention(self) -> bool:
        return self._run is not None

    def begin(self) -> threading.Thread:
        """Compute features and train the probe in a daemon thread."""
        self.progress = 0.0
        thread = threading.Thread(target=self._prepare, daemon=True)
        thread.start()
        return thread

    def _prepare(self) -> None:
        try:
            self.prepare()
        except Exception as error:  # the page works without features
            self.progress, self.problem = None, str(error)

    def prepare(self) -> None:
        """Compute features, and train the probe on the labels so far."""
        session = self._session
        from csda.review.learning import read_features

        dataset = session.dataset
        features = read_features(dataset, self._tell)
        rows = {record.id: row for row, record in enumerate(dataset.records)}
        with session.lock:
            session.features = np.asarray(features[[rows[name] for name in session.names]])
        self.refresh()
        self.progress = 1.0

    def _tell(self, share: float) -> None:
        self.progress = min(share, 0.99)

    def refresh(self) -> int:
        """Train the probe on the labels so far and order the images again. Return the number of labels."""
        from csda.review.learning import align, learn, leave_out

        session = self._session
        if session.features is None:
            raise ConfigError("there are no features yet")
        positions, labels = session.known_labels()
        said = session.said
        several = labels.ndim == 2 or len(np.unique(labels)) > 1
        if several and len(positions) > 1:
            groups = [session.records[position].group for position in positions]
            learned = learn(session.features, positions, labels, len(session.classes), groups)
            left_out = leave_out(learned, session.features[positions], labels, groups)
            own = learned.predict(session.features)
            # For images that a run was not trained on, its model predicts; the probe is the second model.
            if self._run is None or said is None:
                probs, aligned, second = own, align(left_out, labels, own), None
            else:
                probs, aligned, second = said.probs.copy(), said.aligned, own
            probs[session.given] = np.nan
            known = session.given[positions]
            probs[positions[known]] = left_out[known]
            said = Said(probs, aligned, second)
        session.tell(said)
        return len(positions)

    def predict(self, content: bytes) -> tuple[str, list[float]]:
        """The predicted label of an image file, and the probabilities of the classes."""
        with self._lock, tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "image"
            path.write_bytes(content)
            predictor = self._loaded()
            probs = predictor.predict([path])
            (label,) = predictor.judge(probs).labels
        return label_text(label, predictor.classes), [float(value) for value in probs[0]]

    def attention(self, record: Record, label: int) -> bytes:
        """A Grad-CAM map of an image for a class, as a picture on black to lay over the image."""
        import torch

        from csda.data.augment import plain
        from csda.grad_cam import grad_cam

        with self._lock:
            predictor = self._loaded()
            if record.path is None:
                raise ConfigError("drawn images have no file, so there is no map")
            pixels = read_image(record.path, predictor.image_size, predictor.channels)
            images = plain(torch.from_numpy(pixels[None]).to(predictor.device))
            found = grad_cam(predictor.model, images, torch.tensor([label], device=predictor.device))
        if found is None:
            raise ConfigError("this network has no feature map, which Grad-CAM needs")
        # The network got the image squashed to a square; the map is resized to the shape of the image.
        width, height = read_picture(record.path, MAP).size
        return _colour(found[0].cpu().numpy(), width, height)

    def _loaded(self) -> Predictor:
        if self._predictor is None:
            from csda.predict import Predictor

            assert self._run is not None
            self._predictor = Predictor(self._run)
        return self._predictor


def _colour(values: npt.NDArray[np.float32], width: int, height: int) -> bytes:
    grey = Image.fromarray(np.rint(values * 255).astype(np.uint8)).resize((width, height), Image.Resampling.BICUBIC)
    places = np.asarray(grey, dtype=np.float64) / 255 * (len(COLOURS) - 1)
    pixels = np.stack([np.interp(places, np.arange(len(COLOURS)), COLOURS[:, k]) for k in range(3)], axis=-1)
    buffer = io.BytesIO()
    Image.fromarray(np.rint(pixels).astype(np.uint8)).save(buffer, "WEBP", quality=80)
    return buffer.getvalue()
