"""labels.csv: people's decisions on images, in a file that is only appended to.

Each decision is a line, which is synced to disk before it is confirmed. Lines are never changed: a later decision on an
image replaces an earlier one, and undo appends a line with the number of the line that it cancels. An incomplete line
after a crash was never confirmed; it is ignored, and removed when the file is next opened for writing. Every line ends
with a checksum of itself and the checksum before it, so changed, moved or missing lines are detected.
"""

from __future__ import annotations

import csv
import io
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from csda.data.csv_files import UNFIT_CHARACTERS
from csda.errors import DataError, RunError, explained
from csda.files import lock, open_regular, sync_folder

FILE = "labels.csv"

Action = Literal["label", "skip", "flag", "undo"]
ACTIONS: tuple[Action, ...] = get_args(Action)


class Decision(NamedTuple):
    """A line of labels.csv.

    `label` is text as in split.csv, empty unless the action is `label`. `undoes` is the number of the line that an
    `undo` cancels. `said` and `confidence` are the model's prediction at that time. `audit` is yes if the image was
    drawn at random, not selected. Lines of one keystroke have the same `batch`, the number of the first.
    """

    number: int
    batch: int
    image: str
    action: Action
    label: str
    undoes: str
    who: str
    when: str
    said: str
    confidence: str
    audit: str


@dataclass(frozen=True, slots=True)
class Entry:
    """A new decision; the log adds number, batch and time."""

    image: str
    action: Action
    label: str = ""
    undoes: int | None = None
    said: str = ""
    confidence: float | None = None
    audit: bool = False


HEADER = ",".join((*Decision._fields, "checksum")) + "\n"


class Ledger:
    """Decisions in order, and those that are valid now."""

    def __init__(self, decisions: Iterable[Decision] = ()) -> None:
        self.decisions: list[Decision] = []
        self._of_image: dict[str, list[int]] = {}
        self._undone: set[int] = set()
        for decision in decisions:
            self.add(decision)

    def add(self, decision: Decision) -> None:
        self.decisions.append(decision)
        if decision.action == "undo":
            self._undone.add(int(decision.undoes))
        else:
            self._of_image.setdefault(decision.image, []).append(decision.number)

    def current(self, image: str) -> Decision | None:
        """The latest decision on an image that was not undone."""
        for number in reversed(self._of_image.get(image, ())):
            if number not in self._undone:
                return self.decisions[number - 1]
        return None

    def count(self, image: str) -> int:
        """Number of decisions ever made on an image."""
        return len(self._of_image.get(image, ()))

    def all_current(self) -> dict[str, Decision]:
        """The current decision of each image that has one."""
        found = ((image, self.current(image)) for image in self._of_image)
        return {image: decision for image, decision in found if decision is not None}

    def last_batch(self) -> list[Decision]:
        """The decisions of the latest keystroke that was not undone: those that undo cancels."""
        for decision in reversed(self.decisions):
            if decision.action != "undo" and decision.number not in self._undone:
                together = self.decisions[decision.batch - 1 : decision.number]
                return [each for each in together if each.action != "undo" and each.number not in self._undone]
        return []

    def tally(self) -> Counter[str]:
        """Number of images with each label now."""
        return Counter(each.label for each in self.all_current().values() if each.action == "label")


