"""Alignment and queue as one part: what passes through, and what several labels per image change."""

from __future__ import annotations

from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor

from csda.alignment import align, align_agnostic
from csda.condition_queue import VariableConditionQueue
from csda.data.augment import Augmentation
from csda.data.loader import ImagePool
from csda.errors import ConfigError
from csda.marginals import ClassMarginals
from csda.methods.base import Task
from csda.methods.refinement import Refinement, RefinementSettings
from csda.methods.self_training import SelfTraining
from reference import alignment as reference
from reference.trainings import make_training


def _refinement(classes: int = 3, *, multi_label: bool = False, **settings: Any) -> Refinement:
    task = Task(classes, multi_label, (5,) * classes, 20, 50, image_size=32, channels=3, width=256, stages=6)
    return Refinement(task, RefinementSettings(**{"capacity": 12, **settings}))


def _probs(count: int, classes: int = 3, seed: int = 0) -> Tensor:
    return (2 * torch.randn(count, classes, generator=torch.Generator().manual_seed(seed))).softmax(-1)


LABELS = torch.arange(3).repeat(4)


@pytest.mark.parametrize("part", [ClassMarginals, VariableConditionQueue])
def test_a_setting_begins_with_the_value_that_the_library_has(part: type) -> None:
    """But the temperature: the library has that of the paper, a run none (reading 7)."""
    arguments = {name: each.default for name, each in signature(part).parameters.items()}
    settings = {name: field.default for name, field in RefinementSettings.model_fields.items()}
    shared = arguments.keys() & settings.keys() - {"temperature"}
    assert len(shared) >= 6
    assert {name: arguments[name] for name in shared} == {name: settings[name] for name in shared}


def test_a_queue_too_small_for_its_shortest_parts_names_the_way_out() -> None:
    assert _refinement(minimum_length=4).queue is not None
    for several, needed in ((False, 15), (True, 20)):
        with pytest.raises(ConfigError, match=f"minimum_length = 5 samples .* give at least capacity={needed}, or"):
            _refinement(minimum_length=5, multi_label=several)


def test_without_alignment_guesses_pass_unchanged() -> None:
    refinement = _refinement(align="none")
    refinement.start(_probs(12), LABELS)
    guesses = _probs(8, seed=1)
    assert torch.equal(refinement.refine(guesses), guesses)


def test_alignment_is_that_of_the_setting() -> None:
    guesses = _probs(30, seed=1)
    specific, agnostic = _refinement(align="csda"), _refinement(align="da")
    for refinement in (specific, agnostic):
        refinement.start(_probs(12), LABELS)
    aligned = specific.refine(guesses)
    torch.testing.assert_close(aligned, align(guesses, specific.marginals.labeled, specific.marginals.unlabeled))
    aligned = agnostic.refine(guesses)
    assert agnostic.agnostic is not None
    expected = align_agnostic(guesses, agnostic.agnostic.labeled, agnostic.agnostic.unlabeled)
    torch.testing.assert_close(aligned, expected)


def test_each_label_is_aligned_as_a_problem_of_two_classes() -> None:
    refinement = _refinement(multi_label=True)
    random = torch.Generator().manual_seed(2)
    labels = (torch.rand(40, 3, generator=random) < 0.4).float()
    labeled, guesses = torch.rand(40, 3, generator=random), torch.rand(30, 3, generator=random)
    refinement.start(labeled, labels)
    aligned = refinement.refine(guesses)
    assert refinement.marginals.labeled.shape == (3, 2, 2)
    for label in range(3):
        alone = _refinement(2)
        alone.start(torch.stack((1 - labeled[:, label], labeled[:, label]), dim=-1), labels[:, label].long())
        pairs = torch.stack((1 - guesses[:, label], guesses[:, label]), dim=-1)
        torch.testing.assert_close(aligned[:, label], alone.refine(pairs)[:, 1])


