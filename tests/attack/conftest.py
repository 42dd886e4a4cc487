"""The command line, for all attacks that run in this process, and a network for those that train many times."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from commands import Command
from csda.cli import main
from csda.models.backbones import BACKBONES
from tiny import small


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


@pytest.fixture(scope="module")
def small_network() -> Iterator[None]:
    """The backbone `small`, for as long as a module of tests: others have a case for each backbone of the package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BACKBONES, "small", small)
        yield
