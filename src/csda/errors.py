"""Mistakes that a user can mend. The command line prints the message alone and exits with 2."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class CsdaError(Exception):
    """Base of all expected failures: the message names the thing and the way out."""


class ConfigError(CsdaError):
    """A setting is unknown, out of range, or does not fit the others."""


class DataError(CsdaError):
    """Images, labels or splits cannot be used as they are; names the file and, where there is one, the row."""


class RunError(CsdaError):
    """A run folder is missing, torn, foreign, or was made with another configuration."""


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Say what the operating system refused on this path, and what to do about it."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "free some space, then go on with --resume" if full else "make it writable, or give another --out"
        raise RunError(f"{path}: {(error.strerror or str(error)).lower()}; {remedy}") from None
