"""Every folder that a kill can leave: whichever it is, the training that goes on ends with the same bytes."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from csda import files, runs, trainer, training
from csda.data.cache import digest
from csda.files import write_whole
from tiny import plain, train_tiny

SETTINGS: dict[str, dict[str, Any]] = {
    "csda": {},
    "the last of averaged weights": {"method": "baseline", "epochs": 2, "choose": "last", "average": 0.9},
    "one checkpoint": {"epochs": 2, "checkpoint_seconds": 1e6, "refresh": "epoch", "order": "train_first"},
}

Files = dict[str, bytes]
"""What a folder holds, by relative path."""


class Folder:
    """A run folder that is trained in. It remembers each state of it, with the half of the next file that a kill in the
    middle of writing it would add."""

    def __init__(self, images: Path, place: Path, settings: dict[str, Any]) -> None:
        self.images, self.place, self.settings = images, place, settings
        self.states: list[tuple[Files, Files]] = []

    def train(self, begin: Files) -> Files:
        """Go on from these files; those that there are in the end."""
        shutil.rmtree(self.place, ignore_errors=True)
        for name, content in begin.items():
            (self.place / name).parent.mkdir(parents=True, exist_ok=True)
            (self.place / name).write_bytes(content)
        train_tiny(self.images, self.place, resume=True, backbone="small", steps_per_epoch=2, **self.settings)
        # A kill after result.json may leave these, which nobody reads any more.
        return {name: content for name, content in self._read().items() if not name.startswith("history/")}

    def write(self, path: Path, content: str | bytes) -> Path:
        data = content.encode() if isinstance(content, str) else content
        half = path.with_name(f".{path.name}.writing").relative_to(self.place)
        self.states.append((self._whole(), {str(half): data[: len(data) // 2]}))
        write_whole(path, content)
        if path.name == "result.json":
            self.states.append((self._whole(), {}))
        return path

    def _read(self) -> Files:
        paths = (path for path in self.place.rglob("*") if path.is_file())
        return {str(path.relative_to(self.place)): path.read_bytes() for path in paths}

    def _whole(self) -> Files:
        return {name: content for name, content in self._read().items() if not name.endswith(".writing")}


def _identify(files: Files) -> Files:
    """A digest of each file; how the parts of a checkpoint were pickled does not count."""
    found = {name: digest(content) for name, content in sorted(files.items())}
    if "checkpoint.pt" in files:
        state = torch.load(io.BytesIO(files["checkpoint.pt"]), weights_only=True)
        found["checkpoint.pt"] = digest(repr(plain(state)).encode())
    return found


@pytest.mark.usefixtures("small_network")
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_every_folder_that_a_kill_can_leave_ends_alike(
    settings: dict[str, Any], tiny_images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What kills of resumed trainings leave is among them: it goes on until no training shows a new one."""
    # Without times in them the folders of two trainings are the same.
    still = SimpleNamespace(perf_counter=lambda: 0.0, monotonic=lambda: 0.0)
    for module in (training, trainer):
        monkeypatch.setattr(module, "time", still)
    monkeypatch.setattr(trainer, "describe_environment", lambda: {"command": "csda train"})
    folder = Folder(tiny_images, tmp_path / "run", settings)
    for module in (files, runs):  # tables are written by `files` itself
        monkeypatch.setattr(module, "write_whole", folder.write)

    expected = _identify(folder.train({}))
    states: dict[str, Files] = {}
    tried: set[str] = set()
    while True:
        states |= {str(_identify(files)): files | half for files, half in folder.states}
        folder.states.clear()
        if not (left := states.keys() - tried):
            break
        name = left.pop()
        tried.add(name)
        assert _identify(folder.train(states[name])) == expected, sorted(states[name])
    assert len(tried) > 15
