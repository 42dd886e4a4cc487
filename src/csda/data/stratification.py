"""Draw a number of images so that every class has its share: iterative stratification, of images or of whole groups."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from csda.data.records import Dataset, Record
from csda.errors import ConfigError, DataError

_NOTHING = -1
"""Stratum of multi-label images without any label."""


@dataclass(frozen=True, slots=True)
class Budget:
    """A number of images: in total, as a share, per class, or of a share of the groups.

    >>> Budget.parse("10%"), Budget.parse("10% of groups")
    (Budget(amount=0.1, unit='share'), Budget(amount=0.1, unit='share of groups'))
    >>> Budget.parse("20/class"), Budget.parse(300)
    (Budget(amount=20, unit='per class'), Budget(amount=300, unit='images'))
    """

    amount: float
    unit: Literal["images", "share", "share of groups", "per class"]

    @classmethod
    def parse(cls, text: str | int) -> Budget:
        match = re.fullmatch(r"(\d{1,9}(?:\.\d+)?)(%(?:ofgroups)?|/class)?", str(text).replace(" ", ""), re.ASCII)
        number, suffix = match.groups() if match else ("0", None)
        if suffix in ("%", "%ofgroups") and 0 < float(number) <= 100:
            return cls(float(number) / 100, "share" if suffix == "%" else "share of groups")
        if suffix in ("/class", None) and number.isdigit() and int(number) > 0:
            return cls(int(number), "per class" if suffix else "images")
        raise ConfigError(f"`{text}` is not a number of images; write 300, 10% (up to 100%), 20/class or 10% of groups")

    def __str__(self) -> str:
        if self.unit.startswith("share"):
            return f"{self.amount * 100:g}%{self.unit.removeprefix('share')}"
        return f"{self.amount}/class" if self.unit == "per class" else f"{self.amount}"


@dataclass(frozen=True, slots=True)
class Unit:
    """Images that are drawn together, by position: one image, or a whole group."""

    members: list[int]
    counts: Mapping[int, int]
    """Number of its images in each stratum."""


def units_of(records: Sequence[Record], positions: Iterable[int], by: Literal["image", "group"]) -> list[Unit]:
    if by == "image":
        return [Unit([position], dict.fromkeys(strata_of(records[position]), 1)) for position in positions]
    groups: dict[object, list[int]] = defaultdict(list)
    for position in positions:
        # An image without a group is its own unit, named by its index, which cannot equal a group's name.
        groups[records[position].group or position].append(position)
    return [
        Unit(members, Counter(stratum for position in members for stratum in strata_of(records[position])))
        for members in groups.values()
    ]


def strata_of(record: Record) -> tuple[int, ...]:
    if isinstance(record.label, tuple):
        return record.label or (_NOTHING,)
    assert record.label is not None
    return (record.label,)


def _count_strata(units: Iterable[Unit]) -> dict[int, int]:
    total: Counter[int] = Counter()
    for unit in units:
        total.update(unit.counts)
    return dict(sorted(total.items()))


def held_out_targets(
    dataset: Dataset, units: list[Unit], budget: Budget, whole: int, keep: int
) -> tuple[dict[int, int], int | None]:
    """The number of images of each stratum for a validation or test part, and the total.

    A share refers to the `whole`. `keep` is the number of later parts that also need each stratum.
    """
    available = _count_strata(units)
    limits = {stratum: count - _kept(count, keep) for stratum, count in available.items()}
    if budget.unit == "per class":
        return _per_class_targets(dataset, limits, budget)
    if budget.unit == "share of groups":
        raise ConfigError(f"'{budget}' is only for labels; give a number or a share of the images")
    wanted = round(budget.amount * whole) if budget.unit == "share" else int(budget.amount)
    wanted = max(wanted, sum(limit > 0 for limit in limits.values()))
    images = sum(len(unit.members) for unit in units)
    if wanted + keep > images or wanted > sum(limits.values()):
        raise DataError(f"{wanted} images cannot be held out of {images} labeled ones; ask for fewer, or label more")
    return _proportional_targets(dataset, available, limits, wanted, images), wanted


def labeled_targets(dataset: Dataset, candidates: list[int], budget: Budget) -> tuple[dict[int, int], int | None]:
    available = _count_strata(units_of(dataset.records, candidates, "image"))
    if budget.unit == "per class":
        return _per_class_targets(dataset, available, budget)
    images = len(candidates)
    wanted = round(budget.amount * images) if budget.unit == "share" else int(budget.amount)
    if wanted > images:
        raise DataError(f"{wanted} labels asked for and only {images} training images have one; ask for fewer")
    if wanted < len(dataset.classes) and not dataset.multi_label:
        raise DataError(
            f"{wanted} labels of {images} cannot cover {len(dataset.classes)} classes; "
            f"ask for at least {len(dataset.classes)}"
        )
    return _proportional_targets(dataset, available, available, wanted, images), wanted


def _kept(count: int, keep: int) -> int:
    """The number of `count` images to keep for `keep` later parts, first of all one for the labeled part."""
    return min(keep, max(1, count - 1))


def _per_class_targets(
    dataset: Dataset, limits: Mapping[int, int], budget: Budget
) -> tuple[dict[int, int], int | None]:
    """Exactly `wanted` images of each class; in a multi-label set at least that many positives of each label."""
    scarcest = min(limits.keys() - {_NOTHING}, key=lambda stratum: limits[stratum], default=None)
    if scarcest is not None and limits[scarcest] < budget.amount:
        raise DataError(
            f"{budget} images asked for, but class {dataset.classes[scarcest]} has {limits[scarcest]} to give; "
            f"ask for fewer"
        )
    targets = {stratum: min(int(budget.amount), limit) for stratum, limit in limits.items()}
    return targets, None if dataset.multi_label else sum(targets.values())


def _proportional_targets(
    dataset: Dataset, available: Mapping[int, int], limits: Mapping[int, int], wanted: int, images: int
) -> dict[int, int]:
    """`wanted` images in the proportions of `available`, at least one of each stratum and at most its limit."""
    ideal = {stratum: wanted * count / images for stratum, count in available.items()}
    targets = {stratum: min(max(round(ideal[stratum]), 1), limits[stratum]) for stratum in available}
    if dataset.multi_label:
        return targets
    while (missing := wanted - sum(targets.values())) > 0:
        growing = [stratum for stratum in targets if targets[stratum] < limits[stratum]]
        for stratum in sorted(growing, key=lambda stratum: targets[stratum] - ideal[stratum])[:missing]:
            targets[stratum] += 1
    while (surplus := sum(targets.values()) - wanted) > 0:
        shrinking = [stratum for stratum in targets if targets[stratum] > 1]
        for stratum in sorted(shrinking, key=lambda stratum: ideal[stratum] - targets[stratum])[:surplus]:
            targets[stratum] -= 1
    return targets


def draw_units(
    units: list[Unit], targets: Mapping[int, int], total: int | None, *, keep: int, rng: np.random.Generator
) -> list[int]:
    """Draw units until every stratum has its target: iterative stratification, the rarest stratum first.

    `keep` is the number of later parts that also need every stratum. Every stratum gets one unit before any gets more.
    If no unit fits, the smallest is taken, so whole groups may exceed `total`. If the targets are met with less than
    `total`, the rest is drawn at random.
    """
    carriers = _carriers(units, rng.permutation(len(units)).tolist())
    spare = {stratum: len(numbers) - _kept(len(numbers), keep) for stratum, numbers in carriers.items()}
    need = dict(targets)
    left = sum(len(unit.members) for unit in units) if total is None else total
    taken = [False] * len(units)

    def is_free(number: int) -> bool:
        return not taken[number] and all(spare[stratum] > 0 for stratum in units[number].counts)

    def fits(number: int, stratum: int) -> bool:
        return units[number].counts[stratum] <= need[stratum] and len(units[number].members) <= left

    def take(number: int) -> None:
        nonlocal left
        taken[number] = True
        left -= len(units[number].members)
        for stratum, count in units[number].counts.items():
            need[stratum] -= count
            spare[stratum] -= 1

    rarest_first = sorted(carriers, key=lambda stratum: (len(carriers[stratum]), stratum))
    for stratum in rarest_first:
        if need[stratum] == targets[stratum] > 0:
            number = next((n for n in carriers[stratum] if fits(n, stratum) and is_free(n)), None)
            if number is None:
                free = (n for n in carriers[stratum] if is_free(n))
                number = min(free, key=lambda n: len(units[n].members), default=None)
            if number is not None:
                take(number)
    for stratum in rarest_first:
        for number in carriers[stratum]:
            if need[stratum] <= 0 or left <= 0:
                break
            if fits(number, stratum) and is_free(number):
                take(number)
    if total is not None:
        for number in rng.permutation(len(units)).tolist():
            if left <= 0:
                break
            if len(units[number].members) <= left and is_free(number):
                take(number)
    return [position for number, unit in enumerate(units) if taken[number] for position in unit.members]


def _carriers(units: Sequence[Unit], order: Iterable[int]) -> dict[int, list[int]]:
    """The units with images of each stratum, by number, in the given order."""
    carriers: dict[int, list[int]] = defaultdict(list)
    for number in order:
        for stratum in units[number].counts:
            carriers[stratum].append(number)
    return carriers


def draw_groups(units: list[Unit], share: float, rng: np.random.Generator) -> list[int]:
    """A share of the units at random, after one of each stratum, the rarest first."""
    wanted = round(share * len(units))
    order = rng.permutation(len(units)).tolist()
    taken: dict[int, None] = {}
    for numbers in sorted(_carriers(units, order).values(), key=len):
        if taken.keys().isdisjoint(numbers):
            taken[numbers[0]] = None
    if len(taken) > wanted:
        raise DataError(f"{wanted} groups cannot cover every class; ask for at least {len(taken)} of {len(units)}")
    taken |= dict.fromkeys(order)
    return [position for number in list(taken)[:wanted] for position in units[number].members]
