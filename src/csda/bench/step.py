"""`csda bench step`: what a step costs against what it must, and what whole trainings make of it."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from csda.bench.loader import measure_loader
from csda.bench.sessions import CLASSES, open_session, stepper
from csda.bench.starts import measure_seeds, measure_start
from csda.bench.timing import Action, Deadline, Times, as_graph, describe_machine, time_in_turn
from csda.bench.work import (
    Work,
    augmentation_work,
    average_work,
    copying,
    inference_work,
    multiplying,
    training_work,
)
from csda.config import RunConfig
from csda.errors import ConfigError
from csda.methods import METHODS
from csda.methods.base import StepOutput
from csda.methods.self_training import SelfTraining
from csda.models.backbones import build_encoder
from csda.models.two_stream import TwoStream
from csda.session import Session

PARTS = ("methods", "loader", "start", "seeds")
"""What is measured beside the step of `csda` and its parts, in this order."""


def bench_step(
    chosen: Mapping[str, Any],
    *,
    parts: Sequence[str] | None = None,
    data: Path | None = None,
    rounds: int = 15,
    seconds: float = 120.0,
) -> dict[str, Any]:
    """The step of `csda` and its parts against the bare step and the device, then `parts`, all without a choice.

    `chosen` are settings as `csda train` takes them, the preset among them; `data` is a folder whose files the loader
    and the processes that are started read. What the deadline of so many `seconds` leaves no time for is named under
    `left_out`.
    """
    parts = parts or PARTS
    if unknown := [part for part in parts if part not in PARTS]:
        raise ConfigError(f"{', '.join(unknown)} is no part of this; choose among {', '.join(PARTS)}")
    if fixed := chosen.keys() & {"method", "data"}:
        raise ConfigError(f"{', '.join(sorted(fixed))} cannot be set here: all methods are measured, on noise")
    deadline = Deadline(seconds)
    figures = _measure_csda(chosen, rounds, deadline)
    left_out = []
    for part in parts:
        gc.collect()  # sessions are circles of references and hold the device's memory
        if deadline.passed:
            left_out.append(part)
        elif part == "methods":
            figures |= _measure_methods(chosen, figures, rounds, deadline, left_out)
        elif part == "loader":
            with tempfile.TemporaryDirectory() as folder:
                figures["loader_step_ms"] = measure_loader(chosen, Path(folder), data, rounds, deadline)
        elif part == "start":
            figures["second_start_s"] = measure_start(chosen, data, deadline)
        elif part == "seeds":
            figures["eight_seeds_speedup"] = measure_seeds("baseline", chosen, deadline)
            figures["eight_seeds_speedup_csda"] = measure_seeds("csda", chosen, deadline)
    if "loader_step_ms" in figures and "nm_like_step_ms" in figures:
        figures["loader_over_nm_like"] = figures["loader_step_ms"]["mean"] / figures["nm_like_step_ms"]["mean"]
    return figures | {"left_out": left_out}


def _measure_csda(chosen: Mapping[str, Any], rounds: int, deadline: Deadline) -> dict[str, Any]:
    session = open_session("csda", chosen)
    session.method.begin(session.model, session.parts.labeled, session.parts.unlabeled)
    config, device = session.config, session.device
    copy, copied_bytes = copying(device)
    multiply, multiply_operations = multiplying(device, config.precision)
    actions = {
        "step": stepper(session),
        "update": bare_stepper(session),
        **_parts_of_a_step(session),
        "copy": as_graph(copy, device, session.parts.labeled.generator),
        "matrix product": as_graph(multiply, device, session.parts.labeled.generator),
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
            **{key: getattr(config, key) for key in ("preset", "precision", "image_size")},
            **{key: getattr(config, key) for key in ("batch_size", "unlabeled_batch_size")},
            "capacity": config.method_settings["capacity"],
            "remark": session.engine.remark,
        },
        "bare_step_ms": times.figure("update"),
        "csda_step_ms": times.figure("step"),
        "csda_over_bare": times.ratio("step", "update"),
        "csda_over_bare_and_teacher": times.ratio("step", "update", "teacher pass"),
        "part_ms": {name: times.figure(name) for name in actions if name not in ("step", "update")},
        "share": shares,
        "alignment_and_queue_share": shares["alignment"] + shares["queue"],
        "images_per_second": {"csda": _images_per_second(session, times)},
        "copy_gigabytes_per_second": bandwidth / 1e9,
        "matrix_teraflops": rate / 1e12,
        "bare_step": _achieved(bare, times.median("update"), bandwidth, rate),
        "csda_step": _achieved(full, times.median("step"), bandwidth, rate),
    }


def _measure_methods(
    chosen: Mapping[str, Any], csda: Mapping[str, Any], rounds: int, deadline: Deadline, left_out: list[str]
) -> dict[str, Any]:
    """Each method's step against the bare step on as many images as it trains on; `nm` first, which has a name here."""
    milliseconds, over_bare = {"csda": csda["csda_step_ms"]}, {"csda": csda["csda_over_bare"]}
    per_second = dict(csda["images_per_second"])
    for name in sorted(METHODS.keys() - {"csda"}, key=lambda name: (name != "nm", name)):
        if deadline.passed and name != "nm":
            left_out.append(name)
            continue
        session = open_session(name, chosen)
        session.method.begin(session.model, session.parts.labeled, session.parts.unlabeled)
        actions = {"step": stepper(session), "update": bare_stepper(session)}
        times = time_in_turn(actions, session.device, rounds, deadline)
        milliseconds[name], over_bare[name] = times.figure("step"), times.ratio("step", "update")
        per_second[name] = _images_per_second(session, times)
        del session, actions
        gc.collect()
    return {
        "nm_like_step_ms": milliseconds["nm"],
        "method_step_ms": milliseconds,
        "method_over_bare": over_bare,
        "images_per_second": per_second,
    }


