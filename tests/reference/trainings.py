"""A training in small: a handful of drawn images, a model and a method, for tests of single steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from csda.data.augment import Augmentation
from csda.data.loader import ImagePool, LabeledSet
from csda.methods import METHODS, build_method
from csda.methods.base import Method, StepOutput, Task
from csda.models.backbones import build_encoder
from csda.models.two_stream import TwoStream

CLASSES = 4


@dataclass
class Training:
    """What a step needs, with seeded randomness."""

    model: TwoStream
    method: Method
    labeled_set: LabeledSet
    pool: ImagePool

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.pool.generator.manual_seed(seed)

    def begin(self) -> None:
        self.method.begin(self.model, self.labeled_set, self.pool)

    def step(self, labeled: Tensor | None = None, unlabeled: Tensor | None = None, progress: float = 0.5) -> StepOutput:
        """A step on the images at these positions; without any given, on the first ones."""
        device = self.pool.pixels.device
        labeled = torch.arange(6, device=device) if labeled is None else labeled
        unlabeled = torch.arange(5, device=device) if unlabeled is None else unlabeled
        return self.method.step(
            self.model,
            self.labeled_set.batch(labeled),
            self.pool.batch(unlabeled),
            self.pool,
            torch.tensor(progress, device=device),
        )


def make_training(
    name: str,
    *,
    multi_label: bool = False,
    backbone: str = "alexnet",
    image_size: int = 32,
    device: str = "cpu",
    labels: Tensor | None = None,
    **settings: Any,
) -> Training:
    """A method by name with settings of its own, on 8 labeled and 12 unlabeled images of four classes or labels."""
    torch.manual_seed(0)
    generator = torch.Generator(device).manual_seed(0)
    pixels = torch.randint(0, 256, (20, image_size, image_size, 3), dtype=torch.uint8)
    if labels is None:
        labels = (torch.rand(8, CLASSES) < 0.4).float() if multi_label else torch.tensor([0, 1, 2, 3, 0, 1, 2, 0])
    counts = labels.sum(0) if multi_label else labels.bincount(minlength=CLASSES)
    entry = METHODS[name]
    own = {key: value for key, value in entry.defaults.items() if key in entry.settings.model_fields}
    if "capacity" in entry.settings.model_fields:
        own["capacity"] = 8
    encoder = build_encoder(backbone, image_size, 3, dropout=0.5)
    task = Task(
        CLASSES,
        multi_label,
        tuple(int(count) for count in counts),
        num_labeled=8,
        num_unlabeled=12,
        image_size=image_size,
        channels=3,
        width=encoder.width,
        stages=len(encoder),
    )
    method = build_method(name, task, own | settings).to(device)
    model = TwoStream(encoder, CLASSES, teacher_trains=method.teacher_trains).to(device).train()
    augmentation = Augmentation()
    return Training(
        model,
        method,
        LabeledSet(pixels[:8].to(device), labels.to(device), augmentation, generator),
        ImagePool(pixels[8:].to(device), augmentation, generator),
    )
