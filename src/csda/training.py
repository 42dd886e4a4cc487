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

from csda.config import PICTURES, PRESETS, RunConfig, resolve
from csda.cross_fitting import cross_fit, predict_held_out
from csda.data import recognise
from csda.data.arrays import SOURCE, Samples, take_samples
from csda.data.prepared import prepare_data, require_unlabeled
from csda.data.reviewed import read_review
from csda.data.splits import Budget
from csda.distributed import Ranks, joined_ranks
from csda.engine import choose_device, using
from csda.errors import ConfigError, RunError
from csda.features import Features, open_features
from csda.methods import METHODS, Entry
from csda.methods.base import StepOutput
from csda.models.backbones import VECTORS, check_encoder
from csda.models.weights import PUBLISHED, find_weights, read_weights
from csda.progress import EventWriter, Reporter, choose_reporter
from csda.runs import Run, held, require_unused
from csda.trainer import Trainer

KINDS = {
    "ham10000": "skin",
    "chexpert": "chest",
    "nih_chestxray14": "chest",
    "kvasir_capsule": "endoscopy",
}
"""The kind of pictures of each source."""


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
    if samples is not None:
        settings = _settings_for(samples, preset, settings or {})
        data, preset = None, None if samples.vectors is not None else preset
    elif not isinstance(data, str | Path | None):
        raise ConfigError(f"data is a {type(data).__name__}; give a folder, or samples with their labels: train(X, y)")
    choices = {"data": data, "method": method, "preset": preset, "labels": labels, "seed": seed}
    chosen = {
        key: str(value) if isinstance(value, Path) else value for key, value in choices.items() if value is not None
    }
    settings = settings or {}
    if twice := chosen.keys() & settings.keys():
        raise ConfigError(f"{', '.join(sorted(twice))} is given twice, as an argument and among the settings; keep one")
    chosen |= settings
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
        if lacks_weights(chosen) and (remark := _remark_on_weights(chosen, config)):
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
            features = None
            if samples is not None and samples.vectors is not None:
                features = Features(samples.vectors, {}, prepared.digest)
            elif config.frozen:
                assert weights is not None
                if config.threads:
                    torch.set_num_threads(config.threads)
                features = open_features(config, prepared, weights, device, reporter)
                if run is not None:
                    _require_same_weights(run, features.digest)
            trainer = Trainer(config, prepared, ranks, weights, features)
            run = run or ranks.from_first(lambda: trainer.create_run(folder))
            if not run.has_checkpoint:
                cross_fit(trainer, weights, update, reporter)
            return fit(trainer, run, reporter)


