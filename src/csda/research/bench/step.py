"""`csda bench step`: step time compared with its roofline bound, and the speed of whole trainings."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from csda.config import RunConfig
from csda.engine import backends, choose_device
from csda.errors import ConfigError
from csda.fast.streaming import AHEAD
from csda.methods import METHODS
from csda.methods.base import StepOutput
from csda.models.backbones import build_encoder
from csda.models.two_stream import TwoStream
from csda.presets import configure
from csda.research.bench.noise import CLASSES, images_trained_on, open_trainer, stepper
from csda.research.bench.starts import measure_seeds, measure_start
from csda.research.bench.timing import Action, describe_machine, figure, ratios, time_in_turn
from csda.research.bench.torch_loader import measure_loader
from csda.research.bench.work import (
    Work,
    augmentation_work,
    average_work,
    copying,
    inference_work,
    multiplying,
    training_work,
)
from csda.trainer import Trainer
from csda.training import update

PARTS = ("streamed", "seeds", "methods", "start", "loader")
"""Further measurements, besides the steps of `csda` and `nm`, in this order."""

STREAMED = 1_000_000


def bench_step(
    chosen: Mapping[str, Any],
    *,
    parts: Sequence[str] | None = None,
    data: Path | None = None,
    rounds: int = 15,
    seconds: float = 120.0,
) -> Iterator[dict[str, Any]]:
    """Time the step of `csda`, compared with the bare step and the device, that of `nm`, then `parts`, by default all.

    Yields the figures after each. `chosen` are settings as for `csda train`, including the preset. `data` is a folder
    of images for the loader and the starts. Measurements that have not begun after `seconds` are listed under
    `left_out`.
    """
    end = time.monotonic() + seconds
    parts = parts or PARTS
    if unknown := [part for part in parts if part not in PARTS]:
        raise ConfigError(f"{', '.join(unknown)} is not a part of this benchmark; choose among {', '.join(PARTS)}")
    config = configure(chosen)
    with backends(choose_device(config.device), config.precision):
        figures = _measure_csda(chosen, rounds)
        _measure_method("nm", chosen, figures, rounds)
        yield figures
        others = [name for name in METHODS if METHODS[name].steps and name not in figures["method_step_ms"]]
        for name in [name for part in parts for name in (others if part == "methods" else [part])]:
            if time.monotonic() >= end:
                figures["left_out"].append(name)
            elif name == "streamed":
                figures["streamed_over_resident"] = _measure_streamed(chosen, rounds)
            elif name == "seeds":
                figures["eight_seeds_speedup"] = measure_seeds("baseline", chosen)
                figures["eight_seeds_speedup_csda"] = measure_seeds("csda", chosen)
            elif name == "start":
                figures["second_start_s"] = measure_start(chosen, data)
            elif name == "loader":
                with tempfile.TemporaryDirectory() as folder:
                    figures["loader_step_ms"] = measure_loader(chosen, Path(folder), data)
            else:
                _measure_method(name, chosen, figures, rounds)
            yield figures


def _measure_csda(chosen: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    """Time the step of `csda`, the bare step and the device in the same rounds, with roofline bounds."""
    trainer = open_trainer("csda", chosen)
    config, device = trainer.config, trainer.device
    copy, copied_bytes = copying(device)
    multiply, multiply_operations = multiplying(device, config.precision)
    actions = {**_steps(trainer), "copy": copy, "matrix product": multiply}
    times = time_in_turn(actions, device, rounds)
    bandwidth = copied_bytes / median(times["copy"]) * 1e3
    rate = multiply_operations / median(times["matrix product"]) * 1e3
    bare, full = count_work(config)
    return {
        **describe_machine(device),
        "settings": {
            **{key: getattr(config, key) for key in ("preset", "precision", "cuda_graph", "kernels")},
            **{key: getattr(config, key) for key in ("image_size", "batch_size", "unlabeled_batch_size")},
            "capacity": config.method_settings["capacity"],
            "remark": trainer.engine.remark,
        },
        "bare_step_ms": figure(times["update"]),
        "method_step_ms": {"csda": figure(times["step"])},
        "method_over_bare": {"csda": median(ratios(times, "step", "update"))},
        "copy_gigabytes_per_second": bandwidth / 1e9,
        "matrix_teraflops": rate / 1e12,
        "bare_step": _achieved(bare, median(times["update"]), bandwidth, rate),
        "csda_step": _achieved(full, median(times["step"]), bandwidth, rate),
        "left_out": [],
    }


def _measure_method(name: str, chosen: Mapping[str, Any], figures: dict[str, Any], rounds: int) -> None:
    """Time a method's step, and its ratio to a bare step on as many images."""
    trainer = open_trainer(name, chosen)
    times = time_in_turn(_steps(trainer), trainer.device, rounds)
    figures["method_step_ms"][name] = figure(times["step"])
    figures["method_over_bare"][name] = median(ratios(times, "step", "update"))


def _measure_streamed(chosen: Mapping[str, Any], rounds: int) -> dict[str, float]:
    """Time the step of `csda` with many unlabeled images in a file, relative to few on the device."""
    with tempfile.TemporaryDirectory() as folder:
        resident = open_trainer("csda", chosen)
        streamed = open_trainer("csda", chosen, unlabeled=STREAMED, file=Path(folder) / "pixels")
        actions = {"resident": stepper(resident), "streamed": stepper(streamed)}
        times = time_in_turn(actions, resident.device, rounds, prepared=AHEAD)
        return figure(ratios(times, "streamed", "resident"))


def _steps(trainer: Trainer) -> dict[str, Action]:
    """Functions for a step of the method and for the bare step: forward, backward and update of the student on as many
    images, already augmented.
    """
    trainer.method.begin(trainer.model, trainer.parts.labeled, trainer.parts.unlabeled)
    positions = torch.arange(images_trained_on(trainer), device=trainer.device) % len(trainer.parts.labeled)
    batch = trainer.parts.labeled.batch(positions)
    with trainer.engine.arithmetic():
        images = batch.weak()

    def compute() -> StepOutput:
        return StepOutput(trainer.method.labeled_loss(trainer.model(images), batch.targets))

    return {"step": stepper(trainer), "update": lambda: trainer.engine.run(update, trainer, compute)}


def count_work(config: RunConfig) -> tuple[Work, Work]:
    """The work of the bare step and the step of `csda`; marginals and queue are negligible."""
    with torch.device("meta"):
        encoder = build_encoder(config.backbone, config.image_size, channels=3, dropout=config.dropout)
        network = TwoStream(encoder, CLASSES)
    image = (3, config.image_size, config.image_size)
    labeled, unlabeled, queued = config.batch_size, config.unlabeled_batch_size, config.method_settings["capacity"]
    student = torch.nn.Sequential(network.student, network.head)
    bare = training_work(student, (labeled + queued, *image), config.precision)
    by_teacher = unlabeled + labeled * (config.method_settings["labeled_from"] == "teacher")
    taught = inference_work(student, (by_teacher, *image), config.precision)
    augmented = augmentation_work((labeled + unlabeled + queued, *image), config.precision)
    return bare, bare + taught + average_work(network.teacher) + augmented


def _achieved(work: Work, milliseconds: float, bandwidth: float, rate: float) -> dict[str, float]:
    seconds = milliseconds / 1e3
    return {
        "gigabytes": work.bytes / 1e9,
        "gigaflops": work.operations / 1e9,
        "of_copy_bandwidth": work.bytes / seconds / bandwidth,
        "of_matrix_rate": work.operations / seconds / rate,
        "least_ms": 1e3 * max(work.bytes / bandwidth, work.operations / rate),
    }
