"""From Python nothing is printed unless it is asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import csda
from csda.training import train
from tiny import LABELS, QUEUE, SETTINGS


def test_training_and_prediction_print_nothing(
    tiny_images: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = train(tiny_images, labels=LABELS, out=tmp_path / "run", settings=SETTINGS | QUEUE)
    csda.load(run.folder).predict(np.zeros((2, 40, 50, 3), np.uint8))
    assert capfd.readouterr() == ("", "")
    assert not (run.folder / "tensorboard").exists()
    train(tiny_images, labels=LABELS, out=tmp_path / "told", settings=SETTINGS | QUEUE, verbose=True)
    assert "epoch 3/3" in capfd.readouterr().out
