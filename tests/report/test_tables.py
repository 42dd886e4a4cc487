"""The numbers of a report against those that the run wrote itself, and the tables of the terminal."""

from __future__ import annotations

import csv
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from rich.table import Table

from csda import metrics
from csda.errors import RunError
from csda.report import comparison_table, run_table, tables
from csda.runs import Run

MakeRun = Callable[..., Path]


def print_table(table: Table, width: int = 80) -> str:
    console = Console(width=width, no_color=True)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_scores_are_those_of_the_run(csda_folder: Path) -> None:
    run = Run(csda_folder)
    scores = tables.score(run)
    assert scores.auc.value == pytest.approx(run.result["auc"], abs=1e-5)
    assert scores.mca.value == pytest.approx(run.result["mca"], abs=1e-5)
    assert scores.prior_mca is not None
    assert scores.prior_mca.value == pytest.approx(run.result["prior_mca"], abs=1e-5)
    probs, labels = run.predictions.part("test")
    assert [each.value for each in scores.recall] == pytest.approx(metrics.recall(probs, labels))
    assert [each.value for each in scores.class_auc] == pytest.approx(metrics.per_class_auc(probs, labels))
    for each in (scores.auc, scores.mca, *scores.recall, *scores.precision, *scores.class_auc):
        assert each.low <= each.value <= each.high


def test_difference_pairs_images_whatever_their_order(make_run: MakeRun, csda_folder: Path) -> None:
    baseline, ours = make_run("baseline"), csda_folder
    expected = tables.compare(Run(ours), Run(baseline))
    assert expected is not None
    auc = tables.score(Run(ours)).auc.value - tables.score(Run(baseline)).auc.value
    assert expected.auc.value == pytest.approx(auc)

    path = baseline / "predictions.csv"
    header, *rows = csv.reader(path.read_text().splitlines())
    path.write_text("\n".join(",".join(row) for row in [header, *rows[::-1]]) + "\n")
    assert repr(tables.compare(Run(ours), Run(baseline))) == repr(expected)  # NaN is in it where nothing was predicted


def test_pairing_narrows_the_interval_of_a_difference(csda_folder: Path) -> None:
    run = Run(csda_folder)
    gap = tables.compare(run, run)
    assert gap is not None
    assert (gap.mca.low, gap.mca.value, gap.mca.high) == (0, 0, 0)
    assert gap.mca.verdict == "unclear"


def test_other_test_images_give_no_difference(baseline_folder: Path, make_run: MakeRun) -> None:
    first, second = Run(baseline_folder), Run(make_run("csda", test_seed=1))
    assert tables.compare(second, first) is None
    assert "other images" in print_table(comparison_table([first, second]))


def test_other_classes_are_refused(baseline_folder: Path, make_run: MakeRun) -> None:
    with pytest.raises(RunError, match="compare runs on the same data"):
        tables.enter([Run(baseline_folder), Run(make_run("csda", classes=("a", "b", "c")))])


@pytest.mark.parametrize(
    ("low", "high", "verdict"), [(0.01, 0.03, "ahead"), (-0.03, -0.01, "behind"), (-0.01, 0.03, "unclear")]
)
def test_verdict_needs_an_interval_without_zero(low: float, high: float, verdict: str) -> None:
    assert tables.Estimate((low + high) / 2, low, high).verdict == verdict


def test_class_that_is_never_predicted_has_no_precision() -> None:
    for difference in (False, True):
        estimate = tables.Estimate(np.nan, np.nan, np.nan, difference)
        assert (str(estimate), estimate.interval) == ("–", "")


def test_counts_of_each_part(make_run: MakeRun) -> None:
    run = Run(make_run("csda"))
    counts = tables.count_classes(run)
    assert [count.name for count in counts] == list(run.classes)
    assert sum(count.labeled for count in counts) == 150
    assert sum(count.unlabeled or 0 for count in counts) == 1200
    assert [count.val for count in counts] == [10] * 7
    assert tables.count_images(run) == {"labeled": 150, "unlabeled": 1200, "val": 70, "test": 350}
    assert all(count.unlabeled is None for count in tables.count_classes(Run(make_run("csda", truth=False))))


def test_counts_of_what_unlabeled_images_are_taken_for(make_run: MakeRun) -> None:
    folder = make_run("csda")
    with (folder / "pseudo_labels.csv").open(newline="") as file:
        named = Counter(line["predicted"] for line in csv.DictReader(file))
    run = Run(folder)
    predicted = tables.count_predicted(run)
    assert predicted == [named[name] for name in run.classes]
    assert len(set(predicted)) > 1
    assert sum(predicted) == 1200


def test_the_last_row_is_called_a_mean_where_it_is_one(
    csda_folder: Path, make_multi_label_run: Callable[[], Path]
) -> None:
    for folder, name in ((csda_folder, "mean"), (make_multi_label_run(), "MCA, AUC")):
        run = Run(folder)
        scores = tables.score(run)
        recall = np.nanmean([each.value for each in scores.recall])
        assert (scores.mca.value == pytest.approx(recall)) == (name == "mean")
        (line,) = [line for line in print_table(run_table(run), 120).splitlines() if line.strip().startswith(name)]
        assert f"{scores.mca.value:.3f}".removeprefix("0") in line


