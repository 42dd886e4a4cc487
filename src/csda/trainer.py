"""What a training holds while it runs: data, model, method and optimiser, and what it does between steps."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import csda
from csda import metrics
from csda.config import RunConfig
from csda.data.augment import Augmentation
from csda.data.loader import ImagePool, StreamedPool, open_parts
from csda.data.prepared import PreparedData
from csda.data.records import encode_labels
from csda.data.sampling import bilateral_draws, shuffled_passes
from csda.data.splits import label_text, list_split
from csda.distributed import Ranks
from csda.engine import Engine, choose_device, make_optimizer, name_device, restore_optimizer, set_learning_rate
from csda.errors import DataError
from csda.evaluate import Floats, guess_pool, judge_pseudo_labels, predict_pool, score
from csda.fast.linear import linear_layers
from csda.losses import ramp
from csda.methods import METHODS, build_method
from csda.methods.base import StepOutput, Task
from csda.models.backbones import build_encoder
from csda.models.two_stream import TwoStream
from csda.progress import format_duration
from csda.runs import Run, explained

_INITIAL_WEIGHTS = threading.Lock()
"""Layers draw their first weights from torch's own generator, which all threads share."""


class Trainer:
    """What a training holds while it runs: data on the device, model, method, optimiser.

    Of several `ranks` each has a trainer; all do the same, and the first one writes.
    """

    def __init__(self, config: RunConfig, data: PreparedData, ranks: Ranks | None = None) -> None:
        self.config, self.data, self.ranks = config, data, ranks or Ranks()
        dataset, split = data.dataset, data.split
        self.labeled_labels = data.encode(split.labeled)
        self.val_labels, self.test_labels = data.encode(split.val), data.encode(split.test)
        self.truth = encode_labels(
            [split.truth.get(record.id) for record in split.unlabeled], len(dataset.classes), dataset.multi_label
        )
        if config.threads:
            torch.set_num_threads(config.threads)
        self.device = choose_device(config.device, self.ranks.local_rank)
        if self.device.type == "cuda" and not self.ranks.alone:
            torch.cuda.set_device(self.device)
        self.parts = open_parts(
            dataset,
            data.pixels,
            split,
            self.device,
            Augmentation(config.rotation, config.translation, config.flip),
            config.resident_share,
        )
        classes = len(dataset.classes)
        counts = (
            self.labeled_labels.sum(0) if dataset.multi_label else np.bincount(self.labeled_labels, minlength=classes)
        )
        self.task = Task(
            classes,
            dataset.multi_label,
            tuple(counts.tolist()),
            num_labeled=len(split.labeled),
            num_unlabeled=len(split.unlabeled),
            image_size=config.image_size,
            channels=data.pixels.shape[-1],
            streamed="unlabeled" in self.parts.streamed,
        )
        if np.isnan(metrics.auc(np.zeros((len(self.val_labels), classes)), self.val_labels)):
            raise DataError(
                f"{dataset.name}: the validation images are all of one class, so no AUC can tell the best epoch; "
                "give a split that has others there, too"
            )
        if METHODS[config.method].uses_unlabeled and not split.unlabeled:
            raise DataError(
                f"{dataset.name}: no unlabeled images for method {config.method!r}; "
                "keep only some labels with --labels, or train the method 'baseline'"
            )
        with _INITIAL_WEIGHTS:
            torch.default_generator.manual_seed(_seed(config.seed, 0))
            encoder = build_encoder(config.backbone, config.image_size, self.task.channels, config.dropout)
            self.method = build_method(config.method, self.task, config.method_settings).to(self.device)
            model = TwoStream(encoder, classes, teacher_trains=self.method.teacher_trains)
        if not self.ranks.alone:
            model.share(self.ranks)
        # Pixels lie in memory as rows of colours, and convolutions are faster when activations do, too.
        self.model = model.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._start_engine()
        self._best: dict[str, Tensor] = {}
        self._best_is_written = False

    def _start_engine(self) -> None:
        generator = self.parts.labeled.generator
        self.model.draw_from(generator)
        self.method.generator = generator
        trained = [value for value in (*self.model.parameters(), *self.method.parameters()) if value.requires_grad]
        self.optimizer = make_optimizer(self.method.optimizer, trained, self.device)
        self.engine = Engine(
            self.optimizer,
            self.device,
            self.config.precision,
            generator=generator,
            capture=self.config.cuda_graph,
            own_kernels=self.config.kernels,
            ranks=self.ranks,
            layers=linear_layers(self.model),
        )

    def create_run(self, folder: Path) -> Run:
        dataset, split = self.data.dataset, self.data.split
        rows = list_split(split, dataset.classes)
        truth = {image: label_text(label, dataset.classes) for image, label in split.truth.items()}
        return Run.create(folder, self.config, self._environment(), rows, truth)

    def restore(self, run: Run) -> tuple[list[dict[str, Any]], int]:
        """Take up the checkpoint, if there is one: the epochs' figures so far, and which epoch was best."""
        state, rows = self.ranks.from_first(lambda: (run.load_checkpoint(), run.metrics))
        if state is None:
            return [], 0
        self.model.load_state_dict(state["model"])
        self.method.load_state_dict(state["method"])
        self.method.resume(self.parts.unlabeled)
        restore_optimizer(self.optimizer, state["optimizer"])
        # The file of the best model may be ahead of the checkpoint.
        self._best = state["best_weights"]
        if self.ranks.first:
            self._write_best(run)
        return rows[: state["epoch"]], state["best"]

    def save(self, run: Run, epoch: int, best: int) -> None:
        """The best model and then the checkpoint: all that the next epoch depends on, since each epoch seeds itself."""
        if not self.ranks.first:
            return
        if not self._best_is_written:
            self._write_best(run)
        run.save_checkpoint(
            {
                "model": self.model.state_dict(),
                "method": self.method.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "best_weights": self._best,
                "epoch": epoch,
                "best": best,
            }
        )

    def keep_weights(self) -> None:
        """Remember what predicts, the student and the head."""
        state = self.model.state_dict()
        self._best = {name: value.clone() for name, value in state.items() if not name.startswith("teacher.")}
        self._best_is_written = False

    def _write_best(self, run: Run) -> None:
        run.write_model(self._best, self.description())
        self._best_is_written = True

    def announce(self, run: Run, epochs_done: int) -> str:
        """What is about to happen, where, and how long it takes; the time is told where no GPU makes it short."""
        config, left = self.config, self.config.epochs - epochs_done
        idle = "On the CPU" if torch.cuda.is_available() else "No GPU"
        place = idle if self.device.type == "cpu" else name_device(self.device)
        epochs = f"{left} of {config.epochs} epochs left" if epochs_done else f"{left} epochs"
        size = f"{config.steps_per_epoch} steps on {config.image_size}×{config.image_size} images"
        time_needed = f", about {format_duration(left * self._epoch_seconds())}" if self.device.type == "cpu" else ""
        streamed = f"; streamed from the host: {', '.join(self.parts.streamed)}" if self.parts.streamed else ""
        return f"{place}: preset {config.preset}, {epochs} of {size}{time_needed}{streamed}; the run is in {run.folder}"

    def _epoch_seconds(self) -> float:
        """Measured by a few steps and one prediction of copies, so that nothing of the run changes."""
        rehearsal, size, parts = copy(self), self.config.eval_batch_size, self.parts
        rehearsal.model, rehearsal.method = deepcopy((self.model, self.method))
        rehearsal._start_engine()
        rehearsal.begin_epoch(1)
        durations = []
        for inputs in islice(rehearsal.sample(1), 8):
            durations.append(_seconds(rehearsal.engine.step, rehearsal.step, *inputs))
            if self.ranks.from_first(lambda: sum(durations) > 0.5):
                break
        val = parts.val.first(size)
        evaluated = (len(parts.val) + len(parts.test) + len(parts.unlabeled)) / len(val)
        return self.config.steps_per_epoch * min(durations) + evaluated * _seconds(rehearsal._predict, val)

    def begin_epoch(self, epoch: int) -> float:
        """Seed the epoch, so that it is the same after a resume, and set its learning rate."""
        seed = _seed(self.config.seed, epoch)
        self.parts.seed(seed)
        self._order = torch.Generator().manual_seed(seed)
        self.model.train()
        decays = sum(epoch - 1 >= share * self.config.epochs for share in self.config.lr_decay_at)
        learning_rate = self.config.lr * self.config.lr_decay**decays
        set_learning_rate(self.optimizer, learning_rate)
        return learning_rate

    def sample(self, epoch: int, *, labels_only: bool = False) -> Iterator[tuple[Tensor, ...]]:
        """The epoch's inputs: positions in the labeled and in the unlabeled part, and η of Eq. (19).

        Where the unlabeled part is streamed its pixels come with them. With `labels_only` there are none of it.
        """
        config, steps = self.config, self.config.steps_per_epoch
        fraction = torch.arange(1, steps + 1) / steps if config.ramp == "step" else torch.ones(steps)
        progress = ramp(epoch - 1 + fraction, config.epochs)
        labeled = shuffled_passes(len(self.parts.labeled), config.batch_size, steps, self._order)
        if self.method.sampling == "bilateral":
            labeled = bilateral_draws(labeled, torch.from_numpy(self.labeled_labels), progress, self._order)
        pool = self.parts.unlabeled
        seen = 0 if labels_only or not METHODS[config.method].uses_unlabeled else len(pool)
        unlabeled = shuffled_passes(seen, config.unlabeled_batch_size, steps, self._order)
        inputs: list[Iterable[Tensor]] = [table.to(self.device) for table in (labeled, unlabeled, progress)]
        if isinstance(pool, StreamedPool):
            inputs.append(pool.host.stream(unlabeled))
        return zip(*inputs, strict=True)

    def warm_up(
        self, labeled: Tensor, unlabeled: Tensor, progress: Tensor, unlabeled_pixels: Tensor | None = None
    ) -> StepOutput:
        """A step on labels alone, in the shape of all steps."""
        return self.method.warm_up(self.model, self.parts.labeled.batch(labeled))

    def step(
        self, labeled: Tensor, unlabeled: Tensor, progress: Tensor, unlabeled_pixels: Tensor | None = None
    ) -> StepOutput:
        """A step of the method on the images at these positions."""
        parts = self.parts
        return self.method.step(
            self.model,
            parts.labeled.batch(labeled),
            parts.unlabeled.batch(unlabeled, unlabeled_pixels),
            parts.unlabeled,
            progress,
        )

    def evaluate(self, *, guesses: bool) -> tuple[dict[str, float], dict[str, Floats]]:
        """Figures and arrays of this epoch; the pseudo-labels are judged once there are any."""
        size, parts = self.config.eval_batch_size, self.parts
        arrays = {"val_probs": self._predict(parts.val), "test_probs": self._predict(parts.test)}
        figures = score(arrays["val_probs"], self.val_labels, "val") | score(
            arrays["test_probs"], self.test_labels, "test"
        )
        # Of several labels an image there is nothing to judge by but the truth.
        judgeable = not self.task.multi_label or (self.truth >= 0).any()
        if guesses and len(parts.unlabeled) and judgeable:
            raw, aligned = guess_pool(self.model, parts.unlabeled, size, self.method.pseudo_labels)
            judged, further = judge_pseudo_labels(raw, aligned, self.truth)
            figures, arrays = figures | judged, arrays | further
        if guesses:
            arrays |= {name: value.float().cpu().numpy() for name, value in self.method.history().items()}
        return figures, arrays

    def description(self) -> dict[str, str]:
        """What is needed beside the weights to predict, kept in the file with them."""
        model = {
            "classes": self.data.dataset.classes,
            "multi_label": self.task.multi_label,
            "image_size": self.config.image_size,
            "channels": self.data.pixels.shape[-1],
            "backbone": self.config.backbone,
            "class_frequencies": self._frequencies().tolist() if self.config.prior_correction == "labeled" else None,
        }
        return {"csda": json.dumps(model, ensure_ascii=False)}

    def conclusions(
        self, run: Run, rows: Sequence[Mapping[str, Any]], best: int
    ) -> tuple[list[list[str]], list[list[str]], dict[str, Any]]:
        """Predictions, pseudo-labels and the result, all at the epoch of best validation AUC."""
        dataset, split = self.data.dataset, self.data.split
        arrays = self.ranks.from_first(lambda: run.epoch_arrays(best))
        predictions = [
            [record.id, part, label_text(record.label, dataset.classes), self._choice(probs), *_digits(probs)]
            for part, records in (("val", split.val), ("test", split.test))
            for record, probs in zip(records, arrays[f"{part}_probs"], strict=True)
        ]
        self.model.load_state_dict(self._best, strict=False)
        unlabeled = self._predict(self.parts.unlabeled) if split.unlabeled else ()
        pseudo_labels = [
            [record.id, self._choice(probs), *_digits(probs[[probs.argmax()]]), *_digits(probs)]
            for record, probs in zip(split.unlabeled, unlabeled, strict=True)
        ]
        last = rows[-20:]
        result = {
            "best_epoch": best,
            **{name: rows[best - 1].get(f"test_{name}") for name in ("auc", "mca")},
            **{f"{name}_last20": _mean([row.get(f"test_{name}") for row in last]) for name in ("auc", "mca")},
            "seconds": sum(row["seconds"] for row in rows),
        }
        divided = self.config.prior_correction == "labeled"
        corrected = arrays["test_probs"] if divided else self._corrected(arrays["test_probs"])
        result["auc_prior"] = metrics.auc(corrected, self.test_labels)
        result["mca_prior"] = metrics.mca(corrected, self.test_labels)
        return predictions, pseudo_labels, result

    def _predict(self, pool: ImagePool) -> Floats:
        probs = predict_pool(self.model, pool, self.config.eval_batch_size, multi_label=self.task.multi_label)
        if self.config.prior_correction == "labeled":
            probs = self._corrected(probs).astype(np.float32)
        return probs

    def _corrected(self, probs: Floats) -> metrics.Floats:
        return metrics.prior_corrected(probs, self._frequencies(), multi_label=self.task.multi_label)

    def _choice(self, probs: Floats) -> str:
        label = tuple(np.flatnonzero(probs >= 0.5).tolist()) if self.task.multi_label else int(probs.argmax())
        return label_text(label, self.data.dataset.classes)

    def _frequencies(self) -> Floats:
        return np.array(self.task.class_counts, dtype=np.float32) / np.float32(self.task.num_labeled)

    def _environment(self) -> dict[str, Any]:
        dataset = self.data.dataset
        return {
            "csda": csda.__version__,
            "commit": source_commit(),
            "command": shlex.join(["csda", *sys.argv[1:]]),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "platform": platform.platform(),
            "device": str(self.device),
            "device_name": name_device(self.device),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "processes": self.ranks.size,
            "dataset": dataset.name,
            "data_digest": self.data.digest,
            "classes": list(dataset.classes),
            "multi_label": dataset.multi_label,
            "remarks": list(self.data.remarks),
        }


