"""Pages of docs/how-to with numbered steps, which tests follow to the letter in a copy of the sources."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
STEP = re.compile(r"^## (\d)\. ", re.MULTILINE)
FENCE = re.compile(r"^```(?:python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SMALL = [
    *("epochs=2", "warm_up_epochs=1", "steps_per_epoch=2", "batch_size=8", "unlabeled_batch_size=8"),
    *("threads=1", "tensorboard=false"),
]


def read_steps(page: str) -> dict[int, tuple[str, list[str]]]:
    """The text of each step of a page and its blocks of code."""
    _, *parts = STEP.split((ROOT / "docs" / "how-to" / page).read_text(encoding="utf-8"))
    return {int(number): (text, FENCE.findall(text)) for number, text in zip(parts[::2], parts[1::2], strict=True)}


def named_file(text: str) -> str:
    """The file that a step says its code goes into."""
    match = re.search(r"In `((?:src|tests)/[\w/]+\.py)`", text)
    assert match is not None
    return match[1]


def copy_sources(folder: Path) -> Path:
    """A copy of what the steps touch."""
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("src/csda", "tests/reference", "docs/reference"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    (folder / "tests/methods").mkdir()
    for file in ("tests/conftest.py", "tests/test_method_contract.py", "pyproject.toml"):
        shutil.copy(ROOT / file, folder / file)
    return folder


def insert_before(file: Path, *places: tuple[str, str]) -> None:
    """Write lines in front of anchors, each of which stands once in a file."""
    source = file.read_text(encoding="utf-8")
    for anchor, lines in places:
        assert source.count(anchor) == 1, anchor
        source = source.replace(anchor, lines + anchor)
    file.write_text(source, encoding="utf-8")


def run(command: list[str], folder: Path, *, code: int = 0) -> str:
    environment = os.environ | {"PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr
