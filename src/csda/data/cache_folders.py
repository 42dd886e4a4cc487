"""The folders of the cache: list and show them, keep their size below a limit, and delete them."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from csda.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

CACHE_LIMIT = 50
"""Default size limit of the cache in GB."""

KINDS = ("pixels", "features")
"""Parts of the cache that the limit applies to."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A folder of pixels or features: its data set, number of images, and time of last use."""

    folder: Path
    owner: str
    images: int
    bytes: int
    used: float


def list_folders(cache: Path) -> list[Entry]:
    """The folders of pixels and features in the cache."""
    entries = []
    for folder in (folder for kind in KINDS for folder in cache.glob(f"{kind}/*/[!.]*")):
        with suppress(OSError):  # another process may be deleting it
            done = folder / "done"
            images = done.stat().st_size if done.is_file() else 0
            entries.append(
                Entry(folder, owner_of(folder) or "unknown", images, _bytes_below(folder), folder.stat().st_mtime)
            )
    return sorted(entries, key=lambda entry: -entry.used)


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            total += path.lstat().st_size if not path.is_dir() else 0
    return total


def bytes_of(cache: Path) -> dict[str, int]:
    """The size of each part of the cache: pixels, features, hashes, weights."""
    return {folder.name: _bytes_below(folder) for folder in sorted(cache.glob("[!.]*")) if folder.is_dir()}


def cache_limit() -> int:
    """Size limit of pixels and features in bytes: `$CSDA_CACHE_LIMIT` in GB, or `CACHE_LIMIT`."""
    text = os.environ.get("CSDA_CACHE_LIMIT") or str(CACHE_LIMIT)
    try:
        limit = float(text)
        if not 0 <= limit < 1e9:
            raise ValueError
    except ValueError:
        raise ConfigError(f"CSDA_CACHE_LIMIT = {text!r} is not a number of GB; give one such as 50") from None
    return int(limit * 2**30)


def make_room(cache: Path, limit: int, kept: Path) -> None:
    """Delete the folders that were used longest ago, except for `kept`, until the limit is kept."""
    others = [entry for entry in list_folders(cache) if entry.folder != kept]
    total = sum(entry.bytes for entry in others)
    for entry in sorted(others, key=lambda entry: entry.used):
        if total <= limit:
            return
        if remove_folder(entry.folder):
            total -= entry.bytes


def remove_folder(folder: Path) -> bool:
    """Delete a folder that no process is writing; processes that read it keep their mapped files."""
    try:
        with FileLock(folder / "lock", timeout=0):
            shutil.rmtree(folder, ignore_errors=True)
    except (OSError, Timeout):
        return False
    return not folder.exists()


def owner_of(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / "about.json").read_text())["owner"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def cache_table(cache: Path) -> Table:
    """A table of the cache for the terminal, with a line for each folder of pixels or features and for other parts."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, title=Text(f"{cache}", "bold"), title_justify="left")
    table.add_column("What")
    for name in ("Images", "Size", "Last used"):
        table.add_column(name, justify="right")
    for entry in list_folders(cache):
        used = datetime.fromtimestamp(entry.used).isoformat(" ", "minutes")
        table.add_row(
            Text(f"{entry.owner}: {entry.folder.parent.parent.name} {entry.folder.parent.name}"),
            f"{entry.images:,}",
            format_size(entry.bytes),
            used,
        )
    sizes = bytes_of(cache)
    for name, count in sizes.items():
        if name not in KINDS:
            table.add_row(
                Text({"content": "hashes of files", "folds": "out-of-fold predictions"}.get(name, name)),
                "",
                format_size(count),
                "",
            )
    limit = f"of {format_size(cache_limit())} for pixels and features (CSDA_CACHE_LIMIT)"
    table.add_row("all", "", format_size(sum(sizes.values())), limit)
    return table


def clear_cache(cache: Path) -> tuple[int, int]:
    """Delete everything except weights. Return the freed bytes, and those that could not be freed."""
    before = _clearable_bytes(cache)
    for entry in list_folders(cache):
        remove_folder(entry.folder)
    for name in ("content", "folds"):
        shutil.rmtree(cache / name, ignore_errors=True)
    left = _clearable_bytes(cache)
    return before - left, left


def _clearable_bytes(cache: Path) -> int:
    return sum(count for name, count in bytes_of(cache).items() if name != "weights")


def format_size(count: int) -> str:
    """Write a number of bytes in a readable unit."""
    return f"{count / 2**30:.1f} GB" if count >= 2**30 else f"{count / 2**20:.1f} MB"
