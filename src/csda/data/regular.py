"""Open regular files only, because a pipe or a device may block forever."""

from __future__ import annotations

import os
import stat
from errno import EINVAL
from io import FileIO
from pathlib import Path


class NotRegularError(OSError):
    """A folder, pipe, socket or device instead of a file."""


def open_regular(path: Path) -> FileIO:
    """Open a file for reading. Anything but a regular file raises an OSError, without waiting."""
    file = FileIO(path, opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0)))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise NotRegularError(EINVAL, "is not a regular file")
    return file
