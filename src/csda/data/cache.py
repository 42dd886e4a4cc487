"""The cache on disk: rows of pixels that are made once, by any number of processes, and then mapped into memory.

One folder holds one list of rows. Every row has a key, and the folder is named by the digest of all keys in their
order: when one changes, a new folder is made and the rows that stayed are copied from the old one. A row counts once
it is marked as done, and it is marked after its pixels have reached the disk, so that a process may be killed at any
time and the next one goes on where it was. Processes that fill the same folder share the work by claiming chunks of
rows. The claims only save time: whoever makes a row makes the same bytes, so a lost claim spoils nothing. Rows that
cannot be made are not marked, and the next who asks tries again.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, suppress
from dataclasses import dataclass
from errno import EDQUOT, ENOSPC
from hashlib import blake2b
from io import FileIO
from pathlib import Path
from secrets import token_hex
from threading import Lock

import numpy as np
import numpy.typing as npt

from csda.data.records import Pixels
from csda.errors import DataError

FOLDERS_KEPT = 3
"""For one set at one size: the present list of files and earlier ones, whose rows may be of use again."""

SYNC_SECONDS = 0.5
"""How often what was written is marked as done: so much work is lost when a process is killed."""

Progress = Callable[[int, int], None]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Rows:
    """What is to be made: `make(positions)` gives the pixels of each row, or the reason why it has none."""

    owner: str
    settings: str
    keys: Sequence[bytes]
    shape: tuple[int, int, int]
    make: Callable[[Sequence[int]], Sequence[Pixels | str]]
    workers: int

    @property
    def bytes(self) -> int:
        return len(self.keys) * math.prod(self.shape)

    @property
    def chunk(self) -> int:
        """Rows that are claimed and made together: few, so that processes share well and an interrupt is quick."""
        return min(16, max(1, len(self.keys) // 32))


def digest(*parts: bytes) -> bytes:
    """Sixteen bytes that stand for all of `parts`."""
    summary = blake2b(digest_size=16)
    for part in parts:
        summary.update(b"%d:" % len(part) + part)
    return summary.digest()


def folder_of(cache: Path, settings: str, keys: Sequence[bytes], shape: tuple[int, int, int]) -> Path:
    return cache / "pixels" / f"{shape[0]}x{shape[2]}" / digest(settings.encode(), *keys).hex()


def rows_done(folder: Path, count: int) -> Flags:
    """Which of `count` rows the folder holds; none where there is no such folder, or a damaged one."""
    try:
        done = np.fromfile(folder / "done", np.bool_)
    except OSError:
        done = np.zeros(0, bool)
    return done if len(done) == count else np.zeros(count, bool)


def load_cached(rows: Rows, cache: Path, progress: Progress) -> tuple[Pixels, dict[int, str], tuple[str, ...]]:
    """Pixels [N, H, W, C], the reasons for rows that have none, and remarks.

    What is missing in the cache is made; where the disk does not take it, all rows are made in memory if they fit.
    """
    folder = folder_of(cache, rows.settings, rows.keys, rows.shape)
    if (array := _open_whole(folder, rows)) is not None:
        progress(len(array), len(array))
        return array, {}, ()
    try:
        _create(folder, rows)
        with closing(Disk(folder, rows)) as disk:
            _inherit(disk, folder, rows)
            failed = fill(disk, rows, progress)
        _evict(folder)
        return disk.array, failed, ()
    except OSError as error:
        if error.errno in (ENOSPC, EDQUOT):  # half a set is of no use on a disk that has no room for it
            shutil.rmtree(folder, ignore_errors=True)
        problem = f"The pixel cache {cache} cannot be written ({error.strerror or error})"
        if rows.bytes > physical_memory() // 2:
            raise DataError(
                f"{problem} and the {_size(rows.bytes)} of pixels do not fit into memory either: name a folder with "
                f"room in the environment variable CSDA_CACHE or choose a smaller image_size."
            ) from error
        remark = f"{problem}: images are decoded anew on each start, unless CSDA_CACHE names a folder with room."
        return *load_in_memory(rows, progress), (remark,)


def load_in_memory(rows: Rows, progress: Progress) -> tuple[Pixels, dict[int, str]]:
    """Pixels [N, H, W, C] and the reasons for rows that have none, without a cache."""
    memory = Memory(rows)
    failed = fill(memory, rows, progress)
    return memory.array, failed


class Memory:
    """Rows in memory."""

    def __init__(self, rows: Rows) -> None:
        self.array: Pixels = np.zeros((len(rows.keys), *rows.shape), np.uint8)
        self.done: Flags = np.zeros(len(rows.keys), bool)

    def claim(self, chunk: int) -> bool:
        return True

    def write(self, images: Mapping[int, Pixels]) -> None:
        for position, image in images.items():
            self.array[position] = image

    def mark(self, chunk: int, positions: Sequence[int]) -> None:
        self.done[positions] = True

    def sync(self) -> None:
        pass


class Disk:
    """Rows in a folder of the cache, which other processes may be filling too: `done` shows their work as well."""

    def __init__(self, folder: Path, rows: Rows) -> None:
        self.array: Pixels = np.memmap(folder / "pixels", np.uint8, "r", shape=(len(rows.keys), *rows.shape))
        self.done: Flags = np.memmap(folder / "done", np.bool_, "r", shape=(len(rows.keys),))
        self._files = [FileIO(folder / name, "r+b") for name in ("pixels", "done", "claims")]
        self._pixels, self._done, self._claims = self._files
        self._writing = Lock()
        self._written: list[tuple[int, Sequence[int]]] = []
        self._synced = time.monotonic()

    def close(self) -> None:
        for file in self._files:
            file.close()

    def claim(self, chunk: int) -> bool:
        """Whether the chunk is ours; the system takes a claim back when its process ends, however it ends."""
        return self._lock(chunk, True)

    def write(self, images: Mapping[int, Pixels]) -> None:
        """Any thread may write; a row does not count before it is marked."""
        for run in _runs(images):
            # One write for many rows: the workers wait for each other less often.
            pixels = np.stack([images[position] for position in run])
            with self._writing:
                _write_at(self._pixels, run.start * pixels[0].size, pixels.data.cast("B"))

    def mark(self, chunk: int, positions: Sequence[int]) -> None:
        """Rows of the chunk that were written are done with the next `sync`, which is due now and then."""
        self._written.append((chunk, positions))
        if time.monotonic() > self._synced + SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Let what was marked count, now that it is safe on the disk, and give its claims back."""
        os.fsync(self._pixels.fileno())
        for chunk, positions in self._written:
            for run in _runs(positions):
                _write_at(self._done, run.start, memoryview(b"\1" * len(run)))
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


