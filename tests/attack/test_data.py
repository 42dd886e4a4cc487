"""An attack on the data side, seeded and short: nothing in a data set hangs, crashes or fills the machine."""

from __future__ import annotations

import io
import os
import resource
import socket
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from csda.data import check as check_module
from csda.data import decode, load_dataset
from csda.data.content import content_digest
from csda.data.csv_files import read_table
from csda.data.decode import UnreadableError, read_header, read_image
from csda.data.tree import scan_images
from csda.errors import DataError

pydicom = pytest.importorskip("pydicom")

MUTATIONS = 150
SECONDS = 200


def image_bytes(kind: str) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 255, (24, 20, 3), np.uint8)
    file = io.BytesIO()
    if kind == "DICOM":
        dicom_of(pixels[..., 0]).save_as(file, enforce_file_format=True)
    else:
        Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def dicom_of(pixels: np.ndarray, syntax: str = "1.2.840.10008.1.2.1") -> Any:
    meta = pydicom.dataset.FileMetaDataset()
    meta.TransferSyntaxUID = syntax
    meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID = "1.2.840.10008.5.1.4.1.1.7", "1.2.3"
    dataset = pydicom.FileDataset(None, {}, file_meta=meta, preamble=b"\0" * 128)
    dataset.Rows, dataset.Columns = pixels.shape
    dataset.SamplesPerPixel, dataset.PhotometricInterpretation = 1, "MONOCHROME2"
    dataset.BitsAllocated = dataset.BitsStored = 8
    dataset.HighBit, dataset.PixelRepresentation = 7, 0
    dataset.PixelData = pixels.tobytes()
    return dataset


def mutated(data: bytes, rng: np.random.Generator) -> bytes:
    changed = bytearray(data)
    kind = rng.integers(4)
    place = int(rng.integers(len(data)))
    if kind == 0:
        for spot in rng.integers(0, len(data), 1 + int(rng.integers(8))):
            changed[spot] = int(rng.integers(256))
    elif kind == 1:
        del changed[place:]
    elif kind == 2:
        changed[place : place + 4] = b"\xff\xff\xff\xff"
    else:
        del changed[place : place + int(rng.integers(1, 64))]
    return bytes(changed)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF", "BMP", "DICOM"])
@pytest.mark.filterwarnings("ignore")
def test_a_mutated_image_is_read_or_refused(kind: str, tmp_path: Path) -> None:
    rng, whole = np.random.default_rng(22), image_bytes(kind)
    path = tmp_path / ("a.dcm" if kind == "DICOM" else "a.png")
    refused: list[str] = []
    for _ in range(MUTATIONS):
        path.write_bytes(mutated(whole, rng))
        try:
            read_header(path)
            assert read_image(path, 16, 3).shape == (16, 16, 3)
        except UnreadableError as error:
            refused.append(str(error))
    assert all(text.startswith(str(path)) for text in refused)
    assert 0 < len(refused) < MUTATIONS


def test_a_mutated_table_is_read_or_refused_with_its_name(tmp_path: Path) -> None:
    rng = np.random.default_rng(22)
    whole = "image,label,group\n" + "".join(f"{n}.png,{'cat' if n % 2 else 'dög'},p{n // 3}\n" for n in range(30))
    path = tmp_path / "labels.csv"
    refused: list[str] = []
    for _ in range(MUTATIONS):
        path.write_bytes(mutated(whole.encode(), rng))
        try:
            read_table(path)
        except DataError as error:
            refused.append(str(error))
    assert all(str(path) in text for text in refused)
    assert 0 < len(refused) < MUTATIONS


