"""The cache on disk: rows of pixels or features that are computed once and then mapped into memory.

A folder holds one list of rows. Every row has a key, and the folder is named after the digest of all keys in order. If
a key changes, a new folder is made and the unchanged rows are copied from the old one. A row is marked as done after
its values have been synced to disk, so a process can be killed at any time and the next one continues. The process with
the lock of a folder makes the missing rows, others wait and then read. Rows that cannot be made are not marked, and the
next process tries again.

Every row has a checksum, which is compared when a process first reads the row; a damaged row is made again. The cache
has a size limit: the folders that were used longest ago are deleted for a new one.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from errno import EDQUOT, ENOSPC
from hashlib import blake2b
from io import FileIO
from pathlib import Path
from secrets import token_hex
from threading import Lock
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt
from filelock import FileLock, Timeout

from csda.data.cache_folders import cache_limit, format_size, make_room, owner_of, remove_folder
from csda.errors import DataError

FOLDERS_KEPT = 3
"""Number of folders kept for one data set at one size: the current one and earlier ones with rows to copy."""

SYNC_SECONDS = 0.5
"""Seconds between syncs: at most this much work is lost if a process is killed."""

Progress = Callable[[int, int], None]
Flags = npt.NDArray[np.bool_]
Values = npt.NDArray[Any]
Sums = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows to make: `make(positions)` returns the values of each row, or the reason why it has none.

    `settings` are common to all rows, `place` is the folder of the cache for this kind of rows. With no `workers` the
    calling thread makes the rows. `chunk` rows are made at a time: few, so that threads share the work and can be
    interrupted quickly.
    """

    owner: str
    settings: str
    keys: Sequence[bytes]
    shape: tuple[int, ...]
    make: Callable[[Sequence[int]], Sequence[Values | str]]
    workers: int
    place: str
    dtype: npt.DTypeLike = np.uint8
    chunk: int = 16

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def bytes(self) -> int:
        return len(self.keys) * self.row_bytes

    def folder(self, cache: Path) -> Path:
        return folder_of(cache, self.place, self.settings, self.keys)


def digest(*parts: bytes) -> bytes:
    """A hash of all `parts`, 16 bytes."""
    summary = blake2b(digest_size=16)
    for part in parts:
        summary.update(b"%d:" % len(part) + part)
    return summary.digest()


def recall(path: Path) -> bytes | None:
    """Read what `remember` wrote; None if the file is missing or damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    checksum, kept = content[:16], content[16:]
    return kept if checksum == digest(kept) else None


def remember(path: Path, content: bytes) -> None:
    """Write a small file of the cache atomically, with its checksum.

    If the cache cannot be written, nothing is kept.
    """
    draft = path.with_name(f".draft-{token_hex(8)}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            draft.write_bytes(digest(content) + content)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)


def folder_of(cache: Path, place: str, settings: str, keys: Sequence[bytes]) -> Path:
    return cache / place / digest(settings.encode(), *keys).hex()


def rows_done(folder: Path, count: int) -> Flags:
    """Which of `count` rows the folder holds; none if the folder is missing or damaged."""
    try:
        done = np.fromfile(folder / "done", np.bool_)
    except OSError:
        done = np.zeros(0, bool)
    return done if len(done) == count else np.zeros(count, bool)


def load_cached(rows: Rows, cache: Path, progress: Progress) -> tuple[Values, dict[int, str], tuple[str, ...]]:
    """Return values [N, …], the reasons for rows without values, and remarks.

    Missing rows are made. If the disk cannot hold them, all rows are made in memory, if they fit.
    """
    folder = rows.folder(cache)
    if (array := _open_whole(folder, rows)) is not None:
        progress(len(array), len(array))
        return array, {}, ()
    try:
        with _locked(folder, rows, progress):
            _create(folder, rows)
            with closing(Disk(folder, rows)) as disk:
                _inherit(disk, folder, rows)
                failed = fill(rows, disk.done, disk.write, progress, disk.sync_when_due)
                disk.sync()
        _evict(folder)
        return _map(folder, rows), failed, ()
    except OSError as error:
        if error.errno in (ENOSPC, EDQUOT):  # part of a data set is useless on a disk without room for all of it
            shutil.rmtree(folder, ignore_errors=True)
        kind = rows.place.partition("/")[0]
        problem = f"The cache {cache} cannot be written ({error.strerror or error})"
        if rows.bytes > physical_memory() // 2:
            raise DataError(
                f"{problem} and the {format_size(rows.bytes)} of {kind} do not fit into memory either: name a folder "
                f"with room in the environment variable CSDA_CACHE or choose a smaller image_size."
            ) from error
        remark = f"{problem}: {kind} are made again on each start, unless CSDA_CACHE names a folder with room."
        return *load_in_memory(rows, progress), (remark,)


def load_in_memory(rows: Rows, progress: Progress) -> tuple[Values, dict[int, str]]:
    """Values [N, …] and the reasons for rows without values, without a cache."""
    array: Values = np.zeros((len(rows.keys), *rows.shape), rows.dtype)

    def write(images: Mapping[int, Values]) -> None:
        for position, image in images.items():
            array[position] = image

    return array, fill(rows, np.zeros(len(array), bool), write, progress)


@contextmanager
def _locked(folder: Path, rows: Rows, progress: Progress) -> Iterator[None]:
    """Lock the folder; show the progress of the process that has the lock while waiting."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / "lock")
    while not lock.is_locked:
        try:
            lock.acquire(timeout=0.2)
        except Timeout:
            progress(int(rows_done(folder, len(rows.keys)).sum()), len(rows.keys))
    try:
        yield
    finally:
        lock.release()


