"""Trainings on random images, which take as long as real ones."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from csda.config import RunConfig
from csda.data.prepared import PreparedData
from csda.data.records import Dataset, Pixels, Record, Split
from csda.errors import ConfigError
from csda.methods import METHODS
from csda.methods.self_training import SelfTraining
from csda.presets import configure
from csda.research.bench.timing import Action
from csda.trainer import Trainer
from csda.training import update

LABELED, HELD_OUT, UNLABELED, CLASSES = 512, 64, 1024, 7
NOISY = 4096
"""Number of images with noise at the start of a data set in a file; the others are holes, which read as black."""


def configure_method(method: str, chosen: Mapping[str, Any]) -> RunConfig:
    """The configuration of a method, without chosen settings of `csda` that it does not have."""
    known, own = METHODS["csda"].settings.model_fields.keys(), METHODS[method].settings.model_fields.keys()
    return configure({key: chosen[key] for key in chosen if key not in known - own} | {"method": method})


def open_trainer(
    method: str,
    chosen: Mapping[str, Any],
    *,
    classes: int = CLASSES,
    unlabeled: int = UNLABELED,
    file: Path | None = None,
) -> Trainer:
    """Prepare a training of the method. With a `file` its pixels stay there, otherwise they are on the device."""
    if fixed := chosen.keys() & {"method", "data", "resident_share"}:
        raise ConfigError(f"{', '.join(sorted(fixed))} cannot be set, because the benchmark sets it; leave it out")
    if torch.cuda.is_available():
        gc.collect()  # earlier trainers are reference cycles and hold device memory
    config = configure_method(method, {**chosen, "resident_share": 1.0 if file is None else 0.0})
    trainer = Trainer(config, make_data(config.image_size, classes, unlabeled, file))
    trainer.begin_epoch(1)
    return trainer


def make_data(image_size: int, classes: int, unlabeled: int, file: Path | None = None) -> PreparedData:
    """Make images of noise and a split of them, with labeled images of every class."""
    ends = np.cumsum((max(LABELED, classes), unlabeled, HELD_OUT, HELD_OUT))
    first, last = ends[:2]
    records = tuple(
        Record(f"{number:07d}", None, None if first <= number < last else number % classes)
        for number in range(ends[-1])
    )
    labeled, pool, val, test = (
        records[end - size : end] for end, size in zip(ends, np.diff(ends, prepend=0), strict=True)
    )
    dataset = Dataset("noise", tuple(f"class {number}" for number in range(classes)), records)
    pixels = _make_pixels((len(records), image_size, image_size, 3), file)
    return PreparedData(dataset, pixels, Split(labeled, pool, val, test, truth={}), (), dataset.name)


def _make_pixels(shape: tuple[int, ...], file: Path | None) -> Pixels:
    noise = np.random.default_rng(0)
    if file is None:
        return noise.integers(0, 256, shape, np.uint8)
    pixels = np.memmap(file, np.uint8, "w+", shape=shape)
    pixels[:NOISY] = noise.integers(0, 256, pixels[:NOISY].shape, np.uint8)
    pixels.flush()  # now, not while reading is timed
    return pixels


def stepper(trainer: Trainer) -> Action:
    """A function that runs the next step of the trainer's method."""
    inputs = _inputs(trainer)
    return lambda: trainer.engine.run(update, trainer, trainer.step, *next(inputs))


def _inputs(trainer: Trainer) -> Iterator[Any]:
    while True:
        yield from trainer.sample(1)


def images_trained_on(trainer: Trainer) -> int:
    """Number of images that pass the student in a step: labeled ones, and queued or unlabeled ones."""
    config, method = trainer.config, trainer.method
    if not METHODS[config.method].uses_unlabeled:
        return config.batch_size
    queue = method.refinement.queue if isinstance(method, SelfTraining) else None
    return config.batch_size + (config.unlabeled_batch_size if queue is None else queue.capacity)
