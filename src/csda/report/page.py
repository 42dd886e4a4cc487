"""The report: one HTML file that needs nothing else, for one run or for several side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isnan
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from csda.report import curves, figures, tables
from csda.report.curves import Coverage
from csda.report.gallery import Gallery, collect, collect_disputes
from csda.report.tables import Entry, Estimate
from csda.runs import Run, open_run, seal, write_whole

LAST = 20
"""Epochs over which the steadier figures are means."""

LARGEST = 5_000_000
"""Bytes of a page; images are left out of one that would have more."""

UNKNOWN = "–"
"""What stands for a setting that a run does not have."""

NO_IMAGES = Gallery([], [], [], [])


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure, the sentence that says how to read it, and where it is a wide one the same for a narrow page."""

    name: str
    svg: Markup
    caption: str
    wide: bool
    narrow: Markup | None


@dataclass(frozen=True, slots=True)
class Trust:
    """What probabilities are worth: pictures, a sentence about them, and sensitivities of a task of two classes."""

    pictures: list[Picture]
    sentences: list[str]
    sensitivities: list[tuple[float, list[Estimate]]]


def write_report(run_folder: Path, *, images: bool = True) -> Path:
    """Write `report.html` into a run's folder, and its pictures into `figures/`; without images where they may not
    leave."""
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
    # Of very many classes even small pictures add up; a page that nobody can send is useless.
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
    """Write one page about several runs on the same data; differences are to the first."""
    runs = [open_run(folder) for folder in run_folders]
    entries = tables.enter(runs)
    rows = tables.compare_all(entries)
    differing = _list_differing([run.config for run in runs])
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
        "differing": {key: values for key, values in differing.items() if UNKNOWN not in values},
        "lacking": {key: values for key, values in differing.items() if UNKNOWN in values},
        "machines": _list_differing([_machine(run) for run in runs]),
        "machine": _common([_machine(run) for run in runs]),
    }
    template = open_environment().get_template("comparison.html")
    page = template.render(content, disputes=disputes)
    if len(page.encode()) >= LARGEST:
        page = template.render(content, disputes=[])
    return write_whole(out, seal(page))


def open_environment() -> Environment:
    """What renders the pages."""
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
    environment.filters["thousands"] = "{:,}".format
    environment.filters["number"] = lambda value: "–" if value is None else f"{value:.3f}"
    return environment