def fill(sheet: Memory | Disk, rows: Rows, progress: Progress) -> dict[int, str]:
    """Make all rows that are missing; gives the reasons for those that cannot be made."""
    total, ready = len(rows.keys), int(sheet.done.sum())
    failed: dict[int, str] = {}

    def make(chunk: int) -> tuple[list[int], dict[int, str]] | None:
        """Positions written, and reasons for the others; None where another process is at the chunk."""
        if not sheet.claim(chunk):
            return None
        span = range(chunk * rows.chunk, min(total, (chunk + 1) * rows.chunk))
        missing = [position for position in span if not sheet.done[position]]
        made = dict(zip(missing, rows.make(missing), strict=True))
        images = {position: result for position, result in made.items() if not isinstance(result, str)}
        sheet.write(images)
        return list(images), {position: result for position, result in made.items() if isinstance(result, str)}

    progress(ready, total)
    chunks = sorted({position // rows.chunk for position in np.flatnonzero(~sheet.done).tolist()})
    pool = ThreadPoolExecutor(rows.workers)
    try:
        while chunks:
            elsewhere = []
            made = {pool.submit(make, chunk): chunk for chunk in chunks}
            for future in as_completed(made):
                if (result := future.result()) is None:
                    elsewhere.append(made[future])
                    continue
                sheet.mark(made[future], result[0])
                failed |= result[1]
                ready += len(result[0]) + len(result[1])
                progress(ready, total)
            sheet.sync()
            if chunks := elsewhere:  # another process is at them; should it die, they are ours in the next round
                time.sleep(0.1)
                ready = int(sheet.done.sum()) + len(failed)
                progress(ready, total)
    finally:
        pool.shutdown(cancel_futures=True)
    return failed


def _runs(positions: Iterable[int]) -> list[range]:
    """Ascending positions as ranges without a gap."""
    runs: list[range] = []
    for position in positions:
        if runs and runs[-1].stop == position:
            runs[-1] = range(runs[-1].start, position + 1)
        else:
            runs.append(range(position, position + 1))
    return runs


def _write_at(file: FileIO, offset: int, data: memoryview) -> None:
    file.seek(offset)
    while data:
        data = data[file.write(data) :]


def _open_whole(folder: Path, rows: Rows) -> Pixels | None:
    """The pixels where every row is done; also from a cache that may only be read."""
    try:
        if not rows_done(folder, len(rows.keys)).all():
            return None
        array: Pixels = np.memmap(folder / "pixels", np.uint8, "r", shape=(len(rows.keys), *rows.shape))
    except (OSError, ValueError):  # there is none yet, or somebody damaged it
        return None
    with suppress(OSError):
        os.utime(folder)
    return array


def _create(folder: Path, rows: Rows) -> None:
    """Make the folder in one step, with all rows missing; an undamaged one that is there stays."""
    lengths = {"pixels": rows.bytes, "done": len(rows.keys), "claims": 0, "keys": 16 * len(rows.keys)}
    if folder.exists():
        with suppress(OSError):
            if all((folder / name).stat().st_size == length for name, length in lengths.items()):
                return
        shutil.rmtree(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free
    if free < rows.bytes:
        raise OSError(ENOSPC, f"{_size(rows.bytes)} are needed and {_size(free)} free")
    draft = folder.with_name(f".draft-{token_hex(8)}")
    draft.mkdir()
    try:
        for name, length in lengths.items():
            with (draft / name).open("wb") as file:
                file.truncate(length)
        (draft / "keys").write_bytes(b"".join(rows.keys))
        (draft / "about.json").write_text(json.dumps({"owner": rows.owner, "images": len(rows.keys)}))
        draft.rename(folder)
    except OSError:
        if not folder.is_dir():  # otherwise another process was faster
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _inherit(disk: Disk, folder: Path, rows: Rows) -> None:
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
                disk.write({position: array[row]})
                disk.mark(position // rows.chunk, [position])
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
    """Remove the oldest folders of the same owner, and drafts that killed processes left a day ago or earlier."""
    with suppress(OSError):
        os.utime(folder)
        same = [other for other in _siblings(folder) if _owner(other) == _owner(folder)]
        stale = [draft for draft in folder.parent.glob(".draft-*") if draft.stat().st_mtime < time.time() - 86400]
        for old in same[FOLDERS_KEPT - 1 :] + stale:
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
