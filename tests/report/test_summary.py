"""The tables of a grid follow from its lines."""

from __future__ import annotations

import pytest

from csda.report import summary


def test_paired_differences_are_taken_seed_by_seed() -> None:
    results = [
        {"method": name, "labels": labels, "split": "random", "seed": seed, "auc": auc, "mca": auc / 2}
        for name, labels, aucs in (
            ("a", "9", (0.5, 0.7)),
            ("a", "30", (0.5, 0.7)),
            ("b", "9", (0.6, 0.9)),
            ("b", "30", (0.7, 1.0)),
        )
        for seed, auc in enumerate(aucs)
    ]
    gaps = summary.compare(results, "b", "a", ["9"], "random")
    assert gaps is not None
    assert gaps["seeds"] == 2
    assert [gaps[key] for key in ("auc_gap", "auc_low", "auc_high")] == pytest.approx([0.15, 0.1, 0.2])
    assert gaps["mca_gap"] == pytest.approx(0.075)
    both = summary.compare(results, "b", "a", ["9", "30"], "random")
    assert both is not None
    assert [both[key] for key in ("auc_gap", "auc_low", "auc_high")] == pytest.approx([0.2, 0.15, 0.25])
    single = summary.compare(results[:1] + results[4:], "b", "a", ["9"], "random")
    assert single is not None
    assert (single["seeds"], single["auc_low"]) == (1, None)
    assert summary.compare(results, "b", "c", ["9"], "random") is None


def test_differences_on_validation_stand_beside_those_on_test() -> None:
    place = {"labels": "9", "split": "random"}
    results = [
        place | {"method": name, "seed": seed, "auc": 0.5, "mca": 0.5, "val_auc_last20": value, "val_mca_last20": other}
        for name, seed, value, other in (
            ("a", 0, 0.5, 0.3),
            ("a", 1, 0.6, None),
            ("b", 0, 0.7, 0.3),
            ("b", 1, 0.7, 0.4),
        )
    ]
    gaps = summary.compare(results, "b", "a", ["9"], "random")
    assert gaps is not None
    assert [gaps[f"val_auc_{part}"] for part in ("gap", "low", "high")] == pytest.approx([0.15, 0.1, 0.2])
    assert "val_mca_gap" not in gaps
    assert summary._points(gaps, ("val_auc", "val_mca")) == ["+15.0 [+10.0, +20.0]", ""]


def test_a_difference_is_in_bold_where_the_interval_of_enough_seeds_leaves_zero_out() -> None:
    def points(seeds: int, low: float | None, high: float | None) -> str:
        gap = {"seeds": seeds, "auc_gap": 0.02, "auc_low": low, "auc_high": high}
        return summary._points(gap | {"mca_gap": 0.0, "mca_low": None, "mca_high": None})[0]

    assert points(5, 0.01, 0.03) == "**+2.0** [+1.0, +3.0]"
    assert points(5, -0.01, 0.03) == "+2.0 [-1.0, +3.0]"
    assert points(4, 0.01, 0.03) == "+2.0 [+1.0, +3.0]"
    assert points(1, None, None) == "+2.0"
