"""Decode an image file (JPEG, PNG, TIFF, BMP, WebP, GIF or DICOM) to a square of uint8 pixels.

Rules for all sources:

- An image becomes size × size by an antialiasing filter. It is squashed, as in the paper, or keeps its aspect ratio:
  with black on both sides of the shorter axis (`pad`), or cropped to the middle (`crop`).
- Transparent pixels become black, the background of most medical images.
- EXIF rotation is applied.
- A file with several frames is refused, except for MPO, a photograph with a preview.
- 16-bit grey values are divided by the smallest range of 8, 12 or 16 bits that holds them, because 12-bit values are
  commonly stored in 16 bits. 32-bit and floating-point values within [0, 1] keep that range. All others are stretched
  from their smallest to their largest value.
- DICOM values pass the modality transform, then the first window, or else the first VOI lookup table. Without both they
  are stretched from their smallest to their largest value. MONOCHROME1 is inverted. A palette gives colours.
- An image of more than `MAX_PIXELS` is refused by its header, and so is a file that has more than `MAX_BYTES` or would
  inflate to more. Only the formats above are tried, for any file name.
"""

from __future__ import annotations

import io
import logging
import os
import struct
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from errno import EACCES, EINVAL, EISDIR, ELOOP, ENAMETOOLONG, ENOENT, ENOTDIR, ENXIO, EPERM
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from csda.data.records import Pixels
from csda.errors import DataError
from csda.files import NotRegularError, open_regular

Aspect = Literal["squash", "pad", "crop"]
"""How an image becomes a square."""

MAX_PIXELS = 50_000_000
MAX_BYTES = 10 * MAX_PIXELS
"""Largest size of a file, and of its inflated content."""

READ_AT_ONCE = 1 << 24
"""Files of up to this size are read completely before they are decoded."""

REDUCED = 6
"""An image that is this many times too large is first shrunk by a whole factor, which is much faster."""

IMAGE_SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".jfif", ".png", ".tif", ".tiff", ".bmp", ".webp", ".gif", ".dcm", ".dicom"}
)
FORMATS = ("JPEG", "PNG", "TIFF", "BMP", "WEBP", "GIF")
"""The formats that Pillow may try. Other decoders of it start programs or are rarely used."""

DICOM_SUFFIXES = frozenset({".dcm", ".dicom"})
GREY_MODES = frozenset({"1", "L", "LA", "La", "I", "F", "I;16", "I;16L", "I;16B", "I;16N"})

TILE_WIDTH, TILE_LENGTH = 322, 323
"""Tags of TIFF."""

GREY_WITHIN = 3
"""Largest difference between channels of a grey JPEG, if its colour planes are off by one."""

FAULTS_OF_A_FILE = frozenset({None, ENOENT, EACCES, EPERM, ENOTDIR, EISDIR, ELOOP, ENAMETOOLONG, EINVAL, ENXIO})
"""Error numbers that are due to the file: none from decoders, EINVAL for a bad seek, ENXIO for a socket."""


# Pillow's log messages on damaged files have no file name; they are raised as errors anyway.
logging.getLogger("PIL").addHandler(logging.NullHandler())


class Header(NamedTuple):
    """The metadata of a file, without its pixels."""

    format: str
    width: int
    height: int
    grey: bool


class UnreadableError(DataError):
    """An image file that is missing, forbidden, damaged or unusable, with the reason. Others may still be readable."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.reason = reason


class _RefusedError(Exception):
    """The reason why a file is not used, without its path."""


@cache
def _silence_libtiff() -> None:
    """Stop libtiff from printing messages without a file name, which Pillow raises as errors anyway.

    It is harmless if the library is not found among those of Pillow or those that Linux has loaded.
    """
    import ctypes

    beside = Path(Image.__file__).parent
    libraries = [*beside.parent.glob("pillow.libs/libtiff*"), *beside.glob(".dylibs/libtiff*")]
    with suppress(OSError):
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
        libraries += {Path(line.split(maxsplit=5)[5]) for line in lines if "/libtiff" in line}
    for library in libraries:
        with suppress(OSError, AttributeError):
            ctypes.CDLL(str(library)).TIFFSetErrorHandler(None)


@contextmanager
def unremarked() -> Iterator[None]:
    """A context without warnings of Pillow and pydicom on odd but readable files, for the whole process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def read_header(path: Path) -> Header:
    """Read format, size and colour of the image. Errors are those of `explain_failure`."""
    try:
        with _opened(path) as file:
            if _is_dicom(path, file):
                dicom = _read_dicom(file, stop_before_pixels=True)
                grey = dicom.PhotometricInterpretation.startswith("MONOCHROME")
                return Header("DICOM", dicom.Columns, dicom.Rows, grey)
            with Image.open(file, formats=FORMATS) as image:
                return _header(image)
    except Exception as error:
        raise explain_failure(path, error) from error


