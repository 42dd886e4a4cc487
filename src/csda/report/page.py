"""The report: one HTML file without other files, for one run or for several in comparison."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isnan
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from matplotlib.figure import Figure

from csda.files import write_whole
from csda.report import curves, figures, tables
from csda.report.curves import Coverage
from csda.report.gallery import Gallery, collect, collect_disputes
from csda.report.tables import Entry, Estimate
from csda.runs import Run, open_run, seal

LAST = 20
"""Number of last epochs for the averaged figures."""

LARGEST = 5_000_000
"""Largest size of a page in bytes. Images are left out of a larger one."""

UNKNOWN = "–"
"""Shown for a setting that a run does not have."""

NO_IMAGES = Gallery([], [], [], [])


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure and its caption. A `wide` one has a second version for narrow pages."""

    name: str
    svg: Markup
    caption: str
    wide: bool
    narrow: Markup | None


@dataclass(frozen=True, slots=True)
class Trust:
    """How reliable the probabilities are: pictures, sentences, and sensitivities of a task with two classes."""

    pictures: list[Picture]
    sentences: list[str]
    sensitivities: list[tuple[float, list[Estimate]]]


def write_report(run_folder: Path, *, images: bool = True) -> Path:
    """Write `report.html` into a run folder, and its pictures into `figures/`. Without `images` for data that must not
    leave its place.
    """
    run = open_run(run_folder)
    (entry,) = entries = tables.enter([run])
    classes = _picture_classes(entries) + _picture_confusions(entries)
    learning, pseudo_labels, inside = (
        _picture_learning(entries),
        _picture_pseudo_labels(entries),
        _picture_inside(entries),
    )
    ranking, trust = _picture_ranking(entries), _judge_trust(entries)
    gallery = collect(run) if images else NO_IMAGES
    template = open_environment().get_template("run.html")
    # With very many classes even small images add up to a page that is too large to send.
    for shown in (gallery, replace(gallery, cells=[]), NO_IMAGES):
        page = template.render(
            title=f"{entry.name} on {Path(run.config['data']).name}",
            multi_label=run.multi_label,
            entry=entry,
            part=tables.judged_part(run),
            kind=tables.PART_NAMES[tables.judged_part(run)],
            images=tables.count_images(run),
            counts=tables.count_classes(run),
            predicted=tables.count_predicted(run),
            warnings=tables.warn(run),
            remarks=tables.remark_split(run),
            summary=_describe_run(entry),
            caveats=_describe_limits(entry),
            control=run.result.get("control") or {},
            keeps_last=tables.keeps_last(run),
            classes=classes,
            gallery=shown,
            left_out=shown is not gallery,
            ranking=ranking,
            trust=trust,
            curves=learning,
            pseudo_labels=pseudo_labels,
            inside=inside,
            making=_describe_making(run),
            machine=_common([_machine(run)]),
        )
        if len(page.encode()) < LARGEST:
            break
    pictures = [*classes, *ranking, *trust.pictures, *learning, *pseudo_labels, *inside]
    return run.write_report(page, {picture.name: figures.alone(picture.svg) for picture in pictures})


def write_comparison(
    run_folders: Sequence[Path], out: Path, title: str = "Runs side by side", *, images: bool = True
) -> Path:
    """Write one page about several runs on the same data. Differences are to the first run."""
    runs = [open_run(folder) for folder in run_folders]
    entries = tables.enter(runs)
    rows = tables.compare_all(entries)
    differing = _list_differing([run.config for run in runs])
    # Runs that have such a setting have the same value.
    lacking = {key: values for key, values in differing.items() if len(set(values) - {UNKNOWN}) == 1}
    disputes = collect_disputes([(entry.name, entry.colour, entry.run) for entry in entries]) if images else []
    content = {
        "title": title,
        "multi_label": runs[0].multi_label,
        "kind": tables.PART_NAMES[tables.judged_part(runs[0])],
        "entries": entries,
        "rows": rows,
        "summary": _describe_comparison(entries, rows),
        "choice": _describe_choice(entries),
        "warnings": [(entry, sentence) for entry in entries for sentence in tables.warn(entry.run)],
        "counts": tables.count_classes(runs[0]),
        "images": tables.count_images(runs[0]),
        "remarks": list(dict.fromkeys(remark for run in runs for remark in tables.remark_split(run))),
        "classes": _picture_classes(entries),
        "ranking": _picture_ranking(entries),
        "trust": _judge_trust(entries),
        "curves": _picture_learning(entries),
        "confusions": _picture_confusions(entries),
        "pseudo_labels": _picture_pseudo_labels(entries),
        "differing": {key: values for key, values in differing.items() if key not in lacking},
        "lacking": lacking,
        "machines": _list_differing([_machine(run) for run in runs]),
        "machine": _common([_machine(run) for run in runs]),
    }
    template = open_environment().get_template("comparison.html")
    page = template.render(content, disputes=disputes)
    if len(page.encode()) >= LARGEST:
        page = template.render(content, disputes=[])
    return write_whole(out, seal(page))