def _describe_run(entry: Entry) -> str:
    """What the run achieved, in two sentences for a reader who has never heard of AUC."""
    run, scores = entry.run, entry.scores
    images = tables.count_images(run)
    others = f" and {images['unlabeled']:,} unlabeled" if images["unlabeled"] else ""
    kind = "label" if run.multi_label else "class"
    part = tables.judged_part(run)
    summary = (
        f"Given {images['labeled']:,} labeled{others} images and tried on {images[part]:,} {tables.PART_NAMES[part]} "
        f"images: shown an image of a {kind} and one that is not, the model tells which is which "
        f"{_percent(scores.auc.value)} of the time"
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
            sentences.append(f"{entry.name} was tested on other images than {reference}, so no difference is given.")
        else:
            sentences.append(
                f"Compared with {reference}, {entry.name} is {_judge('MCA', gaps['MCA'])} "
                f"and {_judge('AUC', gaps['AUC'])}."
            )
        sentences += _describe_labels(entry, entries[0])
    return sentences


def _describe_labels(entry: Entry, reference: Entry) -> list[str]:
    """What a run had more or fewer labels of, where it had."""
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
    """The controls that stand beside the number, and what one run cannot tell."""
    run, scores, sentences = entry.run, entry.scores, []
    if scores.prior_mca is not None and not isnan(scores.prior_mca.value):
        gain = 100 * (scores.prior_mca.value - scores.mca.value)
        sentences.append(
            "A control that needs no unlabeled image: dividing the probabilities by how frequent each class is among "
            f"the labels gives an MCA of {' '.join([str(scores.prior_mca), scores.prior_mca.interval]).strip()}, "
            f"{_signed(gain)} points."
        )
    for name, figures_of in (run.result.get("control") or {}).items():
        known = [f"{key.upper()} {value:.3f}" for key, value in figures_of.items() if value is not None]
        if known:
            sentences.append(f"Another control, {name.replace('_', ' ')} on frozen features: {' and '.join(known)}.")
    # Not of a short run's first epochs, which rise.
    rows = run.metrics[-min(LAST, (len(run.metrics) + 1) // 2) :]
    last = [row["test_mca"] for row in rows if row.get("test_mca") is not None]
    moved = (
        f" Over the last {len(last)} epochs alone MCA moved between {min(last):.3f} and {max(last):.3f}."
        if len(last) > 1
        else ""
    )
    sentences.append(
        f"This is one seed on one split. The intervals say how much the {tables.PART_NAMES[tables.judged_part(run)]} "
        f"images matter, not what another seed, split or choice of the epoch would give.{moved}"
    )
    return sentences


def _signed(points: float) -> str:
    return f"{points:+.1f}".replace("-", "−")


def _describe_making(run: Run) -> dict[str, dict[str, Any]]:
    """Headings with settings; what was left at None is left out."""
    config = dict(run.config)
    method_settings = config.pop("method_settings")
    sections = {"Run": config, f"Settings of {config['method']}": method_settings}
    return {
        heading: {key: value for key, value in items.items() if value is not None}
        for heading, items in sections.items()
        if items
    }


def _machine(run: Run) -> dict[str, Any]:
    """What is known of where and with what a run was made, except for what the page says elsewhere."""
    elsewhere = ("command", "classes", "multi_label", "remarks")
    return {key: value for key, value in run.environment.items() if key not in elsewhere}


def _list_differing(settings: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """The settings in which runs differ, with the value of each; those of methods stand among them."""
    flat = [{**each, **each.get("method_settings", {})} for each in settings]
    keys = dict.fromkeys(key for each in flat for key in each if key != "method_settings")
    rows = {key: [UNKNOWN if each.get(key) is None else _format_setting(each[key]) for each in flat] for key in keys}
    return {key: values for key, values in rows.items() if len(set(values)) > 1}


def _common(settings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What all have in common, except for what is unknown."""
    first, *others = settings
    return {
        key: value
        for key, value in first.items()
        if value is not None and all(other.get(key) == value for other in others)
    }


def _picture_classes(entries: Sequence[Entry]) -> list[Picture]:
    if entries[0].run.multi_label:
        caption = (
            "How well the model ranks images by each label, with its 95 % interval, where 0.5 is guessing: "
            "rare labels stand at the bottom, and wide bars mean few test images that have it."
        )
    else:
        caption = (
            "Share of each class's images that the model recognises, with its 95 % interval: "
            "rare classes stand at the bottom, and wide bars mean few test images."
        )
    return [_picture("classes", partial(figures.draw_classes, entries), caption)]


def _picture_learning(entries: Sequence[Entry]) -> list[Picture]:
    texts = {
        "auc": f"How well the model ranks images, after each epoch; the dot is {_describe_choice(entries)}.",
        "mca": "Mean share of each class recognised, after each epoch; the dot is the same epoch.",
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
    """Which epoch the model of each run is of."""
    kinds = {tables.keeps_last(entry.run) for entry in entries}
    if kinds == {True}:
        return "the last epoch, whose model is kept"
    if kinds == {False}:
        return "the epoch with the best validation AUC, whose model is kept"
    last = ", ".join(entry.name for entry in entries if tables.keeps_last(entry.run))
    return f"the epoch whose model is kept, the last one of {last} and that of the best validation AUC of the others"


def _picture_ranking(entries: Sequence[Entry]) -> list[Picture]:
    """ROC and precision-recall curves of the classes that have them."""
    kind = "label" if entries[0].run.multi_label else "class"
    texts = {
        "roc": f"ROC of each {kind}: as the threshold falls, the share of its images that are found against the share "
        "of the others that are taken for it. In the title the area, AUC, and its 95 % interval; the dotted line is "
        "guessing.",
        "precision-recall": f"Of the images called by each {kind}, the share that is right, against the share of its "
        "images that are found: for a rare one this falls long before ROC does. In the title the mean precision; the "
        "dotted line is guessing.",
    }
    made = {"roc": curves.roc_curves, "precision-recall": curves.precision_recall_curves}
    pictures = []
    for name, text in texts.items():
        lines = [made[name](entry.run) for entry in entries]
        if any(curve is not None for each in lines for curve in each):
            bands = "Bands hold 95 % of resamples of the images."
            pictures.append(_picture(name, partial(figures.draw_curves, entries, lines, name), f"{text} {bands}"))
    return pictures


def _judge_trust(entries: Sequence[Entry]) -> Trust:
    """Reliability of a single run, and coverage of all."""
    judged = [entry for entry in entries if len(entry.run.predictions.part(tables.judged_part(entry.run))[1])]
    if not judged:
        return Trust([], [], [])
    pictures, sentences = [], []
    coverages = [curves.coverage(entry.run) for entry in judged]
    if len(entries) == 1:
        (entry,) = judged
        before, after, temperature = curves.reliabilities(entry.run)
        caption = (
            "How often a decision is right against how sure the model is, in ten steps with 95 % intervals: on the "
            "dotted line probabilities mean what they say, and below it the model is too sure."
        )
        pictures.append(_picture("reliability", partial(figures.draw_reliability, entry, before, after), caption))
        scaled = None if after is None else after.error
        sentences.append(_describe_calibration(entry.run, before.error, scaled, temperature))
        sentences.append(_describe_coverage(coverages[0]))
    caption = (
        "What is gained by leaving unsure images to a person: of the decisions of which the model is surest, this "
        "share is right. At the right end it decides alone."
    )
    pictures.append(_picture("coverage", partial(figures.draw_coverage, judged, coverages), caption))
    return Trust(pictures, sentences, curves.sensitivities(entries[0].run) if len(entries) == 1 else [])


def _describe_calibration(run: Run, before: float, after: float | None, temperature: float | None) -> str:
    error = f"Confidence and accuracy are {100 * before:.1f} points apart on average (expected calibration error)"
    if after is None or temperature is None:
        return f"{error}; without validation images apart from these no temperature could be fitted."
    fitted = run.calibration
    known = f"{tables.count_images(run)['val']} validation" if fitted is None else f"{fitted.images} {fitted.fitted_on}"
    direction = "too sure" if temperature > 1 else "not sure enough"
    return (
        f"{error}: by its {known} images the model is {direction}, and a temperature of {temperature:.2f}, "
        f"which changes no decision, makes it {100 * after:.1f}."
    )


def _describe_coverage(coverage: Coverage) -> str:
    last = len(coverage.kept) - 1
    most = [place for place in range(len(coverage.kept)) if coverage.kept[place] <= 0.8]
    place = most[-1] if most else last
    return (
        f"Deciding alone the model is right in {_percent(coverage.right[last])} of the cases; if a person takes the "
        f"{_percent(1 - coverage.kept[place])} of which it is least sure, in {_percent(coverage.right[place])} of the "
        "others."
    )


def _picture_confusions(entries: Sequence[Entry]) -> list[Picture]:
    if entries[0].run.multi_label:
        return []
    caption = (
        "What the images of each class (row) were taken for (column), as a share of the row and as a count: "
        "a perfect model fills the diagonal."
    )
    captions = [caption, *(f"The same for {entry.name}." for entry in entries[1:])]
    titles = ["Confusion matrix"] if len(entries) == 1 else [entry.name for entry in entries]
    drawn = zip(entries, titles, captions, strict=True)
    return [_picture("confusion", partial(figures.draw_confusion, entry, title), text) for entry, title, text in drawn]


def _picture_pseudo_labels(entries: Sequence[Entry]) -> list[Picture]:
    judged = (
        "Pseudo-labels against the truth, which the training never sees, epoch by epoch. Recall: the share of a "
        "class's unlabeled images that get its label. Precision: the share of the images with this label that deserve "
        "it."
    )
    distant = (
        "How far the mean prediction on unlabeled images of each class is from that on labeled ones: "
        "alignment is there to shorten it."
    )
    pictures = _picture_by_class(
        "pseudo-labels", figures.PSEUDO_LABELS, judged, entries, "pseudo_confusion", shares=True
    )
    multi_label = entries[0].run.multi_label
    figure = "pseudo_auc" if multi_label else "flip_rate"
    if summarised := [entry for entry in entries if any(row.get(figure) is not None for row in entry.run.metrics)]:
        caption = (
            "How well pseudo-labels rank images by each label, against the truth, which the training never sees: their "
            "mean AUC, epoch by epoch."
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
    queued = "Unlabeled images of each class that stand in the queue and are trained on, epoch by epoch."
    tempered = (
        "Temperature of each class (1 aligns fully with the labeled marginal, 0 with a flat one) "
        "and the share of the images predicted as it that alignment moved to another."
    )
    return [
        *_picture_by_class("queue", figures.QUEUE, queued, entries, "queue_counts"),
        *_picture_by_class("alignment", figures.ALIGNMENT, tempered, entries, "temperatures", "flips"),
    ]


def _picture_by_class(
    name: str, readers: figures.Readers, caption: str, entries: Sequence[Entry], *keys: str, shares: bool = False
) -> list[Picture]:
    """Panels of the classes in which something happens; none where nothing does."""
    known = _knowing(entries, *keys)
    moving = figures.find_moving(known, readers) if known else []
    if not moving:
        return []
    still = [each for i, each in enumerate(known[0].run.classes) if i not in moving]
    if still:
        caption = f"{caption} Left out, since nothing moves there: {', '.join(still)}."
    return [_picture(name, partial(figures.draw_by_class, known, readers, moving, shares=shares), caption)]


def _knowing(entries: Sequence[Entry], *keys: str) -> list[Entry]:
    """The entries whose history has something to show under one of the keys, and all of them."""
    return [
        entry
        for entry in entries
        if all(key in entry.run.history for key in keys)
        and any((np.nan_to_num(entry.run.history[key]) > 0).any() for key in keys)
    ]


def _picture(name: str, draw: Callable[..., Figure], caption: str) -> Picture:
    """What is as wide as the page is drawn once more for a phone."""
    figure = draw()
    wide = figure.get_figwidth() * 72 > figures.HALF
    narrow = figures.to_svg(draw(narrow=True), caption) if wide else None
    return Picture(name, figures.to_svg(figure, caption), caption, wide, narrow)


def _percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")


def _mark_code(sentence: str) -> Markup:
    """What stands between backticks, as code."""
    parts = enumerate(sentence.split("`"))
    return Markup("").join(Markup("<code>{}</code>").format(part) if place % 2 else part for place, part in parts)


def _format_duration(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes:.0f} min" if hours < 2 else f"{hours:.1f} h"


def _format_setting(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
