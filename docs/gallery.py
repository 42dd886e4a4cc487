"""Draw the pictures of docs/gallery.md: parts of real pages, photographed in Chromium.

    python docs/gallery.py RUN FOLDER

RUN is a finished run on drawn images and FOLDER a folder of images whose licence allows to show them:

    csda train --method csda --preset quick --labels 150 --set epochs=8 --out drawn
    python docs/gallery.py drawn gastrovision4

It needs Chromium and Playwright. Run it again when the look of a report changes.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

GALLERY = Path(__file__).parent / "gallery"
WIDTH = 1000
"""Width of a page and of its pictures in pixels."""

SCALE = 2
"""Pixels of a photograph per pixel of the page, before it is reduced to `WIDTH`."""


def main(run: Path, folder: Path) -> int:
    """Write the pictures of a run's report and of the check of a folder."""
    csda = [sys.executable, "-m", "csda"]
    with tempfile.TemporaryDirectory() as scratch:
        check = Path(scratch) / "check.html"
        subprocess.run([*csda, "report", str(run)], check=True)
        subprocess.run([*csda, "data", "check", str(folder), "--html", str(check)], check=True, capture_output=True)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": WIDTH, "height": 800}, device_scale_factor=SCALE)
            page.goto((run / "report.html").absolute().as_uri())
            _photograph(page, "report", 1660)
            _photograph(page, "mistakes", 1375, "#mistakes")
            _photograph(page, "grad-cam", 975, "#seen")
            page.goto(check.as_uri())
            page.evaluate(
                "text => document.querySelector('.kicker').textContent = text", f"Data check of {folder.name}"
            )
            _photograph(page, "data-check", 1434)
            browser.close()
    return 0


def _photograph(page: Any, name: str, height: int, selector: str | None = None) -> None:
    """Save a page from its top, or one section of it, down to a height at most."""
    for image in page.query_selector_all("img"):
        image.scroll_into_view_if_needed()  # pictures are loaded when they are first seen
    box = page.query_selector(selector or "body").bounding_box()
    top = box["y"] + page.evaluate("scrollY")
    clip = {"x": 0, "y": top, "width": WIDTH, "height": min(height, box["height"])}
    picture = Image.open(io.BytesIO(page.screenshot(full_page=True, clip=clip)))
    small = picture.resize((WIDTH, round(picture.height * WIDTH / picture.width)), Image.Resampling.LANCZOS)
    small.convert("RGB").save(GALLERY / f"{name}.webp", quality=80, method=6)


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
