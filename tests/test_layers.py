"""Imports point downward only, and cheap commands stay cheap."""

from __future__ import annotations

import ast
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import csda
from tiny import COUNTS, arguments, train_tiny

LAYERS = (
    ("errors", "folders"),
    ("arguments", "alignment", "cluster", "environment", "files", "losses", "metrics", "probe"),
    ("config", "progress", "distributed", "examples", "calibration"),
    ("marginals", "condition_queue", "models", "data"),
    ("methods", "evaluate", "runs", "engine", "grad_cam"),
    ("thumbnails", "features", "presets"),
    ("trainer",),
    ("cross_fitting",),
    ("training", "predict", "report"),
    ("inference", "external", "export", "classifier"),
    ("demo", "review"),
    ("cli",),
    ("__main__",),
)
"""The core, lowest first; modules of one layer do not import each other."""

ROOT = Path(csda.__file__).parent
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
TIERS = {"fast": "engine", "research": "cli"}
"""The other tiers, and the one module of the core that imports each, inside functions."""


def _modules(*, tier: str | None = None) -> list[Path]:
    paths = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")
    return [path for path in paths if (_unit(path) == tier if tier else _unit(path) not in TIERS)]


def _unit(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def _imported_units(tree: ast.AST) -> set[str]:
    """The modules and packages of csda that are imported anywhere, also inside functions."""
    units = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "csda":
            units |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("csda."):
            units.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            units |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("csda.")}
    return units


def _imported_at_once(tree: ast.Module) -> set[str]:
    """What is imported when the module is: not inside functions, nor for the type checker alone."""
    outside = [
        node
        for node in tree.body
        if not isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    ]
    return _imported_units(ast.Module(outside, []))


@pytest.mark.parametrize("path", _modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_downward(path: Path) -> None:
    unit, tree = _unit(path), ast.parse(path.read_text())
    assert unit in LEVEL, f"{unit} belongs to no layer"
    for imported in _imported_units(tree) - {unit}:
        if imported in TIERS:
            assert TIERS[imported] == unit, f"{unit} imports the tier {imported}, which {TIERS[imported]} alone may"
            assert imported not in _imported_at_once(tree), f"{unit} imports {imported} outside of functions"
        else:
            assert LEVEL[imported] < LEVEL[unit], f"{unit} imports {imported}, which is not below it"


@pytest.mark.parametrize("path", _modules(tier="fast"), ids=lambda path: str(path.relative_to(ROOT)))
def test_what_is_fast_knows_neither_engine_nor_research(path: Path) -> None:
    for imported in _imported_units(ast.parse(path.read_text())) - {"fast"}:
        assert imported == "methods" or LEVEL[imported] < LEVEL["engine"], f"{path.name} imports {imported}"


def test_no_two_modules_have_the_same_name() -> None:
    """A package is a module, too."""
    paths = [path.parent if path.name == "__init__.py" else path for path in ROOT.rglob("*.py")]
    names = [path.stem for path in paths]
    assert sorted(names) == sorted(set(names))


@pytest.fixture
def core(tmp_path: Path) -> Path:
    """A copy of the package without the other tiers."""
    shutil.copytree(ROOT, tmp_path / "core" / "csda", ignore=shutil.ignore_patterns("__pycache__"))
    for tier in TIERS:
        shutil.rmtree(tmp_path / "core" / "csda" / tier)
    return tmp_path / "core"


def test_the_core_works_alone(core: Path, tiny_images: Path, tmp_path: Path) -> None:
    """Trains, is killed, resumes, evaluates, predicts and reports on the CPU."""

    def csda_alone(*words: str, code: str = "from csda.cli import main; main()") -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": str(core), "COLUMNS": "200"}
        command = [sys.executable, "-c", f"import csda; assert csda.__file__.startswith({str(core)!r}); {code}", *words]
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)

    def training(*more: str, code: str = "from csda.cli import main; main()") -> subprocess.CompletedProcess[str]:
        return csda_alone(*arguments(tiny_images, tmp_path / "run", {"tensorboard": "false"}, *more), code=code)

    stop = """
import os, signal
from csda import trainer
sample = trainer.Trainer.sample
def die(held, epoch, **options):
    if epoch == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return sample(held, epoch, **options)
trainer.Trainer.sample = die
trainer.Trainer._epoch_seconds = lambda held: 1.0
from csda.cli import main
main()
"""
    assert training(code=stop).returncode == -signal.SIGKILL
    resumed = training("--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert "Report:" in resumed.stdout
    whole = train_tiny(tiny_images, tmp_path / "whole")
    for name in ("predictions.csv", "pseudo_labels.csv", "model.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (whole.folder / name).read_bytes(), name
    evaluated = csda_alone("evaluate", "run")
    assert "rare" in evaluated.stdout
    predicted = csda_alone("predict", "run", str(tiny_images / "rare"))
    assert len(predicted.stdout.splitlines()) == 1 + COUNTS["rare"]
    (tmp_path / "run" / "report.html").unlink()
    assert csda_alone("report", "run").returncode == 0
    assert (tmp_path / "run" / "report.html").is_file()
    for command in (["reproduce", "table1"], ["bench", "step"], ["bench", "data", "."], ["bench", "scale"]):
        refused = csda_alone(*command)
        assert refused.returncode == 2
        assert (
            refused.stderr
            == "csda: this command needs csda.research, which is not installed; install the whole package\n"
        )


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import csda", "torch"),
        ("import csda", "matplotlib"),
        ("import csda.cli", "matplotlib"),
        ("from csda.cli import app; app(['--help'], standalone_mode=False)", "torch"),
        ("from csda.cli import app; app(['--help'], standalone_mode=False)", "matplotlib"),
        ("from csda.cli import app; app(['predict', '--help'], standalone_mode=False)", "torch"),
        ("import csda.calibration", "torch"),
        ("import csda; assert {'ClassMarginals', 'load', 'train'} <= {*dir(csda)}", "torch"),
        ("import csda.cli", "torch"),
        ("import csda.metrics", "torch"),
        ("import csda.report", "torch"),
        ("import csda.research.grid, csda.research.paper", "torch"),
        ("import csda.research.experiments", "torch"),
        ("import csda.runs", "torch"),
        ("import csda.data", "torch"),
        ("import csda.training", "sklearn"),
    ],
)
def test_heavy_imports_are_lazy(statement: str, absent: str) -> None:
    code = f"import sys; {statement}; sys.exit({absent!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.DEVNULL).returncode == 0


def test_help_answers_at_once() -> None:
    """By the processor's time, which other processes on the machine do not lengthen as they do the clock's."""
    durations = []
    for _ in range(3):
        before = os.times()
        subprocess.run([sys.executable, "-m", "csda", "--help"], check=True, capture_output=True)
        after = os.times()
        durations.append(sum(after[2:4]) - sum(before[2:4]))
    assert min(durations) < 0.5
