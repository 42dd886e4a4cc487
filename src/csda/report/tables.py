"""The numbers of one run or several, with intervals, also as tables for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import isnan

import numpy as np
import numpy.typing as npt
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from csda import metrics
from csda.data.csv_files import JOIN
from csda.data.splits import FEW_VALIDATION
from csda.errors import RunError
from csda.runs import Run

Array = npt.NDArray[np.float64]

PART_NAMES = {"test": "test", "val": "validation"}

COLOURS = ("blue", "vermilion", "green", "pink", "amber", "sky", "olive", "grey")
"""Names of the palette. Colour-blind readers can distinguish them in this order."""

FEW = 10
"""With fewer images of a class its figures are marked as unreliable."""

METHOD_COLOURS = {"csda": "blue", "baseline": "vermilion", "upper-bound": "grey"}
"""Methods that have the same colour on every page."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with its 95 % interval over images. A difference is written with its sign.

    `count` is the number of images that it is measured on, if it is about one class.
    """

    value: float
    low: float
    high: float
    difference: bool = False
    count: int | None = None

    @property
    def few(self) -> bool:
        """Whether it is measured on so few images that a single one changes it much."""
        return self.count is not None and 0 < self.count < FEW

    def __str__(self) -> str:
        return "–" if isnan(self.value) else self._format(self.value)

    @property
    def interval(self) -> str:
        return "" if isnan(self.low) else f"[{self._format(self.low)}, {self._format(self.high)}]"

    def _format(self, number: float) -> str:
        return f"{number:+.3f}".replace("-", "−") if self.difference else f"{number:.3f}"

    @property
    def verdict(self) -> str:
        """For a difference: `ahead` or `behind` if the interval excludes zero, else `unclear`."""
        return "ahead" if self.low > 0 else "behind" if self.high < 0 else "unclear"


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of one run on the test images, or the differences of two. The last three have one entry per class.

    `prior_mca` is the control: the MCA of probabilities that are divided by the labeled class frequencies. It is None
    if the run itself divides them.
    """

    auc: Estimate
    mca: Estimate
    prior_mca: Estimate | None
    recall: tuple[Estimate, ...]
    precision: tuple[Estimate, ...]
    class_auc: tuple[Estimate, ...]

    def by_class(self, *, multi_label: bool) -> tuple[Estimate, ...]:
        """The figure to compare classes by: recall, or AUC with several labels per image, because the probability of a
        rare label rarely reaches 0.5.
        """
        return self.class_auc if multi_label else self.recall


