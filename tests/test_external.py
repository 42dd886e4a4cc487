"""Images from elsewhere: scores as scikit-learn finds them, and what other class frequencies do."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import balanced_accuracy_score, roc_auc_score

import csda
from csda import cli
from csda.calibration import estimate_frequencies, predicted_frequencies
from csda.errors import DataError
from csda.external import evaluate_external
from csda.metrics import shift_frequencies
from csda.report.transfer import write_external
from csda.runs import Run


def _posterior(values: np.ndarray, priors: np.ndarray) -> np.ndarray:
    """Of classes whose values are normal about 0, 1 and 2, with these frequencies."""
    likelihood = np.exp(-((values[:, None] - 1.5 * np.arange(3)) ** 2) / 2)
    joint = likelihood * priors
    return joint / joint.sum(axis=1, keepdims=True)


def test_other_frequencies_are_those_of_bayes_and_are_found_without_labels() -> None:
    generator = np.random.default_rng(0)
    before, after = np.array([0.8, 0.15, 0.05]), np.array([0.2, 0.3, 0.5])
    labels = generator.choice(3, 6000, p=after)
    values = 1.5 * labels + generator.normal(size=6000)
    probs = _posterior(values, before)
    np.testing.assert_allclose(shift_frequencies(probs, before, after), _posterior(values, after), atol=1e-12)
    np.testing.assert_allclose(estimate_frequencies(probs, before), after, atol=0.03)


def test_a_model_that_tells_little_keeps_the_frequencies_it_predicts() -> None:
    """By maximum likelihood, 500 images that look alike are all of the class that the model overestimates."""
    generator = np.random.default_rng(0)
    flat = np.array([0.72, 0.22, 0.06]) * generator.uniform(0.99, 1.01, (500, 3))
    flat /= flat.sum(axis=1, keepdims=True)
    labels, trained = generator.choice(3, 500, p=[0.5, 0.3, 0.2]), np.array([0.8, 0.15, 0.05])
    before = predicted_frequencies(flat, labels, trained)
    np.testing.assert_allclose(before, [0.72, 0.22, 0.06], atol=1e-3)
    np.testing.assert_allclose(estimate_frequencies(flat, before), before, atol=0.01)
    several = predicted_frequencies(flat[:, :2], np.stack([labels == 0, labels == 9], axis=1).astype(int), trained[:2])
    np.testing.assert_allclose(several, [0.72, 0.15 + 0.85 * 0.22], atol=1e-3)  # no image has the second label


def test_frequencies_that_a_model_predicts_are_those_of_its_answers() -> None:
    """Against images drawn with the frequencies that were trained on."""
    generator = np.random.default_rng(0)
    answers = np.array([[0.7, 0.2, 0.1], [0.3, 0.6, 0.1], [0.4, 0.1, 0.5]])
    trained, labels = np.array([0.6, 0.3, 0.1]), generator.choice(3, 900, p=[0.1, 0.2, 0.7])
    drawn = generator.choice(3, 200_000, p=trained)
    found = predicted_frequencies(answers[labels], labels, trained)
    np.testing.assert_allclose(found, answers[drawn].mean(axis=0), atol=0.005)
    only = labels != 2  # of a class that is absent nothing is known
    np.testing.assert_allclose(
        predicted_frequencies(answers[labels[only]], labels[only], trained),
        0.6 * answers[0] + 0.3 * answers[1] + [0, 0, 0.1],
    )


def test_several_labels_shift_each_by_itself() -> None:
    generator = np.random.default_rng(0)
    before, after = np.array([0.1, 0.3]), np.array([0.4, 0.05])
    truth = generator.random((8000, 2)) < after
    values = 2.0 * truth + generator.normal(size=(8000, 2))

    def posterior(priors: np.ndarray) -> np.ndarray:
        present, absent = np.exp(-((values - 2) ** 2) / 2) * priors, np.exp(-(values**2) / 2) * (1 - priors)
        return np.asarray(present / (present + absent))

    found = shift_frequencies(posterior(before), before, after, multi_label=True)
    np.testing.assert_allclose(found, posterior(after), atol=1e-12)
    np.testing.assert_allclose(estimate_frequencies(posterior(before), before, multi_label=True), after, atol=0.03)


@pytest.fixture(scope="module")
def elsewhere(tiny_images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other frequencies than those that were trained on, classes written otherwise, and one image without a label."""
    folder = tmp_path_factory.mktemp("elsewhere") / "clinic"
    for name, count, called in (("common", 8, "Common"), ("label", 15, "label"), ("rare", 12, "RARE")):
        (folder / called).mkdir(parents=True)
        for path in sorted((tiny_images / name).iterdir())[:count]:
            shutil.copy(path, folder / called)
    (folder / "unlabeled").mkdir()
    shutil.copy(tiny_images / "rare" / "00.png", folder / "unlabeled" / "x.png")
    return folder


