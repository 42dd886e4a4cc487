"""GLM: mixing at each layer, the guess of two views, and the loss."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from csda.data.batches import Batch
from csda.methods.glm import GLM, mix
from csda.models.dropout import Dropout
from reference.trainings import Training, make_training

LAYERS = list(range(7))


def _training(**settings: object) -> tuple[Training, GLM]:
    training = make_training("glm", **settings)
    assert isinstance(training.method, GLM)
    return training, training.method


def test_a_mix_is_a_weighted_sum_of_a_sample_and_its_partner() -> None:
    values, partners, shares = torch.rand(3, 2, 4, 4), torch.tensor([2, 0, 1]), torch.tensor([0.7, 1.0, 0.5])
    mixed = mix(values, partners, shares)
    for sample in range(3):
        by_hand = shares[sample] * values[sample] + (1 - shares[sample]) * values[partners[sample]]
        torch.testing.assert_close(mixed[sample], by_hand)
    assert torch.equal(mixed[1], values[1])


@pytest.mark.parametrize("depth", LAYERS)
def test_samples_are_mixed_at_the_layer_drawn_and_at_no_other(depth: int) -> None:
    training, method = _training(layers=LAYERS)
    model = training.model.eval()
    images, partners = torch.rand(4, 3, 32, 32), torch.tensor([1, 2, 3, 0])
    shares = torch.tensor([0.6, 0.9, 0.75, 1.0])
    hidden = model.student[:depth](images)
    hidden = torch.stack([shares[i] * hidden[i] + (1 - shares[i]) * hidden[partners[i]] for i in range(4)])
    by_hand = model.head(model.student[depth:](hidden))
    torch.testing.assert_close(method.mixed_logits(model, images, partners, shares, torch.tensor(depth)), by_hand)


def test_layers_that_are_not_listed_are_never_mixed_at() -> None:
    training, method = _training(layers=[0, 4])
    model = training.model.eval()
    images, partners, shares = torch.rand(4, 3, 32, 32), torch.tensor([1, 2, 3, 0]), torch.full((4,), 0.6)
    expected = model.head(model.student[4:](mix(model.student[:4](images), partners, shares)))
    torch.testing.assert_close(method.mixed_logits(model, images, partners, shares, torch.tensor(1)), expected)


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
    drawn: dict[str, Tensor] = {}

    def watch(model: object, images: Tensor, partners: Tensor, shares: Tensor, layer: Tensor) -> Tensor:
        drawn.update(partners=partners, shares=shares)
        return logits

    samples, labels = training.pool.batch(torch.arange(3)), torch.tensor([0, 3])
    logits, guesses = torch.randn(5, 4), torch.rand(3, 4).softmax(-1)
    mask = torch.tensor([True, False, True])
    monkeypatch.setattr(method, "mixed_logits", watch)
    images = training.labeled_set(torch.arange(2), "weak")
    supervised, unsupervised = method.learn(training.model, images, labels, samples, lambda: (guesses, mask))

    before = [torch.eye(4)[0], torch.eye(4)[3], *guesses]
    usable = [True, True, *mask.tolist()]
    mixed = []
    for sample, partner in enumerate(drawn["partners"].tolist()):
        share = drawn["shares"][sample]
        assert share == 1 if not usable[partner] else 0.5 <= share < 1
        mixed.append(share * before[sample] + (1 - share) * before[partner])
    cross_entropy = [-(mixed[row] * logits[row].log_softmax(-1)).sum() for row in (0, 1)]
    squared = [(mixed[row] - logits[row].softmax(-1)).square().sum() for row in (2, 4)]
    torch.testing.assert_close(supervised, sum(cross_entropy) / 2)
    torch.testing.assert_close(unsupervised, sum(squared) / 2)


def test_shares_and_layers_vary_from_step_to_step(monkeypatch: pytest.MonkeyPatch) -> None:
    training, method = _training()
    layers, shares = set(), set()
    compute = method.mixed_logits

    def watch(model: object, images: Tensor, partners: Tensor, share: Tensor, layer: Tensor) -> Tensor:
        layers.add(int(layer))
        shares.add(float(share[0]))
        return compute(model, images, partners, share, layer)  # type: ignore[arg-type]

    monkeypatch.setattr(method, "mixed_logits", watch)
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
