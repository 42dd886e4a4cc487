"""Grids of runs: complete, resumable, and their tables checkable from the runs alone."""

from __future__ import annotations

import csv
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
from PIL import Image

from csda import environment, metrics
from csda.config import RunConfig
from csda.data import synthetic
from csda.data.stratification import Budget
from csda.errors import ConfigError, CsdaError, DataError, RunError
from csda.progress import Reporter
from csda.research import reproduce
from csda.research.experiments import HERE, choose_variant, read_experiment
from csda.research.summary import COLUMNS
from csda.runs import Run
from tiny import SMALL_GRID

EXPERIMENT = (
    """
title = "A small grid"
labels = ["21"]
seeds = [0, 1]
preset = "quick"
"""
    + SMALL_GRID
    + """
[[rows]]
method = "baseline"
paper = { 21 = [0.5, 0.25] }

[[rows]]
method = "csda"
title = "csda, short queue"
settings = { capacity = 8 }
"""
)


class Notes(Reporter):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def _train_here(cells: list[reproduce.Cell], *options: object) -> None:
    for cell in cells:
        cell.train()


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    _draw_few(monkeypatch)


def _draw_few(patch: pytest.MonkeyPatch) -> None:
    """A small drawn set; worker processes would not see it, so runs are trained here."""
    patch.setattr(synthetic.load, "__defaults__", (0, 60, 1.0))
    patch.setattr(synthetic, "VALIDATION", 2)
    patch.setattr(synthetic, "TEST", 3)
    patch.setattr(reproduce, "_train_all", _train_here)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the small grid has been reproduced; nobody writes into it."""
    folder = tmp_path_factory.mktemp("grid")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CSDA_CACHE", str(folder / "cache"))
        _draw_few(patch)
        assert _reproduce(folder, EXPERIMENT, "grid")[1] == 4
    return folder


def _reproduce(folder: Path, text: str, name: str, **options: Any) -> tuple[Path, int]:
    """Reproduce a grid: its page, and how many runs it said that it would train."""
    file = folder / f"{name}.toml"
    file.write_text(text)
    notes = Notes()
    where = {"data": None, "runs": folder / "runs", "out": folder / "results", "jobs": 1, **options}
    (page,) = reproduce.reproduce([str(file)], reporter=notes, **where)
    return page, int(notes.notes[0].split(", ")[1].split()[0])


Grid = Callable[..., tuple[Path, int]]


@pytest.fixture
def grid(trained: Path, tmp_path: Path, _small: None) -> Grid:
    """Reproduces in a copy of that folder, by default the same grid again."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)

    def again(text: str = EXPERIMENT, name: str = "grid", **options: Any) -> tuple[Path, int]:
        return _reproduce(tmp_path, text, name, **options)

    return again


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as lines:
        return list(csv.DictReader(lines))


def test_a_grid_becomes_a_table_and_trains_only_what_is_missing(grid: Grid, tmp_path: Path) -> None:
    page, count = grid()
    assert count == 0
    results = tmp_path / "results" / "grid"
    summary, runs = _read(results / "summary.csv"), _read(results / "runs.csv")
    assert tuple(summary[0]) == COLUMNS
    assert [(line["method"], line["seeds"]) for line in summary] == [("baseline", "2"), ("csda, short queue", "2")]
    for line in summary:
        aucs = [float(run["auc"]) for run in runs if run["method"] == line["method"]]
        assert float(line["auc_mean"]) == pytest.approx(mean(aucs), abs=1e-5)
        assert float(line["auc_std"]) == pytest.approx(stdev(aucs), abs=1e-5)
    assert (summary[0]["paper_auc"], summary[0]["paper_mca"]) == ("0.5", "0.25")
    text = page.read_text()
    assert "A small grid" in text
    assert text.count("| csda, short queue |") == 1
    about = json.loads((results / "meta.json").read_text())
    assert about["seeds"] == [0, 1]
    settings = {run["method"]: about["settings"][run["settings"]] for run in runs}
    assert settings["csda, short queue"]["capacity"] == 8
    assert settings["baseline"]["epochs"] == 2
    assert "Missing" not in text

    run = next(folder for folder in (tmp_path / "runs").glob("synthetic_*/*") if folder.name.startswith("baseline"))
    line = next(line for line in runs if line["method"] == "baseline" and f"_{line['seed']}_" in run.name)
    probs, labels = Run(run).predictions.part("test")
    assert float(line["auc"]) == pytest.approx(metrics.auc(probs, labels), abs=1e-5)
    assert float(line["recall_NV"]) == pytest.approx(metrics.recall(probs, labels)[1], abs=1e-5)
    assert line["pseudo_accuracy"] == line["flip_rate"] == ""
    run = next(folder for folder in (tmp_path / "runs").glob("synthetic_*/*") if folder.name.startswith("csda"))
    line = next(line for line in runs if line["method"] != "baseline" and f"_{line['seed']}_" in run.name)
    for name in ("pseudo_accuracy", "pseudo_mca", "flip_rate"):
        assert float(line[name]) == pytest.approx(Run(run).metrics[-1][name], abs=1e-5)


