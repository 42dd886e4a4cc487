"""Divide images into labeled, unlabeled, validation and test: draw a split by seed, write and read it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from csda.data.csv_files import JOIN, NONE_PRESENT, enter, read_table
from csda.data.records import Dataset, Label, Part, Record, Split
from csda.data.stratification import (
    Budget,
    draw_groups,
    draw_units,
    held_out_targets,
    labeled_targets,
    strata_of,
    units_of,
)
from csda.errors import ConfigError, DataError, counted

PARTS: tuple[Part, ...] = ("labeled", "unlabeled", "val", "test")
FEW_VALIDATION = 30
"""With fewer validation images, a remark says that they are too few to choose the epoch."""

TITLES = {"labeled": "labeled", "unlabeled": "unlabeled", "val": "validation", "test": "test"}


class SplitRow(NamedTuple):
    """A line of a split CSV; `label` is text, empty for unlabeled images."""

    id: str
    split: str
    label: str
    group: str


@dataclass(frozen=True, slots=True)
class Begun:
    """What a resumed run began with: its split, and the known labels of unlabeled images.

    `path` is that of its split.csv, and `digest` the `content_digest` of its data, None in older runs.
    """

    path: Path
    split: Sequence[SplitRow]
    truth: Mapping[str, str]
    digest: str | None = None


def make_split(
    dataset: Dataset,
    labels: str | int | None = None,
    *,
    by: Literal["image", "group"] | None = None,
    seed: int = 0,
    test: str | int | None = None,
    val: str | int | None = None,
) -> Split:
    """Divide a data set into labeled, unlabeled, validation and test images.

    Parts given by the source are kept. Otherwise `test` and `val` are drawn from the training images (or from labeled
    ones, if there are no others), stratified by class and with at least one image of each. `labels` then draws the
    images that stay labeled; without it all do. Shares are of all labeled images for `test` and `val`, and of the
    labeled training images, or their groups, for `labels`.

    With `by="group"` no group is in two of training, validation and test, and labeled images are whole groups as far as
    the budget allows. This is also the default if groups are known and the source's own parts keep them together. With
    `val` 0 there is no validation part. The same seed gives the same split; test and validation do not depend on
    `labels`.
    """
    if by is None and _keeps_groups(dataset.records):
        try:
            return make_split(dataset, labels, by="group", seed=seed, test=test, val=val)
        except DataError as error:
            raise DataError(f"{error}; groups are kept together here, and split_by=image divides them") from None
    by = by or "image"
    records = dataset.records
    rng = np.random.default_rng(seed)
    remarks: list[str] = []
    positions = _own_parts(dataset, remarks)
    if by == "group":
        _require_groups(records, positions)

    pool = positions["train"] or positions["labeled"]
    whole = len(pool)
    held_out = {
        "test": dataset.held_out[0] if test is None else test,
        "val": dataset.held_out[1] if val is None else val,
    }
    if val is not None and positions["val"]:
        raise DataError(
            f"val = {val}: the source has a validation part of its own, {len(positions['val'])} images; leave val out"
        )
    missing = [part for part in held_out if not positions[part] and str(held_out[part]) != "0"]
    if missing and by == "image" and not dataset.multi_label:
        _require_enough(dataset, pool, len(missing) + 1)
    for keep, part in zip(range(len(missing), 0, -1), missing, strict=True):
        units = units_of(records, pool, by)
        targets, total = held_out_targets(dataset, units, Budget.parse(held_out[part]), whole, keep)
        taken = set(draw_units(units, targets, total, keep=keep, rng=rng))
        positions[part] = sorted(taken)
        pool[:] = [position for position in pool if position not in taken]
        if any(positions[other] for other in held_out if other not in missing):
            remarks.append(
                f"the source has no {TITLES[part]} part: {len(taken)} of its training images were drawn for it"
            )
    if by == "group":
        _leave_out_held_groups(records, positions, remarks)

    candidates = positions["labeled"] + positions["train"]
    labeled = candidates
    if labels is not None and not dataset.listed:
        labeled = _draw_labeled(dataset, candidates, Budget.parse(labels), by, rng, remarks)
    unlabeled = positions["unlabeled"] + list(set(candidates) - set(labeled))
    positions |= {"labeled": sorted(labeled), "unlabeled": sorted(unlabeled)}
    return _assemble(dataset, positions, remarks, by_image=by == "image")


def move_to_labeled(split: Split, truth: Mapping[str, Label]) -> Split:
    """The split of the upper bound: unlabeled images with a known label become labeled."""
    known = tuple(replace(record, label=truth[record.id]) for record in split.unlabeled if record.id in truth)
    if split.unlabeled and not known:
        raise DataError("the upper bound needs labels of the unlabeled images, but none is known")
    return replace(
        split,
        labeled=split.labeled + known,
        unlabeled=tuple(record for record in split.unlabeled if record.id not in truth),
        truth={},
    )


# --- on disk --------------------------------------------------------------------------------------------------------


def label_text(label: Label | None, classes: Sequence[str]) -> str:
    """A label as a CSV cell: empty for None, several joined by `|`, `(none)` for a known empty set."""
    if label is None:
        return ""
    if isinstance(label, int):
        return classes[label]
    return JOIN.join(classes[index] for index in label) or NONE_PRESENT


def parse_label(text: str, index: Mapping[str, int], multi_label: bool, where: str) -> Label | None:
    """Read a cell of `label_text`. `index` maps class names to indices, `where` is the file and row."""
    text = text.strip()
    if not text:
        return None
    names = [] if multi_label and text == NONE_PRESENT else text.split(JOIN) if multi_label else [text]
    unknown = [name for name in names if name not in index]
    if unknown:
        raise DataError(f"{where}: no class is called {unknown[0]!r}; the classes are {', '.join(index)}")
    return tuple(sorted({index[name] for name in names})) if multi_label else index[text]


def list_split(split: Split, classes: Sequence[str]) -> Iterator[SplitRow]:
    """Lines for `read_rows`."""
    for part, records in split.parts():
        for record in records:
            yield SplitRow(record.id, part, label_text(record.label, classes), record.group or "")


def read_rows(path: Path) -> list[tuple[int, SplitRow]]:
    """The rows of a split CSV with their numbers. The columns label and group are optional."""
    table = read_table(path)
    id_at, *others = table.require("id"), table.require("split"), table.position("label"), table.position("group")
    return [
        (row, SplitRow(cells[id_at], *("" if place is None else cells[place].strip() for place in others)))
        for row, cells in table.rows
    ]


def read_split(path: Path, dataset: Dataset) -> Split:
    """Read a split CSV; images that are not in it are left out."""
    return _place(path, read_rows(path), dataset)


def restore_split(begun: Begun, dataset: Dataset) -> Split:
    """The split that a run began with, and the labels of unlabeled images known then."""
    split = _place(begun.path, enumerate(begun.split, start=2), dataset)
    index = {name: position for position, name in enumerate(dataset.classes)}
    labels = {
        image: parse_label(text, index, dataset.multi_label, f"{begun.path.with_name('truth.csv')}, {image!r}")
        for image, text in begun.truth.items()
    }
    return replace(split, truth={image: label for image, label in labels.items() if label is not None})


def _place(path: Path, rows: Iterable[tuple[int, SplitRow]], dataset: Dataset) -> Split:
    """Put every record into the part of its row."""
    by_id = {record.id: position for position, record in enumerate(dataset.records)}
    index = {name: position for position, name in enumerate(dataset.classes)}
    records = list(dataset.records)
    seen: dict[int, tuple[str, int]] = {}
    positions: dict[str, list[int]] = {part: [] for part in PARTS}
    for row, (image, part, text, group) in rows:
        where = f"{path}, row {row}"
        if image not in by_id:
            raise DataError(f"{where}: {image!r} is no image of {dataset.root or dataset.name}")
        if part not in PARTS:
            raise DataError(f"{where}: {part!r} is not a part; write one of {', '.join(PARTS)}")
        position = by_id[image]
        record = records[position]
        label = parse_label(text, index, dataset.multi_label, where)
        if label is not None and record.label is not None and label != record.label:
            raise DataError(
                f"{where}: {image!r} is {label_text(label, dataset.classes)} here and "
                f"{label_text(record.label, dataset.classes)} in {dataset.root or dataset.name}"
            )
        other_part, other_row = seen.setdefault(position, (part, row))
        if other_part != part:
            raise DataError(f"{where}: {image!r} is in {part} here and in {other_part} in row {other_row}")
        if other_row == row:
            positions[part].append(position)
        records[position] = replace(
            record,
            label=label if record.label is None else record.label,
            group=group or None if record.group is None else record.group,
        )
        if part != "unlabeled" and records[position].label is None:
            raise DataError(f"{where}: {image!r} is in {part} and has no label; give it one or make it unlabeled")
    left_out = len(records) - len(seen)
    remarks = [f"{counted(left_out, 'image', 'are')} in no part of {path.name} and left out"] if left_out else []
    return _assemble(replace(dataset, records=tuple(records)), positions, remarks)


def read_truth(path: Path) -> dict[str, str]:
    """The known label of each unlabeled image, as text, by id."""
    table = read_table(path)
    id_column, label_column = table.require("id"), table.require("label")
    truth: dict[str, tuple[int, str]] = {}
    for row, cells in table.rows:
        image, label = cells[id_column], cells[label_column].strip()
        if not label:
            raise DataError(f"{path}, row {row}: {image!r} has no label; remove the row")
        enter(truth, image, label, path, row)
    return {image: label for image, (_, label) in truth.items()}


# --- drawing --------------------------------------------------------------------------------------------------------


def _own_parts(dataset: Dataset, remarks: list[str]) -> dict[str, list[int]]:
    """Indices by the part that the source gives. If it gives any, images without one are for training."""
    positions: dict[str, list[int]] = {part: [] for part in ("train", *PARTS)}
    unlabeled_held_out = 0
    for position, record in enumerate(dataset.records):
        if record.label is None:
            positions["unlabeled"].append(position)
            unlabeled_held_out += record.part in ("val", "test")
        else:
            positions[record.part or "train"].append(position)
    if unlabeled_held_out:
        remarks.append(f"{unlabeled_held_out} validation or test images have no label and count as unlabeled")
    return positions


def _draw_labeled(
    dataset: Dataset,
    candidates: list[int],
    budget: Budget,
    by: Literal["image", "group"],
    rng: np.random.Generator,
    remarks: list[str],
) -> list[int]:
    records = dataset.records
    if budget.unit == "share of groups":
        if by != "group":
            raise ConfigError(f"labels = '{budget}' needs whole groups; give split_by=group, or a number of images")
        return draw_groups(units_of(records, candidates, "group"), budget.amount, rng)
    targets, total = labeled_targets(dataset, candidates, budget)
    labeled = draw_units(units_of(records, candidates, by), targets, total, keep=0, rng=rng)
    if total is not None and len(labeled) > total and by == "group":
        labeled = draw_units(units_of(records, candidates, "image"), targets, total, keep=0, rng=rng)
        remarks.append("groups are too large for so few labels: some are divided between labeled and unlabeled images")
    if total is not None and len(labeled) > total:
        raise DataError(f"{budget} labels cannot cover every class; ask for at least {len(labeled)}")
    if total is not None and len(labeled) < total:
        remarks.append(f"whole groups gave {len(labeled)} labeled images where {total} were asked for")
    return labeled


# --- what a split must satisfy --------------------------------------------------------------------------------------


def _assemble(
    dataset: Dataset, positions: Mapping[str, Sequence[int]], remarks: Sequence[str], *, by_image: bool = False
) -> Split:
    labeled, unlabeled, val, test = (tuple(dataset.records[place] for place in positions[part]) for part in PARTS)
    without_label = tuple(record if record.label is None else replace(record, label=None) for record in unlabeled)
    truth = {record.id: record.label for record in unlabeled if record.label is not None}
    split = Split(labeled, without_label, val, test, truth, by_image=by_image)
    return replace(split, remarks=(*remarks, *_examine(split, dataset)))


def leave_out(split: Split, unreadable: Sequence[tuple[Record, str]], dataset: Dataset) -> Split:
    """Remove unreadable images, given with the reason of each, from a split; all others stay in their part."""
    gone = {record.id for record, _ in unreadable}
    if not gone:
        return split

    truth = {image: label for image, label in split.truth.items() if image not in gone}
    labeled, unlabeled, val, test = (
        tuple(record for record in members if record.id not in gone) for _, members in split.parts()
    )
    staying = Split(labeled, unlabeled, val, test, truth, by_image=split.by_image)
    before = _examine(split, dataset)
    try:
        if split.val and not val:
            raise DataError("the split has no validation image; repair some, or name others in it")
        after = _examine(staying, dataset)
    except DataError as error:
        record, reason = unreadable[0]
        raise DataError(
            f"{counted(len(gone), 'image')} cannot be read, {record.path or record.id} for one ({reason}), and without "
            f"them: {error}"
        ) from None
    return replace(staying, remarks=(*(remark for remark in split.remarks if remark not in before), *after))


def _examine(split: Split, dataset: Dataset) -> list[str]:
    """Refuse a split that cannot be trained on; return remarks otherwise."""
    remarks = []
    for part, members in split.parts():
        if part == "unlabeled":
            continue
        if not members:
            if part == "val":
                remarks.append("the validation part is empty, so it cannot choose the epoch and has no figures")
                continue
            raise DataError(f"the split has no {TITLES[part]} image; name some in it or give more labeled images")
        absent = sorted(set(range(len(dataset.classes))) - {index for record in members for index in strata_of(record)})
        names = ", ".join(dataset.classes[index] for index in absent)
        if absent and part == "labeled":
            raise DataError(f"no labeled image of {names}; label some, or leave the class out")
        if absent:
            remarks.append(f"the {TITLES[part]} part has no image of {names}")
    return remarks + _announce_groups(split)


def _announce_groups(split: Split) -> list[str]:
    """A remark on groups that are in two parts of a split."""
    training, val, test = map(_groups, (split.labeled + split.unlabeled, split.val, split.test))
    if not (_crossing(training, val, test) or (split.by_image and training | val | test)):
        return []
    shared = " and ".join(
        f"{len(groups & training)} of {len(groups)} {title} groups"
        for title, groups in (("validation", val), ("test", test))
    )
    both = f", {len(val & test)} in validation and test" if val & test else ""
    return [f"split by image although groups are known: {shared} also occur in training{both}"]


def _groups(records: Iterable[Record]) -> set[str]:
    return {record.group for record in records if record.group is not None}


def _crossing(training: set[str], val: set[str], test: set[str]) -> set[str]:
    """Groups that are in two of these lists."""
    return training & val | training & test | val & test


def _keeps_groups(records: Sequence[Record]) -> bool:
    """Whether groups are known, and each is in only one of the source's own parts."""
    training = _groups(record for record in records if record.part not in (None, "val", "test"))
    val, test = (_groups(record for record in records if record.part == part) for part in ("val", "test"))
    return bool(_groups(records)) and not _crossing(training, val, test)


