"""The table beside scikit-learn: all see the same labels, and the figures are those of the predictions."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.linear_model import LogisticRegression
from sklearn.semi_supervised import LabelSpreading, SelfTrainingClassifier

from csda import metrics
from csda.classifier import CSDAClassifier
from csda.progress import Reporter
from csda.research import estimators

GIVEN: list[np.ndarray] = []


class _Oracle(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Knows the class by the first feature, standardised, and remembers what it was given."""

    def fit(self, values: np.ndarray, labels: np.ndarray) -> _Oracle:
        GIVEN.append(labels)
        self.classes_ = np.arange(3)
        return self

    def predict_proba(self, values: np.ndarray) -> np.ndarray:
        levels = np.unique(values[:, 0].round(6))
        assert len(levels) == 3
        return np.eye(3)[np.searchsorted(levels, values[:, 0].round(6))]


class _Other(_Oracle):
    """Is always wrong."""

    def predict_proba(self, values: np.ndarray) -> np.ndarray:
        return np.roll(super().predict_proba(values), 1, axis=1)


def test_a_command_writes_runs_summary_and_where_they_are_from(
    tiny_images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from csda import cli

    def features(config: Any, prepared: Any, reporter: Reporter) -> np.ndarray:
        labels = prepared.encode(prepared.dataset.records)
        return np.column_stack([labels, np.random.default_rng(0).normal(size=len(labels))]).astype(np.float32)

    made = {"oracle": _Oracle(), estimators.OURS: _Other()}
    monkeypatch.setattr(estimators, "frozen_features", features)
    monkeypatch.setattr(estimators, "make_estimators", lambda *about: made)
    GIVEN.clear()
    out = tmp_path / "made" / "estimators"
    cli.app(
        ["compare-estimators", str(tiny_images), "--labels", "9", "--labels", "12", "--seeds", "2", "--out", str(out)],
        standalone_mode=False,
    )
    assert len(GIVEN) == 2 * 2 * 2
    for number, given in enumerate(GIVEN):
        assert (given >= 0).sum() == (9 if number < 4 else 12)
        assert set(given[given >= 0]) == {0, 1, 2}
        assert (given < 0).sum() > 30
    with (out / "draws.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["labels"], row["seed"], row["estimator"]) for row in rows[:3]] == [
        ("9", "0", "oracle"),
        ("9", "0", "CSDAClassifier"),
        ("9", "1", "oracle"),
    ]
    assert {float(row["mca"]) for row in rows} == {0.0, 1.0}
    with (out / "summary.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [float(line["mca_gap"]) for line in lines] == [-1.0, 0.0, -1.0, 0.0]
    about = json.loads((out / "meta.json").read_text())
    expected = f"csda compare-estimators {tiny_images.name} --labels 9 --labels 12 --seeds 2 --image-size 96"
    assert (about["command"], about["seeds"]) == (expected, [0, 1])
    page = (out / "page.md").read_text()
    assert f"`{expected}`, {about['date']}, commit {about['commit']}." in page
    assert "| 100.0 ± 0.0 | −100.0 [−100.0, −100.0] |" in page


def test_means_and_distances_are_those_of_the_rows() -> None:
    ours, theirs = [0.6, 0.8, 0.7], [0.5, 0.5, 0.8]
    rows = [
        {"data": "a", "labels": 50, "seed": seed, "estimator": name, "auc": value / 2, "mca": value}
        for name, values in (("theirs", theirs), (estimators.OURS, ours))
        for seed, value in enumerate(values)
    ]
    line = estimators.summarise(rows)[0]
    assert line["mca_mean"] == pytest.approx(0.6)
    assert line["mca_std"] == pytest.approx(np.std(theirs, ddof=1))
    assert line["auc_gap"] == pytest.approx(0.05)
    low, high = metrics.paired_interval(np.array([0.1, 0.3, -0.1]))
    assert (line["mca_low"], line["mca_high"]) == pytest.approx((low, high))


def test_the_classifiers_are_those_of_scikit_learn_and_ours() -> None:
    generator = np.random.default_rng(0)
    labels = np.arange(60) % 3
    scaled = np.eye(3, 10)[labels] + generator.normal(size=(60, 10))
    made = estimators.make_estimators(scaled, labels, 3, seed=4)
    kinds = {LogisticRegression, SelfTrainingClassifier, LabelSpreading, CSDAClassifier}
    assert {type(model) for model in made.values()} == kinds
    assert made["SelfTrainingClassifier, balanced"].estimator.class_weight == "balanced"
    assert made[estimators.OURS].get_params() == CSDAClassifier(random_state=4).get_params()
    # A regression that cross-validation regularises, not one as it comes.
    assert made["LogisticRegression"].C < 1.0
