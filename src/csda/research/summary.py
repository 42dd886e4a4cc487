"""The tables of a grid of runs, and their page.

A line of runs.csv is a run, one of summary.csv a row of the experiment at one budget and split over its seeds, one of
gaps.csv the difference between two rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, stdev
from typing import Any, TypeVar

import numpy as np

from csda import metrics
from csda.environment import describe_environment
from csda.errors import counted
from csda.research.experiments import Experiment

COLUMNS = (
    "method", "labels", "split", "seeds", "auc_mean", "auc_std", "mca_mean", "mca_std",
    "auc_last20_mean", "mca_last20_mean", "mca_prior_mean", "paper_auc", "paper_mca",
)  # fmt: skip

COMPARED = {
    "auc": ("auc", "ΔAUC"),
    "mca": ("mca", "ΔMCA"),
    "mca_prior": ("mca_prior", "ΔMCA, both ÷ prior"),
    "val_auc": ("val_auc_last20", "validation ΔAUC, last 20"),
    "val_mca": ("val_mca_last20", "validation ΔMCA, last 20"),
}
"""Figures of gaps.csv, the columns of runs.csv that they are differences of, and their heading on a page."""

GAPS = (
    "method", "reference", "labels", "split", "seeds",
    *(f"{figure}_{part}" for figure in COMPARED for part in ("gap", "low", "high")),
    "paper_auc_gap", "paper_mca_gap",
)  # fmt: skip

_HEADINGS = [heading for _, heading in COMPARED.values()]

Key = TypeVar("Key")
Value = TypeVar("Value")
Line = Mapping[str, Any]
"""A row of a table by its columns."""

OURS = ("csda", "csda-folds")
"""Methods with class-specific alignment, whose rows are compared with all others."""

ENOUGH = 5
"""Smallest number of seeds for a difference in bold: the interval of two or three is hardly more than their range."""

Against = dict[tuple[str, str, str, str], Line]
"""Lines of gaps.csv by row, reference, budget and split."""


def list_columns(experiment: Experiment) -> tuple[str, ...]:
    """The columns of summary.csv, with the preset if rows have one."""
    return ("method", "preset", *COLUMNS[1:]) if experiment.presets else COLUMNS


def summarize(experiment: Experiment, results: Sequence[Line]) -> list[dict[str, Any]]:
    """Mean and standard deviation over seeds of each row, budget and split with a run."""
    lines = []
    for row, labels, split in experiment.places:
        if runs := _select(results, row.name, labels, split):
            figures = ("auc", "mca", "auc_last20", "mca_last20", "mca_prior")
            means = {f"{figure}_mean": average(runs, figure) for figure in figures}
            spreads = {f"{figure}_std": _deviation(runs, figure) for figure in ("auc", "mca")}
            paper = [*row.paper.get(labels, []), None, None]
            line = {"method": row.name, "labels": labels, "split": split, "seeds": len(runs), **means, **spreads}
            lines.append(line | {"paper_auc": paper[0], "paper_mca": paper[1]})
    return lines


def compare_rows(experiment: Experiment, results: Sequence[Line]) -> list[dict[str, Any]]:
    """Compare every row with the first, and csda, csda-folds and the linear probe with every other row of their preset,
    at each budget and over all, on each split and over all.
    """
    papers = {row.name: row.paper for row in experiment.rows}
    lines = []
    for title, reference in _pair_rows(experiment):
        for labels, split, budgets in _list_comparisons(experiment):
            gaps = compare(results, title, reference, budgets)
            if gaps is not None:
                line = {"method": title, "reference": reference, "labels": labels, "split": split}
                alone = next(iter(budgets.values())) if len(budgets) == 1 else None
                theirs = _compare_papers(papers[title], papers[reference], alone) if alone else {}
                lines.append(line | gaps | theirs)
    return lines


def _pair_rows(experiment: Experiment) -> list[tuple[str, str]]:
    """Pairs of rows to compare; the second is the reference."""
    first, *others = experiment.rows
    pairs = [(row.name, first.name) for row in others]
    for own in others:
        alike = [row.name for row in others if row is not own and row.preset == own.preset]
        if own.method in OURS and not own.title:
            pairs += [(own.name, name) for name in alike]
        elif own.method == "linear-probe" and not own.title:
            pairs += [(name, own.name) for name in alike]
    return list(dict.fromkeys(pairs))


def _list_comparisons(experiment: Experiment) -> list[tuple[str, str, dict[str, Sequence[str]]]]:
    """Names of labels and split for each comparison, with the budgets of each split."""
    if experiment.cases:
        cases: dict[str, Sequence[str]] = {split: [labels] for split, labels in experiment.cases.items()}
        each = [(own[0], split, {split: own}) for split, own in cases.items()]
        return [*each, ("all", "all", cases)]
    return [
        (labels, split, dict.fromkeys(splits, budgets))
        for labels, budgets in _each_and_all(experiment.labels)
        for split, splits in _each_and_all(list(experiment.splits))
    ]


def _each_and_all(names: Sequence[str]) -> list[tuple[str, Sequence[str]]]:
    """Each name by itself and, if there are several, "all"."""
    each: list[tuple[str, Sequence[str]]] = [(name, [name]) for name in names]
    return [*each, ("all", names)] if len(names) > 1 else each


def _compare_papers(
    own: Mapping[str, Sequence[float]], other: Mapping[str, Sequence[float]], budgets: Sequence[str]
) -> dict[str, float]:
    """The paper's differences, if it has figures for both rows at all budgets."""
    gaps = {}
    for k, figure in enumerate(("auc", "mca")):
        if all(len(row.get(labels, ())) > k for row in (own, other) for labels in budgets):
            gaps[f"paper_{figure}_gap"] = mean(own[labels][k] - other[labels][k] for labels in budgets)
    return gaps


