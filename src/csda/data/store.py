"""Pixels: every image decoded once, into a uint8 cache on disk that is mapped into memory.

The cache holds one folder for each list of files at one size. A row is keyed by the path, the size and the time of
its file, the folder by all rows in their order: when a file is changed, added or removed a new folder is made, and the
rows that stayed are copied from the old one. A row counts only once it is marked as done, and it is marked after its
pixels have reached the disk, so a process may be killed at any time and the next one goes on where it was. Processes
that build the same folder share the work by claiming chunks of rows. The claims only save time: whoever writes a row
writes the same bytes, so that a lost claim spoils nothing. Rows that cannot be read are not marked and are tried again
by the next who asks.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from errno import EDQUOT, ENOSPC
from hashlib import blake2b
from io import FileIO
from pathlib import Path
from secrets import token_hex
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from csda.data.decode import read_header, read_image
from csda.data.records import Dataset, Pixels, Record
from csda.errors import DataError

DECODING = 1
"""Part of every key: to be raised when `read_image` gives other pixels than before."""

DRAWN_IN_MEMORY = 2**28
"""Drawn sets of up to so many bytes are drawn anew each time."""

CACHES_KEPT = 3
"""Folders kept for one set at one size: the present list of files and a few earlier ones, whose rows may be reused."""

SYNC_SECONDS = 0.5
"""How often what was written is marked as done: so much work is lost when the process is killed."""

PENDING_BYTES = 2**25
"""Made and not yet written: enough to keep the workers busy while the disk is waited for."""

Progress = Callable[[int, int], None]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class PixelStore:
    """The pixels of a set: row r of `array` belongs to `dataset.records[r]`.

    Rows that could not be read are black, False in `readable`, and listed with the reason in `unreadable`.
    """

    array: Pixels
    readable: Flags
    unreadable: list[tuple[Record, str]]
    remarks: tuple[str, ...] = ()


def open_pixels(
    dataset: Dataset,
    size: int,
    *,
    channels: int | None = None,
    cache: Path | None = None,
    workers: int | None = None,
    max_unreadable: float = 0.01,
    progress: Progress | None = None,
) -> PixelStore:
    """The images of the set as uint8 [N, size, size, channels], decoded in parallel where the cache has them not yet.

    `channels` of None means one where every image is grey, otherwise three; drawn sets have as many as they are drawn
    with. `progress(done, total)` is called as rows get ready. When more than a share of `max_unreadable` cannot be
    read, the set is refused.
    """
    if not dataset.records:
        raise DataError(f"{dataset.name} has no images.")
    cache = cache or default_cache()
    progress = progress or (lambda done, total: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Pillow remarks on odd but readable files helps nobody here
        if dataset.draw is not None:
            rows = _drawn_rows(dataset, size, workers or available_cores())
        else:
            rows = _file_rows(dataset, size, channels, cache, workers or available_cores())
        if dataset.draw is not None and rows.bytes <= DRAWN_IN_MEMORY:
            array, failed = _in_memory(rows, progress)
            return _without_failed(dataset, array, failed, [], max_unreadable)
        array, failed, remarks = _open_cached(dataset, rows, cache, progress)
        return _without_failed(dataset, array, failed, remarks, max_unreadable)


def default_cache() -> Path:
    """`$CSDA_CACHE`, or `csda` in the user's cache folder."""
    if folder := os.environ.get("CSDA_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "csda"


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ---------------------------------------------------------------- what is to be made


@dataclass(frozen=True)
class _Rows:
    """For each row its key; `make(positions)` gives the pixels of each, or the reason why there are none."""

    keys: tuple[bytes, ...]
    settings: str
    shape: tuple[int, int, int]
    make: Callable[[Sequence[int]], Sequence[Pixels | str]]
    workers: int

    @property
    def bytes(self) -> int:
        return len(self.keys) * math.prod(self.shape)

    def folder(self, cache: Path) -> Path:
        return _folder(cache, self.keys, self.settings, self.shape)

    @property
    def chunk(self) -> int:
        """Rows that are claimed and made together: few, so that processes share well and an interrupt is quick."""
        return min(16, max(1, len(self.keys) // 32))


def _digest(*parts: bytes) -> bytes:
    digest = blake2b(digest_size=16)
    for part in parts:
        digest.update(part + b"\0")
    return digest.digest()


def _folder(cache: Path, keys: Sequence[bytes], settings: str, shape: tuple[int, int, int]) -> Path:
    return cache / "pixels" / f"{shape[0]}x{shape[2]}" / _digest(settings.encode(), *keys).hex()


def _file_rows(dataset: Dataset, size: int, channels: int | None, cache: Path, workers: int) -> _Rows:
    paths = [record.path for record in dataset.records]
    keys = tuple(_file_key(path) for path in paths)
    settings = f"decoding {DECODING}, channels {channels or 'by header'}"
    if channels is None:
        # The folder is made after the headers were read, so where there is one its name is the answer.
        made = (c for c in (1, 3) if _folder(cache, keys, settings, (size, size, c)).is_dir())
        channels = next(made, None) or (1 if _all_grey(paths, workers) else 3)

    def make(positions: Sequence[int]) -> list[Pixels | str]:
        return [_read(paths[position], size, channels) for position in positions]

    return _Rows(keys, settings, (size, size, channels), make, workers)


def _file_key(path: Path | None) -> bytes:
    if path is None:
        return _digest(b"")
    try:
        status = path.stat()
    except OSError:
        return _digest(bytes(path.absolute()))
    return _digest(bytes(path.absolute()), b"%d %d" % (status.st_size, status.st_mtime_ns))


def _read(path: Path | None, size: int, channels: int) -> Pixels | str:
    if path is None:
        return "has no file"
    try:
        return read_image(path, size, channels)
    except DataError as error:
        return str(error).removeprefix(f"{path}: ")


def _all_grey(paths: Sequence[Path | None], workers: int) -> bool:
    """Whether no readable image has colour; ends at the first that has."""

    def grey(path: Path | None) -> bool:
        try:
            return path is None or read_header(path).grey
        except DataError:
            return True

    with ThreadPoolExecutor(workers) as pool:
        chunks = (paths[start : start + 256] for start in range(0, len(paths), 256))
        return all(all(pool.map(grey, chunk)) for chunk in chunks)


def _drawn_rows(dataset: Dataset, size: int, workers: int) -> _Rows:
    draw, count = dataset.draw, len(dataset.records)
    assert draw is not None
    # A drawn set does not say what it was drawn with: some of its images do.
    sample = draw(sorted({0, count // 3, count // 2, count - 1}), size)
    drawn_with = _digest(dataset.name.encode(), sample.tobytes())
    keys = tuple(_digest(drawn_with, f"{record.id} {record.label}".encode()) for record in dataset.records)
    shape = (size, size, sample.shape[-1])
    return _Rows(keys, "drawn", shape, lambda positions: list(draw(positions, size)), workers)


# ---------------------------------------------------------------- where the rows go


class _Memory:
    """Rows in memory."""

    def __init__(self, rows: _Rows) -> None:
        self.array: Pixels = np.zeros((len(rows.keys), *rows.shape), np.uint8)
        self.done: Flags = np.zeros(len(rows.keys), bool)

    def claim(self, chunk: int) -> bool:
        return True

    def write(self, chunk: int, images: Mapping[int, Pixels]) -> None:
        for position, image in images.items():
            self.array[position] = image
            self.done[position] = True

    def sync(self) -> None:
        pass


class _Disk:
    """Rows in a folder of the cache, which other processes may be filling too."""

    def __init__(self, folder: Path, rows: _Rows) -> None:
        self._files = [FileIO(folder / name, "r+b") for name in ("pixels", "done", "claims")]
        self._pixels, self._done, self._claims = self._files
        self._written: list[tuple[int, list[int]]] = []
        self._synced = time.monotonic()
        self.array: Pixels = np.memmap(folder / "pixels", np.uint8, "r", shape=(len(rows.keys), *rows.shape))
        self.done: Flags = np.memmap(folder / "done", np.bool_, "r", shape=(len(rows.keys),))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for file in self._files:
            file.close()

    def claim(self, chunk: int) -> bool:
        """Whether the chunk is ours; the system takes the claim back when the process ends, however it ends."""
        return self._lock(chunk, True)

    def write(self, chunk: int, images: Mapping[int, Pixels]) -> None:
        for position, image in images.items():
            _write_at(self._pixels, position * image.size, np.ascontiguousarray(image).data.cast("B"))
        self._written.append((chunk, list(images)))
        if time.monotonic() > self._synced + SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Mark what was written as done, once it is safe on the disk, and give the claims back."""
        os.fsync(self._pixels.fileno())
        for chunk, positions in self._written:
            for position in positions:
                _write_at(self._done, position, memoryview(b"\1"))
            self._lock(chunk, False)
        self._written = []
        self._synced = time.monotonic()

    def _lock(self, chunk: int, take: bool) -> bool:
        with suppress(ImportError):  # Windows: processes do not share the work there
            import fcntl

            try:
                fcntl.lockf(self._claims, fcntl.LOCK_EX | fcntl.LOCK_NB if take else fcntl.LOCK_UN, 1, chunk)
            except BlockingIOError:
                return False
            except OSError:  # a file system without locks: work may be done twice, with the same result
                return True
        return True


def _write_at(file: FileIO, offset: int, data: memoryview) -> None:
    file.seek(offset)
    while data:
        data = data[file.write(data) :]


def _open_cached(
    dataset: Dataset, rows: _Rows, cache: Path, progress: Progress
) -> tuple[Pixels, dict[int, str], list[str]]:
    """The rows from the cache, filled where they are missing; in memory where the disk does not take them."""
    folder = rows.folder(cache)
    with suppress(OSError, ValueError):  # no such folder yet, or one that was damaged
        done = np.fromfile(folder / "done", np.bool_)
        array = np.memmap(folder / "pixels", np.uint8, "r", shape=(len(rows.keys), *rows.shape))
        if done.all() and len(done) == len(array):
            with suppress(OSError):
                os.utime(folder)
            progress(len(done), len(done))
            return array, {}, []
    try:
        _create(folder, dataset, rows)
        with _Disk(folder, rows) as disk:
            _inherit(disk, folder, rows)
            failed = _fill(disk, rows, progress)
            _evict(folder)
            return disk.array, failed, []
    except OSError as error:
        if error.errno in (ENOSPC, EDQUOT):  # half a set is of no use on a disk that has no room for it
            shutil.rmtree(folder, ignore_errors=True)
        problem = f"the pixel cache {cache} cannot be written ({error.strerror or error})"
        if rows.bytes > _memory() // 2:
            raise DataError(
                f"{dataset.name} needs {_size(rows.bytes)} for its pixels, but {problem} and memory is too small for "
                f"them: name a folder with room in the environment variable CSDA_CACHE, or choose a smaller image_size."
            ) from error
        remark = f"{problem[0].upper()}{problem[1:]}: all images are decoded again on each start. CSDA_CACHE names it."
        return *_in_memory(rows, progress), [remark]


def _in_memory(rows: _Rows, progress: Progress) -> tuple[Pixels, dict[int, str]]:
    memory = _Memory(rows)
    return memory.array, _fill(memory, rows, progress)


def _create(folder: Path, dataset: Dataset, rows: _Rows) -> None:
    """Make the folder, all rows missing, in one step; a whole one that is there stays."""
    lengths = {"pixels": rows.bytes, "done": len(rows.keys), "claims": 0, "keys": 16 * len(rows.keys)}
    if folder.exists():
        with suppress(OSError):
            if all((folder / name).stat().st_size == length for name, length in lengths.items()):
                return
        shutil.rmtree(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(folder.parent).free < rows.bytes:
        raise OSError(ENOSPC, f"{_size(rows.bytes)} needed, {_size(shutil.disk_usage(folder.parent).free)} free")
    draft = folder.with_name(f".draft-{token_hex(8)}")
    draft.mkdir()
    try:
        for name, length in lengths.items():
            with (draft / name).open("wb") as file:
                file.truncate(length)
        (draft / "keys").write_bytes(b"".join(rows.keys))
        about = {"set": dataset.name, "root": str(dataset.root), "images": len(rows.keys), "shape": rows.shape}
        (draft / "about.json").write_text(json.dumps(about, indent=1))
        draft.rename(folder)
    except OSError:
        if not folder.is_dir():  # otherwise another process was faster
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _inherit(disk: _Disk, folder: Path, rows: _Rows) -> None:
    """Copy what other folders hold under the same keys: the rows of files that did not change."""
    missing = {rows.keys[position]: position for position in np.flatnonzero(~disk.done).tolist()}
    for other in _siblings(folder):
        try:
            keys, done = (other / "keys").read_bytes(), np.fromfile(other / "done", np.bool_)
            array = np.memmap(other / "pixels", np.uint8, "r", shape=(len(done), *rows.shape))
        except (OSError, ValueError):
            continue
        for row in np.flatnonzero(done).tolist():
            position = missing.pop(keys[16 * row : 16 * row + 16], None)
            if position is not None:
                disk.write(position // rows.chunk, {position: array[row]})
    disk.sync()


def _siblings(folder: Path) -> list[Path]:
    """The other folders of the same image size, the last used first."""
    used = {}
    for other in folder.parent.glob("[!.]*"):
        with suppress(OSError):  # another process may be removing it
            used[other] = other.stat().st_mtime
    used.pop(folder, None)
    return sorted(used, key=used.__getitem__, reverse=True)


def _evict(folder: Path) -> None:
    """Remove the oldest folders of the same set, and drafts that killed processes left a day ago or earlier."""
    with suppress(OSError):
        os.utime(folder)
        same = [other for other in _siblings(folder) if _owner(other) == _owner(folder)]
        stale = [draft for draft in folder.parent.glob(".draft-*") if draft.stat().st_mtime < time.time() - 86400]
        for old in same[CACHES_KEPT - 1 :] + stale:
            shutil.rmtree(old, ignore_errors=True)


def _owner(folder: Path) -> tuple[str, str] | None:
    try:
        about = json.loads((folder / "about.json").read_text())
        return about["set"], about["root"]
    except (OSError, ValueError, KeyError):
        return None


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**33


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GB" if count >= 2**30 else f"{count / 2**20:.1f} MB"


# ---------------------------------------------------------------- making them


def _fill(sheet: _Memory | _Disk, rows: _Rows, progress: Progress) -> dict[int, str]:
    """Make all rows that are missing; gives the reasons for those that cannot be made."""
    total, ready = len(rows.keys), int(sheet.done.sum())
    depth = max(rows.workers + 1, PENDING_BYTES // (rows.chunk * math.prod(rows.shape)))
    failed: dict[int, str] = {}

    def finish(chunk: int, positions: list[int], made: Future[Sequence[Pixels | str]]) -> None:
        nonlocal ready
        images = {}
        for position, result in zip(positions, made.result(), strict=True):
            if isinstance(result, str):
                failed[position] = result
            else:
                images[position] = result
        sheet.write(chunk, images)
        ready += len(positions)
        progress(ready, total)

    progress(ready, total)
    chunks = sorted({position // rows.chunk for position in np.flatnonzero(~sheet.done).tolist()})
    pool = ThreadPoolExecutor(rows.workers)
    try:
        while chunks:
            elsewhere = []
            pending: deque[tuple[int, list[int], Future[Sequence[Pixels | str]]]] = deque()
            for chunk in chunks:
                if not sheet.claim(chunk):
                    elsewhere.append(chunk)
                    continue
                span = range(chunk * rows.chunk, min(total, (chunk + 1) * rows.chunk))
                positions = [position for position in span if not sheet.done[position]]
                pending.append((chunk, positions, pool.submit(rows.make, positions)))
                if len(pending) > depth:
                    finish(*pending.popleft())
            while pending:
                finish(*pending.popleft())
            sheet.sync()
            if chunks := elsewhere:  # another process is at them; should it die they are ours in the next round
                time.sleep(0.1)
                ready = int(sheet.done.sum()) + len(failed)
                progress(ready, total)
    finally:
        pool.shutdown(cancel_futures=True)
    return failed


def _without_failed(
    dataset: Dataset, array: Pixels, failed: dict[int, str], remarks: list[str], max_unreadable: float
) -> PixelStore:
    unreadable = [(dataset.records[row], failed[row]) for row in sorted(failed)]
    readable = np.ones(len(array), bool)
    readable[list(failed)] = False
    if failed:
        listed = "".join(f"\n  {record.path or record.id}: {reason}" for record, reason in unreadable[:10])
        more = f"\n  and {len(failed) - 10} more" if len(failed) > 10 else ""
        count = f"{len(failed)} of {len(array)} images of {dataset.root or dataset.name}"
        if len(failed) > max_unreadable * len(array) or len(failed) == len(array):
            raise DataError(
                f"{count} cannot be read, more than the share of {max_unreadable:g} that may be skipped "
                f"(max_unreadable); mend or remove them:{listed}{more}"
            )
        remarks = [*remarks, f"{count} cannot be read and are skipped:{listed}{more}"]
    return PixelStore(array, readable, unreadable, tuple(remarks))
