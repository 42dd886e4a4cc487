"""`csda bench recipe`: time fine-tuning with the preset `strong`, compared with the same in plain eager torch."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

import torch
from torch import nn

from csda.config import RunConfig
from csda.engine import backends, choose_device
from csda.methods import METHODS
from csda.models.backbones import build_encoder
from csda.models.two_stream import TwoStream
from csda.presets import configure
from csda.research.bench.noise import CLASSES, open_trainer, stepper
from csda.research.bench.timing import describe_machine, figure, ratios, time_in_turn, time_once
from csda.research.bench.work import (
    Work,
    augmentation_work,
    average_work,
    copying,
    inference_work,
    multiplying,
    training_work,
)

STEPS = 2000
"""Number of steps of the training."""

RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "supervised": ("baseline", {"batch_size": 64}),
    "with_unlabeled": ("self-train", {"batch_size": 64, "unlabeled_batch_size": 192, "teacher": "ema"}),
}
"""Method and batch sizes of each timed recipe."""

EAGER = {"cuda_graph": False, "kernels": False}
"""The same training as plain torch runs it: in the same precision and memory format, kernel by kernel."""


def bench_recipe(
    chosen: Mapping[str, Any], *, rounds: int = 10, seconds: float = 120.0, recipes: Mapping[str, Any] = RECIPES
) -> Iterator[dict[str, Any]]:
    """Time a step of each recipe, eager and as in `csda train`, in turn; yield the figures after each.

    `recipe_s` is the time of `STEPS` steps after the first start, `first_steps_s` that of the first calls, in which
    kernels are chosen and the step is captured, and `least_ms` the roofline bound of a step. `chosen` are settings as
    for `csda train`. Measurements that have not begun after `seconds` are listed under `left_out`.
    """
    end = time.monotonic() + seconds
    chosen = {"preset": "strong", "pretrained": False, **chosen}
    config = configure(chosen)
    device = choose_device(config.device)
    with backends(device, config.precision, config.time_kernels):
        copy, copied_bytes = copying(device)
        multiply, operations = multiplying(device, config.precision)
        times = time_in_turn({"copy": copy, "product": multiply}, device, rounds)
        bandwidth, rate = (1e3 * work / median(times[name]) for name, work in
                           (("copy", copied_bytes), ("product", operations)))  # fmt: skip
        figures: dict[str, Any] = {
            **describe_machine(device),
            "settings": {key: getattr(config, key) for key in ("preset", "backbone", "image_size", "precision")},
            "steps": STEPS,
            "copy_gigabytes_per_second": bandwidth / 1e9,
            "matrix_teraflops": rate / 1e12,
            "left_out": [],
        }
        for name, (method, sizes) in recipes.items():
            if time.monotonic() >= end:
                figures["left_out"].append(name)
            else:
                figures[name] = _measure(method, {**sizes, **chosen}, rounds, bandwidth, rate)
            yield figures


def _measure(method: str, chosen: Mapping[str, Any], rounds: int, bandwidth: float, rate: float) -> dict[str, Any]:
    ours, eager = open_trainer(method, chosen), open_trainer(method, {**chosen, **EAGER})
    actions = {"ours": stepper(ours), "eager": stepper(eager)}
    for trainer in (ours, eager):
        if METHODS[method].uses_unlabeled:
            with trainer.engine.arithmetic():
                trainer.method.begin(trainer.model, trainer.parts.labeled, trainer.parts.unlabeled)

    def begin() -> None:
        for _ in range(8):
            actions["ours"]()

    first = time_once(begin, ours.device)
    times = time_in_turn(actions, ours.device, rounds)
    work = count_recipe(ours.config)
    step = median(times["ours"])
    return {
        "method": method,
        **{key: getattr(ours.config, key) for key in ("batch_size", "unlabeled_batch_size")},
        "step_ms": figure(times["ours"]),
        "eager_step_ms": figure(times["eager"]),
        "eager_over_ours": median(ratios(times, "eager", "ours")),
        "recipe_s": STEPS * step / 1e3,
        "first_steps_s": first,
        "gigabytes": work.bytes / 1e9,
        "gigaflops": work.operations / 1e9,
        "least_ms": 1e3 * max(work.bytes / bandwidth, work.operations / rate),
        "remark": ours.engine.remark,
    }


def count_recipe(config: RunConfig) -> Work:
    """The work of a step of the recipe: the student's images, the teacher's images, and the averages of weights."""
    with torch.device("meta"):
        encoder = build_encoder(config.backbone, config.image_size, channels=3, dropout=config.dropout)
        network = TwoStream(encoder, CLASSES)
    image = (3, config.image_size, config.image_size)
    student = nn.Sequential(network.student, network.head)
    guessed = config.unlabeled_batch_size if METHODS[config.method].uses_unlabeled else 0
    work = training_work(student, (config.batch_size + guessed, *image), config.precision)
    if guessed:
        work += inference_work(student, (guessed, *image), config.precision)
        if config.method_settings["teacher"] == "ema":
            work += average_work(network.teacher)
    if config.average:
        work += average_work(student)
    return work + augmentation_work((config.batch_size + 2 * guessed, *image), config.precision)
