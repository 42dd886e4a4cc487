"""The pages as a browser would take them: whole, self-contained, harmless."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image
from sklearn.metrics import roc_curve

from csda import examples, metrics, thumbnails
from csda.errors import RunError
from csda.report import curves, figures, tables, write_comparison, write_report
from csda.report import page as page_module
from csda.report.gallery import collect
from csda.runs import Run
from drawn_runs import write_run

MakeRun = Callable[..., Path]
FEW = ("akiec", "bcc", "df")
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
            self.text += data.replace("\N{NO-BREAK SPACE}", " ")

    def ids(self) -> list[str]:
        return [value for name, value in self.attributes if name == "id"]


def test_report_says_what_the_run_says(csda_folder: Path) -> None:
    page, run = Page(csda_folder / "report.html"), Run(csda_folder)
    scores = tables.score(run)
    for text in (str(scores.auc), scores.mca.interval, f"{run.result['auc_last20']:.3f}", "csda train --method csda"):
        assert text in page.text
    for text in (*run.classes, "drawn for this test", "capacity", "2.13.0", "unlabeled_batch_size", "two cores"):
        assert text in page.text
    pictures = list((csda_folder / "figures").glob("*.svg"))
    assert len(pictures) == 13
    # Those as wide as the page have another form for a phone.
    wide = f'viewBox="-{figures.MARGIN} -{figures.MARGIN} {980 + 2 * figures.MARGIN} '
    assert page.tags.count("svg") == 13 + len([each for each in pictures if wide in each.read_text()])
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
    assert page.tags.count("svg") == 10


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
    assert page.tags.count("svg") == 15
    html = (tmp_path / "comparison.html").read_text()
    differing = html[html.index("Settings that differ") : html.index("Commands")]
    for key, values in {"method": ("baseline", "csda"), "capacity": ("–", "256")}.items():
        cells = "".join(
            f'<td class="setting" data-label="{name}">{value}</td>'
            for name, value in zip(("baseline", "csda"), values, strict=True)
        )
        assert f'<th scope="row">{key}</th>{cells}' in differing
    assert "image_size" not in differing
    assert "csda train --method baseline\ncsda train --method csda" in html


def test_the_page_says_which_epoch_was_kept(make_run: MakeRun, tmp_path: Path) -> None:
    """Presets `features` and `strong` keep the last epoch; no caption speaks of the best one then."""
    best, last = make_run("baseline", epochs=3), make_run("csda", epochs=3)
    config = last / "config.toml"
    config.write_text(config.read_text().replace('method = "csda"', 'method = "csda"\nchoose = "last"'))
    assert "the last epoch, whose model is kept" in Page(write_report(last)).text
    assert "chosen on validation AUC" not in Page(write_report(last)).text
    assert "the epoch with the best validation AUC, whose model is kept" in Page(write_report(best)).text
    texts = [Page(write_comparison(each, tmp_path / "c.html")).text for each in ([last, last], [best, last])]
    assert "Figures are those of the last epoch, whose model is kept, with" in texts[0]
    assert "the last one of csda, and that of the best validation AUC of the others" in texts[1]
    assert not any("best validation epoch" in text for text in texts)


def test_a_comparison_says_which_labels_are_new(make_run: MakeRun, tmp_path: Path) -> None:
    before, after = make_run("csda", epochs=1), make_run("csda", epochs=1, seed=1)
    rows = (after / "split.csv").read_text().splitlines()
    row = next(row for row in rows if ",unlabeled," in row)
    label = Run(before).classes[1]
    rows[rows.index(row)] = row.replace(",unlabeled,,", f",labeled,{label},")
    (after / "split.csv").write_text("\n".join(rows) + "\n")
    expected = f"csda, seed 1 has learned from 151 labeled images, csda, seed 0 from 150: {label} +1."
    pages = [Page(write_comparison(runs, tmp_path / "c.html")).text for runs in ([before, after], [before, before])]
    assert [re.findall(r"csda, seed 1 has learned from.*", text) for text in pages] == [[expected], []]


def test_comparison_shows_images_on_which_runs_disagree(make_run: MakeRun, tmp_path: Path) -> None:
    """Whose picture one of them has; the image on which the probabilities are furthest apart comes first."""
    folders = [make_run("baseline", epochs=3), make_run("csda", epochs=3)]
    parts = [Run(folder).predictions.part("test") for folder in folders]
    labels, decided = parts[0][1], [probs.argmax(axis=1) for probs, _ in parts]
    ids = [row.id for row in Run(folders[0]).split if row.split == "test"]
    disputed = [i for i in range(len(ids)) if decided[0][i] != decided[1][i] and labels[i] == 1]
    apart = {i: np.abs(parts[0][0][i] - parts[1][0][i]).sum() for i in disputed}
    kept = keep_thumbnails(folders[1]).thumbnails.pictures
    html = write_comparison(folders, tmp_path / "c.html").read_text()
    section = html[html.index('id="disputes"') : html.index('id="trust"')]
    assert f"{len(disputed)} of {int((labels == 1).sum())} differ" in section
    nevi = section[section.index(">nevus <small>") :]
    first = max((i for i in disputed if ids[i] in kept), key=lambda i: apart[i])
    assert nevi.index(ids[first]) == min(nevi.index(ids[i]) for i in disputed if ids[i] in nevi)
    guess = Run(folders[0]).classes[decided[1][first]]
    mark = "✓" if decided[1][first] == 1 else "✗"
    assert f"<b>{mark}</b> {guess} " in nevi[nevi.index(ids[first]) :]
    without = write_comparison(folders, tmp_path / "c.html", images=False).read_text()
    assert "disputes" not in without
    assert "data:image" not in without


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
    assert ("Sensitivity for yes" in page.text) == (len(classes) == 2)


def test_sentences_say_what_was_counted(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Epochs that there were, images of a rare class, and alignment only where it changed something."""
    folder = make_run("csda", epochs=3)
    text = Page(write_report(folder)).text
    assert "last 3 epochs: mean" in text
    assert "last 20 epochs: mean" not in text
    assert "how many of them alignment changed" in text
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) | {"flip_rate": 0.0} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(tables, "FEW", 1000)
    text = Page(write_report(folder)).text
    assert "how many of them alignment changed" not in text
    weakest = min(tables.score(Run(folder)).recall, key=lambda each: each.value)
    assert re.search(rf"from \d+ % of \w+ \({weakest.count} images\) to \d+ % of", text)


