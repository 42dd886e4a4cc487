"""NM: who enters the memory, who leaves it, and how neighbours vote."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from csda.methods import METHODS
from csda.methods.base import Task
from csda.methods.neighbor_matching import NeighborMatching
from reference.trainings import make_training


def _method(memory: int = 8, **options: bool) -> NeighborMatching:
    method = make_training("nm", memory=memory, **options).method
    assert isinstance(method, NeighborMatching)
    return method


def _features(count: int, seed: int = 0) -> Tensor:
    """Of length 1, as the teacher's are made before they are compared."""
    return F.normalize(torch.randn(count, 256, generator=torch.Generator().manual_seed(seed)), dim=-1)


@pytest.mark.parametrize(("classes", "slots"), [(7, 36), (14, 18), (200, 1)])
def test_the_memory_holds_twice_the_batch_divided_by_the_classes(classes: int, slots: int) -> None:
    counts = dict.fromkeys(range(classes), 1)
    task = Task(classes, False, tuple(counts.values()), classes, 9, image_size=32, channels=3, width=256, stages=6)
    entry = METHODS["nm"]
    assert entry.build(task, entry.settings(**entry.defaults)).features.shape == (classes, slots, 256)


def test_a_feature_enters_if_its_class_is_likely_enough_or_likeliest() -> None:
    method, features = _method(), _features(4)
    probs = torch.tensor(
        [
            [0.70, 0.30, 0.00, 0.00],  # class 1 at 0.3: enters
            [0.71, 0.29, 0.00, 0.00],  # class 1 just below, and another is likelier: stays out
            [0.24, 0.24, 0.26, 0.26],  # class 2, the first of the likeliest: enters
            [0.10, 0.10, 0.10, 0.70],  # class 3: enters
        ]
    )
    method.remember(features, probs, torch.tensor([1, 1, 2, 3]))
    assert method.filled.sum(1).tolist() == [0, 1, 1, 1]
    for place, source in ((1, 0), (2, 2), (3, 3)):
        torch.testing.assert_close(method.features[place, 0], features[source])
        assert method.labels[place, 0].tolist() == torch.eye(4)[place].tolist()


def test_the_memory_is_that_of_a_slow_loop() -> None:
    method = _method(memory=8)  # four a class
    random = torch.Generator().manual_seed(3)
    lists: list[list[Tensor]] = [[] for _ in range(4)]
    for round_ in range(6):
        features = _features(7, seed=round_)
        probs = torch.rand(7, 4, generator=random).softmax(-1) ** 3
        probs = probs / probs.sum(-1, keepdim=True)
        targets = torch.randint(0, 4, (7,), generator=random)
        method.remember(features, probs, targets)
        for feature, prob, target in zip(features, probs, targets.tolist(), strict=True):
            if prob[target] >= 0.3 or prob.argmax() == target:
                lists[target] = [feature, *lists[target]][:4]
        for label, held in enumerate(lists):
            assert method.filled[label].tolist() == [True] * len(held) + [False] * (4 - len(held))
            if held:
                torch.testing.assert_close(method.features[label, : len(held)], torch.stack(held))


def test_neighbours_vote_by_the_softmax_of_a_hundred_cosines() -> None:
    method = _method()
    # Features that are all alike, so that nobody's vote drowns the others'.
    features = F.normalize(1.0 + 2.4 * _features(5), dim=-1)
    targets = torch.tensor([0, 1, 1, 2, 0])
    method.remember(features, torch.eye(4)[targets], targets)
    asked = F.normalize(torch.stack((features[0] + features[1], features[2] + features[3] + features[4])), dim=-1)
    guesses = method.propagate(asked, torch.zeros(2, 4))
    for row, guess in zip(asked, guesses, strict=True):
        cosines = torch.stack([torch.cosine_similarity(row.double(), feature.double(), dim=0) for feature in features])
        votes = torch.exp(100 * cosines)
        assert (votes / votes.sum()).max() < 0.9
        by_hand = torch.zeros(4, dtype=torch.float64).index_add(0, targets, votes / votes.sum())
        torch.testing.assert_close(guess.double(), by_hand, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(guesses.sum(-1), torch.ones(2))


def test_without_a_memory_the_teacher_guesses_itself() -> None:
    fallback = torch.rand(3, 4).softmax(-1)
    assert torch.equal(_method().propagate(_features(3), fallback), fallback)


def test_images_are_kept_under_each_of_their_labels_and_vote_with_all() -> None:
    method, features = _method(memory=10, multi_label=True), _features(3)
    targets = torch.tensor([[1.0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1]])
    probs = torch.tensor([[0.9, 0.1, 0.0, 0.0], [0.2, 0.6, 0.0, 0.0], [0.0, 0.0, 0.0, 0.29]])
    method.remember(features, probs, targets)
    # The first enters under label 0 but not 1, the second under "none" (1 − 0.6 ≥ 0.3), the third nowhere.
    assert method.filled.sum(1).tolist() == [1, 0, 0, 0, 1]
    guess = method.propagate(features[:2], torch.zeros(2, 4))
    torch.testing.assert_close(guess, targets[:2], atol=1e-6, rtol=0)
