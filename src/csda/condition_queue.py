"""The variable condition queue holds the unlabeled samples that are trained on."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from csda.alignment import admitted, queue_lengths, thresholds
from csda.arguments import (
    readable,
    require_choice,
    require_number,
    require_positions,
    require_shape,
    require_tensor,
    require_whole,
)

MAX_CAPACITY = 100_000
"""Upper limit of the capacity; `queue_lengths` is exact up to 500,000."""


class VariableConditionQueue(nn.Module):
    """Eq. (15) to (17). Hold unlabeled samples with their pseudo-labels, more of a class with a higher confidence.

    `push` takes its samples one after the other. A sample admitted by Eq. (17) leaves its old place and enters the
    class of its aligned prediction. A sample that is not admitted changes nothing. Then every class is cut to its
    length, Eq. (15): the newest entries stay, the others are deleted.

    There are always L slots, from the newest entry to the oldest. Empty slots repeat the filled ones with the mask off,
    so every slot has a valid index (0 while the queue is empty).

    Args:
        num_classes: n.
        capacity: L.
        gamma: γ of Eq. (15).
        delta: δ of Eq. (16).
        minimum_length: smallest number of slots of a class; the paper has none.
        repeats: a sample that is admitted again replaces its entry ("refresh"), or gets one more ("keep").
        evict: which entries a class that is too long loses, the "oldest" or the "least_confident".
        target_size: width of the targets, if they are not the aligned predictions.
        image_shape: (H, W, C) if the queue is to store the samples' uint8 images as well.
        process_group: processes that push together and so hold the same queue.

    >>> queue = VariableConditionQueue(num_classes=2, capacity=4)
    >>> aligned = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]])
    >>> queue.push(torch.tensor([7, 8, 9]), aligned, torch.tensor([0.3, 0.9]), torch.tensor([0.5, 0.5]))
    >>> indices, targets, mask = queue.contents()
    >>> indices, mask
    (tensor([9, 8, 9, 8]), tensor([ True,  True, False, False]))
    >>> queue.counts()
    tensor([1, 1])
    """

    indices: Tensor
    targets: Tensor
    classes: Tensor
    confidences: Tensor
    mask: Tensor
    images: Tensor | None

    def __init__(
        self,
        num_classes: int,
        capacity: int = 512,
        gamma: float = 1.0,
        delta: float = 0.25,
        *,
        minimum_length: int = 0,
        repeats: Literal["refresh", "keep"] = "refresh",
        evict: Literal["oldest", "least_confident"] = "oldest",
        target_size: int | None = None,
        image_shape: tuple[int, int, int] | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        require_whole("num_classes", num_classes, 1)
        require_whole("capacity", capacity, 1, MAX_CAPACITY)
        require_number("gamma", gamma)
        require_number("delta", delta, 1)
        require_whole("minimum_length", minimum_length, 0, capacity // num_classes)
        require_choice("repeats", repeats, "refresh", "keep")
        require_choice("evict", evict, "oldest", "least_confident")
        if target_size is not None:
            require_whole("target_size", target_size, 1)
        if image_shape is not None and not (isinstance(image_shape, tuple) and len(image_shape) == 3):
            raise ValueError(
                f"Expected argument `image_shape` to be (height, width, channels), but got {image_shape!r}."
            )
        for size in image_shape or ():
            require_whole("image_shape", size, 1)
        self.num_classes = num_classes
        self.capacity = capacity
        self.gamma = gamma
        self.delta = delta
        self.minimum_length = minimum_length
        self.repeats = repeats
        self.evict = evict
        self.process_group = process_group
        self.register_buffer("indices", torch.zeros(capacity, dtype=torch.int64))
        self.register_buffer("targets", torch.zeros(capacity, target_size or num_classes))
        self.register_buffer("classes", torch.zeros(capacity, dtype=torch.int64))
        self.register_buffer("confidences", torch.zeros(capacity))
        self.register_buffer("mask", torch.zeros(capacity, dtype=torch.bool))
        # Not saved: the images are fetched again by the indices.
        images = None if image_shape is None else torch.zeros(capacity, *image_shape, dtype=torch.uint8)
        self.register_buffer("images", images, persistent=False)

    @torch.no_grad()
    def push(
        self,
        indices: Tensor,
        aligned: Tensor,
        labeled_confidence: Tensor,
        unlabeled_confidence: Tensor,
        targets: Tensor | None = None,
        images: Tensor | None = None,
    ) -> None:
        """Eq. (17) for each sample, then Eq. (15) for each class.

        With a process group every process pushes the same number of samples, which are taken in the order of the ranks.

        Args:
            indices: int64 [B], positions in the unlabeled part.
            aligned: q̃ [B, n]; its maximum is the confidence and its argmax the class.
            labeled_confidence: c^x [n], for the lengths.
            unlabeled_confidence: c^u [n], for the thresholds.
            targets: [B, target_size], what to train on; the aligned predictions if not given.
            images: uint8 [B, H, W, C], required if the queue stores images, otherwise ignored.
        """
        self._require(indices, aligned, labeled_confidence, unlabeled_confidence, targets, images)
        indices, aligned = self._gather(indices), self._gather(aligned)
        targets = aligned if targets is None else self._gather(targets)
        confidences, classes = aligned.max(-1)
        lengths = queue_lengths(labeled_confidence, self.capacity, self.gamma, self.minimum_length)

        # All candidates, from the newest to the oldest: the pushed samples in reverse, then what the queue holds.
        alive = torch.cat([admitted(aligned, thresholds(unlabeled_confidence, self.delta)).flip(0), self.mask])
        indices = torch.cat([indices.flip(0), self.indices])
        classes = torch.cat([classes.flip(0), self.classes])
        targets = torch.cat([targets.flip(0).to(self.targets.dtype), self.targets])
        confidences = torch.cat([confidences.flip(0).to(self.confidences.dtype), self.confidences])

        if self.repeats == "refresh":
            alive = alive & _is_first(indices.masked_fill(~alive, -1))
        order = None if self.evict == "oldest" else confidences.argsort(descending=True, stable=True)
        # Entries that are not alive form a class of their own, of length 0.
        kept = _is_among_first(classes.masked_fill(~alive, self.num_classes), F.pad(lengths, (0, 1)), order)

        # The kept entries move to the front in their order, and the slots behind repeat them.
        number = kept.sum()
        empty = number == 0
        slots = torch.arange(self.capacity, device=kept.device)
        source = kept.argsort(descending=True, stable=True)[slots % number.clamp(min=1)]
        for stored, candidates in (
            (self.indices, indices),
            (self.targets, targets),
            (self.classes, classes),
            (self.confidences, confidences),
        ):
            stored.copy_(candidates.index_select(0, source).masked_fill(empty, 0))
        self.mask.copy_(slots < number)
        if self.images is not None and images is not None:
            images = self._gather(images)
            last = len(images) - 1
            rows = torch.where(source <= last, last - source, source)  # here the pushed samples are not reversed
            self.images.copy_(torch.cat((images, self.images))[rows])

    def contents(self) -> tuple[Tensor, Tensor, Tensor]:
        """The L slots: indices int64 [L], targets [L, target_size], and the mask of filled slots, bool [L]."""
        return self.indices.clone(), self.targets.clone(), self.mask.clone()

    def counts(self) -> Tensor:
        """The number of entries of each class, int64 [n]."""
        every = torch.arange(self.num_classes, device=self.classes.device)
        return ((self.classes[:, None] == every) & self.mask[:, None]).sum(0)

    def reset(self) -> None:
        """Empty all slots, in place."""
        for values in self.buffers():
            values.zero_()

    def extra_repr(self) -> str:
        return (
            f"num_classes={self.num_classes}, capacity={self.capacity}, gamma={self.gamma}, delta={self.delta}, "
            f"minimum_length={self.minimum_length}, repeats={self.repeats!r}, evict={self.evict!r}, "
            f"target_size={self.targets.shape[1]}"
        )

    def _require(
        self,
        indices: Tensor,
        aligned: Tensor,
        labeled_confidence: Tensor,
        unlabeled_confidence: Tensor,
        targets: Tensor | None,
        images: Tensor | None,
    ) -> None:
        require_tensor("indices", indices)
        count = indices.numel()
        if indices.dtype != torch.int64:
            raise ValueError(f"Expected argument `indices` to be of the dtype int64, but got {indices.dtype}.")
        require_shape("indices", indices, count)
        if readable(indices):
            require_positions("indices", indices)
        require_shape("aligned", aligned, count, self.num_classes)
        require_shape("labeled_confidence", labeled_confidence, self.num_classes)
        require_shape("unlabeled_confidence", unlabeled_confidence, self.num_classes)
        if targets is not None:
            require_shape("targets", targets, count, self.targets.shape[1])
        elif self.targets.shape[1] != self.num_classes:
            raise ValueError(
                f"Expected argument `targets` of the shape {[count, self.targets.shape[1]]}, but got none."
            )
        if self.images is not None:
            shape = (count, *self.images.shape[1:])
            if images is None:
                raise ValueError(f"Expected argument `images` of the shape {list(shape)}, but got none.")
            require_shape("images", images, *shape)

    def _gather(self, values: Tensor) -> Tensor:
        if self.process_group is None:
            return values
        parts = [torch.empty_like(values) for _ in range(dist.get_world_size(self.process_group))]
        dist.all_gather(parts, values.contiguous(), group=self.process_group)
        return torch.cat(parts)


def _is_first(values: Tensor) -> Tensor:
    """For each element whether no earlier one has the same value."""
    ordered, order = values.sort(stable=True)
    first = F.pad(ordered[1:] != ordered[:-1], (1, 0), value=True)
    return torch.empty_like(first).scatter_(0, order, first)


def _is_among_first(classes: Tensor, lengths: Tensor, order: Tensor | None) -> Tensor:
    """For each element whether fewer than lengths[class] of its class precede it, as given or by `order`."""
    order = classes.argsort(stable=True) if order is None else order[classes[order].argsort(stable=True)]
    ordered = classes[order]
    # In the sorted list, the element lengths[class] places before it is of another class, or there is none.
    ahead = torch.arange(len(order), device=order.device) - lengths[ordered]
    among = (ahead < 0) | (ordered[ahead.clamp(min=0)] != ordered)
    return torch.empty_like(among).scatter_(0, order, among)