def images_trained_on(session: Session) -> int:
    """Images that a step of the method takes through the student: labeled ones, and the queue or unlabeled ones."""
    config, method = session.config, session.method
    if not METHODS[config.method].uses_unlabeled:
        return config.batch_size
    queue = method.refinement.queue if isinstance(method, SelfTraining) else None
    return config.batch_size + (config.unlabeled_batch_size if queue is None else queue.capacity)


def _images_per_second(session: Session, times: Times) -> float:
    """New images, labeled and unlabeled, that a step looks at."""
    config = session.config
    unlabeled = config.unlabeled_batch_size if METHODS[config.method].uses_unlabeled else 0
    return 1e3 * (config.batch_size + unlabeled) / times.median("step")


def bare_stepper(session: Session) -> Action:
    """Forward, backward and update of the student on as many images as the method trains on, already augmented."""
    positions = torch.arange(images_trained_on(session), device=session.device) % len(session.parts.labeled)
    batch = session.parts.labeled.batch(positions)
    images = batch.weak()

    def compute(images: Tensor, targets: Tensor) -> StepOutput:
        return StepOutput(session.method.labeled_loss(session.model(images), targets))

    return lambda: session.engine.step(compute, images, batch.targets)


def _parts_of_a_step(session: Session) -> dict[str, Action]:
    """What a step of `csda` consists of beside the update, each alone on inputs of the same shapes."""
    parts, model, method, device = session.parts, session.model, session.method, session.device
    assert isinstance(method, SelfTraining)
    queue = method.refinement.queue
    assert queue is not None
    labeled_indices, unlabeled_indices, _ = next(session.sample(1))
    labeled, unlabeled = parts.labeled.batch(labeled_indices), parts.unlabeled.batch(unlabeled_indices)
    queued_indices, _, _ = queue.contents()
    seen = torch.cat((labeled.weak(), unlabeled.weak()))
    probs = method.predict(model, seen)
    labeled_probs, unlabeled_probs = probs.split((len(labeled), len(unlabeled)))
    aligned = method.refinement.refine(unlabeled_probs)

    def augment() -> None:
        parts.labeled.batch(labeled_indices).weak()
        parts.unlabeled.batch(unlabeled_indices).weak()
        parts.unlabeled.batch(queued_indices).weak()

    def align() -> None:
        method.refinement.observe_labeled(labeled_probs, labeled.targets)
        method.refinement.refine(unlabeled_probs)

    def keep_queue() -> None:
        method.refinement.push(unlabeled_indices, aligned)
        queue.contents()

    def alone(action: Action) -> Action:
        def under_precision() -> None:
            enabled = session.config.precision == "bf16"
            with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=enabled, cache_enabled=False):
                action()

        return as_graph(under_precision, device, parts.labeled.generator)

    return {
        "augmentation": alone(augment),
        "teacher pass": alone(lambda: method.predict(model, seen)),
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
    taught = inference_work(student, (labeled + unlabeled, *image), config.precision)
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
