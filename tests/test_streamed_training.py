"""Trainings whose unlabeled images stay on the host give what those give that hold them on the device."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from csda.data.prepared import PreparedData
from csda.data.records import Dataset, Record, Split
from csda.methods.self_training import SelfTraining
from csda.presets import configure
from csda.progress import Reporter
from csda.runs import Run
from csda.trainer import Trainer
from csda.training import update
from tiny import train_tiny

LASTING = {"capacity": 48, "gamma": 0.0}
"""A queue with 16 slots a class: images of earlier steps stay in it, also when a batch of 8 is of one class."""

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Stop(Reporter):
    """Presses Ctrl-C when so many epochs have ended."""

    def __init__(self, epochs: int) -> None:
        self.left = epochs

    def epoch(self, row: Mapping[str, Any]) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


class Notes(Reporter):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def _losses(run: Run) -> list[tuple[float, float]]:
    """Of all epochs, also of those after the best, whose predictions are kept."""
    return [(row["loss"], row["val_auc"]) for row in run.metrics]


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("csda", LASTING),
        ("csda", {"refresh": "epoch", "order": "train_first", **LASTING}),
        ("csda", {"refresh": "epoch", "rebuild": True, "repeats": "keep", "evict": "least_confident", **LASTING}),
        ("fixmatch", {}),
        ("fixmatch", {"queue": "vcq", "align": "csda", "threshold": 0.4, **LASTING}),
        ("nm", {}),
        ("baseline", {}),
    ],
)
def test_streamed_is_resident_bit_for_bit(
    method: str, settings: dict[str, Any], tiny_images: Path, tmp_path: Path
) -> None:
    resident = train_tiny(tiny_images, tmp_path / "resident", method=method, **settings)
    streamed = train_tiny(tiny_images, tmp_path / "streamed", method=method, resident_share=0, **settings)
    for name in ("predictions.csv", "pseudo_labels.csv", "model.safetensors"):
        assert (streamed.folder / name).read_bytes() == (resident.folder / name).read_bytes(), name
    assert _losses(streamed) == _losses(resident)


def test_a_run_may_change_its_place_when_it_goes_on(
    tiny_images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that is free today may be taken tomorrow: the images of the queue are found again by their indices."""
    whole = train_tiny(tiny_images, tmp_path / "whole", **LASTING)
    for number, free in enumerate(((0, 2**40), (2**40, 0))):
        out = tmp_path / str(number)
        monkeypatch.setattr("csda.data.loader.free_memory", lambda device, free=free: free[0])
        with pytest.raises(KeyboardInterrupt):
            train_tiny(tiny_images, out, reporter=Stop(2), **LASTING)
        monkeypatch.setattr("csda.data.loader.free_memory", lambda device, free=free: free[1])
        run = train_tiny(tiny_images, out, resume=True, **LASTING)
        assert _losses(run) == _losses(whole)
        assert (run.folder / "predictions.csv").read_bytes() == (whole.folder / "predictions.csv").read_bytes()


def test_the_user_is_told_what_is_streamed(tiny_images: Path, tmp_path: Path) -> None:
    for share, told in ((0, True), (0.6, False)):
        reporter = Notes()
        train_tiny(tiny_images, tmp_path / str(share), reporter=reporter, resident_share=share, epochs=2)
        assert any("streamed from the host: unlabeled, val, test" in note for note in reporter.notes) is told


def test_an_interrupted_run_leaves_no_threads(tiny_images: Path, tmp_path: Path) -> None:
    class Press(Reporter):
        def step(self) -> None:
            raise KeyboardInterrupt

    try:
        train_tiny(tiny_images, tmp_path / "run", reporter=Press(), resident_share=0, steps_per_epoch=100)
    except KeyboardInterrupt as error:
        error.__traceback__ = None
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("csda-pixels")]


def open_noise(file: Path, unlabeled: int, share: float, **chosen: Any) -> Trainer:
    """A `csda` training on images mapped from a file, noise at its front and holes behind, ready to step."""
    config = configure({"method": "csda", "preset": "default", "tensorboard": False, "resident_share": share} | chosen)
    records = tuple(Record(f"{number:07d}", None, number % 7) for number in range(256 + unlabeled))
    shape = (len(records), config.image_size, config.image_size, 3)
    if not file.exists():
        noise = np.random.default_rng(0).integers(0, 256, (min(4096, shape[0]), *shape[1:]), np.uint8)
        np.memmap(file, np.uint8, "w+", shape=shape)[: len(noise)] = noise
    pixels = np.memmap(file, np.uint8, "r", shape=shape)
    pool = tuple(Record(record.id, None, None) for record in records[256:])
    split = Split(records[:128], pool, records[128:192], records[192:256], truth={})
    dataset = Dataset("noise", tuple("abcdefg"), records)
    trainer = Trainer(config, PreparedData(dataset, pixels, split, (), dataset.name))
    trainer.begin_epoch(1)
    trainer.method.begin(trainer.model, trainer.parts.labeled, trainer.parts.unlabeled.first(1024))
    return trainer


def run_epoch(trainer: Trainer, epoch: int) -> dict[str, float]:
    trainer.begin_epoch(epoch)
    for inputs in trainer.sample(epoch):
        trainer.engine.run(update, trainer, trainer.step, *inputs)
    return trainer.figures.read()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_steps_on_streamed_images_are_those_on_resident_ones(device: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"device": device, "image_size": 32, "steps_per_epoch": 8, "capacity": 32, "lr": 0.002}
    settings |= {"batch_size": 16, "unlabeled_batch_size": 16, "dropout": 0.0}
    resident, streamed = (open_noise(tmp_path / "pixels", 200, share, **settings) for share in (1.0, 0.0))
    for epoch in (2, 3):
        figures = [run_epoch(trainer, epoch) for trainer in (resident, streamed)]
        assert figures[1] == pytest.approx(figures[0], rel=1e-2 if device == "cuda" else 0)
    for trainer in (resident, streamed):
        assert trainer.engine.remark is None
        captured = trainer.engine.fast is not None and trainer.engine.fast.graphs.enabled
        assert captured is (device == "cuda")
    assert isinstance(streamed.method, SelfTraining)
    queue = streamed.method.refinement.queue
    assert queue is not None
    assert queue.images is not None
    assert queue.mask.any()
    assert torch.equal(queue.images, resident.parts.unlabeled.pixels[queue.indices])


@needs_gpu
def test_a_streamed_step_takes_little_longer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second time that an epoch is seen its rows are in the page cache, as those of a real set would be."""
    milliseconds = {}
    for name, share in (("resident", 1.0), ("streamed", 0.0)):
        trainer = open_noise(tmp_path / "pixels", 20_000, share, precision="bf16", steps_per_epoch=200)
        for _ in range(2):
            begun = time.perf_counter()
            run_epoch(trainer, 2)
            milliseconds[name] = 1e3 * (time.perf_counter() - begun) / 200
        assert trainer.engine.remark is None
    ratio = milliseconds["streamed"] / milliseconds["resident"]
    with capsys.disabled():
        print(f"\n{milliseconds['resident']:.2f} ms resident, {milliseconds['streamed']:.2f} ms streamed, {ratio:.2f}×")
    assert ratio < 1.5
