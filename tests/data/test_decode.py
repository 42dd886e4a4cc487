"""Every format and every kind of damage, on files made here."""

from __future__ import annotations

import os
import struct
import sys
import zlib
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pydicom
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

from csda.data.decode import MAX_PIXELS, read_header, read_image, read_levels, read_picture, unremarked
from csda.errors import DataError

RAMP = np.linspace(0, 255, 32).astype(np.uint8)
GREY = np.repeat(RAMP[None], 32, axis=0)
"""Dark on the left, bright on the right."""
COLOR = np.stack([GREY, GREY.T, np.full_like(GREY, 60)], axis=-1)


def save(path: Path, pixels: np.ndarray, mode: str | None = None, **options: object) -> Path:
    image = Image.fromarray(pixels)
    (image.convert(mode) if mode else image).save(path, **options)
    return path


@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "bmp", "webp"])
def test_reads_colour(tmp_path: Path, suffix: str) -> None:
    exact = suffix not in ("jpg", "webp")
    path = save(tmp_path / f"a.{suffix}", COLOR, **({} if exact else {"quality": 95}))
    pixels = read_image(path, 32, 3)
    assert pixels.shape == (32, 32, 3)
    assert pixels.dtype == np.uint8
    assert np.abs(pixels.astype(int) - COLOR).max() <= (0 if exact else 30)
    assert np.abs(pixels.astype(int) - COLOR).mean() <= (0 if exact else 4)
    assert read_header(path)[1:] == (32, 32, False)


@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "bmp"])
def test_grey_stays_grey(tmp_path: Path, suffix: str) -> None:
    path = save(tmp_path / f"a.{suffix}", GREY)
    assert read_header(path).grey
    assert np.abs(read_image(path, 32, 1)[..., 0].astype(int) - GREY).mean() < 2
    assert (np.ptp(read_image(path, 32, 3), axis=-1) == 0).all()


def test_colour_as_one_channel_is_its_luminance(tmp_path: Path) -> None:
    expected = np.asarray(Image.fromarray(COLOR).convert("L"))
    assert (read_image(save(tmp_path / "a.png", COLOR), 32, 1)[..., 0] == expected).all()


@pytest.mark.parametrize(("top", "scaled"), [(65535, 255), (4095, 255), (255, 255), (32768, 128)])
@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_sixteen_bits_are_scaled_by_the_bits_in_use(tmp_path: Path, suffix: str, top: int, scaled: int) -> None:
    values = np.linspace(0, top, 32).round().astype(np.uint16)
    path = save(tmp_path / f"a.{suffix}", np.repeat(values[None], 32, axis=0))
    assert read_header(path).grey
    row = read_image(path, 32, 1)[0, :, 0]
    assert row[0] == 0
    assert row[-1] == scaled
    assert np.abs(row - np.linspace(0, scaled, 32)).max() <= 1


def test_float_values(tmp_path: Path) -> None:
    unit = np.repeat(np.linspace(0.25, 0.75, 32, dtype=np.float32)[None], 32, axis=0)
    row = read_image(save(tmp_path / "unit.tif", unit), 32, 1)[0, :, 0]
    assert (row[0], row[-1]) == (64, 191)
    unit[0, 0] = np.nan
    assert read_image(save(tmp_path / "nan.tif", unit), 32, 1)[0, 0, 0] == 0
    row = read_image(save(tmp_path / "hounsfield.tif", unit[1:] * 4000 - 2000), 32, 1)[0, :, 0]
    assert (row[0], row[-1]) == (0, 255)


def test_palette(tmp_path: Path) -> None:
    path = save(tmp_path / "colour.png", COLOR, "P")
    assert not read_header(path).grey
    assert np.abs(read_image(path, 32, 3).astype(int) - COLOR).mean() < 30
    image = Image.fromarray(GREY).convert("P")
    image.putpalette([value for grey in range(256) for value in (grey, grey, grey)])
    image.save(tmp_path / "grey.png")
    assert read_header(tmp_path / "grey.png").grey
    assert (read_image(tmp_path / "grey.png", 32, 1)[..., 0] == GREY).all()


