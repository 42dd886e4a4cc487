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


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python, torch on the CPU or torch on a GPU had no room for something; without an import of torch."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("can't allocate memory" in text or "CUDA out of memory" in text)


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Say what the operating system refused on this path, and what to do about it."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        way_on = "then go on, a training with --resume and a grid with the same command"
        remedy = f"free some space, {way_on}" if full else "make it writable, or give another --out"
        raise RunError(f"{path}: {(error.strerror or str(error)).lower()}; {remedy}") from None
