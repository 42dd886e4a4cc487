"""The pixel store: what it gives, what it remembers, and what it survives."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from csda.data import cache as cache_module
from csda.data import decode, store, synthetic
from csda.data.check import check
from csda.data.decode import Aspect, UnreadableError, read_image
from csda.data.records import Dataset, Pixels, Record
from csda.data.store import open_pixels
from csda.errors import DataError


def make_images(folder: Path, count: int, grey: bool = False) -> Dataset:
    folder.mkdir(exist_ok=True)
    for number in range(count):
        pixels = np.random.default_rng(number).integers(0, 255, (20, 24) if grey else (20, 24, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:03d}.png")
    return list_images(folder)


def list_images(folder: Path) -> Dataset:
    records = tuple(Record(path.name, path, 0) for path in sorted(folder.iterdir()))
    return Dataset("made", ("a", "b"), records, root=folder)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the files that were decoded."""
    names: list[str] = []

    def read(path: Path, size: int, channels: int, aspect: Aspect) -> Pixels:
        names.append(path.name)
        return read_image(path, size, channels, aspect)

    monkeypatch.setattr(store, "read_image", read)
    return names


def assert_rows(dataset: Dataset, array: Pixels) -> None:
    size, channels = array.shape[1], array.shape[3]
    for row, record in zip(array, dataset.records, strict=True):
        assert record.path is not None
        assert (row == read_image(record.path, size, channels)).all()


def test_rows_belong_to_records(tmp_path: Path) -> None:
    dataset = make_images(tmp_path / "images", 70)
    calls: list[tuple[int, int]] = []
    pixels = open_pixels(dataset, 16, cache=tmp_path / "cache", progress=lambda *call: calls.append(call))
    assert pixels.array.shape == (70, 16, 16, 3)
    assert pixels.array.dtype == np.uint8
    assert pixels.unreadable == []
    assert pixels.remarks == ()
    assert_rows(dataset, pixels.array)
    assert calls[0] == (0, 70)
    assert calls[-1] == (70, 70)
    assert calls == sorted(calls)


def test_warm_start_decodes_nothing(tmp_path: Path, decoded: list[str]) -> None:
    dataset = make_images(tmp_path / "images", 20)
    first = open_pixels(dataset, 16, cache=tmp_path / "cache").array
    assert len(decoded) == 20
    second = open_pixels(dataset, 16, cache=tmp_path / "cache").array
    assert len(decoded) == 20
    assert isinstance(second, np.memmap)
    assert (first == second).all()
    open_pixels(dataset, 12, cache=tmp_path / "cache")
    assert len(decoded) == 40


def test_threads_decode_together_what_one_would(tmp_path: Path, decoded: list[str]) -> None:
    dataset = make_images(tmp_path / "images", 40)
    with ThreadPoolExecutor(4) as pool:
        opened = list(pool.map(lambda _: open_pixels(dataset, 16, cache=tmp_path / "cache"), range(4)))
    assert len(decoded) == 40
    for pixels in opened:
        assert_rows(dataset, pixels.array)


def test_only_what_changed_is_decoded(tmp_path: Path, decoded: list[str]) -> None:
    folder, cache = tmp_path / "images", tmp_path / "cache"
    open_pixels(make_images(folder, 20), 16, cache=cache)
    decoded.clear()
    (folder / "004.png").unlink()
    shutil.copy(folder / "005.png", folder / "100.png")
    Image.fromarray(np.full((9, 9, 3), 200, np.uint8)).save(folder / "007.png")
    changed = list_images(folder)
    pixels = open_pixels(changed, 16, cache=cache)
    assert sorted(decoded) == ["007.png", "100.png"]
    assert_rows(changed, pixels.array)
    backwards = Dataset("made", ("a", "b"), changed.records[::-1], root=folder)
    assert_rows(backwards, open_pixels(backwards, 16, cache=cache).array)
    assert len(decoded) == 2


