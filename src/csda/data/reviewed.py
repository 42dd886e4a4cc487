"""Use the labels from the review page: a split with them, and a table of all labels."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from csda.data.decisions import Decision, read_decisions
from csda.data.records import Dataset, Record, Split
from csda.data.splits import SplitRow, label_text, parse_label, read_rows, read_split
from csda.errors import DataError, RunError, counted
from csda.files import open_regular

REVIEW_FILE = "review.json"
"""File in the folder of a review before any training, with the data and its classes."""


def read_review(folder: Path) -> dict[str, Any]:
    """Data, classes (None if the data has them) and source of a review before any training."""
    path = folder / REVIEW_FILE
    try:
        with open_regular(path) as file:
            known = json.loads(file.readall())
        classes = known["classes"]
        texts = [known["data"], *([] if known["source"] is None else [known["source"]]), *(classes or [])]
        whole = known.keys() == {"data", "classes", "source"} and all(isinstance(text, str) for text in texts)
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        whole = False
    if not whole:
        raise RunError(
            f"{path}: missing or damaged; restore it, start a new review, or name another run or review folder"
        )
    return {"data": known["data"], "classes": classes, "source": known["source"]}


def has_split(folder: Path) -> bool:
    """Whether this is a run folder, rather than a review before any training."""
    return (folder / "split.csv").is_file()


def relabel(dataset: Dataset, rows: Sequence[SplitRow], where: Path) -> Dataset:
    """The data set with the labels of a split, which people may have changed."""
    index = {name: position for position, name in enumerate(dataset.classes)}
    texts = {row.id: row.label for row in rows if row.label}
    records = tuple(
        replace(record, label=parse_label(texts[record.id], index, dataset.multi_label, f"{where}, {record.id!r}"))
        if record.id in texts
        else record
        for record in dataset.records
    )
    return replace(dataset, records=records)


def decided_dataset(dataset: Dataset, folder: Path) -> Dataset:
    """The data set with the labels from the review, without images flagged as unusable."""
    decisions = _known(read_decisions(folder).all_current(), dataset, folder)
    records, counts = [], Counter[str]()
    for record in dataset.records:
        changed = _decide(record, decisions.get(record.id), dataset, folder, counts)
        if changed is not None:
            records.append(changed)
    return replace(dataset, records=tuple(records), remarks=(*dataset.remarks, *_remarks(counts, folder)))


def decided_split(dataset: Dataset, folder: Path) -> Split:
    """The split of a run with the decisions: images with a new label become labeled, flagged ones are left out.

    Validation and test images stay. A decision on one of them is an error, because the page never shows them.
    """
    path = folder / "split.csv"
    rows = [row for _, row in read_rows(path)]
    split = read_split(path, relabel(dataset, rows, path))
    decisions = _known(read_decisions(folder).all_current(), dataset, folder)
    for record in (*split.val, *split.test):
        if record.id in decisions:
            raise DataError(f"{folder / 'labels.csv'}: {record.id!r} is a validation or test image; restore the file")
    counts = Counter[str]()
    labeled: list[Record] = []
    unlabeled: list[Record] = []
    for record in (*split.labeled, *split.unlabeled):
        changed = _decide(record, decisions.get(record.id), dataset, folder, counts)
        if changed is not None:
            (unlabeled if changed.label is None else labeled).append(changed)
    staying = {record.id for record in unlabeled}
    return replace(
        split,
        labeled=tuple(labeled),
        unlabeled=tuple(unlabeled),
        truth={image: label for image, label in split.truth.items() if image in staying},
        remarks=(*split.remarks, *_remarks(counts, folder)),
    )


def list_decided(dataset: Dataset, folder: Path) -> Iterator[tuple[str, ...]]:
    """A row for each image: image, label, split, group, who, when.

    The split is empty before a training. Flagged images are left out.
    """
    decisions = read_decisions(folder).all_current()
    if has_split(folder):
        placed = [(part, record) for part, records in decided_split(dataset, folder).parts() for record in records]
    else:
        placed = [(record.part or "", record) for record in decided_dataset(dataset, folder).records]
    for part, record in placed:
        decision = decisions.get(record.id)
        made = (decision.who, decision.when) if decision is not None and decision.action == "label" else ("", "")
        yield record.id, label_text(record.label, dataset.classes), part, record.group or "", *made


def _known(decisions: Mapping[str, Decision], dataset: Dataset, folder: Path) -> Mapping[str, Decision]:
    ids = {record.id for record in dataset.records}
    for image, decision in decisions.items():
        if image not in ids:
            raise DataError(
                f"{folder / 'labels.csv'}, row {decision.number + 1}: {image!r} is no image of "
                f"{dataset.root or dataset.name}; name the data that was reviewed"
            )
    return decisions


def _decide(
    record: Record, decision: Decision | None, dataset: Dataset, folder: Path, counts: Counter[str]
) -> Record | None:
    """The record with its decision; None if it is flagged."""
    if decision is None or decision.action == "skip":
        return record
    if decision.action == "flag":
        counts["flagged"] += 1
        return None
    index = {name: position for position, name in enumerate(dataset.classes)}
    where = f"{folder / 'labels.csv'}, row {decision.number + 1}"
    label = parse_label(decision.label, index, dataset.multi_label, where)
    if record.label is None:
        counts["labeled"] += 1
        counts.update(f"labeled {name}" for name in decision.label.split("|"))
    elif record.label != label:
        counts["changed"] += 1
    return replace(record, label=label)


def _remarks(counts: Counter[str], folder: Path) -> list[str]:
    by_class = ", ".join(
        f"{name.removeprefix('labeled ')} {number}"
        for name, number in sorted(counts.items())
        if name.startswith("labeled ")
    )
    said = [
        *([f"{counted(counts['labeled'], 'more image', 'have')} a label ({by_class})"] if counts["labeled"] else []),
        *([f"{counted(counts['changed'], 'label', 'are')} changed"] if counts["changed"] else []),
        *([f"{counted(counts['flagged'], 'image', 'are')} left out as unusable"] if counts["flagged"] else []),
    ]
    return [f"labels from the review of {folder}: {', '.join(said) or 'nothing is changed'}"]
