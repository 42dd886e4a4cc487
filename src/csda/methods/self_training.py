"""Self-training, plain or with the paper's parts: Algorithm 1.

A teacher predicts pseudo-labels for unlabeled images, these are aligned and queued, and the student learns from the
labeled batch and the queue. `csda`, `da`, `vcq` and `self-train` are this class with different settings. Other methods
with pseudo-labels keep its `step` and replace `guess`, `admit`, `learn` or `trained_view`.

Each point that the paper leaves open is a setting; docs/explanation/readings.md lists them.
"""

from __future__ import annotations

from itertools import cycle
from typing import Annotated, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from csda.config import DETAIL, Reading
from csda.data.loader import Batch, ImagePool, LabeledBatch, LabeledSet, View
from csda.errors import ConfigError
from csda.losses import total_loss
from csda.methods.base import CrossFit, Method, StepOutput, Task
from csda.methods.mixing import Mixing, MixingSettings
from csda.methods.refinement import Refinement, RefinementSettings
from csda.models.two_stream import TwoStream


class SelfTrainingSettings(MixingSettings, RefinementSettings):
    """Settings of teacher and schedule, besides those of alignment and queue."""

    weight: float = Field(1.0, ge=0, le=1e6, description="final weight of the unlabeled loss")
    weight_ramp: Annotated[bool, Reading(20)] = Field(
        True, description="the weight of the unlabeled loss grows from zero; false: it is constant"
    )
    teacher: Literal["ema", "none"] = Field("ema", description="network for pseudo-labels")
    teacher_start: Annotated[Literal["copy", "initial"], Reading(16)] = Field(
        "copy", description="the teacher begins as the student after the labels-only epochs (copy) or before them"
    )
    teacher_momentum: float = Field(0.999, ge=0, le=1, description="momentum of the teacher's average")
    teacher_update: Annotated[Literal["step", "epoch"], Reading(16)] = Field(
        "step", description="how often the teacher is updated"
    )
    teacher_mode: Annotated[Literal["eval", "train"], Reading(18)] = Field(
        "eval", description="mode of BatchNorm and dropout for pseudo-labels"
    )
    refresh: Annotated[Literal["step", "epoch"], Reading(13)] = Field(
        "step", description="how often class averages and queue are updated"
    )
    refresh_batch_size: Annotated[int, Reading(5)] = Field(
        128, ge=1, le=65_536, description="batch size of updates by epoch"
    )
    rebuild: Annotated[bool, Reading(11)] = Field(False, description="empty the queue before each update by epoch")
    order: Annotated[Literal["update_first", "train_first"], Reading(23)] = Field(
        "update_first", description="a step updates the queue first, or trains first"
    )
    labeled_from: Annotated[Literal["teacher", "student", "start", "folds"], Reading(22)] = Field(
        "teacher",
        description="network whose predictions make the labeled averages; start: only after the labels-only epochs, "
        "folds: out-of-fold predictions",
    )
    guesses_from: Annotated[Literal["network", "folds", "both"], DETAIL] = Field(
        "network", description="pseudo-labels by the network in training, by those of the folds, or by the mean of both"
    )
    folds: Annotated[int, DETAIL] = Field(5, ge=2, le=100, description="number of folds of the labeled images")
    fold_network: Annotated[Literal["head", "body"], DETAIL] = Field(
        "head", description="network of a fold: a last layer on the network before training, or a whole network"
    )
    fold_epochs: Annotated[int, DETAIL] = Field(4, ge=1, le=100_000, description="epochs of a whole network of a fold")
    passes: Annotated[Literal["one", "two"], Reading(21)] = Field(
        "one", description="labeled and queued images pass the student together, or apart"
    )
    mix_labels: bool = Field(False, description="mix labeled images with each other")

    @property
    def cross_fit(self) -> CrossFit | None:
        """The out-of-fold predictions that these settings need, if any."""
        guesses = self.guesses_from != "network"
        if not guesses and not (self.labeled_from == "folds" and (self.observes or self.shift != "none")):
            return None
        return CrossFit(self.folds, self.fold_network, self.fold_epochs, unlabeled=guesses)

    @model_validator(mode="after")
    def _has_labeled_images(self) -> Self:
        if self.mix_labels and self.labeled_from == "student" and self.observes:
            raise ConfigError(
                "with mix_labels the student has no unmixed labeled image to compute λ^x from; "
                "choose labeled_from = 'teacher' or 'start'"
            )
        return self


