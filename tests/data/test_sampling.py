"""Which images a step sees."""

from __future__ import annotations

import pytest
import torch

from csda.data.sampling import shuffled_passes


@pytest.mark.parametrize(("count", "batch_size", "steps"), [(10, 4, 7), (3, 8, 5), (1, 2, 3), (100, 7, 4)])
def test_passes_follow_each_other_and_each_has_every_image_once(count: int, batch_size: int, steps: int) -> None:
    order = shuffled_passes(count, batch_size, steps, torch.Generator().manual_seed(0))
    assert order.shape == (steps, batch_size)
    flat = order.flatten().tolist()
    for start in range(0, len(flat), count):
        one = flat[start : start + count]
        assert len(set(one)) == len(one)
        assert set(one) <= set(range(count))


def test_order_is_seeded_and_shuffled() -> None:
    first, again, other = (
        shuffled_passes(50, 10, 10, torch.Generator().manual_seed(seed)).flatten().tolist() for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other
    assert first[:50] != first[50:]


def test_an_empty_part_gives_empty_batches() -> None:
    assert shuffled_passes(0, 4, 3, torch.Generator()).shape == (3, 0)
