"""BiS: the schedule of its two samplers, and the mask by reversed class frequency."""

from __future__ import annotations

import pytest
import torch

from csda.data.sampling import balancing_weights, bilateral_draws
from csda.methods.bis import reversed_frequencies
from reference.trainings import make_training


def test_a_share_of_one_minus_the_squared_progress_stays_random() -> None:
    order = torch.full((5, 100), -1)
    progress = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0])
    labels = torch.tensor([0] * 90 + [1] * 9 + [2])
    drawn = bilateral_draws(order, labels, progress, torch.Generator().manual_seed(0))
    assert (drawn == -1).sum(1).tolist() == [100, 94, 75, 44, 0]


def test_the_other_sampler_is_balanced_by_class() -> None:
    labels = torch.tensor([0] * 90 + [1] * 9 + [2])
    order = torch.zeros(1, 30_000, dtype=torch.int64)
    drawn = bilateral_draws(order, labels, torch.ones(1), torch.Generator().manual_seed(0))
    shares = labels[drawn[0]].bincount() / drawn.numel()
    torch.testing.assert_close(shares, torch.full((3,), 1 / 3), atol=0.01, rtol=0)
    assert len(drawn.unique()) == len(labels)


def test_several_labels_an_image_are_balanced_by_label() -> None:
    """To draw a label, or "none", and then one of its images: the weights add up over an image's labels."""
    labels = torch.tensor([[1, 0], [1, 0], [1, 1], [0, 0], [0, 0]])
    expected = torch.tensor([1 / 3, 1 / 3, 1 / 3 + 1, 1 / 2, 1 / 2], dtype=torch.float64)
    torch.testing.assert_close(balancing_weights(labels), expected)


def test_the_rarest_class_gets_the_frequency_of_the_commonest() -> None:
    torch.testing.assert_close(reversed_frequencies(torch.tensor([20.0, 100.0, 5.0])), torch.tensor([0.2, 0.05, 1.0]))
    pairs = torch.tensor([[90.0, 10.0], [30.0, 70.0]])
    torch.testing.assert_close(reversed_frequencies(pairs), torch.tensor([[1 / 9, 1.0], [1.0, 3 / 7]]))


@pytest.mark.parametrize("progress", [0.0, 0.5, 1.0])
def test_a_guess_is_kept_with_the_rate_of_its_class(progress: float) -> None:
    labels = torch.tensor([0, 0, 0, 0, 1, 1, 2, 3])
    method = make_training("bis", labels=labels).method
    aligned = torch.eye(4).repeat_interleave(20_000, 0)
    kept = method.admit(aligned, torch.ones(80_000, dtype=torch.bool), torch.tensor(progress))
    shares = kept.view(4, -1).float().mean(1)
    # Counts 4, 2, 1, 1: reversed 1/4, 1/4, 2/4, 4/4.
    at_the_end = torch.tensor([0.25, 0.25, 0.5, 1.0]) ** (1 / 3)
    torch.testing.assert_close(shares, 1 - progress**2 * (1 - at_the_end), atol=0.015, rtol=0)


def test_an_unconfident_guess_is_not_kept() -> None:
    method = make_training("bis").method
    aligned = torch.tensor([[0.97, 0.01, 0.01, 0.01], [0.9, 0.1, 0.0, 0.0]])
    assert method.admit(aligned, torch.ones(2, dtype=torch.bool), torch.tensor(0.0)).tolist() == [True, False]


def test_labels_are_masked_one_at_a_time() -> None:
    labels = torch.tensor([[1.0, 0, 1, 1]] * 2 + [[0.0, 1, 0, 1]] * 6)
    method = make_training("bis", multi_label=True, labels=labels).method
    aligned = torch.tensor([[0.99, 0.5, 0.01, 0.96], [0.99, 0.97, 0.9, 0.5]])
    offered = torch.tensor([True, True])
    early = method.admit(aligned, offered, torch.tensor(0.0))
    assert early.tolist() == [[True, False, True, True], [True, True, False, False]]
    logits = torch.tensor([[0.5, 1.0, -1.0, 2.0], [0.0, 1.0, 0.0, 0.0]])
    terms = torch.nn.functional.softplus(torch.tensor([-0.5, -1.0, -2.0, 0.0, -1.0]))
    torch.testing.assert_close(
        method.unlabeled_loss(logits, method.refinement.targets(aligned), early), terms.sum() / 2
    )

    many = torch.tensor([[0.99, 0.99, 0.01, 0.99]]).expand(20_000, -1)
    late = method.admit(many, torch.ones(len(many), dtype=torch.bool), torch.tensor(1.0)).float().mean(0)
    # Present in 2, 6, 2 and 8 of 8: the rarer value is always kept, the commoner one at the rarer one's frequency.
    expected = torch.tensor([1.0, (2 / 6) ** (1 / 3), (2 / 6) ** (1 / 3), 0.0])
    torch.testing.assert_close(late, expected, atol=0.015, rtol=0)
