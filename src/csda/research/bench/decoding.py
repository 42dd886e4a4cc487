"""Reading images: decoding, a warm start, and the memory that a large set takes."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from PIL import Image

from csda.data import load_dataset
from csda.data.records import Dataset
from csda.data.store import available_cores, open_pixels
from csda.research.bench.timing import time_once

IMAGE_SIZE = 128
REPEATS = 3
LARGE_SET = 200_000

_OPEN_LARGE_SET = """
import sys
from pathlib import Path
from csda.data import cache, store
from csda.data.records import Dataset, Record

folder, count, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
records = tuple(Record(f"{n:06d}", folder / f"part-{n % 10}" / f"{n:06d}.png", n % 5) for n in range(count))
dataset = Dataset("large", tuple("abcde"), records, root=folder)
keys = store.file_keys(dataset)
made = cache.folder_of(folder, store.settings_of(3), keys, (size, size, 3))
made.mkdir(parents=True)
(made / "done").write_bytes(b"\\1" * count)
with (made / "pixels").open("wb") as file:
    file.truncate(count * size * size * 3)
pixels = store.open_pixels(dataset, size, channels=3, cache=folder)
assert pixels.array[:: count // 64].sum() == 0
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def bench_data(path: Path) -> dict[str, Any]:
    """Decoding against a plain loop, a warm start, and the memory that a large set takes.

    The plain loop is one thread of Pillow: open, convert, resize, copy. The store gives the same pixels, to within one
    grey level, with all cores, and writes its cache. Both are timed in turn, several times, after a first pass that
    brings the files into memory; `speedup` is the median of the ratios. A warm start lists the set and opens its
    pixels.
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
        "images": len(dataset.records),
        "image_size": IMAGE_SIZE,
        "cores": available_cores(),
        "plain_seconds": plain_seconds,
        "store_seconds": store_seconds,
        "speedup": median(plain / store for plain, store in zip(plain_seconds, store_seconds, strict=True)),
        "warm_start_seconds": median(warm_seconds),
        "large_set_images": LARGE_SET,
        "large_set_megabytes": measure_large_set(LARGE_SET),
    }


def measure_large_set(images: int) -> float:
    """Megabytes resident at most while a set is opened and read here and there; its pixels are a file of holes.

    Linux alone says it: the peak that `getrusage` gives counts the process that started this one, too.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", _OPEN_LARGE_SET, folder, str(images), str(IMAGE_SIZE)]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) / 1024


def _open(dataset: Dataset, cache: str) -> object:
    return open_pixels(dataset, IMAGE_SIZE, channels=3, cache=Path(cache))


def _decode_plainly(dataset: Dataset) -> object:
    pixels = np.empty((len(dataset.records), IMAGE_SIZE, IMAGE_SIZE, 3), np.uint8)
    for row, record in enumerate(dataset.records):
        assert record.path is not None
        with Image.open(record.path) as image:
            pixels[row] = np.asarray(image.convert("RGB").resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BILINEAR))
    return pixels
