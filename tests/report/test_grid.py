"""Pictures of a grid show what its lines say."""

from __future__ import annotations

from pathlib import Path

import pytest

from csda.report.grid import draw_budgets, draw_rows, write_grid


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
    write_grid(figure, tmp_path / "a.svg")
    write_grid(draw_budgets(lines, ["baseline", "csda"], ["350", "800"], ["nm"]), tmp_path / "b.svg")
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
