"""Check a data set for what would stop a training: the table and the page of `csda data check`."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from csda.config import RunConfig
from csda.data import SOURCES, load_dataset
from csda.data.cache import Progress, digest
from csda.data.content import UNREADABLE, hash_file
from csda.data.csv_files import NONE_PRESENT
from csda.data.decode import Header, UnreadableError, is_grey, read_header, read_image, unremarked
from csda.data.duplicates import find_duplicates, name_pair, remark_duplicates
from csda.data.prepared import load_configured, require_unlabeled, split_configured
from csda.data.records import Dataset, Record
from csda.data.splits import leave_out, make_split
from csda.data.store import available_cores, refuse_unreadable
from csda.errors import DataError

if TYPE_CHECKING:
    from rich.console import Console

EXAMPLES, EXAMPLE_SIZE = 8, 112
"""Number of images of each class on the page, and their size."""

LISTED = 20
"""Largest number of duplicates that are listed."""

FEWEST = 3
"""Smallest number of images of a class: one each for training, validation and test."""

Finding = tuple[Header, bytes] | str
"""The header of an image and a hash of its content, or the reason why it cannot be read."""


@dataclass(frozen=True, slots=True)
class Count:
    """A count, and the published count of a known data set."""

    name: str
    images: int
    published: int | None

    @property
    def differs(self) -> bool:
        return self.published is not None and self.published != self.images


@dataclass(frozen=True, slots=True)
class Report:
    """The findings. `problems` would stop a training; `remarks` should be read before one."""

    dataset: Dataset
    counts: tuple[Count, ...]
    """Counts of each class, then other published counts."""
    facts: tuple[tuple[str, str], ...]
    duplicates: tuple[tuple[Record, ...], ...]
    unreadable: tuple[tuple[Record, str], ...]
    problems: tuple[str, ...]
    remarks: tuple[str, ...]

    @property
    def classes(self) -> tuple[Count, ...]:
        return self.counts[: len(self.dataset.classes)]

    @property
    def known(self) -> bool:
        """Whether counts of this data set were published."""
        return any(count.published is not None for count in self.counts)


def run_check(
    path: str | Path,
    source: str | None = None,
    html: Path | None = None,
    config: RunConfig | None = None,
    *,
    needs_unlabeled: bool = False,
) -> int:
    """Check a data set, print the findings and write the page, if requested; return 1 if a training would stop."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    console = Console()
    try:
        dataset = load_dataset(path, source) if config is None else load_configured(config)
    except DataError as error:
        console.print(f"Would stop a training: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading images")
        report = check(
            dataset,
            config,
            needs_unlabeled=needs_unlabeled,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    print_report(report, console)
    if html is not None:
        write_page(report, html)
        console.print(f"Page: {html}", markup=False, highlight=False, soft_wrap=True)
    return 1 if report.problems else 0


def check(
    dataset: Dataset,
    config: RunConfig | None = None,
    *,
    needs_unlabeled: bool = False,
    max_unreadable: float = 0.01,
    progress: Progress | None = None,
) -> Report:
    """Read every image and divide the data set like a training with these settings; nothing is written.

    `needs_unlabeled` means that the method needs unlabeled images.
    """
    findings = list(_inspect(dataset, progress or (lambda done, total: None)))
    unreadable = [
        (record, found) for record, found in zip(dataset.records, findings, strict=True) if isinstance(found, str)
    ]
    headers = [found[0] for found in findings if not isinstance(found, str)]
    contents = [UNREADABLE if isinstance(found, str) else found[1] for found in findings]
    duplicates = find_duplicates(dataset.records, contents)
    counts = _count(dataset)

    problems, remarks, split = [], list(dataset.remarks), None
    try:
        refuse_unreadable(dataset, unreadable, max_unreadable if config is None else config.max_unreadable)
    except DataError as error:
        problems.append(str(error).partition(":\n")[0])  # the files are listed anyway
    try:
        whole = make_split(dataset) if config is None else split_configured(dataset, config)
        split = leave_out(whole, unreadable, dataset)
        if config is not None and needs_unlabeled:
            require_unlabeled(dataset, split, config.method)
    except DataError as error:
        problems.append(str(error))
    if split is not None:
        remarks += split.remarks
        if not split.unlabeled and not needs_unlabeled:
            remarks.append("every image has a label: keep some of the labels only, or train the method baseline")
    remarks += remark_duplicates(dataset, contents, split)
    remarks += _remark_published(counts)
    facts = _list_facts(dataset, headers, counts, duplicates, unreadable)
    return Report(dataset, counts, facts, duplicates, tuple(unreadable), tuple(problems), tuple(remarks))


def _inspect(dataset: Dataset, progress: Progress) -> Iterator[Finding]:
    """Findings in the order of the records."""
    with unremarked(), ThreadPoolExecutor(available_cores()) as pool:
        for start in range(0, len(dataset.records), 256):
            part = range(start, min(start + 256, len(dataset.records)))
            if dataset.draw is not None:
                for image in dataset.draw(part, EXAMPLE_SIZE):
                    yield Header("drawn", EXAMPLE_SIZE, EXAMPLE_SIZE, image.shape[2] == 1), digest(image.tobytes())
            else:
                yield from pool.map(_inspect_file, [dataset.records[row].path for row in part])
            progress(part.stop, len(dataset.records))


def _inspect_file(path: Path | None) -> Finding:
    if path is None:
        return "has no file"
    try:
        header = read_header(path)
        grey = is_grey(read_image(path, EXAMPLE_SIZE, 1 if header.grey else 3))
        return header._replace(grey=grey), hash_file(path)
    except UnreadableError as error:
        return error.reason


def _count(dataset: Dataset) -> tuple[Count, ...]:
    """Labeled images of each class, then other published counts of a known data set."""
    known = import_module(f"csda.data.{dataset.name}") if dataset.name in SOURCES else None
    published: dict[str, int] = getattr(known, "PUBLISHED", {})
    found: Counter[int | None] = Counter()
    for label in (record.label for record in dataset.records if record.label is not None):
        found.update([label] if isinstance(label, int) else label or [None])
    counts = [(name, found[index]) for index, name in enumerate(dataset.classes)]
    if dataset.multi_label:
        counts.append((NONE_PRESENT, found[None]))
    if published:
        groups = {record.group for record in dataset.records} - {None}
        counts += [("images", len(dataset.records)), ("groups", len(groups))]
    return tuple(Count(name, number, published.get(name)) for name, number in counts)


def _remark_published(counts: Sequence[Count]) -> list[str]:
    known = sum(count.published is not None for count in counts)
    if differing := sum(count.differs for count in counts):
        return [
            f"{differing} of {known} counts differ from the published ones: the data set is incomplete, or "
            f"another version"
        ]
    return ["all counts are as published"] if known else []


def _list_facts(
    dataset: Dataset,
    headers: Sequence[Header],
    counts: Sequence[Count],
    duplicates: Sequence[Sequence[Record]],
    unreadable: Sequence[tuple[Record, str]],
) -> tuple[tuple[str, str], ...]:
    total, labeled = len(dataset.records), sum(record.label is not None for record in dataset.records)
    grouped = Counter(record.group for record in dataset.records if record.group is not None)
    own_parts = Counter(record.part for record in dataset.records if record.part is not None)
    small = [f"{count.name} ({count.images})" for count in counts[: len(dataset.classes)] if count.images < FEWEST]
    grey = sum(header.grey for header in headers)
    formats = Counter(header.format for header in headers)
    facts = {
        "Read as": dataset.name + (", several labels per image" if dataset.multi_label else ""),
        "Images": f"{total:,}",
        "Labeled": f"{labeled:,}, {total - labeled:,} unlabeled",
        "Classes": f"{len(dataset.classes)}",
        "Own parts": _listing(own_parts) or "none: they are drawn",
        "Groups": f"{len(grouped):,}, of up to {max(grouped.values())} images" if grouped else "none",
        "Sizes": _describe_sizes(headers),
        "Formats": _listing(formats),
        "Colour": "all grey" if grey == len(headers) else f"{len(headers) - grey:,} in colour, {grey:,} grey",
        "Duplicates": f"{sum(len(same) - 1 for same in duplicates):,}",
        "Unreadable": f"{len(unreadable):,}",
        "Too small to split": ", ".join(small) or "no class",
    }
    return tuple(facts.items())


def _listing(counts: Counter[Any]) -> str:
    return ", ".join(f"{name} {number:,}" for name, number in counts.most_common())


def _describe_sizes(headers: Sequence[Header]) -> str:
    sizes = Counter((header.width, header.height) for header in headers)
    if len(sizes) < 2:
        return "".join(f"all {width}×{height}" for width, height in sizes)
    ((width, height), most), *_ = sizes.most_common(1)
    wide, high = (
        f"{min(side)}" if min(side) == max(side) else f"{min(side)} to {max(side)}" for side in zip(*sizes, strict=True)
    )
    return f"{wide} wide, {high} high; {most / len(headers):.0%} are {width}×{height}"


# --- shown ----------------------------------------------------------------------------------------------------------


def print_report(report: Report, console: Console) -> None:
    """The report for the terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    facts = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in report.facts:
        facts.add_row(Text(name, style="bold"), Text(value))
    classes = Table(box=SIMPLE_HEAD)
    classes.add_column("Class")
    classes.add_column("Images", justify="right")
    if report.known:
        classes.add_column("Published", justify="right")
    for count in report.counts:
        published = "–" if count.published is None else f"{count.published:,}"
        cells = [Text(count.name), Text(f"{count.images:,}"), Text(published, "yellow" if count.differs else "green")]
        classes.add_row(*cells[: len(classes.columns)])
    console.print(Text(f"{report.dataset.root or report.dataset.name}", "bold"), facts, classes, sep="\n")
    lines = [(f"{record.path or record.id}: {reason}", "red") for record, reason in report.unreadable]
    lines += [(f"{name_pair(same)}: the same content", "yellow") for same in report.duplicates[:LISTED]]
    lines += [(f"Note: {remark}", "") for remark in report.remarks]
    lines += [(f"Would stop a training: {problem}", "bold red") for problem in report.problems]
    if not report.problems:
        lines.append(("Nothing would stop a training.", "bold green"))
    for line, style in lines:
        console.print(Text(line, style), soft_wrap=True)


def write_page(report: Report, path: Path) -> None:
    """Write the report as one self-contained HTML file, with example images of each class."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("csda", "data"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    page = environment.get_template("check.html").render(
        report=report,
        title=(report.dataset.root or Path(report.dataset.name)).resolve().name,
        most=max((count.images for count in report.classes), default=0) or 1,
        examples=_choose_examples(report),
        listed=LISTED,
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path}: the page cannot be written ({error.strerror}); name another file") from error


