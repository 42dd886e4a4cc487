"""The pixels of a data set: every image is decoded once, in parallel, and cached."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

from csda.data.cache import Progress, Rows, digest, folder_of, load_cached, load_in_memory, rows_done
from csda.data.decode import Aspect, UnreadableError, has_colour, read_image, unremarked
from csda.data.records import Dataset, Pixels, Record
from csda.errors import DataError
from csda.folders import default_cache

DECODING = 2
"""Part of every key; increase it if `read_image` changes."""

DRAWN_IN_MEMORY = 2**28
"""Drawn data sets of up to this size are not cached but drawn each time."""

LISTED = 10
"""Largest number of unreadable images named in a message."""

_OPENING = threading.Lock()
"""Held while pixels are opened, so that parallel runs do not draw the same data set twice."""

_drawn: WeakValueDictionary[bytes, Pixels] = WeakValueDictionary()
"""Drawn data sets that a run of this process holds."""


@dataclass(frozen=True, slots=True)
class PixelStore:
    """The pixels of a set: row r of `array` [N, H, W, C] belongs to `dataset.records[r]`.

    Rows that could not be read are black; `unreadable` has the reasons.
    """

    array: Pixels
    unreadable: list[tuple[Record, str]]
    keys: Sequence[bytes]
    """The cache key of each row, from file, size and way of decoding."""
    remarks: tuple[str, ...] = ()


def open_pixels(
    dataset: Dataset,
    size: int,
    *,
    channels: int | None = None,
    aspect: Aspect = "squash",
    cache: Path | None = None,
    workers: int | None = None,
    max_unreadable: float = 0.01,
    progress: Progress | None = None,
) -> PixelStore:
    """The images of a data set as uint8 [N, size, size, channels], decoded unless they are cached.

    With `channels` None there are three if any image has colour, else one. Drawn images have their own number of
    channels and are always square. `progress(done, total)` is called while rows are made. If more than a share of
    `max_unreadable` cannot be read, an error is raised.
    """
    if not dataset.records:
        raise DataError(f"{dataset.root or dataset.name} has no images.")
    cache = cache or default_cache()
    workers = workers or available_cores()
    progress = progress or (lambda done, total: None)
    failed: dict[int, str] = {}
    remarks: tuple[str, ...] = ()
    with _OPENING, unremarked():
        if dataset.draw is None:
            rows = _file_rows(dataset, size, channels, cache, workers, aspect)
        else:
            rows = _drawn_rows(dataset, size, workers)
        if dataset.draw is not None and rows.bytes <= DRAWN_IN_MEMORY:
            array = _draw_once(rows, progress)
        else:
            array, failed, remarks = load_cached(rows, cache, progress)
    unreadable = [(dataset.records[row], failed[row]) for row in sorted(failed)]
    if unreadable:
        refuse_unreadable(dataset, unreadable, max_unreadable)
        remarks = (*remarks, f"{len(unreadable)} of {len(array)} images cannot be read and are skipped")
    shared = f"{rows.place} {rows.settings}".encode()
    # A black row is not cached, because the file may be repaired later.
    keys = [digest(b"black" if row in failed else shared, key) for row, key in enumerate(rows.keys)]
    return PixelStore(array, unreadable, keys, remarks)


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _file_rows(
    dataset: Dataset, size: int, channels: int | None, cache: Path, workers: int, aspect: Aspect = "squash"
) -> Rows:
    paths = [record.path for record in dataset.records]
    keys, settings = file_keys(dataset), settings_of(channels)
    if aspect != "squash":
        settings += f", {aspect}"
        keys = [digest(aspect.encode(), key) for key in keys]
    if channels is None:
        # A cached folder of colour was made because some image has colour; one of grey only tells about its own rows.
        grey, colour = (folder_of(cache, _place(size, count), settings, keys) for count in (1, 3))
        unknown = [path for path, done in zip(paths, rows_done(grey, len(paths)).tolist(), strict=True) if not done]
        channels = 3 if colour.is_dir() or _any_colour(unknown, size, workers) else 1

    def make(positions: Sequence[int]) -> list[Pixels | str]:
        return [_read(paths[position], size, channels, aspect) for position in positions]

    owner, shape = f"{dataset.name} {dataset.root}", (size, size, channels)
    return Rows(owner, settings, keys, shape, make, workers, _place(size, channels))


def _place(size: int, channels: int) -> str:
    return f"pixels/{size}x{channels}"


def _read(path: Path | None, size: int, channels: int, aspect: Aspect) -> Pixels | str:
    if path is None:
        return "has no file"
    try:
        return read_image(path, size, channels, aspect)
    except UnreadableError as error:
        return error.reason


def settings_of(channels: int | None) -> str:
    return f"channels {channels or 'by content'}"


def file_keys(dataset: Dataset) -> list[bytes]:
    return [_file_key(record.path) for record in dataset.records]


def _file_key(path: Path | None) -> bytes:
    if path is None:
        return digest(b"no file")
    try:
        status = path.stat()
    except OSError:
        return digest(b"missing", bytes(path.absolute()))
    settings = b"decoding %d, %d bytes, written at %d, changed at %d, inode %d" % (
        DECODING, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino
    )  # fmt: skip
    return digest(settings, bytes(path.absolute()))


def _any_colour(paths: Sequence[Path | None], size: int, workers: int) -> bool:
    """Whether any image has colour; stops at the first."""

    def coloured(path: Path | None) -> bool:
        try:
            return path is not None and has_colour(path, size)
        except UnreadableError:
            return False

    few = 2 * workers  # a data set in colour usually has it in the first image
    with ThreadPoolExecutor(workers) as pool:
        return any(pool.map(coloured, paths[:few])) or any(
            any(pool.map(coloured, paths[start : start + 256])) for start in range(few, len(paths), 256)
        )


def _drawn_rows(dataset: Dataset, size: int, workers: int) -> Rows:
    draw, count = dataset.draw, len(dataset.records)
    assert draw is not None
    # `drawn_with` may be incomplete, so the key also has a hash of a few images.
    sample = draw(sorted({0, count // 3, count // 2, count - 1}), size)
    drawn_with = digest(dataset.name.encode(), dataset.drawn_with.encode(), sample.tobytes())
    keys = [digest(drawn_with, f"{record.id} {record.label}".encode()) for record in dataset.records]
    place = _place(size, sample.shape[-1])
    return Rows(
        dataset.name,
        "drawn",
        keys,
        sample.shape[1:],
        lambda rows: list(draw(rows, size)) if rows else [],
        workers,
        place,
    )


def _draw_once(rows: Rows, progress: Progress) -> Pixels:
    name = digest(*rows.keys, repr(rows.shape).encode())
    array = _drawn.get(name)
    if array is None:
        array, _ = load_in_memory(rows, progress)
        _drawn[name] = array
    progress(len(array), len(array))
    return array


def refuse_unreadable(dataset: Dataset, unreadable: list[tuple[Record, str]], max_unreadable: float) -> None:
    """Raise a `DataError` with names if too many images cannot be read."""
    total = len(dataset.records)
    if len(unreadable) < total and len(unreadable) <= max_unreadable * total:
        return
    listed = "".join(f"\n  {record.path or record.id}: {reason}" for record, reason in unreadable[:LISTED])
    more = f"\n  and {len(unreadable) - LISTED} more" if len(unreadable) > LISTED else ""
    raise DataError(
        f"{len(unreadable)} of {total} images of {dataset.root or dataset.name} cannot be read, and no more than a "
        f"share of {max_unreadable:g} may be skipped (max_unreadable):{listed}{more}"
    )
