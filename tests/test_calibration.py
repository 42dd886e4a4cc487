"""Temperature, thresholds and sets: against SciPy, by their definition, and by what they promise on other images."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.stats import betabinom

import csda
from csda import cross_fitting, training
from csda.calibration import COVERAGES, Calibration, fit, fit_temperature, from_json, measure, pool_classes
from csda.errors import ConfigError
from csda.runs import Run
from csda.trainer import Trainer
from tiny import train_tiny


def _drawn(count: int, seed: int, sharpness: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Labels of a long-tailed prior and predictions that are right but for their temperature."""
    generator = np.random.default_rng(seed)
    priors = np.array([0.7, 0.2, 0.07, 0.03])
    labels = generator.choice(4, count, p=priors)
    values = np.eye(4)[labels] * 1.5 + generator.normal(size=(count, 4))
    logits = np.log(priors) + 1.5 * values - 1.5**2 / 2
    probs = np.exp(sharpness * logits)
    return probs / probs.sum(axis=1, keepdims=True), labels


@pytest.mark.parametrize("multi_label", [False, True])
def test_the_temperature_is_that_of_scipy(multi_label: bool) -> None:
    probs, labels = _drawn(600, 0, sharpness=2.0)
    truth = np.eye(4, dtype=np.int64)[labels] if multi_label else labels

    def cost(log_temperature: float) -> float:
        values = np.log(probs) / np.exp(log_temperature)
        others = np.log1p(-probs) / np.exp(log_temperature)
        if multi_label:
            present = 1 / (1 + np.exp(others - values))
            nll = -(np.log(present) * truth + np.log(1 - present) * (1 - truth)).sum()
        else:
            nll = -(values[np.arange(len(labels)), labels] - np.log(np.exp(values).sum(axis=1))).sum()
        return float(nll + log_temperature**2 / 2)

    best = minimize_scalar(cost, bounds=(-3, 3), method="bounded", options={"xatol": 1e-9})
    assert fit_temperature(probs, truth) == pytest.approx(math.exp(best.x), rel=1e-4)
    if not multi_label:
        assert fit_temperature(probs, truth) == pytest.approx(2, rel=0.15)


def test_scaling_keeps_the_order_and_mends_the_likelihood() -> None:
    probs, labels = _drawn(2000, 1, sharpness=3.0)
    other_probs, other_labels = _drawn(2000, 2, sharpness=3.0)
    calibration = fit(probs, labels)
    scaled = calibration.scale(other_probs)
    np.testing.assert_allclose(scaled.sum(axis=1), 1)
    ordered = np.take_along_axis(scaled, np.argsort(other_probs, axis=1), axis=1)
    assert (np.diff(ordered, axis=1) >= 0).all()
    assert (scaled.argmax(axis=1) == other_probs.argmax(axis=1)).all()
    before, after = measure(other_probs, other_labels), measure(scaled, other_labels)
    assert after["nll"] < before["nll"] - 0.1
    assert after["calibration_error"] < before["calibration_error"] / 2


def test_a_handful_of_right_predictions_claims_no_certainty() -> None:
    probs = np.full((3, 2), [0.7, 0.3])
    assert fit(probs, np.zeros(3, np.int64)).scale(probs)[0, 0] < 0.95


def _check_coverage(calibration: Calibration, probs: np.ndarray, labels: np.ndarray) -> None:
    """Of m images of a pool the limit is the k-th score: the covered of further ones are beta-binomial."""
    calibrated = calibration.scale(probs)
    for level in calibration.levels:
        sets = calibration.sets(calibrated, level.coverage)
        assert sets.any(axis=1).all()
        assert sets[np.arange(len(sets)), calibrated.argmax(axis=1)].all()
        pooled = {position for pool in level.pools for position in pool}
        for pool in (*level.pools, *((each,) for each in range(probs.shape[1]) if each not in pooled)):
            members = np.isin(labels, pool)
            images, known = int(members.sum()), level.counts[pool[0]]
            place = math.ceil((known + 1) * level.coverage)
            hits = int(sets[np.flatnonzero(members), labels[members]].sum())
            expected = betabinom(images, place, known + 1 - place)
            assert hits >= expected.ppf(1e-4), (level.coverage, pool, hits / images)


def test_the_promised_coverage_is_kept_in_every_class() -> None:
    for seed in range(20):
        calibration = fit(*_drawn(500, seed))
        assert calibration.coverages == COVERAGES
        _check_coverage(calibration, *_drawn(3000, 100 + seed))


def test_limits_are_tight() -> None:
    """With as many images as one likes the sets cover no more than they promise."""
    probs, labels = _drawn(20000, 0)
    other_probs, other_labels = _drawn(20000, 1)
    calibration = fit(probs, labels)
    calibrated = calibration.scale(other_probs)
    within = 1 - calibrated <= np.array(calibration.level(0.9).limits)
    for position in range(4):
        members = other_labels == position
        assert within[members, position].mean() == pytest.approx(0.9, abs=0.035)