def _choose_examples(report: Report) -> list[tuple[str, list[tuple[str, str]]]]:
    """For each class and for unlabeled images, some examples spread over the data set: ids and links."""
    dataset, left_out = report.dataset, {record.id for record, _ in report.unreadable}
    rows: dict[int | None, list[int]] = {index: [] for index in [*range(len(dataset.classes)), None]}
    for row, record in enumerate(dataset.records):
        if record.id not in left_out:
            for index in record.label if isinstance(record.label, tuple) else (record.label,):
                rows[index].append(row)
    examples = []
    for index, members in rows.items():
        chosen = [members[k * len(members) // EXAMPLES] for k in range(EXAMPLES)] if members else []
        images = [(dataset.records[row].id, _embed(dataset, row)) for row in dict.fromkeys(chosen)]
        examples.append(("unlabeled" if index is None else dataset.classes[index], images))
    return examples if rows[None] else examples[:-1]


def _embed(dataset: Dataset, row: int) -> str:
    path = dataset.records[row].path
    if dataset.draw is not None:
        pixels = dataset.draw([row], EXAMPLE_SIZE)[0]
    else:
        assert path is not None
        pixels = read_image(path, EXAMPLE_SIZE, 3)
    file = BytesIO()
    Image.fromarray(pixels.squeeze()).save(file, "jpeg", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
