"""`csda bench review`: time the review page on many images, over HTTP like a browser."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
import torch
from PIL import Image

from csda.data.splits import SplitRow
from csda.errors import RunError
from csda.presets import configure
from csda.research.bench.timing import describe_machine
from csda.runs import Run

CLASSES = ("adenoma", "normal", "polyp", "ulcer")
FILES = 200
"""Number of different image files; the others are hard links."""


def bench_review(images: int = 100_000, labels: int = 200) -> dict[str, Any]:
    """Time the start in seconds, and pages, searches, pictures and confirmed labels in milliseconds."""
    with tempfile.TemporaryDirectory() as place:
        run = _make_run(Path(place), images)
        begun = time.perf_counter()
        with _served(run) as (port, started):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            ask = _Asking(connection)
            first = ask.time("GET", "/") + ask.time("GET", "/api/session") + ask.time("GET", "/api/images?limit=60")
            numbers = [item["number"] for item in ask.last["items"]]
            pictures = [ask.time("GET", f"/api/images/{number}/thumbnail") for number in numbers]
            again = [ask.time("GET", f"/api/images/{number}/thumbnail") for number in numbers]
            pages = [ask.time("GET", f"/api/images?limit=60&after={500 * place}") for place in range(20)]
            searches = [ask.time("GET", f"/api/images?search=image-{place}") for place in range(100, 120)]
            kept = [
                ask.time("POST", "/api/decisions", {"images": [number], "action": "label", "label": [number % 4]})
                for number in range(labels)
            ]
            painted = _first_paint(port)
        return {
            **describe_machine(torch.device("cpu")),
            "images": images,
            "start_s": started - begun,
            "first_answers_ms": first,
            "first_paint_ms": painted,
            "page_ms": _spread(pages),
            "search_ms": _spread(searches),
            "thumbnail_first_ms": _spread(pictures),
            "thumbnail_again_ms": _spread(again),
            "label_confirmed_ms": _spread(kept),
        }


class _Asking:
    """Sends requests over one open connection, like a browser."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self.connection = connection
        self.last: Any = None

    def time(self, method: str, path: str, body: Any = None) -> float:
        """Milliseconds until the complete answer has arrived."""
        headers = {"X-CSDA-Review": "1", "Content-Type": "application/json"} if body is not None else {}
        begun = time.perf_counter()
        self.connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = self.connection.getresponse()
        content = answer.read()
        taken = 1000 * (time.perf_counter() - begun)
        if answer.status != 200:
            raise RunError(f"{path}: the server answers {answer.status}")
        if answer.headers["content-type"] == "application/json":
            self.last = json.loads(content)
        return taken


def _spread(values: list[float]) -> dict[str, float]:
    cuts = quantiles(values, n=20)
    return {"median": median(values), "p95": cuts[-1], "worst": max(values), "n": len(values)}


def _make_run(place: Path, images: int) -> Path:
    """Make a finished run on many images, with random predictions."""
    generator = np.random.default_rng(0)
    data = place / "images"
    (data / "unlabeled").mkdir(parents=True)
    rows = []
    for name in CLASSES:
        (data / name).mkdir()
    for number in range(images):
        path = data / "unlabeled" / f"image-{number:06d}.jpg"
        if number < FILES:
            pixels = generator.integers(256, size=(24, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).resize((640, 480)).save(path, quality=85)
        else:
            os.link(data / "unlabeled" / f"image-{number % FILES:06d}.jpg", path)
        rows.append(SplitRow(f"unlabeled/{path.name}", "unlabeled", "", ""))
    for part in ("labeled", "val", "test"):
        for name in CLASSES:
            path = data / name / f"{part}.jpg"
            shutil.copy(data / "unlabeled" / "image-000000.jpg", path)
            rows.append(SplitRow(f"{name}/{part}.jpg", part, name, ""))
    config = configure({"data": str(data), "method": "baseline", "preset": "quick", "epochs": 2})
    environment = {"classes": list(CLASSES), "multi_label": False, "remarks": []}
    run = Run.create(place / "run", config, environment, rows, {})
    run.write_epoch({"epoch": 1}, {}, [])
    probs = generator.dirichlet(np.ones(len(CLASSES)), images).round(4)
    unlabeled = [row for row in rows if row.split == "unlabeled"]
    guesses = [
        [row.id, CLASSES[int(each.argmax())], each.max(), *each] for row, each in zip(unlabeled, probs, strict=True)
    ]
    held = [row for row in rows if row.split in ("val", "test")]
    run.finish(
        [{}], [[row.id, row.split, row.label, row.label, 1, 0, 0, 0] for row in held], guesses, {"best_epoch": 1}
    )
    return run.folder


@contextmanager
def _served(run: Path) -> Iterator[tuple[int, float]]:
    """Start a server in its own process; return its port and the time."""
    command = [sys.executable, "-m", "csda", "review", str(run), "--port", "0", "--no-features"]
    environment = os.environ | {"CSDA_CACHE": str(run.parent / "cache"), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        if not address.startswith("http://"):
            raise RunError("the server does not start")
        yield int(address.rstrip("/").rpartition(":")[2]), time.perf_counter()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def _first_paint(port: int) -> float | None:
    """Milliseconds until the first paint in a browser; None without Chromium and Playwright."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    if chromium is None:
        return None
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{port}/")
        page.wait_for_selector(".card")
        painted = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null")
        browser.close()
    return None if painted is None else float(painted)
