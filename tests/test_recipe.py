"""The preset `strong`: what its settings do in a step and in a run, against computations by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch.nn import functional as F

import csda
from csda.config import Settings
from csda.data.augment import Augmentation, Selection
from csda.engine import make_optimizer, set_learning_rate
from csda.errors import ConfigError
from csda.methods.base import Recipe, Task
from csda.methods.baseline import Baseline
from csda.methods.self_training import SelfTraining, SelfTrainingSettings
from csda.models.averaged_views import KEPT
from csda.presets import PICTURES, configure
from csda.runs import Run
from tiny import InterruptedReporter, train_tiny

STRONG = {
    "optimizer": "adamw",
    "lr": 1e-3,
    "head_lr": 5e-3,
    "weight_decay": 0.1,
    "schedule": "cosine",
    "lr_warm_up": 3,
    "mixup_alpha": 0.4,
    "adjust": True,
    "average": 0.8,
    "choose": "last",
    "zoom": 1.2,
    "border": "reflection",
    "color": 0.1,
    "rotation": 180.0,
    "flip": True,
    "test_flips": True,
}


def _task(*, multi_label: bool = False) -> Task:
    return Task(3, multi_label, (6, 3, 1), 10, 20, 32, 3, 8, 2)


def _method(*, multi_label: bool = False, mixup: float = 0.0, adjust: bool = True) -> SelfTraining:
    method = SelfTraining(_task(multi_label=multi_label), SelfTrainingSettings(capacity=16))
    method.recipe = Recipe(mixup, adjust)
    return method


def test_logits_are_adjusted_by_the_labeled_frequencies_in_the_loss() -> None:
    logits, labels = torch.randn(4, 3), torch.tensor([0, 1, 2, 2])
    expected = 0.0
    for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
        shifted = [value + math.log(count / 10) for value, count in zip(row, (6, 3, 1), strict=True)]
        expected -= shifted[label] - math.log(sum(map(math.exp, shifted)))
    assert _method().labeled_loss(logits, labels).item() == pytest.approx(expected / 4, rel=1e-5)
    assert _method(adjust=False).labeled_loss(logits, labels).item() == pytest.approx(F.cross_entropy(logits, labels))


def test_several_labels_are_adjusted_by_their_odds() -> None:
    logits, labels = torch.zeros(1, 3), torch.tensor([[1.0, 0.0, 0.0]])
    # A logit of 0 with the odds of p added is the probability p.
    expected = -(math.log(0.6) + math.log(0.7) + math.log(0.9))
    assert _method(multi_label=True).labeled_loss(logits, labels).item() == pytest.approx(expected, rel=1e-4)


def test_guesses_are_those_of_the_labeled_frequencies_and_their_loss_uses_their_own() -> None:
    method, logits = _method(), torch.zeros(2, 3)
    assert method.probabilities(logits)[0].tolist() == pytest.approx([0.6, 0.3, 0.1])
    targets, mask = torch.tensor([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]), torch.tensor([True, False])
    loss = method.unlabeled_loss(logits, targets, mask).item()
    mean = [0.98 * share + 0.02 * target for share, target in zip((0.6, 0.3, 0.1), (0.0, 0.0, 1.0), strict=True)]
    assert method.guess_frequencies.tolist() == pytest.approx(mean, rel=1e-5)
    assert loss == pytest.approx(-math.log(mean[2] / sum(mean)), rel=1e-4)
    method.unlabeled_loss(logits, targets, torch.tensor([False, False]))
    assert method.guess_frequencies.tolist() == pytest.approx(mean, rel=1e-5)


def test_mixed_images_keep_the_larger_share_of_themselves_and_labels_go_along() -> None:
    method = Baseline(_task(), Settings())
    images, labels = torch.eye(8)[:, :, None, None], torch.arange(8) % 3
    assert method.mixed(images, labels)[0] is images
    method.recipe, method.generator = Recipe(0.4), torch.Generator().manual_seed(0)
    mixed, targets = method.mixed(images, labels)
    own = mixed[:, :, 0, 0]
    assert (own.diagonal() >= 0.5).all()
    torch.testing.assert_close(own.sum(1), torch.ones(8))
    assert (own.diagonal() < 1.0).any()
    torch.testing.assert_close(targets, own @ F.one_hot(labels, 3).float())


def test_shares_are_those_of_a_beta_distribution() -> None:
    from csda.methods.mixing import draw_shares

    shares = draw_shares(0.4, 20_000, torch.device("cpu"), torch.Generator().manual_seed(0))
    drawn = np.random.default_rng(0).beta(0.4, 0.4, 20_000)
    assert shares.mean().item() == pytest.approx(np.maximum(drawn, 1 - drawn).mean(), abs=0.005)


def test_the_head_learns_faster() -> None:
    body, head = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    optimizer = make_optimizer("adamw", [body, head], torch.device("cpu"), head=[head], head_scale=5.0)
    set_learning_rate(optimizer, 0.01)
    (body + head).sum().backward()
    optimizer.step()
    # The first step of Adam is as long as the learning rate.
    assert (1.0 - body.item(), 1.0 - head.item()) == pytest.approx((0.01, 0.05), rel=1e-3)


@pytest.mark.parametrize(
    ("reach", "scales"), [({"zoom": 1.5}, (1.5, 1 / 1.5)), ({"zoom": 1.1, "enlarge": 1.8}, (1.1, 1 / 1.1 / 1.8))]
)
def test_a_zoomed_view_has_the_size_that_was_drawn(reach: dict[str, float], scales: tuple[float, float]) -> None:
    pixels = torch.zeros(1, 64, 64, 3, dtype=torch.uint8)
    pixels[:, 24:40, 24:40] = 200
    draws = torch.zeros(1, 12)
    for draw, scale in zip((1.0, -1.0), scales, strict=True):
        draws[0, 5] = draw
        view = Augmentation(0.0, 0.0, **reach).weak_view(Selection(pixels), draws)
        area = (view[0, 0] > 0.4).sum().item()
        assert area == pytest.approx((16 / scale) ** 2, rel=0.15)


def test_a_mild_change_of_color_is_what_was_drawn() -> None:
    pixels = torch.full((1, 8, 8, 3), 100, dtype=torch.uint8)
    draws = torch.zeros(1, 12)
    draws[0, 6] = draws[0, 9] = 1.0
    view = Augmentation(0.0, 0.0, color=0.1).weak_view(Selection(pixels), draws)
    # Brighter by a tenth, and the first channel by a twentieth more.
    assert view[0, :, 4, 4].tolist() == pytest.approx([100 / 255 * 1.1 * 1.05, 100 / 255 * 1.1, 100 / 255 * 1.1])


def test_reflected_borders_leave_no_black_corner() -> None:
    pixels = torch.full((4, 32, 32, 3), 255, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    assert Augmentation(180.0, 0.1, border="zeros").weak(Selection(pixels), generator).min() == 0.0
    assert Augmentation(180.0, 0.1, border="reflection").weak(Selection(pixels), generator).min() > 0.99


@pytest.mark.parametrize("method", ["baseline", "self-train", "csda", "fixmatch", "nm"])
def test_a_run_that_was_interrupted_ends_with_the_same_numbers(method: str, tiny_images: Path, tmp_path: Path) -> None:
    strong = {name: value for name, value in STRONG.items() if method != "nm" or name != "mixup_alpha"}
    whole = train_tiny(tiny_images, tmp_path / "whole", method=method, **strong)
    with pytest.raises(KeyboardInterrupt):
        train_tiny(tiny_images, tmp_path / "cut", method=method, reporter=InterruptedReporter(2), **strong)
    resumed = train_tiny(tiny_images, tmp_path / "cut", method=method, resume=True, **strong)
    assert resumed.result["best_epoch"] == whole.result["best_epoch"] == 3
    assert _predictions(resumed) == _predictions(whole)
    assert whole.result["mca_prior"] == whole.result["mca"]
    rates = [row["lr"] for row in whole.metrics]
    assert rates == pytest.approx(
        [1e-3 / 3, 1e-3 * (1 + math.cos(math.pi / 3)) / 2, 1e-3 * (1 + math.cos(2 * math.pi / 3)) / 2]
    )


def test_the_average_predicts_and_is_what_a_loop_gives(tiny_images: Path, tmp_path: Path) -> None:
    """With a momentum of 0 the average is the weights themselves; with any other it is not."""
    same = train_tiny(tiny_images, tmp_path / "a", method="baseline", choose="last")
    copied = train_tiny(tiny_images, tmp_path / "b", method="baseline", choose="last", average=1e-9)
    averaged = train_tiny(tiny_images, tmp_path / "c", method="baseline", choose="last", average=0.9)
    assert _probs(copied) == pytest.approx(_probs(same), abs=1e-5)
    assert np.abs(_probs(averaged) - _probs(same)).max() > 1e-3


def test_flips_are_the_mean_over_four_images_and_predict_does_the_same(tiny_images: Path, tmp_path: Path) -> None:
    run = train_tiny(tiny_images, tmp_path / "run", method="baseline", choose="last", test_flips=True)
    predictor = csda.load(run.folder)
    pixels = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    views = [pixels, pixels[:, :, ::-1], pixels[:, ::-1], pixels[:, ::-1, ::-1]]
    for turned in views[1:]:
        np.testing.assert_allclose(
            predictor.predict(np.ascontiguousarray(turned)), predictor.predict(pixels), atol=1e-5
        )
    ids = [row.id for row in run.split if row.split == "test"]
    again = predictor.predict([tiny_images / name for name in ids], calibrated=False)
    np.testing.assert_allclose(again, run.predictions.part("test")[0], atol=1e-5)


def test_the_middle_is_averaged_in_and_predict_does_the_same(tiny_images: Path, tmp_path: Path) -> None:
    """The oracle enlarges with Pillow, which rounds to whole grey levels."""
    settings: dict[str, Any] = {"method": "baseline", "choose": "last", "labels": "40", "lr": 0.1}
    settings |= {"epochs": 10, "steps_per_epoch": 8}
    plain = train_tiny(tiny_images, tmp_path / "plain", **settings)
    both = train_tiny(tiny_images, tmp_path / "both", test_middle=True, **settings)
    weights = [load_file(run.folder / "model.safetensors") for run in (plain, both)]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    kept = round(KEPT * 32)
    edge = (32 - kept) // 2
    # Outside the colour of one class, in the middle that of another.
    pixels = np.full((32, 32, 3), (150, 90, 90), np.uint8)
    pixels[edge : edge + kept, edge : edge + kept] = 90, 90, 150
    image = Image.fromarray(pixels)
    middle = image.resize((32, 32), Image.Resampling.BILINEAR, box=(edge, edge, edge + kept, edge + kept))
    alone, averaged = csda.load(plain.folder), csda.load(both.folder)
    whole, inner = alone.predict([np.asarray(image), np.asarray(middle)], calibrated=False)
    np.testing.assert_allclose(
        averaged.predict(np.asarray(image), calibrated=False), (whole + inner)[None] / 2, atol=1e-3
    )
    assert np.abs(whole - inner).max() > 1e-2
    ids = [row.id for row in both.split if row.split == "test"]
    again = averaged.predict([tiny_images / name for name in ids], calibrated=False)
    np.testing.assert_allclose(again, both.predictions.part("test")[0], atol=1e-5)


def test_the_kind_of_picture_comes_from_the_source_or_is_given(tmp_path: Path) -> None:
    assert configure({"preset": "strong", "source": "ham10000"}).rotation == PICTURES["skin"]["rotation"]
    chest = configure({"preset": "strong", "source": "nih_chestxray14"})
    assert (chest.pictures, chest.flip, chest.test_flips) == ("chest", False, False)
    assert configure({"preset": "strong", "data": str(tmp_path)}).pictures == "generic"
    assert configure({"preset": "strong", "pictures": "skin", "rotation": 5}).rotation == 5
    assert configure({"preset": "default", "source": "ham10000"}).pictures is None
    with pytest.raises(ConfigError, match="pictures = 'cat' is unknown; choose one of skin, "):
        configure({"preset": "strong", "pictures": "cat"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"adjust": True, "prior_correction": "labeled"}, "leave prior_correction out"),
        ({"mixup_alpha": 0.4, "labeled_from": "student"}, "choose labeled_from=teacher"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configure({"preset": "quick", **settings})


def _predictions(run: Run) -> bytes:
    return (run.folder / "predictions.csv").read_bytes()


def _probs(run: Run) -> np.ndarray:
    return run.predictions.part("test")[0]
