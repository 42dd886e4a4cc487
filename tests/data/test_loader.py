"""Pools, batches and their views."""

from __future__ import annotations

import pytest
import torch

from csda.data import augment
from csda.data.augment import Augmentation, Selection
from csda.data.loader import ImagePool, LabeledSet, View


def _pool(count: int = 10, seed: int = 0) -> LabeledSet:
    pixels = torch.randint(0, 256, (count, 8, 8, 3), generator=torch.Generator().manual_seed(7), dtype=torch.uint8)
    return LabeledSet(pixels, torch.arange(count), Augmentation(), torch.Generator().manual_seed(seed))


def test_order_is_one_pass_in_batches() -> None:
    pool = _pool(10)
    assert [batch.tolist() for batch in pool.order(4, shuffled=False)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    shuffled = torch.cat(list(pool.order(4, shuffled=True))).tolist()
    assert sorted(shuffled) == list(range(10))
    assert shuffled != list(range(10))
    assert torch.cat(list(_pool(10).order(4, shuffled=True))).tolist() == shuffled


def test_views_are_drawn_when_asked_for_and_anew_each_time() -> None:
    indices = torch.tensor([3, 1, 3])
    pool, twin = _pool(), _pool()
    batch = pool.batch(indices)
    first, second = batch.weak(), batch.weak()
    assert not torch.equal(first, second)
    assert torch.equal(first, twin.augmentation.weak(Selection(twin.pixels[indices]), twin.generator))
    assert torch.equal(second, twin(indices, "weak"))
    assert torch.equal(batch.strong(), twin(indices, "strong"))
    assert torch.equal(pool(indices, "plain"), augment.plain(pool.pixels[indices]))


def test_a_labeled_batch_carries_its_targets_and_an_unlabeled_one_has_none() -> None:
    labeled = _pool()
    indices = torch.tensor([5, 2])
    batch = labeled.batch(indices)
    assert len(batch) == 2
    assert batch.targets.tolist() == batch.indices.tolist() == [5, 2]
    pool = ImagePool(labeled.pixels, labeled.augmentation, labeled.generator)
    assert len(pool) == 10
    for thing in (pool, pool.batch(indices)):
        with pytest.raises(AttributeError):
            _ = thing.targets  # type: ignore[union-attr]


def test_images_are_looked_up_when_they_are_asked_for() -> None:
    pool = _pool()
    batch = pool.batch(torch.tensor([3, 1, 3]))
    assert batch.images.source is pool.pixels
    pool.pixels[1] = 7
    assert torch.equal(batch.pixels, pool.pixels[[3, 1, 3]])
    at_hand = torch.zeros(3, 8, 8, 3, dtype=torch.uint8)
    assert pool.batch(torch.tensor([3, 1, 3]), at_hand).pixels is at_hand


@pytest.mark.parametrize("view", ["weak", "strong", "plain"])
def test_a_batch_shows_others_where_it_is_told_to_on_the_device(view: View) -> None:
    indices, others = torch.tensor([3, 1, 3, 0, 9]), torch.tensor([6, 2])
    for real, shown in ((True, indices), (False, others[[0, 1, 0, 1, 0]])):
        pool, twin = _pool(), _pool()
        batch = pool.batch(indices).where(torch.tensor(real), pool.batch(others))
        assert torch.equal(batch.indices, indices)
        assert torch.equal(batch.view(view), twin(shown, view))
