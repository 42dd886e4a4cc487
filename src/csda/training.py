"""Training from a data set to a finished run folder."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from csda.config import RunConfig, resolve
from csda.data.splits import Budget
from csda.distributed import Ranks, joined_ranks
from csda.engine import CROWD, choose_device
from csda.errors import ConfigError, RunError
from csda.methods import METHODS
from csda.models.backbones import build_encoder
from csda.progress import Reporter, choose_reporter
from csda.runs import Run, require_unused
from csda.trainer import EventWriter, Trainer, prepare_data


def train(
    data: str | Path | None = None,
    *,
    method: str | None = None,
    preset: str | None = None,
    labels: str | int | None = None,
    seed: int | None = None,
    out: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    resume: bool = False,
    reporter: Reporter | None = None,
) -> Run:
    """Train a classifier and return its run, the folder `out` with model, predictions and history.

    `data` is a folder of images, or None for the drawn set `synthetic`; `settings` are further settings by name, as
    `--set` takes them. With `resume`, a run that was interrupted goes on where its last epoch ended. Processes that
    `torchrun` started train one run together.
    """
    choices = {"data": data, "method": method, "preset": preset, "labels": labels, "seed": seed}
    chosen = {
        key: str(value) if isinstance(value, Path) else value for key, value in choices.items() if value is not None
    }
    settings = settings or {}
    if twice := chosen.keys() & settings.keys():
        raise ConfigError(f"{', '.join(sorted(twice))} is given twice, by itself and among the settings; keep one")
    chosen |= settings
    if resume and out is None:
        raise ConfigError("--resume needs --out, the folder of the run to go on with")
    with joined_ranks() as ranks, _voice(reporter, ranks) as reporter:
        run, config = ranks.from_first(lambda: _take_up(out if resume else None, chosen))
        if run is not None and run.finished:
            reporter.note(f"{run.folder}: this run has already finished")
            return run
        require_possible(config, ranks)
        if run is not None:
            with run.held() if ranks.first else nullcontext():
                prepared = prepare_data(config, run, reporter)
                with CROWD.member():
                    return fit(Trainer(config, prepared, ranks), run, reporter)
        folder = ranks.from_first(lambda: _new_folder(out, config))
        prepared = prepare_data(config, None, reporter)
        with CROWD.member():
            trainer = Trainer(config, prepared, ranks)
            run = ranks.from_first(lambda: trainer.create_run(folder))
            with run.held() if ranks.first else nullcontext():
                return fit(trainer, run, reporter)


def configure(chosen: Mapping[str, Any]) -> RunConfig:
    """The complete configuration: without a choice the preset is `quick` where there is no GPU, the precision bf16
    where there is one, and the drawn set keeps 150 labels."""
    name = str(chosen.get("method", "csda"))
    if name not in METHODS:
        raise ConfigError(f"method = {name!r} is unknown; choose one of {', '.join(METHODS)}")
    entry = METHODS[name]
    basis: dict[str, Any] = {"preset": "default" if torch.cuda.is_available() else "quick"}
    if (
        torch.cuda.is_available()
        and chosen.get("device") != "cpu"
        and torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        basis["precision"] = "bf16"
    if chosen.get("data", "synthetic") == "synthetic":
        basis["labels"] = "150"
    config = resolve(basis | dict(chosen), entry.settings, entry.defaults)
    if config.labels is not None:
        try:
            Budget.parse(config.labels)
        except ConfigError as error:
            raise ConfigError(f"labels = {config.labels!r}: {error}") from None
    if entry.uses_unlabeled and config.warm_up_epochs >= config.epochs:
        raise ConfigError(
            f"warm_up_epochs = {config.warm_up_epochs} on labels alone leave none of epochs = {config.epochs} "
            f"to {name}; give fewer of the first, or more of the second"
        )
    return config


def require_possible(config: RunConfig, ranks: Ranks) -> None:
    """Refuse a device or a network that cannot be had, before images are decoded for it."""
    choose_device(config.device, ranks.local_rank)
    batches = {"batch_size": config.batch_size}
    if METHODS[config.method].uses_unlabeled:
        batches["unlabeled_batch_size"] = config.unlabeled_batch_size
    for name, size in batches.items():
        if ranks.size > size:
            raise ConfigError(
                f"{name} = {size} is too small for {ranks.size} processes, which share a batch; start fewer of them"
            )
    with torch.device("meta"):
        build_encoder(config.backbone, config.image_size, channels=3, dropout=config.dropout)


def fit(trainer: Trainer, run: Run, reporter: Reporter) -> Run:
    """The loop: epochs of steps, each epoch scored, written and, from time to time, checkpointed."""
    config, parts, model, method, engine = trainer.config, trainer.parts, trainer.model, trainer.method, trainer.engine
    first = trainer.ranks.first
    rows, best = trainer.restore(run)
    if len(rows) < config.epochs:
        reporter.note(trainer.announce(run, len(rows)))
    writer = EventWriter(run.folder, len(rows)) if config.tensorboard and first else None
    reporter.begin(config.epochs, config.steps_per_epoch, len(rows))
    saved = time.monotonic()
    for epoch in range(len(rows) + 1, config.epochs + 1):
        started = time.perf_counter()
        warming_up = epoch <= config.warm_up_epochs
        learning_rate = trainer.begin_epoch(epoch)
        for inputs in trainer.sample(epoch, labels_only=warming_up):
            engine.step(trainer.warm_up if warming_up else trainer.step, *inputs)
            reporter.step()
        with engine.arithmetic():
            if epoch == config.warm_up_epochs:
                method.begin(model, parts.labeled, parts.unlabeled)
            elif not warming_up:
                method.end_epoch(model, parts.labeled, parts.unlabeled)
            figures, arrays = trainer.evaluate(guesses=not warming_up and METHODS[config.method].uses_unlabeled)
        row = {"epoch": epoch, "lr": learning_rate, **engine.figures(), **figures}
        row["seconds"] = time.perf_counter() - started
        if not np.isfinite([row["loss"], arrays["val_probs"].sum()]).all():
            raise RunError(f"the loss is not finite in epoch {epoch}; give a lower lr than {config.lr}, another --out")
        if first:
            run.write_epoch(row, arrays, rows)
        rows.append(row)
        if best == 0 or row["val_auc"] > rows[best - 1]["val_auc"]:
            best = epoch
            trainer.keep_weights()
        if epoch == config.epochs or time.monotonic() - saved >= config.checkpoint_seconds:
            trainer.save(run, epoch, best)
            saved = time.monotonic()
        if writer is not None:
            writer.write(row)
        reporter.epoch(row)
    if engine.remark is not None:
        reporter.note(engine.remark)
    if writer is not None:
        writer.close()
    with engine.arithmetic():
        conclusions = trainer.conclusions(run, rows, best)
    if not first:
        return run
    run.finish(config.epochs, *conclusions)
    return Run(run.folder)


def unused_folder(config: RunConfig) -> Path:
    """A new folder under runs/, named after what is trained."""
    name = f"{Path(config.data).name or 'images'}-{config.method}-{config.seed}"
    candidates = (Path("runs") / (name if count == 1 else f"{name}-{count}") for count in itertools.count(1))
    return next(folder for folder in candidates if not folder.exists())


def _voice(reporter: Reporter | None, ranks: Ranks) -> Reporter:
    """Of several processes the first one reports."""
    return (reporter or choose_reporter(quiet=False)) if ranks.first else Reporter()


def _new_folder(out: str | Path | None, config: RunConfig) -> Path:
    folder = Path(out) if out is not None else unused_folder(config)
    require_unused(folder)
    return folder


def _take_up(out: str | Path | None, chosen: Mapping[str, Any]) -> tuple[Run | None, RunConfig]:
    """The run to go on with, if `out` holds one that has begun, and the configuration."""
    if out is None or not (Path(out) / "config.toml").is_file():
        return None, configure(chosen)
    run = Run(out)
    config = configure({**_flat(run.settings, chosen), **chosen})
    run.check_config(config)
    return run if run.begun else None, config


def _flat(config: RunConfig, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """A run's settings as choices; another method has other settings of its own."""
    values = config.model_dump(exclude_none=True)
    own = values.pop("method_settings")
    return values | (own if chosen.get("method", config.method) == config.method else {})
