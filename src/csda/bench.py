"""What the program's parts cost, measured side by side within one run."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table

from csda.data import load_dataset
from csda.data.records import Dataset
from csda.data.store import available_cores, open_pixels
from csda.losses import labeled_loss
from csda.methods import METHODS
from csda.methods.self_training import SelfTraining
from csda.progress import Reporter
from csda.session import Session, prepare_data
from csda.training import configure

IMAGE_SIZE = 128
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


def bench_data(path: Path, images: int | None = None, repeats: int = 3) -> dict[str, Any]:
    """Decoding against a plain loop, a warm start, and the memory that a large set takes.

    The plain loop is one thread of Pillow: open, convert, resize, copy. The store does the same with all cores and
    writes its cache. Both are timed in turn, `repeats` times, after a first pass that brings the files into memory;
    `speedup` is the median of the ratios. A warm start lists the set and opens its pixels. `images` takes only so many.
    """
    dataset = load_dataset(path)
    dataset = replace(dataset, records=dataset.records[:images])
    _decode_plainly(dataset)
    plain_seconds, store_seconds, warm_seconds = [], [], []
    for _ in range(repeats):
        plain_seconds.append(_time(lambda: _decode_plainly(dataset)))
        with tempfile.TemporaryDirectory() as cache:
            store_seconds.append(_time(lambda: _open(dataset, cache)))
            warm_seconds.append(_time(lambda: _open(replace(load_dataset(path), records=dataset.records), cache)))
    return {
        "images": len(dataset.records),
        "image_size": IMAGE_SIZE,
        "cores": available_cores(),
        "plain_seconds": plain_seconds,
        "store_seconds": store_seconds,
        "speedup": median(plain / store for plain, store in zip(plain_seconds, store_seconds, strict=True)),
        "warm_start_seconds": median(warm_seconds),
        "large_set_images": LARGE_SET,
        "large_set_megabytes": measure_large_set(),
    }


def measure_large_set(images: int = LARGE_SET) -> float:
    """Megabytes resident at most while a set is opened and read here and there; its pixels are a file of holes.

    Linux alone says it: the peak that `getrusage` gives counts the process that started this one, too.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", _OPEN_LARGE_SET, folder, str(images), str(IMAGE_SIZE)]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) / 1024


def bench_step(preset: str, rounds: int = 15) -> dict[str, Any]:
    """The full step of each method against the bare step of the same network, and where a `csda` step spends its time.

    The bare step is forward, backward and update on as many images as a `csda` step trains on, already augmented and on
    the device. `csda_over_bare_and_teacher` compares with that plus the teacher's forward pass over the images that it
    labels. All is timed in turn, `rounds` times; figures are medians, in milliseconds, ratios medians of ratios.
    """
    sessions = {name: _session(name, preset) for name in METHODS}
    session = sessions["csda"]
    actions = {f"step {name}": _stepper(one) for name, one in sessions.items()} | _parts_of_a_step(session)
    for action in actions.values():
        for _ in range(5):  # capture and the choice of kernels happen here
            action()
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            times[name].append(1e3 * _time_on(session.device, action))

    def ratio(above: str, *below: str) -> float:
        rounds_of = zip(times[above], *(times[name] for name in below), strict=True)
        return float(median(whole / sum(parts) for whole, *parts in rounds_of))

    return {
        "preset": preset,
        "device": torch.cuda.get_device_name() if session.device.type == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "image_size": session.config.image_size,
        "images_trained_on": session.config.batch_size + session.config.method_settings["capacity"],
        "milliseconds": {name: median(values) for name, values in times.items()},
        "csda_over_bare_and_teacher": ratio("step csda", "bare step", "teacher"),
        "alignment_and_queue_share": ratio("alignment and queue", "step csda"),
        "augmentation_share": ratio("augmentation", "step csda"),
        "images_per_second": 1e3 / median(times["step csda"]) * session.config.batch_size,
    }


def show(figures: Mapping[str, Any], out: Path | None) -> None:
    """Print figures as a table and, where asked for, keep them as JSON."""
    table = Table("what", "figure")
    flat = {
        f"{key}: {name}" if name else key: value
        for key, group in figures.items()
        for name, value in (group.items() if isinstance(group, Mapping) else [("", group)])
    }
    for key, value in flat.items():
        table.add_row(key.replace("_", " "), f"{value:.4g}" if isinstance(value, float) else str(value))
    Console().print(table)
    if out is not None:
        out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def _session(method: str, preset: str) -> Session:
    config = configure({"method": method, "preset": preset, "tensorboard": False})
    session = Session(config, prepare_data(config, None, Reporter()))
    session.begin_epoch(1)
    session.method.begin(session.model, session.parts.labeled, session.parts.unlabeled)
    return session


def _stepper(session: Session) -> Callable[[], None]:
    labeled, unlabeled, progress = next(session.sample(1))
    return lambda: session.engine.step(session.step, labeled, unlabeled, progress)


def _parts_of_a_step(session: Session) -> dict[str, Callable[[], object]]:
    """What a `csda` step consists of, each alone on inputs of the same shapes."""
    parts, model, method = session.parts, deepcopy(session.model), deepcopy(session.method)
    assert isinstance(method, SelfTraining)
    labeled_indices, unlabeled_indices, _ = next(session.sample(1))
    labeled, unlabeled = parts.labeled.batch(labeled_indices), parts.unlabeled.batch(unlabeled_indices)
    queued, _, _ = method.refinement.queued(labeled, parts.unlabeled)
    trained = torch.cat((labeled.weak(), queued.weak()))
    seen = torch.cat((labeled.weak(), unlabeled.weak()))
    targets = labeled.targets[torch.arange(len(trained), device=session.device) % len(labeled)]
    optimizer = torch.optim.SGD([value for value in model.parameters() if value.requires_grad], 1e-3)
    labeled_probs, unlabeled_probs = method.probabilities(model.teach(seen)).split((len(labeled), len(unlabeled)))

    def bare() -> None:
        optimizer.zero_grad()
        labeled_loss(model(trained), targets).backward()
        optimizer.step()

    def align_and_queue() -> None:
        method.refinement.observe_labeled(labeled_probs, labeled.targets)
        method.refinement.push(unlabeled.indices, method.refinement.refine(unlabeled_probs))
        method.refinement.queue.contents()  # type: ignore[union-attr]

    return {
        "bare step": bare,
        "teacher": lambda: model.teach(seen),
        "alignment and queue": align_and_queue,
        "augmentation": lambda: (labeled.weak(), unlabeled.weak(), queued.weak()),
    }


def _time_on(device: torch.device, action: Callable[[], object]) -> float:
    """Seconds that an action takes, the device's work included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begun = time.perf_counter()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun


def _time(action: Callable[[], object]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def _open(dataset: Dataset, cache: str) -> object:
    return open_pixels(dataset, IMAGE_SIZE, channels=3, cache=Path(cache))


def _decode_plainly(dataset: Dataset) -> object:
    pixels = np.empty((len(dataset.records), IMAGE_SIZE, IMAGE_SIZE, 3), np.uint8)
    for row, record in enumerate(dataset.records):
        assert record.path is not None
        with Image.open(record.path) as image:
            pixels[row] = np.asarray(image.convert("RGB").resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BILINEAR))
    return pixels
