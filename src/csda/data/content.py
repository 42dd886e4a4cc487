"""A hash of the content of a data set, equal for two folders with the same images, labels and groups."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path

from csda.data.cache import digest, recall, remember
from csda.data.decode import UnreadableError, explain_failure
from csda.data.records import Dataset
from csda.data.splits import label_text
from csda.data.store import available_cores, file_keys
from csda.errors import DataError
from csda.files import open_regular
from csda.folders import default_cache

UNREADABLE = digest(b"unreadable")
"""The hash of a file that is missing or may not be read."""

WIDTH = len(UNREADABLE)


def hash_contents(
    dataset: Dataset, cache: Path | None = None, *, fresh: bool = False, keys: Sequence[bytes] | None = None
) -> list[bytes]:
    """A hash of each record's file.

    Hashes are cached by path, size, inode and times, so a file is read again only if one of these changes, or with
    `fresh`. `keys` are the `file_keys`, if they are known. Drawn images are hashed by their parameters.
    """
    if dataset.draw is None:
        return _hash_files(dataset, cache or default_cache(), fresh, keys or file_keys(dataset))
    return [digest(dataset.name.encode(), dataset.drawn_with.encode())] * len(dataset.records)


def require_unchanged(dataset: Dataset, keys: Sequence[bytes]) -> None:
    """Refuse a data set in which a file was changed since its `file_keys` were computed."""
    for record, before, now in zip(dataset.records, keys, file_keys(dataset), strict=True):
        if before != now:
            raise DataError(f"{record.path}: changed while the images were read; start again when no program writes it")


def content_digest(dataset: Dataset, contents: Sequence[bytes] | None = None) -> str:
    """A hash of ids, labels, groups and file `contents` of a data set, 16 hexadecimal digits.

    It does not depend on the path of the folder or the image size.
    """
    contents = hash_contents(dataset) if contents is None else contents
    lines = [
        digest(record.id.encode(), label_text(record.label, dataset.classes).encode(), _group(record.group), content)
        for record, content in zip(dataset.records, contents, strict=True)
    ]
    return digest(*sorted(lines)).hex()[:16]


def _group(group: str | None) -> bytes:
    return b"" if group is None else b"group " + group.encode()


def _hash_files(dataset: Dataset, cache: Path, fresh: bool, keys: Sequence[bytes]) -> list[bytes]:
    """A hash of each record's file, from the cache if the file did not change."""
    memory = cache / "content" / digest(f"{dataset.name} {(dataset.root or Path()).absolute()}".encode()).hex()
    known = {} if fresh else _recall(memory)
    missing = [position for position, key in enumerate(keys) if key not in known]
    with ThreadPoolExecutor(available_cores()) as pool:
        hashes = list(pool.map(hash_file, [dataset.records[position].path for position in missing]))
    made = {keys[position]: found for position, found in zip(missing, hashes, strict=True)}
    if read := {key: found for key, found in made.items() if found != UNREADABLE}:
        remember(memory, b"".join(key + content for key, content in (known | read).items()))
    known |= made
    return [known[key] for key in keys]


def hash_file(path: Path | None) -> bytes:
    """A hash of the file's bytes; `UNREADABLE` if it cannot be read."""
    if path is None:
        return UNREADABLE
    try:
        with open_regular(path) as file:
            summary = blake2b(b"%d:" % os.fstat(file.fileno()).st_size, digest_size=WIDTH)  # the same as in `digest`
            while part := file.read(1 << 24):
                summary.update(part)
            return summary.digest()
    except (OSError, MemoryError) as error:
        failure = explain_failure(path, error)
        if isinstance(failure, UnreadableError):
            return UNREADABLE
        raise failure from error


def _recall(memory: Path) -> dict[bytes, bytes]:
    """Cached hashes by file key; empty if the file is missing or damaged."""
    pairs = recall(memory) or b""
    cells = [pairs[start : start + WIDTH] for start in range(0, len(pairs), WIDTH)]
    return dict(zip(cells[::2], cells[1::2], strict=True))
