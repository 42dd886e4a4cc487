"""The five steps of docs/how-to/add-a-method.md, followed to the letter in a copy of the sources."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "how-to" / "add-a-method.md"
STEP = re.compile(r"^## (\d)\. ", re.MULTILINE)
FENCE = re.compile(r"^```(?:python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SMALL = (
    "epochs=2 warm_up_epochs=1 steps_per_epoch=2 image_size=32 batch_size=8 unlabeled_batch_size=8 threads=1 "
    "tensorboard=false"
)


def _steps() -> dict[int, tuple[str, list[str]]]:
    """The text of each step and its blocks of code."""
    _, *parts = STEP.split(PAGE.read_text(encoding="utf-8"))
    return {int(number): (text, FENCE.findall(text)) for number, text in zip(parts[::2], parts[1::2], strict=True)}


def _named_file(text: str) -> str:
    """The file that a step says its code goes into."""
    match = re.search(r"In `((?:src|tests)/[\w/]+\.py)`", text)
    assert match is not None
    return match[1]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the steps touch."""
    ignored = shutil.ignore_patterns("__pycache__")
    for folder in ("src/csda", "tests/reference", "docs/reference"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    (tmp_path / "tests/methods").mkdir()
    for file in ("tests/conftest.py", "tests/test_method_contract.py", "pyproject.toml"):
        shutil.copy(ROOT / file, tmp_path / file)
    return tmp_path


def _run(command: list[str], checkout: Path) -> str:
    environment = os.environ | {"PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=checkout, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_five_steps_lead_to_a_trained_method(checkout: Path) -> None:
    steps = _steps()
    assert sorted(steps) == [1, 2, 3, 4, 5]

    text, (code,) = steps[1]
    (checkout / _named_file(text)).write_text(code, encoding="utf-8")

    text, (imports, entry) = steps[2]
    registry = checkout / _named_file(text)
    source = registry.read_text(encoding="utf-8")
    for anchor, lines in (("from csda.methods.neighbor_matching import", imports), ('    "lsse": Entry(', entry)):
        assert source.count(anchor) == 1
        source = source.replace(anchor, lines + anchor)
    registry.write_text(source, encoding="utf-8")

    text, (code,) = steps[3]
    (checkout / _named_file(text)).write_text(code, encoding="utf-8")

    _, (commands,) = steps[4]
    tests, reference = (shlex.split(line) for line in commands.splitlines())
    assert tests[0] == "pytest"
    passed = re.search(r"(\d+) passed", _run(["-m", *tests], checkout))
    assert passed is not None
    assert int(passed[1]) >= 15
    assert reference[0] == "python"
    _run(reference[1:], checkout)
    assert "`mean-teacher`" in (checkout / "docs/reference/settings.md").read_text(encoding="utf-8")

    _, (command,) = steps[5]
    assert command.startswith("csda train ")
    small = [word for setting in SMALL.split() for word in ("--set", setting)]
    _run(["-m", *shlex.split(command), *small, "--out", "run"], checkout)
    settings = (checkout / "run/config.toml").read_text(encoding="utf-8")
    assert 'method = "mean-teacher"' in settings
    assert "consistency = 20" in settings
    assert len((checkout / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()) == 2
