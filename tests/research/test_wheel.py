"""Grids and benchmarks work from an installed wheel, away from the sources."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package as its wheel has it."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    build = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    (folder / "built").mkdir()
    made = subprocess.run(
        [sys.executable, "-c", build, "built"], cwd=folder, capture_output=True, text=True, check=True
    )
    with zipfile.ZipFile(folder / "built" / made.stdout.split()[-1]) as wheel:
        wheel.extractall(folder / "site")
    return folder / "site"


def _run(site: Path, folder: Path, *words: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(site), "CSDA_COMMIT": "0123456"}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_table_is_found_again(site: Path, tmp_path: Path) -> None:
    said = _run(site, tmp_path, "-c", "import csda; print(csda.__file__)")
    assert Path(said.strip()).is_relative_to(site)
    shutil.copytree(ROOT / "results" / "demo", tmp_path / "results" / "demo")
    page = tmp_path / "results" / "demo" / "page.md"
    page.unlink()
    said = _run(site, tmp_path, "-m", "csda", "reproduce", "demo", "--only-finished")
    assert said.splitlines() == ["demo: 40 runs, 0 of them to train", "results/demo/page.md"]
    assert page.read_text(encoding="utf-8") == (ROOT / "results" / "demo" / "page.md").read_text(encoding="utf-8")


def test_a_table_is_trained_and_a_step_is_timed(site: Path, tiny_images: Path, tmp_path: Path) -> None:
    (tmp_path / "grid.toml").write_text(
        'title = "One run"\nlabels = ["21"]\nseeds = [0]\npreset = "quick"\n[[rows]]\nmethod = "baseline"\n'
    )
    small = ["--set=batch_size=8", "--set=unlabeled_batch_size=8"]
    short = ["--set=epochs=1", "--set=warm_up_epochs=1", "--set=steps_per_epoch=1", "--set=tensorboard=false"]
    _run(site, tmp_path, "-m", "csda", "reproduce", "grid.toml", f"--data={tiny_images}", "--fresh", *small, *short)
    about = json.loads((tmp_path / "results" / "grid" / "meta.json").read_text(encoding="utf-8"))
    assert (about["runs"], about["commit"]) == (1, ["0123456"])
    few = ["--rounds=1", "--seconds=0"]
    _run(site, tmp_path, "-m", "csda", "bench", "scale", "--preset=quick", *small, *few, "--out=step.json")
    assert json.loads((tmp_path / "step.json").read_text(encoding="utf-8"))["commit"] == "0123456"
