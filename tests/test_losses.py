"""The losses against loops, and what must hold when no slot is filled."""

from __future__ import annotations

import doctest

import torch
from hypothesis import given
from hypothesis import strategies as st

from csda import losses
from reference import losses as reference
from reference.cases import Case, OnDevice, cases, thoroughly


def test_examples_in_docstrings():
    result = doctest.testmod(losses)
    assert result.attempted > 6
    assert result.failed == 0


@thoroughly
@given(cases(), st.integers(0, 12))
def test_eq18_against_loops(case: Case, filled: int):
    logits = torch.tensor(case.random.normal(scale=4, size=(12, case.n)), dtype=case.dtype)
    targets, labels, mask = case.probs(12), case.labels(12), torch.arange(12) < filled
    ones = torch.nn.functional.one_hot(labels, case.n).to(case.dtype)
    soft = [reference.cross_entropy(z, t) for z, t in zip(logits.tolist(), targets.tolist(), strict=True)]
    hard = [reference.cross_entropy(z, t) for z, t in zip(logits.tolist(), ones.tolist(), strict=True)]
    binary = [reference.binary_cross_entropy(z, t) for z, t in zip(logits.tolist(), targets.tolist(), strict=True)]
    for actual, expected in (
        (losses.labeled_loss(logits, labels), sum(hard) / 12),
        (losses.labeled_loss(logits, targets), sum(soft) / 12),
        (losses.unlabeled_loss(logits, targets, mask), reference.mean_over_filled(soft, mask.tolist())),
        (losses.multilabel_labeled_loss(logits, targets), sum(binary) / 12),
        (losses.multilabel_unlabeled_loss(logits, targets, mask), reference.mean_over_filled(binary, mask.tolist())),
    ):
        assert actual.dtype == case.dtype
        torch.testing.assert_close(actual.double(), torch.tensor(expected).double(), rtol=1e-5, atol=1e-6)


def test_no_filled_slot_gives_no_loss_and_no_gradient():
    for loss in (losses.unlabeled_loss, losses.multilabel_unlabeled_loss):
        logits = torch.randn(4, 3, requires_grad=True)
        value = loss(logits, torch.zeros(4, 3), torch.zeros(4, dtype=torch.bool))
        value.backward()
        assert value.item() == 0
        assert logits.grad is not None
        assert logits.grad.count_nonzero() == 0


def test_empty_slots_have_no_influence():
    mask = torch.tensor([True, False, True])
    logits = torch.randn(3, 4, requires_grad=True)
    targets = torch.rand(3, 4).softmax(-1)
    losses.unlabeled_loss(logits, targets, mask).backward()
    assert logits.grad is not None
    assert logits.grad[1].count_nonzero() == 0
    torch.testing.assert_close(
        losses.unlabeled_loss(logits, targets, mask), losses.labeled_loss(logits[mask], targets[mask])
    )


def test_parts_of_a_queue_divided_by_their_mean_count_average_to_the_whole():
    logits, targets = torch.randn(6, 3), torch.rand(6, 3).softmax(-1)
    for filled in range(7):
        mask = torch.arange(6) < filled
        count = mask.sum() / 2
        parts = [losses.unlabeled_loss(logits[s], targets[s], mask[s], count) for s in (slice(0, 3), slice(3, 6))]
        torch.testing.assert_close(sum(parts) / 2, losses.unlabeled_loss(logits, targets, mask))


def test_eq19_ramp_and_total():
    assert [losses.ramp(epoch, 256) for epoch in (0, 128, 256)] == [0, 0.5, 1]
    weight = losses.ramp(torch.tensor(64.0), 256)
    assert losses.total_loss(torch.tensor(1.0), torch.tensor(2.0), weight).item() == 1.5


def test_nothing_is_copied_to_the_host():
    logits, targets, mask = torch.randn(4, 3), torch.rand(4, 3).softmax(-1), torch.tensor([True, False, True, True])
    with OnDevice():
        unlabeled = losses.unlabeled_loss(logits, targets, mask)
        losses.multilabel_unlabeled_loss(logits, targets, mask)
        losses.total_loss(losses.labeled_loss(logits, targets), unlabeled, losses.ramp(torch.tensor(3.0), 4))
