"""A step with a plain DataLoader: worker processes open, resize and augment images with Pillow."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler

from csda.config import RunConfig
from csda.data import load_dataset
from csda.data.loader import LabeledBatch, View
from csda.data.store import available_cores
from csda.errors import DataError
from csda.methods.base import StepOutput
from csda.research.bench.noise import open_trainer
from csda.research.bench.timing import figure, time_once
from csda.training import update

FILES, FILE_SIZE = 512, (200, 150)
PREFETCHED = 2
"""Number of batches that each worker prefetches."""
ROUNDS = 5
"""Timed rounds. In a round every worker delivers a batch; batches come in bursts, so a round is one measurement."""


def measure_loader(chosen: Mapping[str, Any], folder: Path, data: Path | None) -> dict[str, float]:
    """Milliseconds of a step of `nm` with images from a loader with one worker per core.

    The step of the method runs eagerly with torch's kernels. Files are those of `data`, or JPEGs of noise drawn into
    `folder`. All prefetched batches are used up first, so that the rate of the workers is measured.
    """
    trainer = open_trainer("nm", {**chosen, "cuda_graph": False, "kernels": False})
    config, device, workers = trainer.config, trainer.device, available_cores()
    sizes = config.batch_size, config.unlabeled_batch_size
    images = _Images(_list_files(data) if data is not None else _draw_files(folder), config)
    first = max(PREFETCHED * workers, 5)
    # Exactly as many batches as are used, so that the workers end.
    sampler = RandomSampler(images, replacement=True, num_samples=(first + ROUNDS * workers) * sum(sizes))
    batches = DataLoader(
        images,
        sum(sizes),
        sampler=sampler,
        num_workers=workers,
        prefetch_factor=PREFETCHED,
        pin_memory=device.type == "cuda",
        multiprocessing_context="spawn",  # a process with threads or a GPU must not be forked
    )
    labeled_indices, _, progress, *_ = next(trainer.sample(1))
    targets = trainer.parts.labeled.batch(labeled_indices).targets

    def compute(images: Tensor, progress: Tensor) -> StepOutput:
        labeled, unlabeled = images.split(sizes)
        return trainer.method.step(
            trainer.model,
            _LoadedBatch(labeled, targets),
            _LoadedBatch(unlabeled, targets[:0]),
            trainer.parts.unlabeled,
            progress,
        )

    loaded = iter(batches)

    def iterate(times: int) -> None:
        for _ in range(times):
            trainer.engine.run(update, trainer, compute, next(loaded).to(device, non_blocking=True), progress)

    iterate(first)
    milliseconds = [1e3 * time_once(lambda: iterate(workers), device) / workers for _ in range(ROUNDS)]
    next(loaded, None)
    return figure(milliseconds)


class _LoadedBatch(LabeledBatch):
    """Images that were augmented by the workers; all views of them are the same."""

    def __init__(self, images: Tensor, targets: Tensor) -> None:
        self.indices = torch.arange(len(images), device=images.device)
        self.loaded = images
        self.targets = targets

    def view(self, view: View) -> Tensor:
        return self.loaded


class _Images(Dataset[Tensor]):
    """A dataset of image files, which opens, resizes and augments an image on each access."""

    def __init__(self, paths: Sequence[Path], config: RunConfig) -> None:
        self.paths = paths
        self.size, self.flip = config.image_size, config.flip
        self.rotation, self.translation = config.rotation, config.translation

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, position: int) -> Tensor:
        with Image.open(self.paths[position]) as file:
            image: Image.Image = file.convert("RGB").resize((self.size, self.size), Image.Resampling.BILINEAR)
        if self.flip and random.random() < 0.5:
            image = ImageOps.mirror(image)
        reach = self.translation * self.size
        image = image.rotate(
            random.uniform(-self.rotation, self.rotation),
            Image.Resampling.BILINEAR,
            translate=(round(random.uniform(-reach, reach)), round(random.uniform(-reach, reach))),
        )
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div_(255.0)


def _list_files(data: Path) -> list[Path]:
    paths = [record.path for record in load_dataset(data).records if record.path is not None]
    if not paths:
        raise DataError(f"{data}: no image files there; give another folder with --data")
    return paths


def _draw_files(folder: Path) -> list[Path]:
    """Draw JPEGs of coarse noise, with about the file size of photographs."""
    paths, noise = [folder / f"{number:03d}.jpg" for number in range(FILES)], np.random.default_rng(0)
    for path in paths:
        coarse = Image.fromarray(noise.integers(0, 256, (15, 20, 3), np.uint8))
        coarse.resize(FILE_SIZE, Image.Resampling.BICUBIC).save(path, quality=90)
    return paths
