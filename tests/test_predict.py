"""A trained model, used from Python."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import csda
from csda.errors import ConfigError, DataError, RunError
from csda.predict import Predictor
from csda.runs import Run
from tiny import train_tiny


@pytest.fixture(scope="module")
def predictor(tiny_run: Run) -> Predictor:
    return csda.load(tiny_run.folder)


def test_the_same_images_get_the_probabilities_of_the_run(
    predictor: Predictor, tiny_run: Run, tiny_images: Path
) -> None:
    predictions = tiny_run.predictions
    paths = [tiny_images / image for image in predictions.ids]
    assert predictor.classes == tiny_run.classes
    np.testing.assert_allclose(predictor.predict(paths), predictions.probs, atol=1e-5)
    np.testing.assert_allclose(predictor.predict([str(path) for path in paths], 3), predictions.probs, atol=1e-5)
    pixels = np.stack([np.asarray(Image.open(path)) for path in paths])
    np.testing.assert_allclose(predictor.predict(pixels, batch_size=5), predictions.probs, atol=1e-5)


def test_pseudo_labels_are_the_predictions_for_unlabeled_images(
    predictor: Predictor, tiny_run: Run, tiny_images: Path
) -> None:
    lines = [line.split(",") for line in (tiny_run.folder / "pseudo_labels.csv").read_text().splitlines()]
    assert lines[0] == ["id", "predicted", "confidence", *tiny_run.classes]
    probs = predictor.predict([tiny_images / line[0] for line in lines[1:]])
    np.testing.assert_allclose(np.array([line[3:] for line in lines[1:]], dtype=float), probs, atol=1e-5)
    for (_, predicted, confidence, *_), row in zip(lines[1:], probs, strict=True):
        assert predicted == tiny_run.classes[row.argmax()]
        assert float(confidence) == pytest.approx(row.max(), abs=1e-5)


def test_prior_correction_travels_with_the_model(tiny_images: Path, tmp_path: Path) -> None:
    run = train_tiny(tiny_images, tmp_path / "run", epochs=2, prior_correction="labeled")
    paths = [tiny_images / image for image in run.predictions.ids]
    np.testing.assert_allclose(csda.load(run.folder).predict(paths), run.predictions.probs, atol=1e-5)


def test_images_of_any_size_and_colour_are_taken(predictor: Predictor, tmp_path: Path) -> None:
    Image.new("L", (300, 200), 90).save(tmp_path / "grey.png")
    Image.new("RGBA", (5, 9), (9, 200, 90, 128)).save(tmp_path / "small.png")
    probs = predictor.predict([tmp_path / "grey.png", tmp_path / "small.png"])
    np.testing.assert_allclose(probs.sum(axis=1), 1, atol=1e-5)
    assert probs.dtype == np.float32


def test_a_single_path_is_one_row(predictor: Predictor, tiny_images: Path) -> None:
    path = tiny_images / "rare" / "00.png"
    for one in (path, str(path)):
        np.testing.assert_array_equal(predictor.predict(one), predictor.predict([path]))


def test_predictions_that_are_not_finite_are_an_error(tiny_run: Run, tmp_path: Path) -> None:
    run = Run(shutil.copytree(tiny_run.folder, tmp_path / "run"))
    weights, description = run.read_weights()
    run.write_model(
        {name: value * torch.nan if value.is_floating_point() else value for name, value in weights.items()},
        description,
    )
    (run.folder / "manifest.json").unlink()
    with pytest.raises(RunError, match=r"model\.safetensors: gives predictions that are not finite"):
        csda.load(run.folder).predict(np.zeros((1, 32, 32, 3), np.uint8))


def test_no_images_are_no_rows(predictor: Predictor) -> None:
    assert predictor.predict([]).shape == (0, 3)
    assert predictor.predict(np.zeros((0, 32, 32, 3), np.uint8)).shape == (0, 3)


def test_wrong_arrays_and_files_are_named(predictor: Predictor, tmp_path: Path) -> None:
    for wrong in (np.zeros((2, 32, 32, 3)), np.zeros((2, 16, 32, 3), np.uint8), np.zeros((32, 32, 3), np.uint8)):
        with pytest.raises(DataError, match=r"give uint8 \[N, 32, 32, 3\]"):
            predictor.predict(wrong)
    (tmp_path / "broken.png").write_bytes(b"nothing")
    for name, problem in (("absent.png", "does not exist"), ("broken.png", "is not an image")):
        with pytest.raises(DataError, match=f"{name}: {problem}"):
            predictor.predict([tmp_path / name])


def test_models_that_are_none_are_refused(tiny_run: Run, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no run folder"):
        csda.load(tmp_path)
    run = Run(shutil.copytree(tiny_run.folder, tmp_path / "run"))
    weights, description = run.read_weights()
    half = dict(list(weights.items())[:-2])
    model = json.loads(description["csda"])
    required = model.keys() - {"sha256", "flips", "aspect", "frozen"}  # older models do not have these
    keyless = [{k: v for k, v in model.items() if k not in (key, "sha256")} for key in required]
    texts = [{}, {"csda": "[]"}, {"csda": "3"}, *({"csda": json.dumps(each)} for each in keyless)]
    (run.folder / "manifest.json").unlink()
    for wrong, text in ((half, {}), *((weights, text) for text in texts)):
        save_file(wrong, run.folder / "model.safetensors", text)
        with pytest.raises(RunError, match=r"model\.safetensors: not "):
            csda.load(run.folder)
    for wrong in (half, {}):
        run.write_model(wrong, description)
        with pytest.raises(RunError, match=r"model\.safetensors: not the weights"):
            csda.load(run.folder)
    larger = {name: torch.zeros(*value.shape, 2) if name == "head.1.bias" else value for name, value in weights.items()}
    run.write_model(larger, description)
    with pytest.raises(RunError, match=r"model\.safetensors: not "):
        csda.load(run.folder)
    (run.folder / "model.safetensors").unlink()
    with pytest.raises(RunError, match=r"model\.safetensors: missing; restore it"):
        csda.load(run.folder)
    with pytest.raises(ConfigError, match="device = 'tpu'"):
        csda.load(tiny_run.folder, device="tpu")


def test_the_model_file_says_what_is_needed_to_use_it(tiny_run: Run) -> None:
    _, description = tiny_run.read_weights()
    model = json.loads(description["csda"])
    assert model["classes"] == list(tiny_run.classes)
    assert (model["image_size"], model["channels"], model["backbone"]) == (32, 3, "alexnet")
