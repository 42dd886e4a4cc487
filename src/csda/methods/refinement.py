"""The paper's two parts, for any self-training method: pseudo-labels are aligned, then queued.

`align` and `queue` are independent switches. With both off, pseudo-labels do not change and training uses the unlabeled
batch itself. With both on, this is CSDA with its Variable Condition Queue.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from csda.alignment import class_sums, normalize, shift_weights, thresholds
from csda.condition_queue import MAX_CAPACITY, VariableConditionQueue
from csda.config import DETAIL, Reading, Settings
from csda.data.loader import Batch, ImagePool, LabeledBatch
from csda.errors import ConfigError
from csda.marginals import AgnosticMarginals, ClassMarginals
from csda.methods.base import Task


class RefinementSettings(Settings):
    """Settings of alignment and queue."""

    align: Literal["none", "da", "csda"] = Field("csda", description="correction of guesses")
    momentum: float = Field(0.95, ge=0, lt=1, description="momentum of the class averages")
    temperature: Annotated[Literal["adaptive", "unlabeled"] | Annotated[float, Field(ge=0, le=10)], Reading(7)] = Field(
        1.0,
        description="exponent of the labeled averages: 1 keeps them, 0 makes them uniform; adaptive: 1 minus the "
        "confidence on labeled images, unlabeled: on unlabeled ones",
    )
    temperature_floor: Annotated[float, Reading(7)] = Field(
        0.0, ge=0, le=1, description="lower bound of an adaptive temperature"
    )
    condition: Annotated[Literal["label", "prediction", "truth"], Reading(24)] = Field(
        "label",
        description="whether a labeled image counts for its label or for its predicted class; truth: for the latter, "
        "with its label instead of its prediction",
    )
    against: Annotated[Literal["unlabeled", "labeled"], DETAIL] = Field(
        "unlabeled", description="predictions that the labeled averages are divided by"
    )
    shrinkage: Annotated[float, DETAIL] = Field(
        0.0, ge=0, le=1e6, description="count added to each class, which weakens the alignment of rare classes"
    )
    basis: Annotated[Literal["diagonal"] | Annotated[float, Field(gt=0, le=1e6)], DETAIL] = Field(
        "diagonal",
        description="align each class by its own average, or by all averages, from least squares with this ridge",
    )
    shift: Annotated[Literal["none"] | Annotated[float, Field(gt=0, le=1e6)], DETAIL] = Field(
        "none", description="align to estimated unlabeled class frequencies, with this ridge, or not"
    )
    guess_temperature: Annotated[float, DETAIL] = Field(
        1.0, ge=0.1, le=10, description="temperature of aligned pseudo-labels; below 1 sharpens them"
    )
    absent: Annotated[Literal["replace", "ema"], Reading(3)] = Field(
        "replace", description="the estimate for a class without predictions replaces its average, or is averaged in"
    )
    share: Annotated[Literal["class", "batch"], Reading(1)] = Field(
        "class", description="the confidence of a class is a mean over its own images or over the batch"
    )
    soft: Annotated[bool, Reading(15)] = Field(
        True, description="train on probabilities; false: on the most probable class"
    )

    queue: Literal["none", "vcq"] = Field("vcq", description="choice of samples")
    capacity: int = Field(512, ge=1, le=MAX_CAPACITY, description="samples in the queue")
    gamma: float = Field(1.0, ge=0, le=10, description="class lengths: 0 equal, 1 by confidence")
    delta: float = Field(0.25, ge=0, le=1, description="highest threshold of the queue")
    minimum_length: Annotated[int, Reading(10)] = Field(
        0, ge=0, le=MAX_CAPACITY, description="smallest queue length of a class"
    )
    evict: Annotated[Literal["oldest", "least_confident"], Reading(11)] = Field(
        "oldest", description="which sample leaves the queue of a full class"
    )
    repeats: Annotated[Literal["refresh", "keep"], Reading(12)] = Field(
        "refresh", description="a sample that is queued again replaces its entry, or gets one more"
    )

    @property
    def observes(self) -> bool:
        """Whether marginals are updated, because alignment or queue need them."""
        return self.align != "none" or self.queue != "none"


class Refinement(nn.Module):
    """Aligns and queues the pseudo-labels of one training."""

    predicted_shares: Tensor
    mean_guess: Tensor

    def __init__(self, task: Task, settings: RefinementSettings) -> None:
        super().__init__()
        self.task = task
        self.settings = settings
        labels = task.num_classes if task.multi_label else None
        classes = 2 if task.multi_label else task.num_classes
        self.marginals = ClassMarginals(
            classes,
            settings.momentum,
            settings.temperature,
            settings.temperature_floor,
            condition=settings.condition,
            against=settings.against,
            shrinkage=settings.shrinkage,
            basis=settings.basis,
            absent=settings.absent,
            share=settings.share,
            num_labels=labels,
        )
        self.agnostic = (
            AgnosticMarginals(classes, settings.momentum, num_labels=labels) if settings.align == "da" else None
        )
        shape = (classes,) if labels is None else (labels, classes)
        # Ĉ and μ of `shift_weights`, and the resulting factors, 1 at first.
        self.register_buffer("predicted_shares", torch.zeros(*shape, classes))
        self.register_buffer("mean_guess", torch.full(shape, 1 / classes))
        queued = task.num_classes + task.multi_label
        if settings.queue == "vcq" and settings.minimum_length * queued > settings.capacity:
            raise ConfigError(
                f"a queue of capacity = {settings.capacity} cannot hold minimum_length = {settings.minimum_length} "
                f"samples of each of {queued} classes; give at least capacity={settings.minimum_length * queued}, or a "
                "smaller minimum_length"
            )
        self.queue = (
            VariableConditionQueue(
                queued,
                settings.capacity,
                settings.gamma,
                settings.delta,
                repeats=settings.repeats,
                minimum_length=settings.minimum_length,
                evict=settings.evict,
                target_size=task.num_classes,
                image_shape=(task.image_size, task.image_size, task.channels) if task.streamed else None,
            )
            if settings.queue == "vcq"
            else None
        )

    def start(self, labeled_probs: Tensor, targets: Tensor) -> None:
        """λ^x from an exact pass over the labeled set, λ^u := λ^x."""
        for marginals in self._kept():
            marginals.start(self._pairs(labeled_probs), targets)
        pairs = self._pairs(labeled_probs).to(self.mean_guess.dtype)
        self.predicted_shares.copy_(class_sums(pairs, targets)[0].mT / len(pairs))
        self.mean_guess.copy_(pairs.mean(dim=0))

    def start_unlabeled(self, unlabeled_probs: Tensor) -> None:
        """λ^u from an exact pass over the unlabeled set."""
        for marginals in self._kept():
            marginals.start_unlabeled(self._pairs(unlabeled_probs))
        self.mean_guess.copy_(self._pairs(unlabeled_probs).mean(dim=0))

    def observe_labeled(self, labeled_probs: Tensor, targets: Tensor) -> None:
        for marginals in self._kept():
            marginals.update_labeled(self._pairs(labeled_probs), targets)

    def refine(self, unlabeled_probs: Tensor) -> Tensor:
        """Update the marginals with pseudo-labels [B, n], and align these."""
        for marginals in self._kept():
            marginals.update_unlabeled(self._pairs(unlabeled_probs))
        if self.settings.shift != "none":
            mean = self._pairs(unlabeled_probs).mean(dim=0).to(self.mean_guess.dtype)
            self.mean_guess.lerp_(mean, 1.0 - self.settings.momentum)
        return self.align(unlabeled_probs)

    def align(self, unlabeled_probs: Tensor) -> Tensor:
        """Eq. (10), ReMixMatch's alignment, or none; then the estimated shift, and sharpening; [B, n] to [B, n].

        The shift is a factor for each class, which is the same as λ^x ⊗ w instead of λ^x.
        """
        settings = self.settings
        if settings.align == "none" and settings.shift == "none" and settings.guess_temperature == 1.0:
            return unlabeled_probs
        aligned = self._pairs(unlabeled_probs)
        if settings.align != "none":
            aligned = (self.marginals if self.agnostic is None else self.agnostic).align(aligned)
        if settings.shift != "none":
            aligned = normalize(aligned * shift_weights(self.predicted_shares, self.mean_guess, settings.shift))
        if settings.guess_temperature != 1.0:
            aligned = normalize(aligned ** (1.0 / settings.guess_temperature))
        return aligned[..., 1] if self.task.multi_label else aligned

    def targets(self, aligned: Tensor) -> Tensor:
        """The targets: aligned pseudo-labels, or their most probable class."""
        if self.settings.soft:
            return aligned
        if self.task.multi_label:
            return (aligned > 0.5).to(aligned.dtype)
        return torch.zeros_like(aligned).scatter_(-1, aligned.argmax(dim=-1, keepdim=True), 1.0)

    def push(self, samples: Batch, aligned: Tensor) -> None:
        """Offer samples to the queue, Eq. (15) to (17), with their images if it stores images."""
        assert self.queue is not None
        images = None if self.queue.images is None else samples.pixels
        labeled_confidence, unlabeled_confidence = self._queue_confidences()
        membership = self._membership(aligned, unlabeled_confidence) if self.task.multi_label else aligned
        self.queue.push(samples.indices, membership, labeled_confidence, unlabeled_confidence, aligned, images)

    def queued(self, labeled: LabeledBatch, pool: ImagePool) -> tuple[Batch, Tensor, Tensor]:
        """The queue's samples, targets and mask of filled slots, always of the same shape. While the queue is empty its
        slots show labeled images, masked off, so that BatchNorm sees real images in natural proportions and not one
        image many times.
        """
        assert self.queue is not None
        indices, aligned, mask = self.queue.contents()
        batch = pool.batch(indices, self.queue.images).where(mask.any(), labeled)
        return batch, aligned, mask

    def resume(self, pool: ImagePool) -> None:
        """Fetch the images again, if the queue stores images."""
        if self.queue is not None and self.queue.images is not None:
            self.queue.images.copy_(pool.batch(self.queue.indices).pixels)

    def history(self) -> dict[str, Tensor]:
        """State of this epoch, by the names of `history.npz`."""
        if not self.settings.observes:
            return {}
        marginals = self.marginals
        state = {"labeled_marginals": marginals.labeled, "unlabeled_marginals": marginals.unlabeled}
        if self.settings.align == "csda":
            state["temperatures"] = marginals.temperatures()
        if self.queue is not None:
            state["queue_counts"] = self.queue.counts()
        return state

    def _kept(self) -> list[ClassMarginals | AgnosticMarginals]:
        if not self.settings.observes:
            return []
        return [self.marginals] if self.agnostic is None else [self.marginals, self.agnostic]

    def _pairs(self, probs: Tensor) -> Tensor:
        """Multi-label probabilities [B, K] as K distributions over absent and present, [B, K, 2]."""
        return torch.stack((1.0 - probs, probs), dim=-1) if self.task.multi_label else probs

    def _queue_confidences(self) -> tuple[Tensor, Tensor]:
        """c^x and c^u for the classes of the queue; in a multi-label set the K labels, then "none" of them."""
        marginals = self.marginals
        if not self.task.multi_label:
            return marginals.labeled_confidence, marginals.unlabeled_confidence
        labeled, unlabeled = (
            torch.cat((confidence[:, 1], confidence[:, 0].mean(dim=0, keepdim=True)))
            for confidence in (marginals.labeled_confidence, marginals.unlabeled_confidence)
        )
        return labeled, unlabeled

    def _membership(self, aligned: Tensor, unlabeled_confidence: Tensor) -> Tensor:
        """Assign each multi-label sample [B, K] to one class of the queue, [B, K + 1].

        It is the label with the largest ratio of probability to threshold, or "none" if no label exceeds its threshold.
        The probability of "none" is that the most probable label is absent. This is an extension of this project: the
        paper defines the queue by an argmax, which does not exist for several labels.
        """
        limits = thresholds(unlabeled_confidence, self.settings.delta)[:-1]
        excess, label = (aligned / limits.clamp_min(1e-6)).max(dim=-1)
        none = 1.0 - aligned.amax(dim=-1)
        chosen = torch.where(excess > 1.0, label, aligned.shape[-1])
        strength = torch.where(excess > 1.0, aligned.gather(1, label[:, None])[:, 0], none)
        return torch.zeros_like(F.pad(aligned, (0, 1))).scatter(1, chosen[:, None], strength[:, None])