def _require_groups(records: Sequence[Record], positions: Mapping[str, list[int]]) -> None:
    if not _groups(records):
        raise DataError("a split by group needs groups, but no image has one; add a group column or split by image")
    own_parts = (positions["train"] + positions["labeled"], positions["val"], positions["test"])
    crossing = sorted(_crossing(*(_groups(records[position] for position in part) for part in own_parts)))
    if crossing:
        raise DataError(
            f"{counted(len(crossing), 'group', 'are')} in two of the source's own parts, {crossing[0]} for one; "
            f"split by image, or leave the source's parts out"
        )


def _leave_out_held_groups(records: Sequence[Record], positions: dict[str, list[int]], remarks: list[str]) -> None:
    """Leave out other images of validation or test groups, such as unlabeled ones, from training."""
    held = _groups(records[position] for position in positions["val"] + positions["test"])
    left_out = 0
    for part in ("train", "labeled", "unlabeled"):
        staying = [position for position in positions[part] if records[position].group not in held]
        left_out += len(positions[part]) - len(staying)
        positions[part] = staying
    if left_out:
        remarks.append(f"left out: {counted(left_out, 'other image')} of validation or test groups")


def _require_enough(dataset: Dataset, pool: list[int], parts: int) -> None:
    counts = Counter(dataset.records[position].label for position in pool)
    for index, name in enumerate(dataset.classes):
        if 0 < counts[index] < parts:
            raise DataError(
                f"class {name} has {counts[index]} labeled {'image' if counts[index] == 1 else 'images'}, and "
                f"{parts} parts need one each; add images, correct the name, or leave the class out"
            )
