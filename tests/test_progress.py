"""Bars where a person watches, plain lines in logs."""

from __future__ import annotations

import io
import os
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

from csda.progress import BarReporter, LogReporter, choose_reporter, format_duration
from tiny import train_tiny

ROW = {"epoch": 2, "loss": 0.5, "val_auc": 0.81234, "val_mca": 0.4, "test_auc": None, "lr": 0.1, "seconds": 1.25}


def _terminal() -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=True, width=100, color_system=None), file


def _visible(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def test_bars_show_running_figures_and_time_left(tiny_images: Path, tmp_path: Path) -> None:
    console, file = _terminal()
    run = train_tiny(tiny_images, tmp_path / "run", reporter=BarReporter(console))
    shown = _visible(file.getvalue())
    last = run.metrics[-1]
    assert f"AUC {last['val_auc']:.3f}  MCA {last['val_mca']:.3f}" in shown
    assert "pixels" in shown
    assert re.search(r"training .*━.* 100% 0:00:00", shown)
    assert "No GPU: preset quick, 3 epochs of 4 steps" in shown


def test_bars_of_a_second_training_begin_anew() -> None:
    console, file = _terminal()
    reporter = BarReporter(console)
    for epochs in (2, 5):
        with reporter:
            reporter.begin(epochs, 10, 1)
            assert [task.total for task in reporter.progress.tasks] == [epochs * 10]
            assert reporter.progress.tasks[0].completed == 10
            for _ in range(7):
                reporter.step()
            reporter.epoch(ROW)
            assert reporter.progress.tasks[0].completed == 17
    assert "AUC 0.812  MCA 0.400" in _visible(file.getvalue())


def test_notes_are_printed_as_they_are() -> None:
    console, file = _terminal()
    with BarReporter(console) as reporter:
        reporter.note("3 of [12] images: /a/b[red].png")
    assert "3 of [12] images: /a/b[red].png" in _visible(file.getvalue())


def test_a_log_has_one_plain_line_an_epoch(
    tiny_images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_tiny(tiny_images, tmp_path / "run", reporter=LogReporter())
    output, errors = capsys.readouterr()
    assert errors == ""
    lines = output.splitlines()
    assert lines[0].startswith("only 6 validation images choose the epoch")
    assert lines[1].startswith("No GPU: ")
    for number, line in enumerate(lines[2:], start=1):
        assert re.fullmatch(rf"epoch {number}/3  loss \d\.\d{{4}}  val_auc .*  val_mca .* \d+\.\d s", line), line
    assert len(lines) == 5
    assert "\x1b" not in output
    assert "\r" not in output


def test_figures_that_are_not_defined_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = LogReporter()
    reporter.begin(3, 10, 0)
    reporter.epoch(ROW | {"val_mca": None})
    assert capsys.readouterr().out == "epoch 2/3  loss 0.5000  val_auc 0.8123  1.2 s\n"


def test_bars_need_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.openpty()
    with os.fdopen(ours, "rb", 0), os.fdopen(theirs, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        assert isinstance(choose_reporter(quiet=False), BarReporter)
        assert isinstance(choose_reporter(quiet=True), LogReporter)
        patch.setattr(sys, "stderr", io.StringIO())
        assert isinstance(choose_reporter(quiet=False), LogReporter)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "1 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (80, "1 min 20 s"),
        (3599.9, "1 h 0 min"),
        (9000, "2 h 30 min"),
    ],
)
def test_durations_have_two_units(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
