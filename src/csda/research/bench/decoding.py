"""`csda bench data`: decoding images, and a warm start."""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image

from csda.data import load_dataset
from csda.data.records import Dataset
from csda.data.store import open_pixels
from csda.research.bench.timing import describe_machine, time_once

IMAGE_SIZE = 128
REPEATS = 3


def bench_data(path: Path) -> dict[str, Any]:
    """Time decoding, compared with a plain loop, and a warm start.

    The plain loop is one thread of Pillow: open, convert, resize, copy. The store gives the same pixels, within one
    grey level, with all cores, and writes its cache. Both are timed in turn, after a first pass that reads the files
    into memory. `speedup` is the median ratio. A warm start lists the data set and opens its cached pixels.
    """
    dataset = load_dataset(path)
    _decode_plainly(dataset)
    plain_seconds, store_seconds, warm_seconds = [], [], []
    for _ in range(REPEATS):
        plain_seconds.append(time_once(lambda: _decode_plainly(dataset)))
        with tempfile.TemporaryDirectory() as cache:
            store_seconds.append(time_once(lambda: _open(dataset, cache)))
            warm_seconds.append(time_once(lambda: _open(load_dataset(path), cache)))
    return {
        **describe_machine(torch.device("cpu")),
        "images": len(dataset.records),
        "image_size": IMAGE_SIZE,
        "plain_seconds": plain_seconds,
        "store_seconds": store_seconds,
        "speedup": median(plain / store for plain, store in zip(plain_seconds, store_seconds, strict=True)),
        "warm_start_seconds": median(warm_seconds),
    }


def _open(dataset: Dataset, cache: str) -> object:
    return open_pixels(dataset, IMAGE_SIZE, channels=3, cache=Path(cache))


def _decode_plainly(dataset: Dataset) -> object:
    pixels = np.empty((len(dataset.records), IMAGE_SIZE, IMAGE_SIZE, 3), np.uint8)
    for row, record in enumerate(dataset.records):
        assert record.path is not None
        with Image.open(record.path) as image:
            pixels[row] = np.asarray(image.convert("RGB").resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BILINEAR))
    return pixels
