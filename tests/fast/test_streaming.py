"""Pixels that stay on the host: the same images in the same order, a few batches ahead, and no copy of all of them."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from csda.data.augment import Augmentation
from csda.data.loader import ImagePool, Parts, open_parts
from csda.data.records import Dataset, Record, Split
from csda.errors import DataError
from csda.fast import streaming
from csda.fast.streaming import AHEAD, HostPixels, StreamedPool

CPU = torch.device("cpu")
ARRAY = np.random.default_rng(0).integers(0, 256, (50, 8, 8, 3), np.uint8)
ROWS = np.random.default_rng(1).permutation(50)[:40]


def _host() -> HostPixels:
    return HostPixels(ARRAY, ROWS, CPU)


def _mapped(folder: Path) -> HostPixels:
    (folder / "pixels").write_bytes(b"head" + ARRAY.tobytes())
    return HostPixels(np.memmap(folder / "pixels", np.uint8, "r", offset=4, shape=ARRAY.shape), ROWS, CPU)


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("csda-pixels")]


@pytest.mark.parametrize("batches", [1, 2, AHEAD, 3 * AHEAD + 1])
def test_batches_arrive_in_order(batches: int) -> None:
    order = torch.randint(0, 40, (batches, 5), generator=torch.Generator().manual_seed(2))
    seen = [pixels.clone() for pixels in _host().stream(order)]
    assert np.array_equal(torch.stack(seen).numpy(), ARRAY[ROWS[order.numpy()]])
    assert not _threads()


def test_the_last_batch_may_be_smaller_and_any_may_be_empty() -> None:
    order = torch.arange(40).split(12)
    assert [len(pixels) for pixels in _host().stream(order)] == [12, 12, 12, 4]
    assert [pixels.shape for pixels in _host().stream(torch.zeros(3, 0, dtype=torch.int64))] == [(0, 8, 8, 3)] * 3


def _all_rows(host: HostPixels) -> np.ndarray:
    return torch.cat([pixels.clone() for pixels in host.stream(torch.arange(len(host)).split(7))]).numpy()


def test_some_rows_can_be_taken_at_once() -> None:
    assert np.array_equal(_host().take(torch.tensor([7, 0, 7])).numpy(), ARRAY[ROWS[[7, 0, 7]]])


@pytest.mark.parametrize("how", ["file", "map", "part of a map"])
def test_mapped_rows_are_those_of_the_file(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "map":
        monkeypatch.delattr("os.preadv")
    host = _mapped(tmp_path)
    if how == "part of a map":
        host = HostPixels(host.array[1:], ROWS[ROWS > 0] - 1, CPU)
    (tmp_path / "pixels").unlink()  # another process may clear the cache
    expected = ARRAY[ROWS] if how != "part of a map" else ARRAY[ROWS[ROWS > 0]]
    assert np.array_equal(_all_rows(host), expected)
    assert np.array_equal(host.take(torch.tensor([7, 0, 7])).numpy(), expected[[7, 0, 7]])


def test_a_file_that_is_cut_short_is_named_in_the_loop(tmp_path: Path) -> None:
    host = _mapped(tmp_path)
    with (tmp_path / "pixels").open("r+b") as file:
        file.truncate(4 + 10 * ARRAY[0].nbytes)
    with pytest.raises(DataError, match=r"pixels was cut short while it was in use; train again"):
        _all_rows(host)
    assert not _threads()


def test_threads_work_ahead_but_not_further_than_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered = []
    take = np.take

    def counted(*arguments, **options):  # type: ignore[no-untyped-def]
        gathered.append(1)
        return take(*arguments, **options)

    monkeypatch.setattr(streaming.np, "take", counted)
    stream = _host().stream(torch.zeros(100, 2, dtype=torch.int64))
    for asked in (1, 2, 3):
        next(stream)
        deadline = time.monotonic() + 5
        while len(gathered) < AHEAD + asked - 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        assert len(gathered) == AHEAD + asked - 1


def test_what_fails_in_a_thread_fails_in_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    take = np.take

    def broken(array, rows, **options):  # type: ignore[no-untyped-def]
        if len(rows) == 1:
            raise OSError("the disk is gone")
        return take(array, rows, **options)

    monkeypatch.setattr(streaming.np, "take", broken)
    stream = _host().stream(torch.arange(23).split(2))
    for _ in range(11):
        next(stream)
    with pytest.raises(OSError, match="the disk is gone"):
        next(stream)
    assert not _threads()


def test_a_loop_that_ends_early_ends_the_threads() -> None:
    def interrupted() -> None:
        for number, _ in enumerate(_host().stream(torch.zeros(500, 2, dtype=torch.int64))):
            if number == 3:
                assert _threads()
                raise KeyboardInterrupt

    try:
        interrupted()
    except KeyboardInterrupt as error:
        error.__traceback__ = None  # the frames of the loop hold what it iterates
    assert not _threads()


def _pools() -> tuple[ImagePool, ImagePool]:
    def generator() -> torch.Generator:
        return torch.Generator().manual_seed(5)

    resident = ImagePool(torch.from_numpy(ARRAY[ROWS]), Augmentation(), generator())
    return resident, StreamedPool(ARRAY, ROWS, CPU, Augmentation(), generator())


def test_a_streamed_pool_does_what_a_resident_one_does() -> None:
    indices = torch.tensor([3, 1, 3])

    def observe(pool: ImagePool) -> list[Tensor]:
        seen = [pool.batch(indices).pixels, pool(indices, "weak"), pool.first(2)(torch.tensor([1]), "strong")]
        for shuffled in (True, False):
            for batch in pool.batches(7, shuffled=shuffled):
                seen += [batch.indices, batch.pixels.clone(), batch.weak()]
        at_hand = torch.zeros(3, 8, 8, 3, dtype=torch.uint8)
        return [*seen, pool.batch(indices, at_hand).pixels]

    resident, streamed = _pools()
    assert len(resident) == len(streamed) == 40
    for one, other in zip(observe(resident), observe(streamed), strict=True):
        assert torch.equal(one, other)


def _open(pixels: np.ndarray, share: float, labeled: int = 4, held_out: int = 4) -> Parts:  # type: ignore[type-arg]
    records = tuple(Record(str(number), None, number % 2) for number in range(len(pixels)))
    rest = len(records) - held_out
    split = Split(records[:labeled], records[labeled:rest], records[rest : rest + 2], records[rest + 2 :], {})
    dataset = Dataset("set", ("a", "b"), records)
    return open_parts(dataset, pixels, split, Augmentation(), torch.Generator(), share, StreamedPool)


def test_parts_are_resident_while_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    row = ARRAY[0].nbytes
    monkeypatch.setattr("csda.data.loader.free_memory", lambda device: 100 * row)
    assert _open(ARRAY, 0.5).streamed == ()
    assert _open(ARRAY, 0.48).streamed == ("test",)
    assert _open(ARRAY, 0.46).streamed == ("val", "test")
    assert _open(ARRAY, 0.45).streamed == ("unlabeled",)
    assert _open(ARRAY, 0.02).streamed == _open(ARRAY, 0.0).streamed == ("unlabeled", "val", "test")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells anonymous from mapped memory")
def test_a_mapped_set_is_not_copied_into_memory(tmp_path: Path) -> None:
    def megabytes() -> float:
        status = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) / 1024

    pixels = np.memmap(tmp_path / "pixels", np.uint8, "w+", shape=(1280, 128, 128, 3))
    before = megabytes()
    parts = _open(pixels, 0.0)
    highest = max(megabytes() for _ in parts.unlabeled.batches(16, shuffled=True))
    assert highest - before < 25  # eight batches of 0.8 MB
    resident = _open(pixels, 1.0)
    assert resident.streamed == ()
    offset = resident.unlabeled.pixels.data_ptr() - pixels.ctypes.data
    assert not 0 <= offset < pixels.nbytes, "where it fits, it is to be a copy"