class Disk:
    """Rows in a folder of the cache that this process has locked; `done` marks complete ones."""

    def __init__(self, folder: Path, rows: Rows) -> None:
        self.done: Flags = rows_done(folder, len(rows.keys))
        self._sums = _read_sums(folder, len(rows.keys))
        self._pixels, self._done, self._checks = (FileIO(folder / name, "r+b") for name in ("pixels", "done", "sums"))
        self._writing = Lock()
        self._written: list[int] = []
        self._synced = time.monotonic()

    def close(self) -> None:
        self._pixels.close()
        self._done.close()
        self._checks.close()

    def write(self, images: Mapping[int, Values]) -> None:
        """Write rows in ascending order, from any thread; they are marked as done by the next `sync`."""
        positions = np.array([*images], np.int64)
        for run in np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1):
            # One write for many rows, so that workers wait less for each other.
            pixels = np.stack([images[position] for position in run.tolist()])
            with self._writing:
                _write_at(self._pixels, int(run[0]) * pixels[0].nbytes, pixels.data.cast("B"))
                self._sums[run] = [crc32(image) for image in pixels]
                self._written += run.tolist()

    def sync(self) -> None:
        """Sync written rows to disk, then mark them as done."""
        with self._writing:
            os.fsync(self._pixels.fileno())
            _write_at(self._checks, 0, self._sums.data.cast("B"))
            os.fsync(self._checks.fileno())
            self.done[self._written] = True
            _write_at(self._done, 0, self.done.data.cast("B"))
            self._written, self._synced = [], time.monotonic()

    def sync_when_due(self) -> None:
        if time.monotonic() > self._synced + SYNC_SECONDS:
            self.sync()


