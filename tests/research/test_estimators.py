"""The table beside scikit-learn: every estimator sees the same labels, and the figures are those of the predictions."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.base import BaseEstimator, ClassifierMixin

from csda.research import estimators


class _Oracle(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Knows the class by the first feature, standardised, and remembers what it was given."""

    given: list[np.ndarray]

    def __init__(self) -> None:
        self.given = []

    def fit(self, values: np.ndarray, labels: np.ndarray) -> _Oracle:
        self.given.append(labels)
        self.classes_ = np.arange(3)
        return self

    def predict_proba(self, values: np.ndarray) -> np.ndarray:
        return np.eye(3)[np.digitize(values[:, 0], [0.2, 1.8])]


def test_labels_are_few_and_every_class_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = np.array([0] * 200 + [1] * 80 + [2] * 20)
    features = np.column_stack([labels.astype(float), np.random.default_rng(0).normal(size=300)])
    oracle = _Oracle()
    monkeypatch.setattr(estimators, "ESTIMATORS", {"oracle": lambda seed: oracle})
    found = estimators.compare(features, labels, [12], seeds=3)
    assert [figures[0] for figures in found[12]["oracle"]] == pytest.approx([1.0] * 3)
    for given in oracle.given:
        assert len(given) == 200
        assert (given >= 0).sum() == 12
        assert set(given[given >= 0]) == {0, 1, 2}
    assert "| oracle | 100.0 ± 0.0 | 100.0 ± 0.0 |" in estimators.format_table(found)
