"""The interface of a method: one step, and optionally what happens at the start and after each epoch.

A method never sees configuration files, paths, the optimiser or the loop. It gets a model and images and returns a
loss. Its parameters are trained with the model's, its buffers are saved and resumed. Nothing in `step` may copy from
the device to the host, so that a step can be captured in a CUDA graph.
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
    """What a method may know about the data besides the images."""

    num_classes: int
    multi_label: bool
    class_counts: tuple[int, ...]
    """How many labeled images each class has."""
    num_labeled: int
    num_unlabeled: int
    image_size: int
    channels: int
    width: int
    """Features that the encoder gives."""
    stages: int
    """Stages of the encoder, between which a method can work."""
    streamed: bool = False
    """Whether unlabeled images stay on the host, so that a step sees none but those of its batch."""
    frozen: bool = False
    """Whether images are features of a frozen network, between which and the head there are no layers."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """A loss to minimise, and values to log; all are 0-dim tensors on the device."""

    loss: Tensor
    logs: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What every method does to labeled images and in the loss, so that no method gains by it alone.

    Attributes:
        mixup: α of the Beta distribution by which labeled images are mixed with each other (Zhang et al., "mixup",
            2018); 0 mixes none.
        adjust: whether logits are adjusted in the loss (Menon et al., "Long-tail learning via logit adjustment",
            2021): the logarithm of the class frequencies is added, so that without it they are those of a set in
            which all classes are equally frequent.
    """

    mixup: float = 0.0
    adjust: bool = False


@dataclass(frozen=True, slots=True)
class CrossFit:
    """Predictions of labeled images by networks that have not learned from them, as a method asks for them.

    Attributes:
        folds: parts of the labeled images; a network for each part learns from the others.
        network: a "head", a last layer on the network as it is at the beginning, or a "body", a whole network.
        epochs: how long a body is trained.
        unlabeled: whether these networks are to predict the unlabeled images, too.
    """

    folds: int
    network: Literal["head", "body"]
    epochs: int
    unlabeled: bool


class Method(nn.Module):
    """Base class of all methods. By itself it trains on the labels alone."""

    sampling: ClassVar[Literal["random", "bilateral"]] = "random"
    """How labeled samples are drawn: shuffled passes, or more and more class-balanced (BiS)."""
    optimizer: ClassVar[Literal["sgd", "adam"]] = "sgd"
    teacher_trains: bool = False
    """Whether the teacher predicts with batch statistics and dropout."""
    generator: torch.Generator | None = None
    """Where draws of a step come from; None is torch's own."""

    cross_fit: CrossFit | None = None
    """What `take_folds` is to be given before the training, if anything."""
    recipe: Recipe = Recipe()
    labeled_offset: Tensor

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task = task
        frequencies = torch.tensor(task.class_counts) / max(task.num_labeled, 1)
        self.register_buffer("labeled_offset", self.offset(frequencies), persistent=False)

    def take_folds(self, labeled_probs: Tensor, unlabeled_probs: Tensor) -> None:
        """Called once, before the first step, where `cross_fit` asks for it.

        Predictions [N, n] for the labeled set, each by a network that has not learned from the image, and the mean of
        these networks' for the unlabeled one, empty where they are not asked for.
        """

    @property
    def balance(self) -> Balance:
        """How predictions leave class frequencies out: the head that a training on frozen features begins with has them
        out, or in, as the loss has."""
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
        """One step; `progress` grows from 0 to 1 over the training."""
        raise NotImplementedError

    def end_epoch(self, model: TwoStream, labeled_set: LabeledSet, pool: ImagePool) -> None:
        """Called after each epoch but the labels-only one; may iterate whole sets."""

    def resume(self, pool: ImagePool) -> None:
        """Called after saved buffers were loaded; recomputes what is derived from them and not saved."""

    def pseudo_labels(self, model: TwoStream, images: Tensor) -> tuple[Tensor, Tensor]:
        """For the evaluation: pseudo-labels for unlabeled images [B, …], before and after refinement."""
        probs = self.probabilities(model.guess(images))
        return probs, probs

    def history(self) -> dict[str, Tensor]:
        """State to keep after each epoch, by the names in `history.npz`."""
        return {}

    def probabilities(self, logits: Tensor) -> Tensor:
        """Probabilities for images with the class frequencies of the labeled set."""
        return probabilities(self.adjusted(logits), self.task.multi_label)

    def adjusted(self, logits: Tensor) -> Tensor:
        """Logits with the labeled class frequencies in them, where training leaves these out."""
        return logits.float() + self.labeled_offset if self.recipe.adjust else logits

    def offset(self, frequencies: Tensor) -> Tensor:
        """What is added to logits for class frequencies [n]: log p, or log p / (1 − p) where labels are independent."""
        frequencies = frequencies.float().clamp(1e-4, 1.0 - 1e-4 if self.task.multi_label else 1.0)
        return torch.logit(frequencies) if self.task.multi_label else frequencies.log()

    def mixed(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Labeled images and their labels, mixed with each other where the recipe says so."""
        if not self.recipe.mixup:
            return images, targets
        shares = draw_shares(self.recipe.mixup, len(images), images.device, self.generator)
        partners = torch.rand(len(images), device=images.device, generator=self.generator).argsort()
        return mix(images, partners, shares), mix(self.as_probabilities(targets), partners, shares)

    def as_probabilities(self, targets: Tensor) -> Tensor:
        """Labels as probabilities [B, n], which those of a multi-label set are already.

        Like `one_hot` of torch, which on a CPU looks at the largest label and so copies to the host.
        """
        if self.task.multi_label:
            return targets
        return (targets[:, None] == torch.arange(self.task.num_classes, device=targets.device)).float()

    def labeled_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """L_s of Eq. (18)."""
        loss = losses.multilabel_labeled_loss if self.task.multi_label else losses.labeled_loss
        return loss(self.adjusted(logits).float(), targets)

    def unlabeled_loss(self, logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
        """L_u of Eq. (18), the mean over the samples that `mask` admits."""
        loss = losses.multilabel_unlabeled_loss if self.task.multi_label else losses.unlabeled_loss
        return loss(logits.float(), targets, mask)
