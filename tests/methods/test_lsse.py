"""LSSE: the ensemble over visits, the random latent and the auto-encoder."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from csda.methods.lsse import LSSE, decoder
from reference.trainings import Training, make_training


def _training(**settings: float) -> tuple[Training, LSSE]:
    training = make_training("lsse", **settings)
    assert isinstance(training.method, LSSE)
    return training, training.method


def test_the_ensemble_is_the_average_of_earlier_visits() -> None:
    _, method = _training()
    visits = [torch.rand(2, 4).softmax(-1) for _ in range(4)]
    indices = torch.tensor([7, 3])
    for number, probs in enumerate(visits):
        targets, known = method.recall(indices)
        assert known.tolist() == [number > 0] * 2
        if number:
            weights = [0.4 * 0.6 ** (number - 1 - earlier) for earlier in range(number)]
            by_hand = sum(weight * visit for weight, visit in zip(weights, visits, strict=False)) / sum(weights)
            torch.testing.assert_close(targets, by_hand)
            torch.testing.assert_close(targets.sum(-1), torch.ones(2))
        method.remember(indices, probs)
    assert method.visits.nonzero().flatten().tolist() == [3, 7]


def test_a_first_visit_has_nothing_to_agree_with_and_a_second_has() -> None:
    training, _ = _training()
    assert training.step().logs["unlabeled_loss"] == 0
    assert training.step().logs["unlabeled_loss"] > 0


def test_agreement_is_the_mean_squared_error_of_probabilities() -> None:
    _, method = _training()
    logits, targets = torch.randn(3, 4), torch.rand(3, 4).softmax(-1)
    mask = torch.tensor([True, False, True])
    by_hand = (logits.softmax(-1) - targets)[[0, 2]].square().mean()
    torch.testing.assert_close(method.unlabeled_loss(logits, targets, mask), by_hand)


def test_predictions_come_from_a_draw_of_the_latent() -> None:
    """Everything else being fixed, two steps differ; without variance they do not."""
    training, method = _training(weight=0.0, reconstruction=0.0)
    training.model.eval()

    def losses() -> list[float]:
        values = []
        for seed in (1, 2):
            training.pool.generator.manual_seed(0)
            torch.manual_seed(seed)
            values.append(float(training.step().loss.detach()))
        return values

    first, second = losses()
    assert first != second
    with torch.no_grad():
        method.log_variance.weight.zero_()
        method.log_variance.bias.fill_(-1e9)
    first, second = losses()
    assert first == pytest.approx(second, abs=0.02)


def test_the_auto_encoder_minimises_the_negative_evidence_bound() -> None:
    _, method = _training(beta=3.0)
    images, mean, log_variance = torch.rand(2, 3, 32, 32), torch.randn(2, 256), torch.randn(2, 256)
    latent = torch.randn(2, 256)
    reconstructed = torch.sigmoid(method.decoder(latent))
    likelihood = -(images * reconstructed.log() + (1 - images) * (1 - reconstructed).log()).sum()
    divergence = kl_divergence(Normal(mean, (0.5 * log_variance).exp()), Normal(0.0, 1.0)).sum()
    by_hand = (likelihood + 3.0 * divergence) / images.numel()
    torch.testing.assert_close(method.evidence_loss(images, latent, mean, log_variance), by_hand, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("size", "channels"), [(32, 3), (128, 1)])
def test_the_decoder_gives_an_image_back(size: int, channels: int) -> None:
    assert decoder(256, size, channels)(torch.rand(2, 256)).shape == (2, channels, size, size)


@pytest.mark.parametrize("progress", [0.0, 0.5, 1.0])
def test_the_weight_grows_as_a_gaussian_to_the_labeled_share_of_thirty(progress: float) -> None:
    training, _ = _training(reconstruction=0.0)
    training.step()
    output = training.step(progress=progress)
    weight = 30 * 8 / 20 * math.exp(-5 * (1 - progress) ** 2)
    expected = output.logs["labeled_loss"] + weight * output.logs["unlabeled_loss"]
    torch.testing.assert_close(output.loss.detach(), expected)