class SelfTraining(Method):
    """Pseudo-labels from a teacher θ_e¹ (or the student itself), refined, for a student θ_e²."""

    trained_view: ClassVar[View] = "weak"
    """The view of an unlabeled image that the student trains on."""

    fold_labeled: Tensor
    """Out-of-fold predictions for each labeled image, [N, n]."""
    fold_unlabeled: Tensor
    """Mean predictions of the folds' networks for each unlabeled image, if requested."""
    guess_frequencies: Tensor
    """Mean of the pseudo-labels that were trained on; updated if logits are adjusted."""

    def __init__(self, task: Task, settings: SelfTrainingSettings) -> None:
        super().__init__(task)
        self.settings = settings
        self.refinement = Refinement(task, settings)
        self.teacher_trains = settings.teacher_mode == "train"
        self.mixing = Mixing(settings, task) if settings.mix_labels else None
        self.cross_fit = settings.cross_fit
        even = 0.5 if task.multi_label else 1.0 / task.num_classes
        for name, rows, asked in (
            ("fold_labeled", task.num_labeled, self.cross_fit is not None),
            ("fold_unlabeled", task.num_unlabeled, settings.guesses_from != "network"),
        ):
            self.register_buffer(name, torch.full((rows if asked else 0, task.num_classes), even), persistent=asked)
        self.register_buffer("guess_frequencies", torch.tensor(task.class_counts) / max(task.num_labeled, 1))

    def begin(self, model: TwoStream, labeled_set: LabeledSet, pool: ImagePool) -> None:
        if self.settings.teacher_start == "copy":
            model.start_teacher()
        if self.settings.labeled_from == "folds" and self.cross_fit is not None:
            probs = self.fold_labeled
        else:
            batches = labeled_set.order(self.settings.refresh_batch_size, shuffled=False)
            probs = torch.cat([self.predict(model, labeled_set(indices, "plain")) for indices in batches])
        self.refinement.start(probs, labeled_set.targets)
        if self.settings.guesses_from == "folds":
            self.refinement.start_unlabeled(self.fold_unlabeled)
        if self.refinement.queue is not None:
            self.queue_all(model, labeled_set, pool)

    def step(
        self, model: TwoStream, labeled: LabeledBatch, unlabeled: Batch, pool: ImagePool, progress: Tensor
    ) -> StepOutput:
        """Algorithm 1: the teacher guesses, guesses are aligned and queued, the student learns, the teacher follows.

        A step ends with its loss, so the teacher follows the student's last update at the beginning of the next step.
        """
        settings = self.settings
        queues = settings.refresh == "step" and self.refinement.queue is not None
        labeled_images = labeled.weak()
        if settings.teacher == "ema" and settings.teacher_update == "step":
            model.update_teacher(settings.teacher_momentum)
        if queues and settings.order == "update_first":
            self.guess_align_queue(model, labeled_images, labeled.targets, unlabeled)
        samples, targets, mask = self.choose(model, labeled, labeled_images, unlabeled, pool, progress)
        supervised, unsupervised = self.learn(model, labeled_images, labeled.targets, samples, targets, mask)
        if queues and settings.order == "train_first":
            self.guess_align_queue(model, labeled_images, labeled.targets, unlabeled)
        weight = settings.weight * progress if settings.weight_ramp else settings.weight
        return StepOutput(
            total_loss(supervised, unsupervised, weight),
            {
                "labeled_loss": supervised.detach(),
                "unlabeled_loss": unsupervised.detach(),
                "filled": mask.float().mean(),
            },
        )

    def end_epoch(self, model: TwoStream, labeled_set: LabeledSet, pool: ImagePool) -> None:
        if self.settings.teacher == "ema" and self.settings.teacher_update == "epoch":
            model.update_teacher(self.settings.teacher_momentum)
        if self.refinement.queue is not None and self.settings.refresh == "epoch":
            if self.settings.rebuild:
                self.refinement.queue.reset()
            self.queue_all(model, labeled_set, pool)

    def take_folds(self, labeled_probs: Tensor, unlabeled_probs: Tensor) -> None:
        self.fold_labeled.copy_(labeled_probs)
        self.fold_unlabeled.copy_(unlabeled_probs)

    def resume(self, pool: ImagePool) -> None:
        self.refinement.resume(pool)

    def pseudo_labels(self, model: TwoStream, images: Tensor) -> tuple[Tensor, Tensor]:
        probs = self.predict(model, images)
        return probs, self.refinement.align(probs)

    def history(self) -> dict[str, Tensor]:
        return self.refinement.history()

    def predict(self, model: TwoStream, *images: Tensor) -> Tensor:
        """Probabilities of the teacher, or without one of the student in evaluation mode; no gradient."""
        logits = model.teach(*images) if self.settings.teacher == "ema" else model.guess(*images)
        return self.probabilities(logits)

    def guess(
        self, model: TwoStream, labeled_images: Tensor, targets: Tensor, unlabeled: Batch
    ) -> tuple[Tensor, Tensor]:
        """Predictions for labeled images, for λ^x, and pseudo-labels for unlabeled ones, [B, n] each."""
        labeled_images = self.observed_by_teacher(labeled_images)
        if self.settings.guesses_from == "folds":
            labeled_probs = self.predict(model, labeled_images) if len(labeled_images) else self.fold_labeled[:0]
            return labeled_probs, self.fold_unlabeled[unlabeled.indices]
        probs = self.predict(model, labeled_images, unlabeled.weak())
        labeled_probs, unlabeled_probs = probs.split((len(labeled_images), len(unlabeled)))
        if self.settings.guesses_from == "both":
            unlabeled_probs = (unlabeled_probs + self.fold_unlabeled[unlabeled.indices]) / 2.0
        return labeled_probs, unlabeled_probs

    def observed_by_teacher(self, labeled_images: Tensor) -> Tensor:
        """Labeled images that the teacher must predict for λ^x; none if λ^x comes from elsewhere."""
        asked = self.settings.labeled_from == "teacher" and self.settings.observes
        return labeled_images if asked else labeled_images[:0]

    def guess_align_queue(self, model: TwoStream, labeled_images: Tensor, targets: Tensor, unlabeled: Batch) -> Tensor:
        """Update marginals and queue with the predictions for these batches; return the aligned pseudo-labels."""
        labeled_probs, unlabeled_probs = self.guess(model, labeled_images, targets, unlabeled)
        if self.settings.labeled_from == "teacher":
            self.refinement.observe_labeled(labeled_probs, targets)
        # Pseudo-labels that never change have exact averages from the beginning.
        fixed = self.settings.guesses_from == "folds"
        aligned = self.refinement.align(unlabeled_probs) if fixed else self.refinement.refine(unlabeled_probs)
        if self.refinement.queue is not None:
            self.refinement.push(unlabeled, aligned)
        return aligned

    def choose(
        self,
        model: TwoStream,
        labeled: LabeledBatch,
        labeled_images: Tensor,
        unlabeled: Batch,
        pool: ImagePool,
        progress: Tensor,
    ) -> tuple[Batch, Tensor, Tensor]:
        """The samples to train on, their targets [B, n] and mask [B], from the queue or the unlabeled batch."""
        if self.refinement.queue is not None:
            samples, aligned, mask = self.refinement.queued(labeled, pool)
        else:
            samples, aligned = unlabeled, self.guess_align_queue(model, labeled_images, labeled.targets, unlabeled)
            mask = torch.ones(len(unlabeled), dtype=torch.bool, device=aligned.device)
        return samples, self.refinement.targets(aligned), self.admit(aligned, mask, progress)

    def admit(self, aligned: Tensor, mask: Tensor, progress: Tensor) -> Tensor:
        """The samples in `mask` [B] to train on, by their aligned pseudo-labels [B, n]."""
        return mask

    def learn(
        self,
        model: TwoStream,
        labeled_images: Tensor,
        labels: Tensor,
        samples: Batch,
        targets: Tensor,
        mask: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """L_s and L_u of Eq. (18)."""
        if self.mixing is not None:
            supervised = self.mixing.labeled_loss(self, model, labeled_images, labels)
            return supervised, self.unlabeled_loss(model(samples.view(self.trained_view)), targets, mask)
        images = samples.view(self.trained_view)
        labeled_images, labels = self.mixed(labeled_images, labels)
        forward = model.forward_apart if self.settings.passes == "two" else model
        labeled_logits, logits = forward(labeled_images, images).split((len(labeled_images), len(images)))
        losses = self.labeled_loss(labeled_logits, labels), self.unlabeled_loss(logits, targets, mask)
        if self.settings.labeled_from == "student" and self.settings.observes:
            self.observe(self.probabilities(labeled_logits.detach()), labels)
        return losses

    def unlabeled_loss(self, logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
        return super().unlabeled_loss(self.adjusted_by_guesses(logits, targets, mask), targets, mask)

    def adjusted_by_guesses(self, logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
        """Logits with the class frequencies of the pseudo-labels added, if logits are adjusted.

        Alignment and queue change these frequencies, so the labeled frequencies would be wrong.
        """
        if not self.recipe.adjust:
            return logits
        with torch.no_grad():
            rows = mask if mask.ndim == 1 else mask.any(dim=-1)
            count = rows.sum()
            mean = (targets * rows[:, None]).sum(dim=0) / count.clamp_min(1)
            self.guess_frequencies.lerp_(torch.where(count > 0, mean, self.guess_frequencies), 0.02)
        return logits.float() + self.offset(self.guess_frequencies)

    def observe(self, labeled_probs: Tensor, labels: Tensor) -> None:
        """Update λ^x with the student's own predictions."""
        self.refinement.observe_labeled(labeled_probs, labels)

    def queue_all(self, model: TwoStream, labeled_set: LabeledSet, pool: ImagePool) -> None:
        """`guess_align_queue` in one pass over the unlabeled images, in shuffled batches with a labeled batch each."""
        size = self.settings.refresh_batch_size
        labeled_batches = cycle(list(labeled_set.order(size, shuffled=True)))
        for unlabeled, labeled in zip(pool.fetch(size, shuffled=True), labeled_batches, strict=False):
            self.queue_at(model, labeled_set, pool, labeled, *unlabeled)

    def queue_at(
        self,
        model: TwoStream,
        labeled_set: LabeledSet,
        pool: ImagePool,
        labeled_indices: Tensor,
        indices: Tensor,
        pixels: Tensor | None,
    ) -> None:
        """`guess_align_queue` from the images at these positions."""
        labeled = labeled_set.batch(labeled_indices)
        self.guess_align_queue(model, labeled.weak(), labeled.targets, pool.batch(indices, pixels))
