"""The run folder: the only reader and writer of it.

    config.toml  split.csv  truth.csv  environment.json            when the run begins, the environment last
    history/  metrics.jsonl                                        after every epoch
    model.safetensors  checkpoint.pt                               from time to time, the checkpoint last
    history.npz  predictions.csv  pseudo_labels.csv  result.json   when it ends, the result last

Each file appears whole or not at all: it is written under a temporary name, synced and renamed. What lies beyond the
checkpoint after a crash is overwritten by the same epoch, computed again to the same numbers.
"""

from __future__ import annotations

import csv
import io
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

import csda
from csda.config import RunConfig, differences, format_config, parse_config, read_config
from csda.data.records import encode_labels
from csda.data.splits import Begun, SplitRow, parse_label, read_rows, read_truth
from csda.errors import ConfigError, DataError, RunError, explained

if TYPE_CHECKING:
    from torch import Tensor

Array = npt.NDArray[Any]
Content = TypeVar("Content")

_CHECKPOINT_FORMAT = "csda-checkpoint-2"


@dataclass(frozen=True, slots=True)
class Predictions:
    """predictions.csv: labels [N], or 0/1 [N, K] in a multi-label set, and probabilities [N, n]."""

    ids: list[str]
    splits: npt.NDArray[np.str_]
    labels: npt.NDArray[np.int64]
    probs: npt.NDArray[np.float64]

    def part(self, split: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """Probabilities and labels of `val` or `test`."""
        rows = self.splits == split
        return self.probs[rows], self.labels[rows]


class Run:
    """A run folder. Attributes read the files when first asked for."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not (self.folder / "config.toml").is_file():
            raise RunError(
                f"{self.folder}: no config.toml here, so this is no run folder; give one that `csda train` made"
            )

    # Reading

    @cached_property
    def config(self) -> dict[str, Any]:
        return self.settings.model_dump()

    @cached_property
    def settings(self) -> RunConfig:
        return read_config(self.folder / "config.toml")

    @cached_property
    def environment(self) -> dict[str, Any]:
        return self._json("environment.json")

    @cached_property
    def result(self) -> dict[str, Any]:
        return self._json("result.json")

    @property
    def begun(self) -> bool:
        """Whether all that a run begins with has been written."""
        return (self.folder / "environment.json").is_file()

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is something to go on from."""
        return self._path("checkpoint.pt").exists()

    @property
    def finished(self) -> bool:
        return (self.folder / "result.json").is_file()

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self.environment["classes"])

    @property
    def multi_label(self) -> bool:
        return bool(self.environment["multi_label"])

    @property
    def remarks(self) -> tuple[str, ...]:
        return tuple(self.environment["remarks"])

    @cached_property
    def split(self) -> list[SplitRow]:
        return [row for _, row in self._read(read_rows, "split.csv")]

    @cached_property
    def truth(self) -> dict[str, str]:
        return self._read(read_truth, "truth.csv") if self._path("truth.csv").is_file() else {}

    @property
    def beginning(self) -> Begun:
        """What `prepare_data` needs to go on with this run."""
        return Begun(self._path("split.csv"), self.split, self.truth, self.environment.get("data_digest"))

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        path = self._path("metrics.jsonl")
        try:
            return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
        except ValueError as error:
            raise RunError(f"{path}: damaged ({error}); restore it or run the training anew") from None

    @cached_property
    def history(self) -> dict[str, Array]:
        return self._arrays("history.npz")

    @cached_property
    def predictions(self) -> Predictions:
        # By position, since a class may be called like one of the first columns.
        lines = self._lines("predictions.csv", 4 + len(self.classes))
        ids, splits, labels, _, *columns = zip(*lines, strict=True)
        return Predictions(list(ids), np.array(splits), self.encode(labels), np.array(columns, dtype=np.float64).T)

    @cached_property
    def pseudo_labels(self) -> dict[str, npt.NDArray[np.float64]]:
        """What the best model says of each unlabeled image, probabilities [n] by id."""
        lines = self._lines("pseudo_labels.csv", 3 + len(self.classes))
        return {image: np.array(probs, dtype=np.float64) for image, _, _, *probs in lines}

    def labels_of(self, split: str) -> npt.NDArray[np.int64]:
        """Labels of a part of split.csv, in its order."""
        return self.encode([row.label for row in self.split if row.split == split])

    def encode(self, texts: Sequence[str]) -> npt.NDArray[np.int64]:
        """Label texts as class indices [N], or as 0/1 [N, K] in a multi-label set."""
        index = {name: position for position, name in enumerate(self.classes)}
        labels = [parse_label(text, index, self.multi_label, str(self.folder)) for text in texts]
        return encode_labels(labels, len(self.classes), self.multi_label)

    # Writing

    @classmethod
    def create(
        cls,
        folder: str | Path,
        config: RunConfig,
        environment: Mapping[str, Any],
        split: Iterable[SplitRow],
        truth: Mapping[str, str],
    ) -> Run:
        """Begin a run in a folder that `require_unused` accepts."""
        folder = Path(folder)
        require_unused(folder)
        with explained(folder):
            folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "config.toml", format_config(config))
        write_csv(folder / "split.csv", SplitRow._fields, split)
        if truth:
            write_csv(folder / "truth.csv", ("id", "label"), truth.items())
        write_whole(folder / "environment.json", json.dumps(environment, indent=1, ensure_ascii=False) + "\n")
        return cls(folder)

    def check_config(self, config: RunConfig) -> None:
        """A run goes on with the settings it began with, or not at all."""
        changed = differences(config, self.settings)
        if changed and not self._only_places_differ(config):
            raise RunError(
                f"{self.folder}: begun with other settings: {'; '.join(changed)}. "
                "Leave them as they were, or give another --out"
            )

    def _only_places_differ(self, config: RunConfig) -> bool:
        """Whether nothing but the way to the data is written differently, and it leads to the same content."""
        theirs = self.settings
        places = {"data": theirs.data}
        if config.split and theirs.split and Path(config.split).name == Path(theirs.split).name:
            places["split"] = theirs.split
        if not self.begun or differences(config.model_copy(update=places), theirs):
            return False
        from csda.data.content import content_digest
        from csda.data.prepared import load_configured

        known = self.environment.get("data_digest")
        return known is not None and known == content_digest(load_configured(config))

    def write_epoch(
        self, row: Mapping[str, Any], arrays: Mapping[str, Array], rows_before: Sequence[Mapping[str, Any]]
    ) -> None:
        """metrics.jsonl with this epoch's row at its end, and the epoch's arrays."""
        with explained(self.folder):
            (self.folder / "history").mkdir(exist_ok=True)
        write_whole(self._path(f"history/{row['epoch']:05d}.npz"), _npz(arrays))
        write_whole(
            self._path("metrics.jsonl"), "".join(json.dumps(_finite(line)) + "\n" for line in (*rows_before, row))
        )

    def write_model(self, weights: Mapping[str, Tensor], description: Mapping[str, str]) -> None:
        from safetensors.torch import save

        tensors = {name: tensor.detach().contiguous() for name, tensor in weights.items()}
        write_whole(self._path("model.safetensors"), save(tensors, metadata=dict(description)))

    def read_weights(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The weights of model.safetensors, and the description beside them."""
        from safetensors import SafetensorError, safe_open

        path = self._path("model.safetensors")
        if not path.is_file():
            raise RunError(f"{path}: missing; {self._way_out()}")
        try:
            with safe_open(path, "pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
        except SafetensorError as error:
            raise RunError(f"{path}: damaged ({error}); restore it or run the training anew") from None

    def save_checkpoint(self, state: Mapping[str, Any]) -> None:
        import torch

        buffer = io.BytesIO()
        torch.save({"format": _CHECKPOINT_FORMAT, "config": format_config(self.settings), **state}, buffer)
        write_whole(self._path("checkpoint.pt"), buffer.getvalue())

    def load_checkpoint(self) -> dict[str, Any] | None:
        """The state after the last whole epoch, or None when there is none yet."""
        import torch

        path = self._path("checkpoint.pt")
        if not self.has_checkpoint:
            return None
        way_out = f"delete {path.name} to start this run from the beginning, or restore the file"
        try:
            with zipfile.ZipFile(path) as archive:
                torn = archive.testzip()
            state: dict[str, Any] | None = None if torn else torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # whatever a damaged file makes zipfile and the unpickler say
            raise RunError(f"{path}: damaged ({type(error).__name__}); {way_out}") from None
        if state is None:
            raise RunError(f"{path}: damaged (wrong checksum); {way_out}")
        if not isinstance(state, dict) or state.get("format") != _CHECKPOINT_FORMAT:
            raise RunError(f"{path}: not a checkpoint of csda; {way_out}")
        try:
            same = parse_config(state["config"]) == self.settings
        except ConfigError:
            same = False
        if not same:
            raise RunError(f"{path}: belongs to a run with another config.toml; {way_out}")
        whole = (self._path(f"history/{epoch:05d}.npz").is_file() for epoch in range(1, state["epoch"] + 1))
        if len(self.metrics) < state["epoch"] or not all(whole):
            raise RunError(f"{self.folder}: metrics.jsonl or history/ lacks epochs that {path.name} has; {way_out}")
        return state

    def epoch_arrays(self, epoch: int) -> dict[str, Array]:
        return self._arrays(f"history/{epoch:05d}.npz")

    def finish(
        self,
        epochs: Sequence[Mapping[str, Array]],
        predictions: Iterable[Sequence[object]],
        pseudo_labels: Iterable[Sequence[object]],
        result: Mapping[str, Any],
    ) -> None:
        """The files that a finished run has, with the arrays of all `epochs`; result.json says that it is one."""
        write_whole(self._path("history.npz"), _npz(_stacked(epochs)))
        write_csv(self._path("predictions.csv"), ("id", "split", "label", "predicted", *self.classes), predictions)
        write_csv(self._path("pseudo_labels.csv"), ("id", "predicted", "confidence", *self.classes), pseudo_labels)
        write_whole(self._path("result.json"), json.dumps(_finite(result), indent=1) + "\n")
        shutil.rmtree(self.folder / "history", ignore_errors=True)

    def _path(self, name: str) -> Path:
        return self.folder / name

    def _json(self, name: str) -> dict[str, Any]:
        path = self._path(name)
        try:
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise RunError(f"{path}: missing; {self._way_out()}") from None
        except ValueError as error:
            raise RunError(f"{path}: not JSON ({error}); restore it or run the training anew") from None
        return content

    def _read(self, reader: Callable[[Path], Content], name: str) -> Content:
        """What a reader of csda.data gives of a file of the run."""
        path = self._path(name)
        if not path.is_file():
            raise RunError(f"{path}: missing; {self._way_out()}")
        try:
            return reader(path)
        except DataError as error:
            raise RunError(f"{error}; restore the file") from None

    def _lines(self, name: str, columns: int) -> Iterator[list[str]]:
        """The cells of each line of a CSV below its header."""
        path = self._path(name)
        try:
            with path.open(newline="", encoding="utf-8") as file:
                for row, cells in enumerate(csv.reader(file)):
                    if len(cells) != columns:
                        raise RunError(f"{path}, row {row + 1}: {len(cells)} cells, not {columns}; restore the file")
                    if row:
                        yield cells
        except FileNotFoundError:
            raise RunError(f"{path}: missing; {self._way_out()}") from None

    def _arrays(self, name: str) -> dict[str, Array]:
        path = self._path(name)
        try:
            with path.open("rb") as file, np.load(file) as archive:
                return dict(archive)
        except FileNotFoundError:
            raise RunError(f"{path}: missing; {self._way_out()}") from None
        except (ValueError, EOFError, zlib.error, zipfile.BadZipFile) as error:
            raise RunError(f"{path}: damaged ({error}); restore it or run the training anew") from None

    def _way_out(self) -> str:
        return f"the run has not finished: `csda train --out {self.folder} --resume` goes on with it"


@contextmanager
def held(folder: Path, *, new: bool = False) -> Iterator[None]:
    """Keep other processes out of a run folder, which is made if need be; to be entered before it is looked at.

    With `new` it must not be there yet, otherwise this is a `FileExistsError`. The hold ends with the process, however
    it ends. Folders that were made for it and have stayed empty are removed again.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    if new and not missing:
        raise FileExistsError(folder)
    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    try:
        if not _lock(handle):
            raise RunError(f"{folder}: another process is training this run; wait for it to end")
        yield
    finally:
        os.close(handle)
        for path in missing:
            with suppress(OSError):
                path.rmdir()


def _lock(handle: int) -> bool:
    """Whether nobody else has this file or folder; a system without such locks goes without."""
    with suppress(ImportError):
        import fcntl

        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _occupied(folder: Path) -> bool:
    return any(not entry.name.startswith(".") for entry in folder.iterdir())


def require_unused(folder: Path) -> None:
    """Refuse a folder with anything in it, but for what was left of a run that was cut off while it began."""
    with explained(folder):
        if not folder.exists() or not _occupied(folder):
            return
    if not (folder / "config.toml").is_file():
        raise RunError(f"{folder}: not empty, and no run; give another --out")
    if Run(folder).begun:
        raise RunError(f"{folder}: holds a run; give --resume to go on with it, or another --out")


def _stacked(epochs: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """The epochs' arrays along a first axis; NaN where an epoch lacks one."""
    shapes = {key: array for arrays in epochs for key, array in arrays.items()}
    stacked: dict[str, Array] = {"epochs": np.arange(1, len(epochs) + 1)}
    for key, example in shapes.items():
        missing = np.full(example.shape, np.nan, dtype=np.float32)
        stacked[key] = np.stack([arrays.get(key, missing) for arrays in epochs])
    return stacked


def describe_environment() -> dict[str, Any]:
    """What made a run, as far as it can be told without torch."""
    return {
        "csda": csda.__version__,
        "commit": source_commit(),
        "command": shlex.join(["csda", *sys.argv[1:]]),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "platform": platform.platform(),
        "cores": os.cpu_count(),
    }


def source_commit() -> str | None:
    """The commit of a source checkout that the package runs from, marked where the package has been changed since; what
    CSDA_COMMIT says where there is no git."""
    here = Path(__file__).resolve().parent
    try:
        top, _, commit = _git(here, "rev-parse", "--show-toplevel", "HEAD").partition("\n")
        # Installed packages may lie inside somebody else's checkout.
        if commit and Path(top).resolve() == here.parent.parent:
            return f"{commit}+changed" if _git(here, "--no-optional-locks", "status", "--porcelain", ".") else commit
    except OSError:
        pass
    return os.environ.get("CSDA_COMMIT")


def _git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=False).stdout.strip()


def _npz(arrays: Mapping[str, Array]) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()


def _finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """JSON knows no NaN: a figure that is not defined becomes null."""
    return {key: None if isinstance(value, float) and not np.isfinite(value) else value for key, value in row.items()}


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    write_whole(path, buffer.getvalue())


def write_whole(path: Path, content: str | bytes) -> Path:
    """Write a file so that it is whole or absent, also after a crash or a full disk."""
    temporary = path.with_name(f".{path.name}.writing")
    with explained(path):
        try:
            with temporary.open("wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            raise
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    return path
