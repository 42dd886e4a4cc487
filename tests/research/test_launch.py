"""Many runs at once: whoever dies takes nobody along, nobody outlives the command, and what comes out is the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from breakable import Breakable, TinyCell
from csda.errors import ConfigError, DataError, RunError
from csda.progress import Reporter
from csda.research.launch import launch
from csda.runs import Run
from csda.training import train
from tiny import LABELS, QUEUE, SETTINGS


def _launch(cells: Sequence[Any], **options: Any) -> tuple[dict[str, Any], list[str]]:
    """What became of each cell, by the name of its folder, and what was said meanwhile."""
    notes: list[str] = []
    outcomes = [(cell.folder.name, outcome) for cell, outcome in launch(cells, note=notes.append, **options)]
    assert len(outcomes) == len(cells)
    return dict(outcomes), notes


def test_whoever_breaks_takes_nobody_along(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    cells = [
        Breakable(tmp_path / "killed", 1),
        Breakable(tmp_path / "whole"),
        Breakable(tmp_path / "killed-always", 9),
        Breakable(tmp_path / "left", 1, "leave"),
        Breakable(tmp_path / "refused", 9, "refuse"),
        Breakable(tmp_path / "raised", 9, "raise"),
        Breakable(tmp_path / "whole-too"),
    ]
    outcomes, notes = _launch(cells, jobs=2)
    for name in ("killed", "whole", "left", "whole-too"):
        assert outcomes[name] == tmp_path / name
    assert isinstance(outcomes["refused"], DataError)
    assert str(outcomes["refused"]) == "no such images"
    assert isinstance(outcomes["killed-always"], RunError)
    assert "failed twice (its process was killed by SIGKILL)" in str(outcomes["killed-always"])
    assert "failed twice (ValueError: the first line)" in str(outcomes["raised"])
    assert sorted(notes) == [
        "killed-always: failed (its process was killed by SIGKILL) and is tried once more",
        "killed: failed (its process was killed by SIGKILL) and is tried once more",
        "left: failed (its process ended with exit code 3) and is tried once more",
        "raised: failed (ValueError: the first line) and is tried once more",
    ]
    attempts = {cell.folder.name: len(cell.attempts) for cell in cells}
    assert attempts == {
        "killed": 2, "whole": 1, "killed-always": 2, "left": 2, "refused": 1, "raised": 2, "whole-too": 1,
    }  # fmt: skip
    assert capfd.readouterr().err.count("Traceback") == 2
    assert len(set(cells[5].attempts)) == 2, "tried again in the process that had gone wrong"


def test_of_runs_that_broke_together_each_is_tried_alone(tmp_path: Path) -> None:
    names = ("guilty", "one", "another")
    cells = [
        Breakable(tmp_path / name, 9 if name == "guilty" else 1, "kill" if name == "guilty" else "sleep", names)
        for name in names
    ]
    outcomes, notes = _launch([*cells, Breakable(tmp_path / "later")], side_by_side=3)
    assert len(notes) == 3
    assert len({cell.attempts[0] for cell in cells}) == 1, "not side by side in one process"
    assert isinstance(outcomes.pop("guilty"), RunError)
    assert outcomes == {name: tmp_path / name for name in ("one", "another", "later")}
    assert (tmp_path / "log").read_text().split() == ["begin", "end"] * 3


@pytest.mark.parametrize("looks", range(4))
def test_after_the_time_given_none_is_begun(looks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often the clock is looked at before the time is over: at the beginning, within a round, between two."""
    notes: list[str] = []
    cells = [Breakable(tmp_path / name) for name in ("one", "two", "three")]
    times = chain([0.0] * (1 + looks), repeat(61.0))
    monkeypatch.setattr("csda.research.launch.time.monotonic", lambda: next(times))
    outcomes = list(launch(cells, minutes=1, note=notes.append))
    begun = [cell for cell in cells if cell.folder.exists()]
    assert begun == cells[: len(begun)]
    assert len(begun) == looks // 2
    assert outcomes == [(cell, cell.folder) for cell in begun]
    assert notes == [f"{3 - len(begun)} runs were not started, because 1 minutes were over"]


def test_a_killed_run_goes_on_from_its_checkpoint(tiny_images: Path, tiny_run: Run, tmp_path: Path) -> None:
    cell = TinyCell(tiny_images, tmp_path / "run", killed_after=2)
    outcomes, notes = _launch([cell])
    assert len(notes) == 1
    assert (tmp_path / "run.epochs").read_text().split() == ["1", "2", "3"]
    for name in ("predictions.csv", "pseudo_labels.csv", "model.safetensors"):
        assert (outcomes["run"].folder / name).read_bytes() == (tiny_run.folder / name).read_bytes(), name


def test_runs_side_by_side_are_the_same_as_one_after_the_other(tiny_images: Path, tmp_path: Path) -> None:
    def cells(where: str) -> list[TinyCell]:
        settings = (("csda", 0), ("csda", 1), ("glm", 0))
        return [TinyCell(tiny_images, tmp_path / where / f"{method}{seed}", method, seed) for method, seed in settings]

    alone, together = cells("alone"), cells("together")
    (tmp_path / "alone").mkdir()
    (tmp_path / "together").mkdir()
    for cell in alone:
        cell.train()
    _, notes = _launch(together, side_by_side=len(together))
    assert notes == []
    for one, other in zip(alone, together, strict=True):
        for name in ("predictions.csv", "pseudo_labels.csv", "model.safetensors"):
            assert (one.folder / name).read_bytes() == (other.folder / name).read_bytes(), f"{one.folder.name} {name}"


