"""Render the pages with results, with every number filled in from its file in results/.

A template lies under docs/templates/ at the path that its page has in the repository. It is a Jinja2 template:

    {{ gap("table1", "csda") | points("auc") }}     +1.9
    {{ gap("table1", "csda") | interval("auc") }}   +1.9 [+1.5, +2.2]
    {{ row("table1/summary.csv", method="csda", labels=800).auc_mean | fixed(4) }}
    {% for line in rows("table4/summary.csv") %}…{% endfor %}
    {{ count("table1/runs.csv", "seed") | word }} seeds                        five seeds
    {{ setting("strong", "image_size") }} pixels                          160 pixels
    {% do claim(gap("table1", "glm").auc_gap > gap("table1", "csda").auc_gap) %}

`setting` reads the presets of the package. `claim` prints nothing. It fails where a sentence of the page no longer
follows from the files.

The pages in results/ are written by the commands that made their tables. They are written again from the files of
the table: runs.csv and meta.json, or summary.csv and meta.json.

    python docs/render.py            writes the pages
    python docs/render.py --check    exits with 1 and names the pages that differ from their files
"""

from __future__ import annotations

import csv
import json
import shlex
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import jinja2

from csda.methods import METHODS
from csda.presets import resolve
from csda.research import estimators, simulate
from csda.research.experiments import Experiment, read_experiment
from csda.research.ledger import TEXTS
from csda.research.summary import compare_rows, format_page, summarize

ROOT = Path(__file__).parent.parent
TEMPLATES = ROOT / "docs" / "templates"
Line = dict[str, Any]

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


class Results:
    """Reads the tables and benchmarks in a folder of results."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read = cache(self._read_file)

    def rows(self, file: str, **wanted: Any) -> list[Line]:
        """The lines of a CSV file whose columns have the wanted values; a list means any of them."""
        allowed = {
            key: {str(each) for each in (value if isinstance(value, list | tuple) else [value])}
            for key, value in wanted.items()
        }
        found = [line for line in self._read(file) if all(str(line[key]) in allowed[key] for key in allowed)]
        if not found:
            raise ValueError(f"{file} has no line with {wanted}")
        return found

    def row(self, file: str, **wanted: Any) -> Line:
        """The only such line."""
        [line] = self.rows(file, **wanted)
        return line

    def gap(self, table: str, method: str, reference: str = "baseline", labels: Any = "all", split: Any = None) -> Line:
        """The paired difference of two methods, over all label counts unless one is named."""
        wanted = {"method": method, "reference": reference, "labels": labels} | ({"split": split} if split else {})
        return self.row(f"{table}/gaps.csv", **wanted)

    def means(self, file: str, by: list[str], **wanted: Any) -> list[Line]:
        """The lines that have the columns `by` in common, as one line with the means of the other columns."""
        groups: dict[tuple[Any, ...], list[Line]] = {}
        for line in self.rows(file, **wanted):
            groups.setdefault(tuple(line[key] for key in by), []).append(line)
        return [
            dict(zip(by, key, strict=True)) | {name: _mean(line[name] for line in lines) for name in lines[0]} | own
            for key, lines in groups.items()
            for own in [dict(zip(by, key, strict=True))]
        ]

    def average(self, file: str, column: str, **wanted: Any) -> float:
        """The mean of a column over the wanted lines."""
        return mean(line[column] for line in self.rows(file, **wanted))

    def count(self, file: str, column: str, **wanted: Any) -> int:
        """How many different values a column has in the wanted lines."""
        return len({str(line[column]) for line in self.rows(file, **wanted)})

    def furthest(self, file: str, column: str, other: str, **wanted: Any) -> float:
        """The largest difference between two columns over the wanted lines."""
        return max(abs(line[column] - line[other]) for line in self.rows(file, **wanted))

    def bench(self, name: str, folder: str = "bench") -> Any:
        """A benchmark's figures, by the name of its file."""
        return json.loads((self.folder / folder / f"{name}.json").read_text(encoding="utf-8"))

    def _read_file(self, file: str) -> list[Line]:
        return _read_lines(self.folder / file)


def _read_lines(file: Path, texts: Iterable[str] = ()) -> list[Line]:
    """The lines of a CSV file; the columns `texts` stay text."""
    with file.open(newline="", encoding="utf-8") as stream:
        return [
            {key: text if key in texts else _value(text) for key, text in line.items()}
            for line in csv.DictReader(stream)
        ]


def _value(text: str) -> Any:
    """A number where the cell is one, None where it is empty."""
    if text == "":
        return None
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        return text


def _mean(values: Iterable[Any]) -> Any:
    numbers = [value for value in values if isinstance(value, int | float)]
    return mean(numbers) if numbers else None