class EventWriter:
    """TensorBoard's event files beside the run's own; a resumed run hides the epochs that it computes again."""

    def __init__(self, folder: Path, epochs_done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder = folder / "tensorboard"
        with explained(self._folder):
            self._writer = SummaryWriter(str(self._folder), purge_step=epochs_done + 1)

    def write(self, row: Mapping[str, Any]) -> None:
        with explained(self._folder):
            for name, value in row.items():
                if isinstance(value, float) and np.isfinite(value):
                    self._writer.add_scalar(name.replace("_", "/", 1), value, row["epoch"])
            self._writer.flush()

    def close(self) -> None:
        with explained(self._folder):
            self._writer.close()


def _seed(seed: int, epoch: int) -> int:
    """A seed of its own for each epoch; epoch 0 stands for the weights."""
    return int(np.random.SeedSequence((seed, epoch)).generate_state(1)[0])


def _digits(probs: Floats) -> list[str]:
    """Nine significant digits give a float32 back exactly."""
    return [f"{value:.9g}" for value in probs]


def _mean(values: Sequence[float | None]) -> float | None:
    """Of the figures that are defined; one that is not is NaN, or None once it has been read from a file."""
    known = [value for value in values if value is not None and not np.isnan(value)]
    return sum(known) / len(known) if known else None


def source_commit() -> str | None:
    """The commit of a source checkout that the package runs from, marked where the package has been changed since; what
    CSDA_COMMIT says where there is no git."""
    here = Path(__file__).resolve().parent
    try:
        top, _, commit = _git(here, "rev-parse", "--show-toplevel", "HEAD").partition("\n")
        # Installed packages may lie inside somebody else's checkout.
        if commit and Path(top).resolve() == here.parent.parent:
            return f"{commit}+changed" if _git(here, "--no-optional-locks", "status", "--porcelain", ".") else commit
    except OSError:
        pass
    return os.environ.get("CSDA_COMMIT")


def _git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=False).stdout.strip()


def _seconds(function: Callable[..., object], *arguments: object) -> float:
    started = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - started