def open_environment() -> Environment:
    """The Jinja environment of the pages."""
    environment = Environment(
        loader=PackageLoader("csda", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["duration"] = _format_duration
    environment.filters["setting"] = _format_setting
    environment.filters["percent"] = _percent
    environment.filters["code"] = _mark_code
    environment.filters["breakable"] = _break_after_underscores
    environment.filters["whole"] = _keep_percentages_whole
    environment.filters["thousands"] = "{:,}".format
    environment.filters["number"] = lambda value: "–" if value is None else f"{value:.3f}"
    return environment


def _describe_run(entry: Entry) -> str:
    """The result of a run in two sentences, for a reader who does not know the term AUC."""
    run, scores = entry.run, entry.scores
    images = tables.count_images(run)
    others = f" and {images['unlabeled']:,} unlabeled" if images["unlabeled"] else ""
    kind = "label" if run.multi_label else "class"
    part = tables.judged_part(run)
    summary = (
        f"Trained on {images['labeled']:,} labeled{others} images and tested on {images[part]:,} "
        f"{tables.PART_NAMES[part]} images. Given an image of a {kind} and one that is not, the model ranks them "
        f"correctly {_percent(scores.auc.value)} of the time"
    )
    by_class = scores.by_class(multi_label=run.multi_label)
    present = [(each, name) for each, name in zip(by_class, run.classes, strict=True) if not isnan(each.value)]
    if not present:
        return f"{summary}."
    word = "for" if run.multi_label else "of"
    weakest, strongest = (
        f"{_percent(each.value)} {word} {name}{f' ({each.count} images)' if each.few else ''}"
        for each, name in (choose(present, key=lambda pair: (pair[0].value, pair[1])) for choose in (min, max))
    )
    if run.multi_label:
        return f"{summary}, from {weakest} to {strongest}."
    return (
        f"{summary}. It recognises {_percent(fmean(each.value for each, _ in present))} of a class's images on average "
        f"(95 % interval {_percent(scores.mca.low)} to {_percent(scores.mca.high)}), from {weakest} to {strongest}."
    )


def _describe_comparison(entries: Sequence[Entry], rows: Sequence[tables.Row]) -> list[str]:
    reference = entries[0].name
    sentences = []
    for k, entry in enumerate(entries[1:]):
        gaps = {row.name: row.gaps[k] for row in rows[:2]}
        if gaps["AUC"] is None or gaps["MCA"] is None:
            sentences.append(f"{entry.name} was tested on other images than {reference}, so there is no difference.")
        else:
            sentences.append(
                f"Compared with {reference}, {entry.name} is {_judge('MCA', gaps['MCA'])} "
                f"and {_judge('AUC', gaps['AUC'])}."
            )
        sentences += _describe_labels(entry, entries[0])
    return sentences


def _describe_labels(entry: Entry, reference: Entry) -> list[str]:
    """The classes of which a run had more or fewer labels than the reference, if there are any."""
    own, theirs = (tables.count_images(each.run)["labeled"] for each in (entry, reference))
    pairs = zip(tables.count_classes(entry.run), tables.count_classes(reference.run), strict=True)
    differing = [
        f"{ours.name} {ours.labeled - others.labeled:+,}".replace("-", "−")
        for ours, others in pairs
        if ours.labeled != others.labeled
    ]
    if not differing:
        return []
    listed = ", ".join(differing)
    return [f"{entry.name} has learned from {own:,} labeled images, {reference.name} from {theirs:,}: {listed}."]


def _judge(metric: str, gap: Estimate) -> str:
    value, low, high = (f"{100 * each:+.1f}".replace("-", "−") for each in (gap.value, gap.low, gap.high))
    interval = f"95 % interval {low} to {high}"
    if gap.verdict == "unclear":
        return f"not clearly different in {metric} ({value} points, {interval})"
    return f"{value[1:]} {metric} points {gap.verdict} ({interval})"


def _describe_limits(entry: Entry) -> list[str]:
    """The controls of the run, and what a single run cannot tell."""
    run, scores, sentences = entry.run, entry.scores, []
    if scores.prior_mca is not None and not isnan(scores.prior_mca.value):
        gain = 100 * (scores.prior_mca.value - scores.mca.value)
        sentences.append(
            "A control that needs no unlabeled image: dividing the probabilities by the class frequencies of the "
            f"labels gives an MCA of {' '.join([str(scores.prior_mca), scores.prior_mca.interval]).strip()}, "
            f"{_signed(gain)} points."
        )
    for name, figures_of in (run.result.get("control") or {}).items():
        known = [f"{key.upper()} {value:.3f}" for key, value in figures_of.items() if value is not None]
        if known:
            which = "Another control" if sentences else "A control"
            sentences.append(f"{which}, {name.replace('_', ' ')} on frozen features: {' and '.join(known)}.")
    # Of a short run only the second half, because figures rise in the first epochs.
    rows = run.metrics[-min(LAST, (len(run.metrics) + 1) // 2) :]
    last = [row["test_mca"] for row in rows if row.get("test_mca") is not None]
    moved = (
        f" Over the last {len(last)} epochs MCA was between {min(last):.3f} and {max(last):.3f}."
        if len(last) > 1
        else ""
    )
    sentences.append(
        "This is one seed on one split. The intervals cover the choice of "
        f"{tables.PART_NAMES[tables.judged_part(run)]} images, but not that of seed, split and epoch.{moved}"
    )
    return sentences


def _signed(points: float) -> str:
    return f"{points:+.1f}".replace("-", "−")


def _describe_making(run: Run) -> dict[str, dict[str, Any]]:
    """Settings by heading, without those that are None."""
    config = dict(run.config)
    method_settings = config.pop("method_settings")
    sections = {"Run": config, f"Settings of {config['method']}": method_settings}
    return {
        heading: {key: value for key, value in items.items() if value is not None}
        for heading, items in sections.items()
        if items
    }


def _machine(run: Run) -> dict[str, Any]:
    """The environment of a run, without what the page says elsewhere."""
    elsewhere = ("command", "classes", "multi_label", "remarks")
    return {key: value for key, value in run.environment.items() if key not in elsewhere}


def _list_differing(settings: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """The settings in which runs differ, with the value of each run; settings of methods are included."""
    flat = [{**each, **each.get("method_settings", {})} for each in settings]
    keys = dict.fromkeys(key for each in flat for key in each if key != "method_settings")
    rows = {key: [UNKNOWN if each.get(key) is None else _format_setting(each[key]) for each in flat] for key in keys}
    return {key: values for key, values in rows.items() if len(set(values)) > 1}


def _common(settings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The known values that all have in common."""
    first, *others = settings
    return {
        key: value
        for key, value in first.items()
        if value is not None and all(other.get(key) == value for other in others)
    }


def _picture_classes(entries: Sequence[Entry]) -> list[Picture]:
    if entries[0].run.multi_label:
        caption = (
            "How well the model ranks images by each label (AUC), with its 95 % interval; 0.5 is guessing. "
            "Rare labels are at the bottom. A wide bar means few test images with the label."
        )
    else:
        caption = (
            "Share of each class's images that the model recognises, with its 95 % interval. "
            "Rare classes are at the bottom. A wide bar means few test images."
        )
    return [_picture("classes", partial(figures.draw_classes, entries), caption)]


def _picture_learning(entries: Sequence[Entry]) -> list[Picture]:
    texts = {
        "auc": f"AUC after each epoch: how well the model ranks images. The dot is {_describe_choice(entries)}.",
        "mca": "MCA after each epoch: the mean share of each class that is recognised. The dot is the same epoch.",
    }
    if all(len(entry.run.metrics) < 2 for entry in entries):
        return []
    return [
        _picture(f"learning-{metric}", partial(figures.draw_learning_curves, entries, metric), text)
        for metric, text in texts.items()
        if any(
            row.get(f"{part}_{metric}") is not None
            for entry in entries
            for row in entry.run.metrics
            for part in ("val", "test")
        )
    ]


def _describe_choice(entries: Sequence[Entry]) -> str:
    """The epoch of the model of each run."""
    kinds = {tables.keeps_last(entry.run) for entry in entries}
    if kinds == {True}:
        return "the last epoch, whose model is kept"
    if kinds == {False}:
        return "the epoch with the best validation AUC, whose model is kept"
    last = ", ".join(entry.name for entry in entries if tables.keeps_last(entry.run))
    return f"the epoch whose model is kept: the last one of {last}, and that of the best validation AUC of the others"


def _picture_ranking(entries: Sequence[Entry]) -> list[Picture]:
    """ROC and precision-recall curves of the classes that have them."""
    kind = "label" if entries[0].run.multi_label else "class"
    whose = "with its 95 % interval"
    if len(entries) > 1:
        which = "each run" if len(entries) <= figures.AREAS else f"the first {figures.AREAS} runs"
        whose = f"of {which}, in the order of the legend"
    texts = {
        "roc": f"ROC of each {kind}: the share of its images that are found, against the share of other images that "
        f"are predicted as it, for all thresholds. The title has the area (AUC) {whose}. The dotted line is guessing.",
        "precision-recall": f"Precision against recall of each {kind}, for all thresholds: the share of images "
        "predicted as it that are right, against the share of its images that are found. If it is rare, this falls "
        f"long before ROC does. The title has the mean precision {whose}. The dotted line is guessing.",
    }
    made = {"roc": curves.roc_curves, "precision-recall": curves.precision_recall_curves}
    pictures = []
    for name, text in texts.items():
        lines = [made[name](entry) for entry in entries]
        if any(curve is not None for each in lines for curve in each):
            bands = "Bands contain 95 % of resamples of the images."
            pictures.append(_picture(name, partial(figures.draw_curves, entries, lines, name), f"{text} {bands}"))
    return pictures


def _judge_trust(entries: Sequence[Entry]) -> Trust:
    """Calibration if there is a single run, and coverage of all runs."""
    judged = [entry for entry in entries if len(entry.run.predictions.part(tables.judged_part(entry.run))[1])]
    if not judged:
        return Trust([], [], [])
    pictures, sentences = [], []
    coverages = [curves.coverage(entry.run) for entry in judged]
    if len(entries) == 1:
        (entry,) = judged
        before, after, temperature = curves.reliabilities(entry.run)
        caption = (
            "Share of correct decisions against confidence, in ten bins with 95 % intervals. On the dotted line "
            "confidence equals accuracy; below it the model is too confident."
        )
        pictures.append(_picture("reliability", partial(figures.draw_reliability, entry, before, after), caption))
        scaled = None if after is None else after.error
        sentences.append(_describe_calibration(entry.run, before.error, scaled, temperature))
        sentences.append(_describe_coverage(coverages[0]))
    caption = (
        "Accuracy if unsure images are left to a person: the share of correct decisions among the most confident ones. "
        "At the right end the model decides on all images."
    )
    pictures.append(_picture("coverage", partial(figures.draw_coverage, judged, coverages), caption))
    return Trust(pictures, sentences, curves.sensitivities(entries[0].run) if len(entries) == 1 else [])


def _describe_calibration(run: Run, before: float, after: float | None, temperature: float | None) -> str:
    error = f"Confidence and accuracy differ by {100 * before:.1f} points on average (expected calibration error)"
    if after is None or temperature is None:
        return f"{error}. Without separate validation images no temperature could be fitted."
    fitted = run.calibration
    known = f"{tables.count_images(run)['val']} validation" if fitted is None else f"{fitted.images} {fitted.fitted_on}"
    direction = "too confident" if temperature > 1 else "not confident enough"
    return (
        f"{error}. On the {known} images the model is {direction}. With a temperature of {temperature:.2f}, "
        f"which changes no decision, they differ by {100 * after:.1f} points."
    )


def _describe_coverage(coverage: Coverage) -> str:
    last = len(coverage.kept) - 1
    most = [place for place in range(len(coverage.kept)) if coverage.kept[place] <= 0.8]
    place = most[-1] if most else last
    return (
        f"If the model decides on all images, {_percent(coverage.right[last])} of its decisions are right. If a person "
        f"takes the {_percent(1 - coverage.kept[place])} with the lowest confidence, {_percent(coverage.right[place])} "
        "of the others are right."
    )


def _picture_confusions(entries: Sequence[Entry]) -> list[Picture]:
    if entries[0].run.multi_label:
        return []
    caption = (
        "Predictions (columns) for the images of each class (rows), as a share of the row and as a count. "
        "A perfect model fills only the diagonal."
    )
    captions = [caption, *(f"The same for {entry.name}." for entry in entries[1:])]
    titles = ["Confusion matrix"] if len(entries) == 1 else [entry.name for entry in entries]
    drawn = zip(entries, titles, captions, strict=True)
    return [_picture("confusion", partial(figures.draw_confusion, entry, title), text) for entry, title, text in drawn]


def _picture_pseudo_labels(entries: Sequence[Entry]) -> list[Picture]:
    judged = (
        "Pseudo-labels compared with the truth, which training never sees, by epoch. Recall: the share of a class's "
        "unlabeled images that get its pseudo-label. Precision: the share of the images with this pseudo-label that "
        "are of the class."
    )
    distant = (
        "Distance between the mean predictions on unlabeled and on labeled images, class by class. "
        "Alignment should reduce it."
    )
    pictures = _picture_by_class(
        "pseudo-labels", figures.PSEUDO_LABELS, judged, entries, "pseudo_confusion", shares=True
    )
    multi_label = entries[0].run.multi_label
    figure = "pseudo_auc" if multi_label else "flip_rate"
    if summarised := [entry for entry in entries if any(row.get(figure) is not None for row in entry.run.metrics)]:
        caption = (
            "How well pseudo-labels rank images by each label: their mean AUC by epoch, by the truth that training "
            "never sees."
            if multi_label
            else "How many pseudo-labels are right, of all and as a mean over classes"
            + (", and how many of them alignment changed." if _knowing_flips(summarised) else ".")
        )
        if any(row.get(key) for entry in summarised for row in entry.run.metrics for key in figures.SUMMARY):
            pictures.append(_picture("pseudo-label-summary", partial(figures.draw_pseudo_summary, summarised), caption))
    marginals = ("labeled_marginals", "unlabeled_marginals", "aligned_marginals")
    known = _knowing(entries, *marginals)
    return pictures + ([_picture("distances", partial(figures.draw_distances, known), distant)] if known else [])


def _knowing_flips(entries: Sequence[Entry]) -> bool:
    return any(row.get("flip_rate") for entry in entries for row in entry.run.metrics)


def _picture_inside(entries: Sequence[Entry]) -> list[Picture]:
    queued = "Unlabeled images of each class in the queue, which are trained on, by epoch."
    tempered = (
        "Temperature of each class (1 aligns with the labeled marginal, 0 with a uniform one), "
        "and the share of its predictions that alignment changed to another class."
    )
    return [
        *_picture_by_class("queue", figures.QUEUE, queued, entries, "queue_counts"),
        *_picture_by_class("alignment", figures.ALIGNMENT, tempered, entries, "temperatures", "flips"),
    ]


def _picture_by_class(
    name: str, readers: figures.Readers, caption: str, entries: Sequence[Entry], *keys: str, shares: bool = False
) -> list[Picture]:
    """A figure with panels for the classes whose values change; an empty list if there are none."""
    known = _knowing(entries, *keys)
    moving = figures.find_moving(known, readers) if known else []
    if not moving:
        return []
    still = [each for i, each in enumerate(known[0].run.classes) if i not in moving]
    if still:
        caption = f"{caption} Not shown, because nothing changes: {', '.join(still)}."
    return [_picture(name, partial(figures.draw_by_class, known, readers, moving, shares=shares), caption)]


def _knowing(entries: Sequence[Entry], *keys: str) -> list[Entry]:
    """The entries whose history has all of the keys, and a positive value in one of them."""
    return [
        entry
        for entry in entries
        if all(key in entry.run.history for key in keys)
        and any((np.nan_to_num(entry.run.history[key]) > 0).any() for key in keys)
    ]


def _picture(name: str, draw: Callable[..., Figure], caption: str) -> Picture:
    """Make a picture. If it is as wide as the page, it is also drawn for a phone."""
    figure = draw()
    wide = figure.get_figwidth() * 72 > figures.HALF
    narrow = figures.to_svg(draw(narrow=True), caption) if wide else None
    return Picture(name, figures.to_svg(figure, caption), caption, wide, narrow)


def _percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")


def _mark_code(sentence: str) -> Markup:
    """Convert text between backticks to code."""
    parts = enumerate(sentence.split("`"))
    return Markup("").join(Markup("<code>{}</code>").format(part) if place % 2 else part for place, part in parts)


def _break_after_underscores(name: str) -> Markup:
    """Escaped text in which a long name may be broken after an underscore."""
    return escape(name).replace("_", Markup("_<wbr>"))


def _keep_percentages_whole(page: str) -> Markup:
    """The page with a space before each percent sign that is not broken, but not in commands, which may be copied."""
    return Markup(re.sub(r"<pre.*?</pre>|(?<=\d) %", _join_percentage, page, flags=re.DOTALL))


def _join_percentage(match: re.Match[str]) -> str:
    return "\N{NO-BREAK SPACE}%" if match[0] == " %" else match[0]


def _format_duration(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes:.0f} min" if hours < 2 else f"{hours:.1f} h"


def _format_setting(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
