"""Training from a data set to a finished run folder."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from csda.config import RunConfig
from csda.cross_fitting import cross_fit, predict_held_out
from csda.data.arrays import SOURCE, Samples, take_samples
from csda.data.prepared import PreparedData, prepare_data, require_unlabeled
from csda.data.reviewed import read_review
from csda.distributed import Ranks, joined_ranks
from csda.engine import choose_device, using
from csda.errors import ConfigError, RunError
from csda.features import Features, open_features
from csda.methods import METHODS
from csda.methods.base import StepOutput
from csda.models.backbones import VECTORS, check_encoder
from csda.models.weights import read_weights
from csda.presets import configure, remark_on_weights
from csda.progress import EventWriter, Reporter, choose_reporter
from csda.runs import Run, held, require_unused
from csda.trainer import Trainer

OF_THE_DATA = frozenset(
    {
        "data", "source", "split", "image_column", "label_column", "group_column", "split_column", "split_by",
        "split_seed", "labels", "val", "uncertain", "max_unreadable", "seed",
    }
)  # fmt: skip
"""Settings that choose the images and how they are divided."""


def train(
    data: Any = None,
    y: Any = None,
    *,
    method: str | None = None,
    preset: str | None = None,
    labels: str | int | None = None,
    seed: int | None = None,
    out: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    resume: bool = False,
    labels_from: str | Path | None = None,
    verbose: bool = False,
    reporter: Reporter | None = None,
) -> Run:
    """Train a classifier and return its run: the folder `out` with model, predictions and history.

    Processes that `torchrun` started train one run together.

    Args:
        data: a folder of images; None for the drawn set `synthetic`; with `y` images [N, H, W, C], paths or feature
            vectors [N, W]. To resume such a run, give the same arrays again.
        y: labels of `data`, −1 for a sample without one.
        method: one of `csda methods`.
        preset: named default settings; chosen for the machine unless given.
        labels: labels to keep: 300, "10%", "20/class" or "10% of groups".
        seed: of data, split and training.
        out: run folder; a new one under runs/ unless given.
        settings: further settings by name, as `--set` takes them.
        resume: continue an interrupted run after its last checkpoint.
        labels_from: a run or review folder. Its new labels are added, validation and test images stay the same, and
            settings that are not given here are those of that run.
        verbose: print progress.
        reporter: where to print progress instead.
    """
    samples = None if y is None else take_samples(data, y)
    arguments = {"data": data, "method": method, "preset": preset, "labels": labels, "seed": seed}
    chosen = _chosen(arguments, settings or {}, samples)
    if labels_from is not None:
        before = {} if resume else _settings_of(Path(labels_from), chosen)
        chosen = before | chosen | {"labels_from": str(labels_from)}
    if resume and out is None:
        raise ConfigError("--resume needs --out, the folder of the run to continue")
    with joined_ranks() as ranks, _reporter_of(reporter, verbose, ranks) as reporter, ExitStack() as stack:
        folder, config, run = ranks.from_first(lambda: _open_folder(out, chosen, resume, stack))
        if run is not None and run.finished:
            reporter.note(f"{run.folder}: this run has already finished")
            return run
        require_possible(config, ranks)
        if remark := remark_on_weights(chosen, config):
            reporter.note(remark)
        weights = ranks.from_first(lambda: _first_weights(config, run))
        begun = run.beginning if run is not None else None
        prepared = prepare_data(
            config,
            reporter,
            upper_bound=METHODS[config.method].uses_truth,
            begun=begun,
            samples=samples,
            require_same=ranks.require_same,
        )
        if METHODS[config.method].uses_unlabeled:
            require_unlabeled(prepared.dataset, prepared.split, config.method)
        device = choose_device(config.device, ranks.local_rank)
        with using(device, config.precision, config.time_kernels):
            features = _features_of(config, prepared, samples, weights, device, reporter)
            if run is not None and features is not None:
                _require_same_weights(run, features.digest)
            trainer = Trainer(config, prepared, ranks, weights, features)
            run = run or ranks.from_first(lambda: trainer.create_run(folder))
            if not run.has_checkpoint:
                cross_fit(trainer, weights, learn, reporter)
            return fit(trainer, run, reporter)


def require_possible(config: RunConfig, ranks: Ranks) -> None:
    """Refuse a device or network that is not available, before images are decoded."""
    choose_device(config.device, ranks.local_rank)
    batches = {"batch_size": config.batch_size}
    if METHODS[config.method].uses_unlabeled:
        batches["unlabeled_batch_size"] = config.unlabeled_batch_size
    for name, size in batches.items():
        if ranks.size > size:
            raise ConfigError(
                f"{name} = {size} is too small for {ranks.size} processes, which share a batch; start fewer of them"
            )
    check_encoder(config.backbone, config.image_size, channels=3, dropout=config.dropout)


def fit(trainer: Trainer, run: Run, reporter: Reporter) -> Run:
    """The training loop: epochs of steps. Each epoch is scored and written, and some are checkpointed."""
    config, engine, first = trainer.config, trainer.engine, trainer.ranks.first
    uses_unlabeled = METHODS[config.method].uses_unlabeled
    history = trainer.restore(run)
    done = len(history.rows)
    if done < config.epochs and not trainer.ranks.from_first(lambda: reporter.silent):
        reporter.note(trainer.announce(run, done))
    writer = EventWriter(run.folder, done) if config.tensorboard and first else None
    reporter.begin(config.epochs, config.steps_per_epoch, done)
    saved = time.monotonic()
    for epoch in range(done + 1, config.epochs + 1):
        started = time.perf_counter()
        warming_up = epoch <= config.warm_up_epochs
        compute = trainer.warm_up if warming_up else trainer.step
        learning_rate = trainer.begin_epoch(epoch)
        for inputs in trainer.sample(epoch, labels_only=warming_up):
            engine.run(update, trainer, compute, *inputs)
            reporter.step()
        trainer.end_epoch(epoch)
        with engine.arithmetic():
            figures, arrays = trainer.evaluate(guesses=not warming_up and uses_unlabeled)
        row = {"epoch": epoch, "lr": learning_rate, **trainer.figures.read(), **figures}
        row["seconds"] = time.perf_counter() - started + (trainer.head_seconds if epoch == 1 else 0.0)
        if not np.isfinite([row.get("loss", 0.0), arrays["val_probs"].sum(), arrays["test_probs"].sum()]).all():
            raise RunError(f"the loss is not finite in epoch {epoch}; give a lower lr than {config.lr}, another --out")
        if first:
            run.write_epoch(row, arrays, history.rows)
        if history.add(row, arrays, config.choose):
            trainer.keep_weights()
        if epoch == config.epochs or time.monotonic() - saved >= config.checkpoint_seconds:
            trainer.save(run, history)
            saved = time.monotonic()
        if writer is not None:
            writer.write(row)
        reporter.epoch(row)
    if engine.remark is not None:
        reporter.note(engine.remark)
    if writer is not None:
        writer.close()
    held_out = predict_held_out(trainer, learn, reporter)
    with engine.arithmetic():
        conclusions = trainer.conclude(history, held_out)
    if not first:
        return run
    trainer.write_calibrated(run, conclusions.calibration)
    run.finish(
        history.arrays,
        conclusions.predictions,
        conclusions.pseudo_labels,
        conclusions.result,
        conclusions.calibration,
        conclusions.thumbnails,
    )
    return Run(run.folder)


def learn(trainer: Trainer) -> None:
    """All steps of a training, without evaluating or writing anything."""
    for epoch in range(1, trainer.config.epochs + 1):
        warming_up = epoch <= trainer.config.warm_up_epochs
        compute = trainer.warm_up if warming_up else trainer.step
        trainer.begin_epoch(epoch)
        for inputs in trainer.sample(epoch, labels_only=warming_up):
            trainer.engine.run(update, trainer, compute, *inputs)
        trainer.end_epoch(epoch)


def update(trainer: Trainer, compute: Callable[..., StepOutput], *inputs: Tensor) -> None:
    """One step of gradient descent. On a GPU the engine captures exactly this and replays it."""
    trainer.optimizer.zero_grad(set_to_none=True)
    with trainer.engine.arithmetic():
        output = compute(*inputs)
    output.loss.backward()
    trainer.ranks.average_gradients(trainer.optimizer)
    trainer.optimizer.step()
    trainer.follow()
    trainer.figures.add(output)


def _chosen(arguments: Mapping[str, Any], settings: Mapping[str, Any], samples: Samples | None) -> dict[str, Any]:
    """The arguments of `train` that are given, and the settings, as one table."""
    if samples is not None:
        settings = _settings_for(samples, arguments["preset"], settings)
        preset = None if samples.vectors is not None else arguments["preset"]
        arguments = {**arguments, "data": None, "preset": preset}
    elif not isinstance(data := arguments["data"], str | Path | None):
        raise ConfigError(f"data is a {type(data).__name__}; give a folder, or samples with their labels: train(X, y)")
    given = {
        key: str(value) if isinstance(value, Path) else value for key, value in arguments.items() if value is not None
    }
    if twice := given.keys() & settings.keys():
        raise ConfigError(f"{', '.join(sorted(twice))} is given twice, as an argument and among the settings; keep one")
    return {**given, **settings}


def _features_of(
    config: RunConfig,
    prepared: PreparedData,
    samples: Samples | None,
    weights: dict[str, Tensor] | None,
    device: torch.device,
    reporter: Reporter,
) -> Features | None:
    """The features that replace the pixels: vectors that were given, or those of a frozen network."""
    if samples is not None and samples.vectors is not None:
        return Features(samples.vectors, {}, prepared.digest)
    if not config.frozen:
        return None
    assert weights is not None
    if config.threads:
        torch.set_num_threads(config.threads)
    return open_features(config, prepared, weights, device, reporter)


def _settings_for(samples: Samples, preset: str | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a training on samples that were given from Python."""
    own: dict[str, Any] = {"data": SOURCE, "source": SOURCE}
    if samples.vectors is not None:
        if preset not in (None, "features") or not settings.get("frozen", True):
            raise ConfigError("X are feature vectors, so only a head is trained; leave preset and frozen out")
        own |= {"preset": "features", "backbone": f"{VECTORS}{samples.vectors.shape[1]}", "thumbnails": False}
    if twice := own.keys() & settings.keys() - {"thumbnails"}:
        raise ConfigError(f"{', '.join(sorted(twice))} is given among the settings, but follows from X; leave it out")
    return {**settings, **own}


