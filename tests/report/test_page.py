"""The pages as a browser would take them: whole, self-contained, harmless."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from csda.errors import RunError
from csda.report import figures, tables, write_comparison, write_report
from csda.runs import Run

MakeRun = Callable[..., Path]
VOID = {"meta", "br", "img", "hr", "link", "input"}


class Page(HTMLParser):
    """Checks that elements nest, and collects what a test asks for."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attributes]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attributes]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text += data

    def ids(self) -> list[str]:
        return [value for name, value in self.attributes if name == "id"]


def test_report_says_what_the_run_says(csda_folder: Path) -> None:
    page, run = Page(csda_folder / "report.html"), Run(csda_folder)
    scores = tables.score(run)
    for text in (str(scores.auc), scores.mca.interval, f"{run.result['auc_last20']:.3f}", "csda train --method csda"):
        assert text in page.text
    for text in (*run.classes, "drawn for this test", "capacity", "2.13.0", "unlabeled_batch_size", "two cores"):
        assert text in page.text
    assert page.tags.count("svg") == 2 * len(list((csda_folder / "figures").glob("*.svg"))) == 2 * 13
    assert {"classes", "ranking", "trust", "curves", "inside", "data", "making", "notes"} <= set(page.ids())


def test_report_tells_what_unlabeled_images_are_taken_for(csda_folder: Path, tmp_path: Path) -> None:
    html, run = (csda_folder / "report.html").read_text(), Run(csda_folder)
    predicted = tables.count_predicted(run)
    assert predicted is not None
    for count, number in zip(tables.count_classes(run), predicted, strict=True):
        cells = {"Labeled": count.labeled, "Unlabeled": count.unlabeled, "Unlabeled, predicted": number}
        cells |= {"Validation": count.val, "Test": count.test}
        row = "".join(f'<td data-label="{name}">{cell}</td>' for name, cell in cells.items())
        assert f'<th scope="row">{count.name}</th>{row}' in html
    assert "Unlabeled, predicted" not in write_comparison([csda_folder], tmp_path / "page.html").read_text()


def test_run_without_pseudo_labels_shows_none(make_run: MakeRun) -> None:
    folder = make_run("baseline")
    path = write_report(folder)
    assert path == folder / "report.html"
    page = Page(path)
    assert "Pseudo-labels" not in page.text
    assert page.tags.count("svg") == 16


def test_comparison_shows_both_runs_and_the_difference(
    baseline_folder: Path, csda_folder: Path, tmp_path: Path
) -> None:
    page = Page(write_comparison([baseline_folder, csda_folder], tmp_path / "comparison.html", title="A & B"))
    gap = tables.compare(Run(csda_folder), Run(baseline_folder))
    assert gap is not None
    assert "A & B" in page.text
    assert str(gap.mca)[0] in "+−"
    assert str(gap.mca) in page.text
    assert gap.recall[2].interval in page.text
    assert "Compared with baseline, csda is" in page.text
    assert "csda, recall" in page.text  # the pictures name the run although only one has pseudo-labels
    assert f"{100 * gap.mca.value:.1f} MCA points ahead" in page.text
    assert page.tags.count("svg") == 22


def test_comparison_over_different_images_claims_no_difference(
    baseline_folder: Path, make_run: MakeRun, tmp_path: Path
) -> None:
    folders = [baseline_folder, make_run("baseline", seed=1, test_seed=1, epochs=2)]
    page = Page(write_comparison(folders, tmp_path / "comparison.html"))
    assert "tested on other images" in page.text
    assert "points ahead" not in page.text