@dataclass(frozen=True, slots=True)
class Entry:
    """A run in a report; `alone` if it is the only one."""

    run: Run
    name: str
    colour: str
    alone: bool
    scores: Scores


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a comparison: the value of each run, and the differences of the later runs to the first.

    A difference is None if the test images differ. `labeled` is None in rows about all classes. `judged` is the number
    of test images of the first run.
    """

    name: str
    labeled: int | None
    judged: int
    values: list[Estimate | None]
    gaps: list[Estimate | None]


@dataclass(frozen=True, slots=True)
class ClassCounts:
    """Number of images of one class in each part; `unlabeled` is None if the truth is unknown."""

    name: str
    labeled: int
    unlabeled: int | None
    val: int
    test: int


def enter(runs: Sequence[Run]) -> list[Entry]:
    """Give each run a name, a colour and its scores."""
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
    """The scores of a run at its chosen epoch."""
    images = _judged_images(run)
    return _estimate_all(images.labels, images)


def score_images(labels: npt.NDArray[np.intp], probs: Array) -> Scores:
    """The scores of probabilities [N, n] on images with these labels."""
    return _estimate_all(labels, _Images(np.empty(0, np.str_), labels, probs, None))


def compare(run: Run, reference: Run) -> Scores | None:
    """The paired differences of a run to the reference; None if their test images differ."""
    images, reference_images = _judged_images(run), _judged_images(reference)
    if not (
        np.array_equal(images.ids, reference_images.ids) and np.array_equal(images.labels, reference_images.labels)
    ):
        return None
    return _estimate_all(images.labels, images, reference_images)


def compare_all(entries: Sequence[Entry]) -> list[Row]:
    """The rows of a comparison: AUC, MCA, the prior-corrected control, then the recall of each class, or the AUC of
    each label with several labels per image.
    """
    scores = [entry.scores for entry in entries]
    gaps = [compare(entry.run, entries[0].run) for entry in entries[1:]]

    run, part = entries[0].run, judged_part(entries[0].run)

    def row(
        name: str, pick: Callable[[Scores], Estimate | None], labeled: int | None = None, judged: int | None = None
    ) -> Row:
        judged = count_images(run)[part] if judged is None else judged
        return Row(
            name, labeled, judged, [pick(each) for each in scores], [pick(each) if each else None for each in gaps]
        )

    rows = [row("AUC", lambda each: each.auc), row("MCA", lambda each: each.mca)]
    if all(each.prior_mca for each in scores):
        rows.append(row("MCA, prior-corrected", lambda each: each.prior_mca))
    return rows + [
        row(
            count.name,
            lambda each, i=i: each.by_class(multi_label=run.multi_label)[i],  # type: ignore[misc]
            count.labeled,
            getattr(count, part),
        )
        for i, count in enumerate(count_classes(run))
    ]


def count_classes(run: Run) -> list[ClassCounts]:
    """Number of images of each class in each part. An image with several labels counts for each."""
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
    """Number of unlabeled images predicted as each class; None if there are none, or no pseudo-labels yet.

    An image with several labels counts for each.
    """
    if not count_images(run)["unlabeled"] or not run.pseudo_labels:
        return None
    predicted = metrics.predict(np.array(list(run.pseudo_labels.values())), run.multi_label)
    counts = predicted.sum(axis=0) if run.multi_label else np.bincount(predicted, minlength=len(run.classes))
    return [int(count) for count in counts]


def count_images(run: Run) -> Counter[str]:
    """Number of images in each part."""
    return Counter(row.split for row in run.split)


def judged_part(run: Run) -> str:
    """The part that a run is scored on: `test`, or `val` if there is no test part."""
    return "test" if count_images(run)["test"] else "val"


def keeps_last(run: Run) -> bool:
    """Whether the model of a run is that of its last epoch, instead of that of the best epoch on validation images."""
    return run.config.get("choose") == "last" or not count_images(run)["val"]


def remark_split(run: Run) -> list[str]:
    """Remarks on the data that matter for the figures."""
    part = judged_part(run)
    few = [count.name for count in count_classes(run) if 0 < getattr(count, part) < FEW]
    caution = f"fewer than ten {PART_NAMES[part]} images of {', '.join(few)}: a single one changes the recall much"
    return [*run.remarks, *([caution] if few else [])]


def warn(run: Run) -> list[str]:
    """What is wrong with a run or missing in it, the worst first. Table and report begin with these sentences."""
    part, images, name = judged_part(run), count_images(run), run.config["method"]
    kind, epochs, best = PART_NAMES[part], len(run.metrics), run.result["best_epoch"]
    probs, labels = run.predictions.part(part)
    sentences = []
    decisions = {tuple(np.atleast_1d(row)) for row in metrics.predict(probs, run.multi_label).tolist()}
    if len(probs) > 1 and len(decisions) == 1:
        (decision,) = decisions
        if run.multi_label and not any(decision):
            sentences.append(
                f"No label reaches a probability of 0.5 on any {kind} image, so the model never predicts one. Only the "
                "AUC is meaningful."
            )
        elif run.multi_label:
            same = ", ".join(each for each, there in zip(run.classes, decision, strict=True) if there)
            sentences.append(f"The model gives every {kind} image the same labels, {same}.")
        else:
            sentences.append(f"The model predicts {run.classes[decision[0]]} for every {kind} image.")
    if (first := first_guesses(run)) is not None and best < first:
        sentences.append(
            f"The model is that of epoch {best}, before the first pseudo-label in epoch {first}. It has learned from "
            f"labels alone, so its figures say nothing about {name}."
        )
    if not run.finished:
        of = run.config["epochs"]
        sentences.append(
            f"The run has not finished: these are its results after {epochs} of {of} epochs, without pseudo-labels "
            f"and images. `csda train --out {run.folder} --resume` continues it."
        )
    if not images["test"]:
        chose = "" if keeps_last(run) else " These also chose the epoch, so the figures are too good."
        sentences.append(f"There is no test part, so the figures are those of the validation images.{chose}")
    if not images["val"]:
        sentences.append("There is no validation part: the last epoch was kept, and no temperature could be fitted.")
    elif images["val"] < FEW_VALIDATION and run.config["choose"] == "best":
        sentences.append(
            f"Only {images['val']} validation images chose the epoch, so the choice is almost random. Look at the mean "
            "over the last epochs as well."
        )
    counts = count_classes(run)
    if missing := [count.name for count in counts if not getattr(count, part)] if len(labels) else []:
        sentences.append(f"No {kind} image is of {', '.join(missing)}: nothing is known about these classes.")
    if unlearned := [count.name for count in counts if not count.labeled]:
        sentences.append(f"No labeled image is of {', '.join(unlearned)}: the model cannot know these classes.")
    return sentences


def first_guesses(run: Run) -> int | None:
    """The first epoch that trained on pseudo-labels; None for a method without any."""
    used = [row["epoch"] for row in run.metrics if row.get("filled") or row.get("unlabeled_loss")]
    return min(used, default=None)


def run_table(run: Run) -> Table:
    """One run for the terminal: a row for each class, and their means, MCA and AUC.

    With several labels per image MCA also averages the recall of absence, so it is not the mean of the column.
    """
    (entry,) = enter([run])
    scores = entry.scores
    epoch = "after its last epoch" if keeps_last(run) else f"at its best validation epoch, {run.result['best_epoch']}"
    table = title_table(f"{entry.name} {epoch}")
    part = judged_part(run)
    for heading in ("labels", PART_NAMES[part], "recall", "precision", "AUC"):
        table.add_column(heading, justify="right", no_wrap=True)
    for count, recall, precision, auc in zip(
        count_classes(run), scores.recall, scores.precision, scores.class_auc, strict=True
    ):
        judged = f"{recall.count} few" if recall.few else str(getattr(count, part))
        cells = (str(count.labeled), judged, terser(recall), terser(precision), terser(auc))
        table.add_row(Text(count.name), *map(Text, cells))
    table.add_section()
    table.add_row(
        "MCA, AUC" if run.multi_label else "mean",
        *map(Text, ("", str(count_images(run)[part]), terser(scores.mca), "", terser(scores.auc))),
        style="bold",
    )
    for name, figures in run.result.get("control", {}).items():
        figures = {each: "–" if value is None else f"{value:.3f}".replace("0.", ".") for each, value in figures.items()}
        table.add_row(name.replace("_", " "), "", "", figures["mca"], "", figures["auc"])
    return table


def comparison_table(runs: Sequence[Run]) -> Table:
    """Several runs for the terminal. Differences are to the first."""
    entries = enter(runs)
    each = "the AUC of each label" if runs[0].multi_label else "the recall of each class"
    table = title_table(f"AUC, MCA and {each} (labels, {PART_NAMES[judged_part(runs[0])]} images)")
    for name in [entry.name for entry in entries] + [f"{entry.name} − {entries[0].name}" for entry in entries[1:]]:
        table.add_column(Text(name), justify="right", no_wrap=True)
    styles = {"ahead": "green", "behind": "red", "unclear": "dim"}
    rows = compare_all(entries)
    for i, row in enumerate(rows):
        few = ", few" if row.judged < FEW else ""
        name = f"{row.name} ({row.judged})" if row.labeled is None else f"{row.name} ({row.labeled}, {row.judged}{few})"
        cells = [Text(terse(value) if value else "") for value in row.values]
        cells += [Text(terse(gap), styles[gap.verdict]) if gap else Text("other images", "dim") for gap in row.gaps]
        table.add_row(Text(name), *cells, end_section=row.labeled is None and rows[i + 1].labeled is not None)
    return table


def title_table(title: str) -> Table:
    caption = "95 % intervals over these images; few: below ten, so one changes a figure much"
    table = Table(title=Text(title), caption=caption, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("", overflow="fold", min_width=10)
    return table


def terse(estimate: Estimate) -> str:
    """Format without the zero before the point, so that a comparison of two runs fits into 80 columns."""
    return f"{estimate} {estimate.interval}".replace("0.", ".").rstrip()


def terser(estimate: Estimate) -> str:
    """Format with two digits in the interval, so that three columns fit."""
    if not estimate.interval:
        return terse(estimate)
    low, high = (f"{bound:.2f}".replace("1.00", "1").replace("0.", ".") for bound in (estimate.low, estimate.high))
    return f"{str(estimate).replace('0.', '.')} [{low}, {high}]"


@dataclass(frozen=True, slots=True)
class _Images:
    """The images that a run is scored on, sorted by id; `corrected` are probabilities divided by class frequencies."""

    ids: npt.NDArray[np.str_]
    labels: npt.NDArray[np.intp]
    probs: Array
    corrected: Array | None


def _judged_images(run: Run) -> _Images:
    predictions = run.predictions
    (chosen,) = np.nonzero(predictions.splits == judged_part(run))
    ids = np.asarray(predictions.ids)[chosen]
    chosen = chosen[np.argsort(ids)]
    probs, corrected = predictions.probs[chosen], None
    if run.config["prior_correction"] == "none" and not run.config["adjust"]:
        labeled = np.array([count.labeled for count in count_classes(run)])
        frequencies = labeled / count_images(run)["labeled"]
        corrected = metrics.prior_corrected(probs, frequencies, multi_label=run.multi_label)
    return _Images(np.sort(ids), predictions.labels[chosen], probs, corrected)


def _estimate_all(labels: npt.NDArray[np.intp], *models: _Images) -> Scores:
    """The scores of one model, or the differences of the first to the second."""
    probs = [model.probs for model in models]
    corrected = [model.corrected for model in models if model.corrected is not None]

    def estimate(metric: Callable[..., Array], probs: Sequence[Array] = probs) -> tuple[Estimate, ...]:
        """One estimate for each class, or a single one."""

        def measure(*probs: Array, weights: Array) -> Array:
            own, *reference = (metric(each, labels, weights) for each in probs)
            return own - reference[0] if reference else own

        (values,) = measure(*probs, weights=np.ones((1, len(labels))))
        strata = None if labels.ndim == 2 else labels
        if len(labels):
            bounds = metrics.bootstrap_interval(measure, *probs, strata=strata)
        else:
            bounds = np.full((2, *np.shape(values)), np.nan)
        columns = np.stack([values, *bounds]).reshape(3, -1).T
        if len(models) == 1:
            # If every resample has the same value, the bootstrap gives no interval.
            columns[columns[:, 1] == columns[:, 2], 1:] = np.nan
        return tuple(Estimate(value, low, high, len(models) > 1) for value, low, high in columns)

    (auc,), (mca,) = estimate(metrics.auc), estimate(metrics.mca)
    prior_mca = estimate(metrics.mca, corrected)[0] if len(corrected) == len(models) else None
    recall, precision, class_auc = map(estimate, (metrics.recall, metrics.precision, metrics.per_class_auc))
    n = probs[0].shape[1]
    truth = labels.astype(bool) if labels.ndim == 2 else np.equal.outer(labels, np.arange(n))
    class_auc = tuple(replace(each, count=int(count)) for each, count in zip(class_auc, truth.sum(axis=0), strict=True))
    outcomes = [_hits(each, labels) for each in probs]
    recall = _with_intervals(recall, [hits & truth for hits in outcomes], [truth] * len(models))
    if len(models) == 1:
        precision = _with_intervals(precision, [outcomes[0] & truth], [outcomes[0]])
        if labels.ndim == 1:
            mca = _widened(mca, probs[0], labels)
            prior_mca = prior_mca and _widened(prior_mca, corrected[0], labels)
    return Scores(auc, mca, prior_mca, recall, precision, class_auc)


def _hits(probs: Array, labels: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
    """Which classes are predicted for each image [N, n]."""
    predicted = metrics.predict(probs, labels.ndim == 2)
    return predicted.astype(bool) if labels.ndim == 2 else np.equal.outer(predicted, np.arange(probs.shape[1]))


def _with_intervals(
    estimates: Sequence[Estimate], hits: Sequence[npt.NDArray[np.bool_]], among: Sequence[npt.NDArray[np.bool_]]
) -> tuple[Estimate, ...]:
    """Shares of the images `among` [N, n], with Wilson's intervals, or Newcombe's for the difference of two models."""
    counts = among[0].sum(axis=0)
    if len(hits) == 1:
        bounds = metrics.wilson_interval(hits[0].sum(axis=0), counts).T
    else:
        pairs = zip(hits[0].T, hits[1].T, among[0].T, strict=True)
        bounds = np.stack([metrics.difference_interval(ours[of], theirs[of]) for ours, theirs, of in pairs])
    return tuple(
        replace(each, low=float(low), high=float(high), count=int(count))
        for each, (low, high), count in zip(estimates, bounds, counts, strict=True)
    )


def _widened(mca: Estimate, probs: Array, labels: npt.NDArray[np.intp]) -> Estimate:
    """Widen the interval of a mean of recalls if all images of a class are right, or all wrong. Then the recall of this
    class is the same in every resample, and the bootstrap interval would be too narrow.
    """
    matrix = metrics.confusion(labels, metrics.predict(probs), probs.shape[1])
    hits, counts = np.diagonal(matrix), matrix.sum(axis=1)
    if not ((counts > 0) & ((hits == 0) | (hits == counts))).any():
        return mca
    low, high = metrics.mean_interval(hits, counts)
    return replace(mca, low=float(np.fmin(mca.low, low)), high=float(np.fmax(mca.high, high)))


def _names(runs: Sequence[Run]) -> list[str]:
    """Names of runs: the method, with the seed if methods repeat, or the folder if that is not unique either."""
    methods = [str(run.config["method"]) for run in runs]
    seeded = [f"{method}, seed {run.config['seed']}" for method, run in zip(methods, runs, strict=True)]
    return next(
        (names for names in (methods, seeded) if len(set(names)) == len(names)), [run.folder.name for run in runs]
    )


def choose_colours(names: Iterable[str], order: Sequence[str] = COLOURS) -> list[str]:
    """A colour for each name: the method's own if it is free, else the next free one. After eight they repeat."""
    colours: list[str] = []
    for name in names:
        least = min(colours.count(colour) for colour in order)
        free = [colour for colour in order if colours.count(colour) == least]
        reserved = METHOD_COLOURS.get(name)
        unclaimed = [colour for colour in free if colour not in METHOD_COLOURS.values()]
        colours.append(reserved if reserved in free else (unclaimed or free)[0])
    return colours