def read_image(path: Path, size: int, channels: int, aspect: Aspect = "squash") -> Pixels:
    """Read the image as uint8 [size, size, channels]. Errors are those of `explain_failure`."""
    try:
        with _opened(path) as file:
            image = _dicom_image(file) if _is_dicom(path, file) else _plain_image(file, size)
        return _fit(image, size, channels, aspect)
    except Exception as error:  # decoders of Pillow and pydicom raise any error on a damaged file
        raise explain_failure(path, error) from error


def read_picture(path: Path, size: int, window: tuple[float, float] | None = None) -> Image.Image:
    """Read the image for display, with its aspect ratio and a longer side of at most `size`.

    `window` are the grey values to show as black and white, if the file has more than 256; else it is ignored.
    """
    try:
        with _opened(path) as file:
            image = _dicom_image(file, window) if _is_dicom(path, file) else _plain_image(file, size, window)
        image = image if image.mode in ("L", "RGB") else image.convert("L" if image.mode in GREY_MODES else "RGB")
        image.thumbnail((size, size), Image.Resampling.BILINEAR, reducing_gap=REDUCED / 2)
        return image
    except Exception as error:
        raise explain_failure(path, error) from error


def read_levels(path: Path) -> tuple[tuple[float, float], tuple[float, float]] | None:
    """The limits of a window on a file with more than 256 grey values, and the window that it is shown with by default.

    The limits contain all values of the file and this window.
    """
    try:
        with _opened(path) as file:
            if _is_dicom(path, file):
                values, dicom = _dicom_values(file)
                if values.ndim == 3:
                    return None
                window = _window_ends(dicom) if "WindowCenter" in dicom and "WindowWidth" in dicom else None
            else:
                with Image.open(file, formats=FORMATS) as image:
                    _header(image)
                    if not _is_deep(image):
                        return None
                    values = np.asarray(image)
                    window = _plain_ends(np.nan_to_num(values))
        low, high = float(np.nanmin(values)), float(np.nanmax(values))
        if low >= high:
            return None
        if window is None or not np.isfinite(window).all():
            window = low, high
        return (min(low, window[0]), max(high, window[1])), window
    except Exception as error:
        raise explain_failure(path, error) from error


def _is_deep(image: Image.Image) -> bool:
    """Whether the grey values have more than 8 bits."""
    return image.mode in ("I", "F") or image.mode.startswith("I;16")


def fit_image(image: Image.Image, size: int, channels: int, aspect: Aspect = "squash") -> Pixels:
    """Convert an open Pillow image like `read_image`."""
    try:
        _header(image)
        return _fit(_flatten(ImageOps.exif_transpose(image)), size, channels, aspect)
    except Exception as error:  # an open file that was not read yet may be damaged
        raise DataError(f"the image {_reason(error)}") from error


