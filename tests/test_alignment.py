"""Each equation against its loop, on random cases; then the edges by name."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from csda import alignment
from reference import alignment as reference
from reference.cases import Case, OnDevice, cases, thoroughly


def assert_rows_sum_to_one(values: torch.Tensor) -> None:
    torch.testing.assert_close(values.sum(-1), torch.ones_like(values.sum(-1)))


def assert_equal(case: Case, actual: torch.Tensor, expected: object) -> None:
    assert actual.dtype == case.dtype
    torch.testing.assert_close(actual.double(), torch.tensor(expected, dtype=torch.float64), **case.tolerance)


def test_examples_in_docstrings():
    result = doctest.testmod(alignment)
    assert result.attempted > 15
    assert result.failed == 0


@thoroughly
@given(cases())
def test_normalize(case: Case):
    values = case.probs(5) * 7
    values[2] = 0
    actual = alignment.normalize(values)
    assert_equal(case, actual, [reference.normalize(row) for row in values.tolist()])
    assert_rows_sum_to_one(actual)


@thoroughly
@given(cases())
def test_eq7_change_basis(case: Case):
    matrix = torch.tensor(case.random.random((case.n, case.n)), dtype=case.dtype)
    unlabeled = case.marginals()
    actual = alignment.change_basis(matrix, unlabeled)
    assert_equal(case, actual, reference.change_basis(matrix.tolist(), unlabeled.tolist()))
    assert_rows_sum_to_one(actual)


@thoroughly
@given(cases())
def test_eq9_transition(case: Case):
    labeled, unlabeled = case.marginals(), case.marginals()
    actual = alignment.transition(labeled, unlabeled)
    assert_equal(case, actual, reference.transition(labeled.tolist(), unlabeled.tolist()))


@thoroughly
@given(cases())
def test_eq10_align(case: Case):
    probs, labeled, unlabeled = case.probs(12), case.marginals(), case.marginals()
    actual = alignment.align(probs, labeled, unlabeled)
    expected = [reference.align(q, labeled.tolist(), unlabeled.tolist()) for q in probs.tolist()]
    assert_equal(case, actual, expected)
    assert_rows_sum_to_one(actual)


@thoroughly
@given(cases())
def test_eq10_agnostic(case: Case):
    probs, labeled, unlabeled = case.probs(12), case.probs(1)[0], case.probs(1)[0]
    actual = alignment.align_agnostic(probs, labeled, unlabeled)
    expected = [reference.align_agnostic(q, labeled.tolist(), unlabeled.tolist()) for q in probs.tolist()]
    assert_equal(case, actual, expected)
    assert_rows_sum_to_one(actual)


@thoroughly
@given(cases())
def test_eq12_class_sums(case: Case):
    probs, labels = case.probs(16), case.labels(16)
    sums, numbers = alignment.class_sums(probs, labels)
    means = reference.class_means(probs.tolist(), labels.tolist(), case.n)
    for i, mean in enumerate(means):
        assert (numbers[i] == 0) == (mean is None)
        assert_equal(case, sums[i] / numbers[i].clamp(min=1), mean or [0.0] * case.n)


@thoroughly
@given(cases())
def test_eq13_absent(case: Case):
    confidence, other = case.confidences(), case.confidences()
    labeled, unlabeled = case.marginals(), case.marginals()
    expected = [reference.absent_confidence(i, confidence.tolist(), other.tolist()) for i in range(case.n)]
    assert_equal(case, alignment.absent_confidence(confidence, other), expected)
    rows = alignment.absent_rows(labeled, unlabeled)
    assert_equal(case, rows, [reference.absent_row(i, labeled.tolist(), unlabeled.tolist()) for i in range(case.n)])
    assert_rows_sum_to_one(rows)


@thoroughly
@given(cases(), st.sampled_from([0.0, 0.25, 1.0]))
def test_eq14_temperatures(case: Case, lowest: float):
    confidence, labeled = case.confidences(), case.marginals()
    T = alignment.temperatures(confidence, lowest)
    assert_equal(case, T, [reference.temperature(c, lowest) for c in confidence.tolist()])
    tempered = alignment.temper(labeled, T)
    assert_equal(
        case, tempered, [reference.temper(row, t) for row, t in zip(labeled.tolist(), T.tolist(), strict=True)]
    )
    assert_rows_sum_to_one(tempered)


@thoroughly
@given(cases(), st.integers(1, 1000), st.sampled_from([0.0, 0.5, 1.0, 2.0]))
def test_eq15_queue_lengths(case: Case, capacity: int, gamma: float):
    confidence = case.confidences()
    lengths = alignment.queue_lengths(confidence, capacity, gamma)
    assert lengths.dtype == torch.int64
    assert lengths.tolist() == reference.queue_lengths(confidence.tolist(), capacity, gamma)
    assert lengths.sum() <= capacity


@thoroughly
@given(cases(), st.sampled_from([0.0, 0.25, 0.5, 1.0]))
def test_eq16_eq17_admitted(case: Case, delta: float):
    confidence, aligned = case.confidences(), case.probs(20)
    thresholds = alignment.thresholds(confidence, delta)
    assert thresholds.tolist() == [reference.threshold(c, delta) for c in confidence.tolist()]
    admitted = alignment.admitted(aligned, thresholds)
    assert admitted.tolist() == [reference.enqueue(q, confidence.tolist(), delta) for q in aligned.tolist()]


@settings(thoroughly, max_examples=60)
@given(cases(st.integers(2, 7)), st.sampled_from([1e-3, 0.1, 10.0]))
def test_eq7_estimate_basis(case: Case, ridge: float):
    labeled, unlabeled = case.marginals(), case.marginals()
    expected = reference.estimate_basis(labeled.tolist(), unlabeled.tolist(), ridge)
    assert_equal(case, alignment.estimate_basis(labeled, unlabeled, ridge), expected)


def test_a_general_basis_lies_between_the_diagonal_case_and_no_alignment():
    labeled = torch.tensor([[0.7, 0.2, 0.1], [0.3, 0.6, 0.1], [0.2, 0.3, 0.5]])
    unlabeled = torch.tensor([[0.9, 0.05, 0.05], [0.2, 0.7, 0.1], [0.1, 0.2, 0.7]])
    exact, none = (alignment.estimate_basis(labeled, unlabeled, ridge) for ridge in (1e-9, 1e9))
    torch.testing.assert_close(alignment.change_basis(exact, unlabeled), labeled, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(none, torch.eye(3))


@thoroughly
@given(cases(), st.sampled_from([0.1, 1.0, 20.0]))
def test_shrink(case: Case, strength: float):
    probs, labeled, unlabeled = case.probs(12), case.marginals(), case.marginals()
    numbers = torch.tensor(case.random.integers(0, 5, case.n), dtype=case.dtype)
    counts = (alignment.shrink(rows, numbers, strength) for rows in (labeled, unlabeled))
    rows = labeled.tolist(), unlabeled.tolist(), numbers.tolist()
    expected = [reference.align_shrunken(q, *rows, strength) for q in probs.tolist()]
    assert_equal(case, alignment.align(probs, *counts), expected)


def test_with_many_samples_shrinkage_vanishes_and_with_none_nothing_is_aligned():
    probs, labeled, unlabeled = (
        torch.tensor([[0.6, 0.4]]),
        torch.tensor([[0.6, 0.4]] * 2),
        torch.tensor([[0.8, 0.2]] * 2),
    )
    for number, expected in ((1e6, alignment.align(probs, labeled, unlabeled)), (0.0, probs)):
        counts = (alignment.shrink(rows, torch.full((2,), number), 3.0) for rows in (labeled, unlabeled))
        torch.testing.assert_close(alignment.align(probs, *counts), expected, rtol=1e-4, atol=1e-5)


@settings(thoroughly, max_examples=60)
@given(cases(st.integers(2, 7)), st.sampled_from([1e-3, 0.1]))
def test_shift_weights(case: Case, ridge: float):
    probs, labels, mean = case.probs(30), case.labels(30), case.probs(1)[0]
    shares = alignment.class_sums(probs, labels)[0].mT / len(probs)
    assert_equal(
        case,
        alignment.shift_weights(shares, mean, ridge),
        reference.shift_weights(shares.tolist(), mean.tolist(), ridge),
    )


def test_a_known_shift_is_found():
    """Predictions of a known confusion on a population whose classes have other frequencies."""
    given_class = torch.tensor([[0.7, 0.2, 0.1], [0.2, 0.7, 0.1], [0.1, 0.3, 0.6]])  # row k: mean prediction on class k
    labeled, unlabeled = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.2, 0.5, 0.3])
    weights = alignment.shift_weights((labeled[:, None] * given_class).mT, unlabeled @ given_class, ridge=1e-9)
    torch.testing.assert_close(alignment.normalize(weights * labeled), unlabeled, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("n", [2, 100])
def test_few_and_many_classes(n: int):
    case = Case(n, torch.float32, np.random.default_rng(n))
    probs, labeled, unlabeled = case.probs(50), case.marginals(), case.marginals()
    expected = [reference.align(q, labeled.tolist(), unlabeled.tolist()) for q in probs.tolist()]
    assert_equal(case, alignment.align(probs, labeled, unlabeled), expected)


@thoroughly
@given(cases(st.just(2)), st.integers(1, 6))
def test_leading_axes_are_labels(case: Case, K: int):
    """K labels of two classes at once are the same as one label after the other."""
    probs, labeled, unlabeled = case.probs(9, K), case.probs(K, 2), case.probs(K, 2)
    confidence, other = case.probs(K), case.probs(K)
    classes = probs.argmax(-1)
    sums, numbers = alignment.class_sums(probs, classes)
    together = {
        "align": alignment.align(probs, labeled, unlabeled).movedim(1, 0),
        "agnostic": alignment.align_agnostic(probs, confidence, other).movedim(1, 0),
        "transition": alignment.transition(labeled, unlabeled),
        "basis": alignment.change_basis(labeled, unlabeled),
        "estimated_basis": alignment.estimate_basis(labeled, unlabeled, 0.1),
        "shrink": alignment.shrink(labeled, 9 * confidence, 3.0),
        "shift": alignment.shift_weights(labeled, confidence, 0.1),
        "sums": sums,
        "numbers": numbers,
        "absent_confidence": alignment.absent_confidence(confidence, other),
        "absent_rows": alignment.absent_rows(labeled, unlabeled),
        "temper": alignment.temper(labeled, alignment.temperatures(confidence)),
        "lengths": alignment.queue_lengths(confidence, 100, 1.0),
        "admitted": alignment.admitted(probs, alignment.thresholds(other, 0.25)).movedim(1, 0),
    }
    for k in range(K):
        sums, numbers = alignment.class_sums(probs[:, k], classes[:, k])
        alone = {
            "align": alignment.align(probs[:, k], labeled[k], unlabeled[k]),
            "agnostic": alignment.align_agnostic(probs[:, k], confidence[k], other[k]),
            "transition": alignment.transition(labeled[k], unlabeled[k]),
            "basis": alignment.change_basis(labeled[k], unlabeled[k]),
            "estimated_basis": alignment.estimate_basis(labeled[k], unlabeled[k], 0.1),
            "shrink": alignment.shrink(labeled[k], 9 * confidence[k], 3.0),
            "shift": alignment.shift_weights(labeled[k], confidence[k], 0.1),
            "sums": sums,
            "numbers": numbers,
            "absent_confidence": alignment.absent_confidence(confidence[k], other[k]),
            "absent_rows": alignment.absent_rows(labeled[k], unlabeled[k]),
            "temper": alignment.temper(labeled[k], alignment.temperatures(confidence[k])),
            "lengths": alignment.queue_lengths(confidence[k], 100, 1.0),
            "admitted": alignment.admitted(probs[:, k], alignment.thresholds(other[k], 0.25)),
        }
        torch.testing.assert_close({name: values[k] for name, values in together.items()}, alone)


def test_marginals_that_agree_change_nothing():
    probs, rows = torch.tensor([[0.6, 0.3, 0.1], [0.0, 0.5, 0.5]]), torch.tensor([[0.7, 0.2, 0.1]] * 3)
    torch.testing.assert_close(alignment.align(probs, rows, rows), probs)


def test_the_paper_special_cases_agree():
    """Eq. (8) and (9) undo each other, and equal rows make alignment class-agnostic."""
    labeled, unlabeled = torch.tensor([[0.7, 0.2, 0.1]] * 3), torch.tensor([[0.5, 0.3, 0.2]] * 3)
    torch.testing.assert_close(alignment.normalize(alignment.transition(labeled, unlabeled) * unlabeled), labeled)
    probs = torch.tensor([[0.6, 0.3, 0.1], [0.1, 0.5, 0.4]])
    torch.testing.assert_close(
        alignment.align(probs, labeled, unlabeled), alignment.align_agnostic(probs, labeled[0], unlabeled[0])
    )


def test_ties_go_to_the_first_class():
    labeled = torch.tensor([[0.9, 0.1], [0.2, 0.8]])
    aligned = alignment.align(torch.tensor([[0.5, 0.5]]), labeled, torch.full((2, 2), 0.5))
    torch.testing.assert_close(aligned, torch.tensor([[0.9, 0.1]]))


def test_zeros_never_divide():
    probs, labeled, unlabeled = torch.eye(3), torch.eye(3).roll(1, 0), torch.eye(3)
    torch.testing.assert_close(alignment.align(probs, labeled, unlabeled), torch.full((3, 3), 1 / 3))
    assert alignment.absent_confidence(torch.zeros(3), torch.ones(3)).tolist() == [0, 0, 0]
    assert_rows_sum_to_one(alignment.absent_rows(torch.eye(3), torch.eye(3).roll(1, 0)))
    torch.testing.assert_close(alignment.temper(torch.eye(3), torch.zeros(3)), torch.full((3, 3), 1 / 3))


def test_confidence_rounded_above_one_gives_no_negative_temperature():
    T = alignment.temperatures(torch.tensor([1.0 + 1e-6, 1.0]))
    assert T.tolist() == [0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exact_shares_lose_no_slot_to_rounding(dtype: torch.dtype):
    for n in range(1, 101):
        for value in (1 / 3, 0.1, 0.7, 1e-3):
            lengths = alignment.queue_lengths(torch.full((n,), value, dtype=dtype), 5 * n, 1.0)
            assert lengths.tolist() == [5] * n
    assert alignment.queue_lengths(torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=dtype), 10, 1.0).tolist() == [1, 2, 3, 4]


def test_lengths_at_the_edges():
    assert alignment.queue_lengths(torch.zeros(4), 10, 1.0).tolist() == [2, 2, 2, 2]
    assert alignment.queue_lengths(torch.rand(5), 3, 0.0).tolist() == [0] * 5
    assert alignment.queue_lengths(torch.tensor([1.0, 0.0]), 8, 1.0).tolist() == [8, 0]
    assert alignment.queue_lengths(torch.tensor([1.0, 0.0]), 8, 1.0, minimum=1).tolist() == [7, 1]
    assert alignment.queue_lengths(torch.tensor([0.5, 0.5], dtype=torch.bfloat16), 511, 1.0).tolist() == [255, 255]


def test_admission_is_strict():
    assert alignment.admitted(torch.tensor([[0.25, 0.75]]), torch.tensor([0.0, 0.75])).tolist() == [False]


def test_nothing_is_copied_to_the_host():
    case = Case(4, torch.float32, np.random.default_rng(0))
    probs, labeled, unlabeled, confidence = case.probs(8), case.marginals(), case.marginals(), case.confidences()
    with OnDevice():
        alignment.change_basis(alignment.estimate_basis(labeled, unlabeled, 0.1), unlabeled)
        alignment.shift_weights(labeled, confidence, 0.1)
        alignment.shrink(labeled, confidence, 3.0)
        alignment.class_sums(probs, probs.argmax(-1))
        alignment.absent_rows(labeled, unlabeled)
        alignment.absent_confidence(confidence, confidence)
        aligned = alignment.align(probs, alignment.temper(labeled, alignment.temperatures(confidence)), unlabeled)
        alignment.align_agnostic(probs, confidence, confidence)
        alignment.queue_lengths(confidence, 12, 0.5, 1)
        alignment.admitted(aligned, alignment.thresholds(confidence, 0.25))


def test_the_guard_refuses_what_it_should():
    values = torch.arange(3.0)
    for copying in (values[0].item, lambda: values[values > 1], values.nonzero, lambda: bool(values[0])):
        with pytest.raises(AssertionError, match="host"), OnDevice():
            copying()
