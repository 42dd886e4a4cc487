"""Thumbnails and large pictures of a session's images. Files outside of the data set are never opened."""

from __future__ import annotations

import io
import os
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

from PIL import Image

from csda.data.cache import digest
from csda.data.decode import read_levels, read_picture
from csda.data.records import Dataset, Record
from csda.errors import DataError
from csda.folders import default_cache

THUMBNAIL = 240
LARGE = 2048
_FORM = b"thumbnail 1, %d" % THUMBNAIL


class Pictures:
    """Pictures as WebP. Thumbnails are cached by path, size and times of their file."""

    def __init__(self, dataset: Dataset, cache: Path | None = None) -> None:
        self.dataset = dataset
        self.cache = (cache or default_cache()) / "thumbnails"
        self._root = os.path.realpath(dataset.root) if dataset.root is not None else None
        self._drawn = {record.id: row for row, record in enumerate(dataset.records)} if dataset.draw else {}

    def thumbnail(self, record: Record) -> bytes:
        if record.path is None:
            return _encode(self._draw(record, THUMBNAIL), quality=80)
        path = self._inside(record.path)
        status = path.stat()
        key = b"%d %d %d" % (status.st_size, status.st_mtime_ns, status.st_ino)
        name = digest(_FORM, bytes(path.absolute()), key).hex()
        kept = self.cache / name[:2] / f"{name}.webp"
        with suppress(OSError):
            return kept.read_bytes()
        content = _encode(read_picture(path, THUMBNAIL), quality=80)
        draft = kept.with_name(f".{token_hex(8)}")
        with suppress(OSError):  # if the cache cannot be written, thumbnails are made again each time
            kept.parent.mkdir(parents=True, exist_ok=True)
            try:
                draft.write_bytes(content)
                draft.replace(kept)
            finally:
                draft.unlink(missing_ok=True)
        return content

    def large(self, record: Record, window: tuple[float, float] | None = None) -> bytes:
        if record.path is None:
            return _encode(self._draw(record, 512), quality=95)
        return _encode(read_picture(self._inside(record.path), LARGE, window), quality=92)

    def levels(self, record: Record) -> tuple[tuple[float, float], tuple[float, float]] | None:
        """The limits and the default of the window, for files with more than 256 grey values."""
        return None if record.path is None else read_levels(self._inside(record.path))

    def _inside(self, path: Path) -> Path:
        """Return the path if it is inside the data set now. It may have been replaced by a link since the images were
        listed.
        """
        real = os.path.realpath(path)
        if self._root is None or not real.startswith(self._root.rstrip(os.sep) + os.sep):
            raise DataError(f"{path.name}: is a link that leaves the data set")
        if not os.path.isfile(real):  # noqa: PTH113
            raise DataError(f"{path.name}: no longer exists")
        return path

    def _draw(self, record: Record, size: int) -> Image.Image:
        assert self.dataset.draw is not None
        pixels = self.dataset.draw([self._drawn[record.id]], size)[0]
        return Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)


def _encode(image: Image.Image, quality: int) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=quality, method=2)
    return buffer.getvalue()
