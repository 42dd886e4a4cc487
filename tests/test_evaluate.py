"""Predictions over whole parts, and what they are worth."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, roc_auc_score
from torch import Tensor

from csda.data.augment import Augmentation, plain
from csda.data.loader import ImagePool
from csda.evaluate import guess_pool, judge_pseudo_labels, predict_pool, score
from csda.models.backbones import build_encoder
from csda.models.two_stream import TwoStream


@pytest.fixture
def model() -> TwoStream:
    torch.manual_seed(0)
    return TwoStream(build_encoder("alexnet", 32, 3, dropout=0.5), 3)


@pytest.fixture
def pool() -> ImagePool:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (11, 32, 32, 3), generator=generator, dtype=torch.uint8)
    return ImagePool(pixels, Augmentation(), generator)


@pytest.mark.parametrize("multi_label", [False, True])
def test_every_image_is_predicted_once_in_evaluation_mode(multi_label: bool, model: TwoStream, pool: ImagePool) -> None:
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    probs = predict_pool(model, pool, 4, multi_label=multi_label)
    assert model.training
    assert not model.teacher.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    model.eval()
    with torch.no_grad():
        logits = model(plain(pool.pixels))
    expected = logits.sigmoid() if multi_label else logits.softmax(1)
    np.testing.assert_allclose(probs, expected.numpy(), atol=1e-6)
    np.testing.assert_allclose(probs, predict_pool(model, pool, 100, multi_label=multi_label), atol=1e-6)


def test_guesses_come_before_and_after_alignment(model: TwoStream, pool: ImagePool) -> None:
    def pseudo_labels(_: TwoStream, images: Tensor) -> tuple[Tensor, Tensor]:
        mean = images.mean((1, 2, 3))[:, None]
        return mean, 2 * mean

    raw, aligned = guess_pool(model, pool, 4, pseudo_labels)
    np.testing.assert_allclose(raw[:, 0], plain(pool.pixels).mean((1, 2, 3)).numpy(), rtol=1e-6)
    np.testing.assert_allclose(aligned, 2 * raw)


def test_scores_are_those_of_scikit_learn() -> None:
    generator = np.random.default_rng(0)
    probs = generator.dirichlet(np.ones(3), 60).astype(np.float32)
    labels = generator.integers(0, 3, 60)
    scores = score(probs, labels, "val")
    areas = [roc_auc_score(labels == k, probs[:, k]) for k in range(3)]
    assert scores["val_auc"] == pytest.approx(np.mean(areas))
    assert scores["val_mca"] == pytest.approx(balanced_accuracy_score(labels, probs.argmax(1)))


def test_scores_of_several_labels() -> None:
    generator = np.random.default_rng(0)
    probs = generator.random((50, 4)).astype(np.float32)
    labels = generator.integers(0, 2, (50, 4))
    scores = score(probs, labels, "test")
    assert scores["test_auc"] == pytest.approx(roc_auc_score(labels, probs, average="macro"))
    recalls = [balanced_accuracy_score(labels[:, k], probs[:, k] >= 0.5) for k in range(4)]
    assert scores["test_mca"] == pytest.approx(np.mean(recalls))


def test_pseudo_labels_are_judged_where_the_truth_is_known() -> None:
    raw = np.array([[0.8, 0.2], [0.6, 0.4], [0.3, 0.7], [0.9, 0.1]], dtype=np.float32)
    aligned = np.array([[0.7, 0.3], [0.4, 0.6], [0.2, 0.8], [0.9, 0.1]], dtype=np.float32)
    figures, arrays = judge_pseudo_labels(raw, aligned, np.array([0, 1, 0, -1]))
    assert figures == pytest.approx({"flip_rate": 1 / 4, "pseudo_accuracy": 2 / 3, "pseudo_mca": 0.75})
    np.testing.assert_allclose(arrays["flips"], [1 / 3, 0])
    np.testing.assert_allclose(arrays["aligned_marginals"], [[2 / 3, 1 / 3], [0.2, 0.8]], rtol=1e-6)
    np.testing.assert_array_equal(arrays["pseudo_confusion"], [[1, 1], [0, 1]])
    figures, arrays = judge_pseudo_labels(raw, aligned, np.full(4, -1))
    assert figures == {"flip_rate": 0.25}
    assert "pseudo_confusion" not in arrays


def test_of_several_labels_pseudo_labels_are_judged_by_their_auc() -> None:
    generator = np.random.default_rng(1)
    truth = generator.integers(0, 2, (40, 3))
    aligned = generator.random((50, 3)).astype(np.float32)
    unknown = np.full((10, 3), -1)
    figures, arrays = judge_pseudo_labels(np.zeros_like(aligned), aligned, np.concatenate([truth, unknown]))
    assert figures == {"pseudo_auc": pytest.approx(roc_auc_score(truth, aligned[:40], average="macro"))}
    assert arrays == {}
    assert judge_pseudo_labels(aligned[:10], aligned[:10], unknown) == ({}, {})
