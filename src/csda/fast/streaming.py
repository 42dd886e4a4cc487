"""Pixels that stay on the host: each batch is gathered and copied to the device before the step that needs it.

The order of an epoch is known before its first step, so threads read the rows of the next batches while the device
computes. On a GPU they write into pinned memory, which a separate stream copies to the device. On the CPU no copy is
needed.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import cycle

import numpy as np
import torch
from torch import Tensor

from csda.data.augment import Augmentation, Selection
from csda.data.cache import MappedRows
from csda.data.loader import ImagePool, Positions
from csda.data.records import Pixels
from csda.errors import DataError

AHEAD = 8
"""Batches that are gathered in advance, with one thread for each."""


class StreamedPool(ImagePool):
    """The images of a part that stays on the host. Batches are copied to the device in advance.

    A batch whose pixels were not fetched in advance is fetched while the host waits, so a step that asks for one cannot
    be captured in a CUDA graph.
    """

    streamed = True

    def __init__(
        self,
        pixels: Pixels,
        rows: Positions,
        device: torch.device,
        augmentation: Augmentation,
        generator: torch.Generator,
    ) -> None:
        self.host = HostPixels(pixels, rows, device)
        self.augmentation = augmentation
        self.generator = generator

    def __len__(self) -> int:
        return len(self.host)

    def select(self, indices: Tensor, pixels: Tensor | None) -> Selection:
        return Selection(self.host.take(indices) if pixels is None else pixels)

    def prefetch(self, batches: Tensor) -> Iterator[Tensor]:
        return self.host.stream(batches)

    def fetch(self, batch_size: int, *, shuffled: bool) -> Iterator[tuple[Tensor, Tensor | None]]:
        order = list(self.order(batch_size, shuffled=shuffled))
        on_host = torch.cat(order).cpu().split(batch_size)
        return zip(order, self.host.stream(on_host), strict=True)

    def first(self, count: int) -> ImagePool:
        host = self.host
        return StreamedPool(host.array, host.rows[:count], host.device, self.augmentation, self.generator)


class HostPixels:
    """Images [N, H, W, C] on the host: the `rows` of an array in memory or of a mapped file.

    A mapped file is read row by row with `pread`. Reading through the map would make the system read megabytes around
    each row that is not in memory yet.
    """

    def __init__(self, array: Pixels, rows: Positions, device: torch.device) -> None:
        self.array = array
        self.rows = rows
        self.device = device
        self._guard = array.guard if isinstance(array, MappedRows) else None
        self._file: int | None = None
        self._name, self._offset = "", 0
        if isinstance(array, np.memmap) and isinstance(array.base, mmap.mmap) and hasattr(os, "preadv"):
            self._name, self._offset = str(array.filename), int(array.offset)
            with suppress(OSError):  # the map outlives a file that another process removed
                self._file = os.open(self._name, os.O_RDONLY)
                weakref.finalize(self, os.close, self._file)

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, indices: Tensor) -> Tensor:
        """Pixels [B, H, W, C] on the device. The host waits for the indices, and the device for the pixels."""
        gathered = torch.empty(self._shape(len(indices)), dtype=torch.uint8)
        self.gather(indices.numpy(force=True), gathered.numpy())
        return gathered.to(self.device)

    def gather(self, indices: Positions, images: Pixels) -> None:
        """Write the images at these positions into `images`."""
        rows = self.rows[indices]
        if self._file is None:
            if self._guard is not None:
                self._guard.check(self.array.view(np.ndarray), rows)
            # Any mode but "raise" writes straight into the result.
            np.take(self.array, rows, axis=0, out=images, mode="clip")
            return
        for row, image in zip(rows.tolist(), images, strict=True):
            self._read(row, image)
            if self._guard is not None and not self._guard.accepts(row, image):
                self._read(row, image)

    def _read(self, row: int, image: Pixels) -> None:
        assert self._file is not None
        if os.preadv(self._file, [image.data], self._offset + row * image.nbytes) < image.nbytes:
            raise DataError(f"{self._name} was cut short while it was in use; train again to restore it")

    def stream(self, batches: Sequence[Tensor] | Tensor) -> Iterator[Tensor]:
        """Yield the pixels [B, H, W, C] on the device for each batch of indices on the host. The first batch must be
        the largest.

        Use each batch before requesting the next one, because its memory is then filled again.
        """
        copies = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        shape = self._shape(len(batches[0]))
        slots = [Slot(shape, self.device, copies) for _ in range(min(AHEAD, len(batches)))]
        waiting: deque[Slot] = deque()
        threads = ThreadPoolExecutor(len(slots), thread_name_prefix="csda-pixels")
        try:
            for indices, slot in zip(batches, cycle(slots), strict=False):
                if len(waiting) == len(slots):
                    yield from _deliver(waiting)
                slot.gather(threads, self, indices.numpy())
                waiting.append(slot)
            while waiting:
                yield from _deliver(waiting)
        finally:
            threads.shutdown(cancel_futures=True)

    def _shape(self, count: int) -> tuple[int, ...]:
        return count, *self.array.shape[1:]


class Slot:
    """Memory for one batch: a buffer on the host, and one on the device unless this is the CPU.

    Only the thread that requests batches uses the device. Other threads would break its capture of a CUDA graph.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device, copies: torch.cuda.Stream | None) -> None:
        self._host = self._device = torch.empty(shape, dtype=torch.uint8, pin_memory=copies is not None)
        self._copies = copies
        self._gathered: Future[int] | None = None
        self._sent = False
        if copies is not None:
            self._device = torch.empty(shape, dtype=torch.uint8, device=device)
            self._copied, self._used = torch.cuda.Event(blocking=True), torch.cuda.Event()
            self._used.record(torch.cuda.current_stream(device))

    def gather(self, threads: Executor, source: HostPixels, indices: Positions) -> None:
        """Start to fill the host buffer as soon as the previous batch has been copied from it."""
        if self._copies is not None:
            self._copied.synchronize()
        self._sent = False
        self._gathered = threads.submit(self._gather, source, indices)

    @property
    def gathered(self) -> bool:
        return self._gathered is not None and self._gathered.done() and self._gathered.exception() is None

    def send(self) -> int:
        """Copy the batch to the device once the work on the previous batch is done there; return the number of its
        images.
        """
        assert self._gathered is not None
        count = self._gathered.result()
        if self._copies is not None and not self._sent:
            with torch.cuda.stream(self._copies):
                self._copies.wait_event(self._used)
                self._device[:count].copy_(self._host[:count], non_blocking=True)
                self._copied.record(self._copies)
            self._sent = True
        return count

    def receive(self) -> Tensor:
        count = self.send()
        if self._copies is not None:
            torch.cuda.current_stream(self._device.device).wait_event(self._copied)
        return self._device[:count]

    def release(self) -> None:
        """Mark the slot as free, once all work that uses the batch has been submitted to the device."""
        if self._copies is not None:
            self._used.record(torch.cuda.current_stream(self._device.device))

    def _gather(self, source: HostPixels, indices: Positions) -> int:
        source.gather(indices, self._host[: len(indices)].numpy())
        return len(indices)


def _deliver(waiting: deque[Slot]) -> Iterator[Tensor]:
    """Yield the next batch, and start to copy the one after it."""
    slot = waiting.popleft()
    images = slot.receive()
    if waiting and waiting[0].gathered:
        waiting[0].send()
    yield images
    slot.release()