def test_several_labels_are_compared_by_their_auc(make_multi_label_run: Callable[[], Path]) -> None:
    run = Run(make_multi_label_run())
    rows = tables.compare_all(tables.enter([run, run]))
    assert [row.values[0] for row in rows[-3:]] == list(tables.score(run).class_auc)
    assert "the AUC of each label" in print_table(comparison_table([run, run]), 120)


def test_several_predicted_labels_count_each(make_multi_label_run: Callable[[], Path]) -> None:
    folder = make_multi_label_run()
    cells = [("a", "", "", 0.5, 0.9, 0.1), ("b", "", "", 0.49, 0.6, 0.2), ("c", "", "", 0.1, 0.1, 0.3)]
    rows = [("id", "predicted", "confidence", "effusion", "edema", "fracture"), *cells]
    (folder / "pseudo_labels.csv").write_text("\n".join(",".join(map(str, row)) for row in rows))
    labeled = [line for line in (folder / "split.csv").read_text().splitlines() if ",unlabeled," not in line]
    (folder / "split.csv").write_text("\n".join([*labeled, *(f"{cell[0]},unlabeled,," for cell in cells)]))
    assert tables.count_predicted(Run(folder)) == [1, 2, 0]


def test_without_unlabeled_images_nothing_is_predicted_of_them(make_run: MakeRun) -> None:
    folder = make_run("upper-bound")
    lines = (folder / "split.csv").read_text().splitlines()
    (folder / "split.csv").write_text("\n".join(line for line in lines if ",unlabeled," not in line))
    assert tables.count_predicted(Run(folder)) is None


def test_several_labels_count_each_and_a_bar_in_a_class_name_divides_nothing(
    make_run: MakeRun, make_multi_label_run: Callable[[], Path]
) -> None:
    run = Run(make_multi_label_run())
    labels = run.labels_of("labeled")
    assert [count.labeled for count in tables.count_classes(run)] == labels.sum(0).tolist()
    assert sum(count.labeled for count in tables.count_classes(Run(make_run(classes=("a|b", "a", "b"))))) == 150


def test_remarks_name_classes_with_few_test_images(csda_folder: Path) -> None:
    run = Run(csda_folder)
    few = [count.name for count in tables.count_classes(run) if count.test < 10]
    own, caution = tables.remark_split(run)
    assert own == "drawn for this test"
    assert few
    assert all(name in caution for name in few)


def test_names_and_colours_tell_runs_apart(make_run: MakeRun, tmp_path: Path) -> None:
    ours, again = make_run("csda"), make_run("csda", seed=1)
    assert [(entry.name, entry.colour) for entry in tables.enter([Run(make_run("baseline")), Run(ours)])] == [
        ("baseline", "vermilion"),
        ("csda", "blue"),
    ]
    entries = tables.enter([Run(ours), Run(again), Run(make_run("fixmatch"))])
    assert [entry.name for entry in entries] == ["csda, seed 0", "csda, seed 1", "fixmatch, seed 0"]
    assert len({entry.colour for entry in entries}) == 3
    copy = tmp_path / "copy"
    shutil.copytree(ours, copy)
    assert [entry.name for entry in tables.enter([Run(ours), Run(copy)])] == [ours.name, "copy"]


def test_more_runs_than_colours(make_run: MakeRun) -> None:
    runs = [Run(make_run("csda", seed=seed, epochs=1)) for seed in range(10)]
    assert {entry.colour for entry in tables.enter(runs)} == set(tables.COLOURS)


def test_comparison_of_two_fits_a_terminal(baseline_folder: Path, csda_folder: Path) -> None:
    runs = [Run(baseline_folder), Run(csda_folder)]
    text = print_table(comparison_table(runs))
    assert "…" not in text
    (line,) = [line for line in text.splitlines() if line.strip().startswith("AUC") and "[" in line]
    first, second = (tables.score(run).auc for run in runs)
    for part in (f"{first.value:.3f}", f"{second.value:.3f}", f"{second.value - first.value:+.3f}"):
        assert part.replace("0.", ".") in line


def test_names_are_no_markup(make_run: MakeRun) -> None:
    run = Run(make_run("csda", classes=("[red]a[/red]", "[/]", "b")))
    assert "[red]a[/red]" in print_table(run_table(run), width=120)
    assert "[red]a[/red]" in print_table(comparison_table([run]), width=120)


def test_corrected_run_is_not_corrected_twice(make_run: MakeRun) -> None:
    plain, corrected = make_run("baseline"), make_run("baseline", seed=1)
    settings = (corrected / "config.toml").read_text()
    (corrected / "config.toml").write_text('prior_correction = "labeled"\n' + settings)
    assert tables.score(Run(corrected)).prior_mca is None
    rows = tables.compare_all(tables.enter([Run(plain), Run(corrected)]))
    assert [row.name for row in rows[:3]] == ["AUC", "MCA", "melanoma"]
