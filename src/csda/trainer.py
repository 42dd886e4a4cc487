"""The state of a training: data on the device, model, method and optimiser."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from csda import metrics
from csda.calibration import Calibration
from csda.config import RunConfig
from csda.data.augment import Augmentation, FeatureViews
from csda.data.loader import open_parts
from csda.data.prepared import PreparedData
from csda.data.sampling import bilateral_draws, shuffled_passes
from csda.data.splits import label_text, list_split
from csda.data.store import available_cores
from csda.distributed import Ranks
from csda.engine import (
    Engine,
    Figures,
    choose_device,
    make_optimizer,
    name_device,
    restore_optimizer,
    set_learning_rate,
    streaming,
)
from csda.environment import describe_environment
from csda.errors import DataError, RunError
from csda.evaluate import Conclusions, Evaluator, Floats, score
from csda.features import Features
from csda.losses import ramp
from csda.methods import METHODS, build_method
from csda.methods.base import Recipe, StepOutput, Task
from csda.models.averaged_views import ViewChoice
from csda.models.backbones import build_encoder
from csda.models.encoder import Encoder
from csda.models.feature_encoder import Standardize, build_body, feature_encoder, fold
from csda.models.two_stream import TwoStream
from csda.probe import Balance, Probe, fit_probe
from csda.progress import format_duration
from csda.runs import Run
from csda.thumbnails import illustrate

_INITIAL_WEIGHTS = threading.Lock()
"""Held while weights are initialised, because layers use torch's global generator, which threads share."""