def fill(
    rows: Rows,
    done: Flags,
    write: Callable[[Mapping[int, Values]], None],
    progress: Progress,
    after_each: Callable[[], None] = lambda: None,
) -> dict[int, str]:
    """Make and write all rows that are not done; return the reasons for those that cannot be made."""
    missing = np.flatnonzero(~done).tolist()
    ready, total = len(done) - len(missing), len(done)
    failed: dict[int, str] = {}

    def make(positions: list[int]) -> dict[int, str]:
        """Make rows; return the reasons for those that cannot be made."""
        made = dict(zip(positions, rows.make(positions), strict=True))
        if images := {position: result for position, result in made.items() if not isinstance(result, str)}:
            write(images)
        return {position: result for position, result in made.items() if isinstance(result, str)}

    progress(ready, total)
    size = min(rows.chunk, max(1, len(rows.keys) // 32)) if rows.workers else rows.chunk
    chunks = [missing[start : start + size] for start in range(0, len(missing), size)]
    if not rows.workers:
        for chunk in chunks:
            failed |= make(chunk)
            after_each()
            ready += len(chunk)
            progress(ready, total)
        return failed
    pool = ThreadPoolExecutor(rows.workers)
    try:
        made = {pool.submit(make, chunk): len(chunk) for chunk in chunks}
        for future in as_completed(made):
            failed |= future.result()
            after_each()
            ready += made[future]
            progress(ready, total)
    finally:
        pool.shutdown(cancel_futures=True)
    return failed


def _write_at(file: FileIO, offset: int, data: memoryview) -> None:
    file.seek(offset)
    while data:
        data = data[file.write(data) :]


class Guard:
    """Compares rows of a folder with their checksums when they are first read, and makes damaged ones again."""

    def __init__(self, folder: Path, rows: Rows) -> None:
        self._folder = folder
        self._make = rows.make
        self._sums = _read_sums(folder, len(rows.keys))
        # Rows that could not be made are zeros, and are not trained on.
        self._unread = rows_done(folder, len(rows.keys))
        self._mending = Lock()

    def check(self, array: Values, first: Any) -> None:
        """Check the rows of an index into the first axis, unless they have been checked."""
        wanted = np.zeros(len(array), bool)
        if isinstance(first, np.ndarray) and first.dtype == np.bool_:
            first = first.reshape(len(first), -1).any(axis=1)  # a mask may select single values
        wanted[first] = True
        for row in np.flatnonzero(wanted & self._unread).tolist():
            self.accepts(row, array[row])

    def accepts(self, row: int, image: Values) -> bool:
        """Whether the row matches its checksum; if not, the file is repaired and the row must be read again."""
        if not self._unread[row] or crc32(image.data) == self._sums[row]:
            self._unread[row] = False
            return True
        with self._mending:
            self._mend(row)
        return False

    def _mend(self, row: int) -> None:
        [made] = self._make([row])
        if isinstance(made, str):
            raise DataError(
                f"{self._folder}: row {row} of the cache is damaged, and its image {made}; restore the image"
            )
        try:
            for name, content in (("pixels", made), ("sums", np.array([crc32(made.data)], np.uint32))):
                with FileIO(self._folder / name, "r+b") as file:
                    _write_at(file, row * content.nbytes, content.data.cast("B"))
        except OSError as error:
            raise DataError(
                f"{self._folder}: row {row} of the cache is damaged and cannot be mended "
                f"({(error.strerror or str(error)).lower()}); give `csda cache clear`, or name another CSDA_CACHE"
            ) from None
        self._unread[row] = False
        logging.getLogger(__name__).warning("%s: row %d was damaged and has been made again", self._folder, row)


class MappedRows(np.memmap[Any, np.dtype[Any]]):
    """Rows in a file of the cache, which are checked when they are read by an index."""

    guard: Guard | None = None
    """None for a slice, which was checked when it was made."""

    def __getitem__(self, index: Any) -> Any:
        if self.guard is not None:
            self.guard.check(self.view(np.ndarray), index[0] if isinstance(index, tuple) else index)
        return super().__getitem__(index)


def _map(folder: Path, rows: Rows) -> Values:
    array = MappedRows(folder / "pixels", rows.dtype, "r", shape=(len(rows.keys), *rows.shape))
    array.guard = Guard(folder, rows)
    return array


def _read_sums(folder: Path, count: int) -> Sums:
    sums = np.fromfile(folder / "sums", np.uint32)
    return sums if len(sums) == count else np.zeros(count, np.uint32)


def _open_whole(folder: Path, rows: Rows) -> Values | None:
    """Open the values if every row is done, also from a read-only cache."""
    try:
        done = rows_done(folder, len(rows.keys))
        if not done.all() or (folder / "sums").stat().st_size != 4 * len(done):
            return None
        array = _map(folder, rows)
    except (OSError, ValueError):  # missing or damaged
        return None
    with suppress(OSError):
        os.utime(folder)
    return array


def _create(folder: Path, rows: Rows) -> None:
    """Make the files of a folder without any row, unless they exist with the right size."""
    count = len(rows.keys)
    lengths = {"done": count, "pixels": rows.bytes, "sums": 4 * count, "keys": 16 * count}
    with suppress(OSError):
        if all((folder / name).stat().st_size == length for name, length in lengths.items()):
            return
    limit, needed = cache_limit(), sum(lengths.values())
    if limit < needed:
        raise OSError(ENOSPC, f"{format_size(needed)} are needed and CSDA_CACHE_LIMIT is {format_size(limit)}")
    make_room(folder.parents[2], limit - needed, folder)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(ENOSPC, f"{format_size(needed)} are needed and {format_size(free)} free")
    # `done` is reset first, because it does not hold for rows that are made again.
    for name, length in lengths.items():
        with (folder / name).open("wb") as file:
            _reserve(file.fileno(), length)
    (folder / "keys").write_bytes(b"".join(rows.keys))
    (folder / "about.json").write_text(json.dumps({"owner": rows.owner, "images": len(rows.keys)}))


def _reserve(file: int, length: int) -> None:
    """Reserve disk space for a file. Otherwise writing to mapped memory would kill the process on a full disk."""
    if length and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, length)
    else:
        os.truncate(file, length)


def _inherit(disk: Disk, folder: Path, rows: Rows) -> None:
    """Copy rows with the same keys from other folders."""
    missing = {rows.keys[position]: position for position in np.flatnonzero(~disk.done).tolist()}
    for other in _siblings(folder):
        try:
            keys, done = (other / "keys").read_bytes(), np.fromfile(other / "done", np.bool_)
            sums = _read_sums(other, len(done))
            array = np.memmap(other / "pixels", rows.dtype, "r", shape=(len(done), *rows.shape))
        except (OSError, ValueError):
            continue
        for row in np.flatnonzero(done).tolist():
            position = missing.get(keys[16 * row : 16 * row + 16])
            if position is not None and crc32(array[row]) == sums[row]:
                del missing[keys[16 * row : 16 * row + 16]]
                disk.write({position: array[row]})
                disk.sync_when_due()
    disk.sync()


def _siblings(folder: Path) -> list[Path]:
    """The other folders of the same kind, the most recently used first."""
    used = {}
    for other in folder.parent.glob("[!.]*"):
        with suppress(OSError):  # another process may be deleting it
            used[other] = other.stat().st_mtime
    used.pop(folder, None)
    return sorted(used, key=used.__getitem__, reverse=True)


def _evict(folder: Path) -> None:
    """Delete the oldest folders of the same data set."""
    with suppress(OSError):
        os.utime(folder)
    same = [other for other in _siblings(folder) if owner_of(other) == owner_of(folder)]
    for old in same[FOLDERS_KEPT - 1 :]:
        remove_folder(old)


def physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**33
