"""Which image comes next: each order against what it says in words, computed another way."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from csda.review import ordering
from csda.review.learning import align, learn, learn_again, leave_out
from csda.review.ordering import Pool, audit_order, interleave, rank


@pytest.fixture
def pool() -> Pool:
    generator = np.random.default_rng(0)
    probs, aligned = generator.dirichlet(np.ones(4), 300), generator.dirichlet(np.ones(4), 300)
    return Pool(
        [f"{number:03d}" for number in generator.permutation(300)],
        probs,
        np.array([100, 50, 10, 1]),
        other=aligned,
        features=generator.normal(size=(300, 20)).astype(np.float32),
        labeled_features=generator.normal(size=(30, 20)).astype(np.float32),
    )


def test_every_order_is_a_permutation(pool: Pool) -> None:
    assert set(pool.orders()) == set(ordering.ORDERS) - {"suspicious"}
    for order in pool.orders():
        assert sorted(rank(order, pool)) == list(range(300))
    empty = Pool([], np.empty((0, 4)), pool.counts, features=np.empty((0, 20)), labeled_features=pool.labeled_features)
    for order in empty.orders():
        assert len(rank(order, empty)) == 0


def test_scores(pool: Pool) -> None:
    assert pool.probs is not None
    assert pool.other is not None
    margins = [sorted(row)[-1] - sorted(row)[-2] for row in pool.probs]
    assert rank("uncertainty", pool).tolist() == np.argsort(margins).tolist()
    assert rank("confidence", pool).tolist() == np.argsort(margins)[::-1].tolist()
    distance = [
        sum(abs(a - b) for a, b in zip(*rows, strict=True)) for rows in zip(pool.probs, pool.other, strict=True)
    ]
    assert rank("disagreement", pool)[0] == np.argmax(distance)
    rare = [row @ [1 / 101, 1 / 51, 1 / 11, 1 / 2] for row in pool.probs]
    assert rank("rare", pool)[0] == np.argmax(rare)
    assert [pool.names[place] for place in rank("name", pool)] == sorted(pool.names)


def test_the_mix_takes_from_the_border_of_each_class_and_one_of_each_group(pool: Pool) -> None:
    """By the ratio of a class to the best other; images of a labeled group, and further ones of any group, are last."""
    assert pool.probs is not None
    ratios = np.array([[abs(np.log(row[k] / max(np.delete(row, k)))) for k in range(4)] for row in pool.probs])
    assert -ordering.closeness(pool.probs) == pytest.approx(ratios)
    first = rank("mix", pool)[:8].tolist()
    assert {int(column.argmin()) for column in ratios.T} <= set(first[:4])
    groups = [None if place % 3 == 0 else f"patient {place % 40}" for place in range(300)]
    grouped = rank("mix", replace(pool, groups=groups, labeled_groups={"patient 7", None}))
    assert sorted(grouped) == list(range(300))
    fresh = [groups[place] for place in grouped]
    count = 100 + len({group for group in groups if group} - {"patient 7"})
    named = [group for group in fresh[:count] if group]
    assert len(named) == len(set(named)) == count - 100
    assert "patient 7" in fresh[count:]
    two = ordering.closeness(np.array([[0.5, 0.9], [0.99, 0.2]]), multi_label=True)
    assert two[0, 0] == 0
    assert two[1] == pytest.approx([-np.log(99), -np.log(4)])


def test_farthest_first(pool: Pool) -> None:
    """Against distances of all pairs, image by image."""
    assert pool.features is not None
    assert pool.labeled_features is not None
    unit = [part / np.linalg.norm(part, axis=1, keepdims=True) for part in (pool.features, pool.labeled_features)]
    known = list(unit[1])
    found = rank("diversity", pool)[:20]
    for place in found:
        nearest = [min(np.linalg.norm(point - other) for other in known) for point in unit[0]]
        assert nearest[place] == pytest.approx(max(nearest), abs=1e-5)
        known.append(unit[0][place])


def test_the_audit_is_a_random_sample_whatever_the_order_is(pool: Pool) -> None:
    audit = audit_order(pool.names)
    for order in pool.orders():
        shown, audited = interleave(rank(order, pool), audit)
        assert sorted(shown) == list(range(300))
        assert shown[audited].tolist() == audit[:60].tolist()
        assert np.flatnonzero(audited).tolist() == list(range(4, 300, 5))
    for count in range(12):
        shown, audited = interleave(np.arange(count), np.arange(count)[::-1])
        assert sorted(shown) == list(range(count))
        assert audited.sum() == count // 5


def _clusters(count: int = 120, width: int = 12) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(1)
    labels = generator.integers(3, size=count)
    centres = 5 * np.eye(3, width)
    return (centres[labels] + generator.normal(size=(count, width))).astype(np.float32), labels


def test_changed_labels_are_the_suspicious_ones() -> None:
    features, labels = _clusters()
    given = labels.copy()
    wrong = np.array([3, 30, 60, 90, 110])
    given[wrong] = (given[wrong] + 1) % 3
    learned = learn(features, np.arange(120), given, 3)
    probs = leave_out(learned, features, given)
    assert set(wrong) <= set(np.argsort(-ordering.suspicion(probs, given))[:8])
    assert ordering.suspicion(np.full((2, 3), np.nan), np.array([0, 1])).tolist() == [-2, -2]
    several = ordering.suspicion(np.array([[0.9, 0.2], [0.6, 0.5]]), np.array([[0, 0], [1, 1]]))
    assert several == pytest.approx([0.9, 0.5])


def test_learning_again_is_learning() -> None:
    features, labels = _clusters()
    some = np.arange(90)
    learned = learn(features, some, labels[some], 3)
    again = learn_again(learned, features[some], labels[some])
    assert again.predict(features) == pytest.approx(learned.predict(features), abs=1e-2)
    assert (learned.predict(features[90:]).argmax(axis=1) == labels[90:]).mean() > 0.8
    aligned = align(leave_out(learned, features[some], labels[some]), labels[some], learned.predict(features))
    assert aligned is not None
    assert aligned.sum(axis=1) == pytest.approx(np.ones(120))
    assert align(np.ones((2, 3)) / 3, np.array([0, 1]), learned.predict(features)) is None


def test_neighbours_are_the_nearest_by_angle() -> None:
    features, _ = _clusters()
    found, similarity = ordering.neighbours(features[0], features[1:], 5)
    cosines = [row @ features[0] / np.linalg.norm(row) / np.linalg.norm(features[0]) for row in features[1:]]
    assert found.tolist() == np.argsort(cosines)[::-1][:5].tolist()
    assert similarity == pytest.approx(sorted(cosines)[::-1][:5], abs=1e-5)


def test_information_is_the_reduction_of_variance(pool: Pool) -> None:
    """The first images are those of a loop that computes every design anew."""
    assert pool.probs is not None
    assert pool.features is not None
    assert pool.labeled_features is not None
    points, known = ordering._principal(pool.features, pool.labeled_features)
    unsure = (pool.probs * (1 - pool.probs)).sum(1)
    weights = (pool.probs / pool.probs.sum(0)).sum(1) * unsure
    precision = np.eye(points.shape[1]) + unsure.mean() * known.T @ known

    def variance(image: int) -> float:
        covariance = np.linalg.inv(precision + unsure[image] * np.outer(points[image], points[image]))
        return float(sum(weight * point @ covariance @ point for weight, point in zip(weights, points, strict=True)))

    taken: list[int] = []
    for _ in range(4):
        taken.append(min(set(range(300)) - set(taken), key=variance))
        precision += unsure[taken[-1]] * np.outer(points[taken[-1]], points[taken[-1]])
    assert rank("information", pool)[:4].tolist() == taken
    before_any_label = replace(pool, labeled_features=pool.labeled_features[:0])
    assert "information" not in before_any_label.orders()


def test_information_has_images_beyond_its_candidates(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordering, "CANDIDATES", 50)
    monkeypatch.setattr(ordering, "INFORMED", 5)
    assert sorted(rank("information", pool)) == list(range(300))
    assert pool.features is not None
    same = replace(pool, features=np.ones_like(pool.features))
    assert sorted(rank("information", same)) == list(range(300))
