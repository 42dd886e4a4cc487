"""Predictions by folds: who learned from what, against refits image by image, and through whole trainings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from csda import cross_fitting
from csda.cross_fitting import predict_folds
from csda.probe import assign_folds
from csda.trainer import Trainer
from tiny import InterruptedReporter, make_images, train_tiny


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("folds") / "images")


def test_folds_keep_groups_together_and_share_out_each_class() -> None:
    random = np.random.default_rng(0)
    labels = random.choice(3, size=200, p=(0.7, 0.25, 0.05))
    folds = assign_folds(labels, None, np.random.default_rng(0), every_image=True)
    for label in range(3):
        counts = np.bincount(folds[labels == label], minlength=5)
        assert counts.max() - counts.min() <= 1
    groups = [f"patient {number // 3}" for number in range(200)]
    folds = assign_folds(labels, groups, np.random.default_rng(0), every_image=True)
    assert len({(group, fold) for group, fold in zip(groups, folds.tolist(), strict=True)}) == len(set(groups))
    assert set(folds.tolist()) == set(range(5))
    assert assign_folds(labels, groups, np.random.default_rng(1), every_image=True).tolist() != folds.tolist()


def test_several_labels_are_shared_out_by_the_rarest() -> None:
    labels = np.zeros((60, 3), dtype=np.int64)
    labels[:, 0] = 1
    labels[:10, 1] = 1
    labels[5:10, 2] = 1
    folds = assign_folds(labels, None, np.random.default_rng(3), 5)
    assert np.bincount(folds[5:10], minlength=5).tolist() == [1] * 5
    assert np.bincount(folds[:5], minlength=5).tolist() == [1] * 5


def _refit(
    features: np.ndarray, labels: np.ndarray, folds: np.ndarray, scale: np.ndarray, row: np.ndarray, fold: int
) -> Any:
    """The oracle: standardised by hand, no other axes, one regression for one image."""
    standard = [(values - scale.mean(axis=0)) / (scale.std(axis=0) + 1e-3) for values in (features, row[None])]
    model = LogisticRegression(C=0.01, max_iter=5000, tol=1e-8).fit(standard[0][folds != fold], labels[folds != fold])
    return model.predict_proba(standard[1])[0]


def test_each_image_is_predicted_from_the_other_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_fitting, "STRENGTHS", (0.01,))
    random = np.random.default_rng(1)
    labels = np.arange(40) % 3
    features, others = random.normal(labels[:, None], 1.0, (40, 6)), random.normal(1.0, 1.0, (7, 6))
    folds = assign_folds(labels, None, np.random.default_rng(0), 4)
    own, mean = predict_folds(features, labels, folds, others, 3)
    scale = np.concatenate([features, others])
    for row in range(40):
        expected = _refit(features, labels, folds, scale, features[row], int(folds[row]))
        np.testing.assert_allclose(own[row], expected, atol=2e-3)
    for row in range(7):
        expected = np.mean([_refit(features, labels, folds, scale, others[row], fold) for fold in range(4)], axis=0)
        np.testing.assert_allclose(mean[row], expected, atol=2e-3)


def test_several_labels_are_regressions_of_their_own_and_a_label_may_be_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_fitting, "STRENGTHS", (0.01,))
    random = np.random.default_rng(2)
    labels = (random.random((30, 3)) < 0.4).astype(np.int64)
    labels[:, 2] = 0
    features = random.normal(size=(30, 4)) + labels[:, :1]
    folds = assign_folds(labels, None, np.random.default_rng(0), 3)
    own, mean = predict_folds(features, labels, folds, np.empty((0, 4)), 3)
    assert mean.shape == (0, 3)
    assert (own[:, 2] == 0).all()
    for row in range(30):
        expected = _refit(features, labels[:, 0], folds, features, features[row], int(folds[row]))
        assert own[row, 0] == pytest.approx(expected[1], abs=2e-3)


def test_labels_that_say_nothing_are_not_predicted() -> None:
    """In sample 200 features fit any 60 labels; out of fold they do not."""
    random = np.random.default_rng(0)
    features, labels = random.normal(size=(60, 200)), np.arange(60) % 2
    folds = assign_folds(labels, None, np.random.default_rng(0), 5)
    own, _ = predict_folds(features, labels, folds, features, 2)
    assert (LogisticRegression(C=1.0).fit(features, labels).predict(features) == labels).all()
    assert 0.25 < (own.argmax(axis=1) == labels).mean() < 0.75


def test_a_body_has_not_seen_what_it_predicts(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[tuple[set[str], set[str]]] = []

    class Watched(Trainer):
        def __init__(self, config: Any, data: Any, *rest: Any) -> None:
            super().__init__(config, data, *rest)
            trained.append(tuple({record.id for record in part} for part in (data.split.labeled, data.split.test)))

    monkeypatch.setattr(cross_fitting, "Trainer", Watched)
    run = train_tiny(images, tmp_path / "run", method="csda-folds", fold_network="body", folds=3, fold_epochs=1)
    everything = {row.id for row in run.beginning.split if row.split == "labeled"}
    assert len(trained) == 3
    assert sum(len(held_out) for _, held_out in trained) == len(everything)
    for learned, held_out in trained:
        assert learned | held_out == everything
        assert not learned & held_out

    # Trainings that make something else of the same predictions share the networks; others do not.
    same = {"fold_network": "body", "folds": 3, "fold_epochs": 1}
    shared = train_tiny(images, tmp_path / "shared", method="csda-folds", condition="prediction", **same)
    assert len(trained) == 3
    train_tiny(images, tmp_path / "again", method="csda-folds", **same)
    assert len(trained) == 3
    train_tiny(images, tmp_path / "other", method="csda-folds", lr=0.033, **same)
    assert len(trained) == 6
    kept = sorted((tmp_path / "cache" / "folds").iterdir())
    assert len(kept) == 2
    for path in kept:
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    mended = train_tiny(images, tmp_path / "mended", method="csda-folds", condition="prediction", **same)
    assert len(trained) == 9
    assert [row["loss"] for row in mended.metrics] == [row["loss"] for row in shared.metrics]


@pytest.mark.parametrize("changes", [{}, {"guesses_from": "folds"}, {"guesses_from": "both", "adjust": True}], ids=str)
def test_an_interrupted_run_keeps_its_folds(changes: dict[str, Any], images: Path, tmp_path: Path) -> None:
    whole = train_tiny(images, tmp_path / "whole", method="csda-folds", **changes)
    with pytest.raises(KeyboardInterrupt):
        train_tiny(images, tmp_path / "parts", method="csda-folds", reporter=InterruptedReporter(2), **changes)
    resumed = train_tiny(images, tmp_path / "parts", method="csda-folds", resume=True, **changes)
    assert [row["loss"] for row in resumed.metrics] == [row["loss"] for row in whole.metrics]
    rows, again = (np.load(run.folder / "history.npz")["labeled_marginals"][-1] for run in (whole, resumed))
    assert np.array_equal(rows, again)
    assert not np.allclose(rows, 1 / 3)
