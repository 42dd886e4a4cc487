"""`csda bench predict`: time predictions of files, compared with the bare network and with decoding."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from itertools import chain, islice, repeat
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image

from csda.data.augment import plain
from csda.data.store import available_cores
from csda.data.tree import walk_images
from csda.engine import backends, choose_device
from csda.errors import DataError
from csda.evaluate import predict_images
from csda.models.averaged_views import PLAIN
from csda.models.backbones import build_encoder
from csda.models.two_stream import TwoStream
from csda.predict import Predictor
from csda.presets import configure
from csda.research.bench.timing import Action, describe_machine, figure, time_once
from csda.runs import Run

BATCH = 256
CLASSES = 7


def bench_predict(
    chosen: Mapping[str, Any], *, data: Path | None = None, images: int = 2048, rounds: int = 5
) -> dict[str, Any]:
    """Time files streamed through `Predictor`, the bare network on decoded pixels, and decoding.

    All are timed in turn, `rounds` times, on `images` files of the folder `data`, repeated if it has fewer, or on drawn
    JPEGs. On a GPU decoding and network overlap, so the slower of them is the limit. On a CPU they share the cores, and
    the limit is their sum.
    """
    config = configure(chosen)
    device = choose_device(config.device)
    with tempfile.TemporaryDirectory() as folder, backends(device, config.precision):
        files = _files(data, Path(folder), config.image_size, images)
        predictor = _predictor(config.backbone, config.image_size, Path(folder), config.device)
        jobs = available_cores()
        pixels = np.concatenate([batch for _, batch, _ in predictor.decode(files, BATCH, jobs)])
        resident = torch.from_numpy(pixels).to(device)

        def bare() -> None:
            with torch.inference_mode():
                for start in range(0, images, BATCH):
                    predict_images(predictor.model, plain(resident[start : start + BATCH]), False, PLAIN)

        def decode() -> None:
            for _ in predictor.decode(files, BATCH, jobs):
                pass

        def predict() -> None:
            for _ in predictor.stream(files, BATCH):
                pass

        actions: dict[str, Action] = {
            "bare": bare,
            "decode": decode,
            "predict": predict,
            "arrays": lambda: predictor.predict(pixels),
        }
        for action in actions.values():
            action()
        seconds: dict[str, list[float]] = {name: [] for name in actions}
        for _ in range(rounds):
            for name, action in actions.items():
                seconds[name].append(time_once(action, device))
    together = zip(seconds["bare"], seconds["decode"], strict=True)
    limits = [max(pair) if device.type == "cuda" else sum(pair) for pair in together]
    return {
        **describe_machine(device),
        "settings": {"backbone": config.backbone, "image_size": config.image_size, "images": images, "batch": BATCH},
        "images_per_second": {name: figure([images / value for value in values]) for name, values in seconds.items()},
        "arrays_of_bare": _share(seconds["bare"], seconds["arrays"]),
        "predict_of_bare": _share(seconds["bare"], seconds["predict"]),
        "predict_of_limit": _share(limits, seconds["predict"]),
    }


def _share(least: list[float], taken: list[float]) -> float:
    return median(below / above for below, above in zip(least, taken, strict=True))


def _files(data: Path | None, folder: Path, size: int, count: int) -> list[Path]:
    found = [data / name for name in walk_images(data)] if data is not None else _draw(folder / "images", size)
    if not found:
        raise DataError(f"{data}: no images there; give a folder of images")
    return list(islice(chain.from_iterable(repeat(found)), count))


def _draw(folder: Path, size: int) -> list[Path]:
    """Draw some JPEGs of twice the network's size, as smooth as photographs."""
    folder.mkdir()
    generator, paths = np.random.default_rng(0), []
    for number in range(32):
        coarse = Image.fromarray(generator.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        paths.append(folder / f"{number:02d}.jpg")
        coarse.resize((8 * size // 3, 2 * size), Image.Resampling.BICUBIC).save(paths[-1], quality=90)
    return paths


def _predictor(backbone: str, size: int, folder: Path, device: str) -> Predictor:
    """A network with random weights, which has the same speed."""
    model = TwoStream(build_encoder(backbone, size, 3, dropout=0.0), CLASSES)
    about = {
        "classes": [f"class {number}" for number in range(CLASSES)],
        "multi_label": False,
        "image_size": size,
        "channels": 3,
        "backbone": backbone,
        "class_frequencies": None,
    }
    (folder / "config.toml").touch()
    run = Run(folder)
    weights = {name: value for name, value in model.state_dict().items() if not name.startswith("teacher.")}
    run.write_model(weights, {"csda": json.dumps(about)})
    return Predictor(run, device)
