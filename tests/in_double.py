"""Trainings in float64, in which several processes and one can be told apart from rounding; as a program, `csda`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from csda import trainer
from csda.cli import main
from csda.errors import CsdaError
from tiny import train_tiny


def use_double() -> None:
    """Weights are made in the default dtype, and what is brought to float32 is meant to be as wide as they are."""
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]


def nudge_weights(share: float) -> None:
    open_optimizer = trainer.Trainer._open_optimizer

    def nudge_and_open(held: trainer.Trainer) -> None:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for value in held.model.parameters():
                value.mul_(1.0 + share * (2.0 * torch.rand(value.shape, generator=generator) - 1.0))
        open_optimizer(held)

    trainer.Trainer._open_optimizer = nudge_and_open  # type: ignore[method-assign]


def train_all(
    images: Path,
    out: Path,
    cases: Sequence[Mapping[str, Any]],
    environment: Mapping[str, str],
    double: bool = True,
    nudge: float = 0.0,
) -> None:
    """Train a case after the other, each in a folder of its number; `environment` is what torchrun would set.

    The first weights are changed by up to a share of `nudge`.
    """
    os.environ |= environment
    if double:
        use_double()
    if nudge:
        nudge_weights(nudge)
    trainer.Trainer._epoch_seconds = lambda held: 1.0  # type: ignore[method-assign]
    for number, case in enumerate(cases):
        train_tiny(images, out / str(number), **case)


def train_in(folder: Path, out: Path, environment: Mapping[str, str]) -> None:
    """Train on the images in this folder, under a path that all processes have in common; what stops it is kept."""
    os.environ |= environment
    os.chdir(folder)
    try:
        train_tiny(Path("images"), out, tensorboard=False)
    except CsdaError as error:
        (folder / "said").write_text(f"{type(error).__name__}: {error}")


def die_in_epoch(epoch: int) -> None:
    """After its first step, which all processes make together."""
    sample = trainer.Trainer.sample

    def sample_and_die(
        held: trainer.Trainer, number: int, *, labels_only: bool = False
    ) -> Iterator[tuple[torch.Tensor, ...]]:
        for step, inputs in enumerate(sample(held, number, labels_only=labels_only)):
            if (number, step) == (epoch, 1):
                os.kill(os.getpid(), signal.SIGKILL)
            yield inputs

    trainer.Trainer.sample = sample_and_die  # type: ignore[assignment,method-assign]


if __name__ == "__main__":
    use_double()
    if os.environ.get("RANK") == sys.argv.pop(1):
        die_in_epoch(3)
    main()
