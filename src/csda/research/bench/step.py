"""`csda bench step`: what a step costs against what it must, and what whole trainings make of it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from csda.config import RunConfig
from csda.engine import backends, choose_device
from csda.errors import ConfigError
from csda.fast.streaming import AHEAD
from csda.methods import METHODS
from csda.methods.base import StepOutput
from csda.methods.self_training import SelfTraining
from csda.models.backbones import build_encoder
from csda.models.two_stream import TwoStream
from csda.research.bench.noise import CLASSES, batch_trained_on, open_trainer, refuse_fixed, stepper
from csda.research.bench.starts import measure_seeds, measure_start
from csda.research.bench.timing import Action, Deadline, Times, as_graph, describe_machine, figure, time_in_turn
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
from csda.training import configure, update

PARTS = ("streamed", "seeds", "methods", "start", "loader")
"""What is measured beside the steps of `csda` and `nm`, in this order."""

STREAMED = 1_000_000


def bench_step(
    chosen: Mapping[str, Any],
    *,
    parts: Sequence[str] | None = None,
    data: Path | None = None,
    rounds: int = 15,
    seconds: float = 120.0,
) -> Iterator[dict[str, Any]]:
    """The step of `csda` against the bare step, its parts and the device, that of `nm`, then `parts`, by default all.

    Gives the figures so far after each part. `chosen` are settings as `csda train` takes them, the preset among them;
    `data` is a folder whose files the loader and the processes that are started read. What the deadline of so many
    `seconds` leaves no time for is named under `left_out`.
    """
    parts = parts or PARTS
    if unknown := [part for part in parts if part not in PARTS]:
        raise ConfigError(f"{', '.join(unknown)} is no part of this; choose among {', '.join(PARTS)}")
    refuse_fixed(chosen)
    config = configure(chosen)
    with backends(choose_device(config.device), config.precision):
        yield from _measure(chosen, parts, data, rounds, Deadline(seconds))


def _measure(
    chosen: Mapping[str, Any], parts: Sequence[str], data: Path | None, rounds: int, deadline: Deadline
) -> Iterator[dict[str, Any]]:
    figures = _measure_csda(chosen, rounds, deadline)
    _measure_method("nm", chosen, figures, rounds, deadline)
    figures |= {"nm_like_step_ms": figures["method_step_ms"]["nm"], "left_out": []}
    yield figures
    for part in parts:
        if deadline.passed:
            figures["left_out"].append(part)
        elif part == "streamed":
            figures["streamed_over_resident"] = _measure_streamed(chosen, rounds, deadline)
        elif part == "seeds":
            figures["eight_seeds_speedup"] = measure_seeds("baseline", chosen, deadline)
            figures["eight_seeds_speedup_csda"] = measure_seeds("csda", chosen, deadline)
        elif part == "methods":
            for name in [name for name in METHODS if name not in figures["method_step_ms"]]:
                if deadline.passed:
                    figures["left_out"].append(name)
                else:
                    _measure_method(name, chosen, figures, rounds, deadline)
        elif part == "start":
            figures["second_start_s"] = measure_start(chosen, data, deadline)
        elif part == "loader":
            with tempfile.TemporaryDirectory() as folder:
                figures["loader_step_ms"] = measure_loader(chosen, Path(folder), data)
            figures["loader_over_nm_like"] = figures["loader_step_ms"]["mean"] / figures["nm_like_step_ms"]["mean"]
        yield figures


def _measure_csda(chosen: Mapping[str, Any], rounds: int, deadline: Deadline) -> dict[str, Any]:
    trainer = open_trainer("csda", chosen)
    trainer.method.begin(trainer.model, trainer.parts.labeled, trainer.parts.unlabeled)
    config, device = trainer.config, trainer.device
    copy, copied_bytes = copying(device)
    multiply, multiply_operations = multiplying(device, config.precision)
    actions = {
        "step": stepper(trainer),
        "update": bare_stepper(trainer),
        **_parts_of_a_step(trainer),
        "copy": as_graph(copy, device, trainer.parts.labeled.generator),
        "matrix product": as_graph(multiply, device, trainer.parts.labeled.generator),
    }
    times = time_in_turn(actions, device, rounds, deadline)
    shares = {name: times.ratio(name, "step") for name in ("augmentation", "alignment", "queue", "update")}
    shares["teacher"] = times.ratio("teacher pass", "step") + times.ratio("teacher average", "step")
    shares["rest"] = 1.0 - sum(shares.values())
    bandwidth = copied_bytes / times.median("copy") * 1e3
    rate = multiply_operations / times.median("matrix product") * 1e3
    bare, full = count_work(config)
    return {
        **describe_machine(device),
        "settings": {
            **{key: getattr(config, key) for key in ("preset", "precision", "cuda_graph", "kernels")},
            **{key: getattr(config, key) for key in ("image_size", "batch_size", "unlabeled_batch_size")},
            "capacity": config.method_settings["capacity"],
            "remark": trainer.engine.remark,
        },
        "bare_step_ms": times.figure("update"),
        "csda_step_ms": times.figure("step"),
        "csda_over_bare_and_teacher": times.ratio("step", "update", "teacher pass"),
        "part_ms": {name: times.figure(name) for name in actions if name not in ("step", "update")},
        "share": shares,
        "alignment_and_queue_share": shares["alignment"] + shares["queue"],
        "method_step_ms": {"csda": times.figure("step")},
        "method_over_bare": {"csda": times.ratio("step", "update")},
        "images_per_second": {"csda": _images_per_second(trainer, times)},
        "copy_gigabytes_per_second": bandwidth / 1e9,
        "matrix_teraflops": rate / 1e12,
        "bare_step": _achieved(bare, times.median("update"), bandwidth, rate),
        "csda_step": _achieved(full, times.median("step"), bandwidth, rate),
    }


def _measure_method(
    name: str, chosen: Mapping[str, Any], figures: dict[str, Any], rounds: int, deadline: Deadline
) -> None:
    """Enter a method's step, and that over the bare step on as many images as it trains on."""
    trainer = open_trainer(name, chosen)
    trainer.method.begin(trainer.model, trainer.parts.labeled, trainer.parts.unlabeled)
    actions = {"step": stepper(trainer), "update": bare_stepper(trainer)}
    times = time_in_turn(actions, trainer.device, rounds, deadline)
    figures["method_step_ms"][name] = times.figure("step")
    figures["method_over_bare"][name] = times.ratio("step", "update")
    figures["images_per_second"][name] = _images_per_second(trainer, times)