def test_a_row_of_several_tables_is_trained_once(grid: Grid, monkeypatch: pytest.MonkeyPatch) -> None:
    other = EXPERIMENT.replace("A small grid", "Another").replace("csda, short queue", "L = 8")
    assert grid(other, "other")[1] == 0
    monkeypatch.setattr(reproduce, "_train_all", lambda cells, *options: None)
    assert grid(other.replace("capacity = 8", "capacity = 9"), "other")[1] == 2


def test_a_table_goes_on_from_its_lines_where_the_folders_are_gone(grid: Grid, tmp_path: Path) -> None:
    results = tmp_path / "results" / "grid"
    before = {file.name: file.read_bytes() for file in results.iterdir()}
    shutil.rmtree(tmp_path / "runs")
    assert grid(only_finished=True)[1] == 0
    assert {file.name: file.read_bytes() for file in results.iterdir()} == before

    lines = before["runs.csv"].decode().splitlines(keepends=True)
    (results / "runs.csv").write_text("".join(lines[:-1]))
    page, count = grid()
    assert count == 1
    assert "Missing" not in page.read_text()
    again = (results / "runs.csv").read_text().splitlines(keepends=True)
    assert again[:-1] == lines[:-1]
    assert again[-1].split(",")[:12] == lines[-1].split(",")[:12]


def test_lines_of_other_images_are_not_mixed_in(grid: Grid, tmp_path: Path) -> None:
    file = tmp_path / "results" / "grid" / "runs.csv"
    file.write_text(file.read_text().replace(_read(file)[0]["images"], "0" * 12, 1))
    shutil.rmtree(tmp_path / "runs")
    with pytest.raises(RunError, match="given different images"):
        grid(only_finished=True)


def test_an_unfinished_grid_says_what_is_missing(grid: Grid, tmp_path: Path) -> None:
    two = EXPERIMENT.replace('labels = ["21"]', 'labels = ["21", "30"]')
    page, count = grid(two, only_finished=True)
    assert count == 0
    assert "**Incomplete: 4 runs of this grid are missing**" in page.read_text()
    assert "- baseline, 30 labels, split random: seeds 0, 1" in page.read_text()
    assert "Mean over budgets" not in page.read_text()

    page, count = grid(two, labels=["30"], seeds=1)
    assert count == 2
    assert "- csda, short queue, 30 labels, split random: seeds 1" in page.read_text()
    assert "## Mean over budgets" in page.read_text()
    lines = [
        (line["labels"], line["seeds"], line["auc_std"] == "")
        for line in _read(tmp_path / "results" / "grid" / "summary.csv")
    ]
    assert lines == [("21", "2", False), ("30", "1", True)] * 2


def test_a_grid_without_any_run_has_no_table(grid: Grid) -> None:
    with pytest.raises(RunError, match="no run of it has finished"):
        grid(only_finished=True, overrides={"lr": 0.01})


def test_a_slim_folder_is_enough_for_a_table(grid: Grid, tmp_path: Path) -> None:
    page, _ = grid()
    text = page.read_text()
    needed = {"config.toml", "environment.json", "metrics.jsonl", "predictions.csv", "result.json", "split.csv"}
    for file in (tmp_path / "runs").rglob("*"):
        if file.is_file() and file.name not in needed:
            file.unlink()
    shutil.rmtree(tmp_path / "results")
    page, count = grid()
    assert (page.read_text(), count) == (text, 0)


def test_a_page_names_commits_in_short(grid: Grid, tmp_path: Path) -> None:
    commits = ["0123456789abcdef", "0123456789abcdef+changed", None, "fedcba9876543210"]
    for file, commit in zip(sorted((tmp_path / "runs").rglob("environment.json")), commits, strict=True):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"commit": commit}))
        file.with_name("manifest.json").unlink()
    page, _ = grid()
    rows = [line.split(" | ") for line in page.read_text().splitlines()]
    named = {row[0].removeprefix("| "): row[-1].removesuffix(" |") for row in rows if len(row) > 8}
    assert named["method"] == "commits"
    assert named["baseline"] == "0123456, 0123456+changed"
    assert named["csda, short queue"] == "fedcba9, unknown"


