"""Find identical image files, and warn if they have different labels or are in different parts of a split."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from csda.data.content import UNREADABLE
from csda.data.records import Dataset, Record, Split


def find_duplicates(records: Sequence[Record], contents: Sequence[bytes]) -> tuple[tuple[Record, ...], ...]:
    """Groups of two or more records with the same file content; unreadable files are left out."""
    same = defaultdict(list)
    for record, content in zip(records, contents, strict=True):
        if content != UNREADABLE:
            same[content].append(record)
    return tuple(tuple(together) for together in same.values() if len(together) > 1)


def remark_duplicates(dataset: Dataset, contents: Sequence[bytes], split: Split | None) -> list[str]:
    """Remarks on duplicates, each with two images as an example.

    Drawn images have no files to compare.
    """
    if dataset.draw is not None:
        return []
    parts = () if split is None else (("val", split.val), ("test", split.test))
    held_out = {record.id: part for part, members in parts for record in members}
    left_out = set() if split is None else {row.id for row in dataset.records} - _members(split)
    judged: dict[str, Callable[[Record], object]] = {
        "with different labels": lambda record: record.label,
        "in different parts of the split": lambda record: (
            None if split is None or record.id in left_out else held_out.get(record.id, "train")
        ),
    }
    duplicates = find_duplicates(dataset.records, contents)
    found = {
        what: [tuple(unlike.values()) for same in duplicates if len(unlike := _unlike(same, judge)) > 1]
        for what, judge in judged.items()
    }
    return [f"duplicates {what}: {len(some)}, {name_pair(some[0])} for one" for what, some in found.items() if some]


def name_pair(same: Sequence[Record]) -> str:
    return " = ".join(record.id for record in same[:2])


def _members(split: Split) -> set[str]:
    return {record.id for part in (split.labeled, split.unlabeled, split.val, split.test) for record in part}


def _unlike(same: Sequence[Record], judge: Callable[[Record], object]) -> dict[object, Record]:
    """One record for each different value."""
    return {said: record for record in same if (said := judge(record)) is not None}
