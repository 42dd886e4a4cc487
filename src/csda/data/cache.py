"""The cache on disk: rows of pixels, or of features, that are made once and then mapped into memory.

One folder holds one list of rows. Every row has a key, and the folder is named by the digest of all keys in their
order: when one changes, a new folder is made and the rows that stayed are copied from the old one. A row counts once
it is marked as done, and it is marked after its values have reached the disk, so that a process may be killed at any
time and the next one goes on where it was. Whoever holds the lock of a folder makes what is missing in it, others wait
and then read. Rows that cannot be made are not marked, and the next who asks tries again.
"""

from __future__ import annotations

import json
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
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
from filelock import FileLock, Timeout

from csda.errors import DataError

FOLDERS_KEPT = 3
"""For one set at one size: the present list of files and earlier ones, whose rows may be of use again."""

SYNC_SECONDS = 0.5
"""How often what was written is marked as done: so much work is lost when a process is killed."""

Progress = Callable[[int, int], None]
Flags = npt.NDArray[np.bool_]
Values = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Rows:
    """What is to be made: `make(positions)` gives the values of each row, or the reason why it has none.

    `settings` are those that all rows share, `place` is the folder of the cache for rows of this kind. Without
    `workers` the rows are made by the thread that asks for them. `chunk` rows are made together: few, so that threads
    share well and an interrupt is quick.
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
    """Sixteen bytes that stand for all of `parts`."""
    summary = blake2b(digest_size=16)
    for part in parts:
        summary.update(b"%d:" % len(part) + part)
    return summary.digest()


def folder_of(cache: Path, place: str, settings: str, keys: Sequence[bytes]) -> Path:
    return cache / place / digest(settings.encode(), *keys).hex()


def rows_done(folder: Path, count: int) -> Flags:
    """Which of `count` rows the folder holds; none where there is no such folder, or a damaged one."""
    try:
        done = np.fromfile(folder / "done", np.bool_)
    except OSError:
        done = np.zeros(0, bool)
    return done if len(done) == count else np.zeros(count, bool)


def load_cached(rows: Rows, cache: Path, progress: Progress) -> tuple[Values, dict[int, str], tuple[str, ...]]:
    """Values [N, …], the reasons for rows that have none, and remarks.

    What is missing in the cache is made; where the disk does not take it, all rows are made in memory if they fit.
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
        if error.errno in (ENOSPC, EDQUOT):  # half a set is of no use on a disk that has no room for it
            shutil.rmtree(folder, ignore_errors=True)
        kind = rows.place.partition("/")[0]
        problem = f"The cache {cache} cannot be written ({error.strerror or error})"
        if rows.bytes > physical_memory() // 2:
            raise DataError(
                f"{problem} and the {_size(rows.bytes)} of {kind} do not fit into memory either: name a folder with "
                f"room in the environment variable CSDA_CACHE or choose a smaller image_size."
            ) from error
        remark = f"{problem}: {kind} are made anew on each start, unless CSDA_CACHE names a folder with room."
        return *load_in_memory(rows, progress), (remark,)


def load_in_memory(rows: Rows, progress: Progress) -> tuple[Values, dict[int, str]]:
    """Values [N, …] and the reasons for rows that have none, without a cache."""
    array: Values = np.zeros((len(rows.keys), *rows.shape), rows.dtype)

    def write(images: Mapping[int, Values]) -> None:
        for position, image in images.items():
            array[position] = image

    return array, fill(rows, np.zeros(len(array), bool), write, progress)