def compare(
    results: Sequence[Line], title: str, reference: str, budgets: Mapping[str, Sequence[str]]
) -> dict[str, Any] | None:
    """Mean paired differences to a reference: of test figures, of MCA with both prior-corrected, and of validation
    figures averaged over the last epochs.

    `budgets` are those of each split. On one split, runs are paired by seed, over the seeds that both rows have at all
    budgets. With several splits, each gives the mean of its seeds, and all splits must be there; `seeds` then counts
    splits. With two or more there are 95 % bootstrap intervals.
    """
    shared = [_pair(results, title, reference, own, split) for split, own in budgets.items()]
    if not all(shared):
        return None
    units = shared[0] if len(shared) == 1 else [[pair for pairs in seeds for pair in pairs] for seeds in shared]
    gaps: dict[str, Any] = {"seeds": len(units)}
    for figure, (column, _) in COMPARED.items():
        if any(run.get(column) is None for pairs in units for pair in pairs for run in pair):
            continue  # an older run may lack it
        differences = np.array([mean(own[column] - other[column] for own, other in pairs) for pairs in units])
        low, high = metrics.paired_interval(differences) if len(units) > 1 else (None, None)
        gaps |= {f"{figure}_gap": float(differences.mean()), f"{figure}_low": low, f"{figure}_high": high}
    return gaps


def _pair(
    results: Sequence[Line], title: str, reference: str, budgets: Sequence[str], split: str
) -> list[list[tuple[Line, Line]]]:
    """The runs of two rows at all budgets, for each common seed on a split."""
    runs = {(run["method"], run["labels"], run["seed"]): run for run in results if run["split"] == split}
    seeds = sorted({seed for *_, seed in runs})
    shared = [s for s in seeds if all((name, labels, s) in runs for name in (title, reference) for labels in budgets)]
    return [[(runs[title, labels, s], runs[reference, labels, s]) for labels in budgets] for s in shared]