def test_old_lists_do_not_pile_up(tmp_path: Path) -> None:
    dataset = make_images(tmp_path / "images", 10)
    other = make_images(tmp_path / "others", 3)
    open_pixels(other, 8, cache=tmp_path / "cache")
    for count in range(3, 10):
        fewer = Dataset("made", ("a", "b"), dataset.records[:count], root=dataset.root)
        assert_rows(fewer, open_pixels(fewer, 8, cache=tmp_path / "cache").array)
    assert len(list((tmp_path / "cache/pixels/8x3").iterdir())) == cache_module.FOLDERS_KEPT + 1


def test_channels_follow_the_files(tmp_path: Path, decoded: list[str]) -> None:
    cache = tmp_path / "cache"
    grey = make_images(tmp_path / "images", 12, grey=True)
    assert open_pixels(grey, 16, cache=cache, channels=3).array.shape[-1] == 3
    assert open_pixels(grey, 16, cache=cache).array.shape[-1] == 1
    assert open_pixels(grey, 16, cache=cache).array.shape[-1] == 1
    assert len(decoded) == 24
    Image.fromarray(np.full((9, 9, 3), (200, 90, 90), np.uint8)).save(tmp_path / "images/colour.png")
    mixed = list_images(tmp_path / "images")
    assert open_pixels(mixed, 16, cache=cache, channels=1).array.shape[-1] == 1
    assert open_pixels(mixed, 16, cache=cache).array.shape[-1] == 3


def save_as_colour(folder: Path, count: int, suffix: str) -> Dataset:
    """Grey images in files of three channels."""
    folder.mkdir()
    for number in range(count):
        pixels = np.random.default_rng(number).integers(0, 255, (20, 24, 1), np.uint8).repeat(3, axis=-1)
        Image.fromarray(pixels).save(folder / f"{number:03d}.{suffix}")
    return list_images(folder)


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_grey_images_stored_in_colour_are_grey(tmp_path: Path, suffix: str, decoded: list[str]) -> None:
    cache = tmp_path / "cache"
    grey = save_as_colour(tmp_path / "images", 40, suffix)
    first = open_pixels(grey, 16, cache=cache)
    assert first.array.shape[-1] == 1
    assert_rows(grey, first.array)
    decoded.clear()
    assert open_pixels(grey, 16, cache=cache).array.shape[-1] == 1
    assert decoded == []
    Image.fromarray(np.full((9, 9, 3), (100, 100, 90), np.uint8)).save(tmp_path / "images/tinted.png")
    assert open_pixels(list_images(tmp_path / "images"), 16, cache=cache).array.shape[-1] == 3


