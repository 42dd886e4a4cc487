"""The numbers of one run or several, with intervals, and the same as tables for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import isnan

import numpy as np
import numpy.typing as npt
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from csda import metrics
from csda.data.csv_files import JOIN
from csda.errors import RunError
from csda.runs import Run

Array = npt.NDArray[np.float64]

COLOURS = ("blue", "vermilion", "green", "pink", "amber", "sky", "olive", "grey")
"""Names of the palette, safe for colour-blind readers in this order."""

METHOD_COLOURS = {"csda": "blue", "baseline": "vermilion", "upper-bound": "grey"}
"""Methods that look the same on every page."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number and its 95 % bootstrap interval over the images it was measured on; a difference shows its sign."""

    value: float
    low: float
    high: float
    difference: bool = False

    def __str__(self) -> str:
        return "–" if isnan(self.value) else self._format(self.value)

    @property
    def interval(self) -> str:
        return "" if isnan(self.low) else f"[{self._format(self.low)}, {self._format(self.high)}]"

    def _format(self, number: float) -> str:
        return f"{number:+.3f}".replace("-", "−") if self.difference else f"{number:.3f}"

    @property
    def verdict(self) -> str:
        """Of a difference: `ahead` or `behind` where the interval leaves zero out, `unclear` where it does not."""
        return "ahead" if self.low > 0 else "behind" if self.high < 0 else "unclear"


@dataclass(frozen=True, slots=True)
class Scores:
    """How one run, or the difference of two, stands on the test images; the last three hold one entry a class.

    `prior_mca` is the control: MCA once the labeled class frequencies are divided out of the probabilities. It is None
    where the run itself did that.
    """

    auc: Estimate
    mca: Estimate
    prior_mca: Estimate | None
    recall: tuple[Estimate, ...]
    precision: tuple[Estimate, ...]
    class_auc: tuple[Estimate, ...]

    def by_class(self, *, multi_label: bool) -> tuple[Estimate, ...]:
        """What classes are compared by: recall, or AUC where an image may have several labels, since the probability of
        a rare label hardly ever reaches one half."""
        return self.class_auc if multi_label else self.recall


