"""From records and pixels to the parts that a training iterates."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from csda.data.augment import Augmentation
from csda.data.loader import Parts, free_memory, open_parts
from csda.data.records import Dataset, Record, Split
from csda.errors import DataError

RECORDS = tuple(Record(f"image {number}", None, number % 2) for number in range(8))
DATASET = Dataset("set", ("a", "b"), RECORDS)
PIXELS = np.arange(8, dtype=np.uint8)[:, None, None, None] * np.ones((8, 2, 2, 3), np.uint8)
SPLIT = Split(
    labeled=(RECORDS[5], RECORDS[0]),
    unlabeled=tuple(replace(RECORDS[number], label=None) for number in (7, 1)),
    val=(RECORDS[2], RECORDS[3]),
    test=(RECORDS[6], RECORDS[4]),
    truth={},
)


def _open(dataset: Dataset = DATASET, split: Split = SPLIT, share: float = 1.0) -> Parts:
    return open_parts(dataset, PIXELS, split, Augmentation(), torch.Generator(), share)


def test_parts_have_the_pixels_of_their_records_in_the_order_of_the_split() -> None:
    parts = _open()
    for part, expected in (
        (parts.labeled, [5, 0]),
        (parts.unlabeled, [7, 1]),
        (parts.val, [2, 3]),
        (parts.test, [6, 4]),
    ):
        assert part.pixels[:, 0, 0, 0].tolist() == expected
        assert part.pixels.dtype == torch.uint8
    assert parts.labeled.targets.tolist() == [1, 0]
    assert not hasattr(parts.unlabeled, "targets")


def test_several_labels_become_a_row_of_zeros_and_ones() -> None:
    dataset = replace(DATASET, multi_label=True)
    labeled = (replace(RECORDS[5], label=(0, 1)), replace(RECORDS[0], label=()))
    parts = _open(dataset, replace(SPLIT, labeled=labeled))
    assert parts.labeled.targets.tolist() == [[1.0, 1.0], [0.0, 0.0]]
    assert parts.labeled.targets.dtype == torch.float32


def test_one_seed_rules_all_parts() -> None:
    parts = _open()
    indices = torch.tensor([0, 1, 0])
    for part in (parts.unlabeled, parts.val, parts.labeled):
        parts.seed(5)
        first = part(indices, "weak")
        parts.seed(5)
        assert torch.equal(part(indices, "weak"), first)


@pytest.mark.parametrize(("part", "title"), [("labeled", "labeled"), ("test", "test")])
def test_an_empty_part_is_refused(part: str, title: str) -> None:
    with pytest.raises(DataError, match=f"set: the {title} part is empty; .* --split"):
        _open(split=replace(SPLIT, **{part: ()}))


def test_no_unlabeled_images_are_a_pool_of_none() -> None:
    assert len(_open(split=replace(SPLIT, unlabeled=())).unlabeled) == 0


def test_without_streaming_what_does_not_fit_is_refused() -> None:
    with pytest.raises(DataError, match=r"set: .* GB of pixels do not fit into the memory of cpu; csda\.fast"):
        _open(share=0.0)


def test_free_memory_is_less_than_there_is() -> None:
    assert 2**20 < free_memory(torch.device("cpu")) < 2**50
