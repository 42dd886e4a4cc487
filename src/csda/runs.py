"""Read and write run folders. No other module does.

    config.toml  split.csv  truth.csv  manifest.json  environment.json   when the run begins, the environment last
    history/  metrics.jsonl                                              after every epoch
    model.safetensors  checkpoint.pt                                     from time to time, the checkpoint last
    history.npz  predictions.csv  pseudo_labels.csv                      when it ends
    calibration.json  thumbnails.npz                                     likewise, where there are any
    manifest.json  result.json                                           after these, the result last

Each file is written under a temporary name, synced and renamed, so it is complete or absent. After a crash, epochs
later than the checkpoint are computed again, to the same numbers, and overwrite their files.

The manifest has the size and SHA-256 of each final file, and every file that is read is compared with it. In an
unfinished run, the checkpoint has its own checksum and those of the epochs' files, and the model file has its own. In
folders of older versions without a manifest only the form of files is checked.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

import csda
from csda.calibration import Calibration, from_json
from csda.config import RunConfig, differences, format_config, parse_config, read_config
from csda.data.records import encode_labels
from csda.data.splits import Begun, SplitRow, parse_label, read_rows, read_truth
from csda.errors import ConfigError, DataError, RunError, explained
from csda.files import lock, open_regular, write_csv, write_whole

if TYPE_CHECKING:
    from torch import Tensor

Array = npt.NDArray[Any]
Content = TypeVar("Content")

_CHECKPOINT_FORMAT = "csda-checkpoint-3"
_UNSEALED_FORMAT = "csda-checkpoint-2"
"""Checkpoints of older versions, without a SHA-256 of the archive."""

_FIRST = ("config.toml", "split.csv", "truth.csv", "environment.json")
"""The files that are final when a run begins."""
_LAST = (
    "metrics.jsonl",
    "model.safetensors",
    "checkpoint.pt",
    "history.npz",
    "predictions.csv",
    "pseudo_labels.csv",
    "calibration.json",
    "thumbnails.npz",
    "result.json",
)
"""The files that are final when it has finished."""


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


@dataclass(frozen=True, slots=True)
class Thumbnails:
    """thumbnails.npz: WebP pictures by id, and Grad-CAM maps [h, w] from 0 to 255 by id and class."""

    pictures: dict[str, bytes]
    maps: dict[tuple[str, int], npt.NDArray[np.uint8]]


class Run:
    """A run folder. Attributes read their files when first used."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not (self.folder / "config.toml").is_file():
            raise RunError(
                f"{self.folder}: no config.toml here, so this is not a run folder; give one that `csda train` made"
            )
        self._epoch_digests: dict[str, str] = {}

    # Reading

    @cached_property
    def config(self) -> dict[str, Any]:
        return self.settings.model_dump()

    @cached_property
    def settings(self) -> RunConfig:
        self._content("config.toml")
        return read_config(self._path("config.toml"))

    @cached_property
    def environment(self) -> dict[str, Any]:
        environment = self._json("environment.json", {"classes": list, "multi_label": bool, "remarks": list})
        texts = [*environment["classes"], *environment["remarks"]]
        if not environment["classes"] or not all(isinstance(text, str) for text in texts):
            raise self._damaged("environment.json", "a class or remark is not text")
        return environment

    @cached_property
    def result(self) -> dict[str, Any]:
        result = self._json("result.json", {"best_epoch": int})
        if not 1 <= result["best_epoch"] <= len(self.metrics):
            raise self._damaged("result.json", f"best_epoch = {result['best_epoch']} of {len(self.metrics)} epochs")
        for key, value in result.items():
            if not (_is_control(value) if key == "control" else _is_figure(value)):
                raise self._damaged("result.json", f"{key} is not a number")
        return result

    @property
    def begun(self) -> bool:
        """Whether all files of the beginning have been written."""
        return (self.folder / "environment.json").is_file()

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is a checkpoint to continue from."""
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
        known = self._path("truth.csv").is_file() or "truth.csv" in self._manifest
        return self._read(read_truth, "truth.csv") if known else {}

    @property
    def beginning(self) -> Begun:
        """What `prepare_data` needs to continue this run."""
        return Begun(self._path("split.csv"), self.split, self.truth, self.environment.get("data_digest"))

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        if not self._path("metrics.jsonl").is_file() and not self.finished:
            return []
        with self._readable("metrics.jsonl"):
            rows = [json.loads(line) for line in self._content("metrics.jsonl").decode().splitlines()]
            for epoch, row in enumerate(rows, start=1):
                if row["epoch"] != epoch or not all(value is None or float(value) == value for value in row.values()):
                    raise ValueError(f"row {epoch} is not that of epoch {epoch}")
        return rows

    @cached_property
    def history(self) -> dict[str, Array]:
        arrays = self._arrays("history.npz")
        if arrays.get("epochs", np.empty(0)).tolist() != [row["epoch"] for row in self.metrics]:
            raise self._damaged("history.npz", "not the epochs of metrics.jsonl")
        if not all(len(array) == len(arrays["epochs"]) and array.dtype.kind in "fiu" for array in arrays.values()):
            raise self._damaged("history.npz", "not one value of each epoch")
        return arrays

    @cached_property
    def predictions(self) -> Predictions:
        # By position, because a class may have the name of one of the first columns.
        lines = self._lines("predictions.csv", 4 + len(self.classes))
        self._require_parts("predictions.csv", [(cells[0], cells[1]) for cells in lines], "val", "test")
        ids, splits, labels, _, *columns = zip(*lines, strict=True)
        probs = self._probabilities("predictions.csv", columns).T
        return Predictions(list(ids), np.array(splits), self.encode(labels), probs)

    @cached_property
    def pseudo_labels(self) -> dict[str, npt.NDArray[np.float64]]:
        """The best model's probabilities [n] of each unlabeled image, by id."""
        lines = self._lines("pseudo_labels.csv", 3 + len(self.classes))
        self._require_parts("pseudo_labels.csv", [(cells[0], "unlabeled") for cells in lines], "unlabeled")
        probs = self._probabilities("pseudo_labels.csv", [cells[3:] for cells in lines])
        return {cells[0]: row for cells, row in zip(lines, probs, strict=True)}

    @cached_property
    def calibration(self) -> Calibration | None:
        """Temperature, thresholds and limits of sets; None if the run has none, like runs of older versions."""
        if not self._path("calibration.json").is_file() and "calibration.json" not in self._manifest:
            return None
        content = self._json("calibration.json", {"levels": list})
        with self._readable("calibration.json"):
            return from_json(content, len(self.classes))

    @cached_property
    def predict(self) -> Callable[..., Any]:
        """`csda.load(run).predict`: probabilities of images; the model is loaded once."""
        # Through csda.load, because this module must not import higher layers.
        predict: Callable[..., Any] = csda.load(self.folder).predict
        return predict

    @cached_property
    def thumbnails(self) -> Thumbnails:
        """Small pictures of some images; empty if the run stored none."""
        if not self._path("thumbnails.npz").is_file() and "thumbnails.npz" not in self._manifest:
            return Thumbnails({}, {})
        arrays = self._arrays("thumbnails.npz")
        with self._readable("thumbnails.npz"):
            ids, content = arrays["ids"].tolist(), arrays["bytes"].tobytes()
            bounds = [0, *arrays["ends"].tolist()]
            if len(bounds) != len(ids) + 1 or bounds != sorted(bounds) or bounds[-1] != len(content):
                raise ValueError("not one picture of each image")
            if not {row.id for row in self.split} >= set(ids):
                raise ValueError("images that split.csv does not have")
            pictures = {name: content[start:end] for name, start, end in zip(ids, bounds[:-1], bounds[1:], strict=True)}
            if not all(picture[:4] == b"RIFF" and picture[8:12] == b"WEBP" for picture in pictures.values()):
                raise ValueError("a picture that is not WebP")
            names, maps = arrays.get("map_ids", np.empty(0)).tolist(), arrays.get("maps", np.empty((0, 1, 1)))
            classes = arrays.get("map_classes", np.empty(0)).tolist()
            if maps.ndim != 3 or (names and maps.dtype != np.uint8):
                raise ValueError("maps of another shape or type")
            return Thumbnails(pictures, dict(zip(zip(names, classes, strict=True), maps, strict=True)))

    def labels_of(self, split: str) -> npt.NDArray[np.int64]:
        """Labels of a part, in the order of split.csv."""
        return self.encode([row.label for row in self.split if row.split == split])

    def encode(self, texts: Sequence[str]) -> npt.NDArray[np.int64]:
        """Convert label texts to class indices [N], or to 0/1 [N, K] in a multi-label set."""
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
        run = cls(folder)
        run._write_with_manifest("environment.json", environment, _FIRST)
        return run

    def check_config(self, config: RunConfig, begun: RunConfig) -> None:
        """Refuse to continue a run with other settings than it began with, which are `begun`."""
        changed = differences(config, begun)
        if changed and not self._only_places_differ(config, begun):
            raise RunError(
                f"{self.folder}: begun with other settings: {'; '.join(changed)}. "
                "Give the settings it began with, or another --out"
            )

    def _only_places_differ(self, config: RunConfig, theirs: RunConfig) -> bool:
        """Whether the configurations differ only in paths to data with the same content."""
        places = {"data": theirs.data}
        if config.split and theirs.split and Path(config.split).name == Path(theirs.split).name:
            places["split"] = theirs.split
        if not self.begun or differences(config.model_copy(update=places), theirs):
            return False
        from csda.data.content import content_digest, hash_contents
        from csda.data.prepared import load_configured

        known, dataset = self.environment.get("data_digest"), load_configured(config)
        return known is not None and known == content_digest(dataset, hash_contents(dataset, fresh=True))

    def write_epoch(
        self, row: Mapping[str, Any], arrays: Mapping[str, Array], rows_before: Sequence[Mapping[str, Any]]
    ) -> None:
        """Append this epoch's row to metrics.jsonl, and write its arrays."""
        self._make_own("history")
        contents = {
            f"history/{row['epoch']:05d}.npz": _npz(arrays),
            "metrics.jsonl": "".join(json.dumps(_finite(line)) + "\n" for line in (*rows_before, row)).encode(),
        }
        for name, content in contents.items():
            write_whole(self._path(name), content)
            self._epoch_digests[name] = hashlib.sha256(content).hexdigest()

    def write_model(self, weights: Mapping[str, Tensor], description: Mapping[str, str]) -> None:
        from safetensors.torch import save

        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
        # As one string, because safetensors writes several metadata entries in any order.
        model = json.loads(description["csda"])
        model.pop("sha256", None)
        text = json.dumps({**model, "sha256": _digest_weights(tensors, model)}, ensure_ascii=False)
        write_whole(self._path("model.safetensors"), save(tensors, metadata={**description, "csda": text}))

    def read_weights(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The weights and metadata of model.safetensors."""
        from safetensors.torch import load

        content = self._content("model.safetensors")
        # A damaged header can cause any of these errors.
        with self._readable("model.safetensors"):
            weights = load(content)
            header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
            description: dict[str, str] = header.get("__metadata__", {})
            model = json.loads(description.get("csda", "null"))
            # Models of older versions have no checksum.
            known = model.pop("sha256", None) if isinstance(model, dict) else None
            if known is not None and known != _digest_weights(weights, model):
                raise ValueError("wrong checksum")
        return weights, description

    def save_checkpoint(self, state: Mapping[str, Any]) -> None:
        import torch

        buffer = io.BytesIO()
        head = {"format": _CHECKPOINT_FORMAT, "config": format_config(self.settings), "files": self._epoch_digests}
        torch.save(head | dict(state), buffer)
        write_whole(self._path("checkpoint.pt"), seal_archive(buffer.getvalue()))

    def load_checkpoint(self) -> dict[str, Any] | None:
        """The state after the last complete epoch, or None."""
        import torch

        path = self._path("checkpoint.pt")
        if not self.has_checkpoint:
            return None
        way_out = f"delete {path.name} to start this run from the beginning, or restore the file"
        content = self._content(path.name)
        try:
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                sealed = content == seal_archive(content[: -2 - len(archive.comment)] + b"\0\0")
                whole = sealed or (not archive.comment and archive.testzip() is None)
            loaded = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True) if whole else None
        except Exception as error:  # any error of zipfile or the unpickler on a damaged file
            raise RunError(f"{path}: damaged ({type(error).__name__}); {way_out}") from None
        state: dict[str, Any] = loaded if isinstance(loaded, dict) else {}
        form = state.get("format")
        if not whole or (form == _CHECKPOINT_FORMAT and not sealed):
            raise RunError(f"{path}: damaged (wrong checksum); {way_out}")
        is_ours = isinstance(state.get("config"), str) and isinstance(state.get("epoch"), int)
        if form not in (_CHECKPOINT_FORMAT, _UNSEALED_FORMAT) or not is_ours:
            raise RunError(f"{path}: not a checkpoint of csda; {way_out}")
        try:
            same = parse_config(state["config"]) == self.settings
        except ConfigError:
            same = False
        if not same:
            raise RunError(f"{path}: belongs to a run with another config.toml; {way_out}")
        kept = (self._path(f"history/{epoch:05d}.npz").is_file() for epoch in range(1, state["epoch"] + 1))
        if len(self.metrics) < state["epoch"] or not all(kept):
            raise RunError(f"{self.folder}: metrics.jsonl or history/ lacks epochs that {path.name} has; {way_out}")
        # Checkpoints of older versions have no checksums of their epochs' files.
        self._epoch_digests = dict(state.get("files", {}))
        for name, digest in self._epoch_digests.items():
            lines = self._content(name).splitlines(keepends=True)
            # Epochs after the checkpoint are computed again.
            content = b"".join(lines[: state["epoch"]] if name == "metrics.jsonl" else lines)
            if hashlib.sha256(content).hexdigest() != digest:
                raise RunError(
                    f"{self._path(name)}: its checksum is not the one in {path.name}; restore it, or {way_out}"
                )
        return state

    def epoch_arrays(self, epoch: int) -> dict[str, Array]:
        return self._arrays(f"history/{epoch:05d}.npz")

    def finish(
        self,
        epochs: Sequence[Mapping[str, Array]],
        predictions: Iterable[Sequence[object]],
        pseudo_labels: Iterable[Sequence[object]],
        result: Mapping[str, Any],
        calibration: Calibration | None = None,
        thumbnails: Mapping[str, Array] | None = None,
    ) -> None:
        """Write the files of a finished run, with the arrays of all `epochs`.

        result.json is the last and marks it as finished.
        """
        write_whole(self._path("history.npz"), _npz(_stacked(epochs)))
        write_csv(self._path("predictions.csv"), ("id", "split", "label", "predicted", *self.classes), predictions)
        write_csv(self._path("pseudo_labels.csv"), ("id", "predicted", "confidence", *self.classes), pseudo_labels)
        if calibration is not None:
            write_whole(self._path("calibration.json"), json.dumps(calibration.as_json(), indent=1) + "\n")
        if thumbnails is not None:
            write_whole(self._path("thumbnails.npz"), _npz(thumbnails))
        self._write_with_manifest("result.json", _finite(result), (*_FIRST, *_LAST))
        shutil.rmtree(self.folder / "history", ignore_errors=True)

    def write_report(self, page: str, figures: Mapping[str, str]) -> Path:
        """Write report.html and its figures as figures/NAME.svg; delete those of an earlier report.

        They can be made again at any time, so they are not in the manifest. Each ends with its own checksum.
        """
        folder = self._make_own("figures")
        with explained(folder):
            for old in folder.glob("*.svg"):
                if old.stem not in figures:
                    old.unlink()
        for name, content in figures.items():
            write_whole(folder / f"{name}.svg", seal(content))
        return write_whole(self._path("report.html"), seal(page))

    def verify(self) -> int:
        """Compare every file with its checksum and return their number; the first that differs raises an error.

        In an interrupted run these are the files of the beginning, the model, and the checkpoint with its epochs.
        """
        names = list(self._manifest)
        if not names:
            raise RunError(f"{self.folder}: no manifest.json, so there is nothing to compare with; restore it")
        for name in names:
            self._content(name)
        if not self.finished and self.has_checkpoint:
            self.read_weights()
            state = self.load_checkpoint()
            names += ["model.safetensors", "checkpoint.pt", *(state or {}).get("files", ())]
        pages = [name for name in ("report.html", "labels.html") if self._path(name).exists()]
        pages += sorted(f"figures/{path.name}" for path in self._path("figures").glob("*.svg"))
        for name in pages:
            if not _is_sealed(self._content(name)):
                raise RunError(
                    f"{self._path(name)}: damaged, or written by an older version without checksums; "
                    f"`csda report {self.folder}` writes it again"
                )
        return len(names) + len(pages)

    def _path(self, name: str) -> Path:
        return self.folder / name

    def _make_own(self, name: str) -> Path:
        """A folder inside of the run folder, made if it is missing. A link is refused: its files are elsewhere."""
        folder = self._path(name)
        if folder.is_symlink():
            raise RunError(f"{folder}: a link, and files would be written and deleted where it leads; remove it")
        with explained(folder):
            folder.mkdir(exist_ok=True)
        return folder

    def _write_with_manifest(self, last: str, content: Mapping[str, Any], names: Sequence[str]) -> None:
        """Write all but the last of these files, then manifest.json, then the last, which marks them as complete."""
        text = (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()
        files = {name: _describe(self._path(name)) for name in names if self._path(name).is_file()}
        files |= {last: {"size": len(text), "sha256": hashlib.sha256(text).hexdigest()}}
        manifest = {"files": files, "sha256": _digest_json(files)}
        write_whole(self._path("manifest.json"), json.dumps(manifest, indent=1) + "\n")
        write_whole(self._path(last), text)

    @cached_property
    def _manifest(self) -> dict[str, dict[str, Any]]:
        """Size and SHA-256 of the final files; empty for a folder of an older version without a manifest."""
        path = self._path("manifest.json")
        if not path.exists():
            return {}
        try:
            manifest = json.loads(_read_bytes(path))
            files: dict[str, dict[str, Any]] = manifest["files"]
            whole = manifest["sha256"] == _digest_json(files)
        except (ValueError, LookupError, TypeError, RecursionError):
            whole = False
        if not whole:
            raise RunError(f"{path}: damaged; restore it, or delete it to read this run without checksums")
        # A run that was interrupted at its end writes its last files again.
        return {name: entry for name, entry in files.items() if name in _FIRST or self.finished}

    def _content(self, name: str) -> bytes:
        """The content of a file, if it matches the manifest."""
        path, known = self._path(name), self._manifest.get(name)
        if not path.exists():
            raise RunError(f"{path}: missing; {'restore it' if name in _FIRST and self.begun else self._way_out()}")
        content = _read_bytes(path)
        if known is not None and known != {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}:
            raise self._damaged(name, "not as in manifest.json")
        return content

    @contextmanager
    def _readable(self, name: str) -> Iterator[None]:
        """Turn any error while reading this file into a sentence. Nothing in a file is trusted."""
        try:
            yield
        except RunError:
            raise
        except Exception as error:
            words = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise self._damaged(name, words) from None

    def _damaged(self, name: str, problem: str) -> RunError:
        return RunError(f"{self._path(name)}: damaged ({problem}); restore it or run the training again")

    def _json(self, name: str, keys: Mapping[str, type]) -> dict[str, Any]:
        with self._readable(name):
            content: dict[str, Any] = json.loads(self._content(name).decode())
            for key, kind in keys.items():
                if not isinstance(content, dict) or not isinstance(content.get(key), kind):
                    raise ValueError(f"no {key} in it")
        return content

    def _read(self, reader: Callable[[Path], Content], name: str) -> Content:
        """Read a file of the run with a reader of csda.data."""
        self._content(name)
        try:
            return reader(self._path(name))
        except DataError as error:
            raise RunError(f"{error}; restore the file") from None

    def _lines(self, name: str, columns: int) -> list[list[str]]:
        """The cells of each row of a CSV, without the header."""
        with self._readable(name):
            _, *lines = rows = list(csv.reader(io.StringIO(self._content(name).decode(), newline=""), strict=True))
            for number, cells in enumerate(rows, start=1):
                if len(cells) != columns:
                    raise ValueError(f"row {number} has {len(cells)} cells, not {columns}")
        return lines

    def _require_parts(self, name: str, found: Sequence[tuple[str, str]], *parts: str) -> None:
        """Refuse a table unless it has each image of these parts once."""
        expected = [(row.id, row.split) for row in self.split if row.split in parts]
        if sorted(found) != sorted(expected):
            raise self._damaged(name, f"not the images that split.csv has for {' and '.join(parts)}")

    def _probabilities(self, name: str, cells: Sequence[Sequence[str]]) -> npt.NDArray[np.float64]:
        with self._readable(name):
            probs = np.array(cells, dtype=np.float64)
            if not ((probs >= 0) & (probs <= 1)).all():
                raise ValueError("a probability that is not from 0 to 1")
        return probs

    def _arrays(self, name: str) -> dict[str, Array]:
        content = self._content(name)
        with self._readable(name), np.load(io.BytesIO(content), allow_pickle=False) as archive:
            inflated = sum(part.file_size for part in archive.zip.infolist())
            # Compression makes the figures of a training two to ten times smaller.
            if inflated > 100 * len(content) + 2**24:
                raise ValueError(f"{len(content):,} bytes inflate to {inflated:,}")
            return dict(archive)

    def _way_out(self) -> str:
        if self.finished:
            return "restore it or run the training again"
        return f"the run has not finished: `csda train --out {self.folder} --resume` continues it"


class UnfinishedRun(Run):
    """A run that was interrupted or is still training.

    Results are those of the epochs that have ended; there are no pseudo-labels and no thumbnails.
    """

    @cached_property
    def result(self) -> dict[str, Any]:
        rows = self.metrics
        if not rows:
            raise RunError(f"{self.folder}: no epoch has ended yet, so there is nothing to report; {self._way_out()}")
        areas = [row.get("val_auc") for row in rows]
        known = [area for area in areas if area is not None]
        best = areas.index(max(known)) if known and self.settings.choose == "best" else len(rows) - 1
        result: dict[str, Any] = {"best_epoch": best + 1, "seconds": sum(row.get("seconds") or 0 for row in rows)}
        for name in ("auc", "mca"):
            last = [row[f"test_{name}"] for row in rows[-20:] if row.get(f"test_{name}") is not None]
            result |= {name: rows[best].get(f"test_{name}")}
            result |= {f"{name}_last20": sum(last) / len(last) if last else None}
        return result

    @cached_property
    def history(self) -> dict[str, Array]:
        return _stacked([self.epoch_arrays(row["epoch"]) for row in self.metrics])

    @cached_property
    def predictions(self) -> Predictions:
        name = f"history/{self.result['best_epoch']:05d}.npz"
        parts = {part: [row for row in self.split if row.split == part] for part in ("val", "test")}
        with self._readable(name):
            arrays = self._arrays(name)
            for part, rows in parts.items():
                probs = arrays[f"{part}_probs"]
                if probs.shape != (len(rows), len(self.classes)) or not ((probs >= 0) & (probs <= 1)).all():
                    raise ValueError(f"not the {part} images of split.csv")
            probs = np.concatenate([arrays[f"{part}_probs"] for part in parts]).astype(np.float64)
        rows = [*parts["val"], *parts["test"]]
        splits = np.array([row.split for row in rows], dtype=np.str_)
        return Predictions([row.id for row in rows], splits, self.encode([row.label for row in rows]), probs)

    @cached_property
    def pseudo_labels(self) -> dict[str, npt.NDArray[np.float64]]:
        return {}

    @cached_property
    def thumbnails(self) -> Thumbnails:
        return Thumbnails({}, {})


def open_run(folder: str | Path) -> Run:
    """Open a run folder for reading, finished or not."""
    run = Run(folder)
    return run if run.finished else UnfinishedRun(folder)


@contextmanager
def held(folder: Path, *, new: bool = False) -> Iterator[None]:
    """Lock a run folder, which is made if it is missing. Lock it before reading it.

    With `new` it must not exist, otherwise a `FileExistsError` is raised. The lock ends with the process. Folders that
    were made and stayed empty are removed.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    if new and not missing:
        raise FileExistsError(folder)
    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    try:
        if not lock(handle):
            raise RunError(f"{folder}: another process is training this run; wait for it to end")
        yield
    finally:
        os.close(handle)
        for path in missing:
            with suppress(OSError):
                path.rmdir()


def _occupied(folder: Path) -> bool:
    return any(not entry.name.startswith(".") for entry in folder.iterdir())


def require_unused(folder: Path) -> None:
    """Refuse a folder with any content, except for what a run leaves that was interrupted while it began."""
    with explained(folder):
        if not folder.exists() or not _occupied(folder):
            return
    if not (folder / "config.toml").is_file():
        raise RunError(f"{folder}: not empty, and not a run; give another --out")
    if Run(folder).begun:
        raise RunError(f"{folder}: holds a run; give --resume to continue it, or another --out")


def _stacked(epochs: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Stack the epochs' arrays along a first axis; NaN for an epoch without one."""
    shapes = {key: array for arrays in epochs for key, array in arrays.items()}
    stacked: dict[str, Array] = {"epochs": np.arange(1, len(epochs) + 1)}
    for key, example in shapes.items():
        missing = np.full(example.shape, np.nan, dtype=np.float32)
        stacked[key] = np.stack([arrays.get(key, missing) for arrays in epochs])
    return stacked


def _read_bytes(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            return file.readall()
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({(error.strerror or str(error)).lower()}); restore it") from None


def seal(page: str) -> str:
    """Append the SHA-256 of a page or figure as a comment."""
    return f"{page}{_seal_of(page.encode())}"


def _seal_of(content: bytes) -> str:
    return f"\n<!-- sha256 {hashlib.sha256(content).hexdigest()} -->\n"


def _is_sealed(content: bytes) -> bool:
    end = content.rfind(b"\n<!-- sha256 ")
    return end >= 0 and content[end:] == _seal_of(content[:end]).encode()


def seal_archive(archive: bytes) -> bytes:
    """Write the SHA-256 of a ZIP archive as its comment, which other readers of archives skip.

    The archive's own checksums cover the content of its files, but not its directory, where a flipped bit would go
    unnoticed.
    """
    comment = f"sha256 {hashlib.sha256(archive).hexdigest()}".encode()
    return archive[:-2] + len(comment).to_bytes(2, "little") + comment


def _describe(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _digest_json(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _digest_weights(weights: Mapping[str, Tensor], model: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(_digest_json(model).encode())
    for name, tensor in sorted(weights.items()):
        values = tensor.numpy()
        digest.update(f"{name} {values.dtype} {values.shape}".encode())
        digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()


def _npz(arrays: Mapping[str, Array]) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()


def _is_figure(value: object) -> bool:
    return value is None or isinstance(value, int | float)


def _is_control(value: object) -> bool:
    """Whether a value has figures by name, for each model that a run is compared with."""
    return isinstance(value, dict) and all(
        isinstance(figures, dict) and all(map(_is_figure, figures.values())) for figures in value.values()
    )


def _finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """Replace NaN by None, because JSON has no NaN."""
    return {
        key: _finite(value)
        if isinstance(value, Mapping)
        else None
        if isinstance(value, float) and not np.isfinite(value)
        else value
        for key, value in row.items()
    }