@contextmanager
def _locked(folder: Path, rows: Rows, progress: Progress) -> Iterator[None]:
    """Hold the folder alone; the progress of the process that has it is shown until then."""
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
    """Rows in a folder of the cache that this process has locked; `done` are those that count."""

    def __init__(self, folder: Path, rows: Rows) -> None:
        self.done: Flags = rows_done(folder, len(rows.keys))
        self._pixels, self._done = (FileIO(folder / name, "r+b") for name in ("pixels", "done"))
        self._writing = Lock()
        self._written: list[int] = []
        self._synced = time.monotonic()

    def close(self) -> None:
        self._pixels.close()
        self._done.close()

    def write(self, images: Mapping[int, Values]) -> None:
        """Write rows in ascending order, from any thread; they count after the next `sync`."""
        positions = np.array([*images], np.int64)
        for run in np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1):
            # One write for many rows: the workers wait for each other less often.
            pixels = np.stack([images[position] for position in run.tolist()])
            with self._writing:
                _write_at(self._pixels, int(run[0]) * pixels[0].nbytes, pixels.data.cast("B"))
                self._written += run.tolist()

    def sync(self) -> None:
        """Let what was written count, now that it is safe on the disk."""
        with self._writing:
            os.fsync(self._pixels.fileno())
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
    """Make and write all rows that are not done; gives the reasons for those that cannot be made."""
    missing = np.flatnonzero(~done).tolist()
    ready, total = len(done) - len(missing), len(done)
    failed: dict[int, str] = {}

    def make(positions: list[int]) -> dict[int, str]:
        """The reasons for rows that cannot be made."""
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


def _map(folder: Path, rows: Rows) -> Values:
    array: Values = np.memmap(folder / "pixels", rows.dtype, "r", shape=(len(rows.keys), *rows.shape))
    return array


def _open_whole(folder: Path, rows: Rows) -> Values | None:
    """The values where every row is done; also from a cache that may only be read."""
    try:
        if not rows_done(folder, len(rows.keys)).all():
            return None
        array = _map(folder, rows)
    except (OSError, ValueError):  # there is none yet, or somebody damaged it
        return None
    with suppress(OSError):
        os.utime(folder)
    return array


def _create(folder: Path, rows: Rows) -> None:
    """Make the files of a folder with all rows missing, unless they are there and undamaged."""
    lengths = {"done": len(rows.keys), "pixels": rows.bytes, "keys": 16 * len(rows.keys)}
    with suppress(OSError):
        if all((folder / name).stat().st_size == length for name, length in lengths.items()):
            return
    free = shutil.disk_usage(folder).free
    if free < rows.bytes:
        raise OSError(ENOSPC, f"{_size(rows.bytes)} are needed and {_size(free)} free")
    # `done` comes first: what it said does not hold for pixels that are made anew.
    for name, length in lengths.items():
        with (folder / name).open("wb") as file:
            _reserve(file.fileno(), length)
    (folder / "keys").write_bytes(b"".join(rows.keys))
    (folder / "about.json").write_text(json.dumps({"owner": rows.owner, "images": len(rows.keys)}))


def _reserve(file: int, length: int) -> None:
    """Make room for a file: what is mapped without it ends the process on a disk that has become full."""
    if length and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, length)
    else:
        os.truncate(file, length)


def _inherit(disk: Disk, folder: Path, rows: Rows) -> None:
    """Copy what other folders hold under the same keys: the rows of files that did not change."""
    missing = {rows.keys[position]: position for position in np.flatnonzero(~disk.done).tolist()}
    for other in _siblings(folder):
        try:
            keys, done = (other / "keys").read_bytes(), np.fromfile(other / "done", np.bool_)
            array = np.memmap(other / "pixels", rows.dtype, "r", shape=(len(done), *rows.shape))
        except (OSError, ValueError):
            continue
        for row in np.flatnonzero(done).tolist():
            position = missing.pop(keys[16 * row : 16 * row + 16], None)
            if position is not None:
                disk.write({position: array[row]})
                disk.sync_when_due()
    disk.sync()


def _siblings(folder: Path) -> list[Path]:
    """The other folders of the same kind, the last used first."""
    used = {}
    for other in folder.parent.glob("[!.]*"):
        with suppress(OSError):  # another process may be removing it
            used[other] = other.stat().st_mtime
    used.pop(folder, None)
    return sorted(used, key=used.__getitem__, reverse=True)


def _evict(folder: Path) -> None:
    """Remove the oldest folders of the same owner."""
    with suppress(OSError):
        os.utime(folder)
    same = [other for other in _siblings(folder) if _owner(other) == _owner(folder)]
    for old in same[FOLDERS_KEPT - 1 :]:
        shutil.rmtree(old, ignore_errors=True)


def _owner(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / "about.json").read_text())["owner"])
    except (OSError, ValueError, KeyError):
        return None


def physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**33


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GB" if count >= 2**30 else f"{count / 2**20:.1f} MB"
