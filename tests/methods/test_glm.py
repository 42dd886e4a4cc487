"""GLM: the guess of two views, labels mixed as samples are, and the loss."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from csda.data.loader import Batch
from csda.methods.glm import GLM
from csda.methods.mixing import Mix
from csda.models.dropout import Dropout
from csda.models.two_stream import TwoStream
from reference.trainings import Training, make_training


def _training(**settings: object) -> tuple[Training, GLM]:
    training = make_training("glm", **settings)
    assert isinstance(training.method, GLM)
    return training, training.method


def test_a_guess_is_the_mean_of_two_views() -> None:
    training, _ = _training()
    images = training.labeled_set(torch.arange(3), "weak")
    batch = training.pool.batch(torch.arange(5))
    training.seed(5)
    _, guesses = training.method.guess(training.model, images, training.labeled_set.targets[:3], batch)
    training.seed(5)
    first, second = training.model.guess(batch.weak()).softmax(-1), training.model.guess(batch.weak()).softmax(-1)
    assert not torch.allclose(first, second)
    torch.testing.assert_close(guesses, (first + second) / 2)


def test_a_guess_is_sharpened_if_asked_for_and_classes_exclude_each_other() -> None:
    for multi_label in (False, True):
        training, _ = _training(sharpen=0.5, multi_label=multi_label)
        plain, _ = _training(multi_label=multi_label)
        plain.model.load_state_dict(training.model.state_dict())
        guesses = []
        for each in (training, plain):
            images, batch = each.labeled_set(torch.arange(3), "weak"), each.pool.batch(torch.arange(5))
            each.seed(5)
            guesses.append(each.method.guess(each.model, images, each.labeled_set.targets[:3], batch)[1])
        sharp, mean = guesses
        by_hand = mean if multi_label else torch.stack([row.square() / row.square().sum() for row in mean])
        torch.testing.assert_close(sharp, by_hand)


def test_a_student_in_training_mode_guesses_by_the_statistics_of_each_view() -> None:
    training, method = _training(guess_mode="train")
    images, batch = training.labeled_set(torch.arange(3), "weak"), training.pool.batch(torch.arange(5))
    for module in training.model.modules():
        if isinstance(module, Dropout):
            module.eval()
    training.seed(5)
    _, guesses = method.guess(training.model, images, training.labeled_set.targets[:3], batch)
    training.seed(5)
    first, second = batch.weak(), batch.weak()
    by_hand = [training.model(view).softmax(-1) for view in (first, second)]
    torch.testing.assert_close(guesses, (by_hand[0] + by_hand[1]) / 2)
    assert not guesses.requires_grad
    in_evaluation = (training.model.guess(first).softmax(-1) + training.model.guess(second).softmax(-1)) / 2
    assert not torch.allclose(guesses, in_evaluation, atol=1e-3)


def test_the_binary_loss_asks_each_class_against_the_others() -> None:
    _, method = _training(binary=True)
    logits, targets = torch.randn(3, 4), torch.rand(3, 4).softmax(-1)
    by_hand = torch.zeros(())
    for logit, target in zip(logits, targets, strict=True):
        for prob, part in zip(logit.softmax(-1), target, strict=True):
            by_hand -= part * prob.log() + (1 - part) * (1 - prob).log()
    torch.testing.assert_close(method.labeled_loss(logits, targets), by_hand / 3)
    labels = torch.tensor([2, 0, 3])
    torch.testing.assert_close(method.labeled_loss(logits, labels), method.labeled_loss(logits, torch.eye(4)[labels]))


def test_labels_are_mixed_as_samples_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the draws of a step known, its losses are those of a slow loop."""
    training, method = _training(layers=[0])
    drawn: list[Mix] = []

    def watch(model: object, images: Tensor, mix: Mix) -> Tensor:
        drawn.append(mix)
        return logits

    samples, labels = training.pool.batch(torch.arange(3)), torch.tensor([0, 3])
    logits, guesses = torch.randn(5, 4), torch.rand(3, 4).softmax(-1)
    mask = torch.tensor([True, False, True])
    monkeypatch.setattr(method.mixing, "logits", watch)
    images = training.labeled_set(torch.arange(2), "weak")
    supervised, unsupervised = method.learn(training.model, images, labels, samples, guesses, mask)

    before = [torch.eye(4)[0], torch.eye(4)[3], *guesses]
    usable = [True, True, *mask.tolist()]
    mixed = []
    for sample, partner in enumerate(drawn[0].partners.tolist()):
        share = drawn[0].shares[sample]
        assert share == 1 if not usable[partner] else 0.5 <= share < 1
        mixed.append(share * before[sample] + (1 - share) * before[partner])
    cross_entropy = [-(mixed[row] * logits[row].log_softmax(-1)).sum() for row in (0, 1)]
    squared = [(mixed[row] - logits[row].softmax(-1)).square().sum() for row in (2, 4)]
    torch.testing.assert_close(supervised, sum(cross_entropy) / 2)
    torch.testing.assert_close(unsupervised, sum(squared) / 2)


def test_shares_and_layers_vary_from_step_to_step(monkeypatch: pytest.MonkeyPatch) -> None:
    training, method = _training()
    layers, shares = set(), set()
    compute = method.mixing.logits

    def watch(model: TwoStream, images: Tensor, mix: Mix) -> Tensor:
        layers.add(int(mix.layer))
        shares.add(float(mix.shares[0]))
        return compute(model, images, mix)

    monkeypatch.setattr(method.mixing, "logits", watch)
    for _ in range(12):
        training.step()
    assert layers == {0, 1, 2}
    assert len(shares) == 12


def test_one_view_is_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    training, _ = _training()
    sizes = []
    draw = Batch.view
    monkeypatch.setattr(Batch, "view", lambda batch, view: sizes.append((len(batch), view)) or draw(batch, view))
    training.step()
    assert sizes == [(6, "weak"), (5, "weak"), (5, "weak"), (5, "weak")]
