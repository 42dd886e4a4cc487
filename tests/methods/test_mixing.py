"""Mixing at each layer, and the labels alone mixed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from csda.errors import ConfigError
from csda.methods.base import Task
from csda.methods.mixing import Mix, Mixing, MixingSettings, mix
from csda.methods.mixup import Mixup
from reference.trainings import make_training

LAYERS = list(range(7))
PARTNERS = torch.tensor([1, 2, 3, 0])
TASK = Task(4, False, (2, 2, 2, 2), 8, 12, image_size=32, channels=3, width=256, stages=6)


def test_a_mix_is_a_weighted_sum_of_a_sample_and_its_partner() -> None:
    values, partners, shares = torch.rand(3, 2, 4, 4), torch.tensor([2, 0, 1]), torch.tensor([0.7, 1.0, 0.5])
    mixed = mix(values, partners, shares)
    for sample in range(3):
        by_hand = shares[sample] * values[sample] + (1 - shares[sample]) * values[partners[sample]]
        torch.testing.assert_close(mixed[sample], by_hand)
    assert torch.equal(mixed[1], values[1])


@pytest.mark.parametrize("depth", LAYERS)
def test_samples_are_mixed_at_the_layer_drawn_and_at_no_other(depth: int) -> None:
    model = make_training("mixup").model.eval()
    images, shares = torch.rand(4, 3, 32, 32), torch.tensor([0.6, 0.9, 0.75, 1.0])
    hidden = model.student[:depth](images)
    hidden = torch.stack([shares[i] * hidden[i] + (1 - shares[i]) * hidden[PARTNERS[i]] for i in range(4)])
    by_hand = model.head(model.student[depth:](hidden))
    mixing = Mixing(MixingSettings(layers=LAYERS), TASK)
    torch.testing.assert_close(mixing.logits(model, images, Mix(PARTNERS, shares, torch.tensor(depth))), by_hand)


def test_layers_that_are_not_listed_are_never_mixed_at() -> None:
    model = make_training("mixup").model.eval()
    images, shares = torch.rand(4, 3, 32, 32), torch.full((4,), 0.6)
    expected = model.head(model.student[4:](mix(model.student[:4](images), PARTNERS, shares)))
    mixing = Mixing(MixingSettings(layers=[0, 4]), TASK)
    torch.testing.assert_close(mixing.logits(model, images, Mix(PARTNERS, shares, torch.tensor(1))), expected)


def test_a_draw_is_a_shuffle_with_a_share_of_beta_for_all() -> None:
    mixing, generator = Mixing(MixingSettings(alpha=2.0), TASK), torch.Generator().manual_seed(3)
    usable = torch.tensor([True, True, False, True, True])
    shares, layers = [], []
    for _ in range(4000):
        drawn = mixing.draw(usable, generator)
        assert sorted(drawn.partners.tolist()) == [0, 1, 2, 3, 4]
        kept = drawn.shares[usable[drawn.partners]]
        assert torch.equal(drawn.shares[~usable[drawn.partners]], torch.ones(1))
        assert (kept == kept[0]).all()
        shares.append(kept[0].item())
        layers.append(drawn.layer.item())
    expected = torch.distributions.Beta(2.0, 2.0).sample((200_000,))
    expected = torch.maximum(expected, 1 - expected)
    levels = torch.tensor([0.1, 0.25, 0.5, 0.75, 0.9])
    torch.testing.assert_close(torch.tensor(shares).quantile(levels), expected.quantile(levels), atol=0.02, rtol=0)
    assert torch.bincount(torch.tensor(layers)).min() > 4000 / 3 * 0.9


@pytest.mark.parametrize("multi_label", [False, True])
def test_the_labels_alone_are_mixed_as_their_images_are(monkeypatch: pytest.MonkeyPatch, multi_label: bool) -> None:
    """With the draws of a step known, its loss is that of a slow loop."""
    training = make_training("mixup", multi_label=multi_label)
    assert isinstance(training.method, Mixup)
    drawn: list[Mix] = []
    logits = torch.randn(6, 4)

    def watch(model: object, images: Tensor, mix: Mix) -> Tensor:
        drawn.append(mix)
        return logits

    monkeypatch.setattr(training.method.mixing, "logits", watch)
    loss = training.step(labeled=torch.arange(6)).loss
    labels = training.labeled_set.targets[:6]
    before = [label.float() if multi_label else torch.eye(4)[label] for label in labels]
    by_hand = torch.zeros(())
    for sample, partner in enumerate(drawn[0].partners.tolist()):
        share = drawn[0].shares[sample]
        assert 0.5 <= share < 1
        target = share * before[sample] + (1 - share) * before[partner]
        if multi_label:
            positive, negative = logits[sample].sigmoid().log(), (-logits[sample]).sigmoid().log()
            by_hand -= (target * positive + (1 - target) * negative).sum() / 6
        else:
            by_hand -= (target * logits[sample].log_softmax(-1)).sum() / 6
    torch.testing.assert_close(loss, by_hand)


def test_an_encoder_without_stages_to_mix_between_is_refused() -> None:
    whole = replace(TASK, stages=1)
    with pytest.raises(ConfigError, match=r"layers = \[0, 2, 4\]: this backbone has no stages to mix between; .*\[0\]"):
        Mixing(MixingSettings(), whole)
    with pytest.raises(ConfigError, match=r"layers = \[0, 5\]: this backbone has 4 stages"):
        Mixing(MixingSettings(layers=[0, 5]), replace(TASK, stages=4))
    Mixing(MixingSettings(layers=[0]), whole)
