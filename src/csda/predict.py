"""Predict with a trained model."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from csda import metrics
from csda.calibration import COVERAGE, Calibration, from_json
from csda.data.augment import plain
from csda.data.decode import Aspect, fit_array, fit_image, read_image
from csda.data.records import Pixels
from csda.data.store import available_cores
from csda.engine import choose_device
from csda.errors import ConfigError, DataError, RunError
from csda.evaluate import Floats, predict_images
from csda.models.averaged_views import ViewChoice
from csda.models.backbones import VECTORS
from csda.models.feature_encoder import build_body
from csda.models.two_stream import TwoStream
from csda.runs import Run

Each = TypeVar("Each")
One = str | Path | Image.Image | npt.NDArray[Any] | Tensor
"""An image: a file, or pixels of any size, grey or in colour."""

CHANNELS = (1, 3, 4)
"""How many channels an array may have; with four, the last is transparency."""

DECODED = 16
"""Number of files per decoding task."""

AHEAD = 2
"""Number of batches that are decoded in advance."""


class Outcome(NamedTuple):
    """The result for one file: its probabilities [n], or the error."""

    path: Path
    probs: Floats | None
    problem: DataError | None


class Judgement(NamedTuple):
    """Decisions from probabilities. The last two are None if the model has no calibration for them."""

    labels: list[int | tuple[int, ...]]
    confidence: Floats
    sets: list[tuple[int, ...]] | None
    unsure: npt.NDArray[np.bool_] | None


class Predictor:
    """The model of a run at its best validation epoch.

    Attributes:
        classes: names of the columns that `predict` returns.
        multi_label: whether a row holds independent probabilities rather than a distribution.
        image_size: images are resized to squares with this side.
        channels: 1 for grey, 3 for colour; images are converted.
        width: number of features, if the model was trained on feature vectors; None if it takes images.
        calibration: fitted to predictions on images that were not trained on; None if there were none.
        device: device of the network.
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
            self.digest: str | None = model.get("sha256")
            self.frequencies: list[float] | None = model["class_frequencies"]
            self.views = ViewChoice(model.get("flips", False), model.get("middle", False))
            self.aspect: Aspect = model.get("aspect", "squash")
            frozen: bool = model.get("frozen", False)
            fitted = model.get("calibration")
            self.calibration: Calibration | None = None if fitted is None else from_json(fitted, len(self.classes))
            takes_vectors = model["backbone"].startswith(VECTORS)
            stages: int = model.get("feature_stages", 0)
            views = model.get("feature_views", "plain")
            encoder = build_body(model["backbone"], self.image_size, self.channels, stages, views=views)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise RunError(
                f"{self._file}: not a model of csda ({type(error).__name__}: {error}); restore it or train again"
            ) from None
        self.width: int | None = encoder.width if takes_vectors else None
        self.model = TwoStream(encoder, len(self.classes), rectified=not frozen)
        # A finished model has no teacher; prediction does not need it.
        expected = {k: value.shape for k, value in self.model.state_dict().items() if not k.startswith("teacher.")}
        if {k: value.shape for k, value in weights.items()} != expected:
            raise RunError(f"{self._file}: not the weights of a {model['backbone']}; restore it or train again")
        self.model.load_state_dict(weights, strict=False)
        self.device = choose_device(device)
        # Pixels are stored channels last, and convolutions are faster if activations are, too.
        self.model.to(self.device, memory_format=torch.channels_last).eval()  # type: ignore[call-overload]

    def predict(
        self,
        images: One | Iterable[One],
        batch_size: int = 256,
        *,
        tta: bool = False,
        calibrated: bool = True,
    ) -> Floats:
        """Probabilities [N, n] of images: files, images of Pillow, arrays [H, W] or [H, W, C], tensors [C, H, W].

        A single image gives one row; several, such as a list, an array [N, H, W, C] or a tensor [N, C, H, W], give a
        row each.
        Pixels have 8 or 16 bits, or are floats from 0 to 1. `tta` averages over mirror images. Probabilities are
        `calibrated` if the model has a calibration. A model of feature vectors takes these, [N, W].
        """
        _require_batch(batch_size)
        batches = self._batches(images, batch_size) if self.width is None else self._vectors(images, batch_size, tta)
        found = list(self._compute(batches, tta, calibrated))
        return np.concatenate(found) if found else np.empty((0, len(self.classes)), dtype=np.float32)

    def stream(
        self,
        paths: Iterable[Path],
        batch_size: int = 256,
        *,
        jobs: int | None = None,
        tta: bool = False,
        calibrated: bool = True,
    ) -> Iterator[Outcome]:
        """Predict files in order, and yield an outcome for each. Probabilities are `calibrated` if the model has a
        calibration.

        `jobs` threads decode the next files while the network computes. Only a few batches are in memory at a time.
        """
        _require_batch(batch_size)
        pending: deque[tuple[tuple[Path, ...], dict[int, DataError]]] = deque()

        def pixels() -> Iterator[Pixels]:
            for group, images, problems in self.decode(paths, batch_size, jobs or available_cores()):
                pending.append((group, problems))
                yield images

        for probs in self._compute(pixels(), tta, calibrated):
            group, problems = pending.popleft()
            rows = iter(probs)
            for position, path in enumerate(group):
                problem = problems.get(position)
                yield Outcome(path, next(rows) if problem is None else None, problem)

    def require_images(self) -> None:
        """Refuse files if the model was trained on feature vectors."""
        if self.width is not None:
            raise RunError(
                f"{self._file}: was trained on feature vectors, so it takes no images; use csda.load(run).predict(X)"
            )

    def choose_coverage(self, wanted: float | None = None) -> float | None:
        """The coverage of sets: `coverage`, or else 0.9, or None if the model has no limits for 0.9."""
        if self.calibration is not None and (wanted is not None or COVERAGE in self.calibration.coverages):
            return self.calibration.level(COVERAGE if wanted is None else wanted).coverage
        if wanted is not None:
            raise RunError(f"{self._file}: not calibrated, so it has no sets with a coverage; leave the coverage out")
        return None

    def judge(self, probs: npt.NDArray[Any], coverage: float | None = None) -> Judgement:
        """Labels, confidence, and sets of possible classes, from calibrated probabilities.

        `unsure` is true if the set has more than one class. Confidence is the probability of the label; with several
        labels per image, the probability of the least certain decision. Then the set has all labels that may be
        present.
        """
        fitted = self.calibration
        decided = metrics.predict(probs, self.multi_label) if fitted is None else fitted.decide(probs)
        if self.multi_label:
            labels: list[int | tuple[int, ...]] = [tuple(np.flatnonzero(row).tolist()) for row in decided]
            confidence = np.where(decided, probs, 1 - probs).min(axis=-1)
        else:
            labels, confidence = [int(label) for label in decided], probs.max(axis=-1)
        coverage = self.choose_coverage(coverage)
        if fitted is None or coverage is None:
            return Judgement(labels, confidence, None, None)
        sets = fitted.sets(probs, coverage)
        possible = sets[..., 1] if self.multi_label else sets
        return Judgement(
            labels,
            confidence,
            [tuple(np.flatnonzero(row).tolist()) for row in possible],
            fitted.unsure(probs, coverage),
        )

    def _batches(self, images: One | Iterable[One], batch_size: int) -> Iterator[Pixels]:
        own = (self.image_size, self.image_size, self.channels)
        if isinstance(images, np.ndarray) and images.dtype == np.uint8 and images.shape[1:] == own:
            for start in range(0, len(images), batch_size):
                yield np.ascontiguousarray(images[start : start + batch_size])
        else:
            for group in in_groups(_separate(images), batch_size):
                yield np.stack([self._pixels(image) for image in group])

    def _vectors(self, given: Any, batch_size: int, tta: bool) -> Iterator[npt.NDArray[np.float32]]:
        if tta:
            raise DataError("tta mirrors images, but this model takes feature vectors; leave it out")
        values = np.asarray(given)
        if values.ndim != 2 or values.shape[1] != self.width or values.dtype.kind not in "fiub":
            raise DataError(f"X has the shape {list(values.shape)}; give feature vectors [N, {self.width}]")
        for start in range(0, len(values), batch_size):
            yield np.ascontiguousarray(values[start : start + batch_size], dtype=np.float32)

    def _pixels(self, image: One) -> Pixels:
        if isinstance(image, str | Path):
            return read_image(Path(image), self.image_size, self.channels, self.aspect)
        if isinstance(image, Image.Image):
            return fit_image(image, self.image_size, self.channels, self.aspect)
        return fit_array(_channels_last(image), self.image_size, self.channels, self.aspect)

    def decode(
        self, paths: Iterable[Path], batch_size: int, jobs: int
    ) -> Iterator[tuple[tuple[Path, ...], Pixels, dict[int, DataError]]]:
        """Batches of files, the pixels of those that can be used, and the errors of the others by position."""

        def read(group: tuple[Path, ...]) -> list[Pixels | DataError]:
            return [self._read(path) for path in group]

        def begin(group: tuple[Path, ...]) -> tuple[tuple[Path, ...], list[Future[list[Pixels | DataError]]]]:
            return group, [pool.submit(read, part) for part in in_groups(group, DECODED)]

        groups = in_groups(paths, batch_size)
        with ThreadPoolExecutor(jobs) as pool:
            waiting = deque(begin(group) for group in islice(groups, AHEAD))
            try:
                while waiting:
                    group, parts = waiting.popleft()
                    read_images = list(chain.from_iterable(part.result() for part in parts))
                    waiting.extend(begin(following) for following in (next(groups, None),) if following is not None)
                    problems = {i: each for i, each in enumerate(read_images) if isinstance(each, DataError)}
                    images = [each for each in read_images if not isinstance(each, DataError)]
                    shape = (0, self.image_size, self.image_size, self.channels)
                    yield group, np.stack(images) if images else np.empty(shape, np.uint8), problems
            finally:
                pool.shutdown(cancel_futures=True)

    def _read(self, path: Path) -> Pixels | DataError:
        try:
            return read_image(path, self.image_size, self.channels, self.aspect)
        except DataError as error:
            return error

    def _compute(self, batches: Iterable[npt.NDArray[Any]], tta: bool, calibrated: bool) -> Iterator[Floats]:
        """Probabilities of each batch; on a GPU one batch is copied to the host while the next is computed."""
        before: Tensor | None = None
        for pixels in batches:
            computed = self._launch(pixels, tta)
            if before is not None:
                yield self._finish(before, calibrated)
            before = computed
        if before is not None:
            yield self._finish(before, calibrated)

    @torch.inference_mode()
    def _launch(self, pixels: npt.NDArray[Any], tta: bool) -> Tensor:
        images = torch.from_numpy(pixels if pixels.flags.writeable else pixels.copy())
        if self.device.type == "cuda":
            images = images.pin_memory().to(self.device, non_blocking=True)
        if not len(images):
            return torch.empty((0, len(self.classes)))
        values = plain(images) if self.width is None else images
        views = self.views._replace(flips=self.views.flips or tta)
        return predict_images(self.model, values, self.multi_label, views)

    def _finish(self, computed: Tensor, calibrated: bool) -> Floats:
        probs = computed.float().cpu().numpy()
        if self.frequencies is not None:
            frequencies = np.array(self.frequencies)
            probs = metrics.prior_corrected(probs, frequencies, multi_label=self.multi_label).astype(np.float32)
        if not np.isfinite(probs).all():
            raise RunError(f"{self._file}: gives predictions that are not finite; restore it or train again")
        if calibrated and self.calibration is not None:
            probs = self.calibration.scale(probs).astype(np.float32)
        return probs