@pytest.mark.parametrize("comparing", [False, True])
def test_names_cannot_inject_anything(make_run: MakeRun, tmp_path: Path, comparing: bool) -> None:
    hostile = (
        "<script>alert(1)</script>",
        '"><img src=x onerror=alert(2)>',
        "$\\frac{",
        "黑色素瘤",
        'style="font-family: #0072b2',
        "]]>",
        "-->",
    )
    folder = make_run("csda", classes=hostile, epochs=2)
    path = (
        write_comparison([folder, folder], tmp_path / "c.html", title=hostile[0]) if comparing else write_report(folder)
    )
    page = Page(path)
    assert not {"script", "img", "iframe", "link"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert all(name in page.text for name in hostile)


def test_page_asks_for_nothing_from_outside(csda_folder: Path) -> None:
    path = csda_folder / "report.html"
    page = Page(path)
    links = [value for name, value in page.attributes if name in ("src", "href", "xlink:href", "data", "action")]
    assert all(link.startswith("#") for link in links)
    text = path.read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^\s\"<]+", text)) == {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert "@import" not in text
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", text))


def test_every_colour_of_the_pictures_is_defined_for_light_and_dark(csda_folder: Path) -> None:
    text = (csda_folder / "report.html").read_text(encoding="utf-8")
    style, drawn = text.split("</style>", 1)
    light, dark = style.split("prefers-color-scheme: dark", 1)
    for name in figures.PALETTE:
        assert f"--{name}:" in light
        assert f"--{name}:" in dark.split("* {", 1)[0]
    used = set(re.findall(r"var\(--(\w+)\)", drawn))
    assert {"blue", "ink", "line"} <= used <= set(figures.PALETTE)
    assert not re.findall(r"(?:fill|stroke): #", drawn)


def test_same_run_gives_the_same_page(make_run: MakeRun) -> None:
    folder = make_run("baseline", epochs=3)
    first = write_report(folder).read_bytes()
    assert write_report(folder).read_bytes() == first


@pytest.mark.parametrize("classes", [("yes", "no"), tuple(f"a class with a long name, number {i}" for i in range(14))])
def test_few_and_many_classes_and_a_single_epoch(make_run: MakeRun, classes: tuple[str, ...]) -> None:
    page = Page(write_report(make_run("fixmatch", classes=classes, epochs=1, truth=False)))
    assert all(name in page.text for name in classes)
    assert "unknown" in page.text


def test_multi_label_run(make_multi_label_run: Callable[[], Path], tmp_path: Path) -> None:
    folder = make_multi_label_run()
    page = Page(write_report(folder))
    assert "Confusion" not in page.text
    assert "prior-corrected" in page.text
    assert "Each label counts as two classes" in page.text
    assert '<th scope="row">MCA, AUC</th>' in (folder / "report.html").read_text()
    assert '<th scope="row">Mean</th>' not in (folder / "report.html").read_text()
    run, scores = Run(folder), tables.score(Run(folder))
    assert str(scores.auc) in page.text
    value, name = min(zip((each.value for each in scores.class_auc), run.classes, strict=True))
    assert f"of the time, from {value:.0%} for {name} to" in page.text
    assert "AUC of each label" in page.text
    html = write_comparison([folder, folder], tmp_path / "comparison.html").read_text()
    for name, each in zip(run.classes, scores.class_auc, strict=True):
        assert f'<th scope="row">AUC, {name}</th>' in html
        assert f"{each} <small>{each.interval}</small>" in html
    assert "Recall, " not in html


def test_pseudo_labels_of_several_labels_are_shown_by_their_auc(make_multi_label_run: Callable[[], Path]) -> None:
    folder = make_multi_label_run()
    assert "Pseudo-labels" not in Page(write_report(folder)).text
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [json.dumps(row | {"pseudo_auc": 0.6 + 0.1 * k}) for k, row in enumerate(rows)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    page = Page(write_report(folder))
    assert "Pseudo-labels" in page.text
    assert "How well pseudo-labels rank images by each label" in page.text


def test_unfinished_run_is_refused_with_the_way_out(make_run: MakeRun) -> None:
    folder = make_run("csda")
    (folder / "predictions.csv").unlink()
    with pytest.raises(RunError, match=r"predictions\.csv: missing; restore it"):
        write_report(folder)
    (folder / "result.json").unlink()
    with pytest.raises(RunError, match=r"--resume"):
        write_report(folder)


def test_unwritable_place_is_named(make_run: MakeRun, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="missing-folder"):
        write_comparison([make_run("csda", epochs=1)], tmp_path / "missing-folder" / "page.html")


def test_report_needs_no_torch() -> None:
    command = "import sys, csda.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], check=False).returncode == 0


def test_templates_are_packaged() -> None:
    root = Path(__file__).parents[2]
    packaged = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["csda"]
    for path in (root / "src/csda/report").iterdir():
        assert path.suffix in (".py", "") or f"report/*{path.suffix}" in packaged