def test_a_number_keeps_its_percent_sign(csda_folder: Path) -> None:
    """Not in a command, which is copied from the page."""
    path = csda_folder / "environment.json"
    before = json.loads(path.read_text())
    path.write_text(json.dumps(before | {"command": "csda train 'the best 5 % of all'"}))
    page = write_report(csda_folder).read_text()
    path.write_text(json.dumps(before))
    assert '<pre tabindex="0"><code>csda train &#39;the best 5 % of all&#39;</code></pre>' in page
    assert not re.search(r"\d %", re.sub(r"<pre.*?</pre>", "", page, flags=re.DOTALL))
    assert re.search(r"It recognises \d+\N{NO-BREAK SPACE}%", page)


def test_one_area_has_one_interval(csda_folder: Path) -> None:
    """The titles of the ROC curves say what the table says."""
    page = Page(write_report(csda_folder)).text
    for each in tables.score(Run(csda_folder)).class_auc:
        assert f"{each} {each.interval}" in page


def test_settings_differ_between_runs_that_have_them(make_run: MakeRun, tmp_path: Path) -> None:
    """A third run without such settings does not hide that."""
    folders = [make_run("baseline", epochs=2), make_run("csda", epochs=2), make_run("csda", epochs=2, seed=1)]
    config = folders[2] / "config.toml"
    assert "capacity = 256" in config.read_text()
    config.write_text(config.read_text().replace("capacity = 256", "capacity = 64"))
    html = write_comparison(folders, tmp_path / "comparison.html").read_text()
    differing, lacking = html.split("Settings that differ", 1)[1].split("Settings that only some of the runs have", 1)
    assert '<th scope="row">capacity</th>' in differing
    assert '<th scope="row">delta</th>' in lacking.split("Commands", 1)[0]
    assert '<th scope="row">delta</th>' not in differing
    assert "The title has the area (AUC) of each run, in the order of the legend." in html


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
    assert f"of the time, from {value:.0%} for {name}".replace("%", " %") in page.text
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