@pytest.fixture
def short_folder() -> Iterator[str]:
    """For Ray's sockets, whose paths may have 107 characters, and for its logs, which it leaves."""
    with TemporaryDirectory() as folder:
        yield folder


@pytest.mark.filterwarnings("ignore")  # what Ray says of itself
def test_ray_goes_on_with_the_run_of_a_killed_worker(
    tiny_images: Path, tiny_run: Run, short_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray", reason="Ray is an extra")
    monkeypatch.setenv("HOME", str(tmp_path))  # for the token that guards the local Ray
    monkeypatch.setenv("RAY_TMPDIR", short_folder)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    # Ray's workers do not know where pytest looks for modules.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.chdir(tmp_path)
    cells = [
        TinyCell(tiny_images, Path("killed"), killed_after=2),
        Breakable(Path("whole")),
        Breakable(Path("killed-always"), 9),
        Breakable(Path("refused"), 9, "refuse"),
    ]
    outcomes, notes = _launch(cells, launcher="ray", jobs=2)
    assert not ray.is_initialized()
    assert sorted(note.partition(":")[0] for note in notes) == ["killed", "killed-always"], notes
    assert all("failed (WorkerCrashedError: " in note for note in notes), notes
    assert "failed twice" in str(outcomes["killed-always"])
    assert isinstance(outcomes["refused"], DataError)
    assert outcomes["whole"] == Path("whole")
    assert (tmp_path / "killed.epochs").read_text().split() == ["1", "2", "3"]
    for name in ("predictions.csv", "pseudo_labels.csv", "model.safetensors"):
        assert (tmp_path / "killed" / name).read_bytes() == (tiny_run.folder / name).read_bytes(), name


def test_without_ray_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"csda\[ray\]"):
        _launch([], launcher="ray")


# --- the end of a command -------------------------------------------------------------------------------------------


@contextmanager
def _started(*command: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process in a group of its own, as a terminal starts it; nobody of the group stays."""
    process = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=folder,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _members(group: int) -> set[int]:
    """The living processes of a group; what was killed and waits to be reaped is not among them."""
    members = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, owner = path.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(owner) == group and state != "Z":
            members.add(int(path.parent.name))
    return members


def _wait_until(condition: Any, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 180
    while not condition():
        assert time.monotonic() < deadline, process.poll()
        time.sleep(0.01)


class _OneEpoch(Reporter):
    def epoch(self, row: Mapping[str, Any]) -> None:
        raise RuntimeError(row["epoch"])


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="/proc shows who lives")


@needs_proc
def test_ctrl_c_ends_a_grid_at_once_and_leaves_what_resumes(tiny_images: Path, tmp_path: Path) -> None:
    settings = SETTINGS | QUEUE | {"epochs": 1000, "tensorboard": False}
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items() if key != "preset"]
    file = tmp_path / "grid.toml"
    file.write_text(
        f'title = "Grid"\npreset = "quick"\nlabels = ["{LABELS}"]\nseeds = [0, 1]\n'
        + "\n".join(["[settings]", *lines, ""])
        + '[[rows]]\nmethod = "csda"\n'
    )
    command = ("-m", "csda", "reproduce", str(file), "--data", str(tiny_images), "--jobs", "2")
    with _started(*command, folder=tmp_path) as process:
        _wait_until(lambda: len(list(tmp_path.rglob("checkpoint.pt"))) == 2, process)
        interrupted = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=180)
        assert time.monotonic() - interrupted < 20
        assert process.returncode == 130
        assert errors.startswith("\ncsda: interrupted; ")
        assert errors.count("\n") == 2
        _wait_until(lambda: not _members(process.pid), process)
    folders = [path.parent for path in tmp_path.rglob("checkpoint.pt")]
    for folder in folders:
        checkpoint = Run(folder).load_checkpoint()
        assert checkpoint is not None
        with pytest.raises(RuntimeError, match=f"^{checkpoint['epoch'] + 1}$"):
            train(out=folder, resume=True, reporter=_OneEpoch())


@needs_proc
def test_no_worker_outlives_its_parent(tmp_path: Path) -> None:
    script = tmp_path / "grid.py"
    script.write_text(
        f"""import sys
sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
if __name__ == "__main__":
    from pathlib import Path
    from breakable import Breakable
    from csda.research.launch import launch
    cells = [Breakable(Path({str(tmp_path)!r}) / name, 9, "sleep") for name in "ab"]
    list(launch(cells, jobs=2, note=print))
"""
    )
    with _started(str(script), folder=tmp_path) as process:
        _wait_until(lambda: all((tmp_path / name / "attempts").exists() for name in "ab"), process)
        assert len(_members(process.pid)) >= 3
        os.kill(process.pid, signal.SIGKILL)
        _wait_until(lambda: not _members(process.pid), process)
        assert process.communicate()[1] == ""
