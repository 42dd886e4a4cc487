"""Read tables and lists strictly: anything unusable is a `DataError` with file and row."""

from __future__ import annotations

import csv
import io
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from csda.data.records import Part
from csda.errors import DataError
from csda.files import open_regular

Entry = TypeVar("Entry")

NONE_PRESENT = "(none)"
"""A multi-label cell without any label. An empty cell means that the labels are unknown."""

UNFIT_CHARACTERS = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")
"""Control characters, and stand-ins for bytes that are not UTF-8, which a CSV cannot hold."""

MAX_TEXT = 1 << 30
"""Largest size of a table or list in bytes."""

JOIN = "|"
"""Separates the labels of one image in a cell."""


@dataclass(frozen=True, slots=True)
class Table:
    """A CSV file with a header; each row goes with its line number, the header being row 1."""

    path: Path
    columns: tuple[str, ...]
    rows: list[tuple[int, list[str]]]

    def position(self, name: str) -> int | None:
        """The index of a column, by exact name or else ignoring case and spaces."""
        if name in self.columns:
            return self.columns.index(name)
        alike = [i for i, column in enumerate(self.columns) if fold_name(column) == fold_name(name)]
        return alike[0] if len(alike) == 1 else None

    def require(self, name: str, way_out: str = "add it") -> int:
        found = self.position(name)
        if found is None:
            raise DataError(f"{self.path}: no column `{name}` among {', '.join(self.columns)}; {way_out}")
        return found


def read_text(path: Path) -> str:
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            raw = b"" if size > MAX_TEXT else file.readall()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    if size > MAX_TEXT:
        raise DataError(f"{path} has {size:,} bytes, more than the limit of {MAX_TEXT:,}; name another file")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        row = raw.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}, row {row}: not UTF-8; save the file as UTF-8 text") from None
    if "\0" in text:
        row = text.count("\n", 0, text.index("\0")) + 1
        raise DataError(f"{path}, row {row}: holds a NUL character; save the file as UTF-8 text")
    return text


def read_table(path: Path) -> Table:
    """Read a CSV separated by commas, semicolons or tabs, whichever is most frequent in its header."""
    text = read_text(path)
    header = text.lstrip("\r\n").partition("\n")[0]
    delimiter = max(",;\t", key=header.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    columns: tuple[str, ...] = ()
    rows: list[tuple[int, list[str]]] = []
    try:
        for cells in reader:
            while len(cells) > len(columns) and cells and not cells[-1].strip():
                cells.pop()
            if not columns:
                columns = tuple(cell.strip() for cell in cells)
            elif len(cells) == len(columns):
                if any(cells):
                    rows.append((reader.line_num, cells))
            elif cells:
                raise DataError(
                    f"{path}, row {reader.line_num}: {len(cells)} cells where the header has {len(columns)}; "
                    f"put cells that contain a separator in quotes"
                )
    except csv.Error as error:
        raise DataError(f"{path}, row {reader.line_num}: {error}") from None
    if not columns:
        raise DataError(f"{path} is empty; its first row must name the columns")
    column, times = Counter(columns).most_common(1)[0]
    if times > 1:
        raise DataError(f"{path}, row 1: two columns are called `{column}`; rename one")
    return Table(path, columns, rows)


def read_flags(path: Path, width: int) -> list[tuple[int, str, list[int]]]:
    """Read a list of lines `name 0 1 0 …`: (row, name, positions of the ones)."""
    entries = []
    for row, line in enumerate(read_text(path).splitlines(), start=1):
        name, *flags = line.split() or [""]
        if not name:
            continue
        if len(flags) != width or not set(flags) <= {"0", "1"}:
            raise DataError(f"{path}, row {row}: expected an image name and {width} flags of 0 or 1")
        entries.append((row, name, [i for i, flag in enumerate(flags) if flag == "1"]))
    if not entries:
        raise DataError(f"{path} is empty; a list has one image per line")
    return entries


class Lists(NamedTuple):
    """The published lists of a data set by part and number of labels; `chosen` is the requested number, if any."""

    held_out: dict[Part, Path]
    labeled: dict[str, Path]
    unlabeled: dict[str, Path]
    chosen: str | None


def sort_lists(paths: Sequence[Path], pattern: str, names: str, labels: str | None) -> Lists:
    """Find the part of each list from its name, by a pattern with the groups `held`, `unl` and `number`."""
    held_out: dict[Part, Path] = {}
    labeled: dict[str, Path] = {}
    unlabeled: dict[str, Path] = {}
    for path in paths:
        match = re.fullmatch(pattern, path.stem.lower())
        if match is None:
            raise DataError(f"{path}: its name does not say which part it is; rename it to {names}")
        if match["held"]:
            held_out["val" if match["held"] == "val" else "test"] = path
        else:
            (unlabeled if match["unl"] else labeled)[match["number"]] = path
    if len(held_out) < 2 or not labeled:
        raise DataError(f"{paths[0].parent}: the lists need at least one train file, a val and a test file")
    chosen = labels or (next(iter(labeled)) if len(labeled) == 1 else None)
    return Lists(held_out, labeled, unlabeled, chosen if chosen in labeled else None)


def enter(entries: dict[str, tuple[int, Entry]], name: str, entry: Entry, table: Path, row: int) -> None:
    """Add the value of an image from a row of a table. Other rows must have the same value."""
    first_row, first = entries.setdefault(name, (row, entry))
    if entry != first:
        raise DataError(f"{table}, row {row}: differs from row {first_row} for {name}; keep one of the two")


def fold_name(name: str) -> str:
    """The name in lower case without spaces, to find names that are probably the same."""
    return "".join(unicodedata.normalize("NFC", name).split()).casefold()


def clean_names(found: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Map every class name as written to its clean form; `found` are names and where each was found."""
    clean: dict[str, str] = {}
    first: dict[str, tuple[str, str]] = {}
    for name, where in found:
        if name in clean:
            continue
        folded = fold_name(name)
        if not folded:
            raise DataError(f"{where}: a class without a name")
        if JOIN in name or folded == NONE_PRESENT or UNFIT_CHARACTERS.search(name):
            raise DataError(f"{where}: a class cannot be called {name!r}; rename it")
        other, other_where = first.setdefault(folded, (name, where))
        if unicodedata.normalize("NFC", other) != unicodedata.normalize("NFC", name):
            raise DataError(
                f"{where}: class {name!r} differs from {other!r} ({other_where}) only in case or blanks; "
                f"give both the same name"
            )
        clean[name] = unicodedata.normalize("NFC", name.strip())
    return clean
