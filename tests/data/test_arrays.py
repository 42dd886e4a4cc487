"""`csda.train(X, y)`: samples that are given from Python train as those of a folder do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import csda
from csda import training
from csda.cli import app
from csda.data.arrays import take_samples
from csda.errors import ConfigError, CsdaError, DataError, RunError
from csda.export import export
from csda.runs import Run
from tiny import SETTINGS, InterruptedReporter

SMALL = {name: value for name, value in SETTINGS.items() if name != "preset"}


def _train(X: Any, y: Any, out: Path, **more: Any) -> Run:
    return csda.train(X, y, method="baseline", preset="quick", out=out, settings=SMALL, **more)


def _labels(paths: list[Path]) -> np.ndarray:
    labels = np.array([path.parent.name for path in paths], dtype=object)
    labels[::3] = -1
    return labels


def test_arrays_and_paths_of_the_same_images_give_the_same_model(tiny_images: Path, tmp_path: Path) -> None:
    paths = sorted(tiny_images.rglob("*.png"))
    labels, arrays = _labels(paths), np.stack([np.asarray(Image.open(path)) for path in paths])
    of_arrays, of_paths = _train(arrays, labels, tmp_path / "arrays"), _train(paths, labels, tmp_path / "paths")
    assert of_arrays.classes == of_paths.classes == ("common", "label", "rare")
    parts = {row.split for row in of_arrays.split}
    assert parts == {"labeled", "unlabeled", "val", "test"}
    positions = {str(path): str(position) for position, path in enumerate(paths)}
    assert [(positions[row.id], *row[1:]) for row in of_paths.split] == [tuple(row) for row in of_arrays.split]
    for row in of_arrays.split:
        given = labels[int(row.id)]
        assert row.label == ("" if given == -1 else given)
    np.testing.assert_array_equal(of_arrays.predict(arrays), of_paths.predict(arrays))
    np.testing.assert_array_equal(of_arrays.predict(paths), of_arrays.predict(arrays))
    assert of_arrays.thumbnails.pictures.keys() == {positions[name] for name in of_paths.thumbnails.pictures}


def test_it_continues_where_it_stopped_with_the_same_arrays_alone(tiny_images: Path, tmp_path: Path) -> None:
    paths = sorted(tiny_images.rglob("*.png"))
    labels, arrays = _labels(paths), np.stack([np.asarray(Image.open(path)) for path in paths])
    whole = _train(arrays, labels, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        _train(arrays, labels, tmp_path / "cut", reporter=InterruptedReporter(1))
    with pytest.raises(DataError, match="images, labels or groups are not those that the run began with"):
        _train(255 - arrays, labels, tmp_path / "cut", resume=True)
    with pytest.raises(DataError, match=r"trained on arrays given from Python; give them again"):
        csda.train(out=tmp_path / "cut", resume=True)
    resumed = _train(arrays, labels, tmp_path / "cut", resume=True)
    assert (resumed.folder / "model.safetensors").read_bytes() == (whole.folder / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def of_vectors(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    truth = generator.choice(3, 600, p=[0.6, 0.3, 0.1])
    vectors = 2.5 * np.eye(3, 20)[truth] + generator.normal(size=(600, 20))
    labels = np.where(np.arange(600) < 200, truth, -1)
    return csda.train(vectors, labels, out=tmp_path_factory.mktemp("vectors") / "run"), vectors, truth


def test_feature_vectors_train_a_head(of_vectors: tuple[Run, np.ndarray, np.ndarray]) -> None:
    run, vectors, truth = of_vectors
    assert run.settings.preset == "features"
    probs = run.predict(vectors)
    assert (probs.argmax(axis=1) == truth).mean() > 0.8
    # What is predicted is what was written of the test samples, calibrated.
    expected, _ = run.predictions.part("test")
    rows = [int(row.id) for row in run.split if row.split == "test"]
    np.testing.assert_allclose(csda.load(run.folder).predict(vectors[rows], calibrated=False), expected, atol=1e-5)
    assert run.calibration is not None
    np.testing.assert_allclose(probs[rows], run.calibration.scale(expected), atol=1e-5)


def test_a_model_of_vectors_takes_no_images(
    of_vectors: tuple[Run, np.ndarray, np.ndarray], tiny_images: Path, tmp_path: Path
) -> None:
    run, vectors, _ = of_vectors
    with pytest.raises(DataError, match=r"X has the shape \[600, 19\]; give feature vectors \[N, 20\]"):
        run.predict(vectors[:, 1:])
    with pytest.raises(DataError, match="tta mirrors images"):
        run.predict(vectors, tta=True)
    out = tmp_path / "table.csv"
    for words in (
        ["predict", str(run.folder), str(tiny_images), "--out", str(out)],
        ["evaluate", str(run.folder), str(tiny_images)],
    ):
        with pytest.raises(CsdaError, match=r"trained on feature vectors, so it takes no images|has no class"):
            app(words, standalone_mode=False)
    with pytest.raises(RunError, match="trained on feature vectors"):
        export(run, "torch", tmp_path / "model")
    assert not [path for path in tmp_path.iterdir() if path.name != "cache"]


def test_mistakes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors, labels = np.ones((6, 4)), np.array([0, 1, 0, 1, -1, -1])
    for X, y, message in (
        (vectors, labels[:3], "X has 6 samples and y has 3 labels"),
        (vectors, np.full(6, -1), "y has no label, only -1"),
        (vectors, np.ones((6, 2)), r"y has the shape \[6, 2\]"),
        (np.ones((6, 8, 8, 7)), labels, "images .N, H, W, C. with C of 1, 3 or 4"),
        (np.ones(6), labels, "X is neither images"),
        ([object()] * 6, labels, "X is neither images"),
        (np.full((6, 4), np.nan), labels, "features that are not finite"),
        (["a.png", "a.png", "b.png"], [0, 1, 0], r"a\.png: named twice"),
        ([np.zeros((4, 5, 3)), np.zeros((9, 5, 3))], [0, 1], "X is a list of images; give their paths, or one array"),
        (np.zeros((6, 8, 8)), labels, r"shape \[6, 8, 8\]; give images \[N, H, W, C\], grey ones with C of 1"),
        (vectors, np.array(["a", "b", "-1", "a", "b", "-1"]), "y has the text '-1'; give an array of objects"),
        (vectors, ["a", "b", -1, "a", 2, -1], "y has texts beside other labels"),
        (vectors, ["a", "b", None, "a", "b", -1], "y has texts beside other labels, or None"),
        (vectors, [3, -1, 3, -1, -1, -1], "y has one class, 3; label samples of another class"),
    ):
        with pytest.raises(DataError, match=message):
            take_samples(X, y)
    with pytest.raises(ConfigError, match="leave preset and frozen out"):
        csda.train(vectors, labels, preset="quick", out=tmp_path / "run")
    with pytest.raises(ConfigError, match="backbone is given among the settings, but follows from X"):
        csda.train(vectors, labels, settings={"backbone": "resnet18"}, out=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"data is a ndarray; give a folder, or samples with their labels"):
        csda.train(vectors, out=tmp_path / "run")
    monkeypatch.setattr(training, "Features", None)  # what is missing is told before features are computed or taken
    with pytest.raises(DataError, match="no unlabeled images for method 'self-train'"):
        csda.train(np.random.default_rng(0).normal(size=(60, 4)), np.arange(60) % 2, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_texts_beside_the_number_are_labels_and_columns_of_paths_are_paths() -> None:
    """Of ["b", -1], NumPy makes the texts "b" and "-1"."""
    pandas = pytest.importorskip("pandas", reason="comes with csda[ray]")

    samples = take_samples(np.ones((4, 2)), ["b", -1, "a", "b"])
    assert (samples.classes, samples.labels) == (("a", "b"), (1, None, 0, 1))
    names = ["x.png", "y.png", "z.png"]
    for X in (names, np.array(names), pandas.Series(names), pandas.Series(names, dtype="string")):
        assert take_samples(X, ["b", -1, "a"]).values == tuple(map(Path, names))
    assert take_samples(names, pandas.Series(["b", -1, "a"])).labels == (1, None, 0)


def test_grey_images_stay_grey() -> None:
    grey = np.repeat(np.arange(4, dtype=np.uint8)[:, None, None, None], 3, axis=3) * np.ones((1, 9, 7, 1), np.uint8)
    for images in (grey, grey[..., :1]):
        dataset = take_samples(images, [0, 1, 0, 1]).as_dataset("squash")
        assert dataset.draw is not None
        assert dataset.draw([1, 3], 5).shape == (2, 5, 5, 1)
        assert np.unique(dataset.draw([3], 5)).tolist() == [3]
