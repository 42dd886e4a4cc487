"""Passes over whole parts: the same work for batch after batch, which an engine captures once and then replays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Repeat = Callable[..., None]


class _Here(threading.local):
    """Who repeats what this thread asks for; without anybody it is called."""

    repeat: Repeat | None = None


_here = _Here()


def repeat(function: Callable[..., None], *arguments: object) -> None:
    """`function(*arguments)`, which writes tensors in place, gives nothing and copies nothing to the host.

    On a GPU it is captured once it has been called often. From then on the tensors among the arguments are read anew
    each time; all else is taken to be as it was whenever function, other arguments and shapes are the same.
    """
    if _here.repeat is None:
        function(*arguments)
    else:
        _here.repeat(function, *arguments)


@contextmanager
def repeated_by(other: Repeat) -> Iterator[None]:
    """Within, `repeat` is the work of another."""
    before, _here.repeat = _here.repeat, other
    try:
        yield
    finally:
        _here.repeat = before
