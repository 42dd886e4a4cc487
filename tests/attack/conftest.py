"""The command line, for all attacks that run in this process."""

from __future__ import annotations

import sys

import pytest

from commands import Command
from csda.cli import main


@pytest.fixture
def csda(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command line in this process: an exception that it does not explain is one here, too."""
    monkeypatch.setenv("COLUMNS", "200")

    def call(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["csda", *map(str, words)])
        code = 0
        try:
            main()
        except SystemExit as ending:
            code = int(ending.code or 0)
        return code, *capsys.readouterr()

    return call