def csda(*words: object) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, which would show a crash or a wait."""
    command = [sys.executable, "-m", "csda", *map(os.fsencode, map(str, words))]
    return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SECONDS, check=False)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    for number, name in enumerate(["cat", "dog"] * 12):
        (tmp_path / "images" / name).mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 255, (20, 20, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / name / f"{number:02d}.png")
    return tmp_path / "images"


def test_pipes_sockets_and_odd_links_do_not_stop_anything(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(images / "cat" / "pipe")
    os.mkfifo(images / "cat" / "pipe.png")
    (images / "dog" / "self").symlink_to("self")
    (images / "dog" / "self.png").symlink_to("self.png")
    monkeypatch.chdir(images / "dog")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket.png")
        tree = scan_images(images)
        assert {"cat/pipe", "dog/self"} <= set(tree.others)
        reasons = {}
        for name in ("cat/pipe.png", "dog/socket.png", "dog/self.png"):
            with pytest.raises(UnreadableError) as refused:
                read_image(images / name, 8, 3)
            reasons[name] = refused.value.reason
        assert reasons["cat/pipe.png"] == reasons["dog/socket.png"] == "is not a file"
        assert reasons["dog/self.png"] == "is a link to itself"
        dataset = load_dataset(images)
        assert len(content_digest(dataset)) == 16
        report = check_module.check(dataset, max_unreadable=0.5)
        assert sorted(record.id for record, _ in report.unreadable) == sorted(reasons)


@pytest.mark.parametrize("name", ["labels.csv", "train.csv", "HAM10000_metadata.csv", "Data_Entry_2017.csv"])
def test_a_pipe_in_the_place_of_a_table(name: str, images: Path) -> None:
    os.mkfifo(images / name)
    with pytest.raises(DataError, match=f"{name} cannot be read: is not a regular file"):
        load_dataset(images)


def test_a_file_that_may_not_be_read(images: Path) -> None:
    path = images / "cat" / "00.png"
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("who runs this may read everything")
    with pytest.raises(UnreadableError, match="may not be read"):
        read_image(path, 8, 3)


@pytest.mark.filterwarnings("ignore")
def test_a_deflated_bomb_is_not_inflated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "MAX_BYTES", 1 << 26)
    plain = dicom_of(np.zeros((8, 8), np.uint8), "1.2.840.10008.1.2.1.99")
    plain.save_as(tmp_path / "sound.dcm", enforce_file_format=True)
    assert read_image(tmp_path / "sound.dcm", 8, 1).shape == (8, 8, 1)

    # A private element of 100 MB before the image: its size says nothing of it.
    plain.add_new(0x00091010, "OB", bytes(100 << 20))
    plain.save_as(tmp_path / "bomb.dcm", enforce_file_format=True)
    assert (tmp_path / "bomb.dcm").stat().st_size < 1 << 20
    monkeypatch.setattr(zlib, "decompress", lambda *_: pytest.fail("inflated"))
    for read in (read_header, lambda path: read_image(path, 8, 1)):
        with pytest.raises(UnreadableError, match="inflates to more than"):
            read(tmp_path / "bomb.dcm")


@pytest.mark.filterwarnings("ignore")
def test_a_frame_larger_than_the_file_says(tmp_path: Path) -> None:
    from pydicom.encaps import encapsulate

    for side, sound in ((16, True), (64, False)):
        frame = io.BytesIO()
        Image.fromarray(np.zeros((side, side), np.uint8)).save(frame, "JPEG")
        dataset = dicom_of(np.zeros((16, 16), np.uint8), "1.2.840.10008.1.2.4.50")
        dataset.PixelData = encapsulate([frame.getvalue()])
        dataset["PixelData"].is_undefined_length = True
        dataset.save_as(tmp_path / "a.dcm", enforce_file_format=True)
        if sound:
            assert read_image(tmp_path / "a.dcm", 8, 1).shape == (8, 8, 1)
        else:
            with pytest.raises(UnreadableError, match="an image of another size"):
                read_image(tmp_path / "a.dcm", 8, 1)


def test_wide_pixels_and_long_files_are_refused(tmp_path: Path) -> None:
    dataset = dicom_of(np.zeros((8, 8), np.uint8))
    dataset.Rows, dataset.Columns, dataset.SamplesPerPixel, dataset.BitsAllocated = 7000, 7000, 3, 32
    dataset.save_as(tmp_path / "wide.dcm", enforce_file_format=True)
    with pytest.raises(UnreadableError, match=r"588,000,000 bytes of pixels"):
        read_image(tmp_path / "wide.dcm", 8, 1)
    with (tmp_path / "long.png").open("wb") as file:
        file.truncate(decode.MAX_BYTES + 1)
    with pytest.raises(UnreadableError, match="bytes, more than"):
        read_image(tmp_path / "long.png", 8, 1)
    with (tmp_path / "long.csv").open("wb") as file:
        file.truncate((1 << 30) + 1)
    with pytest.raises(DataError, match=r"long\.csv has 1,073,741,825 bytes"):
        read_table(tmp_path / "long.csv")


def bomb(kind: str, side: int) -> bytes:
    """A small image whose header says that it is of this side."""
    data, short, long = bytearray(image_bytes(kind)), struct.pack("<H", side), struct.pack("<I", side)
    if kind == "PNG":
        data[16:24] = struct.pack(">2I", side, side)
        data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    elif kind == "JPEG":
        place = data.index(b"\xff\xc0")
        data[place + 5 : place + 9] = struct.pack(">2H", side, side)
    elif kind == "BMP":
        data[18:26] = long * 2
    elif kind == "GIF":
        data[6:10] = short * 2
        place = data.index(b",\0\0\0\0")
        data[place + 5 : place + 9] = short * 2
    elif kind == "WEBP":
        file = io.BytesIO()
        Image.fromarray(np.zeros((24, 20, 3), np.uint8)).save(file, "WEBP", lossless=True)
        data = bytearray(file.getvalue())
        data[21:25] = struct.pack("<I", (side - 1) | (side - 1) << 14)
    else:
        (entries,) = struct.unpack_from("<H", data, first := struct.unpack_from("<I", data, 4)[0])
        for place in range(first + 2, first + 2 + 12 * entries, 12):
            tag, form = struct.unpack_from("<2H", data, place)
            if tag in (256, 257):
                data[place + 8 : place + 12] = long if form == 4 else short + b"\0\0"
    return bytes(data)


PEAK = """
import resource, sys
from pathlib import Path
from csda.data.decode import UnreadableError, read_image, unremarked
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with unremarked():
    for name in sys.argv[1:]:
        try:
            read_image(Path(name), 32, 3)
        except UnreadableError as error:
            print(error.reason)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_no_decoder_makes_room_for_what_a_header_says(tmp_path: Path) -> None:
    kinds = ("PNG", "JPEG", "TIFF", "BMP", "GIF", "WEBP")
    for kind in kinds:
        (tmp_path / kind).write_bytes(bomb(kind, 8_000))
    names = [str(tmp_path / kind) for kind in kinds]
    ended = subprocess.run([sys.executable, "-c", PEAK, *names], capture_output=True, text=True, check=True)
    *reasons, grown = ended.stdout.splitlines()
    assert [reason.partition("pixels")[0] for reason in reasons] == ["has 8000×8000 "] * len(kinds), reasons
    assert int(grown) < 100  # MB; one of them decoded takes 192


