"""A set is known by what it holds, wherever it lies."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from csda.data import content, load_dataset, synthetic
from csda.data.content import content_digest, hash_contents
from csda.data.records import Dataset
from csda.errors import DataError

NAMES = [f"{kind}/{number}.png" for kind in ("cat", "dog") for number in range(4)]


@pytest.fixture
def images(tmp_path: Path) -> Path:
    for number, name in enumerate(NAMES):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"image %d" % number)
    return tmp_path / "images"


def digest_of(folder: Path) -> str:
    return content_digest(load_dataset(folder))


def test_the_place_of_a_folder_does_not_matter(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = digest_of(images)
    assert len(digest) == 16
    assert int(digest, 16) >= 0
    monkeypatch.chdir(images.parent)
    shutil.copytree(images, "elsewhere")
    assert digest == digest_of(Path("images")) == digest_of(Path("./images")) == digest_of(Path("elsewhere"))


@pytest.mark.parametrize(
    "change",
    [
        lambda root: (root / "cat/0.png").write_bytes(b"other 0"),
        lambda root: (root / "cat/0.png").write_bytes(b"image 0 and more"),
        lambda root: (root / "cat/0.png").rename(root / "cat/9.png"),
        lambda root: (root / "cat/0.png").rename(root / "dog/9.png"),
        lambda root: (root / "cat/0.png").unlink(),
        lambda root: (root / "cat").rename(root / "lion"),
    ],
    ids=["bytes", "size", "name", "class", "one fewer", "name of a class"],
)
def test_what_changes_a_set_changes_its_digest(images: Path, change: Callable[[Path], object]) -> None:
    before = digest_of(images)
    change(images)
    assert digest_of(images) != before


def test_groups_and_labels_count_and_the_order_does_not(images: Path) -> None:
    dataset = load_dataset(images)
    first, *others = dataset.records

    def changed(**changes: object) -> str:
        return content_digest(replace(dataset, records=(replace(first, **changes), *others)))  # type: ignore[arg-type]

    digests = [content_digest(dataset), changed(group="a"), changed(group=""), changed(label=None), changed(label=1)]
    assert len(set(digests)) == len(digests)
    assert content_digest(replace(dataset, records=dataset.records[::-1])) == digests[0]


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path | None]:
    """The files that were read to be hashed."""
    paths: list[Path | None] = []
    read = content.hash_file

    def spy(path: Path | None) -> bytes:
        paths.append(path)
        return read(path)

    monkeypatch.setattr(content, "hash_file", spy)
    return paths


def test_a_file_is_read_once(images: Path, hashed: list[Path | None], monkeypatch: pytest.MonkeyPatch) -> None:
    digest = digest_of(images)
    assert len(hashed) == len(NAMES)
    monkeypatch.chdir(images.parent)
    assert digest_of(Path("images")) == digest
    assert len(hashed) == len(NAMES)
    (images / "dog/1.png").write_bytes(b"another image")
    digest_of(images)
    assert hashed[len(NAMES) :] == [images / "dog/1.png"]


def test_a_damaged_memory_is_made_again(images: Path, hashed: list[Path | None]) -> None:
    digest = digest_of(images)
    (memory,) = (Path(os.environ["CSDA_CACHE"]) / "content").iterdir()
    whole = memory.read_bytes()
    for damaged in (whole[:-7], whole[:40] + b"x" + whole[41:], b""):
        memory.write_bytes(damaged)
        hashed.clear()
        assert digest_of(images) == digest
        assert len(hashed) == len(NAMES)
        assert memory.read_bytes() == whole


def test_a_cache_that_cannot_be_written_does_no_harm(images: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    dataset = load_dataset(images)
    assert content_digest(dataset, hash_contents(dataset, tmp_path / "file" / "cache")) == content_digest(dataset)


def test_a_missing_file_counts_as_missing(images: Path) -> None:
    dataset = load_dataset(images)
    whole = content_digest(dataset)
    kept = (images / "cat/0.png").read_bytes()
    (images / "cat/0.png").unlink()
    assert content_digest(dataset) != whole
    (images / "cat/0.png").write_bytes(kept)
    assert content_digest(dataset) == whole


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.EIO, "failed")])
def test_a_failing_disk_is_no_missing_file(images: Path, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = load_dataset(images)

    def fail(path: Path) -> None:
        raise error

    monkeypatch.setattr(content, "open_regular", fail)
    with pytest.raises(DataError, match=r"\d\.png: reading stopped"):
        content_digest(dataset)


def test_a_drawn_set_is_known_by_what_it_is_drawn_with() -> None:
    def drawn(**chosen: float) -> Dataset:
        return synthetic.load(**({"images": 100} | chosen))  # type: ignore[arg-type]

    digests = [content_digest(drawn(**chosen)) for chosen in ({}, {"seed": 1}, {"difficulty": 0.5}, {"images": 101})]
    assert len(set(digests)) == len(digests)
    assert content_digest(drawn()) == digests[0]


def test_a_change_that_hides_its_time_is_seen(images: Path, hashed: list[Path | None]) -> None:
    path, before = images / "cat/0.png", digest_of(images)
    status = path.stat()
    path.write_bytes(b"IMAGE 0")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert digest_of(images) != before
    hashed.clear()
    dataset = load_dataset(images)
    assert content_digest(dataset, hash_contents(dataset, fresh=True)) == digest_of(images)
    assert len(hashed) == len(NAMES)
