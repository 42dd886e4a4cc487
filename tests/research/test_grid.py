"""Pictures of a grid show what its lines say."""

from __future__ import annotations

from pathlib import Path

import pytest

from csda.research.experiments import Experiment
from csda.research.grid import average_budgets, colour_rows, draw_budgets, draw_experiment, draw_rows, write_grid


def test_grids_mark_what_was_measured_and_what_the_paper_has(tmp_path: Path) -> None:
    lines = [
        {
            "method": method, "labels": labels, "split": "nm", "auc_mean": auc, "auc_std": 0.01, "mca_mean": auc / 2,
            "mca_std": None, "paper_auc": auc + 0.1, "paper_mca": None,
        }
        for method, labels, auc in (("baseline", "350", 0.6), ("baseline", "800", 0.7), ("csda", "800", 0.8))
    ]  # fmt: skip
    figure = draw_budgets(lines, ["baseline", "csda"], ["350", "800"], ["nm"])
    marks = [[round(float(y), 6) for y in line.get_ydata()] for line in figure.axes[0].get_lines()]
    for expected in ([0.6, 0.7], [0.7, 0.8], [0.8], [0.9]):
        assert expected in marks
    write_grid(figure, tmp_path / "a.svg", "two rows")
    write_grid(draw_budgets(lines, ["baseline", "csda"], ["350", "800"], ["nm"]), tmp_path / "b.svg", "two rows")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()

    scores = {"nm": (0.6, 0.8), "lesion": (0.5,)}
    results = [
        {"method": "baseline", "split": split, "auc": auc, "mca": 0.4} for split, own in scores.items() for auc in own
    ]
    figure = draw_rows(results, ["baseline"], {"baseline": [0.81, 0.42]}, ["nm", "lesion"])
    for axes, expected in ((figure.axes[0], [0.6, 0.8]), (figure.axes[2], [0.5])):
        dots, mean, open_mark = (list(map(float, line.get_xdata())) for line in axes.get_lines())
        assert (dots, open_mark) == (expected, [0.81])
        assert mean == pytest.approx([sum(expected) / len(expected)] * 2)


def test_more_rows_than_colours_are_drawn_by_their_means_over_budgets() -> None:
    titles = [f"row {number}" for number in range(9)]
    rows = [{"method": "baseline", "title": title} for title in titles]
    experiment = Experiment.model_validate(
        {"title": "t", "labels": ["9", "30"], "seeds": [0, 1], "splits": {"s": {}}, "rows": rows}
    )
    results = [
        {"method": title, "labels": labels, "split": "s", "seed": seed, "auc": auc, "mca": 0.4}
        for title in titles
        for labels, seed, auc in (("9", 0, 0.5), ("30", 0, 0.6), ("9", 1, 0.7))
    ]
    assert [(line["seed"], line["auc"]) for line in average_budgets(results, ["9", "30"])] == [(0, 0.55)] * 9
    axes = draw_experiment(experiment, results).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == titles
    assert axes.get_title(loc="left") == "AUC"
    assert [text.get_text() for text in axes.figure.legends[0].get_texts()] == ["means over budgets"]
    assert len(draw_experiment(experiment, results[:24]).axes[0].get_xticklabels()) == 2


def test_past_the_last_colour_they_begin_anew() -> None:
    colours = list(colour_rows([f"row {number}" for number in range(16)]).values())
    assert sorted(colours[:8]) == sorted(colours[8:])
    assert len(set(colours)) == 8


def test_a_legend_of_long_names_stays_in_its_picture() -> None:
    titles = ["baseline", "csda", *(f"csda with the settings of line {number} of a table" for number in range(5))]
    figures = {"auc_mean": 0.6, "auc_std": 0.01, "mca_mean": 0.3, "mca_std": 0.01, "paper_auc": None, "paper_mca": None}
    lines = [{"method": title, "labels": "350", "split": "nm", **figures} for title in titles]
    figure = draw_budgets(lines, titles, ["350"], ["nm"])
    figure.canvas.draw()
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.width
    assert len(set(colour_rows(titles).values())) == len(titles)
