"""Splits: sizes, strata, groups, what a source prescribes, and the way to disk and back."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csda.data.records import Dataset, Label, Record, Split
from csda.data.splits import (
    Begun,
    label_text,
    leave_out,
    list_split,
    make_split,
    move_to_labeled,
    read_rows,
    read_split,
    read_truth,
    restore_split,
)
from csda.data.stratification import Budget
from csda.errors import ConfigError, DataError
from csda.files import write_csv

COLUMNS = ("id", "split", "label", "group")

Outcome = TypeVar("Outcome")


def single(counts: list[int], groups: int = 0, unlabeled: int = 0, seed: int = 0) -> Dataset:
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(len(counts)), counts)
    records = [
        Record(f"image {i}", None, int(label), f"g{rng.integers(groups)}" if groups else None)
        for i, label in enumerate(rng.permutation(labels))
    ]
    records += [
        Record(f"unknown {i}", None, None, f"g{rng.integers(groups)}" if groups else None) for i in range(unlabeled)
    ]
    return Dataset("made", tuple("abcdefghij"[: len(counts)]), tuple(records))


def multi(images: int, shares: list[float], seed: int = 0) -> Dataset:
    rng = np.random.default_rng(seed)
    present = rng.random((images, len(shares))) < shares
    present[: 3 * len(shares)] |= np.tile(np.eye(len(shares), dtype=bool), (3, 1))
    records = tuple(
        Record(f"{i}", None, tuple(np.flatnonzero(row).tolist()), f"p{i // 3}") for i, row in enumerate(present)
    )
    return Dataset("made", tuple("abcdefghijklmn"[: len(shares)]), records, multi_label=True)


def with_parts(dataset: Dataset, parts: dict[str, int]) -> Dataset:
    names = [part for part, count in parts.items() for _ in range(count)]
    records = tuple(replace(record, part=part) for record, part in zip(dataset.records, names, strict=True))
    return replace(dataset, records=records)


def sizes(split: Split) -> dict[str, int]:
    return {part: len(records) for part, records in split.parts()}


def counts(records: tuple[Record, ...]) -> dict[object, int]:
    return dict(
        sorted(Counter(i for r in records for i in (r.label if isinstance(r.label, tuple) else (r.label,))).items())
    )


def attempt(function: Callable[[], Outcome]) -> Outcome | DataError:
    """What came of it; anything but a `DataError` passes through and fails the test."""
    try:
        return function()
    except DataError as error:
        return error


# --- budgets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [("300", 300, "images"), (300, 300, "images"), ("10%", 0.1, "share"), ("0.5 %", 0.005, "share"),
     ("20/class", 20, "per class"), ("100%", 1, "share"), ("5 % of groups", 0.05, "share of groups")],
)  # fmt: skip
def test_budget_is_parsed(text: str | int, amount: float, unit: str) -> None:
    budget = Budget.parse(text)
    assert (budget.amount, budget.unit) == (amount, unit)
    assert Budget.parse(str(budget)) == budget


@pytest.mark.parametrize(
    "text",
    ["", "0", "-3", "0%", "101%", "3.5", "2.5/class", "0/class", "ten", "nan", "1e3", "9 of groups", "٣", "9" * 5000],
)
def test_budget_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="20/class"):
        Budget.parse(text)


@given(st.text() | st.integers())
def test_budget_parses_or_refuses(text: str | int) -> None:
    with suppress(ConfigError):
        assert Budget.parse(text).amount > 0


# --- drawing by image -----------------------------------------------------------------------------------------------


def test_own_folder_has_a_fifth_for_the_test_and_a_tenth_for_validation() -> None:
    split = make_split(single([100, 60, 40]), "10%")
    assert sizes(split) == {"labeled": 14, "unlabeled": 126, "val": 20, "test": 40}
    assert counts(split.test) == {0: 20, 1: 12, 2: 8}
    assert counts(split.val) == {0: 10, 1: 6, 2: 4}
    assert counts(split.labeled) == {0: 7, 1: 4, 2: 3}


def test_paper_rule_by_class() -> None:
    dataset = replace(single([1113, 6705, 514, 327, 1099, 115, 142]), held_out=("50/class", "10/class"))
    split = make_split(dataset, 175)
    assert set(counts(split.test).values()) == {50}
    assert set(counts(split.val).values()) == {10}
    assert sizes(split)["labeled"] == 175
    assert counts(split.labeled)[5] == 1, "one shot of the rarest class"


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(3, 60), min_size=2, max_size=6),
    st.sampled_from(["10%", "33%", "100%", "1/class", None, 12]),
    st.integers(0, 20),
    st.integers(0, 3),
)
def test_every_part_has_every_class_and_no_image_twice(
    sizes_of: list[int], labels: str | int | None, unlabeled: int, seed: int
) -> None:
    dataset = single(sizes_of, unlabeled=unlabeled, seed=seed)
    split = attempt(lambda: make_split(dataset, labels, seed=seed))
    if isinstance(split, DataError):
        assert "ask for" in str(split)
        return
    every_class = set(range(len(sizes_of)))
    for part in (split.labeled, split.val, split.test):
        assert {record.label for record in part} == every_class
    ids = [record.id for _, records in split.parts() for record in records]
    assert sorted(ids) == sorted(record.id for record in dataset.records)
    known = {record.id: record.label for record in dataset.records}
    assert all(record.label is None for record in split.unlabeled)
    assert split.truth == {r.id: known[r.id] for r in split.unlabeled if known[r.id] is not None}
    if labels is None:
        assert not split.truth
    assert make_split(dataset, labels, seed=seed) == split


def test_seed_changes_the_split_and_labels_do_not_change_the_test() -> None:
    dataset = single([100, 60, 40])
    assert make_split(dataset, 20, seed=1) != make_split(dataset, 20, seed=2)
    assert make_split(dataset, 20, seed=1).test == make_split(dataset, 50, seed=1).test
    assert make_split(dataset, 20, seed=1).val == make_split(dataset, "3/class", seed=1).val


@pytest.mark.parametrize(
    ("labels", "message"),
    [(1000, "1000 labels asked for and only 140"), (2, "cannot cover 3 classes"), ("60/class", "class c has 28"),
     ("1%", "cannot cover 3 classes")],
)  # fmt: skip
def test_impossible_budgets_are_refused(labels: str | int, message: str) -> None:
    with pytest.raises(DataError, match=message):
        make_split(single([100, 60, 40]), labels)


@pytest.mark.parametrize("test", [8, 10, 500, "100%", "2/class"])
def test_held_out_part_that_leaves_nothing_is_refused(test: str | int) -> None:
    with pytest.raises(DataError, match="ask for fewer"):
        make_split(single([3, 3, 3]), test=test)


def test_class_too_small_to_split_is_named() -> None:
    with pytest.raises(DataError, match="class b has 1 labeled image, and 3 parts need one each"):
        make_split(single([30, 1]))


def test_class_that_nobody_has_is_named() -> None:
    dataset = replace(single([30, 20]), classes=("a", "b", "vanished"))
    with pytest.raises(DataError, match="no labeled image of vanished"):
        make_split(dataset)


# --- parts that the source gives ------------------------------------------------------------------------------------


def test_source_parts_are_kept() -> None:
    dataset = with_parts(single([60, 40]), {"train": 70, "val": 10, "test": 20})
    split = make_split(dataset, 14)
    assert sizes(split) == {"labeled": 14, "unlabeled": 56, "val": 10, "test": 20}
    assert split.test == dataset.records[80:]
    assert not split.remarks


def test_missing_validation_part_is_drawn_from_training() -> None:
    split = make_split(with_parts(single([60, 40]), {"train": 80, "test": 20}))
    assert sizes(split) == {"labeled": 72, "unlabeled": 0, "val": 8, "test": 20}
    assert split.remarks == ("the source has no validation part: 8 of its training images were drawn for it",)


def test_labeled_and_unlabeled_are_taken_as_they_are() -> None:
    dataset = with_parts(single([60, 40]), {"labeled": 30, "unlabeled": 40, "val": 10, "test": 20})
    split = make_split(dataset)
    assert split.labeled == dataset.records[:30]
    assert [record.id for record in split.unlabeled] == [record.id for record in dataset.records[30:70]]
    assert len(split.truth) == 40
    assert sizes(make_split(dataset, 10))["labeled"] == 10
    with pytest.raises(DataError, match="31 labels asked for and only 30"):
        make_split(dataset, 31)
    assert make_split(replace(dataset, listed=True), 31) == split, "a list is not drawn from again"


def test_image_without_label_is_unlabeled_whatever_its_part() -> None:
    dataset = with_parts(single([20, 20], unlabeled=4), {"train": 30, "val": 5, "test": 9})
    split = make_split(dataset)
    assert [record.id for record in split.unlabeled] == [f"unknown {i}" for i in range(4)]
    assert split.truth == {}
    assert "4 validation or test images have no label and count as unlabeled" in split.remarks


# --- groups ---------------------------------------------------------------------------------------------------------


def test_crossing_groups_are_counted() -> None:
    records = [Record(str(i), None, i % 2, group, part) for i, (group, part) in enumerate(
        [("p1", "train"), ("p2", "train"), ("p3", "val"), ("p3", "val"), ("p1", "test"), ("p4", "test"), ("p4", "test")]
    )]  # fmt: skip
    dataset = Dataset("made", ("a", "b"), tuple(records))
    assert make_split(dataset).remarks == (
        "split by image although groups are known: 0 of 1 validation groups and 1 of 2 test groups also occur in "
        "training",
    )
    with pytest.raises(DataError, match="1 group is in two of the source's own parts, p1 for one"):
        make_split(dataset, by="group")


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 60), min_size=2, max_size=5),
    st.integers(2, 80),
    st.sampled_from(["20%", "1/class", None, 15]),
    st.integers(0, 15),
    st.integers(0, 3),
)
def test_no_group_crosses(
    sizes_of: list[int], groups: int, labels: str | int | None, unlabeled: int, seed: int
) -> None:
    dataset = single(sizes_of, groups, unlabeled, seed)
    split = attempt(lambda: make_split(dataset, labels, by="group", seed=seed))
    if isinstance(split, DataError):
        assert any(way in str(split) for way in ("ask for", "give more labeled images", "label some"))
        return
    training, val, test = (
        {record.group for record in part} for part in (split.labeled + split.unlabeled, split.val, split.test)
    )
    assert not training & val
    assert not training & test
    assert not val & test
    if labels is not None and not unlabeled and not any("divided" in remark for remark in split.remarks):
        assert not {r.group for r in split.labeled} & {r.group for r in split.unlabeled}


def test_group_split_has_the_sizes_asked_for() -> None:
    split = make_split(single([400, 300, 100], groups=500), 100, by="group")
    assert sizes(split) == {"labeled": 100, "unlabeled": 460, "val": 80, "test": 160}
    assert counts(split.test) == {0: 80, 1: 60, 2: 20}
    assert split.remarks == ()


def test_groups_too_large_for_the_budget_are_divided_and_said() -> None:
    split = make_split(single([200, 200], groups=8), 10, by="group")
    assert sizes(split)["labeled"] == 10
    assert any("groups are too large for so few labels" in remark for remark in split.remarks)


@pytest.mark.parametrize("several", [False, True])
def test_a_share_of_the_groups_is_labeled_whole(several: bool) -> None:
    dataset = multi(900, [0.3, 0.1, 0.02]) if several else single([500, 300, 12], groups=200)
    splits = [make_split(dataset, "10% of groups", by="group", seed=seed) for seed in range(3)]
    assert len({split.labeled for split in splits}) == 3
    for split in splits:
        labeled, unlabeled = ({record.group for record in part} for part in (split.labeled, split.unlabeled))
        assert not labeled & unlabeled
        assert len(labeled) == round(0.1 * len(labeled | unlabeled))
        positives = [record.label if several else (record.label,) for record in split.labeled]
        assert {index for label in positives for index in label} == {0, 1, 2}  # type: ignore[union-attr]


def test_a_share_of_the_groups_that_cannot_be_labeled_is_refused() -> None:
    dataset = single([60, 30, 3], groups=1000)
    with pytest.raises(ConfigError, match="split_by=group"):
        make_split(dataset, "10% of groups", by="image")
    with pytest.raises(DataError, match="cannot cover every class"):
        make_split(dataset, "2% of groups", by="group")
    with pytest.raises(ConfigError, match="is only for labels"):
        make_split(dataset, by="group", test="10% of groups")


def groups_of(split: Split) -> list[set[str | None]]:
    return [
        {record.group for record in members} for members in (split.labeled + split.unlabeled, split.val, split.test)
    ]


def test_groups_stay_together_unless_images_are_asked_for() -> None:
    dataset = single([60, 60], groups=30)
    split = make_split(dataset, 20)
    assert split == make_split(dataset, 20, by="group")
    training, val, test = groups_of(split)
    assert not training & val | training & test | val & test
    by_image = make_split(dataset, 20, by="image")
    training, val, test = groups_of(by_image)
    assert by_image.remarks == (
        f"split by image although groups are known: {len(val & training)} of {len(val)} validation groups and "
        f"{len(test & training)} of {len(test)} test groups also occur in training, {len(val & test)} in validation "
        f"and test",
    )
    without = replace(dataset, records=tuple(replace(record, group=None) for record in dataset.records))
    assert make_split(without, 20) == make_split(without, 20, by="image")
    assert make_split(without, 20).remarks == ()


@pytest.mark.parametrize("crossing", ["train", "labeled", "unlabeled", "val"])
def test_parts_of_the_source_that_cut_through_groups_are_kept_and_announced(crossing: str) -> None:
    parts = ["train"] * 4 + ["labeled"] * 4 + ["unlabeled"] * 4 + ["val"] * 4 + ["test"] * 4
    records = [Record(str(i), None, i % 2, f"{part} {i}", part) for i, part in enumerate(parts)]  # type: ignore[arg-type]
    dataset = Dataset("made", ("a", "b"), tuple(records))
    assert make_split(dataset) == make_split(dataset, by="group")
    records[-1] = replace(records[-1], group=records[parts.index(crossing)].group)
    split = make_split(replace(dataset, records=tuple(records)))
    assert sizes(split) == {"labeled": 8, "unlabeled": 4, "val": 4, "test": 4}
    shared = "0 of 4 test groups" if crossing == "val" else "1 of 4 test groups"
    both = ", 1 in validation and test" if crossing == "val" else ""
    assert split.remarks == (
        f"split by image although groups are known: 0 of 4 validation groups and {shared} also occur in training{both}",
    )


def test_a_split_by_image_is_announced_where_no_group_crosses_too() -> None:
    dataset = single([60, 60])
    alone = replace(dataset, records=tuple(replace(record, group=record.id) for record in dataset.records))
    known = "split by image although groups are known"
    remark = f"{known}: 0 of 12 validation groups and 0 of 24 test groups also occur in training"
    split = make_split(alone, 20, by="image")
    assert split.remarks == (remark,)
    left = leave_out(split, [(split.val[0], "is empty")], alone)
    assert left.remarks == (remark.replace("of 12", "of 11"),)
    assert make_split(alone, 20).remarks == ()


def test_groups_that_cannot_be_divided_name_the_way_out() -> None:
    dataset = single([20, 20], groups=1)
    with pytest.raises(DataError, match="groups are kept together here, and split_by=image divides them"):
        make_split(dataset)
    assert sizes(make_split(dataset, by="image")) == {"labeled": 28, "unlabeled": 0, "val": 4, "test": 8}


def test_group_split_needs_groups() -> None:
    with pytest.raises(DataError, match="no image has one"):
        make_split(single([20, 20]), by="group")


# --- several labels -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["image", "group"])
def test_every_label_is_in_every_part_in_proportion(by: str) -> None:
    shares = [0.3, 0.2, 0.1, 0.05, 0.01, 0.003]
    dataset = multi(3000, shares)
    split = make_split(dataset, "10%", by=by)  # type: ignore[arg-type]
    whole = counts(dataset.records)
    for part, share in ((split.labeled, 0.07), (split.val, 0.1), (split.test, 0.2)):
        for label, count in counts(part).items():
            assert abs(count - share * whole[label]) <= max(3, 0.25 * share * whole[label])
        assert counts(part).keys() == set(range(len(shares)))
    assert sizes(split) == {"labeled": 210, "unlabeled": 1890, "val": 300, "test": 600}
    empty = sum(record.label == () for record in dataset.records) / len(dataset.records)
    assert sum(record.label == () for record in split.test) / 600 == pytest.approx(empty, abs=0.05)


def test_label_on_three_images_is_in_three_parts() -> None:
    for seed in range(20):
        split = make_split(multi(200, [0.3, 0.3, 0.0], seed), "20%", seed=seed)
        assert [counts(part)[2] for part in (split.labeled, split.val, split.test)] == [1, 1, 1]


def test_label_on_one_image_is_labeled_and_missed_aloud() -> None:
    dataset = multi(100, [0.3, 0.3])
    records = (replace(dataset.records[0], label=(0, 2)), *dataset.records[1:])
    split = make_split(replace(dataset, records=records, classes=("a", "b", "c")), "20%", by="image")
    assert counts(split.labeled)[2] == 1
    assert split.remarks[:2] == ("the validation part has no image of c", "the test part has no image of c")


def test_per_class_budget_counts_positives() -> None:
    split = make_split(multi(1000, [0.3, 0.1, 0.05]), "20/class")
    assert min(counts(split.labeled).values()) >= 20


def test_budget_that_cannot_cover_the_labels() -> None:
    with pytest.raises(DataError, match="ask for at least"):
        make_split(multi(300, [0.0] * 10), 4)


# --- on disk --------------------------------------------------------------------------------------------------------

names = st.text(st.characters(blacklist_categories=["Cs", "Cc"]), min_size=1, max_size=12).filter(str.strip)


@settings(deadline=None, max_examples=60)
@given(st.lists(names, min_size=30, max_size=30, unique=True), st.booleans(), st.integers(0, 5))
def test_split_and_truth_come_back(ids: list[str], several: bool, seed: int) -> None:
    dataset = multi(30, [0.5, 0.4, 0.2], seed) if several else single([12, 10, 8], groups=9, seed=seed)
    classes = ("with, comma", 'with "quotes"', "Ünïcödé")
    records = tuple(
        replace(r, id=name, group=f" {r.group}".strip()) for r, name in zip(dataset.records, ids, strict=True)
    )
    dataset = replace(dataset, classes=classes, records=records)
    split = make_split(dataset, 6, by="image", seed=seed)
    with TemporaryDirectory() as folder:
        write_csv(Path(folder) / "split.csv", COLUMNS, list_split(split, classes))
        truth = [(image, label_text(label, classes)) for image, label in split.truth.items()]
        write_csv(Path(folder) / "truth.csv", ("id", "label"), truth)
        assert read_split(Path(folder) / "split.csv", dataset) == split
        assert read_truth(Path(folder) / "truth.csv") == dict(truth)
        rows = [row for _, row in read_rows(Path(folder) / "split.csv")]
        assert rows == list(list_split(split, classes))
        blind = replace(dataset, records=tuple(replace(record, label=None) for record in records))
        assert restore_split(Begun(Path(folder) / "split.csv", rows, dict(truth)), blind) == split
        with (Path(folder) / "split.csv").open(newline="", encoding="utf-8") as file:
            lines = list(csv.DictReader(file))
    assert all((line["label"] == "") == (line["split"] == "unlabeled") for line in lines)


def test_upper_bound_comes_back_in_its_own_order(tmp_path: Path) -> None:
    dataset = single([20, 20])
    split = make_split(dataset, 6)
    whole = move_to_labeled(split, split.truth)
    assert sizes(whole) == {"labeled": 28, "unlabeled": 0, "val": 4, "test": 8}
    assert whole.truth == {}
    known = {record.id: record.label for record in dataset.records}
    assert all(record.label == known[record.id] for record in whole.labeled)
    write_csv(tmp_path / "split.csv", COLUMNS, list_split(whole, dataset.classes))
    assert read_split(tmp_path / "split.csv", dataset) == whole


def test_upper_bound_needs_the_truth() -> None:
    split = make_split(single([20, 20], unlabeled=5))
    with pytest.raises(DataError, match="but none is known"):
        move_to_labeled(split, split.truth)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("id,label\n", "no column `split`"),
        ("id,split\nnobody,val\n", "row 2: 'nobody' is no image of made"),
        ("id,split\nimage 0,train\n", "row 2: 'train' is not a part; write one of labeled"),
        ("id,split,label\nimage 0,val,zebra\n", "row 2: no class is called 'zebra'; the classes are a, b"),
        ("id,split\nimage 0,val\n\nimage 0,test\n", "row 4: 'image 0' is in test here and in val in row 2"),
        ("id,split\nunknown 0,val\n", "row 2: 'unknown 0' is in val and has no label"),
        ("id,split\nimage 0,val\n", "no labeled image"),
        ("", "split.csv is empty"),
    ],
)
def test_bad_split_is_refused_with_its_row(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "split.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        read_split(tmp_path / "split.csv", single([3, 3], unlabeled=1))


def test_label_that_contradicts_the_set_is_refused(tmp_path: Path) -> None:
    dataset = single([3, 3])
    wrong = "ab"[1 - int(dataset.records[0].label == 1)]
    (tmp_path / "split.csv").write_text(f"id,split,label\nimage 0,val,{wrong}\n")
    with pytest.raises(DataError, match=f"row 2: 'image 0' is {wrong} here and"):
        read_split(tmp_path / "split.csv", dataset)


def test_split_of_a_person_names_some_images_and_labels_others(tmp_path: Path) -> None:
    dataset = single([4, 4], unlabeled=2)
    of: dict[Label | None, list[str]] = {0: [], 1: [], None: []}
    for record in dataset.records:
        of[record.label].append(record.id)
    rows = [(of[0][0], "labeled", ""), ("unknown 0", "labeled", "b"), (of[0][1], "val", "a"), (of[1][0], "test", "b"),
            (of[1][1], "unlabeled", "")]  # fmt: skip
    (tmp_path / "split.csv").write_text("id;split;label\n" + "".join(";".join(row) + "\n" for row in rows))
    split = read_split(tmp_path / "split.csv", dataset)
    assert [record.label for record in split.labeled] == [0, 1]
    assert split.truth == {of[1][1]: 1}
    assert "5 images are in no part of split.csv and left out" in split.remarks


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=80) | st.text(max_size=80).map(lambda text: f"id,split,label\n{text}".encode()))
def test_any_bytes_are_a_split_or_a_data_error(raw: bytes) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "split.csv"
        path.write_bytes(raw)
        for outcome in (
            attempt(lambda: read_split(path, single([3, 3]))),
            attempt(lambda: read_truth(path)),
        ):
            assert not isinstance(outcome, DataError) or "split" in str(outcome)