@pytest.mark.skipif("CSDA_DATA" not in os.environ, reason="CSDA_DATA does not name the folder of real images")
def test_the_promised_coverage_is_kept_on_real_images() -> None:
    from sklearn.linear_model import LogisticRegression

    from csda.data.decode import read_image

    folder = Path(os.environ["CSDA_DATA"]) / "gastrovision4"
    classes = ("large_bowels", "colon_polyps", "normal_esophagus", "erythema")
    paths = [path for name in classes for path in sorted((folder / name).iterdir())]
    labels = np.array([classes.index(path.parent.name) for path in paths])
    images = np.stack([read_image(path, 12, 3).ravel() for path in paths]) / 255
    order = np.random.default_rng(0).permutation(len(paths))
    trained, fitted, held_out = np.split(order, [600, 1500])
    model = LogisticRegression(max_iter=2000, C=0.1).fit(images[trained], labels[trained])
    probs = np.zeros((len(paths), len(classes)))
    probs[:, model.classes_] = model.predict_proba(images)
    calibration = fit(probs[fitted], labels[fitted])
    assert calibration.level(0.95).pools  # erythema has a handful of images
    _check_coverage(calibration, probs[held_out], labels[held_out])


def test_rare_classes_are_pooled_with_the_next() -> None:
    assert pool_classes([100, 4, 30, 6], 0.9) == [[1, 3], [2], [0]]
    assert pool_classes([100, 2, 3, 9], 0.9) == [[1, 2, 3], [0]]
    assert pool_classes([3, 2], 0.9) == []
    assert pool_classes([100, 4], 0.9) == [[1, 0]]


def test_too_few_images_promise_nothing() -> None:
    probs, labels = _drawn(6, 0)
    calibration = fit(probs, labels)
    assert calibration.coverages == (0.8,)
    assert "6 images are too few for sets that cover 90%" in calibration.remarks[0]
    with pytest.raises(ConfigError, match=r"coverage = 0\.9 has no limits in this model, which has 0\.8"):
        calibration.sets(probs)


def test_several_labels_have_thresholds_and_sets_of_their_own() -> None:
    generator = np.random.default_rng(0)

    def draw(count: int) -> tuple[np.ndarray, np.ndarray]:
        labels = (generator.random((count, 3)) < [0.3, 0.05, 0.002]).astype(np.int64)
        logits = np.log([0.3, 0.05, 0.01]) + 2 * labels + generator.normal(size=(count, 3))
        return 1 / (1 + np.exp(-logits)), labels

    probs, labels = draw(1000)
    calibration = fit(probs, labels)
    calibrated = calibration.scale(probs)
    thresholds = calibration.thresholds
    assert thresholds is not None
    for position in range(2):
        truth = labels[:, position].astype(bool)

        def recalls(threshold: float, position: int = position, truth: np.ndarray = truth) -> float:
            present = calibrated[:, position] >= threshold
            return float(present[truth].mean() + (~present)[~truth].mean())

        best = max(recalls(threshold) for threshold in calibrated[:, position])
        assert recalls(thresholds[position]) == pytest.approx(best, abs=1e-12)
    assert labels[:, 2].sum() < 5
    assert thresholds[2] == 0.5
    assert (2,) in calibration.level(0.9).pools
    further, truth = draw(4000)
    sets = calibration.sets(calibration.scale(further))
    assert sets.any(axis=2).all()
    for position in range(2):
        for side in (0, 1):
            members = truth[:, position] == side
            known = calibration.level(0.9).counts[position][side]
            place = math.ceil((known + 1) * 0.9)
            expected = betabinom(int(members.sum()), place, known + 1 - place)
            assert sets[members, position, side].sum() >= expected.ppf(1e-4)


