"""The tables of a grid follow from its lines."""

from __future__ import annotations

from typing import Any

import pytest

from csda.research import summary
from csda.research.experiments import Experiment

FIGURES = ("auc", "mca", "auc_last20", "mca_last20", "mca_prior", "val_auc_last20", "val_mca_last20")


def _page(experiment: Experiment, results: list[dict[str, Any]]) -> str:
    results = [line | {"commit": "0123456789"} for line in results]
    lines, gaps = summary.summarize(experiment, results), summary.compare_rows(experiment, results)
    about = {"command": "csda reproduce grid", "runs": len(results), "date": "2026-01-05"}
    about |= {"commit": ["0123456789"], "machine": ["two cores"], "torch": ["2.13.0"], "settings": {}}
    return summary.format_page(experiment, results, lines, gaps, about, [])


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
    gaps = summary.compare(results, "b", "a", {"random": ["9"]})
    assert gaps is not None
    assert gaps["seeds"] == 2
    assert [gaps[key] for key in ("auc_gap", "auc_low", "auc_high")] == pytest.approx([0.15, 0.1, 0.2])
    assert gaps["mca_gap"] == pytest.approx(0.075)
    both = summary.compare(results, "b", "a", {"random": ["9", "30"]})
    assert both is not None
    assert [both[key] for key in ("auc_gap", "auc_low", "auc_high")] == pytest.approx([0.2, 0.15, 0.25])
    single = summary.compare(results[:1] + results[4:], "b", "a", {"random": ["9"]})
    assert single is not None
    assert (single["seeds"], single["auc_low"]) == (1, None)
    assert summary.compare(results, "b", "c", {"random": ["9"]}) is None


def test_over_several_splits_each_counts_as_the_mean_of_its_seeds() -> None:
    aucs = {("one", 0): (0.5, 0.6), ("one", 1): (0.5, 0.8), ("two", 0): (0.4, 0.8), ("two", 1): (0.4, None)}
    results = [
        {"method": name, "labels": "9", "split": split, "seed": seed, "auc": auc, "mca": auc}
        for (split, seed), pair in aucs.items()
        for name, auc in zip("ab", pair, strict=True)
        if auc is not None
    ]
    gaps = summary.compare(results, "b", "a", {"one": ["9"], "two": ["9"]})
    assert gaps is not None
    assert gaps["seeds"] == 2
    assert [gaps[f"auc_{part}"] for part in ("gap", "low", "high")] == pytest.approx([0.3, 0.2, 0.4])
    assert summary.compare(results, "b", "a", {"one": ["9"], "three": ["9"]}) is None


def test_a_grid_of_several_splits_has_their_mean() -> None:
    rows = [{"method": "baseline"}, {"method": "csda"}]
    grid = {"title": "Two splits", "labels": ["9"], "seeds": [0], "rows": rows, "splits": {"one": {}, "two": {}}}
    experiment = Experiment(**grid)
    results = [
        {"method": name, "labels": "9", "split": split, "seed": 0} | dict.fromkeys(FIGURES, value)
        for name, split, value in (
            ("baseline", "one", 0.5),
            ("baseline", "two", 0.4),
            ("csda", "one", 0.52),
            ("csda", "two", 0.46),
        )
    ]
    page = _page(experiment, results)
    assert "## Mean over splits" in page
    assert "| csda | 9 | 2 | +4.0 [+2.0, +6.0] |" in page
    assert "Mean over splits" not in _page(Experiment(**grid | {"splits": {"one": {}}}), results)


def test_rows_with_class_specific_alignment_are_compared_with_all_others() -> None:
    values = {"baseline": 0.5, "csda-folds": 0.56, "not aligned": 0.53}
    rows = [{"method": "baseline"}, {"method": "csda-folds"}, {"method": "csda-folds", "title": "not aligned"}]
    results = [
        {"method": name, "labels": "9", "split": "one", "seed": 0} | dict.fromkeys(FIGURES, value)
        for name, value in values.items()
    ]
    page = _page(Experiment(title="Folds", labels=["9"], seeds=[0], rows=rows, splits={"one": {}}), results)
    own, _, _ = page.partition("## csda-folds against the others")[2].partition("\n## ")
    assert "| not aligned | 9 | one | 1 | +3.0 | +3.0 |" in own
    assert "| baseline |" not in own  # which is the table's own difference
    assert "## csda against" not in page


def test_where_images_have_several_labels_each_has_its_auc() -> None:
    grid = {
        "title": "Chests",
        "labels": ["9", "30"],
        "seeds": [0, 1],
        "rows": [{"method": "baseline"}],
        "splits": {"one": {}},
    }
    place = {"method": "baseline", "labels": "9", "split": "one"} | dict.fromkeys(FIGURES, 0.5)
    results = [
        place | {"seed": seed, "multi_label": 1, "recall_edema": 0.0, "class_auc_edema": auc}
        for seed, auc in enumerate((0.6, 0.7))
    ]
    page = _page(Experiment(**grid), results)
    assert "## AUC of each label, 9 labeled, split one" in page
    assert "| edema | 0.6500 |" in page
    assert "30 labeled" not in page
    for line in results:
        del line["multi_label"]
    assert "edema" not in _page(Experiment(**grid), results)


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
    gaps = summary.compare(results, "b", "a", {"random": ["9"]})
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