def test_bilevel(tmp_path: Path) -> None:
    path = save(tmp_path / "a.png", GREY > 127)
    assert set(np.unique(read_image(path, 32, 1))) == {0, 255}


def test_transparency_lies_on_black(tmp_path: Path) -> None:
    alpha = np.zeros((32, 32, 1), np.uint8)
    alpha[:, 16:] = 255
    pixels = read_image(save(tmp_path / "rgba.png", np.concatenate([COLOR, alpha], -1)), 32, 3)
    assert (pixels[:, :16] == 0).all()
    assert (pixels[:, 16:] == COLOR[:, 16:]).all()
    path = tmp_path / "la.png"
    Image.fromarray(np.concatenate([COLOR, alpha], -1)).convert("LA").save(path)
    assert read_header(path).grey
    assert (read_image(path, 32, 1)[:, :16] == 0).all()
    Image.fromarray(GREY).save(tmp_path / "key.png", transparency=255)
    assert (read_image(tmp_path / "key.png", 32, 1)[:, -1] == 0).all()


def test_cmyk(tmp_path: Path) -> None:
    for name in ("a.jpg", "a.tif"):
        pixels = read_image(save(tmp_path / name, COLOR, "CMYK"), 32, 3)
        assert np.abs(pixels.astype(int) - COLOR).mean() < 6


