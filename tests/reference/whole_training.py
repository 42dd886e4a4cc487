"""A whole training as one loop in plain torch: the labels alone, plain self-training, Neighbor Matching, or Algorithm 1
with the library's two parts, both or one of them.

Nothing of the package is used but its marginals and its queue, which have oracles of their own. Only the seeds are its
own, since they decide what is drawn: an epoch seeds the order of the images, and the source of views and dropout.
"""

from __future__ import annotations

import math
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from csda import ClassMarginals, VariableConditionQueue
from csda.marginals import AgnosticMarginals
from csda.runs import Run


class Memory:
    """Neighbor Matching's: for each class the latest features of labeled images that the teacher gets about right."""

    def __init__(self, classes: int, slots: int) -> None:
        self.slots, self.held = slots, [list[Tensor]() for _ in range(classes)]

    def remember(self, features: Tensor, probs: Tensor, labels: Tensor) -> None:
        for feature, guess, label in zip(features, probs, labels.tolist(), strict=True):
            if guess[label] >= 0.3 or guess.argmax() == label:
                self.held[label] = [feature / feature.norm(), *self.held[label]][: self.slots]

    def vote(self, feature: Tensor) -> Tensor:
        weights = [[(100 * (feature / feature.norm()) @ other).exp() for other in own] for own in self.held]
        votes = torch.stack([torch.stack(own).sum() if own else torch.zeros(()) for own in weights])
        return votes / votes.sum()


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = (3, 32, 32, 64, 64, 128)
        blocks = [(nn.Conv2d(a, b, 4, 2, 1), nn.ReLU(), nn.BatchNorm2d(b)) for a, b in pairwise(sizes)]
        self.blocks = nn.Sequential(*(layer for block in blocks for layer in block))
        self.first, self.second = nn.Linear(128, 4096), nn.Linear(4096, 256)

    def forward(self, *images: Tensor, source: torch.Generator | None = None) -> Tensor:
        """Each tensor of images has statistics of its own in BatchNorm; with a `source` there is dropout."""
        values = torch.cat([self.blocks(part).flatten(1) for part in images])
        hidden = self.first(drop_out(values, source)).relu()
        return self.second(drop_out(hidden, source))


def drop_out(values: Tensor, source: torch.Generator | None) -> Tensor:
    if source is None:
        return values
    return values * torch.empty_like(values).bernoulli_(0.5, generator=source) / 0.5