def configure(chosen: Mapping[str, Any]) -> RunConfig:
    """Make the complete configuration of a run on this machine.

    Unless chosen, the preset is `strong` with a GPU and `features` without one, the precision is bf16 on a GPU, and the
    drawn set keeps 150 labels. With the preset `strong`, the augmentation depends on the kind of pictures, and a CPU
    gets a shorter schedule on smaller images. If the pretrained weights of these presets are not installed and were not
    requested, a GPU starts from random weights and a CPU uses the preset `quick`.
    """
    preset = str(chosen.get("preset", _default_preset(chosen)))
    name = str(chosen.get("method", PRESETS[preset].method if preset in PRESETS else "csda"))
    if name not in METHODS:
        raise ConfigError(f"method = {name!r} is unknown; choose one of {', '.join(METHODS)}")
    entry = METHODS[name]
    if not entry.steps:  # in a grid of runs it may be given a number of labels, which it ignores
        chosen = {key: value for key, value in chosen.items() if key not in ("epochs", "steps_per_epoch")}
    basis: dict[str, Any] = {"preset": preset, "method": name}
    if (
        torch.cuda.is_available()
        and chosen.get("device") != "cpu"
        and torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        basis["precision"] = "bf16"
    if chosen.get("data", "synthetic") == "synthetic":
        basis["labels"] = "150"
    if preset == "strong":
        if not chosen.get("frozen", entry.defaults.get("frozen", False)):
            basis |= _strong_basis(chosen)
        if (lacks_weights(chosen) or _has_no_weights(chosen)) and "pretrained" not in entry.defaults:
            basis["pretrained"] = False
    config = resolve(basis | dict(chosen), entry.settings, entry.defaults)
    for key, budget in (("labels", config.labels), ("val", config.val)):
        try:
            if budget is not None and (key, budget) != ("val", "0"):
                Budget.parse(budget)
        except ConfigError as error:
            raise ConfigError(f"{key} = {budget!r}: {error}") from None
    if config.val == "0" and config.choose == "best":
        raise ConfigError("val = 0 leaves no image to choose the best epoch by; give choose=last, or another val")
    if config.frozen:
        _require_head(config, entry)
    elif alone := [name for name in ("feature_stages", "probe_share") if chosen.get(name)]:
        raise ConfigError(f"{alone[0]} needs frozen = true: it is of frozen features alone")
    if config.adjust and config.prior_correction != "none":
        raise ConfigError(
            "adjust = true already removes the class frequencies from predictions; leave prior_correction out"
        )
    own = config.method_settings
    observes = any(own.get(part, "none") != "none" for part in ("align", "queue"))
    if config.mixup_alpha and own.get("labeled_from") == "student" and observes:
        raise ConfigError(
            "with mixup_alpha the student has no unmixed labeled image to compute λ^x from; "
            "choose labeled_from=teacher or labeled_from=start"
        )
    if entry.uses_unlabeled and config.warm_up_epochs >= config.epochs:
        raise ConfigError(
            f"warm_up_epochs = {config.warm_up_epochs} on labels alone leave none of epochs = {config.epochs} "
            f"to {name}; give fewer of the first, or more of the second"
        )
    return config


def _default_preset(chosen: Mapping[str, Any]) -> str:
    """The default preset for images of the user on this machine; drawn images have other defaults."""
    if chosen.get("data", "synthetic") == "synthetic":
        return "default" if torch.cuda.is_available() else "quick"
    if torch.cuda.is_available() and chosen.get("device") != "cpu":
        return "strong"
    entry = METHODS.get(str(chosen.get("method")))
    on_features = entry is None or entry.on_features
    frozen = chosen.get("frozen", True) and chosen.get("pretrained", True) and not _has_no_weights(chosen)
    return "features" if on_features and frozen and not lacks_weights(chosen) else "quick"


def _has_no_weights(chosen: Mapping[str, Any]) -> bool:
    """Whether the chosen network has no published weights and no weights were given."""
    backbone = str(chosen.get("backbone", PRESETS["features"].run["backbone"]))
    return backbone not in PUBLISHED and not backbone.startswith("timm:") and "weights" not in chosen


def lacks_weights(chosen: Mapping[str, Any]) -> bool:
    """Whether the presets' pretrained weights are not installed, and no weights were requested."""
    if chosen.keys() & {"backbone", "pretrained", "weights", "frozen"}:
        return False
    try:
        find_weights(PRESETS["features"].run["backbone"])
    except ConfigError:
        return True
    return False


def _remark_on_weights(chosen: Mapping[str, Any], config: RunConfig) -> str | None:
    """Explain what a training does without the preset's pretrained weights, and how to get them."""
    if config.preset == "strong":
        instead = "the network begins with random weights"
    elif "preset" not in chosen and config.preset == "quick" and config.data != "synthetic":
        instead = "this trains a small network, the preset quick"
    else:
        return None
    backbone = PRESETS["features"].run["backbone"]
    return f"Pretrained weights are not installed, so {instead}; better: {PUBLISHED[backbone].way}"


def _require_head(config: RunConfig, entry: Entry) -> None:
    """Refuse settings that a head on frozen features cannot have."""
    if not config.pretrained and config.weights is None:
        raise ConfigError("frozen = true needs trained weights; give pretrained=true, or weights=FILE")
    if not entry.on_features:
        raise ConfigError(f"method = {config.method!r} needs images, not their features; give frozen=false")
    if config.test_flips:
        raise ConfigError("test_flips mirrors images, but frozen = true has only their features; leave one out")


def _strong_basis(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the preset `strong` that depend on the source of the images and on the device."""
    data, source = str(chosen.get("data", "synthetic")), chosen.get("source")
    pictures = chosen.get("pictures") or KINDS.get(
        str(source or recognise(None if data == "synthetic" else Path(data))), "generic"
    )
    if pictures not in PICTURES:
        raise ConfigError(f"pictures = {pictures!r} is unknown; choose one of {', '.join(PICTURES)}")
    basis = {"pictures": pictures, **PICTURES[pictures]}
    if chosen.get("device") == "cpu" or not torch.cuda.is_available():
        basis |= {"image_size": 128, "epochs": 12, "steps_per_epoch": 25}
    return basis


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
    config, parts, model, method, engine = trainer.config, trainer.parts, trainer.model, trainer.method, trainer.engine
    first, uses_unlabeled = trainer.ranks.first, METHODS[trainer.config.method].uses_unlabeled
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
            if epoch == config.warm_up_epochs:
                method.begin(model, parts.labeled, parts.unlabeled)
            elif not warming_up:
                method.end_epoch(model, parts.labeled, parts.unlabeled)
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
    held_out = predict_held_out(trainer, update, reporter)
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
        run.check_config(config)
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


def _flat(config: RunConfig, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """A run's settings as choices, without the method's own settings if the method changes."""
    values = config.model_dump(exclude_none=True)
    own = values.pop("method_settings")
    return values | (own if chosen.get("method", config.method) == config.method else {})
