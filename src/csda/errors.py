"""Errors that a user can fix. The command line prints the message alone and exits with code 2."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class CsdaError(Exception):
    """Base class of expected errors: the message names the problem and what to do."""


class ConfigError(CsdaError):
    """A setting is unknown, out of range, or does not fit the others."""


class DataError(CsdaError):
    """Images, labels or splits cannot be used as they are; names the file and, where there is one, the row."""


class RunError(CsdaError):
    """A run folder is missing, damaged, of another program, or was made with another configuration."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python or torch ran out of memory, on the CPU or a GPU. Does not import torch."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("can't allocate memory" in text or "CUDA out of memory" in text)


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn an operating system error on this path into a message that says what to do."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        way_on = "then continue, a training with --resume and a grid with the same command"
        remedy = f"free some space, {way_on}" if full else "make it writable, or give another --out"
        raise RunError(f"{path}: {(error.strerror or str(error)).lower()}; {remedy}") from None


def counted(number: int, noun: str, verb: str = "") -> str:
    """A number with its noun, and a verb in the plural: `1 file is`, `2 files are`."""
    if number == 1:
        return f"1 {noun} {_OF_ONE[verb]}".rstrip()
    return f"{number} {noun}s {verb}".rstrip()


_OF_ONE = {"": "", "are": "is", "have": "has"}