def fit_array(values: npt.NDArray[Any], size: int, channels: int, aspect: Aspect = "squash") -> Pixels:
    """Convert values [H, W, C] (8 or 16 bits, booleans, or floats from 0 to 1) like `read_image`."""
    if not values.size or values.shape[0] * values.shape[1] > MAX_PIXELS:
        raise DataError(f"an image is of the shape {list(values.shape)}; give [H, W, C] of up to {MAX_PIXELS:,} pixels")
    if values.dtype.kind == "f":
        if not ((values >= 0) & (values <= 1)).all():
            raise DataError("an image of floats has values outside of 0 to 1; scale it, or give uint8")
        values = np.rint(values * 255).astype(np.uint8)
    elif values.dtype == np.bool_:
        values = values.astype(np.uint8) * np.uint8(255)
    elif values.dtype == np.uint16:
        values = _to_bytes(values)
    elif values.dtype != np.uint8:
        raise DataError(f"an image is of {values.dtype}; give uint8, uint16, or numbers from 0 to 1")
    if values.shape == (size, size, channels):
        return values
    values = np.ascontiguousarray(values)
    image = Image.fromarray(values[..., 0] if values.shape[2] == 1 else values)
    return _fit(_flatten(image), size, channels, aspect)


def _fit(image: Image.Image, size: int, channels: int, aspect: Aspect) -> Pixels:
    mode = "L" if channels == 1 else "RGB"
    return _to_square(image if image.mode == mode else image.convert(mode), size, aspect)


def has_colour(path: Path, size: int) -> bool:
    """Whether the image has colour at this size. If it is grey by its header it is not decoded."""
    return not read_header(path).grey and not is_grey(read_image(path, size, 3))


def is_grey(pixels: Pixels) -> bool:
    """Whether the channels of an image [H, W, C] are equal except for JPEG rounding."""
    return int(np.ptp(pixels, axis=-1).max()) <= GREY_WITHIN


def _to_square(image: Image.Image, size: int, aspect: Aspect) -> Pixels:
    """Make pixels square, [size, size, C]."""
    width, height = image.size
    if aspect == "pad":
        scale = size / max(width, height)
        inner = _resize(image, max(1, round(width * scale)), max(1, round(height * scale)))
        pixels = np.zeros((size, size, inner.shape[-1]), np.uint8)
        top, left = (size - inner.shape[0]) // 2, (size - inner.shape[1]) // 2
        pixels[top : top + inner.shape[0], left : left + inner.shape[1]] = inner
        return pixels
    if aspect == "crop" and width != height:
        side = min(width, height)
        left, top = (width - side) // 2, (height - side) // 2
        image = image.crop((left, top, left + side, top + side))
    return _resize(image, size, size)


def _resize(image: Image.Image, width: int, height: int) -> Pixels:
    """Resize pixels to [height, width, C] with the antialiasing triangle filter."""
    if image.mode == "RGB" and max(image.size) < REDUCED * max(width, height):
        import torch
        import torch.nn.functional as F

        # Pillow's filter within one grey level, in a third of the time.
        pixels = torch.from_numpy(np.array(image))[None].permute(0, 3, 1, 2)
        resized = F.interpolate(pixels, (height, width), mode="bilinear", antialias=True)
        return np.asarray(resized[0].permute(1, 2, 0))
    image = image.resize((width, height), Image.Resampling.BILINEAR, reducing_gap=REDUCED / 2)
    return np.asarray(image).reshape(height, width, -1)


def _opened(path: Path) -> BinaryIO:
    file = open_regular(path)
    size = os.fstat(file.fileno()).st_size
    if READ_AT_ONCE < size <= MAX_BYTES:
        return io.BufferedReader(file)
    with file:
        if size == 0:
            raise _RefusedError("is empty (0 bytes)")
        if size > MAX_BYTES:
            raise _RefusedError(f"has {size:,} bytes, more than {MAX_BYTES:,}; shrink or cut it first")
        return io.BytesIO(file.readall())  # decoders read a few bytes at a time, which is much faster from memory


def explain_failure(path: Path, error: Exception) -> DataError:
    """Convert an error: to `UnreadableError` if it is due to the file, else to one that stops the program.

    Out of memory or file handles, a failing disk or an unreachable server say nothing about the file. To leave it out
    would train on different images.
    """
    of_the_machine = isinstance(error, MemoryError) or (
        isinstance(error, OSError) and (error.errno not in FAULTS_OF_A_FILE or "out of memory" in str(error))
    )
    if not of_the_machine:
        return UnreadableError(path, _reason(error))
    reason = getattr(error, "strerror", None) or str(error) or "out of memory"
    return DataError(f"{path}: reading stopped ({reason}); the file may be intact: fix the cause and start again")