@dataclass(slots=True)
class History:
    """Figures and arrays of the epochs so far, and the best epoch on validation."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    arrays: list[dict[str, npt.NDArray[Any]]] = field(default_factory=list)
    best: int = 0

    def add(self, row: dict[str, Any], arrays: dict[str, npt.NDArray[Any]], choose: Literal["best", "last"]) -> bool:
        """Add an epoch; True if it is now the one to predict with, the best on validation or the last."""
        self.rows.append(row)
        self.arrays.append(arrays)
        better = choose == "last" or self.best == 0 or row["val_auc"] > self.rows[self.best - 1]["val_auc"]
        self.best = len(self.rows) if better else self.best
        return better


class Trainer:
    """Does what happens between the steps of a training. With several `ranks` each has a trainer; all do the same, and
    only the first writes files. The encoder begins with `weights`, or with random weights if None. With `features` of a
    frozen network these replace the pixels, and the head begins as logistic regression on them.
    """

    def __init__(
        self,
        config: RunConfig,
        data: PreparedData,
        ranks: Ranks | None = None,
        weights: Mapping[str, Tensor] | None = None,
        features: Features | None = None,
    ) -> None:
        self.config, self.data, self.ranks, self.features = config, data, ranks or Ranks(), features
        dataset, split = data.dataset, data.split
        if config.threads:
            torch.set_num_threads(min(config.threads, available_cores()))
        self.device = choose_device(config.device, self.ranks.local_rank)
        if self.device.type == "cuda" and not self.ranks.alone:
            torch.cuda.set_device(self.device)
        self.generator = torch.Generator(self.device)
        self._open_engine()
        if features is None:
            augmentation = self.engine.views(
                Augmentation(
                    config.rotation,
                    config.translation,
                    config.flip,
                    config.zoom,
                    config.enlarge,
                    config.border,
                    config.color,
                )
            )
            self.parts = open_parts(
                dataset, data.pixels, split, augmentation, self.generator, config.resident_share, streaming()
            )
        else:
            self.parts = open_parts(dataset, features.array, split, FeatureViews(), self.generator)
        self.evaluator = Evaluator(
            data,
            config.eval_batch_size,
            prior_correction=config.prior_correction == "labeled",
            views=ViewChoice(config.test_flips, config.test_middle),
        )
        self._check_parts()
        channels, classes = data.pixels.shape[-1], len(dataset.classes)
        with _INITIAL_WEIGHTS:
            torch.default_generator.manual_seed(_seed(config.seed, 0))
            encoder = self._build_encoder(weights)
            self.task = Task(
                classes,
                dataset.multi_label,
                self.evaluator.class_counts,
                num_labeled=len(split.labeled),
                num_unlabeled=len(split.unlabeled),
                image_size=config.image_size,
                channels=channels,
                width=encoder.width,
                stages=len(encoder),
                streamed=self.parts.unlabeled.streamed,
                frozen=config.frozen,
            )
            self.method = build_method(config.method, self.task, config.method_settings).to(self.device)
            self.method.recipe = Recipe(config.mixup_alpha, config.adjust)
            self.evaluator.balanced = self.method.balance != "none"
            model = TwoStream(encoder, classes, teacher_trains=self.method.teacher_trains, rectified=features is None)
        if not self.ranks.alone:
            model.share(self.ranks)
        # Pixels are stored channels last, and convolutions are faster if activations are, too.
        self.model = model.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.control: dict[str, dict[str, float]] = {}
        self.penalty: Tensor | None = None
        self.head_seconds = 0.0
        if features is not None:
            self._begin_head()
        self.averaged: TwoStream | None = deepcopy(self.model).requires_grad_(False) if config.average else None
        self._open_optimizer()
        self._best: dict[str, Tensor] = {}
        self._best_is_written = False

    def _build_encoder(self, weights: Mapping[str, Tensor] | None) -> Encoder:
        config = self.config
        if self.features is not None:
            return feature_encoder(*self._moments(), config.dropout)
        encoder = build_encoder(config.backbone, config.image_size, self.data.pixels.shape[-1], config.dropout)
        if weights is not None:
            encoder.load_state_dict(weights)
        return encoder

    def _moments(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation [W] of each feature over all training images, labeled and unlabeled."""
        features = torch.cat([self.parts.labeled.pixels, self.parts.unlabeled.pixels])
        variance, mean = torch.var_mean(features, dim=0, correction=0)
        return mean.cpu(), variance.sqrt().cpu()

    def _begin_head(self) -> None:
        """Start the head as logistic regression on the labeled features.

        Like the loss, it includes or excludes class frequencies. Its regularisation becomes a penalty in every step.
        The test figures of the linear probe are stored as a control.
        """
        layer, begun = self.model.head[-1], time.perf_counter()

        def begin(balance: Balance) -> Tensor:
            probe = self.ranks.from_first(lambda: self._fit_probe(balance))
            for parameter, values in ((layer.weight, probe.weight), (layer.bias, probe.bias)):
                parameter.data.copy_(torch.from_numpy(values))
            return torch.from_numpy(probe.penalty).float().to(self.device)

        penalty = begin("weights")
        self._probe = layer.weight.detach().clone(), layer.bias.detach().clone()
        figures = score(self.evaluator.predict(self.model, self.parts.test), self.evaluator.test_labels, "test")
        self.control["linear_probe"] = {name: figures[f"test_{name}"] for name in ("auc", "mca")}
        self.penalty = penalty if self.method.balance == "weights" else begin(self.method.balance)
        self.head_seconds = time.perf_counter() - begun

    def _fit_probe(self, balance: Balance) -> Probe:
        labeled, split = self.parts.labeled, self.data.split
        standardize = self.model.student[0]
        grouped = not split.by_image and any(record.group is not None for record in split.labeled)
        return fit_probe(
            standardize(labeled.pixels).cpu().numpy(),
            self.data.encode(split.labeled),
            self.task.num_classes,
            [record.group for record in split.labeled] if grouped else None,
            balance,
            self.config.seed,
        )

    def _open_engine(self) -> None:
        config = self.config
        self.engine = Engine(
            self.device,
            # In float32: a head is little work, and the linear probe is computed exactly, too.
            "float32" if config.frozen else config.precision,
            generator=self.generator,
            capture=config.cuda_graph,
            kernels=config.kernels,
            ranks=self.ranks,
        )

    def _check_parts(self) -> None:
        name, labels = self.config.data, self.evaluator.val_labels
        if not len(labels):
            if self.config.choose == "best":
                raise DataError(
                    f"{name}: the split has no validation image to choose the best epoch by; name some, or give "
                    "choose=last"
                )
        elif self.config.choose == "best" and np.isnan(
            metrics.auc(np.zeros((len(labels), len(self.data.dataset.classes))), labels)
        ):
            raise DataError(
                f"{name}: the validation images are all of one class, so there is no AUC to choose the best epoch by; "
                "give a split with several classes there"
            )

    def _open_optimizer(self) -> None:
        self.model.draw_from(self.generator)
        self.method.generator = self.generator
        config = self.config
        trained = [value for value in (*self.model.parameters(), *self.method.parameters()) if value.requires_grad]
        self.optimizer = make_optimizer(
            config.optimizer or self.method.optimizer,
            trained,
            self.device,
            weight_decay=config.weight_decay,
            head=[] if config.head_lr is None else list(self.model.head.parameters()),
            head_scale=1.0 if config.head_lr is None else config.head_lr / config.lr,
        )
        self.engine.prepare(self.model, self.method, self.optimizer)
        self.figures = Figures()

    # Steps

    def begin_epoch(self, epoch: int) -> float:
        """Seed the epoch, so that it is the same after a resume, and set its learning rate."""
        seed = _seed(self.config.seed, epoch)
        self.parts.seed(seed)
        self._order = torch.Generator().manual_seed(seed)
        self.model.train()
        learning_rate = self._learning_rate(epoch, 0)
        set_learning_rate(self.optimizer, learning_rate)
        return learning_rate

    def _learning_rate(self, epoch: int, step: int) -> float:
        """The learning rate of a step, counted from 0 in its epoch.

        It decays at some epochs, or every step along a cosine.
        """
        config = self.config
        if config.schedule == "steps":
            return config.lr * config.lr_decay ** sum(
                epoch - 1 >= share * config.epochs for share in config.lr_decay_at
            )
        done, steps = (epoch - 1) * config.steps_per_epoch + step, config.epochs * config.steps_per_epoch
        warm_up = min(config.lr_warm_up, steps // 2)
        rising = (done + 1) / warm_up if done < warm_up else 1.0
        return config.lr * rising * (1.0 + math.cos(math.pi * done / steps)) / 2.0

    def sample(self, epoch: int, *, labels_only: bool = False) -> Iterator[tuple[Tensor, ...]]:
        """The inputs of the epoch's steps: indices into the labeled and the unlabeled part, and η of Eq. (19).

        If the unlabeled part is streamed, its pixels come with them. With `labels_only` there are no unlabeled images.
        """
        config, steps = self.config, self.config.steps_per_epoch
        if not METHODS[config.method].steps:
            return iter(())
        fraction = torch.arange(1, steps + 1) / steps if config.ramp == "step" else torch.ones(steps)
        progress = ramp(epoch - 1 + fraction, config.epochs)
        labeled = shuffled_passes(len(self.parts.labeled), config.batch_size, steps, self._order)
        if self.method.sampling == "bilateral":
            labeled = bilateral_draws(labeled, self.parts.labeled.targets.cpu(), progress, self._order)
        pool = self.parts.unlabeled
        seen = 0 if labels_only or not METHODS[config.method].uses_unlabeled else len(pool)
        unlabeled = shuffled_passes(seen, config.unlabeled_batch_size, steps, self._order)
        inputs: list[Iterable[Tensor]] = [table.to(self.device) for table in (labeled, unlabeled, progress)]
        if (pixels := pool.prefetch(unlabeled)) is not None:
            inputs.append(pixels)
        batches = zip(*inputs, strict=True)
        return self._paced(epoch, batches) if config.schedule == "cosine" else batches

    def _paced(self, epoch: int, batches: Iterable[tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, ...]]:
        """Yield the batches, and set the learning rate of each before it is used."""
        for step, batch in enumerate(batches):
            set_learning_rate(self.optimizer, self._learning_rate(epoch, step))
            yield batch

    def warm_up(
        self, labeled: Tensor, unlabeled: Tensor, progress: Tensor, unlabeled_pixels: Tensor | None = None
    ) -> StepOutput:
        """The loss on labels alone, with the arguments of `step`."""
        return self._penalized(self.method.warm_up(self.model, self.parts.labeled.batch(labeled)))

    def step(
        self, labeled: Tensor, unlabeled: Tensor, progress: Tensor, unlabeled_pixels: Tensor | None = None
    ) -> StepOutput:
        """The method's loss on the images at these positions."""
        parts = self.parts
        output = self.method.step(
            self.model,
            parts.labeled.batch(labeled),
            parts.unlabeled.batch(unlabeled, unlabeled_pixels),
            parts.unlabeled,
            progress,
        )
        return self._penalized(output)

    def _penalized(self, output: StepOutput) -> StepOutput:
        """Add the penalty of a head on frozen features: ½ λ ‖w‖² for each row w."""
        if self.penalty is None:
            return output
        lengths = self.model.head[-1].weight.square().sum(dim=1)
        return StepOutput(output.loss + 0.5 * (self.penalty * lengths).sum(), output.logs)

    def follow(self) -> None:
        """Update the average of the weights, if there is one."""
        if self.averaged is not None:
            self.averaged.follow(self.model, self.config.average)

    @property
    def predicting(self) -> TwoStream:
        """The model that predicts.

        Its weights are averaged if set, and a head on frozen features is mixed with the linear probe.
        """
        predicting: TwoStream = self.model if self.averaged is None else self.averaged
        if self.features is None or not self.config.probe_share:
            return predicting
        mixed = deepcopy(predicting)
        for parameter, values in zip(mixed.head[-1].parameters(), self._probe, strict=True):
            parameter.data.lerp_(values, self.config.probe_share)
        return mixed

    # Between epochs

    def end_epoch(self, epoch: int) -> None:
        """After the steps: the method begins after the labels-only epochs, and ends each later one."""
        if epoch == 1 and self.averaged is not None:
            self.averaged.follow(self.model, 0.0)  # as a copy, because the last layer was random before
        warm_up_epochs, parts = self.config.warm_up_epochs, self.parts
        with self.engine.arithmetic():
            if epoch == warm_up_epochs:
                self.method.begin(self.model, parts.labeled, parts.unlabeled)
            elif epoch > warm_up_epochs:
                self.method.end_epoch(self.model, parts.labeled, parts.unlabeled)

    def evaluate(self, *, guesses: bool) -> tuple[dict[str, float], dict[str, Floats]]:
        """Figures and arrays of this epoch, with figures on pseudo-labels if there are any."""
        pseudo_labels = self.method.pseudo_labels if guesses else None
        figures, arrays = self.evaluator.evaluate(self.predicting, self.parts, pseudo_labels, guessing=self.model)
        if guesses:
            # Copies, because on a CPU an array would share the memory of a buffer that the next step changes.
            arrays |= {name: value.float().cpu().numpy().copy() for name, value in self.method.history().items()}
        return figures, arrays

    def conclude(
        self, history: History, held_out: tuple[npt.NDArray[Any], npt.NDArray[Any]] | None = None
    ) -> Conclusions:
        """The final results of the run, from the weights of its best epoch.

        Calibration is fitted to predictions on validation and on `held_out` images, with their labels.
        """
        self.model.load_state_dict(self._best, strict=False)
        unlabeled_probs = self.evaluator.predict(self.model, self.parts.unlabeled)
        if not np.isfinite(unlabeled_probs).all():
            raise RunError(f"predictions on unlabeled images are not finite; give a lower lr than {self.config.lr}")
        arrays = history.arrays[history.best - 1]
        conclusions = self.evaluator.conclude(
            history.rows, history.best, arrays, unlabeled_probs, self.control, held_out
        )
        if not (self.config.thumbnails and self.ranks.first):
            return conclusions
        thumbnails = illustrate(self.data, self._image_model(), self.device, arrays["test_probs"], unlabeled_probs)
        return replace(conclusions, thumbnails=thumbnails)

    # The run folder

    def create_run(self, folder: Path) -> Run:
        dataset, split = self.data.dataset, self.data.split
        rows = list_split(split, dataset.classes)
        truth = {image: label_text(label, dataset.classes) for image, label in split.truth.items()}
        return Run.create(folder, self.config, self._environment(), rows, truth)

    def restore(self, run: Run) -> History:
        """Load the checkpoint, if there is one, and return the epochs so far."""
        state, rows, arrays = self.ranks.from_first(lambda: _read_progress(run))
        if state is None:
            return History()
        self.model.load_state_dict(state["model"])
        if self.averaged is not None:
            self.averaged.load_state_dict(state["averaged"], strict=False)
        self.method.load_state_dict({**self.method.state_dict(), **state["method"]})
        self.method.resume(self.parts.unlabeled)
        restore_optimizer(self.optimizer, state["optimizer"])
        # The file of the best model may be newer than the checkpoint.
        self._best = state["best_weights"]
        if self.ranks.first:
            self._write_best(run)
        return History(rows, arrays, state["best"])

    def save(self, run: Run, history: History) -> None:
        """Save the best model and then the checkpoint. It needs no random state, because each epoch seeds itself."""
        if not self.ranks.first:
            return
        if not self._best_is_written:
            self._write_best(run)
        run.save_checkpoint(
            {
                "model": self.model.state_dict(),
                "method": self.method.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "averaged": {} if self.averaged is None else _predicting_state(self.averaged),
                "best_weights": self._best,
                "epoch": len(history.rows),
                "best": history.best,
            }
        )

    def keep_weights(self) -> None:
        """Keep a copy of the weights that predict, the student's and the head's."""
        self._best = {name: value.clone() for name, value in _predicting_state(self.predicting).items()}
        self._best_is_written = False

    def write_calibrated(self, run: Run, calibration: Calibration | None) -> None:
        """Write the best model again, with its calibration, if there is any."""
        self._write_best(run, None if calibration is None else {"calibration": calibration.as_json()})

    def _write_best(self, run: Run, more: Mapping[str, Any] | None = None) -> None:
        model = {
            "classes": self.data.dataset.classes,
            "multi_label": self.task.multi_label,
            "image_size": self.config.image_size,
            "channels": self.task.channels,
            "backbone": self.config.backbone,
            "aspect": self.config.aspect,
            "frozen": self.config.frozen,
            "feature_stages": self.config.feature_stages,
            "feature_views": self.config.feature_views,
            "flips": self.config.test_flips,
            "middle": self.config.test_middle,
            "class_frequencies": self.evaluator.frequencies.tolist() if self.evaluator.prior_correction else None,
            **(more or {}),
        }
        run.write_model(self._whole_model(), {"csda": json.dumps(model, ensure_ascii=False)})
        self._best_is_written = True

    def _whole_model(self) -> dict[str, Tensor]:
        """The model that predicts images.

        For a frozen network it is the body with the head for features that are not standardised.
        """
        if self.features is None:
            return self._best
        names = ("head.1.weight", "head.1.bias")
        standardize = self.model.student[0]
        assert isinstance(standardize, Standardize)
        head = fold(standardize, *(self._best[name] for name in names))
        body = {f"student.{name}": value for name, value in self.features.body.items()}
        return body | dict(zip(names, head, strict=True))

    def _image_model(self) -> TwoStream:
        """The model that predicts images, with the weights of the best epoch."""
        if self.features is None:
            trained: TwoStream = self.model
            return trained
        config = self.config
        encoder = build_body(
            config.backbone,
            config.image_size,
            self.task.channels,
            config.feature_stages,
            views=config.feature_views,
        )
        model = TwoStream(encoder, self.task.num_classes, rectified=False)
        model.load_state_dict(self._whole_model(), strict=False)
        model.to(self.device)
        return model

    def _environment(self) -> dict[str, Any]:
        dataset = self.data.dataset
        frozen = {} if self.features is None else {"weights_digest": self.features.digest}
        return describe_environment() | {
            "torch": torch.__version__,
            "device": str(self.device),
            "device_name": name_device(self.device),
            "threads": torch.get_num_threads(),
            "processes": self.ranks.size,
            "dataset": dataset.name,
            "data_digest": self.data.digest,
            "classes": list(dataset.classes),
            "multi_label": dataset.multi_label,
            "remarks": list(self.data.remarks),
            **frozen,
        }

    # Messages

    def announce(self, run: Run, epochs_done: int) -> str:
        """Print device, size, folder, and on a CPU the estimated time."""
        config, left = self.config, self.config.epochs - epochs_done
        idle = "On the CPU" if torch.cuda.is_available() else "No GPU"
        place = idle if self.device.type == "cpu" else name_device(self.device)
        epochs = f"{left} of {config.epochs} epochs left" if epochs_done else f"{left} epochs"
        images = "features" if config.frozen else f"{config.image_size}×{config.image_size} images"
        size = f"{config.steps_per_epoch} steps on {images}"
        time_needed = f", about {format_duration(left * self._epoch_seconds())}" if self.device.type == "cpu" else ""
        kind = f"; augmented as {config.pictures} images, see --set pictures" if config.pictures else ""
        streamed = f"; streamed from the host: {', '.join(self.parts.streamed)}" if self.parts.streamed else ""
        work = f"{epochs} of {size}{time_needed}{kind}{streamed}"
        if not METHODS[config.method].steps:
            work = "logistic regression on features, fitted in one go"
        return f"{place}: preset {config.preset}, {work}; the run is in {run.folder}"

    def _epoch_seconds(self) -> float:
        """Estimate the mean time of an epoch by a few steps on copies, so that the run does not change."""
        config, parts, rehearsal = self.config, self.parts, copy(self)
        rehearsal.model, rehearsal.method = deepcopy((self.model, self.method))
        rehearsal._open_optimizer()
        rehearsal.begin_epoch(1)
        test = parts.test.first(config.eval_batch_size)
        evaluated = (len(parts.val) + len(parts.test)) / len(test)
        predicting = self._typical_seconds([()] * 3, lambda: self.evaluator.predict(rehearsal.model, test))
        warming_up = self._typical_seconds(rehearsal.sample(1, labels_only=True), rehearsal._learn(rehearsal.warm_up))
        seconds = config.steps_per_epoch * warming_up + evaluated * predicting
        if not METHODS[config.method].uses_unlabeled:
            return seconds
        stepping = self._typical_seconds(rehearsal.sample(1), rehearsal._learn(rehearsal.step))
        more = config.steps_per_epoch * (stepping - warming_up) + len(parts.unlabeled) / len(test) * predicting
        return seconds + more * (config.epochs - config.warm_up_epochs) / config.epochs

    def _typical_seconds(self, inputs: Iterable[tuple[Tensor, ...]], function: Callable[..., object]) -> float:
        """The median time of some calls after the first, which is slower because it allocates memory."""
        durations: list[float] = []
        for given in islice(inputs, 8):
            durations.append(_seconds(function, *given))
            if self.ranks.from_first(lambda: len(durations) > 2 and sum(durations[1:]) > 0.4):
                break
        later = sorted(durations[1:] or durations)
        return later[len(later) // 2] if later else 0.0  # a method that is fitted in one go has no steps

    def _learn(self, compute: Callable[..., StepOutput]) -> Callable[..., None]:
        """A step without the update of the weights, which takes almost no time."""

        def learn(*inputs: Tensor) -> None:
            with self.engine.arithmetic():
                compute(*inputs).loss.backward()

        return learn


def _predicting_state(model: TwoStream) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict().items() if not name.startswith("teacher.")}


def _read_progress(run: Run) -> tuple[Any, list[dict[str, Any]], list[dict[str, npt.NDArray[Any]]]]:
    state = run.load_checkpoint()
    epochs = 0 if state is None else state["epoch"]
    return state, run.metrics[:epochs], [run.epoch_arrays(epoch) for epoch in range(1, epochs + 1)]


def _seed(seed: int, epoch: int) -> int:
    """A seed for each epoch; epoch 0 is for the initial weights."""
    return int(np.random.SeedSequence((seed, epoch)).generate_state(1)[0])


def _seconds(function: Callable[..., object], *arguments: object) -> float:
    started = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - started
