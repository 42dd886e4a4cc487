"""Open files of a data set: regular files only, since a pipe or a device may never end."""

from __future__ import annotations

import os
import stat
from errno import EINVAL
from io import FileIO
from pathlib import Path


class NotRegularError(OSError):
    """A folder, pipe, socket or device where a file is needed."""


def open_regular(path: Path) -> FileIO:
    """The file for reading; an OSError for all that is not a regular file, without waiting for a writer."""
    file = FileIO(path, opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0)))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise NotRegularError(EINVAL, "is not a regular file")
    return file
