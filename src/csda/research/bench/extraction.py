"""`csda bench features`: time the features of a frozen network, and a training on them."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch

from csda.data.augment import plain
from csda.data.prepared import prepare_data, require_unlabeled
from csda.engine import arithmetic, choose_device, using
from csda.features import Extractor, open_features
from csda.methods import METHODS
from csda.models.feature_encoder import build_body
from csda.models.weights import read_weights
from csda.presets import configure
from csda.progress import Reporter
from csda.research.bench.timing import describe_machine, time_once
from csda.training import train


def bench_features(chosen: Mapping[str, Any], data: Path | None, rounds: int) -> dict[str, Any]:
    """Time the features of decoded images, compared with the network alone, and the training of a head on them.

    The bare network passes the same number of images in the same batches, with one batch already on the device.
    `open_features` takes uint8 pixels from the store and writes the features into an empty cache. Both are timed in
    turn; `rate_of_bare` is the median ratio. The training is `csda.train` on cached features: reading the data set, the
    probe, all epochs, and the files of the run.
    """
    named = {} if data is None else {"data": str(data)}
    config = configure({"preset": "features", **named, **chosen})
    prepared, device = prepare_data(config, Reporter()), choose_device(config.device)
    if METHODS[config.method].uses_unlabeled:
        require_unlabeled(prepared.dataset, prepared.split, config.method)  # now, and not after all features
    weights = read_weights(config.backbone, config.pretrained, config.weights)
    assert weights is not None
    count, size, _, channels = prepared.pixels.shape
    if config.threads:
        torch.set_num_threads(config.threads)
    bare_seconds, feature_seconds, training_seconds = [], [], []
    with using(device, config.precision, config.time_kernels):
        body = build_body(config.backbone, size, channels, config.feature_stages, weights, config.feature_views)
        extractor = Extractor(body, device, config.precision, config.eval_batch_size)
        images = plain(torch.from_numpy(prepared.pixels[: extractor.batch_size].copy()).to(device))

        @torch.inference_mode()
        def bare() -> None:
            with arithmetic(device, config.precision):
                for start in range(0, count, extractor.batch_size):
                    extractor.network(images[: count - start])

        def extract(cache: str) -> None:
            open_features(config, prepared, weights, device, Reporter(), Path(cache))

        extractor.network(images)
        for _ in range(rounds):
            bare_seconds.append(time_once(bare, device))
            with tempfile.TemporaryDirectory() as cache:
                feature_seconds.append(time_once(lambda: extract(cache), device))
    open_features(config, prepared, weights, device, Reporter())  # into the cache that `train` reads
    settings = {"preset": "features", **named, **chosen}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            training_seconds.append(
                time_once(lambda: train(out=Path(folder) / "run", settings=settings, reporter=Reporter()))
            )
    return {
        **describe_machine(device),
        "images": count,
        "image_size": size,
        "backbone": config.backbone,
        "precision": config.precision,
        "bare_seconds": bare_seconds,
        "feature_seconds": feature_seconds,
        "images_per_second": count / median(feature_seconds),
        "rate_of_bare": median(bare / whole for bare, whole in zip(bare_seconds, feature_seconds, strict=True)),
        "training": f"{config.method}, {config.epochs} epochs of {config.steps_per_epoch} steps",
        "training_seconds": training_seconds,
        "training_share": median(training_seconds) / median(feature_seconds),
    }
