"""The numbers of one run or several, with intervals, and the same as tables for the terminal."""

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
"""Names of the palette, safe for colour-blind readers in this order."""

FEW = 10
"""Images of a class below which a number says little."""

METHOD_COLOURS = {"csda": "blue", "baseline": "vermilion", "upper-bound": "grey"}
"""Methods that look the same on every page."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number and its 95 % interval over the images it was measured on; a difference shows its sign.

    `count` is the number of images behind it, where it is about one class.
    """

    value: float
    low: float
    high: float
    difference: bool = False
    count: int | None = None

    @property
    def few(self) -> bool:
        """Whether so few images are behind it that one of them moves it far."""
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
        a rare label rarely reaches one half."""
        return self.class_auc if multi_label else self.recall


@dataclass(frozen=True, slots=True)
class Entry:
    """A run in a report, alone or among others."""

    run: Run
    name: str
    colour: str
    alone: bool
    scores: Scores


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a comparison: each run's value and how far the later runs are ahead of the first.

    A gap is None where the test images differ; `labeled` is None in the rows that are about all classes. `judged`
    counts the test images of the first run.
    """

    name: str
    labeled: int | None
    judged: int
    values: list[Estimate | None]
    gaps: list[Estimate | None]


@dataclass(frozen=True, slots=True)
class ClassCounts:
    """Images of one class in each part; `unlabeled` is None where the truth is unknown."""

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
    """The scores of a run at the epoch that it chose."""
    images = _judged_images(run)
    return _estimate_all(images.labels, images)


def score_images(labels: npt.NDArray[np.intp], probs: Array) -> Scores:
    """The scores of probabilities [N, n] on images with these labels."""
    return _estimate_all(labels, _Images(np.empty(0, np.str_), labels, probs, None))


def compare(run: Run, reference: Run) -> Scores | None:
    """How far a run is ahead of the reference, image by image; None where they were tested on different images."""
    images, reference_images = _judged_images(run), _judged_images(reference)
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
    """How many unlabeled images the model takes for each class; None where there are none, or no guesses yet.

    An image with several labels counts for each.
    """
    if not count_images(run)["unlabeled"] or not run.pseudo_labels:
        return None
    predicted = metrics.predict(np.array(list(run.pseudo_labels.values())), run.multi_label)
    counts = predicted.sum(axis=0) if run.multi_label else np.bincount(predicted, minlength=len(run.classes))
    return [int(count) for count in counts]


def count_images(run: Run) -> Counter[str]:
    """How many images are in each part."""
    return Counter(row.split for row in run.split)


def judged_part(run: Run) -> str:
    """The part whose images the figures are about: `test`, or `val` where there is no test part."""
    return "test" if count_images(run)["test"] else "val"


def keeps_last(run: Run) -> bool:
    """Whether the model of a run is that of its last epoch, and not of the one that was best on validation images."""
    return run.config.get("choose") == "last" or not count_images(run)["val"]


def remark_split(run: Run) -> list[str]:
    """What a reader of the figures should know about the data."""
    part = judged_part(run)
    few = [count.name for count in count_classes(run) if 0 < getattr(count, part) < FEW]
    caution = f"fewer than ten {PART_NAMES[part]} images of {', '.join(few)}: a single one moves the recall far"
    return [*run.remarks, *([caution] if few else [])]


