"""Every method from images to a finished run, with one class per image and with several labels each."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from csda.data.prepared import prepare_data
from csda.errors import ConfigError
from csda.methods import METHODS
from csda.presets import configure
from csda.progress import Reporter
from csda.runs import Run
from csda.trainer import Trainer
from csda.training import train
from tiny import LABELS, SETTINGS, make_images

SMALL: dict[str, Any] = SETTINGS | {"epochs": 2, "steps_per_epoch": 2, "tensorboard": False, "calibrate": "validation"}
FINDINGS = ("effusion", "edema", "fracture")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("one-class"))


@pytest.fixture(scope="module")
def chests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty images in which each finding brightens a colour; fractures are rare, and some images have nothing."""
    folder = tmp_path_factory.mktemp("several-labels")
    random = np.random.default_rng(0)
    with (folder / "labels.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "label"])
        for number in range(60):
            present = random.random(3) < (0.5, 0.4, 0.2)
            pixels = random.normal(80 + 80 * present, 40, (32, 32, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")
            found = [name for name, there in zip(FINDINGS, present, strict=True) if there]
            writer.writerow([f"{number}.png", "|".join(found) or "-"])
    return folder


def _train(data: Path, out: Path, name: str, precision: str = "float32") -> Run:
    own = METHODS[name].settings.model_fields
    parts = {"capacity": 16, "refresh_batch_size": 16} if "capacity" in own else {}
    settings = SMALL | parts | {"precision": precision}
    if name == "lsse":
        del settings["lr"]
    return train(data, method=name, labels=LABELS, out=out, settings=settings, reporter=Reporter())


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("name", METHODS)
def test_with_one_class_an_image(name: str, precision: str, images: Path, tmp_path: Path) -> None:
    run = _train(images, tmp_path / "run", name, precision)
    assert run.finished
    assert len(run.metrics) == (2 if METHODS[name].steps else 1)  # what is fitted at once is scored once
    assert 0 <= run.metrics[-1]["test_mca"] <= 1
    assert run.settings.lr == (1e-4 if name == "lsse" else SMALL["lr"])


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("name", [name for name, entry in METHODS.items() if entry.multi_label])
def test_with_several_labels_an_image(name: str, precision: str, chests: Path, tmp_path: Path) -> None:
    run = _train(chests, tmp_path / "run", name, precision)
    assert run.finished
    assert 0 <= run.metrics[-1]["test_auc"] <= 1


def test_fixmatch_refuses_several_labels_an_image(chests: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'fixmatch' needs one class per image"):
        _train(chests, tmp_path / "run", "fixmatch")


def test_bis_ends_with_balanced_batches_and_others_do_not(images: Path) -> None:
    shares = {}
    for name in ("bis", "fixmatch"):
        settings = SMALL | {"data": str(images), "method": name, "labels": LABELS, "steps_per_epoch": 500}
        config = configure(settings)
        trainer = Trainer(config, prepare_data(config, Reporter()))
        for epoch in (1, config.epochs):
            trainer.begin_epoch(epoch)
            drawn = torch.cat([labeled for labeled, _, _ in trainer.sample(epoch)])
            classes = trainer.parts.labeled.targets[drawn].bincount(minlength=3)
            shares[name, epoch] = (classes / classes.sum()).cpu().numpy()
    natural = shares["fixmatch", 1]
    assert natural.max() - natural.min() > 0.15
    np.testing.assert_allclose(shares["fixmatch", 2], natural, atol=0.01)
    # t/T = 1/2 leaves three quarters of a batch random, and 1 leaves nothing.
    np.testing.assert_allclose(shares["bis", 1], 0.75 * natural + 0.25 / 3, atol=0.03)
    np.testing.assert_allclose(shares["bis", 2], 1 / 3, atol=0.03)