def test_scores_are_those_of_scikit_learn(tiny_run: Run, elsewhere: Path) -> None:
    external = evaluate_external(tiny_run, elsewhere)
    assert external.counts == (8, 15, 12)
    paths = [elsewhere / image for image in external.ids]
    labels = np.array([tiny_run.classes.index(path.parent.name.lower()) for path in paths])
    np.testing.assert_array_equal(external.labels, labels)
    probs = csda.load(tiny_run.folder).predict(paths, calibrated=False)
    np.testing.assert_allclose(external.probs, probs, atol=1e-6)
    assert external.scores.mca.value == pytest.approx(balanced_accuracy_score(labels, probs.argmax(axis=1)))
    areas = [roc_auc_score(labels == position, probs[:, position]) for position in range(3)]
    assert external.scores.auc.value == pytest.approx(np.mean(areas))
    assert external.scores.auc.low < external.scores.auc.value < external.scores.auc.high
    shifts = {each.name: each for each in external.shifts}
    hits = probs.argmax(axis=1) == labels
    assert shifts["here"].accuracy.value == pytest.approx(hits.mean())
    own = np.bincount(tiny_run.labels_of("test"), minlength=3) / len(tiny_run.labels_of("test"))
    recalls = [hits[labels == position].mean() for position in range(3)]
    weighted = shifts["here, weighted to the run's frequencies"].accuracy
    assert weighted.value == pytest.approx(own @ recalls)
    assert external.frequencies["here"] == pytest.approx(np.array([8, 15, 12]) / 35)
    assert sum(external.frequencies["estimated"]) == pytest.approx(1)


def test_the_folder_of_an_evaluation_holds_what_was_printed(
    tiny_run: Run, elsewhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "external"
    monkeypatch.setattr(
        sys, "argv", ["csda", "evaluate", str(tiny_run.folder), str(elsewhere), "--out", str(out), "-q"]
    )
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ending:
        cli.main()
    assert not ending.value.code
    printed = capsys.readouterr().out
    figures = json.loads((out / "evaluation.json").read_text())
    for text in (f"{figures['scores']['mca'][0]:.3f}", f"{figures['shift']['here']['accuracy'][0]:.3f}"):
        assert text.replace("0.", ".") in printed
        assert text in (out / "report.html").read_text()
    assert "frequencies estimated" in printed
    opened, closed = ([line.count(bracket) for line in printed.splitlines()] for bracket in "[]")
    assert opened == closed  # nothing is cut off
    assert max(opened) == 3
    assert len((out / "predictions.csv").read_text().splitlines()) == 36


def test_sets_that_do_not_fit_are_refused(tiny_run: Run, elsewhere: Path, tiny_images: Path, tmp_path: Path) -> None:
    other = shutil.copytree(elsewhere, tmp_path / "other")
    (other / "RARE").rename(other / "unheard of")
    with pytest.raises(DataError, match="the run has no class unheard of, only common, label, rare; rename or leave"):
        evaluate_external(tiny_run, other)
    broken = shutil.copytree(elsewhere, tmp_path / "broken")
    (broken / "label" / "00.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"1 of 36 images of .* cannot be read"):
        evaluate_external(tiny_run, broken)
    external = evaluate_external(tiny_run, broken, {"max_unreadable": 0.1})
    assert len(external.ids) == 34
    assert "00.png: is not an image" in external.remarks[0]
    assert "not new images" in evaluate_external(tiny_run, tiny_images).remarks[-1]
    (broken / "several.csv").write_text("image,label\nlabel/01.png,common|rare\nlabel/02.png,common\n")
    with pytest.raises(DataError, match="its images have several labels"):
        evaluate_external(tiny_run, broken / "several.csv")


def test_a_class_that_is_absent_is_said(tiny_run: Run, elsewhere: Path, tmp_path: Path) -> None:
    two = shutil.copytree(elsewhere, tmp_path / "two")
    shutil.rmtree(two / "Common")
    external = evaluate_external(tiny_run, two)
    assert external.remarks == ("no image of common here, so nothing is known about these",)
    assert np.isnan(external.scores.recall[0].value)
    assert write_external(external, tmp_path / "out").is_file()
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text())["scores"]["recall"][0] == [None] * 3