def _measure_streamed(chosen: Mapping[str, Any], rounds: int, deadline: Deadline) -> dict[str, float]:
    """The step of `csda` with many unlabeled images that stay in a file, over that with few on the device."""
    with tempfile.TemporaryDirectory() as folder:
        resident = open_trainer("csda", chosen)
        streamed = open_trainer("csda", chosen, unlabeled=STREAMED, file=Path(folder) / "pixels")
        actions = {"resident": stepper(resident), "streamed": stepper(streamed)}
        times = time_in_turn(actions, resident.device, rounds, deadline, prepared=AHEAD)
        return figure(times.ratios("streamed", "resident"))


def _images_per_second(trainer: Trainer, times: Times) -> float:
    """New images, labeled and unlabeled, that a step looks at."""
    config = trainer.config
    unlabeled = config.unlabeled_batch_size if METHODS[config.method].uses_unlabeled else 0
    return 1e3 * (config.batch_size + unlabeled) / times.median("step")


def bare_stepper(trainer: Trainer) -> Action:
    """Forward, backward and update of the student on as many images as the method trains on, already augmented."""
    batch = batch_trained_on(trainer)
    with trainer.engine.arithmetic():
        images = batch.weak()

    def compute() -> StepOutput:
        return StepOutput(trainer.method.labeled_loss(trainer.model(images), batch.targets))

    return lambda: trainer.engine.run(update, trainer, compute)


def _parts_of_a_step(trainer: Trainer) -> dict[str, Action]:
    """What a step of `csda` consists of beside the update, each alone on inputs of the same shapes."""
    parts, model, method, device = trainer.parts, trainer.model, trainer.method, trainer.device
    assert isinstance(method, SelfTraining)
    queue = method.refinement.queue
    assert queue is not None
    labeled_indices, unlabeled_indices, *_ = next(trainer.sample(1))
    labeled, unlabeled = parts.labeled.batch(labeled_indices), parts.unlabeled.batch(unlabeled_indices)
    queued_indices, _, _ = queue.contents()
    with trainer.engine.arithmetic():
        labeled_images, unlabeled_images = labeled.weak(), unlabeled.weak()
        labeled_probs, unlabeled_probs = method.predict(model, labeled_images), method.predict(model, unlabeled_images)
    seen = [labeled_images, unlabeled_images] if method.settings.labeled_from == "teacher" else [unlabeled_images]
    aligned = method.refinement.refine(unlabeled_probs)

    def augment() -> None:
        parts.labeled.batch(labeled_indices).weak()
        parts.unlabeled.batch(unlabeled_indices).weak()
        parts.unlabeled.batch(queued_indices).weak()

    def align() -> None:
        method.refinement.observe_labeled(labeled_probs, labeled.targets)
        method.refinement.refine(unlabeled_probs)

    def keep_queue() -> None:
        method.refinement.push(unlabeled, aligned)
        queue.contents()

    def alone(action: Action) -> Action:
        def without_gradient() -> None:
            with torch.no_grad(), trainer.engine.arithmetic():
                action()

        return as_graph(without_gradient, device, parts.labeled.generator)

    return {
        "augmentation": alone(augment),
        "teacher pass": alone(lambda: method.predict(model, *seen)),
        "teacher average": alone(lambda: model.update_teacher(method.settings.teacher_momentum)),
        "alignment": alone(align),
        "queue": alone(keep_queue),
    }


def count_work(config: RunConfig) -> tuple[Work, Work]:
    """What the bare step and the step of `csda` need at least; marginals and queue are too small to count."""
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
