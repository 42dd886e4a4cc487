"""The paper's figures say what the runs say."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from csda import metrics
from csda.alignment import temper
from csda.research import paper
from csda.runs import Run

MakeRun = Callable[..., Path]


@pytest.fixture
def make_aligned(make_run: MakeRun) -> Callable[..., Run]:
    def make(align: str, temperature: str, seed: int) -> Run:
        folder = make_run("csda", seed)
        with (folder / "config.toml").open("a") as file:
            file.write(f'align = "{align}"\ntemperature = {temperature}\n')
        return Run(folder)

    return make


def test_confusions_of_all_seeds_are_added_up(make_run: MakeRun) -> None:
    runs = [Run(make_run("csda", seed)) for seed in (0, 1)]
    total = paper.sum_confusions(runs)
    for row in range(7):
        for column in range(7):
            probs_labels = [run.predictions.part("test") for run in runs]
            count = sum(int(((probs.argmax(1) == column) & (labels == row)).sum()) for probs, labels in probs_labels)
            assert total[row, column] == count
    figure = paper.draw_confusions({"baseline": runs[:1], "csda": runs})
    shares = [text.get_text() for text in figure.axes[1].texts]
    assert f"{total[0, 0] / total[0].sum():.0%}" in shares
    assert (
        figure.axes[1].get_title("left") == f"csda: mean recall {(total.diagonal() / total.sum(1)).mean():.3f}, 2 seeds"
    )
    single = metrics.mca(*runs[0].predictions.part("test"))
    assert figure.axes[0].get_title("left") == f"baseline: mean recall {single:.3f}"


@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0])
def test_the_curve_of_a_temperature_is_what_tempering_does(temperature: float) -> None:
    entries = np.array([0.02, 1 / 7, 0.6])
    rows = torch.tensor([[entry, *[(1 - entry) / 6] * 6] for entry in entries])
    expected = [temper(row.expand(7, 7), torch.full((7,), temperature))[0, 0].item() for row in rows]
    np.testing.assert_allclose(paper.temper_entry(entries, temperature, 7), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("align", "temperature", "drawn"), [("csda", "0.3", (True, False)), ("da", "1.0", (False, True))]
)
def test_a_part_of_the_grid_leaves_a_panel_without_legend(
    make_aligned: Callable[..., Run], align: str, temperature: str, drawn: tuple[bool, bool]
) -> None:
    _, auc, _, distance = paper.draw_temperatures({"only": [make_aligned(align, temperature, 0)]}).axes
    assert (auc.get_legend() is not None, distance.get_legend() is not None) == drawn


def test_curves_and_distances_are_means_over_seeds(make_aligned: Callable[..., Run]) -> None:
    runs = {
        "da": [make_aligned("da", "1.0", seed) for seed in (0, 1)],
        "T = 0.5": [make_aligned("csda", "0.5", seed) for seed in (2, 3)],
        "adaptive T": [make_aligned("csda", '"adaptive"', 4)],
    }
    _, auc, _, distance = paper.draw_temperatures(runs).axes
    names = [line.get_label() for line in auc.get_lines()]
    assert names == ["T = 0.5", "adaptive T"]
    expected = np.mean([[row["test_auc"] for row in run.metrics] for run in runs["T = 0.5"]], axis=0)
    np.testing.assert_allclose(auc.get_lines()[0].get_ydata(), expected)
    assert [line.get_label() for line in distance.get_lines()] == ["DA", "CSDA, adaptive T"]
    history = runs["adaptive T"][0].history
    last = np.linalg.norm(history["aligned_marginals"][-1] - history["labeled_marginals"][-1])
    assert distance.get_lines()[1].get_ydata()[-1] == pytest.approx(last)  # type: ignore[index]


def test_epochs_show_scores_loss_and_guesses(make_aligned: Callable[..., Run]) -> None:
    runs = {"da": [make_aligned("da", "1.0", seed) for seed in (0, 1)], "csda": [make_aligned("csda", "0.5", 2)]}
    auc, mca, loss, guesses = paper.draw_epochs(runs).axes
    columns = ((auc, "test_auc"), (mca, "test_mca"), (loss, "labeled_loss"), (guesses, "pseudo_accuracy"))
    for axes, column in columns:
        assert [line.get_label() for line in axes.get_lines()] == ["da", "csda"]
        values = [[row.get(column, np.nan) for row in run.metrics] for run in runs["da"]]
        expected = np.mean([row for row in np.transpose(values) if not np.isnan(row).any()], axis=1)
        np.testing.assert_allclose(axes.get_lines()[0].get_ydata(), expected)
    colours = [line.get_color() for line in auc.get_lines()]
    assert len(set(colours)) == 2


def test_rows_without_guesses_have_no_curve_of_them(make_aligned: Callable[..., Run]) -> None:
    guessing, silent = make_aligned("csda", "0.5", 2), make_aligned("csda", "0.5", 3)
    for row in silent.metrics:
        row.pop("pseudo_accuracy", None)
    *_, guesses = paper.draw_epochs({"a": [guessing], "b": [silent]}).axes
    assert [line.get_label() for line in guesses.get_lines()] == ["a"]
    assert len(paper.draw_epochs({"b": [silent]}).axes) == 3


def test_epochs_of_several_labels_an_image_show_aucs(make_multi_label_run: Callable[[], Path]) -> None:
    run = Run(make_multi_label_run())
    for row in run.metrics[1:]:
        row["pseudo_auc"] = 0.5
    titles = [axes.get_title("left") for axes in paper.draw_epochs({"csda": [run]}).axes]
    assert titles == ["test AUC", "validation AUC", "loss on the labeled images", "AUC of the guesses"]


def test_figures_of_an_epoch_are_means_of_what_runs_have(make_run: MakeRun) -> None:
    runs = [Run(make_run("csda", seed)) for seed in (0, 1)]
    runs[1].metrics[2]["pseudo_mca"] = None
    lines = paper.average_epochs(runs)
    assert [line["epoch"] for line in lines] == [row["epoch"] for row in runs[0].metrics]
    assert lines[3]["test_auc"] == pytest.approx((runs[0].metrics[3]["test_auc"] + runs[1].metrics[3]["test_auc"]) / 2)
    assert lines[2]["pseudo_mca"] == runs[0].metrics[2]["pseudo_mca"]
    assert lines[0].get("pseudo_mca") is None
    assert "seconds" not in lines[0]


def test_guesses_of_a_class_are_counted(make_run: MakeRun) -> None:
    runs = [Run(make_run("csda", seed)) for seed in (0, 1)]
    for run in runs:
        run.history["pseudo_confusion"][0] = np.nan  # the first epoch is on labels alone
    lines = paper.count_guesses(runs)
    name = runs[0].classes[2]
    (line,) = (line for line in lines if line["epoch"] == 3 and line["class"] == name)
    confusions, queues = ([run.history[key][2] for run in runs] for key in ("pseudo_confusion", "queue_counts"))
    assert line["images"] == sum(table[2, i] for table in confusions for i in range(7)) / 2
    assert line["guessed"] == sum(table[i, 2] for table in confusions for i in range(7)) / 2
    assert line["right"] == sum(table[2, 2] for table in confusions) / 2
    assert line["queued"] == sum(queue[2] for queue in queues) / 2
    assert {line["epoch"] for line in lines} == {row["epoch"] for row in runs[0].metrics[1:]}
    assert paper.count_guesses([Run(make_run("baseline", 0))]) == []


def test_examples_show_truth_and_guesses(tmp_path: Path) -> None:
    image = np.full((8, 8, 3), 200, dtype=np.uint8)
    examples = [
        paper.Example(image, ("edema", "effusion"), {"nm": [("edema", 0.4), ("mass", 0.3)], "csda": [("edema", 0.5)]})
    ]
    figure = paper.draw_examples(examples)
    texts = {text.get_text(): text for text in figure.texts}
    assert {"edema", "effusion", "edema 0.40", "mass 0.30", "edema 0.50", "truth", "nm", "csda"} == set(texts)
    assert texts["edema 0.40"].get_color() != texts["mass 0.30"].get_color()
    assert texts["edema 0.50"].get_weight() == "bold"
    paper.write_photographs(figure, tmp_path / "examples.png")
    with Image.open(tmp_path / "examples.png") as picture:
        assert picture.mode == "RGB"


def test_examples_are_unlabeled_images_with_what_is_said_of_them(tiny_run: Run) -> None:
    examples = paper.pick_examples({"csda": [tiny_run]}, tiny_run.settings)
    assert [example.truth for example in examples] == [(name,) for name in tiny_run.classes]
    assert len({example.image.tobytes() for example in examples}) == len(tiny_run.classes)
    with (tiny_run.folder / "pseudo_labels.csv").open(newline="") as lines:
        said = {(row["predicted"], round(float(row["confidence"]), 4)) for row in csv.DictReader(lines)}
    assert {(name, round(value, 4)) for example in examples for name, value in example.guesses["csda"]} <= said