def _reason(error: Exception) -> str:
    if isinstance(error, _RefusedError):
        return str(error)
    if isinstance(error, NotRegularError | IsADirectoryError) or getattr(error, "errno", None) == ENXIO:
        return "is not a file"
    if isinstance(error, FileNotFoundError):
        return "does not exist"
    if getattr(error, "errno", None) == ELOOP:
        return "is a link to itself"
    if isinstance(error, PermissionError):
        return "may not be read (permission denied)"
    if isinstance(error, UnidentifiedImageError):
        return "is not an image in a known format"
    if isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning):
        return f"has more than {MAX_PIXELS:,} pixels"
    return f"cannot be decoded ({' '.join(str(error).split()) or type(error).__name__})"


def _check_size(width: int, height: int) -> None:
    if width < 1 or height < 1:
        raise _RefusedError(f"has no pixels ({width}×{height})")
    if width * height > MAX_PIXELS:
        raise _RefusedError(f"has {width}×{height} pixels, more than {MAX_PIXELS:,}; shrink or cut it first")


def _header(image: Image.Image) -> Header:
    _check_size(*image.size)
    tags: Mapping[int, Any] = getattr(image, "tag_v2", {})
    if int(tags.get(TILE_WIDTH, 1)) * int(tags.get(TILE_LENGTH, 1)) > MAX_PIXELS:
        raise _RefusedError(f"has a tile of more than {MAX_PIXELS:,} pixels; save it again")
    frames = getattr(image, "n_frames", 1)
    if frames > 1 and image.format != "MPO":
        raise _RefusedError(f"has {frames} frames; save the one you mean as a file of its own")
    grey = image.mode in GREY_MODES
    if palette := image.getpalette() if image.mode in ("P", "PA") else None:
        colors = np.array(palette).reshape(-1, 3)
        grey = bool((colors == colors[:, :1]).all())
    return Header(image.format or "", image.width, image.height, grey)


def _plain_image(file: BinaryIO, size: int, window: tuple[float, float] | None = None) -> Image.Image:
    with Image.open(file, formats=FORMATS) as image:
        _header(image)
        # A JPEG can be decoded at half its size or less. Twice the wanted size is enough for the filter.
        image.draft(None, (2 * size, 2 * size))
        if image.format == "TIFF":
            _silence_libtiff()
        image.load()
        ImageOps.exif_transpose(image, in_place=True)
        if window is not None and _is_deep(image):
            return Image.fromarray(_stretch(np.nan_to_num(np.asarray(image)), *window))
        return _flatten(image)


def _flatten(image: Image.Image) -> Image.Image:
    """Convert to 8 bits per channel, with transparent pixels on black."""
    if _is_deep(image):
        return Image.fromarray(_to_bytes(np.asarray(image)))
    if image.has_transparency_data:
        return Image.alpha_composite(Image.new("RGBA", image.size, (0, 0, 0, 255)), image.convert("RGBA"))
    return image