def test_the_first_image_in_colour_decides(tmp_path: Path, decoded: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a set in colour nor one of grey files is decoded twice."""
    looked_at: list[str] = []
    read = decode.read_image

    def spy(path: Path, size: int, channels: int) -> Pixels:
        looked_at.append(path.name)
        return read(path, size, channels)

    monkeypatch.setattr(decode, "read_image", spy)
    open_pixels(make_images(tmp_path / "colour", 60), 16, cache=tmp_path / "cache", workers=2)
    assert 1 <= len(looked_at) <= 4
    looked_at.clear()
    open_pixels(make_images(tmp_path / "grey", 60, grey=True), 16, cache=tmp_path / "cache", workers=2)
    assert looked_at == []
    assert len(decoded) == 120


def test_a_failed_first_read_does_not_make_a_set_grey(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = make_images(tmp_path / "images", 40)

    def refuse(path: Path) -> object:
        raise PermissionError(errno.EACCES, "not now")

    with monkeypatch.context() as patch:
        patch.setattr(decode, "_opened", refuse)
        with pytest.raises(DataError, match="40 of 40 images"):
            open_pixels(dataset, 16, cache=tmp_path / "cache")
    pixels = open_pixels(dataset, 16, cache=tmp_path / "cache")
    assert pixels.array.shape[-1] == 3
    assert_rows(dataset, pixels.array)


def test_the_image_that_was_missing_may_be_the_one_in_colour(tmp_path: Path, decoded: list[str]) -> None:
    folder, cache = tmp_path / "images", tmp_path / "cache"
    make_images(folder, 100, grey=True)
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (9, 9, 3), np.uint8)).save(folder / "050.png")
    dataset = list_images(folder)
    opened = decode._opened
    with pytest.MonkeyPatch.context() as patch:

        def refuse_one(path: Path) -> object:
            if path.name == "050.png":
                raise PermissionError(errno.EACCES, "not now")
            return opened(path)

        patch.setattr(decode, "_opened", refuse_one)
        assert open_pixels(dataset, 16, cache=cache).array.shape[-1] == 1
        decoded.clear()
        assert open_pixels(dataset, 16, cache=cache).array.shape[-1] == 1
        assert decoded == ["050.png"]
    assert open_pixels(dataset, 16, cache=cache).array.shape[-1] == 3


def test_interrupted_it_goes_on(tmp_path: Path, decoded: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "SYNC_SECONDS", 0)
    dataset = make_images(tmp_path / "images", 100)

    def interrupt(done: int, total: int) -> None:
        if done >= 50:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_pixels(dataset, 16, cache=tmp_path / "cache", workers=2, progress=interrupt)
    decoded.clear()
    assert_rows(dataset, open_pixels(dataset, 16, cache=tmp_path / "cache").array)
    assert len(decoded) <= 50


WORKER = """
import sys, time
from pathlib import Path
from csda.data import cache, store
from csda.data.decode import UnreadableError, read_image
from csda.data.records import Dataset, Record

def slow(path, size, channels, aspect):
    if stall_at and path.name >= stall_at:
        time.sleep(30)
    time.sleep(0.005)
    sys.stdout.write(path.name + "\\n")
    sys.stdout.flush()
    return read_image(path, size, channels)

cache.SYNC_SECONDS = 0
store.read_image = slow
folder, pixel_cache, stall_at = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
records = tuple(Record(path.name, path, 0) for path in sorted(folder.iterdir()))
store.open_pixels(Dataset("made", ("a",), records, root=folder), 16, cache=pixel_cache, workers=2)
"""


def start_worker(dataset: Dataset, cache: Path, stall_at: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WORKER, str(dataset.root), str(cache), stall_at]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def read_names(worker: subprocess.Popen[str], count: int) -> list[str]:
    assert worker.stdout is not None
    return [worker.stdout.readline().strip() for _ in range(count)]


def test_two_processes_build_at_once(tmp_path: Path) -> None:
    dataset = make_images(tmp_path / "images", 150, grey=True)
    workers = [start_worker(dataset, tmp_path / "cache") for _ in range(2)]
    names = [worker.communicate(timeout=60)[0].split() for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0]
    assert sorted(names[0] + names[1]) == [record.id for record in dataset.records]
    assert_rows(dataset, open_pixels(dataset, 16, cache=tmp_path / "cache").array)


def test_killed_while_another_waits(tmp_path: Path, decoded: list[str]) -> None:
    """The lock of a killed process falls to the one that waits, which goes on where the other was."""
    dataset = make_images(tmp_path / "images", 150, grey=True)
    victim = start_worker(dataset, tmp_path / "cache", stall_at="020.png")
    assert sorted(read_names(victim, 20)) == [record.id for record in dataset.records[:20]]
    other = start_worker(dataset, tmp_path / "cache")
    with pytest.raises(subprocess.TimeoutExpired):
        other.wait(timeout=3)
    victim.kill()
    victim.communicate()
    names = other.communicate(timeout=60)[0].split()
    assert other.returncode == 0
    assert "000.png" not in names
    assert {"020.png", "149.png"} <= set(names)
    assert_rows(dataset, open_pixels(dataset, 16, cache=tmp_path / "cache").array)
    assert decoded == []


def test_who_waits_shows_the_progress_of_the_other(tmp_path: Path, decoded: list[str]) -> None:
    dataset = make_images(tmp_path / "images", 150, grey=True)
    other = start_worker(dataset, tmp_path / "cache")
    read_names(other, 20)
    calls: list[tuple[int, int]] = []
    pixels = open_pixels(dataset, 16, cache=tmp_path / "cache", progress=lambda *call: calls.append(call))
    other.communicate()
    assert decoded == []
    assert_rows(dataset, pixels.array)
    assert 0 < calls[0][0] < 150
    assert calls[-1] == (150, 150)
    assert calls == sorted(calls)


def test_killed_alone_the_next_goes_on(tmp_path: Path, decoded: list[str]) -> None:
    dataset = make_images(tmp_path / "images", 150, grey=True)
    victim = start_worker(dataset, tmp_path / "cache", stall_at="120.png")
    read_names(victim, 120)
    victim.kill()
    victim.communicate()
    assert_rows(dataset, open_pixels(dataset, 16, cache=tmp_path / "cache").array)
    assert 30 <= len(decoded) < 120


def test_a_damaged_cache_is_made_again(tmp_path: Path, decoded: list[str]) -> None:
    dataset = make_images(tmp_path / "images", 12)
    for name, damage in [("pixels", b"short"), ("done", b""), ("keys", b"torn"), ("about.json", b"{")]:
        open_pixels(dataset, 16, cache=tmp_path / "cache")
        (file,) = (tmp_path / "cache").glob(f"pixels/16x3/*/{name}")
        file.write_bytes(damage)
        assert_rows(dataset, open_pixels(dataset, 16, cache=tmp_path / "cache").array)


def break_some(folder: Path, count: int) -> None:
    for path in sorted(folder.iterdir())[:count]:
        path.write_bytes(path.read_bytes()[:60])


def test_a_few_unreadable_images_are_skipped(tmp_path: Path, decoded: list[str]) -> None:
    folder, cache = tmp_path / "images", tmp_path / "cache"
    whole = make_images(folder, 200)
    content = (folder / "000.png").read_bytes()
    break_some(folder, 2)
    for _ in range(2):  # cold and warm
        pixels = open_pixels(whole, 8, cache=cache)
        assert [record.id for record, _ in pixels.unreadable] == ["000.png", "001.png"]
        assert all("cannot be decoded" in reason for _, reason in pixels.unreadable)
        assert (pixels.array[:2] == 0).all()
        assert pixels.remarks == ("2 of 200 images cannot be read and are skipped",)
    assert len(decoded) == 202
    (folder / "000.png").write_bytes(content)
    assert [record.id for record, _ in open_pixels(whole, 8, cache=cache).unreadable] == ["001.png"]


def test_many_unreadable_images_stop_everything(tmp_path: Path) -> None:
    dataset = make_images(tmp_path / "images", 100)
    break_some(tmp_path / "images", 12)
    with pytest.raises(DataError, match=r"12 of 100 images of .*max_unreadable") as caught:
        open_pixels(dataset, 8, cache=tmp_path / "cache")
    assert str(tmp_path / "images/003.png") in str(caught.value)
    assert "and 2 more" in str(caught.value)
    assert len(open_pixels(dataset, 8, cache=tmp_path / "cache", max_unreadable=0.12).unreadable) == 12
    with pytest.raises(DataError, match="has no images"):
        open_pixels(Dataset("none", ("a",), ()), 8, cache=tmp_path / "cache")


def test_missing_pydicom_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that failed for a reason outside of its file does not stay failed."""
    dataset = make_images(tmp_path / "images", 10)

    def refuse(path: Path, size: int, channels: int, aspect: Aspect) -> Pixels:
        raise UnreadableError(path, "needs pydicom")

    with monkeypatch.context() as patch:
        patch.setattr(store, "read_image", refuse)
        with pytest.raises(DataError, match="10 of 10"):
            open_pixels(dataset, 8, cache=tmp_path / "cache", max_unreadable=1.0)
    assert open_pixels(dataset, 8, cache=tmp_path / "cache").unreadable == []


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryError(), "out of memory"),
        (OSError("out of memory error when reading image file"), "out of memory"),
        *(
            (OSError(number, os.strerror(number)), os.strerror(number))
            for number in (errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ESTALE, errno.ETIMEDOUT)
        ),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), os.strerror(errno.ENOSPC)),
    ],
    ids=str,
)
def test_what_is_wrong_with_the_machine_stops(
    error: Exception, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One image of a hundred might be left out, but here it is not the image that is bad."""
    dataset = make_images(tmp_path / "images", 100)
    opened = decode._opened

    def fail(path: Path) -> object:
        if path.name == "003.png":
            raise error
        return opened(path)

    with monkeypatch.context() as patch:
        patch.setattr(decode, "_opened", fail)
        with pytest.raises(DataError, match=rf"003\.png: reading stopped \({reason}") as caught:
            open_pixels(dataset, 8, cache=tmp_path / "cache")
        assert not isinstance(caught.value, UnreadableError)
        with pytest.raises(DataError, match=r"003\.png: reading stopped"):
            check(dataset)
    assert open_pixels(dataset, 8, cache=tmp_path / "cache").unreadable == []


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.ELOOP])
def test_what_is_wrong_with_a_file_leaves_it_out(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = make_images(tmp_path / "images", 100)
    opened = decode._opened

    def fail(path: Path) -> object:
        if path.name == "003.png":
            raise OSError(number, os.strerror(number))
        return opened(path)

    monkeypatch.setattr(decode, "_opened", fail)
    assert [record.id for record, _ in open_pixels(dataset, 8, cache=tmp_path / "cache").unreadable] == ["003.png"]


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = make_images(tmp_path / "images", 40)
    (tmp_path / "file").write_text("in the way")
    pixels = open_pixels(dataset, 16, cache=tmp_path / "file" / "cache")
    assert_rows(dataset, pixels.array)
    assert "cannot be written" in pixels.remarks[0]
    monkeypatch.setattr(cache_module, "physical_memory", lambda: 1000)
    with pytest.raises(DataError, match="CSDA_CACHE"):
        open_pixels(dataset, 16, cache=tmp_path / "file" / "cache")


def test_a_whole_cache_need_not_be_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = make_images(tmp_path / "images", 10)
    open_pixels(dataset, 16, cache=tmp_path / "cache")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(cache_module, "FileIO", refuse)
    pixels = open_pixels(dataset, 16, cache=tmp_path / "cache")
    assert pixels.remarks == ()
    assert_rows(dataset, pixels.array)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = make_images(tmp_path / "images", 40)
    write, written = cache_module._write_at, 0

    def fill_up(file: object, offset: int, data: memoryview) -> None:
        nonlocal written
        written += len(data)
        if written > 5000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(file, offset, data)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(cache_module, "_write_at", fill_up)
        pixels = open_pixels(dataset, 16, cache=tmp_path / "cache")
    assert "No space left on device" in pixels.remarks[0]
    assert_rows(dataset, pixels.array)
    assert list((tmp_path / "cache/pixels/16x3").iterdir()) == []
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(cache_module, "physical_memory", lambda: 1000)
    with pytest.raises(DataError, match=r"0\.0 MB free.*CSDA_CACHE"):
        open_pixels(dataset, 16, cache=tmp_path / "cache")


def test_nothing_is_written_beside_the_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "images"
    dataset = make_images(folder, 10)
    before = {path: path.stat().st_mtime_ns for path in [folder, *folder.iterdir()]}
    folder.chmod(0o555)
    monkeypatch.setenv("CSDA_CACHE", str(tmp_path / "cache"))
    try:
        assert_rows(dataset, open_pixels(dataset, 16).array)
    finally:
        folder.chmod(0o755)
    assert {path: path.stat().st_mtime_ns for path in [folder, *folder.iterdir()]} == before
    assert (tmp_path / "cache").is_dir()


def test_default_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CSDA_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert store.default_cache() == Path("/somewhere/csda")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert store.default_cache() == Path.home() / ".cache/csda"


def test_odd_names_and_links(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    dataset = make_images(folder, 4)
    (folder / "000.png").rename(folder / ("n" * 196 + ".png"))
    (folder / "001.png").rename(folder / "zwei Wörter №1.png")
    (tmp_path / "outside").mkdir()
    (folder / "002.png").rename(tmp_path / "outside/target.png")
    (folder / "link.png").symlink_to(tmp_path / "outside/target.png")
    dataset = list_images(folder)
    assert_rows(dataset, open_pixels(dataset, 16, cache=tmp_path / "cache").array)
    (tmp_path / "outside/target.png").unlink()
    gone = open_pixels(dataset, 16, cache=tmp_path / "cache", max_unreadable=0.5)
    assert [(record.id, reason) for record, reason in gone.unreadable] == [("link.png", "does not exist")]


def test_drawn_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []

    def shades(seed: int) -> Dataset:
        def draw(positions: Sequence[int], size: int) -> Pixels:
            drawn.extend(positions)
            shade = (np.asarray(positions) + seed).astype(np.uint8)
            return np.broadcast_to(shade[:, None, None, None], (len(positions), size, size, 1)).copy()

        records = tuple(Record(f"{number}", None, 0) for number in range(100))
        return Dataset("shades", ("a",), records, draw=draw)

    assert open_pixels(shades(1), 8, cache=tmp_path / "cache").array[:, 3, 3, 0].tolist() == list(range(1, 101))
    assert not (tmp_path / "cache").exists()
    held, others = (open_pixels(shades(seed), 8) for seed in (1, 2))
    assert open_pixels(shades(1), 8).array is held.array
    assert open_pixels(shades(1), 9).array.shape[1] == 9
    assert others.array[0, 0, 0, 0] == 2
    monkeypatch.setattr(store, "DRAWN_IN_MEMORY", 1000)
    for seed in (1, 2, 1, 2):
        drawn.clear()
        array = open_pixels(shades(seed), 8, cache=tmp_path / "cache").array
        assert array[:, 0, 0, 0].tolist() == list(range(seed, seed + 100))
    assert len(drawn) < 5


def test_the_embedded_set(tmp_path: Path) -> None:
    dataset = synthetic.load(images=300)
    pixels = open_pixels(dataset, 16, cache=tmp_path)
    assert dataset.draw is not None
    assert (
        pixels.array[[0, 77, len(dataset.records) - 1]] == dataset.draw([0, 77, len(dataset.records) - 1], 16)
    ).all()


LARGE = """
import os, shutil, sys, zlib
from pathlib import Path
import numpy as np
from csda.data import cache, store
from csda.data.records import Dataset, Record

shutil.disk_usage = lambda folder: shutil._ntuple_diskusage(2**40, 0, 2**40)
cache._reserve = os.truncate
folder = Path(sys.argv[1])
records = tuple(Record(f"image-{n:06d}", folder / f"part-{n % 7}/image-{n:06d}.png", n % 5) for n in range(200_000))
dataset = Dataset("large", tuple("abcde"), records, root=folder)
rows = store._file_rows(dataset, 128, 3, folder / "cache", 1)
made = rows.folder(folder / "cache")
made.mkdir(parents=True)
cache._create(made, rows)
(made / "done").write_bytes(b"\\1" * len(records))
np.full(len(records), zlib.crc32(bytes(128 * 128 * 3)), np.uint32).tofile(made / "sums")
del rows
pixels = store.open_pixels(dataset, 128, channels=3, cache=folder / "cache")
assert pixels.array.shape == (200_000, 128, 128, 3)
for _ in range(20):
    assert pixels.array[np.random.default_rng(0).integers(0, 200_000, 64)].sum() == 0
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(peak // 1024, "torch" in sys.modules)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells the peak of a process")
def test_two_hundred_thousand_images_fit(tmp_path: Path) -> None:
    """A sparse file stands in for the ten gigabytes of pixels; the records are real."""
    result = subprocess.run([sys.executable, "-c", LARGE, str(tmp_path)], capture_output=True, text=True, check=True)
    megabytes, torch_imported = result.stdout.split()
    assert int(megabytes) < 500
    assert sum(file.stat().st_blocks * 512 for file in tmp_path.rglob("*")) < 20 << 20
    assert torch_imported == "False"


@pytest.mark.skipif("CSDA_DATA" not in os.environ, reason="CSDA_DATA names no folder with the real images")
def test_real_images(tmp_path: Path) -> None:
    data = Path(os.environ["CSDA_DATA"])
    for name, suffix, count, channels in [("ham10000", "jpg", 10_015, 3), ("nih_chestxray14", "png", 4_999, 1)]:
        if not (data / name).is_dir():
            pytest.skip(f"{data / name} is not there")
        paths = sorted((data / name).rglob(f"*.{suffix}"))
        dataset = Dataset(name, ("a",), tuple(Record(path.stem, path, 0) for path in paths), root=data / name)
        pixels = open_pixels(dataset, 32, cache=tmp_path)
        assert pixels.array.shape == (count, 32, 32, channels)
        assert pixels.unreadable == []
        begun = time.perf_counter()
        open_pixels(dataset, 32, cache=tmp_path)
        assert time.perf_counter() - begun < 2
