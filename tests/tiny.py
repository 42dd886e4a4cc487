"""A training that takes half a second: sixty small images of three classes, three epochs of four steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor, nn

from csda.data.cache import digest
from csda.methods import METHODS
from csda.models.alexnet import Block
from csda.models.encoder import Encoder
from csda.progress import Reporter
from csda.runs import Run
from csda.training import train

COUNTS = {"common": 30, "label": 20, "rare": 12}
"""One class is called like a column of predictions.csv."""

SETTINGS: dict[str, Any] = {
    "preset": "quick",
    "epochs": 3,
    "warm_up_epochs": 1,
    "steps_per_epoch": 4,
    "image_size": 32,
    "batch_size": 8,
    "unlabeled_batch_size": 8,
    "lr": 0.02,
    "checkpoint_seconds": 0,
    "threads": 1,
}
QUEUE: dict[str, Any] = {"capacity": 16, "refresh_batch_size": 16}
LABELS = "15"


class InterruptedReporter(Reporter):
    """Presses Ctrl-C when an epoch has ended."""

    def __init__(self, epoch: int) -> None:
        self.last = epoch

    def epoch(self, row: Mapping[str, Any]) -> None:
        if row["epoch"] == self.last:
            raise KeyboardInterrupt


def small(image_size: int, channels: int, dropout: float) -> Encoder:
    """A network of a few kilobytes, for tests that train many times."""
    return Encoder(Block(channels, 8), Block(8, 8), nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten()), width=32)


SMALL_GRID = """
[settings]
tensorboard = false
epochs = 2
warm_up_epochs = 1
steps_per_epoch = 2
batch_size = 8
unlabeled_batch_size = 8
"""
"""Settings for the file of a grid."""


def make_images(folder: Path) -> Path:
    """One folder a class; the classes differ in colour, and overlap."""
    generator = np.random.default_rng(0)
    for (name, count), colour in zip(COUNTS.items(), ((150, 90, 90), (90, 150, 90), (90, 90, 150)), strict=True):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            shade = generator.normal(colour, 35)
            pixels = generator.normal(shade, 40, (32, 32, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number:02d}.png")
    return folder


def plain(value: Any) -> Any:
    """What a checkpoint holds, with a digest of each tensor, to be compared."""
    if isinstance(value, Tensor):
        return value.dtype, value.shape, digest(np.ascontiguousarray(value.numpy()).tobytes())
    if isinstance(value, dict):
        return [(key, plain(each)) for key, each in value.items()]
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def train_tiny(
    images: Path,
    out: Path,
    *,
    method: str = "csda",
    seed: int | None = None,
    resume: bool = False,
    reporter: Reporter | None = None,
    labels: str = LABELS,
    **changes: Any,
) -> Run:
    queue = {key: value for key, value in QUEUE.items() if key in METHODS[method].settings.model_fields}
    settings = SETTINGS | queue | {"tensorboard": False} | changes
    return train(
        images,
        method=method,
        labels=labels,
        seed=seed,
        out=out,
        settings=settings,
        resume=resume,
        reporter=reporter or Reporter(),
    )


def arguments(images: Path, out: Path | None, settings: Mapping[str, Any], *more: str) -> list[str]:
    """The same on the command line."""
    values = SETTINGS | QUEUE | settings
    chosen = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
    folder = [] if out is None else ["--out", str(out)]
    return ["train", str(images), "--labels", LABELS, *folder, *chosen, *more]