def keep_thumbnails(folder: Path) -> Run:
    """Draw the pictures that a training would have kept."""
    run = Run(folder)
    probs, labels = run.predictions.part("test")
    test = [row.id for row in run.split if row.split == "test"]
    unlabeled, guesses = list(run.pseudo_labels), np.array(list(run.pseudo_labels.values()))
    ids = [test[row] for row in examples.choose_judged(probs, labels)]
    ids = list(dict.fromkeys(ids + [unlabeled[row] for row in examples.choose_unlabeled(guesses)]))
    seen = [(test[row], name) for pairs in examples.choose_seen(probs, labels) for row, name in pairs]
    generator, pictures = np.random.default_rng(0), []
    for _ in ids:
        buffer = io.BytesIO()
        Image.fromarray(generator.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(buffer, "WEBP")
        pictures.append(buffer.getvalue())
    np.savez(
        folder / "thumbnails.npz",
        ids=np.array(ids),
        ends=np.cumsum([len(picture) for picture in pictures]),
        bytes=np.frombuffer(b"".join(pictures), dtype=np.uint8),
        map_ids=np.array([name for name, _ in seen]),
        map_classes=np.array([name for _, name in seen]),
        maps=generator.integers(0, 256, (len(seen), 8, 8), dtype=np.uint8),
    )
    return Run(folder)


@pytest.fixture(scope="module")
def illustrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with thumbnails, whose queue moves for one class alone and whose alignment does nothing, and its report."""
    folder = write_run(tmp_path_factory.mktemp("runs") / "csda", epochs=4, classes=FEW)
    with np.load(folder / "history.npz") as archive:
        arrays = dict(archive)
    arrays["queue_counts"][:] = [[np.nan] * 3, *([5.0, 5.0, epoch + 1] for epoch in range(3))]
    arrays["temperatures"][1:] = 1.0
    arrays["flips"][1:] = 0.0
    np.savez(folder / "history.npz", **arrays)
    keep_thumbnails(folder)
    (folder / "figures").mkdir()
    (folder / "figures" / "of-an-earlier-version.svg").write_text("<svg/>")
    (folder / "figures" / "notes.txt").write_text("mine")
    write_report(folder)
    return folder


def test_every_picture_is_a_file_of_its_own(illustrated: Path) -> None:
    names = {path.name for path in (illustrated / "figures").iterdir()}
    assert {"classes.svg", "confusion.svg", "roc.svg", "precision-recall.svg", "reliability.svg"} <= names
    assert {"coverage.svg", "learning-auc.svg", "queue.svg", "notes.txt"} <= names
    assert "of-an-earlier-version.svg" not in names
    for path in (illustrated / "figures").glob("*.svg"):
        root = ElementTree.fromstring(path.read_text(encoding="utf-8"))
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert "prefers-color-scheme: dark" in path.read_text(encoding="utf-8")


def test_panels_in_which_nothing_moves_are_left_out(illustrated: Path) -> None:
    assert "Not shown, because nothing changes: akiec, bcc." in (illustrated / "report.html").read_text()
    assert not (illustrated / "figures" / "alignment.svg").exists()


def test_images_are_shown_with_what_they_are(illustrated: Path) -> None:
    page, run = Page(illustrated / "report.html"), Run(illustrated)
    assert {"mistakes", "seen", "pseudo-labels"} <= set(page.ids())
    sources = [value for name, value in page.attributes if name == "src"]
    assert all(source.startswith("data:image/webp;base64,") for source in sources)
    assert {base64.b64decode(source.partition(",")[2]) for source in sources} >= set(run.thumbnails.pictures.values())
    probs, labels = run.predictions.part("test")
    ids = [row.id for row in run.split if row.split == "test"]
    sentences = [value for name, value in page.attributes if name == "alt"]
    for name, rows in enumerate(examples.choose_mistakes(probs, labels)):
        for row in rows:
            guess = run.classes[probs[row].argmax()]
            assert any(each.startswith(f"{ids[row]}: {run.classes[name]}, predicted as {guess}") for each in sentences)
    gallery = collect(run)
    unlabeled = list(run.pseudo_labels)
    guesses = np.array(list(run.pseudo_labels.values()))
    for name, (group, rows) in enumerate(zip(gallery.guesses, examples.choose_guesses(guesses), strict=True)):
        right = [run.truth[unlabeled[row]] == run.classes[name] for row in rows]
        assert [image.right for image in group.images] == right
    matrix = metrics.confusion(labels, probs.argmax(1), len(run.classes))
    assert all(
        cell.count == matrix[run.classes.index(cell.truth), run.classes.index(cell.predicted)]
        for row in gallery.cells
        for cell in row
    )
    # The heading of a cell has the class, so what is below its images is the probability alone.
    assert all(re.fullmatch(r">?\d+ %", image.words) for row in gallery.cells for cell in row for image in cell.images)


def test_no_image_leaves_where_none_may(illustrated: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(illustrated, tmp_path / "run"))
    page = Page(write_report(folder, images=False))
    assert "img" not in page.tags
    assert not {"mistakes", "seen"} & set(page.ids())


def test_a_page_full_of_images_stays_below_five_megabytes(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many bytes of pictures as a run may keep, in the most classes that all have their cells shown."""
    folder = make_run("csda", epochs=2, classes=tuple(f"class {k}" for k in range(8)))
    run = keep_thumbnails(folder)
    with np.load(folder / "thumbnails.npz") as archive:
        arrays = dict(archive)
    header, share = next(iter(run.thumbnails.pictures.values()))[:12], thumbnails.BYTES // len(arrays["ids"])
    content = header + np.random.default_rng(1).bytes(share - len(header))
    arrays |= {"ends": np.arange(1, len(arrays["ids"]) + 1) * share}
    arrays |= {"bytes": np.frombuffer(content * len(arrays["ids"]), dtype=np.uint8)}
    np.savez(folder / "thumbnails.npz", **arrays)
    page = write_report(folder).read_text()
    assert len(page) < page_module.LARGEST
    assert "Images behind each cell" in page


def test_a_page_that_would_be_too_large_goes_without_images(
    illustrated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(illustrated, tmp_path / "run"))
    monkeypatch.setattr(page_module, "LARGEST", 100_000)
    page = write_report(folder).read_text()
    assert "<img" not in page
    assert "Images are left out of this page" in page


@pytest.mark.parametrize("damage", ["ids", "ends", "bytes", "maps"])
def test_damaged_thumbnails_are_named(illustrated: Path, tmp_path: Path, damage: str) -> None:
    folder = Path(shutil.copytree(illustrated, tmp_path / "run"))
    with np.load(folder / "thumbnails.npz") as archive:
        arrays = dict(archive)
    broken = {"ids": arrays["ids"][1:], "ends": arrays["ends"][::-1], "bytes": arrays["bytes"][1:], "maps": np.zeros(3)}
    np.savez(folder / "thumbnails.npz", **arrays | {damage: broken[damage]})
    with pytest.raises(RunError, match=r"thumbnails\.npz: damaged"):
        collect(Run(folder))


def test_sensitivity_at_fixed_specificity_of_two_classes(make_run: MakeRun, illustrated: Path) -> None:
    run = Run(make_run("csda", classes=("ill", "well"), epochs=1))
    probs, labels = run.predictions.part("test")
    for specificity, estimates in curves.sensitivities(run):
        for name, estimate in enumerate(estimates):
            false, true, _ = roc_curve(labels == name, probs[:, name], drop_intermediate=False)
            reached = max(rate for wrong, rate in zip(false, true, strict=True) if 1 - wrong >= specificity - 1e-12)
            assert estimate.value == pytest.approx(reached)
            assert estimate.low <= estimate.value <= estimate.high
    assert curves.sensitivities(Run(illustrated)) == []
