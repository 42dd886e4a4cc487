"""A trained model, used from Python."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

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

    def compare(images: Any, batch_size: int = 256) -> None:
        raw = predictor.predict(images, batch_size, calibrated=False)
        np.testing.assert_allclose(raw, predictions.probs, atol=1e-5)

    compare(paths)
    compare([str(path) for path in paths], 3)
    compare([Image.open(path) for path in paths])
    pixels = np.stack([np.asarray(Image.open(path)) for path in paths])
    compare(pixels, 5)
    compare(list(pixels))
    compare(pixels / 255)
    tensor = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    compare(tensor)
    compare(list(tensor.float() / 255))
    np.testing.assert_allclose(tiny_run.predict(paths), predictor.predict(paths), atol=1e-6)


def test_pseudo_labels_are_the_predictions_for_unlabeled_images(
    predictor: Predictor, tiny_run: Run, tiny_images: Path
) -> None:
    lines = [line.split(",") for line in (tiny_run.folder / "pseudo_labels.csv").read_text().splitlines()]
    assert lines[0] == ["id", "predicted", "confidence", *tiny_run.classes]
    probs = predictor.predict([tiny_images / line[0] for line in lines[1:]], calibrated=False)
    np.testing.assert_allclose(np.array([line[3:] for line in lines[1:]], dtype=float), probs, atol=1e-5)
    for (_, predicted, confidence, *_), row in zip(lines[1:], probs, strict=True):
        assert predicted == tiny_run.classes[row.argmax()]
        assert float(confidence) == pytest.approx(row.max(), abs=1e-5)


def test_prior_correction_travels_with_the_model(tiny_images: Path, tmp_path: Path) -> None:
    run = train_tiny(tiny_images, tmp_path / "run", epochs=2, prior_correction="labeled")
    paths = [tiny_images / image for image in run.predictions.ids]
    np.testing.assert_allclose(csda.load(run.folder).predict(paths, calibrated=False), run.predictions.probs, atol=1e-5)


def test_images_of_any_size_and_colour_are_taken(predictor: Predictor, tmp_path: Path) -> None:
    Image.new("L", (300, 200), 90).save(tmp_path / "grey.png")
    Image.new("RGBA", (5, 9), (9, 200, 90, 128)).save(tmp_path / "small.png")
    probs = predictor.predict([tmp_path / "grey.png", tmp_path / "small.png"])
    np.testing.assert_allclose(probs.sum(axis=1), 1, atol=1e-5)
    assert probs.dtype == np.float32


def test_one_image_of_any_size_is_one_row_as_from_its_file(predictor: Predictor, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    colour = generator.integers(0, 256, (41, 67, 3), dtype=np.uint8)
    grey = generator.integers(0, 256, (90, 50), dtype=np.uint8)
    for name, array in (("colour", colour), ("grey", grey)):
        Image.fromarray(array).save(tmp_path / f"{name}.png")
        expected = predictor.predict(tmp_path / f"{name}.png")
        tensor = torch.from_numpy(array)
        given = [array, tensor.permute(2, 0, 1) if tensor.ndim == 3 else tensor, Image.fromarray(array)]
        if array.ndim == 2:
            given += [array[..., None], array[None], tensor[None], (array.astype(np.uint16) << 8) + array]
        for image in given:
            np.testing.assert_allclose(predictor.predict(image), expected, atol=1e-6)


def test_an_image_that_was_opened_turns_as_its_file_says(predictor: Predictor, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (64, 48, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels).save(tmp_path / "turned.png", exif=exif)
    with Image.open(tmp_path / "turned.png") as image:
        np.testing.assert_array_equal(predictor.predict(image), predictor.predict(tmp_path / "turned.png"))
    turned = predictor.predict(np.rot90(pixels, -1))
    np.testing.assert_allclose(predictor.predict(tmp_path / "turned.png"), turned, atol=1e-6)


def test_mirror_images_are_averaged_on_demand(predictor: Predictor) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    views = [pixels, pixels[:, ::-1], pixels[:, :, ::-1], pixels[:, ::-1, ::-1]]
    mean = np.mean([predictor.predict(np.ascontiguousarray(view), calibrated=False) for view in views], axis=0)
    np.testing.assert_allclose(predictor.predict(pixels, tta=True, calibrated=False), mean, atol=1e-6)


def test_a_single_path_is_one_row(predictor: Predictor, tiny_images: Path) -> None:
    path = tiny_images / "rare" / "00.png"
    for one in (path, str(path)):
        np.testing.assert_array_equal(predictor.predict(one), predictor.predict([path]))


def test_files_in_arrays_and_generators_are_taken_one_by_one(predictor: Predictor, tiny_images: Path) -> None:
    paths = sorted((tiny_images / "rare").iterdir())
    expected = predictor.predict(paths)
    for given in (np.array(list(map(str, paths))), np.array(paths), iter(paths), map(str, paths), tuple(paths)):
        np.testing.assert_array_equal(predictor.predict(given, batch_size=4), expected)


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
    wrong: list[tuple[Any, str]] = [
        (np.full((2, 32, 32, 3), 1.5), "values outside of 0 to 1"),
        (np.full((2, 32, 32, 3), np.nan), "values outside of 0 to 1"),
        (np.zeros((2, 32, 32, 3), np.int64), "an image is of int64; give uint8, uint16"),
        (np.zeros((2, 32, 32, 5), np.uint8), "with C of 1, 3 or 4"),
        (np.zeros((0, 32, 3), np.uint8), r"an image is of the shape \[0, 32, 3\]"),
        (np.zeros(7, np.uint8), r"images are of the shape \[7\]"),
        ({"a.png"}, "images are of type set; give files"),
        ([3], "an image is of type int; give a file"),
        (tmp_path, "is a folder; give its files, or predict folders with `csda predict`"),
        (b"GIF89a", "images are of type bytes; give files"),
    ]
    for images, message in wrong:
        with pytest.raises(DataError, match=message):
            predictor.predict(images)
    size: Any
    for size in (0, -1, 2.5):
        with pytest.raises(ConfigError, match=f"batch_size = {size}; give a whole number, at least 1"):
            predictor.predict(np.zeros((2, 32, 32, 3), np.uint8), batch_size=size)
        with pytest.raises(ConfigError, match=f"batch_size = {size}; give a whole number, at least 1"):
            next(predictor.stream([tmp_path / "a.png"], size))
    (tmp_path / "broken.png").write_bytes(b"nothing")
    for name, problem in (("absent.png", "does not exist"), ("broken.png", "is not an image")):
        with pytest.raises(DataError, match=f"{name}: {problem}"):
            predictor.predict([tmp_path / name])


def test_models_that_are_none_are_refused(tiny_run: Run, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="not a run folder"):
        csda.load(tmp_path)
    run = Run(shutil.copytree(tiny_run.folder, tmp_path / "run"))
    weights, description = run.read_weights()
    half = dict(list(weights.items())[:-2])
    model = json.loads(description["csda"])
    older_lack = {"sha256", "flips", "middle", "calibration", "aspect", "frozen", "feature_stages", "feature_views"}
    required = model.keys() - older_lack
    keyless = [{k: v for k, v in model.items() if k not in (key, "sha256")} for key in required]
    unknown = [{k: v for k, v in model.items() if k != "sha256"} | {"feature_views": "half"}]
    texts = [{}, {"csda": "[]"}, {"csda": "3"}, *({"csda": json.dumps(each)} for each in keyless + unknown)]
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