def test_a_tile_larger_than_its_image(tmp_path: Path) -> None:
    from PIL import TiffImagePlugin

    tags = TiffImagePlugin.ImageFileDirectory_v2()
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "a.tif", tiffinfo=tags)
    with Image.open(tmp_path / "a.tif") as image:
        image.tag_v2[322], image.tag_v2[323] = 30_000, 20_000
        with pytest.raises(Exception, match="has a tile of more than"):
            decode._header(image)


def test_other_formats_of_pillow_are_not_tried(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n")
    with pytest.raises(UnreadableError, match="is not an image in a known format"):
        read_image(tmp_path / "a.png", 8, 3)


def test_names_that_are_not_utf8_are_refused_before_any_work(tmp_path: Path) -> None:
    bad = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe")
    for words in (["train", bad], ["train", "--out", bad], ["data", "check", bad]):
        ended = csda(*words)
        assert ended.returncode == 2
        assert "not UTF-8" in ended.stderr
        assert "Traceback" not in ended.stderr
    assert list(tmp_path.iterdir()) == []


FILL = """
import sys
from csda.data import load_dataset
from csda.data.store import open_pixels
store = open_pixels(load_dataset(sys.argv[1]), 64)
assert store.array.any(axis=(1, 2, 3)).all()
print(store.remarks)
"""


def test_a_cache_that_may_not_grow_is_done_without(images: Path) -> None:
    """A limit on the length of files in the place of a full disk; the signal that goes with it is ignored by Python."""
    ended = subprocess.run(
        [sys.executable, "-c", FILL, str(images)], capture_output=True, text=True, timeout=SECONDS, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "cannot be written (File too large)" in ended.stdout


def test_the_cache_has_its_room_before_it_is_mapped(tmp_path: Path) -> None:
    from csda.data.cache import _reserve

    with (tmp_path / "room").open("wb") as file:
        _reserve(file.fileno(), 1 << 20)
    status = (tmp_path / "room").stat()
    assert (status.st_size, status.st_blocks * 512 >= 1 << 20) == (1 << 20, True)


def test_folders_without_end(images: Path) -> None:
    """Far within each other, and links that lead to one folder in 2³⁰ ways."""
    place, here = images / "cat", Path.cwd()
    try:
        os.chdir(place)
        for _ in range(1200):
            Path("d").mkdir()
            os.chdir("d")
    finally:
        os.chdir(here)
    with pytest.raises(DataError, match=r"images: cat/d/d/.*… is more than 100 folders deep; move what is in it"):
        scan_images(images)
    subprocess.run(["rm", "-r", str(place / "d")], check=True)  # shutil gives up on it

    for level in range(30):
        (images / f"{level:02d}").mkdir()
        for way in ("a", "b"):
            (images / f"{level:02d}" / way).symlink_to(f"../{level + 1:02d}")
    (images / "30").mkdir()
    with pytest.raises(DataError, match="is one folder that links lead to in more than 100 ways; remove the links"):
        scan_images(images)


def test_wide_tables_take_no_longer_than_long_ones(tmp_path: Path) -> None:
    """60,000 columns, and as many labels of ten images: a second or two, and half an hour with a look at each pair."""
    columns = [f"c{number}" for number in range(60_000)]
    for number in range(10):
        Image.fromarray(np.full((8, 8), number, np.uint8)).save(tmp_path / f"{number}.png")
    names = [f"{number}.png" for number in range(10)]
    flags = "image," + ",".join(columns) + "\n" + "".join(f"{name}{',0,1' * 30_000}\n" for name in names)
    joined = "image,label\n" + "".join(f"{name},{'|'.join(columns[i::10])}\n" for i, name in enumerate(names))
    limit = (20, 20)  # seconds of the processor
    for text in (flags, joined):
        (tmp_path / "labels.csv").write_text(text)
        code = f"import resource; resource.setrlimit(resource.RLIMIT_CPU, {limit})\n" + (
            f"from csda.data import load_dataset; print(len(load_dataset({str(tmp_path)!r}).classes))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, "60000\n"), done.stderr[-500:]


def test_names_that_unicode_writes_in_two_ways(tmp_path: Path) -> None:
    """One file system keeps both apart: a table that gives each of them exactly means each of them."""
    for name, label in (("\u00e9.png", "a"), ("e\u0301.png", "b")):
        Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / name)
        with (tmp_path / "labels.csv").open("a", encoding="utf-8") as file:
            file.write(("" if file.tell() else "image,label\n") + f"{name},{label}\n")
    if len(list(tmp_path.glob("*.png"))) < 2:
        pytest.skip("this file system takes both names for one")
    dataset = load_dataset(tmp_path)
    assert {record.id: record.label for record in dataset.records} == {"\u00e9.png": 0, "e\u0301.png": 1}