@dataclass(frozen=True, slots=True)
class Entry:
    """A run as it stands in a report, alone or among others."""

    run: Run
    name: str
    colour: str
    alone: bool
    scores: Scores


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a comparison: each run's value and how far the later runs are ahead of the first.

    A gap is None where the test images differ; `labeled` is None in the rows that are about all classes.
    """

    name: str
    labeled: int | None
    values: list[Estimate | None]
    gaps: list[Estimate | None]


@dataclass(frozen=True, slots=True)
class ClassCounts:
    """Images of one class in each part; `unlabeled` is None where nobody knows the truth."""

    name: str
    labeled: int
    unlabeled: int | None
    val: int
    test: int


def enter(runs: Sequence[Run]) -> list[Entry]:
    """Names and colours that tell the runs apart, and their scores."""
    classes = runs[0].classes
    for run in runs[1:]:
        if run.classes != classes:
            raise RunError(
                f"{run.folder} has the classes {', '.join(run.classes)} and {runs[0].folder} has {', '.join(classes)}: "
                "compare runs on the same data"
            )
    colours = choose_colours(str(run.config["method"]) for run in runs)
    return [
        Entry(run, name, colour, len(runs) == 1, score(run))
        for run, name, colour in zip(runs, _names(runs), colours, strict=True)
    ]


def score(run: Run) -> Scores:
    """The scores of a run at its best validation epoch."""
    images = _test_images(run)
    return _estimate_all(images.labels, images)


def score_images(labels: npt.NDArray[np.intp], probs: Array) -> Scores:
    """The scores of probabilities [N, n] on images with these labels."""
    return _estimate_all(labels, _Images(np.empty(0, np.str_), labels, probs, None))


def compare(run: Run, reference: Run) -> Scores | None:
    """How far a run is ahead of the reference, image by image; None where they were tested on different images."""
    images, reference_images = _test_images(run), _test_images(reference)
    if not (
        np.array_equal(images.ids, reference_images.ids) and np.array_equal(images.labels, reference_images.labels)
    ):
        return None
    return _estimate_all(images.labels, images, reference_images)


def compare_all(entries: Sequence[Entry]) -> list[Row]:
    """The rows of a comparison: AUC, MCA, the prior-corrected control, then the recall of each class or, where an image
    may have several labels, the AUC of each."""
    scores = [entry.scores for entry in entries]
    gaps = [compare(entry.run, entries[0].run) for entry in entries[1:]]

    def row(name: str, pick: Callable[[Scores], Estimate | None], labeled: int | None = None) -> Row:
        return Row(name, labeled, [pick(each) for each in scores], [pick(each) if each else None for each in gaps])

    rows = [row("AUC", lambda each: each.auc), row("MCA", lambda each: each.mca)]
    if all(each.prior_mca for each in scores):
        rows.append(row("MCA, prior-corrected", lambda each: each.prior_mca))
    multi_label = entries[0].run.multi_label
    return rows + [
        row(count.name, lambda each, i=i: each.by_class(multi_label=multi_label)[i], count.labeled)  # type: ignore[misc]
        for i, count in enumerate(count_classes(entries[0].run))
    ]


def count_classes(run: Run) -> list[ClassCounts]:
    """How many images of each class are in each part; an image with several labels counts for each."""
    counts: Counter[tuple[str, str]] = Counter()
    for row in run.split:
        label = run.truth.get(row.id, "") if row.split == "unlabeled" else row.label
        counts.update((row.split, name) for name in (label.split(JOIN) if run.multi_label else [label]))
    known = bool(run.truth) or count_images(run)["unlabeled"] == 0
    return [
        ClassCounts(name, labeled, unlabeled if known else None, val, test)
        for name in run.classes
        for labeled, unlabeled, val, test in [[counts[part, name] for part in ("labeled", "unlabeled", "val", "test")]]
    ]


def count_predicted(run: Run) -> list[int] | None:
    """How many unlabeled images the model takes for each class; None where there are none.

    An image with several labels counts for each.
    """
    if not count_images(run)["unlabeled"]:
        return None
    predicted = metrics.predict(np.array(list(run.pseudo_labels.values())), run.multi_label)
    counts = predicted.sum(axis=0) if run.multi_label else np.bincount(predicted, minlength=len(run.classes))
    return [int(count) for count in counts]


def count_images(run: Run) -> Counter[str]:
    """How many images are in each part."""
    return Counter(row.split for row in run.split)


def remark_split(run: Run) -> list[str]:
    """What a reader of the figures should know about the data."""
    few = [count.name for count in count_classes(run) if 0 < count.test < 10]
    caution = f"fewer than ten test images of {', '.join(few)}: a single one moves the recall far"
    return [*run.remarks, *([caution] if few else [])]


def run_table(run: Run) -> Table:
    """One run for the terminal: each class, and their means, which are MCA and AUC.

    Where an image may have several labels MCA has the recall of their absence in it, and is no mean of the column.
    """
    (entry,) = enter([run])
    scores = entry.scores
    last = run.config.get("choose") == "last"
    epoch = "after its last epoch" if last else f"at its best validation epoch, {run.result['best_epoch']}"
    table = title_table(f"{entry.name} {epoch}")
    for heading in ("labels", "recall", "precision", "AUC"):
        table.add_column(heading, justify="right", no_wrap=True)
    for count, recall, precision, auc in zip(
        count_classes(run), scores.recall, scores.precision, scores.class_auc, strict=True
    ):
        cells = (str(count.labeled), terse(recall), terse(precision), terse(auc))
        table.add_row(Text(count.name), *map(Text, cells))
    table.add_section()
    table.add_row(
        "MCA, AUC" if run.multi_label else "mean",
        *map(Text, ("", terse(scores.mca), "", terse(scores.auc))),
        style="bold",
    )
    for name, figures in run.result.get("control", {}).items():
        figures = {each: "–" if value is None else f"{value:.3f}".replace("0.", ".") for each, value in figures.items()}
        table.add_row(f"{name.replace('_', ' ')}, for comparison", "", figures["mca"], "", figures["auc"])
    return table


def comparison_table(runs: Sequence[Run]) -> Table:
    """Several runs side by side for the terminal; differences are to the first."""
    entries = enter(runs)
    each = "the AUC of each label" if runs[0].multi_label else "the recall of each class"
    table = title_table(f"AUC, MCA and {each} (labels)")
    for name in [entry.name for entry in entries] + [f"{entry.name} − {entries[0].name}" for entry in entries[1:]]:
        table.add_column(Text(name), justify="right", no_wrap=True)
    styles = {"ahead": "green", "behind": "red", "unclear": "dim"}
    rows = compare_all(entries)
    for i, row in enumerate(rows):
        name = row.name if row.labeled is None else f"{row.name} ({row.labeled})"
        cells = [Text(terse(value) if value else "") for value in row.values]
        cells += [Text(terse(gap), styles[gap.verdict]) if gap else Text("other images", "dim") for gap in row.gaps]
        table.add_row(Text(name), *cells, end_section=row.labeled is None and rows[i + 1].labeled is not None)
    return table


def title_table(title: str) -> Table:
    caption = "95 % bootstrap intervals over test images"
    table = Table(title=Text(title), caption=caption, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("", overflow="fold")
    return table


def terse(estimate: Estimate) -> str:
    """Without the zero before the point, so that a comparison of two fits into 80 columns."""
    return f"{estimate} {estimate.interval}".replace("0.", ".").rstrip()


@dataclass(frozen=True, slots=True)
class _Images:
    """The test images of a run, sorted by id; `corrected` are the probabilities divided by the class frequencies."""

    ids: npt.NDArray[np.str_]
    labels: npt.NDArray[np.intp]
    probs: Array
    corrected: Array | None


def _test_images(run: Run) -> _Images:
    predictions = run.predictions
    (chosen,) = np.nonzero(predictions.splits == "test")
    ids = np.asarray(predictions.ids)[chosen]
    chosen = chosen[np.argsort(ids)]
    probs, corrected = predictions.probs[chosen], None
    if run.config["prior_correction"] == "none":
        labeled = np.array([count.labeled for count in count_classes(run)])
        frequencies = labeled / count_images(run)["labeled"]
        corrected = metrics.prior_corrected(probs, frequencies, multi_label=run.multi_label)
    return _Images(np.sort(ids), predictions.labels[chosen], probs, corrected)


def _estimate_all(labels: npt.NDArray[np.intp], *models: _Images) -> Scores:
    """The scores of one model, or how far the first is ahead of the second."""
    probs = [model.probs for model in models]
    corrected = [model.corrected for model in models if model.corrected is not None]

    def estimate(metric: Callable[..., Array], probs: Sequence[Array] = probs) -> tuple[Estimate, ...]:
        """One for each class, or one in all."""

        def measure(*probs: Array, weights: Array) -> Array:
            own, *reference = (metric(each, labels, weights) for each in probs)
            return own - reference[0] if reference else own

        (values,) = measure(*probs, weights=np.ones((1, len(labels))))
        strata = None if labels.ndim == 2 else labels
        bounds = metrics.bootstrap_interval(measure, *probs, strata=strata)
        columns = np.stack([values, *bounds]).reshape(3, -1).T
        return tuple(Estimate(value, low, high, len(models) > 1) for value, low, high in columns)

    (auc,), (mca,) = estimate(metrics.auc), estimate(metrics.mca)
    prior_mca = estimate(metrics.mca, corrected)[0] if len(corrected) == len(models) else None
    by_class = (estimate(metric) for metric in (metrics.recall, metrics.precision, metrics.per_class_auc))
    return Scores(auc, mca, prior_mca, *by_class)


def _names(runs: Sequence[Run]) -> list[str]:
    """The method, with the seed where methods repeat, or the folder where that is not enough either."""
    methods = [str(run.config["method"]) for run in runs]
    seeded = [f"{method}, seed {run.config['seed']}" for method, run in zip(methods, runs, strict=True)]
    return next(
        (names for names in (methods, seeded) if len(set(names)) == len(names)), [run.folder.name for run in runs]
    )


def choose_colours(names: Iterable[str], order: Sequence[str] = COLOURS) -> list[str]:
    """A colour a name: a method's own where it is free, else the next free one; past eight they begin anew."""
    colours: list[str] = []
    for name in names:
        least = min(colours.count(colour) for colour in order)
        free = [colour for colour in order if colours.count(colour) == least]
        reserved = METHOD_COLOURS.get(name)
        unclaimed = [colour for colour in free if colour not in METHOD_COLOURS.values()]
        colours.append(reserved if reserved in free else (unclaimed or free)[0])
    return colours