def fixed(value: float | None, digits: int) -> str:
    """A number with so many digits, or a dash where there is none."""
    return "–" if value is None else f"{value:.{digits}f}".replace("-", "−")


def signed(value: float | None, digits: int = 1) -> str:
    """A number with its sign."""
    return "–" if value is None else f"{value:+.{digits}f}".replace("-", "−")


def points(line: Line, figure: str) -> str:
    """A difference in points, with its sign."""
    value = line[f"{figure}_gap"]
    return signed(None if value is None else 100 * value)


def interval(line: Line, figure: str) -> str:
    """A difference in points with its 95 % interval, where there is one."""
    low, high = line[f"{figure}_low"], line[f"{figure}_high"]
    return points(line, figure) + ("" if low is None else f" [{signed(100 * low)}, {signed(100 * high)}]")


def spread(line: Line, figure: str, digits: int = 3) -> str:
    """A mean over seeds with its standard deviation, where there is one."""
    deviation = line[f"{figure}_std"]
    return fixed(line[f"{figure}_mean"], digits) + ("" if deviation is None else f" ± {fixed(deviation, digits)}")


def word(number: int) -> str:
    """A small whole number as a word, a larger one with separators."""
    return WORDS[number] if 0 <= number < len(WORDS) else f"{number:,}"


def setting(preset: str, key: str, method: str = "baseline") -> Any:
    """The value of a setting of every run, or of a method, with a preset."""
    config = resolve({"preset": preset, "method": method}, METHODS[method].settings, METHODS[method].defaults)
    return config.method_settings[key] if key in config.method_settings else getattr(config, key)


def claim(holds: bool) -> None:
    """Fail where a sentence does not follow from the files."""
    if not holds:
        raise ValueError("a claim of this page no longer follows from the files; rewrite the sentence")


def render(template: str, results: Path) -> str:
    """The text of the page that a template describes, with the numbers of a folder of results."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
        extensions=["jinja2.ext.do"],
    )
    source = Results(results)
    environment.filters |= {
        "fixed": fixed,
        "signed": signed,
        "points": points,
        "interval": interval,
        "spread": spread,
        "word": word,
        "multiply": lambda value, factor: value * factor,
    }
    environment.globals |= {
        name: getattr(source, name) for name in ("rows", "row", "gap", "means", "average", "count", "furthest", "bench")
    } | {"claim": claim, "setting": setting, "min": min, "max": max, "abs": abs}
    return environment.get_template(template).render()


def list_templates() -> list[str]:
    """Templates by the path of their page in the repository."""
    return sorted(path.relative_to(TEMPLATES).as_posix() for path in TEMPLATES.rglob("*.md"))


def list_tables() -> list[str]:
    """The folders in results/ whose pages are written from their files."""
    grids = sorted(path.parent.name for path in (ROOT / "results").glob("*/runs.csv"))
    return [*grids, "estimators", "review"]


def render_table(name: str, results: Path) -> str:
    """The page of a table, as the command that made the table writes it."""
    folder = results / name
    about = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    if name == "estimators":
        return estimators.format_page(_read_lines(folder / "summary.csv"), about)
    if name == "review":
        return simulate.format_page(_read_lines(folder / "summary.csv"), about)
    experiment = _open_experiment(name, about)
    names = {(row.title or row.method, experiment.presets.get(row.name)): row.name for row in experiment.rows}
    lines = [
        {**line, "method": names[line["method"], line.pop("preset", None)]}
        for line in _read_lines(folder / "runs.csv", TEXTS)
    ]
    places = [
        {"method": row.name, "labels": labels, "split": split, "seed": seed}
        for row, labels, split in experiment.places
        for seed in experiment.seeds
    ]
    missing = [place for place in places if not any(place.items() <= line.items() for line in lines)]
    summary, gaps = summarize(experiment, lines), compare_rows(experiment, lines)
    return format_page(experiment, lines, summary, gaps, about, missing)


def _open_experiment(name: str, about: Line) -> Experiment:
    """The experiment of a table, with the changes for its data if its name has them."""
    stem, experiment = read_experiment(shlex.split(about["command"])[2])
    changes = experiment.on[name.removeprefix(f"{stem}_")].model_dump(exclude_none=True) if name != stem else {}
    return experiment.model_copy(update=changes)


def main(check: bool) -> int:
    """Write every page, or name those that differ."""
    results = ROOT / "results"
    pages = {name: render(name, results) for name in list_templates()}
    pages |= {f"results/{name}/page.md": render_table(name, results) for name in list_tables()}
    stale = []
    for name, text in pages.items():
        page = ROOT / name
        if not page.is_file() or page.read_text(encoding="utf-8") != text:
            stale.append(name)
            if not check:
                page.write_text(text, encoding="utf-8")
    for name in stale:
        print(f"{name} differs from its template or table; run `make docs`" if check else f"wrote {name}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