def load(run_folder: str | Path, device: str = "auto") -> Predictor:
    """The model of a finished (or still running) run."""
    return Predictor(Run(run_folder), device)


def _require_batch(size: int) -> None:
    if not isinstance(size, int | np.integer) or size < 1:
        raise ConfigError(f"batch_size = {size}; give a whole number, at least 1")


def in_groups(items: Iterable[Each], size: int) -> Iterator[tuple[Each, ...]]:
    """The items in groups of a given size; the last may be smaller."""
    source = iter(items)
    return iter(lambda: tuple(islice(source, size)), ())


def _separate(images: One | Iterable[One]) -> Iterable[One]:
    """Split the given images into single ones."""
    if isinstance(images, str | Path) and Path(images).is_dir():
        raise DataError(f"{images}: is a folder; give its files, or predict folders with `csda predict`")
    if isinstance(images, str | Path | Image.Image):
        return [images]
    if isinstance(images, np.ndarray) and images.ndim == 1 and images.dtype.kind in "OU":
        return list(images)
    if isinstance(images, np.ndarray | Tensor):
        if images.ndim == 2 or (images.ndim == 3 and _one_image(images)):
            return [images]
        if images.ndim not in (3, 4):
            raise DataError(f"images are of the shape {list(images.shape)}; give [N, H, W, C], or tensors [N, C, H, W]")
    elif isinstance(images, bytes | Mapping | Set) or not isinstance(images, Iterable):
        raise DataError(f"images are of type {type(images).__name__}; give files, images of Pillow, arrays or tensors")
    return images


def _one_image(image: npt.NDArray[Any] | Tensor) -> bool:
    """Whether an array with three axes is one image with channels, not several grey images."""
    return image.shape[-1] in CHANNELS or (isinstance(image, Tensor) and image.shape[0] in CHANNELS)


def _channels_last(image: npt.NDArray[Any] | Tensor) -> npt.NDArray[Any]:
    """Convert an array or a tensor to an array [H, W, C].

    Channels of a tensor come first, unless only the last axis can be channels.
    """
    if not isinstance(image, np.ndarray | Tensor):
        kind = type(image).__name__
        raise DataError(f"an image is of type {kind}; give a file, an image of Pillow, an array or a tensor")
    if isinstance(image, Tensor):
        image = image.detach().cpu()
        if image.dtype == torch.bfloat16:
            image = image.float()
        if image.ndim == 3 and image.shape[0] in CHANNELS:
            image = image.permute(1, 2, 0)
    values: npt.NDArray[Any] = np.asarray(image)
    values = values[..., None] if values.ndim == 2 else values
    if values.ndim != 3 or values.shape[2] not in CHANNELS:
        raise DataError(f"an image is of the shape {list(values.shape)}; give [H, W], or [H, W, C] with C of 1, 3 or 4")
    return values