def _settings_of(folder: Path, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that a training with labels from a review takes over from the run before.

    A preset that is chosen now brings its own settings; the data stays.
    """
    if not (folder / "config.toml").is_file():
        known = read_review(folder)
        return {key: known[key] for key in ("data", "source") if known[key] is not None}
    values = _flat(Run(folder).settings, chosen)
    return {key: value for key, value in values.items() if key in OF_THE_DATA} if "preset" in chosen else values


def _reporter_of(reporter: Reporter | None, verbose: bool, ranks: Ranks) -> Reporter:
    """The reporter; with several processes only the first one reports."""
    if reporter is None and verbose:
        reporter = choose_reporter(quiet=False)
    return reporter if reporter is not None and ranks.first else Reporter()


def _open_folder(
    out: str | Path | None, chosen: Mapping[str, Any], resume: bool, stack: ExitStack
) -> tuple[Path, RunConfig, Run | None]:
    """Lock the run folder until the stack closes, then read it; return the run to continue, if any."""
    config = None if resume else configure(chosen)
    folder = Path(out) if out is not None else _hold_new_folder(config or configure(chosen), stack)
    if out is not None:
        stack.enter_context(held(folder))
    if config is None and (folder / "config.toml").is_file():
        run = Run(folder)
        config = configure({**_flat(run.settings, chosen), **chosen})
        run.check_config(config, _completed(run.settings))
        return folder, config, run if run.begun else None
    require_unused(folder)
    return folder, config or configure(chosen), None


def _first_weights(config: RunConfig, run: Run | None) -> dict[str, Tensor] | None:
    """The initial weights of the encoder, or None for random ones; a resumed run has them in its checkpoint."""
    if (run is not None and run.has_checkpoint and not config.frozen) or config.backbone.startswith(VECTORS):
        return None
    return read_weights(config.backbone, config.pretrained, config.weights)


def _require_same_weights(run: Run, digest: str) -> None:
    """Refuse to continue a run with another frozen network."""
    if run.environment.get("weights_digest", digest) != digest:
        raise RunError(
            f"{run.folder}: begun with other weights of {run.settings.backbone}; restore them, or give another --out"
        )


def _hold_new_folder(config: RunConfig, stack: ExitStack) -> Path:
    """Make and lock a new folder under runs/, named after data, method and seed."""
    name = f"{Path(config.data).name or 'images'}-{config.method}-{config.seed}"
    for count in itertools.count(1):
        folder = Path("runs") / (name if count == 1 else f"{name}-{count}")
        with suppress(FileExistsError):
            stack.enter_context(held(folder, new=True))
            break
    return folder


def _completed(config: RunConfig) -> RunConfig:
    """The settings of a run folder. The method's settings that an older version did not have get their defaults."""
    known = METHODS[config.method].settings().model_dump() if config.method in METHODS else {}
    return config.model_copy(update={"method_settings": known | config.method_settings})


def _flat(config: RunConfig, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """A run's settings as choices, without the method's own settings if the method changes."""
    values = config.model_dump(exclude_none=True)
    own = values.pop("method_settings")
    return values | (own if chosen.get("method", config.method) == config.method else {})