def format_page(
    experiment: Experiment,
    results: Sequence[Line],
    summary: Sequence[Line],
    gaps: Sequence[Line],
    about: Mapping[str, Any],
    missing: Sequence[Line],
) -> str:
    """Write the page of a table: command, table, csda against the others, and missing runs."""
    reference = experiment.rows[0].name
    last = {settings.get("choose") == "last" for settings in about["settings"].values()}
    epoch = "last epoch" if last == {True} else "epoch of best validation AUC"
    against: Against = {(gap["method"], gap["reference"], gap["labels"], gap["split"]): gap for gap in gaps}
    lines = [
        f"# {experiment.title}",
        "",
        *([experiment.note.strip(), ""] if experiment.note else []),
        f"Made by `{about['command']}`; {counted(about['runs'], 'run')}, the last of {about['date']}, on "
        f"{'; '.join(about['machine'])}, torch {', '.join(about['torch'])}; the last column has the commits. Test "
        f"figures at the {epoch}, mean ± standard deviation over seeds; differences to "
        f"*{reference}* in points, paired by seed, with 95 % bootstrap intervals, in bold where zero is outside that "
        f"of {ENOUGH} seeds or more.",
        "",
    ]
    if missing:
        lines += [f"**Incomplete: {counted(len(missing), 'run')} of this grid are missing**, listed at the end.", ""]
    seen = any(run.get("auc_unseen") is not None for run in results)
    if seen:
        lines += [
            "*Unseen groups*: AUC / MCA on the test images whose group (a lesion, a patient) is in no training part. "
            "*Leaked MCA*: what a group's labeled images add to the MCA, by comparison, class by class, with test "
            "images of groups that have several and none of them labeled.",
            "",
        ]
    titles = ["method", "labels", "split", "seeds", "AUC", "MCA", "ΔAUC", "ΔMCA", "last 20 epochs", "MCA ÷ prior"]
    titles += ["validation, last 20", *(["unseen groups", "leaked MCA"] if seen else [])]
    paper = any(line["paper_auc"] is not None for line in summary)
    titles += [*(["paper", "paper ΔAUC / ΔMCA"] if paper else []), "commits"]
    rows = []
    for line in summary:
        place = line["method"], line["labels"], line["split"]
        runs = _select(results, *place)
        gap = against.get((place[0], reference, *place[1:]))
        cells = [
            *place,
            str(line["seeds"]),
            _spread(line["auc_mean"], line["auc_std"]),
            _spread(line["mca_mean"], line["mca_std"]),
            *_points(gap),
            _numbers([line["auc_last20_mean"], line["mca_last20_mean"]]),
            format_number(line["mca_prior_mean"]),
            _numbers(average(runs, f"val_{figure}_last20") for figure in ("auc", "mca")),
        ]
        if seen:
            cells.append(_numbers(average(runs, f"{figure}_unseen") for figure in ("auc", "mca")))
            cells.append(format_number(average(runs, "mca_leak")))
        if paper:
            known = [line[key] for key in ("paper_auc", "paper_mca") if line[key] is not None]
            cells += [_numbers(known), _paper_points(gap)]
        rows.append([*cells, ", ".join(sorted({_short(run["commit"]) for run in runs}))])
    lines += [*_table(titles, rows), ""]
    lines += [
        *(line for method in OURS for line in _format_ours(method, gaps, reference)),
        *_format_probe(gaps, reference),
        *_format_budgets(experiment, summary, against),
    ]
    lines += [*_format_splits(reference, against), *_format_findings(experiment, results), *_format_missing(missing)]
    return "\n".join(lines).rstrip() + "\n"


def _format_ours(method: str, gaps: Sequence[Line], reference: str) -> list[str]:
    """A section with the differences of a method of `OURS` to all rows but the first, which is in the table."""
    rows = [
        [gap["reference"], gap["labels"], gap["split"], str(gap["seeds"]), *_points(gap)]
        for gap in gaps
        if gap["method"] == method and gap["labels"] != "all" and gap["reference"] != reference
    ]
    return _section(f"{method} against the others", ["against", "labels", "split", "seeds", "ΔAUC", "ΔMCA"], rows)


def _format_probe(gaps: Sequence[Line], reference: str) -> list[str]:
    """A section with the differences to the linear probe, unless it is the first row."""
    rows = [
        [gap["method"], gap["labels"], gap["split"], str(gap["seeds"]), *_points(gap)]
        for gap in gaps
        if gap["reference"].startswith("linear-probe") and gap["reference"] != reference
    ]
    return _section("Against the linear probe", ["method", "labels", "split", "seeds", "ΔAUC", "ΔMCA"], rows)


def _format_budgets(experiment: Experiment, summary: Sequence[Line], against: Against) -> list[str]:
    """A section with the means over all budgets, of rows with runs at all budgets."""
    if len(experiment.labels) < 2:
        return []
    reference = experiment.rows[0].name
    titles = ["method", "split", "AUC", "MCA", "paired seeds", *_HEADINGS]
    titles += ["paper ΔAUC / ΔMCA"] if any("paper_auc_gap" in gap for gap in against.values()) else []
    rows = []
    for row in experiment.rows:
        for split in experiment.splits:
            own = [line for line in summary if (line["method"], line["split"]) == (row.name, split)]
            if len(own) == len(experiment.labels):
                figures = [format_number(mean(line[f"{figure}_mean"] for line in own)) for figure in ("auc", "mca")]
                gap = against.get((row.name, reference, "all", split))
                seeds = str(gap["seeds"]) if gap else ""
                shown = _points(gap, tuple(COMPARED))
                rows.append([row.name, split, *figures, seeds, *shown, _paper_points(gap)][: len(titles)])
    return _section("Mean over budgets", titles, rows)


def _format_splits(reference: str, against: Against) -> list[str]:
    """A section with the differences to the first row over all splits."""
    rows = [
        [gap["method"], gap["labels"], str(gap["seeds"]), *_points(gap, tuple(COMPARED))]
        for (_, other, _, split), gap in against.items()
        if (other, split) == (reference, "all")
    ]
    words = (
        "Each split counts as the mean of its seeds; intervals are over splits, here and where the split above is all."
    )
    return _section("Mean over splits", ["method", "labels", "splits", *_HEADINGS], rows, words)