def warn(run: Run) -> list[str]:
    """What is wrong with a run, or missing of it, the worst first; the first sentences of its table and its report."""
    part, images, name = judged_part(run), count_images(run), run.config["method"]
    kind, epochs, best = PART_NAMES[part], len(run.metrics), run.result["best_epoch"]
    probs, labels = run.predictions.part(part)
    sentences = []
    decisions = {tuple(np.atleast_1d(row)) for row in metrics.predict(probs, run.multi_label).tolist()}
    if len(probs) > 1 and len(decisions) == 1:
        (decision,) = decisions
        if run.multi_label and not any(decision):
            sentences.append(
                f"No label reaches a probability of one half on any {kind} image: the model never says that one is "
                "there, and its ranking alone, the AUC, tells anything."
            )
        elif run.multi_label:
            same = ", ".join(each for each, there in zip(run.classes, decision, strict=True) if there)
            sentences.append(f"The model gives every {kind} image the same labels, {same}.")
        else:
            sentences.append(
                f"The model takes every {kind} image for {run.classes[decision[0]]}: it tells no class from another."
            )
    if (first := first_guesses(run)) is not None and best < first:
        sentences.append(
            f"The model is that of epoch {best}, from before the first pseudo-label in epoch {first}: it has learned "
            f"from labels alone, and nothing of {name} is in it."
        )
    if not run.finished:
        of = run.config["epochs"]
        sentences.append(
            f"The run has not finished: this is what it has come to after {epochs} of {of} epochs, without "
            f"pseudo-labels and images. `csda train --out {run.folder} --resume` goes on with it."
        )
    if not images["test"]:
        chose = "" if keeps_last(run) else ", which also chose the epoch, and so are too good"
        sentences.append(f"There is no test part: the figures are about the validation images{chose}.")
    if not images["val"]:
        sentences.append("There is no validation part: the last epoch was taken, and no temperature could be fitted.")
    elif images["val"] < FEW_VALIDATION and run.config["choose"] == "best":
        sentences.append(
            f"Only {images['val']} validation images chose the epoch, which is next to chance: look at the mean over "
            "the last epochs as well."
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
    """One run for the terminal: each class, and their means, which are MCA and AUC.

    Where an image may have several labels MCA has the recall of their absence in it, and is no mean of the column.
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
        cells = (str(count.labeled), judged, _terser(recall), _terser(precision), _terser(auc))
        table.add_row(Text(count.name), *map(Text, cells))
    table.add_section()
    table.add_row(
        "MCA, AUC" if run.multi_label else "mean",
        *map(Text, ("", str(count_images(run)[part]), _terser(scores.mca), "", _terser(scores.auc))),
        style="bold",
    )
    for name, figures in run.result.get("control", {}).items():
        figures = {each: "–" if value is None else f"{value:.3f}".replace("0.", ".") for each, value in figures.items()}
        table.add_row(name.replace("_", " "), "", "", figures["mca"], "", figures["auc"])
    return table


def comparison_table(runs: Sequence[Run]) -> Table:
    """Several runs side by side for the terminal; differences are to the first."""
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
    caption = "95 % intervals over these images; few: below ten, so that one moves a figure far"
    table = Table(title=Text(title), caption=caption, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("", overflow="fold", min_width=10)
    return table


def terse(estimate: Estimate) -> str:
    """Without the zero before the point, so that a comparison of two fits into 80 columns."""
    return f"{estimate} {estimate.interval}".replace("0.", ".").rstrip()


def _terser(estimate: Estimate) -> str:
    """With two digits in the interval, so that three columns of them fit."""
    if not estimate.interval:
        return terse(estimate)
    low, high = (f"{bound:.2f}".replace("1.00", "1").replace("0.", ".") for bound in (estimate.low, estimate.high))
    return f"{str(estimate).replace('0.', '.')} [{low}, {high}]"


@dataclass(frozen=True, slots=True)
class _Images:
    """The images that a run is judged by, sorted by id; `corrected` are the probabilities divided by the class
    frequencies."""

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
        if len(labels):
            bounds = metrics.bootstrap_interval(measure, *probs, strata=strata)
        else:
            bounds = np.full((2, *np.shape(values)), np.nan)
        columns = np.stack([values, *bounds]).reshape(3, -1).T
        if len(models) == 1:
            # However the images are redrawn nothing changes, which says that there is no telling.
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
    """Which classes each image is taken for [N, n]."""
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
    """The interval of a mean of recalls, made wider where all images of a class share one fate: however they are
    redrawn, a bootstrap cannot tell that another image would have another."""
    matrix = metrics.confusion(labels, metrics.predict(probs), probs.shape[1])
    hits, counts = np.diagonal(matrix), matrix.sum(axis=1)
    if not ((counts > 0) & ((hits == 0) | (hits == counts))).any():
        return mca
    low, high = metrics.mean_interval(hits, counts)
    return replace(mca, low=float(np.fmin(mca.low, low)), high=float(np.fmax(mca.high, high)))


def _names(runs: Sequence[Run]) -> list[str]:
    """The method, with the seed where methods repeat, or the folder where that is not enough either."""
    methods = [str(run.config["method"]) for run in runs]
    seeded = [f"{method}, seed {run.config['seed']}" for method, run in zip(methods, runs, strict=True)]
    return next(
        (names for names in (methods, seeded) if len(set(names)) == len(names)), [run.folder.name for run in runs]
    )


def choose_colours(names: Iterable[str], order: Sequence[str] = COLOURS) -> list[str]:
    """A colour for each name: a method's own where it is free, else the next free one; past eight they begin again."""
    colours: list[str] = []
    for name in names:
        least = min(colours.count(colour) for colour in order)
        free = [colour for colour in order if colours.count(colour) == least]
        reserved = METHOD_COLOURS.get(name)
        unclaimed = [colour for colour in free if colour not in METHOD_COLOURS.values()]
        colours.append(reserved if reserved in free else (unclaimed or free)[0])
    return colours
