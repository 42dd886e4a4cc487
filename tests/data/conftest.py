"""Tiny sets in the layouts of the real ones, and the real ones where somebody has them."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from PIL import Image


@pytest.fixture
def real_data() -> Path:
    folder = os.environ.get("CSDA_DATA")
    if not folder:
        pytest.skip("CSDA_DATA names no folder with the real data sets")
    return Path(folder)


@pytest.fixture(scope="session")
def pixel() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (2, 2), "salmon").save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="session")
def make_images(pixel: bytes) -> Callable[[Path, Iterable[str]], Path]:
    """Writes one image for each relative path and returns the folder."""

    def make(root: Path, names: Iterable[str]) -> Path:
        root.mkdir(parents=True, exist_ok=True)
        for name in names:
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(pixel)
        return root

    return make