def _format_findings(experiment: Experiment, results: Sequence[Line]) -> list[str]:
    """Sections with the mean AUC of each label, if an image may have several."""
    classes = list_classes(results)
    if not all(run.get("multi_label") for run in results):
        return []
    lines = []
    for labels in experiment.labels:
        for split in experiment.splits:
            of = {row.name: runs for row in experiment.rows if (runs := _select(results, row.name, labels, split))}
            rows = [
                [name, *(format_number(average(runs, f"class_auc_{name}")) for runs in of.values())] for name in classes
            ]
            lines += _section(f"AUC of each label, {labels} labeled, split {split}", ["", *of], rows if of else [])
    return lines


def _format_missing(missing: Sequence[Line]) -> list[str]:
    seeds = group(((line["method"], line["split"], line["labels"]), str(line["seed"])) for line in missing)
    budgets = group(((title, split, ", ".join(some)), labels) for (title, split, labels), some in seeds.items())
    lines = [
        f"- {title}, {', '.join(labels)} labels, split {split}: seeds {some}"
        for (title, split, some), labels in budgets.items()
    ]
    return ["## Missing", "", *lines] if lines else []


def list_classes(results: Sequence[Line]) -> list[str]:
    """The classes with columns in runs.csv."""
    return [column.removeprefix("recall_") for column in results[0] if column.startswith("recall_")]


def _select(results: Iterable[Line], title: str, labels: str, split: str) -> list[Line]:
    return [run for run in results if (run["method"], run["labels"], run["split"]) == (title, labels, split)]


def group(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Group values by key."""
    groups: dict[Key, list[Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def average(runs: Iterable[Line], figure: str) -> float | None:
    """The mean of a figure over the rows that have it."""
    values = [run[figure] for run in runs if run.get(figure) is not None]
    return mean(values) if values else None


def _deviation(runs: Iterable[Line], figure: str) -> float | None:
    values = [run[figure] for run in runs if run[figure] is not None]
    return stdev(values) if len(values) > 1 else None


def format_number(value: float | None) -> str:
    """Format a figure for a page; a dash if it is not known."""
    return "–" if value is None else f"{value:.4f}"


def _numbers(values: Iterable[float | None]) -> str:
    return " / ".join(map(format_number, values))


def _spread(value: float | None, deviation: float | None) -> str:
    return format_number(value) if deviation is None else f"{format_number(value)} ± {format_number(deviation)}"


def _points(gap: Line | None, figures: Sequence[str] = ("auc", "mca")) -> list[str]:
    """Differences in points, in bold if the interval of enough seeds excludes zero."""
    cells = []
    for figure in figures:
        if gap is None or gap.get(f"{figure}_gap") is None:
            cells.append("")
            continue
        value, low, high = (gap[f"{figure}_{part}"] for part in ("gap", "low", "high"))
        text = f"{100 * value:+.1f}"
        if low is not None:
            text = f"**{text}**" if low * high > 0 and gap["seeds"] >= ENOUGH else text
            text += f" [{100 * low:+.1f}, {100 * high:+.1f}]"
        cells.append(text)
    return cells


def _paper_points(gap: Line | None) -> str:
    """The paper's differences in points, if it has both figures."""
    known = [gap[key] for key in ("paper_auc_gap", "paper_mca_gap") if gap and key in gap]
    return " / ".join(f"{100 * value:+.1f}" for value in known)


def _section(title: str, titles: Sequence[str], rows: Sequence[Sequence[str]], words: str = "") -> list[str]:
    """A heading, text and a table; empty if the table has no row."""
    return [f"## {title}", "", *([words, ""] if words else []), *_table(titles, rows), ""] if rows else []


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    head, *body = (f"| {' | '.join(cells)} |" for cells in (titles, *rows))
    return [head, "|---" * len(titles) + "|", *body]


def _short(commit: str) -> str:
    """Seven digits of a commit, with a mark if the package had been changed."""
    digits, plus, changed = commit.partition("+")
    return f"{digits[:7]}{plus}{changed}"


def describe_making(command: str) -> dict[str, Any]:
    """The first lines of the meta.json of a comparison that is not a grid: its command, date, commit and platform."""
    environment = describe_environment()
    date = environment["started"][:10]
    return {"command": command, "date": date, "commit": environment["commit"], "platform": environment["platform"]}


def say_making(about: Mapping[str, Any]) -> str:
    """The same as the first line of its page."""
    return f"`{about['command']}`, {about['date']}, commit {about['commit']}."


def format_points(difference: float) -> str:
    """A difference in points, with its sign."""
    return f"{100 * difference:+.1f}".replace("-", "−")