def _to_bytes(values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Convert grey values of more than 8 bits to 8 bits."""
    values = np.nan_to_num(values)
    return _stretch(values, *_plain_ends(values))


def _plain_ends(values: npt.NDArray[Any]) -> tuple[float, float]:
    """The grey values that become black and white."""
    low, high = values.min(), values.max()
    if values.dtype.kind == "f" and low >= 0 and high <= 1:
        low, high = 0, 1
    elif values.dtype.kind != "f" and low >= 0 and high <= 65535:
        low, high = 0, next(top for top in (255, 4095, 65535) if high <= top)
    return float(low), float(high)


def _stretch(values: npt.NDArray[Any], low: float, high: float) -> npt.NDArray[np.uint8]:
    scaled = (values.astype(np.float32) - low) * (255 / max(high - low, 1e-12))
    pixels: Pixels = np.rint(scaled.clip(0, 255)).astype(np.uint8)
    return pixels


def _is_dicom(path: Path, file: BinaryIO) -> bool:
    head = file.read(132)
    file.seek(0)
    return head[128:] == b"DICM" or path.suffix.lower() in DICOM_SUFFIXES


def _read_dicom(file: BinaryIO, stop_before_pixels: bool = False) -> Any:
    """Read the DICOM data set of a single-frame image that is not too large."""
    try:
        import pydicom
    except ImportError:
        raise _RefusedError("is a DICOM file, which needs pydicom: pip install 'csda[dicom]'") from None
    from pydicom.errors import InvalidDicomError

    try:
        _bound_deflated(file)
        dicom = pydicom.dcmread(file, stop_before_pixels=stop_before_pixels)
    except InvalidDicomError:
        raise _RefusedError("is not a DICOM file, though its name says so") from None
    if "Rows" not in dicom or "Columns" not in dicom:
        raise _RefusedError("is a DICOM file without an image")
    if int(dicom.get("NumberOfFrames") or 1) > 1:
        raise _RefusedError(f"has {dicom.NumberOfFrames} frames; save the one you mean as a file of its own")
    _check_size(dicom.Columns, dicom.Rows)
    samples, bits = int(dicom.get("SamplesPerPixel") or 1), int(dicom.get("BitsAllocated") or 8)
    size = dicom.Columns * dicom.Rows * samples * bits // 8
    if size > MAX_BYTES:
        raise _RefusedError(f"has {size:,} bytes of pixels, more than {MAX_BYTES:,}; shrink or cut it first")
    return dicom


def _bound_deflated(file: BinaryIO) -> None:
    """Refuse a deflated data set that inflates to more than `MAX_BYTES`, because pydicom inflates it completely."""
    from pydicom.filereader import _read_file_meta_info, read_preamble
    from pydicom.uid import DeflatedExplicitVRLittleEndian

    read_preamble(file, False)
    if _read_file_meta_info(file).get("TransferSyntaxUID") == DeflatedExplicitVRLittleEndian:
        inflation, rest, size = zlib.decompressobj(-zlib.MAX_WBITS), file.read(), 0
        while rest and not inflation.eof:
            size += len(inflation.decompress(rest, 1 << 24))
            rest = inflation.unconsumed_tail
            if size > MAX_BYTES:
                raise _RefusedError(f"inflates to more than {MAX_BYTES:,} bytes; save it without compression")
    file.seek(0)


def _bound_frame(dicom: Any) -> None:
    """Refuse a compressed frame with another size than the header, because the decoder would allocate memory for it."""
    from pydicom.encaps import generate_frames
    from pydicom.uid import RLELossless

    frame = next(generate_frames(dicom.PixelData, number_of_frames=1))
    if dicom.file_meta.TransferSyntaxUID == RLELossless:
        if 64 * len(frame) > 8 * MAX_BYTES:  # an RLE run expands to up to 64 times its bytes
            raise _RefusedError("has too many bytes of run lengths; save it without compression")
    elif _frame_size(frame) != (dicom.Columns, dicom.Rows):
        raise _RefusedError(f"says {dicom.Columns}×{dicom.Rows} pixels and holds an image of another size")


def _frame_size(frame: bytes) -> tuple[int, int] | None:
    """Width and height in a JPEG, JPEG-LS or JPEG 2000 stream."""
    if frame[:4] == b"\xff\x4f\xff\x51":
        right, bottom, left, top = struct.unpack_from(">4I", frame, 8)
        return right - left, bottom - top
    place = 2
    while place + 9 <= len(frame) and frame[place] == 0xFF:
        marker = frame[place + 1]
        if marker == 0xFF:  # padding
            place += 1
        elif marker == 0xF7 or (0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC)):
            height, width = struct.unpack_from(">2H", frame, place + 5)
            return width, height
        else:
            place += 2 + int.from_bytes(frame[place + 2 : place + 4])
    return None


def _dicom_values(file: BinaryIO) -> tuple[npt.NDArray[Any], Any]:
    """Colours [H, W, 3] or grey values [H, W] after the modality transform, and the data set."""
    dicom = _read_dicom(file)
    from pydicom.pixels.processing import apply_modality_lut
    from pydicom.pixels.utils import pixel_array

    if dicom.file_meta.TransferSyntaxUID.is_encapsulated:
        _bound_frame(dicom)
    values = pixel_array(dicom)
    if dicom.PhotometricInterpretation == "PALETTE COLOR":
        values = np.stack([_palette(values, dicom, color) for color in ("Red", "Green", "Blue")], axis=-1)
    if values.ndim == 3:
        return values, dicom
    if dicom.get("ModalityLUTSequence"):
        return _look_up(values, dicom, dicom.ModalityLUTSequence[0]), dicom
    return apply_modality_lut(values, dicom), dicom


def _dicom_image(file: BinaryIO, window: tuple[float, float] | None = None) -> Image.Image:
    values, dicom = _dicom_values(file)
    if values.ndim == 3:
        return Image.fromarray(values if values.dtype == np.uint8 else _stretch(values, 0, np.iinfo(values.dtype).max))
    if window is not None:
        grey = _stretch(values, *window)
    elif "WindowCenter" in dicom and "WindowWidth" in dicom:
        grey = _window(values, dicom)
    elif dicom.get("VOILUTSequence"):
        table = dicom.VOILUTSequence[0]
        grey = _stretch(_look_up(values, dicom, table), 0, 2 ** table.LUTDescriptor[2] - 1)
    else:
        grey = _stretch(values, float(values.min()), float(values.max()))
    return Image.fromarray(255 - grey if dicom.PhotometricInterpretation == "MONOCHROME1" else grey)


def _palette(values: npt.NDArray[Any], dicom: Any, color: str) -> npt.NDArray[np.uint8]:
    name = f"{color}PaletteColorLookupTable"
    if f"{name}Data" not in dicom:
        raise _RefusedError("has a palette in segments or none at all; save it as an RGB image")
    descriptor = dicom[f"{name}Descriptor"].value
    return _stretch(_table_entries(values, dicom, descriptor, dicom[f"{name}Data"].value), 0, 2 ** descriptor[2] - 1)


def _look_up(values: npt.NDArray[Any], dicom: Any, table: Any) -> npt.NDArray[Any]:
    return _table_entries(values, dicom, table.LUTDescriptor, table.LUTData)


def _table_entries(values: npt.NDArray[Any], dicom: Any, descriptor: Any, data: Any) -> npt.NDArray[Any]:
    """Apply a lookup table (DICOM PS3.3, C.7.6.3.1.5 and C.11.1.1); values outside of it take its end values.

    pydicom is not used, because it wraps around if a table of 8 bits has more than 256 entries.
    """
    count, first, _ = descriptor
    if isinstance(data, bytes):
        words = "<u2" if dicom.original_encoding[1] else ">u2"
        data = np.frombuffer(data, np.uint8 if len(data) < 2 * (count or 2**16) else words)
    entries = np.atleast_1d(data)[: count or 2**16]
    found: npt.NDArray[Any] = entries[(np.rint(values).astype(np.int64) - first).clip(0, len(entries) - 1)]
    return found


def _window(values: npt.NDArray[Any], dicom: Any) -> npt.NDArray[np.uint8]:
    """The first window of the file (DICOM PS3.3, C.11.2.1.2 and C.11.2.1.3)."""
    low, high = _window_ends(dicom)
    if dicom.get("VOILUTFunction") == "SIGMOID":
        return _stretch(1 / (1 + np.exp(-4 * (values.astype(np.float32) - (low + high) / 2) / (high - low))), 0, 1)
    return _stretch(values, low, high)


def _window_ends(dicom: Any) -> tuple[float, float]:
    """The grey values that the first window of the file shows as black and white."""
    center, width = (np.atleast_1d(dicom[name].value)[0] for name in ("WindowCenter", "WindowWidth"))
    center, width = float(center), max(float(width), 1.0)
    if dicom.get("VOILUTFunction", "LINEAR") == "LINEAR":
        center, width = center - 0.5, width - 1
    return center - width / 2, center + width / 2
