"""The report: one HTML file that needs nothing else, for one run or for several side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from statistics import fmean
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from csda.report import figures, tables
from csda.report.tables import Entry, Estimate
from csda.runs import Run, write_whole


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure and the sentence that says how to read it."""

    svg: Markup
    caption: str
    wide: bool


def write_report(run_folder: Path) -> Path:
    """Write `report.html` into a finished run's folder."""
    run = Run(run_folder)
    (entry,) = entries = tables.enter([run])
    page = open_environment().get_template("run.html").render(
        title=f"{entry.name} on {Path(run.config['data']).name}",
        multi_label=run.multi_label,
        entry=entry,
        images=tables.count_images(run),
        counts=tables.count_classes(run),
        predicted=tables.count_predicted(run),
        remarks=tables.remark_split(run),
        summary=_describe_run(entry),
        classes=_picture_classes(entries) + _picture_confusions(entries),
        curves=_picture_curves(entries),
        pseudo_labels=_picture_pseudo_labels(entries),
        inside=_picture_inside(entries),
        making=_describe_making(run),
    )  # fmt: skip
    return write_whole(run.folder / "report.html", page)


def write_comparison(run_folders: Sequence[Path], out: Path, title: str = "Runs side by side") -> Path:
    """Write one page about several runs on the same data; differences are to the first."""
    entries = tables.enter([Run(folder) for folder in run_folders])
    rows = tables.compare_all(entries)
    runs = [entry.run for entry in entries]
    page = open_environment().get_template("comparison.html").render(
        title=title,
        multi_label=runs[0].multi_label,
        entries=entries,
        rows=rows,
        summary=_describe_comparison(entries, rows),
        counts=tables.count_classes(runs[0]),
        images=tables.count_images(runs[0]),
        remarks=list(dict.fromkeys(remark for run in runs for remark in tables.remark_split(run))),
        classes=_picture_classes(entries),
        curves=_picture_curves(entries),
        confusions=_picture_confusions(entries),
        pseudo_labels=_picture_pseudo_labels(entries),
    )  # fmt: skip
    return write_whole(out, page)


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
    environment.filters["number"] = lambda value: "–" if value is None else f"{value:.3f}"
    return environment


def _describe_run(entry: Entry) -> str:
    """What the run achieved, in two sentences for a reader who has never heard of AUC."""
    run, scores = entry.run, entry.scores
    images = tables.count_images(run)
    others = f" and {images['unlabeled']:,} unlabeled" if images["unlabeled"] else ""
    kind = "label" if run.multi_label else "class"
    summary = (
        f"Given {images['labeled']:,} labeled{others} images and tried on {images['test']:,} test images: "
        f"shown an image of a {kind} and one that is not, the model tells which is which {scores.auc.value:.0%} "
        "of the time"
    )
    by_class = scores.by_class(multi_label=run.multi_label)
    present = [(each.value, name) for each, name in zip(by_class, run.classes, strict=True) if not isnan(each.value)]
    if not present:
        return f"{summary}."
    (weakest, weakest_name), (strongest, strongest_name) = min(present), max(present)
    if run.multi_label:
        return f"{summary}, from {weakest:.0%} for {weakest_name} to {strongest:.0%} for {strongest_name}."
    return (
        f"{summary}. It recognises {fmean(value for value, _ in present):.0%} of a class's images on average, "
        f"from {weakest:.0%} of {weakest_name} to {strongest:.0%} of {strongest_name}."
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
    return sentences


def _judge(metric: str, gap: Estimate) -> str:
    value, low, high = (f"{100 * each:+.1f}".replace("-", "−") for each in (gap.value, gap.low, gap.high))
    interval = f"95 % interval {low} to {high}"
    if gap.verdict == "unclear":
        return f"not clearly different in {metric} ({value} points, {interval})"
    return f"{value[1:]} {metric} points {gap.verdict} ({interval})"


def _describe_making(run: Run) -> dict[str, dict[str, Any]]:
    """Headings with settings; what was left at None is left out."""
    config, environment = dict(run.config), dict(run.environment)
    method_settings = config.pop("method_settings")
    for key in ("command", "classes", "multi_label", "remarks"):
        environment.pop(key, None)
    sections = {"Run": config, f"Settings of {config['method']}": method_settings, "Machine": environment}
    return {
        heading: {key: value for key, value in items.items() if value is not None}
        for heading, items in sections.items()
        if items
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
    return [_picture(figures.draw_classes(entries), caption)]


def _picture_curves(entries: Sequence[Entry]) -> list[Picture]:
    texts = {
        "auc": "How well the model ranks images, after each epoch; the dot is the epoch that validation AUC chose.",
        "mca": "Mean share of each class recognised, after each epoch; the dot is the same epoch.",
    }
    return [
        _picture(figures.draw_learning_curves(entries, metric), text)
        for metric, text in texts.items()
        if any(row.get(f"val_{metric}") is not None for entry in entries for row in entry.run.metrics)
    ]


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
    return [_picture(figures.draw_confusion(entry, title), text) for entry, title, text in drawn]


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
    pictures = _picture_known(figures.draw_pseudo_labels, judged, entries, "pseudo_confusion")
    multi_label = entries[0].run.multi_label
    figure = "pseudo_auc" if multi_label else "flip_rate"
    if summarised := [entry for entry in entries if any(row.get(figure) is not None for row in entry.run.metrics)]:
        caption = (
            "How well pseudo-labels rank images by each label, against the truth, which the training never sees: their "
            "mean AUC, epoch by epoch."
            if multi_label
            else "How many pseudo-labels are right, and how many of them alignment changed."
        )
        pictures.append(_picture(figures.draw_pseudo_summary(summarised), caption))
    marginals = ("labeled_marginals", "unlabeled_marginals", "aligned_marginals")
    return pictures + _picture_known(figures.draw_distances, distant, entries, *marginals)


def _picture_inside(entries: Sequence[Entry]) -> list[Picture]:
    queued = "Unlabeled images of each class that stand in the queue and are trained on, epoch by epoch."
    tempered = (
        "Temperature of each class (1 aligns fully with the labeled marginal, 0 with a flat one) "
        "and the share of the images predicted as it that alignment moved to another."
    )
    return [
        *_picture_known(figures.draw_queue, queued, entries, "queue_counts"),
        *_picture_known(figures.draw_alignment, tempered, entries, "temperatures", "flips"),
    ]


def _picture_known(
    draw: Callable[[list[Entry]], Figure], caption: str, entries: Sequence[Entry], *keys: str
) -> list[Picture]:
    """A picture of the entries whose history has something to show under all the keys; none where no entry has."""
    known = [
        entry
        for entry in entries
        if all(key in entry.run.history and (entry.run.history[key] > 0).any() for key in keys)
    ]
    return [_picture(draw(known), caption)] if known else []


def _picture(figure: Figure, caption: str) -> Picture:
    return Picture(figures.to_svg(figure, caption), caption, wide=figure.get_figwidth() * 72 > figures.HALF)


def _format_duration(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes:.0f} min" if hours < 2 else f"{hours:.1f} h"


def _format_setting(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
