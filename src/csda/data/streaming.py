"""Pixels that stay on the host: each batch is gathered and copied to the device ahead of the step that needs it.

The order of an epoch is known before its first step, so a few threads read rows while the device computes. On a GPU
they write into pinned memory and copy on a stream of their own; on the CPU what they gather is already in place.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from csda.data.records import Pixels

AHEAD = 8
"""Batches that are being gathered, copied, or waiting for their step."""

LOADED_ROWS = 256
"""Rows at a time when all of them move to the device."""

Arrival = tuple[Tensor, torch.cuda.Event | None]


class HostPixels:
    """Rows of pixels [N, H, W, C] on the host, in memory or mapped into it, in the order that `rows` names them."""

    def __init__(self, array: Pixels, rows: npt.NDArray[np.int64], device: torch.device) -> None:
        self.array = np.asarray(array)
        self.rows = rows
        self.device = device
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def bytes(self) -> int:
        return len(self) * math.prod(self.array.shape[1:])

    def first(self, count: int) -> HostPixels:
        return HostPixels(self.array, self.rows[:count], self.device)

    def take(self, indices: Tensor) -> Tensor:
        """Pixels [B, H, W, C] on the device, at once; the host waits for the indices."""
        return self._receive(self._send(indices.numpy(force=True)))

    def stream(self, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        """Pixels [B, H, W, C] on the device for each batch of indices, which lie on the host, in their order."""
        pending: deque[Future[Arrival]] = deque()
        threads = ThreadPoolExecutor(AHEAD, thread_name_prefix="csda-pixels")
        try:
            for indices in batches:
                pending.append(threads.submit(self._send, indices.numpy()))
                if len(pending) == AHEAD:
                    yield self._receive(pending.popleft().result())
            while pending:
                yield self._receive(pending.popleft().result())
        finally:
            threads.shutdown(cancel_futures=True)

    def load(self) -> Tensor:
        """All rows on the device, without a copy of all of them on the host."""
        pixels = torch.empty((len(self), *self.array.shape[1:]), dtype=torch.uint8, device=self.device)
        everything = torch.arange(len(self)).split(LOADED_ROWS)
        for place, rows in zip(pixels.split(LOADED_ROWS), self.stream(everything), strict=True):
            place.copy_(rows)
        return pixels

    def _send(self, indices: npt.NDArray[np.int64]) -> Arrival:
        with torch.cuda.stream(self._copies):
            gathered = torch.empty(
                (len(indices), *self.array.shape[1:]), dtype=torch.uint8, pin_memory=self._copies is not None
            )
            # Any mode but "raise" writes straight into the buffer.
            np.take(self.array, self.rows[indices], axis=0, out=gathered.numpy(), mode="clip")
            pixels = gathered.to(self.device, non_blocking=True)
            return pixels, None if self._copies is None else self._copies.record_event()

    def _receive(self, arrival: Arrival) -> Tensor:
        pixels, copied = arrival
        if copied is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(copied)
            pixels.record_stream(current)  # the memory belongs to the stream of the copies
        return pixels