def _set_commit(monkeypatch: pytest.MonkeyPatch, commit: str | None) -> None:
    """The commit that the sources are at: of runs that are trained now, and of those that count."""
    for module in (reproduce, environment):
        monkeypatch.setattr(module, "source_commit", lambda: commit)


def test_a_fresh_table_has_runs_of_one_commit_alone(
    grid: Grid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "results" / "grid"
    now = "fedcba9876543210"
    _set_commit(monkeypatch, now)
    before = {file.name: file.read_bytes() for file in results.iterdir()}
    # A part of it: lines and folders of another commit do not count, and the table of them stays.
    file = tmp_path / "grid.toml"
    where = {"data": None, "runs": tmp_path / "runs", "out": tmp_path / "results"}
    notes = Notes()
    assert reproduce.reproduce([str(file)], reporter=notes, fresh=True, seeds=1, **where) == []
    assert notes.notes[0] == "grid: 4 runs, 2 of them to train"
    assert "grid: 2 of 4 runs are of commit fedcba9" in notes.notes[-1]
    assert {file.name: file.read_bytes() for file in results.iterdir()} == before
    # The rest; then nothing. Where folders of either commit would do, it is the newer.
    assert grid(fresh=True)[1] == 2
    assert {line["commit"] for line in _read(results / "runs.csv")} == {now}
    assert grid(fresh=True)[1] == grid()[1] == 0
    assert {line["commit"] for line in _read(results / "runs.csv")} == {now}
    shutil.rmtree(tmp_path / "runs")
    assert grid(fresh=True)[1] == 0
    _set_commit(monkeypatch, "0123456789abcdef")
    assert grid(fresh=True, out=tmp_path / "elsewhere")[1] == 4


@pytest.mark.parametrize(("commit", "why"), [(None, "CSDA_COMMIT"), ("fedcba9876+changed", "commit the changes first")])
def test_fresh_needs_a_commit(commit: str | None, why: str, grid: Grid, monkeypatch: pytest.MonkeyPatch) -> None:
    _set_commit(monkeypatch, commit)
    with pytest.raises(RunError, match=why):
        grid(fresh=True)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("confusion", "figure.svg"), ("temperature", "figure.svg"), ("epochs", "figure.svg"), ("examples", "figure.png")],
)
def test_a_figure_is_drawn_from_the_folders(kind: str, name: str, grid: Grid, tmp_path: Path) -> None:
    head, _, csda_row = EXPERIMENT.split("[[rows]]")
    text = f"{head}[[rows]]{csda_row}".replace("title", f'figure = "{kind}"\ntitle', 1)
    page, count = grid(text, "fig")
    assert count == 0
    assert "| csda, short queue |" in page.read_text()
    assert 1000 < (tmp_path / "results" / "fig" / name).stat().st_size < 500_000
    if kind == "epochs":
        lines = _read(tmp_path / "results" / "fig" / "epochs.csv")
        assert [line["epoch"] for line in lines] == ["1", "2"]
        assert {(line["method"], line["labels"], line["seeds"]) for line in lines} == {("csda, short queue", "21", "2")}
        runs = [file.read_text().splitlines() for file in (tmp_path / "runs").rglob("csda*/metrics.jsonl")]
        expected = sum(json.loads(run[1])["test_auc"] for run in runs) / 2
        assert float(lines[1]["test_auc"]) == pytest.approx(expected, abs=1e-6)
        guesses = _read(tmp_path / "results" / "fig" / "guesses.csv")
        assert {(line["method"], line["epoch"], line["seeds"]) for line in guesses} == {("csda, short queue", "2", "2")}
    shutil.rmtree(tmp_path / "runs")
    with pytest.raises(RunError, match="no run of it has finished"):
        grid(text, "fig", only_finished=True)


