"""The linear probe against scikit-learn on all features, and against the gradient of what it minimises."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from scipy.special import expit, log_softmax
from sklearn.linear_model import LogisticRegression

from csda.probe import STRENGTHS, Balance, Probe, assign_folds, fit_probe

Array = npt.NDArray[np.float64]


def draw(count: int, classes: int, width: int = 30, seed: int = 0) -> tuple[Array, npt.NDArray[np.int64]]:
    """Features that tell the classes apart to some degree; later classes are rarer."""
    rng = np.random.default_rng(seed)
    shares = 0.5 ** np.arange(classes)
    targets = np.concatenate([np.arange(classes), rng.choice(classes, count - classes, p=shares / shares.sum())])
    return rng.normal(size=(classes, width))[targets] * 0.5 + rng.normal(size=(count, width)), targets


def probabilities(probe: Probe, features: Array) -> Array:
    return np.exp(log_softmax(features @ probe.weight.T + probe.bias, axis=1))


@pytest.mark.parametrize("count", [20, 90], ids=["fewer images than features", "more"])
@pytest.mark.parametrize("classes", [2, 4])
def test_it_is_scikit_learns_regression_at_its_strength(count: int, classes: int) -> None:
    features, targets = draw(count, classes)
    for balance, weights in (("weights", "balanced"), ("none", None)):
        probe = fit_probe(features, targets, classes, balance=balance)
        assert probe.strength in STRENGTHS
        model = LogisticRegression(C=probe.strength, class_weight=weights, tol=1e-8, max_iter=5000)
        theirs = model.fit(features, targets).predict_proba(features)
        np.testing.assert_allclose(probabilities(probe, features), theirs, atol=2e-3)


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("balance", ["prior", "none"])
def test_its_penalty_makes_a_mean_loss_stand_still(classes: int, balance: Balance) -> None:
    """So that steps on the labels alone, with the class frequencies in the logits as the probe has them, stay at it."""
    features, targets = draw(80, classes)
    probe = fit_probe(features, targets, classes, balance=balance)
    offset = np.log(np.bincount(targets) / len(targets)) if balance == "prior" else 0.0
    logits = features @ probe.weight.T + probe.bias + offset
    errors = (np.exp(log_softmax(logits, axis=1)) - np.eye(classes)[targets]) / len(targets)
    gradient = errors.T @ features + probe.penalty[:, None] * probe.weight
    away = errors.T @ features
    assert np.abs(gradient).max() < 0.01 * np.abs(away).max()
    assert np.abs(errors.sum(axis=0)).max() < 1e-4


def test_of_several_labels_each_has_a_regression_of_its_own() -> None:
    features, first = draw(60, 2, seed=1)
    _, second = draw(60, 2, seed=2)
    targets = np.stack([first, second, np.zeros(60, np.int64)], axis=1)
    probe = fit_probe(features, targets, 3)
    for label, own in enumerate((first, second)):
        alone = fit_probe(features, own, 2)
        expected = probabilities(alone, features)[:, 1]
        np.testing.assert_allclose(expit(features @ probe.weight[label] + probe.bias[label]), expected, atol=1e-9)
        errors = (expected - own) * (60 / (2 * np.bincount(own)))[own] / 60
        gradient = errors @ features + probe.penalty[label] * probe.weight[label]
        assert np.abs(gradient).max() < 0.01 * np.abs(errors @ features).max()
    assert (probe.weight[2] == 0).all()  # a label that no image has
    assert probe.bias[2] < -3


def test_cross_validation_finds_what_is_noise() -> None:
    """Features that say nothing of the class are regularised away; ones that say all are not."""
    rng = np.random.default_rng(0)
    targets = rng.integers(0, 3, 90)
    noise = fit_probe(rng.normal(size=(90, 40)), targets, 3)
    clear = fit_probe(3.0 * np.eye(3)[targets] + 0.1 * rng.normal(size=(90, 3)), targets, 3)
    assert noise.strength <= 1e-3 < 1.0 <= clear.strength


def test_folds_keep_groups_whole_and_classes_spread() -> None:
    rng = np.random.default_rng(3)
    targets = np.array([0] * 40 + [1] * 10 + [2] * 3 + [3])
    groups = np.concatenate([np.arange(40) // 4, 10 + np.arange(10) // 2, 15 + np.arange(3), [99]])
    folds = assign_folds(targets, groups, rng)
    for group in np.unique(groups):
        assert len(set(folds[groups == group])) == 1
    assert np.bincount(folds[targets == 0], minlength=5).tolist() == [8] * 5
    assert np.bincount(folds[targets == 1], minlength=5).tolist() == [2] * 5
    assert len(set(folds[targets == 2])) == 3
    assert folds[-1] == -1  # the only image of its class is always learned from
    assert assign_folds(targets, groups, rng, every_image=True)[-1] >= 0


def test_a_class_with_one_image_does_not_stop_it() -> None:
    features, targets = draw(12, 4)
    targets = np.where(targets == 3, 2, targets)
    targets[0] = 3
    assert np.isfinite(fit_probe(features, targets, 4).weight).all()
    alone = fit_probe(features[:4], np.arange(4), 4)
    assert probabilities(alone, features[:4]).argmax(axis=1).tolist() == [0, 1, 2, 3]
