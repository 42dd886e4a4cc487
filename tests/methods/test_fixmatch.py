"""FixMatch: the mask, the hard label and the strong view."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from csda.data.loader import Batch
from reference.trainings import make_training

GUESSES = torch.tensor([[0.96, 0.02, 0.01, 0.01], [0.94, 0.02, 0.02, 0.02], [0.01, 0.01, 0.03, 0.95], [0.25] * 4])


def test_confident_guesses_alone_are_admitted() -> None:
    method = make_training("fixmatch").method
    offered = torch.tensor([True, True, True, True])
    assert method.admit(GUESSES, offered, torch.tensor(0.5)).tolist() == [True, False, True, False]
    offered[0] = False
    assert method.admit(GUESSES, offered, torch.tensor(0.5)).tolist() == [False, False, True, False]


def test_the_target_is_a_class_and_the_loss_is_divided_by_all_samples() -> None:
    method = make_training("fixmatch").method
    targets = method.refinement.targets(GUESSES)
    assert targets.argmax(-1).tolist()[:3] == [0, 0, 3]
    assert targets.sum(-1).tolist() == [1.0] * 4
    logits = torch.tensor([[2.0, 0.0, 0.0, 0.0], [9.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0], [0.0, 5.0, 0.0, 0.0]])
    mask = torch.tensor([True, False, True, False])
    by_hand = (math.log(math.e**2 + 3) - 2 + math.log(math.e + 3) - 1) / 4
    assert float(method.unlabeled_loss(logits, targets, mask)) == pytest.approx(by_hand)


def test_a_strong_view_learns_what_was_guessed_for_a_weak_one(monkeypatch: pytest.MonkeyPatch) -> None:
    training = make_training("fixmatch")
    asked = []
    draw = Batch.view

    def watch(batch: Batch, view: str) -> Tensor:
        asked.append((type(batch).__name__, view))
        return draw(batch, view)

    monkeypatch.setattr(Batch, "view", watch)
    training.step()
    assert asked == [("LabeledBatch", "weak"), ("Batch", "weak"), ("Batch", "strong")]


def test_the_weight_does_not_grow() -> None:
    for progress in (0.1, 1.0):
        training = make_training("fixmatch", threshold=0.0)
        training.seed(1)
        output = training.step(progress=progress)
        torch.testing.assert_close(output.loss, output.logs["labeled_loss"] + output.logs["unlabeled_loss"])


def test_a_queued_sample_below_the_threshold_is_not_trained_on() -> None:
    training = make_training("fixmatch", queue="vcq", align="csda", threshold=1.0)
    training.begin()
    assert training.method.refinement.queue.mask.any()
    assert training.step().logs["filled"] == 0
