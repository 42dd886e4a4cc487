"""Imports point downward only, and cheap commands stay cheap."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import csda

LAYERS = (
    ("errors", "arguments", "alignment", "losses", "metrics", "progress", "replay"),
    ("distributed",),
    ("fast",),
    ("marginals", "condition_queue", "models", "data", "config"),
    ("methods", "evaluate", "runs", "engine"),
    ("trainer",),
    ("training", "predict", "export", "report"),
    ("research",),
    ("demo", "review"),
    ("cli",),
    ("__main__",),
)
ROOT = Path(csda.__file__).parent
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def _modules() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def _unit(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def _imported_units(path: Path) -> set[str]:
    """The modules and packages of csda that a file imports anywhere, also inside functions."""
    units = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "csda":
            units |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("csda."):
            units.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            units |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("csda.")}
    return units


@pytest.mark.parametrize("path", _modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_downward(path: Path) -> None:
    unit = _unit(path)
    assert unit in LEVEL, f"{unit} belongs to no layer"
    for imported in _imported_units(path) - {unit}:
        assert LEVEL[imported] < LEVEL[unit], f"{unit} imports {imported}, which is not below it"


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import csda", "torch"),
        ("import csda; assert {'ClassMarginals', 'VariableConditionQueue', 'load', 'train'} <= {*dir(csda)}", "torch"),
        ("import csda.cli", "torch"),
        ("import csda.metrics", "torch"),
        ("import csda.report", "torch"),
        ("import csda.research.grid, csda.research.paper", "torch"),
        ("import csda.research.experiments", "torch"),
        ("import csda.runs", "torch"),
        ("import csda.data", "torch"),
    ],
)
def test_heavy_imports_are_lazy(statement: str, absent: str) -> None:
    code = f"import sys; {statement}; sys.exit({absent!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_help_answers_at_once() -> None:
    """By the processor's time, which other processes on the machine do not lengthen as they do the clock's."""
    durations = []
    for _ in range(3):
        before = os.times()
        subprocess.run([sys.executable, "-m", "csda", "--help"], check=True, capture_output=True)
        after = os.times()
        durations.append(sum(after[2:4]) - sum(before[2:4]))
    assert min(durations) < 0.5
