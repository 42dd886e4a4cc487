"""The cache may be damaged, full, or too small: what is trained on are the pixels of the images, whatever it holds."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock
from PIL import Image

from commands import Command, is_one_sentence
from csda.data import load_dataset
from csda.data.cache_folders import list_folders
from csda.data.records import Dataset, Pixels
from csda.data.store import PixelStore, open_pixels
from csda.errors import ConfigError, DataError
from csda.fast.streaming import HostPixels

COUNT, SIZE = 30, 16


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    for number in range(COUNT):
        (folder / "ab"[number % 2]).mkdir(exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 255, (SIZE, SIZE, 3), np.uint8)
        Image.fromarray(pixels).save(folder / "ab"[number % 2] / f"{number:02d}.png")
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def _expected(dataset: Dataset) -> Pixels:
    return np.stack([np.asarray(Image.open(record.path)) for record in dataset.records if record.path is not None])


def _open(dataset: Dataset, cache: Path) -> PixelStore:
    store = open_pixels(dataset, SIZE, cache=cache)
    np.testing.assert_array_equal(store.array[np.arange(len(dataset.records))], _expected(dataset))
    return store


def _flip(file: Path, chance: np.random.Generator) -> None:
    content = bytearray(file.read_bytes())
    content[chance.integers(len(content))] ^= 1 << int(chance.integers(8))
    file.write_bytes(content)


def test_a_flipped_bit_anywhere_is_found_and_mended(
    images: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset, chance = load_dataset(images), np.random.default_rng(22)
    _open(dataset, cache)
    [folder] = (cache / "pixels").glob("*/*")
    for name in ("pixels", "done", "sums", "keys"):
        for _ in range(10):
            _flip(folder / name, chance)
            _open(dataset, cache)
            if name in ("pixels", "sums"):
                [said] = caplog.messages
                assert re.fullmatch(rf"{folder}: row \d+ was damaged and has been made again", said)
            caplog.clear()
            _open(dataset, cache)
            assert caplog.messages == []


@pytest.mark.parametrize("index", [3, -27, slice(2, 5), np.array([3]), (3, 0), [1, 3]], ids=str)
def test_any_way_of_reading_a_row_compares_it(index: object, images: Path, cache: Path) -> None:
    dataset = load_dataset(images)
    _open(dataset, cache)
    [file] = (cache / "pixels").glob("*/*/pixels")
    content = np.fromfile(file, np.uint8).reshape(COUNT, -1)
    content[3] ^= 255
    content.tofile(file)
    store = open_pixels(dataset, SIZE, cache=cache)
    np.testing.assert_array_equal(store.array[index], _expected(dataset)[index])  # type: ignore[index]


@pytest.mark.parametrize("by_file", [True, False])
def test_streamed_rows_are_compared(
    by_file: bool, images: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dataset, chance = load_dataset(images), np.random.default_rng(1)
    _open(dataset, cache)
    [file] = (cache / "pixels").glob("*/*/pixels")
    _flip(file, chance)
    if not by_file:
        monkeypatch.delattr(os, "preadv")
    array = open_pixels(dataset, SIZE, cache=cache).array
    pixels = HostPixels(array, np.arange(COUNT), torch.device("cpu"))
    np.testing.assert_array_equal(pixels.take(torch.arange(COUNT)), _expected(dataset))
    assert len(caplog.messages) == 1


def test_a_damaged_row_that_cannot_be_mended_stops_the_training(images: Path, cache: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(images, tmp_path / "own"))
    dataset = load_dataset(own)
    _open(dataset, cache)
    [file] = (cache / "pixels").glob("*/*/pixels")
    _flip(file, np.random.default_rng(1))
    array = open_pixels(dataset, SIZE, cache=cache).array
    shutil.rmtree(own)
    with pytest.raises(DataError, match="of the cache is damaged, and its image does not exist; restore the image"):
        array[:]


def test_damaged_rows_are_not_taken_over(images: Path, cache: Path) -> None:
    whole = load_dataset(images)
    _open(whole, cache)
    [folder] = (cache / "pixels").glob("*/*")
    content = np.fromfile(folder / "pixels", np.uint8)
    content[:: SIZE * SIZE * 3] ^= 1  # one value of each row
    content.tofile(folder / "pixels")
    _open(Dataset("folder", whole.classes, whole.records[1:], root=whole.root), cache)


def test_a_limit_makes_the_oldest_give_way(images: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load_dataset(images)
    room = 2.5 * COUNT * SIZE * SIZE * 3
    monkeypatch.setenv("CSDA_CACHE_LIMIT", str(room / 2**30))
    for number in range(4):
        _open(Dataset(f"set {number}", whole.classes, whole.records[number:], root=whole.root), cache)
        for entry in list_folders(cache):  # one after the other also for a clock that is coarse
            if entry.owner.startswith(f"set {number}"):
                os.utime(entry.folder, (number, number))
        assert sum(entry.bytes for entry in list_folders(cache)) <= room
    assert [entry.owner.removesuffix(f" {images}") for entry in list_folders(cache)] == ["set 3", "set 2"]


def test_what_another_process_is_making_stays(images: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load_dataset(images)
    _open(whole, cache)
    [first] = list_folders(cache)
    monkeypatch.setenv("CSDA_CACHE_LIMIT", str(1.5 * first.bytes / 2**30))
    with FileLock(first.folder / "lock"):
        _open(Dataset("other", whole.classes, whole.records[1:], root=whole.root), cache)
        assert first.folder in [entry.folder for entry in list_folders(cache)]


def test_a_set_beyond_the_limit_is_done_without(images: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CSDA_CACHE_LIMIT", "0.00001")
    [remark] = _open(load_dataset(images), cache).remarks
    assert "are needed and CSDA_CACHE_LIMIT is" in remark
    assert list_folders(cache) == []
    monkeypatch.setenv("CSDA_CACHE_LIMIT", "much")
    with pytest.raises(ConfigError, match="CSDA_CACHE_LIMIT = 'much' is not a number of GB"):
        open_pixels(load_dataset(images), SIZE, cache=cache)


def test_the_cache_is_shown_and_cleared(
    csda: Command, images: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CSDA_CACHE", str(cache))
    assert csda("cache")[0] == 0  # there is none
    _open(load_dataset(images), cache)
    (cache / "content").mkdir()
    (cache / "content" / "a").write_bytes(bytes(100))
    (cache / "weights").mkdir()
    (cache / "weights" / "net.pth").write_bytes(bytes(3 << 20))
    code, printed, _ = csda("cache")
    assert code == 0
    assert f"folder {images}: pixels 16x3" in printed
    assert "3.0 MB" in printed
    assert "of 50.0 GB for pixels" in printed
    with FileLock(list_folders(cache)[0].folder / "lock"):
        code, _, said = csda("cache", "clear")
    assert code == 2
    assert said.endswith(" cannot be deleted, or other programs are writing them\n")
    code, printed, _ = csda("cache", "clear")
    assert code == 0
    assert printed.endswith(f" freed in {cache}\n")
    assert list_folders(cache) == []
    assert not (cache / "content").exists()
    assert (cache / "weights" / "net.pth").is_file()
    monkeypatch.setenv("CSDA_CACHE_LIMIT", "-1")
    assert is_one_sentence(csda("cache"))


FILL = """
import sys
import numpy as np
from csda.data import load_dataset
from csda.data.store import open_pixels
store = open_pixels(load_dataset(sys.argv[1]), int(sys.argv[2]))
assert np.array(store.array).any(axis=(1, 2, 3)).all()
print(store.remarks)
"""


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may mount a small file system")
@pytest.mark.parametrize("taken", [0, 200_000])
def test_a_full_file_system_in_memory(taken: int, images: Path, tmp_path: Path) -> None:
    """A map of a tmpfs without room would end the process with SIGBUS; `taken` bytes of it are used before."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=262144", "tmpfs", str(place)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no file system may be mounted here")
    try:
        (place / "taken").write_bytes(bytes(taken))
        ended = subprocess.run(
            [sys.executable, "-c", FILL, str(images), "64"],
            env=os.environ | {"CSDA_CACHE": str(place / "cache")},
            capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip
        assert ended.returncode == 0, (ended.returncode, ended.stderr)
        assert "cannot be written" in ended.stdout
    finally:
        subprocess.run(["umount", str(place)], check=True)
