"""Work beside work: what two parts of a step do not need of each other runs on the GPU at the same time.

Alignment and queue are a hundred kernels of a few microseconds. They wait for each other, not for the hardware, so
beside the passes of a network they cost next to nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class _Here(threading.local):
    """What this thread has running beside its current stream."""

    stream: torch.cuda.Stream | None = None
    forked = False

    def __init__(self) -> None:
        self.kept: list[object] = []


_here = _Here()


@contextmanager
def beside(device: torch.device, *kept: object) -> Iterator[None]:
    """What is called within runs beside what follows, until `join`; on the CPU it runs at once.

    It sees all that was written before, and nothing may read what it writes, or write what it reads, before `join`.
    `kept` is what it reads and others might let go of: memory that is free for the current stream is not free for it.
    """
    if device.type != "cuda":
        yield
        return
    current = torch.cuda.current_stream(device)
    # Asked of the stream, since "cuda" and "cuda:0" are one device and not equal.
    if _here.stream is None or _here.stream.device != current.device:
        join()
        _here.stream = torch.cuda.Stream(current.device)
    _here.stream.wait_stream(current)
    _here.forked = True
    _here.kept.extend(kept)
    with torch.cuda.stream(_here.stream):
        yield


def join() -> None:
    """What follows sees all that ran beside."""
    if _here.forked:
        assert _here.stream is not None
        torch.cuda.current_stream(_here.stream.device).wait_stream(_here.stream)
        _here.forked = False
        _here.kept.clear()