def test_a_sample_is_queued_under_the_label_that_exceeds_its_threshold_most() -> None:
    refinement = _refinement(multi_label=True, delta=0.5)
    assert refinement.queue is not None
    marginals = refinement.marginals
    # c^u of "present": thresholds min(c^u, δ) = 0.5, 0.2 and 0.5; of "absent" on average 0.3.
    marginals.unlabeled_confidence.copy_(torch.tensor([[0.3, 0.9], [0.3, 0.2], [0.3, 0.6]]))
    marginals.labeled_confidence.fill_(1.0)
    aligned = torch.tensor(
        [
            [0.90, 0.30, 0.10],  # factors 1.8, 1.5, 0.2: label 0
            [0.70, 0.30, 0.10],  # factors 1.4, 1.5, 0.2: label 1, although label 0 is likelier
            [0.40, 0.10, 0.45],  # none exceeds its own; 1 − 0.45 > 0.3: "none"
            [0.10, 0.10, 0.60],  # label 2
        ]
    )
    pool = ImagePool(torch.zeros(50, 32, 32, 3, dtype=torch.uint8), Augmentation(), torch.Generator())
    refinement.push(pool.batch(torch.tensor([5, 6, 7, 8])), aligned)
    indices, targets, mask = refinement.queue.contents()
    held = {int(index): row for index, row in zip(indices[mask], refinement.queue.classes[mask].tolist(), strict=True)}
    assert held == {5: 0, 6: 1, 7: 3, 8: 2}
    for index, target in zip(indices[mask].tolist(), targets[mask], strict=True):
        assert torch.equal(target, aligned[index - 5])


def test_an_empty_queue_shows_labeled_images_and_a_filled_one_its_own() -> None:
    """BatchNorm sees all that is shown, so it shall be real images in natural proportions."""
    training = make_training("csda")
    method = training.method
    assert isinstance(method, SelfTraining)
    labeled = training.labeled_set.batch(torch.tensor([4, 2, 6]))
    batch, _, mask = method.refinement.queued(labeled, training.pool)
    assert not mask.any()
    assert torch.equal(batch.pixels, training.labeled_set.pixels[[4, 2, 6, 4, 2, 6, 4, 2]])
    training.begin()
    batch, _, mask = method.refinement.queued(labeled, training.pool)
    assert mask.any()
    assert torch.equal(batch.pixels, training.pool.pixels[batch.indices])


def test_hard_targets_are_the_likeliest_class_or_the_likely_labels() -> None:
    aligned = torch.tensor([[0.2, 0.5, 0.3], [0.6, 0.3, 0.1]])
    assert _refinement(soft=False).targets(aligned).tolist() == [[0, 1, 0], [1, 0, 0]]
    aligned = torch.tensor([[0.2, 0.51, 0.9], [0.5, 0.3, 0.1]])
    assert _refinement(soft=False, multi_label=True).targets(aligned).tolist() == [[0, 1, 1], [0, 0, 0]]
    assert torch.equal(_refinement().targets(aligned), aligned)


@pytest.mark.parametrize("queue", ["none", "vcq"])
@pytest.mark.parametrize("align_by", ["none", "da", "csda"])
def test_the_history_tells_what_the_parts_hold(align_by: str, queue: str) -> None:
    names = set(_refinement(align=align_by, queue=queue).history())
    expected = set() if align_by == queue == "none" else {"labeled_marginals", "unlabeled_marginals"}
    expected |= {"temperatures"} if align_by == "csda" else set()
    expected |= {"queue_counts"} if queue == "vcq" else set()
    assert names == expected


def test_an_estimated_shift_is_aligned_to() -> None:
    """Class-agnostic alignment with it has the estimated frequencies in the place of the labeled ones."""
    refinement = _refinement(align="da", queue="none", shift=0.01)
    labeled, guesses = _probs(12), _probs(30, seed=1)
    refinement.start(labeled, LABELS)
    refinement.start_unlabeled(guesses)
    shares = [
        [sum(p[j] for p, y in zip(labeled.tolist(), LABELS, strict=True) if y == k) / 12 for k in range(3)]
        for j in range(3)
    ]
    weights = reference.shift_weights(shares, guesses.mean(dim=0).tolist(), 0.01)
    target = reference.normalize([w * p for w, p in zip(weights, labeled.mean(dim=0).tolist(), strict=True)])
    expected = [reference.align_agnostic(q, target, guesses.mean(dim=0).tolist()) for q in guesses.tolist()]
    torch.testing.assert_close(refinement.align(guesses), torch.tensor(expected), rtol=1e-4, atol=1e-5)


def test_guesses_are_sharpened_after_alignment() -> None:
    refinement, sharpened = _refinement(queue="none"), _refinement(queue="none", guess_temperature=0.5)
    guesses = _probs(8, seed=1)
    for each in (refinement, sharpened):
        each.start(_probs(12), LABELS)
    squares = refinement.align(guesses) ** 2
    torch.testing.assert_close(sharpened.align(guesses), squares / squares.sum(dim=1, keepdim=True))