def show(images: Tensor, source: torch.Generator) -> Tensor:
    """Rotation within ten degrees, then translation by up to a tenth, zeros outside."""
    draws = torch.empty(len(images), 5).uniform_(-1, 1, generator=source)
    angle, right, down = draws[:, 0] * math.radians(10), draws[:, 1] * 0.2, draws[:, 2] * 0.2
    rows = torch.stack([angle.cos(), -angle.sin(), right, angle.sin(), angle.cos(), down], dim=1)
    grid = F.affine_grid(rows.view(-1, 2, 3), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


def train_by_hand(folder: Path, run: Run) -> list[Tensor]:
    """What the test images are predicted to be after each epoch of a run on a folder of images 32 pixels wide."""
    config: dict[str, Any] = dict(run.config)
    classes, epochs, steps = list(run.classes), config["epochs"], config["steps_per_epoch"]

    def part(name: str) -> tuple[Tensor, Tensor]:
        rows = [row for row in run.split if row.split == name]
        pixels = [np.asarray(Image.open(folder / row.id).convert("RGB")) for row in rows]
        labels = [classes.index(row.label) if row.label else -1 for row in rows]
        return torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2) / 255, torch.tensor(labels)

    (images, labels), (test, _) = part("labeled"), part("test")

    def seed(number: int) -> int:
        return int(np.random.SeedSequence((config["seed"], number)).generate_state(1)[0])

    torch.manual_seed(seed(0))
    student, head = Encoder(), nn.Linear(256, len(classes))
    teacher = deepcopy(student)
    own = config["method_settings"]
    queues, learns = config["method"] in ("csda", "vcq"), config["method"] not in ("baseline", "upper-bound")
    if learns:
        pool, _ = part("unlabeled")
    if config["method"] == "nm":
        memory = Memory(len(classes), 2 * (own["memory"] // len(classes)))
    if config["method"] == "da":
        agnostic = AgnosticMarginals(len(classes), own["momentum"])
    if queues:
        kind = {"condition": own["condition"], "share": own["share"]}
        marginals = ClassMarginals(len(classes), own["momentum"], own["temperature"], **kind)
        queue = VariableConditionQueue(len(classes), own["capacity"], own["gamma"], own["delta"])

    def predict(encoder: Encoder, shown: Tensor) -> Tensor:
        encoder.eval()
        with torch.no_grad():
            return head(encoder(shown).relu()).softmax(-1)

    def order(count: int, size: int, source: torch.Generator) -> Tensor:
        passes = [torch.randperm(count, generator=source) for _ in range(math.ceil(steps * size / count))]
        return torch.cat(passes)[: steps * size].view(steps, size)

    def guess(shown: Tensor, its_labels: Tensor, unlabeled: Tensor) -> Tensor:
        """What the batch itself is taken for, where there is no queue."""
        if config["method"] == "self-train":
            return predict(student, unlabeled)
        if config["method"] == "da":
            guesses = predict(teacher, unlabeled)
            agnostic.update_unlabeled(guesses)
            return agnostic.align(guesses)
        teacher.eval()
        with torch.no_grad():
            features, others = teacher(shown), teacher(unlabeled)
            memory.remember(features, head(features.relu()).softmax(-1), its_labels)
            return torch.stack([memory.vote(feature) for feature in others])

    def average() -> None:
        for ours, theirs in zip(teacher.state_dict().values(), student.state_dict().values(), strict=True):
            if ours.is_floating_point():
                ours.mul_(own["teacher_momentum"]).add_((1 - own["teacher_momentum"]) * theirs)

    def renew(shown: Tensor, its_labels: Tensor, positions: Tensor, source: torch.Generator) -> None:
        """λ^x, if the teacher tells it, then λ^u, then the queue."""
        guesses = predict(teacher, show(pool[positions], source))
        if own["labeled_from"] == "teacher":
            marginals.update_labeled(predict(teacher, shown), its_labels)
        marginals.update_unlabeled(guesses)
        confidences = marginals.labeled_confidence, marginals.unlabeled_confidence
        queue.push(positions, guesses if own["align"] == "none" else marginals.align(guesses), *confidences)

    def renew_all(source: torch.Generator) -> None:
        size = own["refresh_batch_size"]
        labeled_batches = torch.randperm(len(images), generator=source).split(size)
        for number, positions in enumerate(torch.randperm(len(pool), generator=source).split(size)):
            beside = labeled_batches[number % len(labeled_batches)]
            renew(show(images[beside], source), labels[beside], positions, source)

    predictions = []
    for epoch in range(1, epochs + 1):
        source, shuffle = (torch.Generator().manual_seed(seed(epoch)) for _ in range(2))
        rate = config["lr"] * 0.1 ** sum(epoch - 1 >= share * epochs for share in (50 / 256, 125 / 256))
        labeled_order = order(len(images), config["batch_size"], shuffle)
        follows = learns and epoch > 1
        pool_order = order(len(pool), config["unlabeled_batch_size"], shuffle) if follows else labeled_order
        for chosen, unlabeled in zip(labeled_order, pool_order, strict=True):
            shown = show(images[chosen], source)
            student.train()
            if follows:
                if own["teacher"] == "ema" and own["teacher_update"] == "step":
                    average()
                if queues:
                    queued, targets, filled = queue.contents()
                else:
                    queued, filled = unlabeled, torch.ones(len(unlabeled), dtype=torch.bool)
                    targets = guess(shown, labels[chosen], show(pool[unlabeled], source))
                both = shown, show(pool[queued], source)
                student.train()
                features = student(*both if own["passes"] == "two" else [torch.cat(both)], source=source)
                logits, guessed = head(features.relu()).split((len(shown), len(queued)))
                if config["method"] == "da" or (queues and own["labeled_from"] == "student"):
                    observed = agnostic if config["method"] == "da" else marginals
                    observed.update_labeled(logits.detach().softmax(-1), labels[chosen])
                distances = -(targets * guessed.log_softmax(-1)).sum(-1)
                loss = F.cross_entropy(logits, labels[chosen]) + epoch / epochs * distances[filled].mean()
                if queues and own["refresh"] == "step":
                    renew(shown, labels[chosen], unlabeled, source)
            else:
                loss = F.cross_entropy(head(student(shown, source=source).relu()), labels[chosen])
            weights = [*student.parameters(), *head.parameters()]
            for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
                weight.data -= rate * gradient
        if epoch == 1:
            teacher.load_state_dict(student.state_dict())
        if config["method"] == "da" and epoch == 1:
            agnostic.start(predict(teacher, images), labels)
        if queues and epoch == 1:
            marginals.start(predict(teacher, images), labels)
            renew_all(source)
        elif queues:
            if own["teacher_update"] == "epoch":
                average()
            if own["refresh"] == "epoch":
                renew_all(source)
        predictions.append(predict(student, test))
    return predictions
