"""Predict any number of files: list, decode and predict them as a stream, and write rows as they are ready.

While a table is written it is called `NAME.partial`, and `NAME.partial.json` names the model and options. At the end it
is renamed. An interrupted call leaves complete rows, and `resume` continues after them.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from glob import has_magic
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np

from csda.cluster import joined_ray
from csda.data.csv_files import UNFIT_CHARACTERS, read_table, read_text
from csda.data.decode import IMAGE_SUFFIXES, unremarked
from csda.data.splits import label_text
from csda.data.tree import walk_images
from csda.errors import DataError, RunError, explained
from csda.files import lock, require_replaceable, write_whole
from csda.predict import Outcome, Predictor, in_groups, load

Launcher = Literal["threads", "ray"]
Progress = Callable[[int, int], None]

LISTS = frozenset({".txt", ".csv"})
BATCH = 256
AT_ONCE = 1 << 18
"""Number of files per Ray task."""


class Counts(NamedTuple):
    """Number of files of a finished table, and of those that could not be used."""

    files: int
    unusable: int


class ImageFiles:
    """Iterate over the image files that arguments name, without a list of all in memory.

    An argument is a file, a folder, a pattern such as `scans/*.png` or `scans/**/*.dcm`, or a list: a text file with a
    path in each line, or a CSV with a column `image`; paths in a list are relative to its folder.
    """

    def __init__(self, given: Sequence[str | Path]) -> None:
        if "" in given:
            raise DataError("an empty name instead of images; give image files, folders of images, lists or patterns")
        self._given = [Path(each) for each in given]

    def __iter__(self) -> Iterator[Path]:
        for given in self._given:
            yield from _find(given)

    def count(self) -> int:
        for given in self._given:
            # A single image that is missing gets a row that says so.
            if given.suffix.lower() not in IMAGE_SUFFIXES and not has_magic(str(given)) and not given.exists():
                raise DataError(f"{given}: does not exist; correct the name of the folder, list or image")
        total = sum(1 for _ in self)
        if not total:
            named = ", ".join(map(str, self._given))
            raise DataError(f"{named}: no images there; give image files, folders of images, lists or patterns")
        return total


def _find(given: Path) -> Iterator[Path]:
    if given.is_dir():
        for name in walk_images(given):
            yield given / name
    elif given.suffix.lower() in LISTS and given.is_file():
        yield from _read_list(given)
    elif has_magic(str(given)) and not given.exists():
        found = Path(given.anchor).glob(str(given.relative_to(given.anchor)))
        yield from sorted(path for path in found if not path.is_dir())
    else:
        yield given


def _read_list(path: Path) -> Iterator[Path]:
    if path.suffix.lower() == ".csv":
        table = read_table(path)
        place = table.require("image", "rename the column of paths to it, or give a text file with one path per line")
        names = [cells[place] for _, cells in table.rows]
    else:
        names = read_text(path).splitlines()
    for name in names:
        if name.strip():
            yield path.parent / name.strip()


def predict_table(
    run: Path,
    given: Sequence[str | Path],
    out: Path | None,
    *,
    tta: bool = False,
    resume: bool = False,
    jobs: int | None = None,
    launcher: Launcher = "threads",
    coverage: float | None = None,
    echo: Callable[[str], object] = lambda text: None,
    progress: Progress = lambda done, total: None,
) -> Counts:
    """Write a row for each image file: label, confidence, unsure, set, probabilities, or an error.

    Args:
        run: run folder with the model.
        given: files, folders, patterns and lists, as for `ImageFiles`.
        out: CSV to write; if None, rows go to `echo`.
        tta: average predictions over mirror images.
        resume: continue an interrupted table.
        jobs: number of decoding threads or of Ray workers.
        launcher: threads on this machine, or Ray workers on several, with run and images under the same paths.
        coverage: of the sets; the model must have limits for it. If None, 0.9 if the model has it.
        echo: prints text if there is no `out`.
        progress: shows how many files are done.
    """
    predictor = load(run)
    predictor.require_images()
    coverage = predictor.choose_coverage(coverage)
    files = ImageFiles(given)
    total = files.count()
    format_rows = _Rows(predictor, coverage)
    # The rows depend on these.
    about = {"model": predictor.digest, "tta": tta, "coverage": coverage, "header": format_rows.header}
    table = _Echo(echo, format_rows.header) if out is None else _open_table(out, about, resume)
    if table is None:
        assert out is not None
        return _count_complete(out, format_rows.header, files)
    with table, unremarked():
        done, unusable = table.skip(files)
        progress(done, total)
        left = islice(files, done, None)
        outcomes = (
            _stream_ray(run, left, jobs, tta)
            if launcher == "ray"
            else predictor.stream(left, BATCH, jobs=jobs, tta=tta)
        )
        for group in in_groups(outcomes, BATCH):
            table.write(format_rows(group))
            done, unusable = done + len(group), unusable + sum(each.probs is None for each in group)
            progress(done, total)
        table.finish()
    return Counts(done, unusable)


class _Rows:
    """Makes the rows of a table, one line each for any file name."""

    def __init__(self, predictor: Predictor, coverage: float | None) -> None:
        self.predictor, self.coverage = predictor, coverage
        self.header = _line(["image", "predicted", "confidence", "unsure", "set", *predictor.classes, "error"])

    def __call__(self, outcomes: Sequence[Outcome]) -> str:
        classes = self.predictor.classes
        used = [each.probs for each in outcomes if each.probs is not None]
        judged = self.predictor.judge(np.stack(used), self.coverage) if used else None
        lines, row = [], 0
        for each in outcomes:
            if each.probs is None or judged is None:
                cells = [*("" for _ in range(4 + len(classes))), str(each.problem)]
            else:
                unsure = "" if judged.unsure is None else "yes" if judged.unsure[row] else "no"
                possible = "" if judged.sets is None else label_text(judged.sets[row], classes)
                label = label_text(judged.labels[row], classes)
                probs = (f"{value:.4f}" for value in each.probs)
                cells = [label, f"{judged.confidence[row]:.4f}", unsure, possible, *probs, ""]
                row += 1
            lines.append(_line([str(each.path), *cells]))
        return "".join(lines)


def _line(cells: Iterable[str]) -> str:
    buffer = io.StringIO(newline="")
    csv.writer(buffer, lineterminator="\n").writerow([_printable(cell) for cell in cells])
    return buffer.getvalue()


def _printable(text: str) -> str:
    """Replace line ends and bytes that are not UTF-8 in a file name."""
    return UNFIT_CHARACTERS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class _Echo:
    """A table that is printed instead of written."""

    def __init__(self, echo: Callable[[str], object], header: str) -> None:
        self.write = echo
        self.write(header)

    def __enter__(self) -> _Echo:
        return self

    def __exit__(self, *ending: object) -> None:
        return None

    def skip(self, files: Iterable[Path]) -> tuple[int, int]:
        return 0, 0

    def finish(self) -> None:
        return None


class _PartialTable:
    """A table with a temporary name until it is complete."""

    def __init__(self, out: Path, file: BinaryIO, header: str) -> None:
        self.out, self._file, self._header = out, file, header

    def __enter__(self) -> _PartialTable:
        return self

    def __exit__(self, *ending: object) -> None:
        self._file.close()

    def write(self, text: str) -> None:
        with explained(self.out):
            self._file.write(text.encode())
            self._file.flush()

    def skip(self, files: Iterable[Path]) -> tuple[int, int]:
        """Count the existing rows, which must be of the first of these files, and those with an error."""
        self._file.seek(0)
        if self._file.readline() != self._header.encode():
            self._file.truncate(0)
            self._file.seek(0)
            self.write(self._header)
            return 0, 0
        done, unusable, size = _check_rows(self._file, partial_of(self.out), iter(files))
        end = len(self._header.encode()) + size
        self._file.truncate(end)
        self._file.seek(end)
        return done, unusable

    def finish(self) -> None:
        with explained(self.out):
            os.fsync(self._file.fileno())
            partial_of(self.out).replace(self.out)
            _about_of(self.out).unlink()


def _check_rows(file: BinaryIO, name: Path, files: Iterator[Path]) -> tuple[int, int, int]:
    """Number of complete rows, of those with an error, and their size in bytes; they must be of the first files."""
    done, unusable, size = 0, 0, 0
    for line in file:
        if not line.endswith(b"\n"):  # the call was interrupted within this row
            break
        cells = next(csv.reader([line.decode()]))
        path = next(files, None)
        if path is None or cells[0] != _printable(str(path)):
            raise RunError(f"{name}: begun with other images, such as {cells[0]}; name the same, or delete it")
        done, unusable, size = done + 1, unusable + bool(cells[-1]), size + len(line)
    return done, unusable, size


def _count_complete(out: Path, header: str, files: Iterable[Path]) -> Counts:
    """Count the rows of a complete table, which must be of the classes in this header and of all these files."""
    names = iter(files)
    with explained(out), out.open("rb") as file:
        if file.readline() != header.encode():
            raise RunError(f"{out}: not a table of this model; give another --out, or delete it")
        done, unusable, _ = _check_rows(file, out, names)
    if next(names, None) is not None:
        raise RunError(f"{out}: complete, but without some of these images; name the same, or delete it")
    return Counts(done, unusable)


def partial_of(out: Path) -> Path:
    """The name of a table until it is complete."""
    return out.with_name(f"{out.name}.partial")


def _about_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.partial.json")


def _open_table(out: Path, about: dict[str, Any], resume: bool) -> _PartialTable | None:
    """Open the table for writing; None if it is already complete."""
    partial, described = partial_of(out), _about_of(out)
    with explained(out):
        require_replaceable(out)
        begun = partial.exists() and described.exists()
        if begun and not resume:
            raise RunError(f"{partial}: left by an interrupted call; give --resume to continue it, or delete it")
        if resume and not begun and out.exists():
            return None
        if begun:
            try:
                known = json.loads(described.read_text(encoding="utf-8"))
            except ValueError:
                known = None
            if known != about:
                raise RunError(f"{partial}: begun with another model or other options; give those, or delete it")
        file = partial.open("a+b")
        if not lock(file.fileno()) or described.exists() != begun:
            file.close()
            raise RunError(f"{partial}: another process is writing this table; wait for it to end")
        if not begun:
            file.truncate(0)
            write_whole(described, json.dumps(about) + "\n")
        return _PartialTable(out, file, about["header"])


def _stream_ray(run: Path, files: Iterable[Path], jobs: int | None, tta: bool) -> Iterator[Outcome]:
    """`Predictor.stream` with Ray workers. If a worker dies, its files are given to another."""
    with joined_ray("ray.data") as ray:
        context = ray.data.DataContext.get_current()
        context.execution_options.preserve_order = True
        context.enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        resources = ray.cluster_resources()
        gpus = int(resources.get("GPU", 0))
        # One worker for each GPU, or one for each core.
        workers = jobs or gpus or int(resources.get("CPU", 1))
        try:
            for group in in_groups(files, AT_ONCE):
                names = ray.data.from_items(
                    [{"path": os.fsencode(path)} for path in group], override_num_blocks=-(-len(group) // BATCH)
                )
                predicted = names.map_batches(
                    RayWorker,
                    fn_constructor_args=(str(run), str(Path.cwd()), tta),
                    batch_size=BATCH,
                    concurrency=min(workers, -(-len(group) // BATCH)),
                    num_cpus=0 if gpus else 1,
                    num_gpus=1 if gpus else 0,
                )
                for batch in predicted.iter_batches(batch_size=None):
                    for path, probs, problem in zip(batch["path"], batch["probs"], batch["problem"], strict=True):
                        if problem:
                            yield Outcome(Path(os.fsdecode(path)), None, DataError(os.fsdecode(problem)))
                        else:
                            yield Outcome(Path(os.fsdecode(path)), np.asarray(probs, dtype=np.float32), None)
        except ray.exceptions.RayError as error:
            cause = str(getattr(error, "cause", None) or error).strip().splitlines()[-1]
            raise RunError(
                f"a worker of Ray failed ({cause}); finished rows are kept, continue with --resume"
            ) from None


class RayWorker:
    """A Ray worker with the model of a run, which predicts files."""

    def __init__(self, run: str, folder: str, tta: bool) -> None:
        with suppress(OSError):  # absolute paths, because workers have another current folder
            os.chdir(folder)
        self.predictor, self.tta = load(run), tta

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        paths = [Path(os.fsdecode(path)) for path in batch["path"]]
        outcomes = list(self.predictor.stream(paths, BATCH, tta=self.tta))
        absent = np.full(len(self.predictor.classes), np.nan, dtype=np.float32)
        return {
            "path": batch["path"],
            "probs": np.stack([absent if each.probs is None else each.probs for each in outcomes]),
            "problem": np.array([b"" if each.problem is None else os.fsencode(str(each.problem)) for each in outcomes]),
        }
