"""Grids, benchmarks and the demonstration work from an installed wheel, away from the sources."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    build = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    (folder / "built").mkdir()
    made = subprocess.run(
        [sys.executable, "-c", build, "built"], cwd=folder, capture_output=True, text=True, check=True
    )
    return folder / "built" / made.stdout.split()[-1]


@pytest.fixture(scope="module")
def site(wheel: Path) -> Path:
    """A folder with the package as its wheel has it."""
    folder = wheel.parent.parent / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


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


def _needed(name: str, found: dict[str, Distribution]) -> None:
    """A package and all that it declares to need, without extras."""
    if name in found:
        return
    found[name] = distribution(name)
    for text in found[name].requires or []:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            _needed(requirement.name.lower().replace("_", "-"), found)


def test_an_environment_with_what_the_wheel_declares_runs_the_demonstration(wheel: Path, tmp_path: Path) -> None:
    """Nothing else that is installed here can be found from there."""
    venv.create(tmp_path / "empty", with_pip=False, symlinks=True)
    python = tmp_path / "empty" / "bin" / "python"
    (packages,) = (tmp_path / "empty" / "lib").glob("python*/site-packages")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True)
    needed: dict[str, Distribution] = {}
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode().splitlines()
    for line in lines:
        if line.startswith("Requires-Dist: ") and "extra ==" not in line:
            _needed(Requirement(line.partition(": ")[2]).name.lower(), needed)
    assert "torch" in needed
    assert "ray" not in needed
    for package in needed.values():
        for top in {Path(file).parts[0] for file in package.files or [] if ".." not in Path(file).parts}:
            if not (packages / top).exists():
                (packages / top).symlink_to(Path(str(package.locate_file(top))))
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    said = run(str(python), "-c", "import csda, importlib.util as u; print(csda.__file__, u.find_spec('ray'))")
    assert said.split() == [str(packages / "csda" / "__init__.py"), "None"]
    program = str(tmp_path / "empty" / "bin" / "csda")
    assert "demo" in run(program, "--help")
    short = ["epochs=2", "warm_up_epochs=1", "steps_per_epoch=2", "batch_size=8", "unlabeled_batch_size=8"]
    said = run(program, "demo", "--quiet", *(word for each in short for word in ("--set", each)))
    assert "Report: demo/report.html" in said
    assert (tmp_path / "demo" / "report.html").is_file()