class DecisionLog(Ledger):
    """labels.csv, open for writing in one process."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        with explained(self.path):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0), 0o644)
        try:
            if not lock(self._file):
                raise RunError(f"{self.path}: another `csda review` writes it; use that one, or stop it")
            decisions, whole, self._checksum = _parse(self.path)
            with explained(self.path):
                if os.fstat(self._file).st_size > whole:
                    os.ftruncate(self._file, whole)
                if whole == 0:
                    self._write(HEADER.encode())
                os.fsync(self._file)
                sync_folder(folder)
        except BaseException:
            os.close(self._file)
            raise
        super().__init__(decisions)

    def append(self, entries: Sequence[Entry], who: str = "") -> list[Decision]:
        """Append decisions that were made together. When this returns, all are on disk; on an error, none is."""
        first = len(self.decisions) + 1
        when = datetime.now(UTC).isoformat(timespec="milliseconds")
        decisions = [
            Decision(
                number,
                first,
                entry.image,
                entry.action,
                entry.label,
                "" if entry.undoes is None else str(entry.undoes),
                who,
                when,
                entry.said,
                "" if entry.confidence is None else f"{entry.confidence:.4f}",
                "yes" if entry.audit else "",
            )
            for number, entry in enumerate(entries, start=first)
        ]
        buffer = io.StringIO(newline="")
        csv.writer(buffer, lineterminator="\n").writerows(decisions)
        lines = buffer.getvalue().split("\n")[:-1]
        if len(lines) != len(decisions):
            raise DataError("a name or a label holds a line break, which labels.csv cannot keep")
        content, checksum = "", self._checksum
        for line in lines:
            checksum = _checksum(line, checksum)
            content += f"{line},{checksum}\n"
        before = os.fstat(self._file).st_size
        with explained(self.path):
            try:
                self._write(content.encode())
                os.fsync(self._file)
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._file, before)
                raise
        self._checksum = checksum
        for decision in decisions:
            self.add(decision)
        return decisions

    def close(self) -> None:
        os.close(self._file)

    def _write(self, content: bytes) -> None:
        while content:
            content = content[os.write(self._file, content) :]


def read_decisions(folder: Path) -> Ledger:
    """Read labels.csv in a folder; an incomplete last line is ignored."""
    path = folder / FILE
    if not path.is_file():
        raise RunError(f"{path}: there is none; `csda review {folder}` makes it")
    return Ledger(_parse(path)[0])


def labels_of(decisions: Mapping[str, Decision]) -> dict[str, str]:
    """The label text of each image with a label."""
    return {image: each.label for image, each in decisions.items() if each.action == "label"}


def _checksum(line: str, before: str) -> str:
    """The checksum of a line and the checksum of the line before."""
    return blake2b(f"{before},{line}".encode(), digest_size=8).hexdigest()


def _parse(path: Path) -> tuple[list[Decision], int, str]:
    """The decisions of a file, the bytes up to its last complete line, and the checksum of that line."""
    try:
        with open_regular(path) as file:
            raw = file.readall()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    whole = raw.rfind(b"\n") + 1
    try:
        text = raw[:whole].decode()
    except UnicodeDecodeError as error:
        row = raw.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}, row {row}: not UTF-8; restore the file") from None
    if text and not text.startswith(HEADER):
        raise DataError(f"{path}, row 1: not the columns of a file of decisions; rename the file, or restore it")
    decisions: list[Decision] = []
    last = ""
    for row, whole_line in enumerate(text.split("\n")[1:-1], start=2):
        line, _, checksum = whole_line.rpartition(",")
        decisions.append(_parse_line(f"{path}, row {row}", line, len(decisions) + 1))
        last = _checksum(line, last)
        if checksum != last:
            raise DataError(
                f"{path}, row {row}: does not match its checksum; restore the file, which must only be appended to"
            )
    return decisions, whole, last


def _parse_line(where: str, line: str, number: int) -> Decision:
    try:
        (cells,) = csv.reader([line], strict=True)
    except (csv.Error, ValueError):
        cells = []
    if len(cells) != len(Decision._fields) or cells[0] != str(number):
        raise DataError(f"{where}: not decision {number}; the file must only be appended to: restore it")
    decision = Decision(number, *_natural(cells[1], where), *cells[2:])  # type: ignore[arg-type]
    earlier = _natural(decision.undoes, where) if decision.undoes else ()
    if (
        decision.action not in ACTIONS
        or not 1 <= decision.batch <= number
        or (decision.action == "undo") != bool(earlier)
        or any(each >= number for each in earlier)
        or UNFIT_CHARACTERS.search(line)
    ):
        raise DataError(f"{where}: not a decision that `csda review` writes; restore the file")
    return decision


def _natural(text: str, where: str) -> tuple[int]:
    if not (text.isascii() and text.isdigit() and len(text) < 12):
        raise DataError(f"{where}: {text!r} is not the number of a decision; restore the file")
    return (int(text),)