def _vectors(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    labels = generator.choice(3, count, p=[0.6, 0.3, 0.1])
    return 1.5 * np.eye(3, 20)[labels] + generator.normal(size=(count, 20)), labels


def _train_vectors(out: Path, labeled: int, **settings: object) -> Run:
    vectors, truth = _vectors(900, 0)
    labels = np.where(np.arange(900) < labeled, truth, -1)
    few = {"epochs": 3, "steps_per_epoch": 10, "batch_size": 32, "unlabeled_batch_size": 32}
    return csda.train(vectors, labels, method="self-train", out=out, settings=few | settings)


def test_without_validation_out_of_fold_predictions_keep_the_promise(tmp_path: Path) -> None:
    run = _train_vectors(tmp_path / "run", 400, val="0")
    labeled = sum(row.split == "labeled" for row in run.split)
    calibration = run.calibration
    assert calibration is not None
    assert (calibration.fitted_on, calibration.images) == ("out-of-fold", labeled)
    assert calibration.coverages == COVERAGES
    vectors, labels = _vectors(3000, 1)
    uncalibrated = csda.load(run.folder).predict(vectors, calibrated=False)
    _check_coverage(calibration, uncalibrated, labels)
    # The temperature is that of predictions on other samples, not of those that were learned from.
    best = fit_temperature(uncalibrated, labels)
    assert calibration.temperature == pytest.approx(best, rel=0.25)
    assert measure(run.predict(vectors), labels)["nll"] < measure(uncalibrated, labels)["nll"] + 0.005


def test_folds_are_taken_where_validation_has_few_images(tmp_path: Path) -> None:
    def fitted_on(name: str, labeled: int, **settings: object) -> tuple[str, int] | None:
        run = _train_vectors(tmp_path / name, labeled, epochs=2, **settings)
        images = {part: sum(row.split == part for row in run.split) for part in ("labeled", "val")}
        assert images["val"] < 30 or labeled == 400
        fitted = run.calibration
        return None if fitted is None else (fitted.fitted_on, fitted.images - images["val"] - images["labeled"])

    assert fitted_on("few", 100) == ("validation and out-of-fold", 0)
    assert fitted_on("many", 400)[0] == "validation"  # type: ignore[index]
    assert fitted_on("asked", 400, calibrate="folds") == ("validation and out-of-fold", 0)
    assert fitted_on("declined", 100, calibrate="validation", val="0") is None


def test_a_method_that_asks_for_folds_of_its_own_gets_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    cross_fit = cross_fitting.cross_fit

    def count(trainer: Trainer, *more: Any) -> None:
        asked.append(len(trainer.data.split.labeled))
        cross_fit(trainer, *more)

    monkeypatch.setattr(cross_fitting, "cross_fit", count)
    vectors, truth = _vectors(300, 0)
    few = {"epochs": 2, "steps_per_epoch": 4, "batch_size": 16, "unlabeled_batch_size": 16, "val": "0"}
    labels = np.where(np.arange(300) < 100, truth, -1)
    run = csda.train(vectors, labels, method="csda-folds", out=tmp_path / "run", settings=few)
    labeled = sum(row.split == "labeled" for row in run.split)
    assert len(asked) == 5
    assert sum(labeled - each for each in asked) == labeled
    assert run.calibration is not None


def test_a_network_is_calibrated_by_folds_where_that_is_asked_for(tiny_images: Path, tmp_path: Path) -> None:
    few = {"method": "baseline", "calibrate": "folds", "choose": "last", "val": "0", "epochs": 2}
    run = train_tiny(tiny_images, tmp_path / "run", labels="30", **few)
    assert run.calibration is not None
    assert (run.calibration.fitted_on, run.calibration.images) == ("out-of-fold", 30)
    again = train_tiny(tiny_images, tmp_path / "again", labels="30", **few)
    assert again.calibration == run.calibration
    plain = train_tiny(tiny_images, tmp_path / "plain", labels="30", **few | {"calibrate": "auto"})
    assert plain.calibration is None
    for name in ("predictions.csv", "pseudo_labels.csv"):
        assert (plain.folder / name).read_bytes() == (run.folder / name).read_bytes()


def test_an_image_is_predicted_by_a_training_that_did_not_see_it(
    tiny_images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_out: list[str] = []

    def look(trainer: Trainer) -> None:
        split = trainer.data.split
        learned, predicted = ({record.id for record in part} for part in (split.labeled, split.test))
        assert not learned & predicted
        assert len(learned) + len(predicted) == 30
        held_out.extend(predicted)

    monkeypatch.setattr(training, "learn", look)
    few = {"method": "baseline", "calibrate": "folds", "choose": "last", "val": "0", "epochs": 1}
    run = train_tiny(tiny_images, tmp_path / "run", labels="30", **few)
    assert sorted(held_out) == sorted(row.id for row in run.split if row.split == "labeled")


def test_it_is_kept_in_the_run_and_in_its_model(tiny_run: Run) -> None:
    probs, labels = tiny_run.predictions.part("val")
    expected = fit(probs.astype(np.float32), labels)
    assert tiny_run.calibration is not None
    assert tiny_run.calibration.temperature == pytest.approx(expected.temperature, rel=1e-6)
    assert tiny_run.calibration.images == len(labels)
    assert tiny_run.calibration.fitted_on == "validation"
    _, description = tiny_run.read_weights()
    assert json.loads(description["csda"])["calibration"] == tiny_run.calibration.as_json()


def test_what_is_no_calibration_is_refused() -> None:
    whole = fit(*_drawn(300, 0)).as_json()
    assert from_json(json.loads(json.dumps(whole)), 4) == fit(*_drawn(300, 0))
    level = whole["levels"][0]
    wrong = [
        None,
        [],
        {},
        *({**whole, name: None} for name in ("temperature", "levels", "format", "remarks")),
        {**whole, "temperature": -1.0},
        {**whole, "thresholds": [0.5] * 4},
        {**whole, "more": 1},
        {**whole, "levels": [{**level, "limits": [0.1] * 3}]},
        {**whole, "levels": [{**level, "limits": [float("nan")] * 4}]},
        {name: value for name, value in whole.items() if name != "images"},
    ]
    for content in wrong:
        with pytest.raises(ValueError, match=r"calibration|Error"):
            from_json(content, 4)