@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "webp"])
def test_exif_rotation_is_applied(tmp_path: Path, suffix: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned a quarter clockwise
    path = save(tmp_path / f"a.{suffix}", np.repeat(GREY[..., None], 3, -1), exif=exif)
    pixels = read_image(path, 32, 1)[..., 0].astype(int)
    assert np.abs(pixels - np.rot90(GREY, -1)).mean() < 4


def test_resize_is_antialiased_and_squashes(tmp_path: Path) -> None:
    board = (np.indices((512, 256)).sum(0) % 2 * 255).astype(np.uint8)
    for name in ("a.png", "a.jpg"):
        pixels = read_image(save(tmp_path / name, board), 32, 1)
        assert pixels.shape == (32, 32, 1)
        assert np.abs(pixels.astype(int) - 127).max() < 12


def test_shortcuts_change_little(tmp_path: Path) -> None:
    """Decoding a large JPEG at a fraction of its size gives what the whole of it gives."""
    rng = np.random.default_rng(0)
    smooth = Image.fromarray(rng.integers(0, 255, (12, 16, 3), np.uint8)).resize((1600, 1200), Image.Resampling.BICUBIC)
    smooth.save(tmp_path / "a.jpg", quality=95)
    with Image.open(tmp_path / "a.jpg") as image:
        whole = np.asarray(image.resize((64, 64), Image.Resampling.BILINEAR)).astype(int)
    assert np.abs(read_image(tmp_path / "a.jpg", 64, 3) - whole).max() <= 8
    assert np.abs(read_image(tmp_path / "a.jpg", 64, 3) - whole).mean() <= 1


@pytest.mark.parametrize("shape", [(150, 200), (128, 128), (20, 24), (400, 30), (1, 1), (3, 700), (90, 127)])
@pytest.mark.parametrize("channels", [1, 3])
def test_resize_is_that_of_pillow(tmp_path: Path, shape: tuple[int, int], channels: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)
    path = save(tmp_path / "a.png", pixels, "L" if channels == 1 else None)
    with Image.open(path) as image:
        expected = np.asarray(image.resize((128, 128), Image.Resampling.BILINEAR)).reshape(128, 128, channels)
    found = read_image(path, 128, channels)
    assert found.shape == (128, 128, channels)
    assert found.flags.c_contiguous
    assert np.abs(found.astype(int) - expected).max() <= 1


def refusal(path: Path) -> str:
    """The reason, which reading the header or the pixels gives with the path in front."""
    with pytest.raises(DataError) as caught:
        read_image(path, 16, 3)
    assert str(caught.value).startswith(f"{path}: ")
    return str(caught.value).removeprefix(f"{path}: ")


def png(width: int, height: int) -> bytes:
    """A PNG whose header promises so many pixels, and that has none."""

    def piece(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + piece(b"IHDR", header) + piece(b"IDAT", zlib.compress(b"")) + piece(b"IEND", b"")


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    whole = BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(whole, "jpeg")
    for name, content, reason in [
        ("empty.jpg", b"", "is empty (0 bytes)"),
        ("text.jpg", b"no image at all" * 20, "is not an image in a known format"),
        ("half.jpg", whole.getvalue()[: len(whole.getvalue()) // 2], "cannot be decoded (image file is truncated"),
        ("head.jpg", whole.getvalue()[:20], "is not an image in a known format"),
        ("half.png", png(64, 64), "cannot be decoded ("),
    ]:
        path = tmp_path / name
        path.write_bytes(content)
        assert refusal(path).startswith(reason), name
    assert refusal(tmp_path / "nowhere.png") == "does not exist"
    (tmp_path / "folder.png").mkdir()
    assert refusal(tmp_path / "folder.png") == "is not a file"
    os.mkfifo(tmp_path / "pipe.png")
    assert refusal(tmp_path / "pipe.png") == "is not a file"
    (tmp_path / "loop.png").symlink_to(tmp_path / "loop.png")
    assert "is a link to itself" in refusal(tmp_path / "loop.png")


def test_no_pixels(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(0, 5))
    assert refusal(tmp_path / "a.png")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [8_000, 10_000, 30_000])
def test_bombs_are_refused_by_their_header(tmp_path: Path, side: int) -> None:
    (tmp_path / "bomb.png").write_bytes(png(side, side))
    assert f"more than {MAX_PIXELS:,}" in refusal(tmp_path / "bomb.png")
    with pytest.raises(DataError, match="more than"):
        read_header(tmp_path / "bomb.png")


def test_several_frames_are_refused(tmp_path: Path) -> None:
    frames = [Image.fromarray(GREY), Image.fromarray(GREY.T)]
    for suffix in ("tif", "gif", "png"):
        path = tmp_path / f"a.{suffix}"
        frames[0].save(path, save_all=True, append_images=frames[1:])
        assert refusal(path) == "has 2 frames; save the one you mean as a file of its own"
    frames[0].save(tmp_path / "one.gif")
    assert read_image(tmp_path / "one.gif", 32, 1).shape == (32, 32, 1)


@pytest.mark.parametrize("name", ["two words.png", "Läsion №5 皮膚.png", "n" * 196 + ".png", "ending.unknown"])
def test_odd_names(tmp_path: Path, name: str) -> None:
    Image.fromarray(GREY).save(tmp_path / name, "png")
    assert (read_image(tmp_path / name, 32, 1)[..., 0] == GREY).all()


def dicom(path: Path, values: np.ndarray, **tags: object) -> Path:
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID = CTImageStorage
    meta.MediaStorageSOPInstanceUID = generate_uid()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    data = FileDataset(str(path), {}, file_meta=meta, preamble=b"\0" * 128)
    data.SOPClassUID, data.SOPInstanceUID = meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID
    color = values.ndim == 3 and values.shape[-1] == 3
    data.Rows, data.Columns = values.shape[:2] if color else values.shape[-2:]
    data.SamplesPerPixel = 3 if color else 1
    data.PhotometricInterpretation = "RGB" if color else "MONOCHROME2"
    if color:
        data.PlanarConfiguration = 0
    data.BitsAllocated = data.BitsStored = 8 * values.dtype.itemsize
    data.HighBit = data.BitsStored - 1
    data.PixelRepresentation = int(values.dtype.kind == "i")
    for name, value in tags.items():
        setattr(data, name, value)
    data.PixelData = values.tobytes()
    data.save_as(path, enforce_file_format=True)
    return path


HOUNSFIELD = np.repeat(np.linspace(0, 2048, 32).astype(np.int16)[None], 32, axis=0)


def test_dicom_without_a_window_uses_its_range(tmp_path: Path) -> None:
    path = dicom(tmp_path / "a.dcm", HOUNSFIELD + 100)
    assert read_header(path) == ("DICOM", 32, 32, True)
    row = read_image(path, 32, 1)[0, :, 0]
    assert np.abs(row - np.linspace(0, 255, 32)).max() <= 1
    inverted = dicom(tmp_path / "b.dcm", HOUNSFIELD, PhotometricInterpretation="MONOCHROME1")
    assert (read_image(inverted, 32, 1)[0, :, 0] == 255 - row).all()


@pytest.mark.parametrize("function", ["LINEAR", "LINEAR_EXACT", "SIGMOID"])
def test_dicom_window_after_rescale(tmp_path: Path, function: str) -> None:
    path = dicom(
        tmp_path / "a.dcm",
        HOUNSFIELD,
        RescaleSlope=1,
        RescaleIntercept=-1024,
        WindowCenter=[40, 500],
        WindowWidth=[400, 2000],
        VOILUTFunction=function,
    )
    values = HOUNSFIELD[0].astype(float) - 1024
    expected = {
        "LINEAR": np.clip((values - 39.5) / 399 + 0.5, 0, 1),
        "LINEAR_EXACT": np.clip((values - 40) / 400 + 0.5, 0, 1),
        "SIGMOID": 1 / (1 + np.exp(-4 * (values - 40) / 400)),
    }[function]
    assert np.abs(read_image(path, 32, 1)[0, :, 0] - 255 * expected).max() <= 1


def test_a_window_on_dicom_begins_at_that_of_the_file(tmp_path: Path) -> None:
    rescaled = {"RescaleSlope": 1, "RescaleIntercept": -1024}
    path = dicom(tmp_path / "a.dcm", HOUNSFIELD, **rescaled, WindowCenter=40, WindowWidth=400)
    limits, window = read_levels(path) or (None, None)
    assert limits == (-1024, 1024)
    assert window == (40 - 0.5 - 399 / 2, 40 - 0.5 + 399 / 2)
    values = HOUNSFIELD[0].astype(float) - 1024
    for chosen in (window, (-200, 300)):
        assert chosen is not None
        expected = np.clip((values - chosen[0]) / (chosen[1] - chosen[0]), 0, 1)
        shown = np.asarray(read_picture(path, 32, chosen).convert("L"))[0]
        assert np.abs(shown - 255 * expected).max() <= 1
    # A window beyond the values of the file widens the limits, and without one it is all values.
    wide = dicom(tmp_path / "b.dcm", HOUNSFIELD, **rescaled, WindowCenter=0, WindowWidth=6001)
    assert read_levels(wide) == ((-3000.5, 2999.5), (-3000.5, 2999.5))
    plain = dicom(tmp_path / "c.dcm", HOUNSFIELD, **rescaled)
    assert read_levels(plain) == ((-1024, 1024), (-1024, 1024))
    assert read_levels(dicom(tmp_path / "d.dcm", COLOR)) is None


def test_dicom_in_colour_and_without_a_suffix(tmp_path: Path) -> None:
    path = dicom(tmp_path / "IM0001", COLOR)
    assert not read_header(path).grey
    assert (read_image(path, 32, 3) == COLOR).all()


def lookup_table(entries: np.ndarray, first: int, bits: int) -> pydicom.Dataset:
    table = pydicom.Dataset()
    table.add_new("LUTDescriptor", "SS" if first < 0 else "US", [len(entries), first, bits])
    table.add_new("LUTData", "OW", entries.astype("<u2").tobytes())
    return table


@pytest.mark.parametrize("bits", [8, 12, 16])
def test_dicom_lookup_table_after_rescale(tmp_path: Path, bits: int) -> None:
    """A falling curve over values from -500 to 499, its ends continued; the rescaled values are no integers."""
    top = 2**bits - 1
    entries = np.rint(top * (1 - np.linspace(0, 1, 1000) ** 2))
    path = dicom(
        tmp_path / "a.dcm",
        HOUNSFIELD,
        RescaleSlope=1.1,
        RescaleIntercept=-1024,
        VOILUTSequence=[lookup_table(entries, -500, bits)],
    )
    values = np.rint(HOUNSFIELD[0] * 1.1 - 1024)
    expected = 255 * (1 - np.clip((values + 500) / 999, 0, 1) ** 2)
    assert np.abs(read_image(path, 32, 1)[0, :, 0] - expected).max() <= 1


def test_dicom_modality_lookup_table(tmp_path: Path) -> None:
    table = lookup_table(np.arange(2049)[::-1], 0, 12)
    table.ModalityLUTType = "US"
    path = dicom(tmp_path / "a.dcm", HOUNSFIELD, ModalityLUTSequence=[table], WindowCenter=1024.5, WindowWidth=2049)
    assert np.abs(read_image(path, 32, 1)[0, :, 0] - 255 * (1 - HOUNSFIELD[0] / 2048)).max() <= 1


@pytest.mark.parametrize(("bits", "stored"), [(8, np.uint8), (8, np.uint16), (16, np.uint16)])
@pytest.mark.parametrize("values", [GREY, HOUNSFIELD.astype(np.uint16)])
def test_dicom_palette(tmp_path: Path, values: np.ndarray, bits: int, stored: type) -> None:
    """Red rises, green falls and blue stands, over as many entries as there are values."""
    count, top = int(values.max()) + 1, 2**bits - 1
    ramps = {"Red": np.linspace(0, top, count), "Green": np.linspace(top, 0, count), "Blue": np.full(count, top / 4)}
    tags: dict[str, object] = {"PhotometricInterpretation": "PALETTE COLOR"}
    for color, ramp in ramps.items():
        tags[f"{color}PaletteColorLookupTableDescriptor"] = [count, 0, bits]
        data = np.rint(ramp).astype(stored).tobytes()
        tags[f"{color}PaletteColorLookupTableData"] = data + b"\0" * (len(data) % 2)
    path = dicom(tmp_path / "a.dcm", values, **tags)
    share = values / values.max()
    expected = 255 * np.stack([share, 1 - share, np.full(share.shape, 0.25)], axis=-1)
    assert not read_header(path).grey
    assert np.abs(read_image(path, 32, 3) - expected).max() <= 1


def test_dicom_without_its_palette(tmp_path: Path) -> None:
    path = dicom(tmp_path / "a.dcm", GREY, PhotometricInterpretation="PALETTE COLOR")
    assert refusal(path) == "has a palette in segments or none at all; save it as an RGB image"


def test_remarks_on_readable_files_are_kept_back(tmp_path: Path) -> None:
    path = save(tmp_path / "a.jpg", COLOR, exif=b"Exif\0\0II*\0\x08\0\0\0\x05\0\1\0")
    with pytest.warns(UserWarning, match="EXIF"):
        pixels = read_image(path, 32, 3)
    with unremarked():
        assert (read_image(path, 32, 3) == pixels).all()


def whole_files() -> dict[str, bytes]:
    """A small valid file of each format."""
    exif = Image.Exif()
    exif[0x0112] = 6
    options: dict[str, dict[str, object]] = {"jpg": {"exif": exif}, "tif": {"compression": "tiff_lzw"}}
    with TemporaryDirectory() as folder:
        paths = [
            save(Path(folder, f"a.{suffix}"), COLOR[:12, ::2], **options.get(suffix, {}))
            for suffix in ("jpg", "png", "tif", "bmp", "webp", "gif")
        ]
        paths += [save(Path(folder, "raw.tif"), COLOR[:12, ::2]), save(Path(folder, "palette.png"), COLOR, "P")]
        window = {"RescaleSlope": 2, "RescaleIntercept": -9, "WindowCenter": 40, "WindowWidth": 400}
        paths += [dicom(Path(folder, "a.dcm"), HOUNSFIELD[:12], **window), dicom(Path(folder, "b.dcm"), COLOR[:12])]
        return {path.name: path.read_bytes() for path in paths}


WHOLE = whole_files()


def pixels_or_message(path: Path, channels: int) -> np.ndarray | str:
    try:
        read_header(path)
        return read_image(path, 8, channels)
    except DataError as error:
        return str(error)


@pytest.mark.parametrize("name", WHOLE)
@settings(deadline=None, max_examples=100)
@given(st.data())
def test_any_damage_is_an_image_or_a_refusal(name: str, data: st.DataObject) -> None:
    content = bytearray(WHOLE[name])
    for position in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=6)):
        content[position] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    with TemporaryDirectory() as folder, unremarked():
        path = Path(folder, name)
        path.write_bytes(content)
        for channels in (1, 3):
            outcome = pixels_or_message(path, channels)
            if isinstance(outcome, str):
                assert outcome.startswith(f"{path}: ")
                assert "\n" not in outcome
            else:
                assert outcome.shape == (8, 8, channels)
                assert outcome.dtype == np.uint8


def test_dicom_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frames = dicom(tmp_path / "frames.dcm", np.stack([HOUNSFIELD, HOUNSFIELD]), NumberOfFrames=2)
    assert refusal(frames) == "has 2 frames; save the one you mean as a file of its own"
    huge = dicom(tmp_path / "huge.dcm", HOUNSFIELD, Rows=10_000, Columns=10_000)
    assert "more than" in refusal(huge)
    empty = dicom(tmp_path / "report.dcm", HOUNSFIELD)
    data = pydicom.dcmread(empty)
    del data.PixelData, data.Rows
    data.save_as(empty)
    assert refusal(empty) == "is a DICOM file without an image"
    (tmp_path / "text.dcm").write_text("no image at all")
    assert refusal(tmp_path / "text.dcm") == "is not a DICOM file, though its name says so"
    short = dicom(tmp_path / "short.dcm", HOUNSFIELD)
    short.write_bytes(short.read_bytes()[:-100])
    assert refusal(short).startswith("cannot be decoded")
    monkeypatch.setitem(sys.modules, "pydicom", None)
    assert "pip install 'csda[dicom]'" in refusal(frames)


@pytest.mark.parametrize("shape", [(40, 120), (120, 40), (50, 50)])
@pytest.mark.parametrize("channels", [1, 3])
def test_an_image_keeps_its_aspect_ratio_where_it_is_to(tmp_path: Path, shape: tuple[int, int], channels: int) -> None:
    """Padded, all of it lies between black bars; cut, its middle fills the square. Pillow alone says the same."""
    rng = np.random.default_rng(0)
    coarse = rng.integers(60, 256, (shape[0] // 10, shape[1] // 10, 3), dtype=np.uint8)
    save(tmp_path / "a.png", np.kron(coarse, np.ones((10, 10, 1), np.uint8)))
    with Image.open(tmp_path / "a.png") as image:
        whole = image.convert("L" if channels == 1 else "RGB")
    padded = ImageOps.pad(whole, (24, 24), Image.Resampling.BILINEAR)
    side, (across, down) = min(shape), ((length - min(shape)) // 2 for length in whole.size)
    # Not ImageOps.fit, whose filter sees beyond the cut.
    middle = whole.crop((across, down, across + side, down + side))
    cut = middle.resize((24, 24), Image.Resampling.BILINEAR)
    for aspect, expected in (
        ("pad", padded),
        ("crop", cut),
        ("squash", whole.resize((24, 24), Image.Resampling.BILINEAR)),
    ):
        found = read_image(tmp_path / "a.png", 24, channels, aspect).astype(int)
        assert np.abs(found - np.asarray(expected).reshape(24, 24, channels)).max() <= 1, aspect
    if shape[0] != shape[1]:
        bars = read_image(tmp_path / "a.png", 24, channels, "pad")
        black = bars[:8] if shape[0] < shape[1] else bars[:, :8]
        assert (black == 0).all()
