"""The command line as people use it: what it prints, and how it says what went wrong."""

from __future__ import annotations

import csv
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from csda import cli, metrics
from csda.presets import configure
from csda.runs import Run
from tiny import arguments

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def csda(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """Runs a command as the shell would; exit code, output, errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["csda", *map(str, words)])
        with pytest.raises(SystemExit) as ending:
            cli.main()
        output, errors = capsys.readouterr()
        return int(ending.value.code or 0), output, errors

    return run


def test_train_prints_epochs_a_table_and_where_the_report_is(csda: Command, tiny_images: Path, tmp_path: Path) -> None:
    code, output, errors = csda(*arguments(tiny_images, tmp_path / "run", {}, "--quiet", "--seed", "3"))
    assert (code, errors) == (0, "")
    assert "\nNo GPU: preset quick, 3 epochs of 4 steps on 32×32 images, about " in output
    assert len(re.findall(r"^epoch \d/3 ", output, re.M)) == 3
    assert f"Report: {tmp_path / 'run' / 'report.html'}" in output
    assert "\x1b" not in output
    run = Run(tmp_path / "run")
    assert run.settings.seed == 3
    assert "--seed 3" in run.environment["command"]
    assert (run.folder / "report.html").is_file()
    assert not (run.folder / "tensorboard").exists()


def test_without_out_the_run_gets_a_folder_under_runs(csda: Command, tiny_images: Path, tmp_path: Path) -> None:
    code, output, _ = csda(*arguments(tiny_images, None, {"epochs": 2, "tensorboard": "false"}))
    assert code == 0
    assert "the run is in runs/images-csda-0" in output
    assert Run(tmp_path / "runs" / "images-csda-0").finished


def test_evaluate_prints_each_class_with_intervals(csda: Command, tiny_run: Run) -> None:
    code, output, errors = csda("evaluate", tiny_run.folder)
    assert (code, errors) == (0, "")
    for name in tiny_run.classes:
        assert re.search(rf"^ *{name} +\d+ +\d+ few .*\[\.\d\d, (1|\.\d\d)\]", output, re.M)
    probs, labels = tiny_run.predictions.part("test")
    mean = next(line for line in output.splitlines() if line.strip().startswith("mean"))
    assert f"{metrics.mca(probs, labels):.3f}".replace("0.", ".") in mean
    assert f"{metrics.auc(probs, labels):.3f}".replace("0.", ".") in mean
    assert "95 % intervals over these images" in output


def test_predict_writes_a_row_an_image(csda: Command, tiny_run: Run, tiny_images: Path, tmp_path: Path) -> None:
    one, folder = tiny_images / "rare" / "00.png", tiny_images / "common"
    code, printed, _ = csda("predict", tiny_run.folder, one, folder)
    assert code == 0
    rows = list(csv.reader(printed.splitlines()))
    assert rows[0] == ["image", "predicted", "confidence", "unsure", "set", *tiny_run.classes, "error"]
    assert [row[0] for row in rows[1:]] == [str(one), *(str(path) for path in sorted(folder.iterdir()))]
    for row in rows[1:]:
        probs = np.array(row[5:-1], dtype=float)
        assert row[1] == tiny_run.classes[probs.argmax()]
        assert float(row[2]) == probs.max()
        assert probs.sum() == pytest.approx(1, abs=1e-3)
    code, message, _ = csda("predict", tiny_run.folder, one, folder, "--out", tmp_path / "table.csv")
    assert (code, message) == (0, f"31 predictions in {tmp_path / 'table.csv'}\n")
    assert (tmp_path / "table.csv").read_text() == printed


def test_methods_are_listed(csda: Command) -> None:
    code, output, _ = csda("methods")
    assert code == 0
    for name in ("csda", "baseline", "upper-bound"):
        assert name in output
    code, output, _ = csda("methods", "csda")
    assert code == 0
    assert "capacity" in output
    assert "teacher_mode" not in output
    code, output, _ = csda("methods", "csda", "--all")
    assert code == 0
    assert "teacher_mode" in output
    code, output, _ = csda("methods", "csda", "--preset", "quick", "--set", "epochs=4")
    assert code == 0
    shown = {line.split()[0]: line.split()[1] for line in output.splitlines() if len(line.split()) > 1}
    assert (shown["epochs"], shown["warm_up_epochs"], shown["image_size"]) == ("4", "1", "32")
    code, _, errors = csda("methods", "cdsa")
    assert code == 2
    assert "method = 'cdsa' is unknown; choose one of" in errors


def test_settings_are_shown_as_a_training_on_images_here_would_have_them(csda: Command, tiny_images: Path) -> None:
    here = configure({"data": str(tiny_images), "method": "csda"})
    _, output, _ = csda("methods", "csda")
    assert f"csda with the preset {here.preset}, as here" in output
    for name in ("image_size", "epochs", "labels"):
        value = getattr(here, name)
        assert re.search(rf"^{name} +{'–' if value is None else value} ", output, re.M), name


def _refused(result: tuple[int, str, str], *expected: str) -> str:
    code, output, errors = result
    assert code == 2, (output, errors)
    assert errors.startswith("csda: ")
    assert "Traceback" not in errors
    for text in expected:
        assert text in errors
    return errors


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--set", "epocs=3"], "unknown setting 'epocs' for method 'self-train': did you mean epochs"),
        (["--set", "zzz=3"], "`csda methods self-train --all` lists all settings"),
        (["--set", "epochs=0"], "epochs = 0: give at least 1"),
        (["--set", "epochs=many"], "epochs = 'many'"),
        (["--set", "dropout=1.5"], "dropout = 1.5"),
        (["--set", "lr=nan"], "lr = nan"),
        (["--set", "epochs"], "--set 'epochs' is not of the form key=value"),
        (["--set", "seed=1", "--set", "seed=2"], "seed is set twice"),
        (["--seed", "1", "--set", "seed=2"], "seed is given twice"),
        (["--seed", "-1"], "seed = -1"),
        (["--method", "cdsa"], "method = 'cdsa' is unknown; choose one of"),
        (["--preset", "fast"], "preset = 'fast' is unknown; choose one of paper, default, strong, features, quick"),
        (["--source", "radiology"], "source = 'radiology' is unknown; choose one of"),
        (["--set", "device=tpu"], "device = 'tpu' is unknown; give auto, cpu or cuda"),
        (["--labels", "100000"], "100000"),
        (
            ["--labels", "few"],
            "`few` is not a number of images; write 300, 10% (up to 100%), 20/class or 10% of groups",
        ),
        (["--split", "absent.csv"], "absent.csv"),
        (["--resume"], "--resume needs --out"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_message(
    words: list[str], expected: str, csda: Command, tiny_images: Path, tmp_path: Path
) -> None:
    errors = _refused(csda("train", tiny_images, *words), expected)
    assert len(errors.splitlines()) == 1
    assert {entry.name for entry in tmp_path.iterdir()} <= {"cache"}


def test_folders_that_do_not_fit_are_named(csda: Command, tiny_run: Run, tiny_images: Path, tmp_path: Path) -> None:
    _refused(csda("train", "no/such/folder"), "no/such/folder: there is no such folder")
    (tmp_path / "empty").mkdir()
    _refused(csda("train", tmp_path / "empty"), "empty holds no images")
    _refused(csda("train", tiny_images, "--out", tiny_run.folder), f"{tiny_run.folder}: holds a run; give --resume")
    _refused(csda("train", tiny_images, "--out", tiny_images), f"{tiny_images}: not empty, and not a run")
    changed = csda("train", "--out", tiny_run.folder, "--resume", "--set", "epochs=9", "--seed", "2")
    _refused(changed, f"{tiny_run.folder}: begun with other settings: ", "seed: 0 → 2", "epochs: 3 → 9")
    assert not (tmp_path / "runs").exists()


def test_runs_that_are_none_are_named(csda: Command, tiny_run: Run, tiny_images: Path, tmp_path: Path) -> None:
    image = tiny_images / "rare" / "00.png"
    for words in (["evaluate", tmp_path], ["predict", tmp_path, image], ["report", tmp_path]):
        _refused(
            csda(*words), f"{tmp_path}: no config.toml here, so this is not a run folder; give one that `csda train`"
        )
    unfinished = shutil.copytree(tiny_run.folder, tmp_path / "unfinished")
    for name in ("result.json", "predictions.csv", "history.npz"):
        (unfinished / name).unlink()
    for command in ("evaluate", "report"):
        _refused(csda(command, unfinished), f"`csda train --out {unfinished} --resume` continues it")


def test_images_that_cannot_be_read_are_named(csda: Command, tiny_run: Run, tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"no image")
    Image.new("RGB", (8, 8)).save(tmp_path / "good.png")
    (tmp_path / "empty").mkdir()
    run, out = tiny_run.folder, tmp_path / "table.csv"
    _refused(csda("predict", run, "empty", "--out", out), "empty: no images there")
    assert not out.exists()
    names = ["absent.png", "good.png", "broken.png", "good.png"]
    code, printed, said = csda("predict", run, *names)
    assert (code, said.splitlines()[-1]) == (1, "csda: 2 of 4 files could not be used; see the column error")
    header, *rows = csv.reader(printed.splitlines())
    assert header == ["image", "predicted", "confidence", "unsure", "set", *tiny_run.classes, "error"]
    assert [row[0] for row in rows] == names
    assert "absent.png: does not exist" in rows[0][-1]
    assert "broken.png: is not an image in a known format" in rows[2][-1]
    assert not any("".join(row[1:-1]) for row in rows[::2])
    alone = next(csv.reader(csda("predict", run, "good.png")[1].splitlines()[1:]))
    assert rows[1::2] == [alone, alone]
    code, printed, _ = csda("predict", run, *names, "--out", out)
    assert (code, printed, len(out.read_text().splitlines())) == (1, f"2 predictions in {out}\n", 5)


def test_a_name_that_is_not_utf8_keeps_its_row(csda: Command, tiny_run: Run, tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "good.png")
    (tmp_path / "good.png").rename(tmp_path / "good\udcff.png")
    code, printed, _ = csda("predict", tiny_run.folder, "good\udcff.png")
    assert (code, printed.splitlines()[1].split(",")[0]) == (0, r"good\udcff.png")


def test_predict_says_that_a_run_has_not_finished(csda: Command, tiny_run: Run, tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "good.png")
    run = shutil.copytree(tiny_run.folder, tmp_path / "unfinished")
    (run / "result.json").unlink()
    code, printed, said = csda("predict", run, "good.png")
    assert (code, said) == (0, f"csda: {run}: not finished; this is its best model so far\n")
    assert printed == csda("predict", tiny_run.folder, "good.png")[1]


def test_images_and_tables_that_have_no_place_are_named(csda: Command, tiny_run: Run, tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "good.png")
    run = tiny_run.folder
    _refused(csda("predict", run, "good.png", "--out", "good.png/table.csv"), "good.png/table.csv: not a directory")
    _refused(csda("predict", run, "good.png", "--out", "nowhere/table.csv"), "nowhere/table.csv: no such file or dir")


def test_a_loss_that_is_not_finite_is_a_message(csda: Command, tiny_images: Path, tmp_path: Path) -> None:
    words = arguments(tiny_images, tmp_path / "run", {"lr": 100, "tensorboard": "false"})
    _refused(csda(*words), "csda: the loss is not finite in epoch 1; give a lower lr than 100.0")
    assert not (tmp_path / "run" / "result.json").exists()


def test_unknown_options_are_refused(csda: Command) -> None:
    code, _, errors = csda("train", "--epoch", "3")
    assert code == 2
    assert "No such option" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("group", [[], ["data"], ["labels"], ["weights"], ["cache"], ["bench"]])
def test_lists_of_commands_have_whole_sentences(csda: Command, group: list[str]) -> None:
    """What does not fit is cut by the help itself, and ends with three dots."""
    _, output, _ = csda(*group, "--help")
    lines = output.partition("Commands:\n")[2].splitlines()
    assert lines
    assert all(line.endswith(".") and not line.endswith("...") for line in lines)


def test_version(csda: Command) -> None:
    code, output, _ = csda("--version")
    assert code == 0
    assert re.fullmatch(r"csda \d+\.\d+\.\d+\S*\n", output)


def test_data_check_takes_the_settings_of_a_training(csda: Command, tmp_path: Path) -> None:
    for number in range(20):
        Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(tmp_path / f"{number}.png")
    rows = "".join(f"{number}.png,{'ill' if number % 2 else 'well'}\n" for number in range(20))
    (tmp_path / "list.csv").write_text("image,finding\n" + rows)
    code, output, _ = csda("data", "check", tmp_path)
    assert code == 1
    assert "no column `label`" in output
    code, output, _ = csda("data", "check", tmp_path, "--set", "label_column=finding")
    assert code == 0
    assert "Nothing would stop a training." in output
