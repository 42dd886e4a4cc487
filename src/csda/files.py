"""Read regular files only, write files that are complete or absent, and lock them."""

from __future__ import annotations

import csv
import io
import os
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from errno import EINVAL
from io import FileIO
from pathlib import Path

from csda.errors import RunError, explained


class NotRegularError(OSError):
    """A folder, pipe, socket or device instead of a file."""


def open_regular(path: Path) -> FileIO:
    """Open a file for reading. Anything but a regular file raises an OSError, without waiting for a pipe or device."""
    file = FileIO(path, opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0)))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise NotRegularError(EINVAL, "is not a regular file")
    return file


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    write_whole(path, buffer.getvalue())


def write_whole(path: Path, content: str | bytes) -> Path:
    """Write a file so that it is complete or absent, also after a crash or on a full disk."""
    temporary = path.with_name(f".{path.name}.writing")
    with explained(path):
        require_replaceable(path)
        temporary.unlink(missing_ok=True)  # of a write that was interrupted; a link or pipe there is not followed
        try:
            with temporary.open("xb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            raise
        sync_folder(path.parent)
    return path


def require_replaceable(path: Path) -> None:
    """Refuse a folder, device, pipe or socket, which a file would replace, also if a link leads there."""
    if path.exists() and not path.is_file():
        raise RunError(f"{path}: not a regular file, and a file would replace it; give another --out")


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def lock(handle: int) -> bool:
    """Lock this file or folder; False if another process has it. True on systems without such locks."""
    with suppress(ImportError):
        import fcntl

        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
