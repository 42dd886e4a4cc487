"""Each metric against scikit-learn, weights against real resamples, intervals against their definition."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit, softmax
from scipy.stats import binomtest
from sklearn.metrics import (
    average_precision_score,
    balanced_accuracy_score,
    confusion_matrix,
    log_loss,
    precision_recall_curve,
    precision_score,
    recall_score,
    roc_auc_score,
    roc_curve,
)

from csda import metrics


@st.composite
def predictions(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities on a coarse grid, so that ties are common, and labels that may leave classes out."""
    n, size = draw(st.integers(2, 6)), draw(st.integers(1, 40))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    labels = generator.choice(draw(st.integers(1, n)), size)
    levels = draw(st.integers(1, 12))
    return generator.integers(1, levels + 1, (size, n)) / levels, labels


@st.composite
def multi_label_predictions(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    n, size = draw(st.integers(2, 6)), draw(st.integers(1, 40))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    return generator.integers(0, 9, (size, n)) / 8, (generator.random((size, n)) < generator.random(n)).astype(int)


def class_aucs(probs: np.ndarray, truth: np.ndarray) -> list[float]:
    both = [0 < positive.sum() < len(positive) for positive in truth.T]
    return [roc_auc_score(truth[:, i], probs[:, i]) if both[i] else np.nan for i in range(truth.shape[1])]


@given(predictions())
@settings(deadline=None, max_examples=100)
def test_metrics_agree_with_scikit_learn(case: tuple[np.ndarray, np.ndarray]) -> None:
    probs, labels = case
    n, predicted = probs.shape[1], probs.argmax(1)
    truth = np.eye(n, dtype=int)[labels]
    np.testing.assert_allclose(metrics.per_class_auc(probs, labels), class_aucs(probs, truth), atol=1e-12)

    counted = {"labels": range(n), "average": None, "zero_division": np.nan}
    np.testing.assert_allclose(metrics.recall(probs, labels), recall_score(labels, predicted, **counted))
    np.testing.assert_allclose(metrics.precision(probs, labels), precision_score(labels, predicted, **counted))
    np.testing.assert_allclose(metrics.mca(probs, labels), np.nanmean(recall_score(labels, predicted, **counted)))
    matrix = metrics.confusion(labels, predicted, n)
    assert matrix.dtype == np.int64
    np.testing.assert_array_equal(matrix, confusion_matrix(labels, predicted, labels=range(n)))


@given(multi_label_predictions())
@settings(deadline=None, max_examples=100)
def test_multi_label_metrics_agree_with_scikit_learn(case: tuple[np.ndarray, np.ndarray]) -> None:
    probs, labels = case
    expected = np.array(class_aucs(probs, labels))
    np.testing.assert_allclose(metrics.per_class_auc(probs, labels), expected, atol=1e-12)
    if np.isfinite(expected).any():
        assert metrics.auc(probs, labels) == pytest.approx(np.nanmean(expected))
    predicted = probs >= 0.5
    for i, value in enumerate(metrics.recall(probs, labels)):
        np.testing.assert_allclose(value, recall_score(labels[:, i], predicted[:, i], zero_division=np.nan))
    if all(0 < positive.sum() < len(positive) for positive in labels.T):
        balanced = [balanced_accuracy_score(labels[:, i], predicted[:, i]) for i in range(labels.shape[1])]
        assert metrics.mca(probs, labels) == pytest.approx(np.mean(balanced))


@given(predictions(), st.integers(0, 2**32))
@settings(deadline=None, max_examples=100)
def test_weights_count_images_as_often_as_they_say(case: tuple[np.ndarray, np.ndarray], seed: int) -> None:
    probs, labels = case
    weights = np.random.default_rng(seed).integers(0, 4, (5, len(labels)))
    for statistic in (metrics.auc, metrics.mca, metrics.per_class_auc, metrics.recall, metrics.precision):
        repeated = [statistic(probs.repeat(row, axis=0), labels.repeat(row)) for row in weights]
        np.testing.assert_allclose(statistic(probs, labels, weights), repeated, atol=1e-12)


@pytest.mark.parametrize(
    ("scores", "positive", "expected"),
    [
        ([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1], 0.75),
        ([0.5, 0.5, 0.5], [1, 0, 1], 0.5),
        ([3, 2, 1], [0, 1, 1], 0.0),
        ([0.2, 0.9], [1, 1], np.nan),
        ([0.2, 0.9], [0, 0], np.nan),
        ([], [], np.nan),
    ],
)
def test_roc_auc_by_hand(scores: list[float], positive: list[int], expected: float) -> None:
    area = metrics.roc_auc(np.array(scores, dtype=float), np.array(positive, dtype=bool))
    assert isinstance(area, float)
    np.testing.assert_equal(area, expected)


def test_class_that_nobody_has_is_left_out_of_the_means() -> None:
    probs, labels = np.array([[0.7, 0.2, 0.1], [0.3, 0.6, 0.1], [0.8, 0.1, 0.1]]), np.array([0, 1, 1])
    np.testing.assert_equal(metrics.recall(probs, labels), [1.0, 0.5, np.nan])
    assert metrics.mca(probs, labels) == 0.75
    assert metrics.auc(probs, labels) == 0.5
    assert np.isnan(metrics.auc(probs[:1], labels[:1]))


def test_prior_correction_undoes_a_skewed_prior() -> None:
    frequencies = np.array([0.9, 0.1])
    balanced = np.array([[0.3, 0.7], [0.5, 0.5]])
    skewed = balanced * frequencies / (balanced * frequencies).sum(1, keepdims=True)
    np.testing.assert_allclose(metrics.prior_corrected(skewed, frequencies), balanced)


def test_prior_correction_of_several_labels_is_that_of_two_classes_for_each() -> None:
    probs = np.random.default_rng(0).random((5, 3))
    counts, images = np.array([1, 30, 16]), 40
    corrected = metrics.prior_corrected(probs, counts / images, multi_label=True)
    for label, count in enumerate(counts):
        two = np.stack([probs[:, label], 1 - probs[:, label]], axis=1)
        expected = metrics.prior_corrected(two, np.array([count, images - count]) / images)[:, 0]
        np.testing.assert_allclose(corrected[:, label], expected)
    # More probable than its share of the images: predicted.
    np.testing.assert_array_equal(corrected >= 0.5, probs >= counts / images)


def test_a_label_that_all_have_or_none_is_not_corrected() -> None:
    probs = np.random.default_rng(0).random((5, 2))
    np.testing.assert_allclose(metrics.prior_corrected(probs, np.array([0.0, 1.0]), multi_label=True), probs)


def draw_test_set(size: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(3)
    labels = np.r_[np.arange(n), generator.choice(n, size - n, p=np.arange(n, 0, -1) / np.arange(n + 1).sum())]
    logits = generator.normal(size=(size, n)) + 1.2 * np.eye(n)[labels]
    return np.exp(logits) / np.exp(logits).sum(1, keepdims=True), labels


def test_interval_is_the_percentile_of_real_resamples_within_classes() -> None:
    probs, labels = draw_test_set(120, 4)
    low, high = metrics.bootstrap_interval(metrics.recall, probs, labels, samples=4000, strata=labels)
    generator, hits = np.random.default_rng(9), probs.argmax(1) == labels
    for i in range(4):
        own = hits[labels == i]
        means = own[generator.integers(len(own), size=(4000, len(own)))].mean(1)
        np.testing.assert_allclose([low[i], high[i]], np.percentile(means, [2.5, 97.5]), atol=0.03)


def test_intervals_depend_on_seed_and_widen_with_level() -> None:
    probs, labels = draw_test_set(80, 3)

    def interval(seed: int = 0, level: float = 0.95) -> np.ndarray:
        return metrics.bootstrap_interval(metrics.auc, probs, labels, strata=labels, seed=seed, level=level)

    np.testing.assert_array_equal(interval(), interval())
    assert not np.array_equal(interval(), interval(seed=1))
    assert (
        interval(level=0.99)[0] < interval()[0] < metrics.auc(probs, labels) < interval()[1] < interval(level=0.99)[1]
    )


def test_strata_keep_a_class_of_one_image() -> None:
    probs, labels = np.array([[0.9, 0.1], *[[0.2, 0.8]] * 30]), np.array([0] + [1] * 30)

    def lost(_: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> np.ndarray:
        return (weights @ (labels == 0) == 0).astype(float)

    assert metrics.bootstrap_interval(lost, probs, labels, strata=labels)[1] == 0
    assert metrics.bootstrap_interval(lost, probs, labels)[1] == 1


def test_interval_of_what_is_never_defined_is_nan() -> None:
    probs, labels = np.array([[0.9, 0.1], [0.6, 0.4]]), np.array([0, 0])
    np.testing.assert_equal(metrics.bootstrap_interval(metrics.recall, probs, labels), [[1.0, np.nan]] * 2)


def test_large_sets_are_resampled_in_blocks() -> None:
    probs, _ = draw_test_set(50_000, 2)
    sizes: list[int] = []

    def weigh(_: np.ndarray, weights: np.ndarray) -> np.ndarray:
        sizes.append(weights.size)
        return weights.sum(1)

    np.testing.assert_array_equal(metrics.bootstrap_interval(weigh, probs, samples=200), [50_000, 50_000])
    assert len(sizes) > 1
    assert sum(sizes) == 200 * 50_000


def test_thousand_resamples_of_a_test_set_take_under_two_seconds() -> None:
    probs, labels = draw_test_set(700, 7)
    started = time.process_time()
    for statistic in (metrics.auc, metrics.mca, metrics.recall):
        metrics.bootstrap_interval(statistic, probs, labels, strata=labels)
    assert time.process_time() - started < 2


def test_paired_interval_over_seeds() -> None:
    differences = np.array([0.03, 0.05, 0.02, 0.06, 0.04])
    low, high = metrics.paired_interval(differences)
    assert 0.02 < low < differences.mean() < high < 0.06
    np.testing.assert_array_equal(metrics.paired_interval(np.array([0.1])), [0.1, 0.1])


def test_a_decision_is_the_prediction_as_a_label() -> None:
    probs = np.random.default_rng(0).random((40, 3))
    probs[0], probs[1] = 0.4, 0.5
    assert metrics.decide(probs) == metrics.predict(probs).tolist()
    several = metrics.decide(probs, multi_label=True)
    assert several[:2] == [(), (0, 1, 2)]
    assert [tuple(np.flatnonzero(row)) for row in metrics.predict(probs, multi_label=True)] == several
    assert metrics.decide(probs[:0], multi_label=True) == []


def test_wilson_interval_is_that_of_scipy() -> None:
    counts = np.array([1, 2, 9, 10, 350, 5, 5])
    hits = np.array([0, 2, 4, 10, 17, 0, 5])
    for level in (0.9, 0.95):
        expected = [binomtest(int(k), int(n)).proportion_ci(level, "wilson") for k, n in zip(hits, counts, strict=True)]
        np.testing.assert_allclose(metrics.wilson_interval(hits, counts, level).T, expected, atol=1e-12)
    assert np.isnan(metrics.wilson_interval(np.array([0]), np.array([0]))).all()


def test_interval_of_a_mean_of_shares_holds_what_it_promises() -> None:
    """Over drawn test sets of a few images, where a bootstrap within classes is often a single point."""
    generator, counts, shares = np.random.default_rng(3), np.array([2, 4, 30]), np.array([0.5, 0.9, 0.8])
    held = [
        low <= shares.mean() <= high
        for low, high in (metrics.mean_interval(generator.binomial(counts, shares), counts) for _ in range(2000))
    ]
    assert 0.93 < np.mean(held) <= 1
    low, high = metrics.mean_interval(np.array([1, 0]), np.array([1, 0]))
    assert (low, high) == (pytest.approx(metrics.wilson_interval(1, 1)[0]), 1)
    assert np.isnan(metrics.mean_interval(np.zeros(2), np.zeros(2))).all()


def test_difference_of_shares_is_newcombes_and_one_image_decides_nothing() -> None:
    # Table II of Newcombe (1998): 36 + 12 + 2 + 0 images, difference 0.2.
    ours = np.repeat([1, 1, 0, 0], [36, 12, 2, 0])
    theirs = np.repeat([1, 0, 1, 0], [36, 12, 2, 0])
    np.testing.assert_allclose(metrics.difference_interval(ours, theirs), [0.0569, 0.3404], atol=1e-4)
    low, high = metrics.difference_interval(np.array([1]), np.array([0]))
    assert low < 0 < high
    low, high = metrics.difference_interval(np.ones(40), np.zeros(40))
    assert low > 0.8
    assert np.isnan(metrics.difference_interval(np.empty(0), np.empty(0))).all()


@given(predictions())
@settings(deadline=None, max_examples=60)
def test_curves_agree_with_scikit_learn(case: tuple[np.ndarray, np.ndarray]) -> None:
    probs, labels = case
    scores, positive = probs[:, 0], labels == 0
    if not 0 < positive.sum() < len(positive):
        return
    expected = roc_curve(positive, scores, drop_intermediate=False)
    for ours, theirs in zip(metrics.roc_curve(scores, positive), expected, strict=True):
        np.testing.assert_allclose(ours, theirs)
    precisions, recalls, thresholds = precision_recall_curve(positive, scores)
    ours = metrics.precision_recall_curve(scores, positive)
    for mine, theirs in zip(ours, (recalls[:-1][::-1], precisions[:-1][::-1], thresholds[::-1]), strict=True):
        np.testing.assert_allclose(mine, theirs)
    np.testing.assert_allclose(metrics.average_precision(scores, positive), average_precision_score(positive, scores))
    specificity = 0.8
    reached = max(true for false, true in zip(*expected[:2], strict=True) if 1 - false >= specificity - 1e-12)
    assert metrics.sensitivity_at(specificity, scores, positive) == pytest.approx(reached)


def test_weights_of_a_curve_are_repetitions() -> None:
    generator = np.random.default_rng(2)
    scores, positive, weights = generator.integers(0, 9, 30) / 8, generator.random(30) < 0.4, np.arange(30) % 3
    repeated = metrics.sensitivity_at(0.7, np.repeat(scores, weights), np.repeat(positive, weights))
    assert metrics.sensitivity_at(0.7, scores, positive, weights[None])[0] == pytest.approx(repeated)
    expected = average_precision_score(positive, scores, sample_weight=weights)
    assert metrics.average_precision(scores, positive, weights) == pytest.approx(expected)


def test_calibration_error_by_its_definition() -> None:
    generator = np.random.default_rng(5)
    probs, labels = generator.dirichlet(np.ones(4), 200), generator.integers(4, size=200)
    sure, right, expected = probs.max(1), probs.argmax(1) == labels, 0.0
    for place in range(10):
        inside = (sure > place / 10) & (sure <= (place + 1) / 10)
        if inside.any():
            expected += inside.mean() * abs(sure[inside].mean() - right[inside].mean())
    assert metrics.calibration_error(probs, labels) == pytest.approx(expected)
    assert metrics.calibration_error(np.eye(3), np.arange(3)) == 0


def test_coverage_keeps_the_surest_and_ties_together() -> None:
    confidence, hits = np.array([0.5, 0.9, 0.7, 0.9]), np.array([False, True, True, False])
    coverage, accuracy = metrics.coverage_curve(confidence, hits)
    np.testing.assert_allclose(coverage, [0.5, 0.75, 1])
    np.testing.assert_allclose(accuracy, [0.5, 2 / 3, 0.5])


def test_a_temperature_divides_the_logits() -> None:
    generator = np.random.default_rng(4)
    logits, labels = generator.normal(size=(50, 3)) * 2, generator.integers(3, size=50)
    np.testing.assert_allclose(
        metrics.scale_temperature(softmax(logits, axis=1), 2.5), softmax(logits / 2.5, axis=1), rtol=1e-9
    )
    scaled = metrics.scale_temperature(expit(logits), 0.7, multi_label=True)
    np.testing.assert_allclose(scaled, expit(logits / 0.7), rtol=1e-9)
    assert metrics.log_loss(softmax(logits, axis=1), labels) == pytest.approx(log_loss(labels, softmax(logits, axis=1)))
