"""Which images are shown, against plain loops over all of them."""

from __future__ import annotations

import numpy as np
import pytest

from csda import examples


@pytest.fixture
def drawn() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(1)
    return generator.dirichlet(np.ones(3), 120).astype(np.float32), generator.integers(3, size=120)


def test_mistakes_are_the_surest_of_each_class(drawn: tuple[np.ndarray, np.ndarray]) -> None:
    probs, labels = drawn
    for name, rows in enumerate(examples.choose_mistakes(probs, labels)):
        wrong = [row for row in range(120) if labels[row] == name != probs[row].argmax()]
        assert rows == sorted(wrong, key=lambda row: -probs[row].max())[: examples.MISTAKES]


def test_cells_hold_the_surest_images_of_theirs(drawn: tuple[np.ndarray, np.ndarray]) -> None:
    probs, labels = drawn
    chosen = examples.choose_cells(probs, labels)
    assert len(chosen) == 9
    for (truth, guess), rows in chosen.items():
        inside = [row for row in range(120) if (labels[row], probs[row].argmax()) == (truth, guess)]
        assert rows == sorted(inside, key=lambda row: -probs[row].max())[: examples.CELL]


def test_of_many_cells_the_fullest_are_shown() -> None:
    generator, n = np.random.default_rng(2), 20
    labels = generator.integers(n, size=3000)
    probs = generator.dirichlet(np.full(n, 0.3), 3000)
    chosen = examples.choose_cells(probs, labels)
    counts = np.zeros((n, n), dtype=int)
    np.add.at(counts, (labels, probs.argmax(1)), 1)
    assert len(chosen) == examples.CELLS
    assert min(counts[cell] for cell in chosen) >= np.sort(counts, axis=None)[-examples.CELLS]


def test_pseudo_labels_go_from_the_surest_to_the_least_sure(drawn: tuple[np.ndarray, np.ndarray]) -> None:
    probs, _ = drawn
    for name, rows in enumerate(examples.choose_guesses(probs)):
        taken = [row for row in range(120) if probs[row].argmax() == name]
        sure = probs[rows].max(1)
        assert len(rows) == examples.GUESSES
        assert set(rows) <= set(taken)
        assert (sure[0], sure[-1]) == (probs[taken].max(), probs[taken].max(1).min())
        assert (np.diff(sure) <= 0).all()
    one = examples.choose_guesses(np.array([[0.9, 0.1]]))
    assert one == [[0], []]


def test_seen_are_right_ones_and_wrong_ones(drawn: tuple[np.ndarray, np.ndarray]) -> None:
    probs, labels = drawn
    for name, pairs in enumerate(examples.choose_seen(probs, labels)):
        assert [labels[row] for row, _ in pairs] == [name] * examples.SEEN
        assert [probs[row].argmax() for row, _ in pairs] == [target for _, target in pairs]
        assert [target == name for _, target in pairs] == [True, True, False, False]


def test_several_labels_an_image() -> None:
    probs = np.array([[0.9, 0.2], [0.8, 0.6], [0.1, 0.7], [0.3, 0.4]])
    labels = np.array([[1, 1], [0, 0], [1, 1], [0, 1]])
    assert examples.choose_mistakes(probs, labels) == [[1, 2], [1, 0, 3]]
    assert examples.choose_seen(probs, labels) == [[(0, 0), (2, 0)], [(2, 1), (3, 1), (0, 1)]]
    assert examples.choose_guesses(probs, multi_label=True)[1] == [2, 1, 3, 0]
    assert set(examples.choose_judged(probs, labels)) == {0, 1, 2, 3}


def test_nothing_is_chosen_of_nothing() -> None:
    empty, none = np.empty((0, 3)), np.empty(0, dtype=np.int64)
    assert list(examples.choose_judged(empty, none)) == []
    assert list(examples.choose_unlabeled(empty)) == []
