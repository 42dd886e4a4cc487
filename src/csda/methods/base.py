"""The interface of a method: a step, and optionally what happens at the start and after each epoch.

A method gets a model and images and returns a loss. It never sees configuration, paths, the optimiser or the loop. Its
parameters are trained with the model's, its buffers are saved and resumed. `step` must not copy from the device to the
host, so that it can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from csda import losses
from csda.data.loader import Batch, ImagePool, LabeledBatch, LabeledSet
from csda.methods.mixing import draw_shares, mix
from csda.models.two_stream import TwoStream, probabilities
from csda.probe import Balance


@dataclass(frozen=True, slots=True)
class Task:
    """What a method knows about the data besides the images."""

    num_classes: int
    multi_label: bool
    class_counts: tuple[int, ...]
    """The number of labeled images of each class."""
    num_labeled: int
    num_unlabeled: int
    image_size: int
    channels: int
    width: int
    """Number of features of the encoder."""
    stages: int
    """Number of stages of the encoder."""
    streamed: bool = False
    """Whether unlabeled images stay on the host, so that a step can use only those of its batch."""
    frozen: bool = False
    """Whether images are features of a frozen network, so that there is only a head to train."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """A loss to minimise, and values to log; all are 0-dim tensors on the device."""

    loss: Tensor
    logs: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Settings of labeled images and loss that are the same for every method.

    Attributes:
        mixup: α of the Beta distribution for mixing labeled images (Zhang et al., "mixup", 2018); 0 for none.
        adjust: whether the logarithm of the class frequencies is added to the logits in the loss (Menon et al.,
            "Long-tail learning via logit adjustment", 2021). Predictions without it are then those for equally frequent
            classes.
    """

    mixup: float = 0.0
    adjust: bool = False


@dataclass(frozen=True, slots=True)
class CrossFit:
    """A method's request for out-of-fold predictions of labeled images.

    Attributes:
        folds: number of parts of the labeled images. A network for each part learns from the others.
        network: "head", a last layer on the network before training, or "body", a whole network.
        epochs: epochs of a body.
        unlabeled: whether these networks also predict the unlabeled images.
    """

    folds: int
    network: Literal["head", "body"]
    epochs: int
    unlabeled: bool


class Method(nn.Module):
    """Base class of all methods. Its own step trains on the labels alone."""

    sampling: ClassVar[Literal["random", "bilateral"]] = "random"
    """How labeled samples are drawn: in shuffled passes, or increasingly class-balanced (BiS)."""
    optimizer: ClassVar[Literal["sgd", "adam"]] = "sgd"
    teacher_trains: bool = False
    """Whether the teacher predicts with batch statistics and dropout."""
    generator: torch.Generator | None = None
    """Generator of the random numbers of a step; None for torch's default."""

    cross_fit: CrossFit | None = None
    """The out-of-fold predictions to pass to `take_folds` before the training, if any."""
    recipe: Recipe = Recipe()
    labeled_offset: Tensor

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task = task
        frequencies = torch.tensor(task.class_counts) / max(task.num_labeled, 1)
        self.register_buffer("labeled_offset", self.offset(frequencies), persistent=False)

    def take_folds(self, labeled_probs: Tensor, unlabeled_probs: Tensor) -> None:
        """Called once before the first step, if `cross_fit` is set.

        Gets out-of-fold predictions [N, n] for the labeled set, and the mean predictions of these networks for the
        unlabeled set, empty if not requested.
        """

    @property
    def balance(self) -> Balance:
        """How the initial head of a training on frozen features excludes class frequencies, to match the loss."""
        return "prior" if self.recipe.adjust else "none"

    def warm_up(self, model: TwoStream, labeled: LabeledBatch) -> StepOutput:
        """A step of the labels-only epoch: L_s of Eq. (18)."""
        images, targets = self.mixed(labeled.weak(), labeled.targets)
        loss = self.labeled_loss(model(images), targets)
        return StepOutput(loss, {"labeled_loss": loss.detach()})

    def begin(self, model: TwoStream, labeled_set: LabeledSet, pool: ImagePool) -> None:
        """Called once, after the labels-only epoch; may iterate whole sets."""

    def step(
        self, model: TwoStream, labeled: LabeledBatch, unlabeled: Batch, pool: ImagePool, progress: Tensor
    ) -> StepOutput:
        """A step; `progress` grows from 0 to 1 over the training."""
        raise NotImplementedError

    def end_epoch(self, model: TwoStream, labeled_set: LabeledSet, pool: ImagePool) -> None:
        """Called after each epoch except the labels-only one; may iterate whole sets."""

    def resume(self, pool: ImagePool) -> None:
        """Called after saved buffers were loaded; recomputes derived state that is not saved."""

    def pseudo_labels(self, model: TwoStream, images: Tensor) -> tuple[Tensor, Tensor]:
        """Pseudo-labels for unlabeled images [B, …], before and after refinement, for the evaluation."""
        probs = self.probabilities(model.guess(images))
        return probs, probs

    def history(self) -> dict[str, Tensor]:
        """State to keep after each epoch, by the names in `history.npz`."""
        return {}

    def probabilities(self, logits: Tensor) -> Tensor:
        """Probabilities for images with the class frequencies of the labeled set."""
        return probabilities(self.adjusted(logits), self.task.multi_label)

    def adjusted(self, logits: Tensor) -> Tensor:
        """Logits with the labeled class frequencies added, if `adjust` is set."""
        return logits.float() + self.labeled_offset if self.recipe.adjust else logits

    def offset(self, frequencies: Tensor) -> Tensor:
        """The offset of logits for class frequencies [n]: log p, or log(p / (1 − p)) for independent labels."""
        frequencies = frequencies.float().clamp(1e-4, 1.0 - 1e-4 if self.task.multi_label else 1.0)
        return torch.logit(frequencies) if self.task.multi_label else frequencies.log()

    def mixed(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Labeled images and their labels, mixed with each other if the recipe has mixup."""
        if not self.recipe.mixup:
            return images, targets
        shares = draw_shares(self.recipe.mixup, len(images), images.device, self.generator)
        partners = torch.rand(len(images), device=images.device, generator=self.generator).argsort()
        return mix(images, partners, shares), mix(self.as_probabilities(targets), partners, shares)

    def as_probabilities(self, targets: Tensor) -> Tensor:
        """Labels as probabilities [B, n]; those of a multi-label set already are.

        torch's `one_hot` is not used because it copies the largest label to the host.
        """
        if self.task.multi_label:
            return targets
        return (targets[:, None] == torch.arange(self.task.num_classes, device=targets.device)).float()

    def labeled_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """L_s of Eq. (18)."""
        loss = losses.multilabel_labeled_loss if self.task.multi_label else losses.labeled_loss
        return loss(self.adjusted(logits).float(), targets)

    def unlabeled_loss(self, logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
        """L_u of Eq. (18), the mean over the samples in `mask`."""
        loss = losses.multilabel_unlabeled_loss if self.task.multi_label else losses.unlabeled_loss
        return loss(logits.float(), targets, mask)