def test_data_is_known_by_its_content(tiny_images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two folders of one name with other images are two sets; a copy under another name is the same."""
    monkeypatch.setattr(reproduce, "_train_all", _train_here)
    head, baseline, _ = EXPERIMENT.split("[[rows]]")
    text = f"{head}[[rows]]{baseline}".replace("[0, 1]", "[0]")

    def count(data: Path) -> int:
        return _reproduce(tmp_path, text, "grid", data=str(data))[1]

    hospitals = [tmp_path / name / "images" for name in ("a", "b", "c")]
    for folder in (*hospitals, tmp_path / "elsewhere"):
        shutil.copytree(tiny_images, folder)
    Image.new("RGB", (32, 32), "salmon").save(hospitals[1] / "common" / "00.png")
    (hospitals[2] / "rare" / "00.png").rename(hospitals[2] / "common" / "99.png")
    assert [count(folder) for folder in (*hospitals, tmp_path / "elsewhere")] == [1, 1, 1, 0]
    (line,) = _read(tmp_path / "results" / "grid" / "runs.csv")
    shutil.rmtree(tmp_path / "runs")
    assert [count(folder) for folder in (hospitals[0], hospitals[1])] == [0, 1]
    (other,) = _read(tmp_path / "results" / "grid" / "runs.csv")
    assert float(other["seconds"]) != float(line["seconds"])


def test_a_table_is_written_again_without_its_images(
    tiny_images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reproduce, "_train_all", _train_here)
    text = EXPERIMENT.replace("[0, 1]", "[0]")
    shutil.copytree(tiny_images, tmp_path / "images")
    page, _ = _reproduce(tmp_path, text, "grid", data=str(tmp_path / "images"))
    before = page.read_text()
    shutil.rmtree(tmp_path / "images")
    page.unlink()
    assert (
        _reproduce(tmp_path, text, "grid", data=str(tmp_path / "images"), only_finished=True)[0].read_text() == before
    )
    with pytest.raises(DataError, match="--data"):
        _reproduce(tmp_path, text, "grid", data=str(tmp_path / "images"))


PRESETS = EXPERIMENT.replace('title = "csda, short queue"\nsettings = { capacity = 8 }', 'preset = "default"').replace(
    "[settings]", "[settings]\nimage_size = 32"
)


def test_a_table_of_two_machines_has_the_rows_of_both(grid: Grid, tmp_path: Path) -> None:
    """One trains the rows of a preset, the other the rest; two files of the second bring its rows to the first."""
    text = PRESETS.replace('method = "csda"', 'method = "baseline"')
    _, here = grid(text, "presets", preset="quick")
    other = {"runs": tmp_path / "other runs", "out": tmp_path / "other results"}
    page, there = grid(text, "presets", preset="default", **other)
    assert (here, there) == (0, 2)  # those of `quick` are rows of the first grid
    assert "- baseline, 21 labels, split random: seeds 0, 1" in page.read_text()
    carried = tmp_path / "results" / "carried"
    carried.mkdir()
    for name in ("runs.csv", "meta.json"):
        shutil.copy(tmp_path / "other results" / "presets" / name, carried)
    shutil.rmtree(tmp_path / "runs")
    shutil.rmtree(tmp_path / "other runs")
    page, _ = grid(text, "presets", only_finished=True)
    assert "Missing" not in page.read_text()
    results = tmp_path / "results" / "presets"
    summary, lines = _read(results / "summary.csv"), _read(results / "runs.csv")
    assert tuple(summary[0]) == ("method", "preset", *COLUMNS[1:])
    assert [(line["method"], line["preset"], line["seeds"]) for line in summary] == [
        ("baseline", "quick", "2"),
        ("baseline", "default", "2"),
    ]
    assert [(line["method"], line["preset"], line["seed"]) for line in lines] == [
        ("baseline", preset, seed) for preset in ("quick", "default") for seed in "01"
    ]
    (gap,) = _read(results / "gaps.csv")
    assert (gap["method"], gap["reference"]) == ("baseline, default", "baseline")
    assert float(gap["auc_gap"]) == pytest.approx(
        float(summary[1]["auc_mean"]) - float(summary[0]["auc_mean"]), abs=1e-5
    )
    shutil.rmtree(carried)
    assert "Missing" not in grid(text, "presets", only_finished=True)[0].read_text()


CASES = """
[splits.a]
data = "a"
labels = "15"

[splits.b]
data = "b"
labels = "50%"
"""


def test_a_grid_over_several_sets_has_their_mean(
    tiny_images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reproduce, "_train_all", _train_here)
    sets = tmp_path / "sets"
    for name in ("a", "b"):
        shutil.copytree(tiny_images, sets / name)
    (sets / "b" / "rare").rename(sets / "b" / "seldom")
    text = EXPERIMENT.replace('labels = ["21"]\n', "").replace("[[rows]]", f"{CASES}\n[[rows]]", 1)
    page, count = _reproduce(tmp_path, text, "cases", data=str(sets))
    assert count == 2 * 2 * 2
    results = tmp_path / "results" / "cases"
    summary, gaps = _read(results / "summary.csv"), _read(results / "gaps.csv")
    assert [(line["method"], line["labels"], line["split"]) for line in summary] == [
        (method, *case) for method in ("baseline", "csda, short queue") for case in (("15", "a"), ("50%", "b"))
    ]
    assert [(gap["labels"], gap["split"], gap["seeds"]) for gap in gaps] == [
        ("15", "a", "2"),
        ("50%", "b", "2"),
        ("all", "all", "2"),
    ]
    assert float(gaps[2]["auc_gap"]) == pytest.approx(mean(float(gap["auc_gap"]) for gap in gaps[:2]), abs=1e-5)
    assert "## Mean over splits" in page.read_text()
    classes = {
        line["split"]: {name for name in line if name.startswith("recall_") and line[name]}
        for line in _read(results / "runs.csv")
    }
    assert classes["a"] - classes["b"] == {"recall_rare"}
    # Lines alone are enough, with the images and without.
    before = {file.name: file.read_bytes() for file in results.iterdir()}
    shutil.rmtree(tmp_path / "runs")
    assert _reproduce(tmp_path, text, "cases", data=str(sets))[1] == 0
    assert {file.name: file.read_bytes() for file in results.iterdir()} == before
    shutil.rmtree(sets)
    assert _reproduce(tmp_path, text, "cases", data=str(sets), only_finished=True)[1] == 0
    assert {file.name: file.read_bytes() for file in results.iterdir()} == before


@pytest.mark.parametrize("labels", ['labels = ["21"]\n', ""])
def test_labels_stand_once(labels: str, tmp_path: Path) -> None:
    """For all splits or in each of them, not in both places or in some."""
    cases = CASES if labels else CASES.replace('labels = "15"\n', "")
    file = tmp_path / "grid.toml"
    file.write_text(EXPERIMENT.replace('labels = ["21"]\n', labels).replace("[[rows]]", f"{cases}\n[[rows]]", 1))
    with pytest.raises(
        ConfigError, match=r"grid\.toml: splits = .* give labels once for all splits, or in each of them"
    ):
        read_experiment(str(file))


def test_a_failing_run_is_named(tmp_path: Path) -> None:
    cell = reproduce.Cell("x", "baseline", "10", "random", 0, tmp_path / "x", str(tmp_path / "none"), "quick", {})
    with pytest.raises(CsdaError, match="x: "):
        reproduce._train_all([cell], "processes", 1, 1, None, Reporter())


EXPERIMENTS = sorted(HERE.glob("*.toml"))


def _anything(split: str, config: RunConfig) -> dict[str, str]:
    """Contents of data that nobody looks at."""
    return {"data": "0" * 16}


@pytest.mark.parametrize("file", EXPERIMENTS, ids=lambda file: file.stem)
def test_every_run_of_every_experiment_has_a_configuration(file: Path, tmp_path: Path) -> None:
    stem, experiment = read_experiment(str(file))
    variants = [
        experiment,
        *(experiment.model_copy(update=each.model_dump(exclude_none=True)) for each in experiment.on.values()),
    ]
    for variant in variants:
        cells = reproduce.list_cells(variant, tmp_path, variant.data, _anything)
        names = [(cell.title, cell.labels, cell.split, cell.seed) for cell in cells]
        assert len(set(names)) == len(names)
        assert len({cell.folder for cell in cells}) == len(cells)
        for cell in cells:
            Budget.parse(cell.labels)
            assert cell.config.seed == cell.seed
    if stem.startswith(("table", "fig")):
        assert re.match(
            rf"{stem} \((Table|Figure) {int(stem[-1]) + stem.startswith('table')} in print\)", experiment.title
        )


def test_table1_is_the_grid_of_the_paper() -> None:
    _, experiment = read_experiment(str(EXPERIMENTS[0].parent / "table1.toml"))
    cells = reproduce.list_cells(experiment, Path("runs"), "ham10000", _anything)
    assert len(cells) == 7 * 5 * 5
    assert cells[0].config.split == "ham10000/splits_neighbor_matching"


def _make_ham10000(root: Path) -> Path:
    """280 images of seven classes, two a lesion, with lists; the other image of seven test lesions is in training."""
    classes = ("mel", "nv", "bcc", "akiec", "bkl", "df", "vasc")
    images = [f"ISIC_{number:07d}" for number in range(280)]
    lists = root / "splits_neighbor_matching"
    lists.mkdir(parents=True)
    (root / "HAM10000_images_part_1").mkdir()
    rows = []
    for number, image in enumerate(images):
        shade = (30 * (number % 7) + 20, 90, number % 200)
        Image.new("RGB", (8, 8), shade).save(root / "HAM10000_images_part_1" / f"{image}.jpg")
        rows.append(f"HAM_{number // 14 * 7 + number % 7},{image},{classes[number % 7]},histo,60.0,male,back")
    head = "lesion_id,image_id,dx,dx_type,age,sex,localization"
    (root / "HAM10000_metadata.csv").write_text("\n".join([head, *rows, ""]))
    for name, chosen in (("Test", range(49)), ("Val", range(56, 70)), ("Train350", range(70, 140))):
        flags = [" ".join("1" if number % 7 == k else "0" for k in range(7)) for number in chosen]
        text = "".join(f"{images[number]}.jpg  {row} \n" for number, row in zip(chosen, flags, strict=True))
        (lists / f"{name}.txt").write_text(text)
    return root


def test_tables_together_train_what_they_share_once(
    grid: Grid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tables with a new row of the same runs, and one of the first table that is known already."""
    launched: list[str] = []
    monkeypatch.setattr(reproduce, "_train_all", lambda cells, *options: launched.extend(c.folder.name for c in cells))
    rows = '\n[[rows]]\nmethod = "baseline"\ntitle = "brighter"\nsettings = { lr = 0.02 }\n'
    files = []
    for name in ("first", "second"):
        files.append(tmp_path / f"{name}.toml")
        files[-1].write_text(EXPERIMENT + rows)
    where = {"data": None, "runs": tmp_path / "runs", "out": tmp_path / "results"}
    pages = reproduce.reproduce([str(file) for file in files], reporter=Reporter(), **where)
    assert [page.relative_to(tmp_path / "results") for page in pages] == [Path("first/page.md"), Path("second/page.md")]
    assert len(launched) == len(set(launched)) == 2


def test_table1_runs_on_the_lists_and_draws_what_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproduce, "_train_all", _train_here)
    text = (EXPERIMENTS[0].parent / "table1.toml").read_text()
    head, *rows = text.split("[[rows]]")
    two = "[[rows]]".join([head, *(row for row in rows if '"baseline"' in row or '"csda"' in row)])
    sizes = {"epochs": 2, "steps_per_epoch": 1, "image_size": 32, "batch_size": 8, "unlabeled_batch_size": 8}
    page, count = _reproduce(
        tmp_path,
        two,
        "table1",
        data=str(_make_ham10000(tmp_path / "ham10000")),
        labels=["175"],
        seeds=2,
        overrides=sizes | {"device": "cpu", "checkpoint_seconds": 1000.0},
    )
    assert count == 4
    lines = _read(tmp_path / "results" / "table1" / "runs.csv")
    assert {(line["labels"], line["split"]) for line in lines} == {("175", "nm")}
    assert len({line["images"] for line in lines}) == 1
    assert all(float(line["auc_unseen"]) > 0 for line in lines)
    folder = min((tmp_path / "runs").glob("ham10000_*/*"))
    parts = Counter(row.split for row in Run(folder).split)
    assert parts == {"labeled": 175, "unlabeled": 280 - 175 - 49 - 14, "val": 14, "test": 49}
    summary = _read(tmp_path / "results" / "table1" / "summary.csv")
    assert [(line["method"], line["paper_auc"], line["paper_mca"]) for line in summary] == [
        ("baseline", "0.688", "0.2865"),
        ("csda", "0.7131", "0.3102"),
    ]
    assert "table1 (Table 2 in print)" in page.read_text()


def test_lists_are_looked_for_beside_the_images(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("Path,Sex,Age,Frontal/Lateral\n")
    _, variant = choose_variant(*read_experiment(str(EXPERIMENTS[0].parent / "table6.toml")), str(tmp_path))
    cell = reproduce.list_cells(variant, tmp_path, str(tmp_path), _anything)[0]
    assert cell.config.split == str(tmp_path / "splits_latent_mixing")


def test_missing_data_is_said_before_anything_is_trained(tmp_path: Path) -> None:
    file = tmp_path / "grid.toml"
    file.write_text(EXPERIMENT)
    with pytest.raises(DataError, match="--data"):
        reproduce.reproduce(
            [str(file)], data=str(tmp_path / "none"), runs=tmp_path, out=tmp_path, jobs=1, reporter=Reporter()
        )
