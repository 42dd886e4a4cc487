"""The images of a run or a folder that may be labeled, the predictions for them, and the decisions on them.

Images of the validation and test parts are never included. The truth about unlabeled images is not read, even if a run
has it on disk.
"""

from __future__ import annotations

import getpass
import json
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from csda.data import load_dataset
from csda.data.csv_files import clean_names
from csda.data.decisions import Decision, DecisionLog, Entry
from csda.data.folder import load_unlabeled
from csda.data.prepared import load_configured
from csda.data.records import Dataset, Record, encode_labels
from csda.data.reviewed import REVIEW_FILE, read_review
from csda.data.splits import label_text, parse_label
from csda.errors import ConfigError, DataError, explained
from csda.files import write_whole
from csda.metrics import decide, predict, wilson_interval
from csda.review import ordering
from csda.review.ordering import Pool
from csda.runs import Run

Floats = npt.NDArray[np.float64]

STATES = ("open", "labeled", "skipped", "flagged")
_STATE_OF = {"label": 1, "skip": 2, "flag": 3}
LISTS = ("unlabeled", "given")
MOST_AT_ONCE = 500
"""Largest number of images on a page, and of images that get a label together."""


@dataclass(frozen=True, slots=True)
class Said:
    """Predictions of a model for images: probabilities [N, n], and if available those after alignment, or of a second
    model.
    """

    probs: Floats
    aligned: Floats | None = None
    second: Floats | None = None

    @property
    def other(self) -> Floats | None:
        """The predictions to measure disagreement with."""
        return self.second if self.aligned is None else self.aligned


@dataclass(frozen=True, slots=True)
class Filter:
    """Which images of a list to show; `predicted` is a class, `low` and `high` limit the confidence."""

    state: str | None = None
    predicted: int | None = None
    low: float = 0.0
    high: float = 1.0
    search: str = ""


@dataclass(slots=True)
class Listing:
    """The images of one list, by their numbers in the session: images to label, or images with a given label."""

    numbers: npt.NDArray[np.intp]
    pool: Pool
    sequences: dict[str, tuple[npt.NDArray[np.intp], npt.NDArray[np.bool_]]] = field(default_factory=dict)

    def sequence(self, order: str) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
        """Numbers in the order of display, and which of them are audited."""
        if order not in self.sequences:
            ranked = ordering.rank(order, self.pool)
            if self.pool.probs is None or self.pool.given is not None:
                shown, audited = ranked, np.zeros(len(ranked), dtype=bool)
            else:
                shown, audited = ordering.interleave(ranked, ordering.audit_order(self.pool.names))
            self.sequences[order] = self.numbers[shown], audited
        return self.sequences[order]


class Session:
    """Everything that the page shows and changes. Methods may be called from several threads."""

    def __init__(
        self,
        title: str,
        dataset: Dataset,
        records: Sequence[Record],
        given: Sequence[bool],
        folder: Path,
        *,
        said: Said | None = None,
        who: str | None = None,
    ) -> None:
        """`records` are the images that may be shown, and `given` says which of them have a label from the beginning.
        `said` has predictions for all of them, in their order.
        """
        self.title, self.dataset, self.folder = title, dataset, folder
        self.classes, self.multi_label = dataset.classes, dataset.multi_label
        self.records = tuple(records)
        self.names = [record.id for record in self.records]
        # A folder that is named after its class would reveal the label of an image to label.
        known = {record.id for record in dataset.records if record.label is not None}
        self.shown_names = [
            name if is_given or name not in known else name.rpartition("/")[2]
            for name, is_given in zip(self.names, given, strict=True)
        ]
        self.folded = [name.casefold() for name in self.shown_names]
        self.number_of = {name: number for number, name in enumerate(self.names)}
        self.given = np.array(given, dtype=bool)
        self.who = (who if who is not None else _user()).translate({ord(each): " " for each in "\r\n\0"})[:100]
        self.lock = threading.RLock()
        self.features: npt.NDArray[np.float32] | None = None
        self.log = DecisionLog(folder)
        self.state = np.zeros(len(self.records), dtype=np.int8)
        for image in self.log.all_current():
            self._note(image)
        self.listings: dict[str, Listing] = {}
        self.audited: npt.NDArray[np.bool_] = np.zeros(len(self.records), dtype=bool)
        self.tell(said)

    # Predictions

    def tell(self, said: Said | None) -> None:
        """Store new predictions, and discard the orders that were computed from earlier ones."""
        with self.lock:
            self._tell(said)

    def _tell(self, said: Said | None) -> None:
        self.said = said
        if said is None:
            self.predicted: list[int | tuple[int, ...]] = []
            self.confidence = np.full(len(self.records), np.nan)
        else:
            self.predicted = decide(said.probs, self.multi_label)
            certain = np.maximum(said.probs, 1 - said.probs).min(axis=1) if self.multi_label else said.probs.max(axis=1)
            self.confidence = certain
        counts = self._counts()
        labeled = None if self.features is None else self.features[self.given | (self.state == 1)]
        groups = {self.records[number].group for number in np.flatnonzero(self.given | (self.state == 1))}
        listings = {}
        for name in LISTS:
            (numbers,) = np.nonzero(self.given == (name == "given"))
            pool = Pool(
                [self.names[number] for number in numbers],
                None if said is None or self._unsaid(name, said.probs[numbers]) else said.probs[numbers],
                counts,
                self.multi_label,
                None if said is None or said.other is None or name == "given" else said.other[numbers],
                None if self.features is None or name == "given" else self.features[numbers],
                labeled,
                encode_labels([self.records[number].label for number in numbers], len(self.classes), self.multi_label)
                if name == "given"
                else None,
                [self.records[number].group for number in numbers],
                groups,
            )
            listings[name] = Listing(numbers, pool)
        self.listings = listings
        offered = self.listings["unlabeled"]
        if said is not None and len(offered.numbers):
            sample = ordering.audit_order(offered.pool.names)
            self.audited[offered.numbers[sample[: len(sample) // ordering.AUDIT_EVERY]]] = True

    @staticmethod
    def _unsaid(name: str, probs: Floats) -> bool:
        """Whether a list has too few predictions to be ordered by them."""
        known = np.isfinite(probs).all(axis=1)
        return not (known.any() if name == "given" else known.all())

    def orders(self, name: str) -> list[str]:
        return self.listings[name].pool.orders()

    def default_order(self, name: str) -> str:
        """The first order of a list."""
        known = self.orders(name)
        return next(order for order in ordering.DEFAULTS if order in known)

    def known_labels(self) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.int64]]:
        """Positions of the images that have a label now, and these labels: decided ones, else given ones."""
        index = {name: position for position, name in enumerate(self.classes)}
        positions: list[int] = []
        labels: list[Any] = []
        with self.lock:
            decided = self.log.all_current()
        for number, (name, record) in enumerate(zip(self.names, self.records, strict=True)):
            decision = decided.get(name)
            label = record.label if self.given[number] else None
            if decision is not None and decision.action == "label":
                label = parse_label(decision.label, index, self.multi_label, str(self.log.path))
            if label is not None and not (decision is not None and decision.action == "flag"):
                positions.append(number)
                labels.append(label)
        return np.array(positions, dtype=np.intp), encode_labels(labels, len(self.classes), self.multi_label)

    def _counts(self) -> npt.NDArray[np.int64]:
        """The number of labels of each class so far, given or decided."""
        counts = np.zeros(len(self.classes), dtype=np.int64)
        index = {name: position for position, name in enumerate(self.classes)}
        for record, given in zip(self.records, self.given, strict=True):
            if given and record.label is not None:
                counts[[*record.label] if isinstance(record.label, tuple) else record.label] += 1
        for text, number in self.log.tally().items():
            for name in text.split("|"):
                if name in index:
                    counts[index[name]] += number
        return counts

    # Pages

    def page(
        self, name: str, order: str, chosen: Filter, after: int, limit: int
    ) -> tuple[list[tuple[int, int]], int | None, int]:
        """Images in an order as (place, number), from those after a place; where the next page begins; the number of
        matches.
        """
        listing = self.listings[name]
        if order not in listing.pool.orders():
            raise ConfigError(f"no order {order!r} here; choose one of {', '.join(listing.pool.orders())}")
        with self.lock:
            numbers, _ = listing.sequence(order)
            matching = self._matches(numbers, chosen)
            places = np.flatnonzero(matching)
        begin = int(np.searchsorted(places, after, side="right"))
        shown = places[begin : begin + limit]
        following = int(shown[-1]) if begin + limit < len(places) else None
        return [(int(place), int(numbers[place])) for place in shown], following, len(places)

    def _matches(self, numbers: npt.NDArray[np.intp], chosen: Filter) -> npt.NDArray[np.bool_]:
        matching = np.ones(len(numbers), dtype=bool)
        if chosen.state is not None:
            matching &= self.state[numbers] == STATES.index(chosen.state)
        if self.said is not None:
            if chosen.predicted is not None:
                matching &= self._is_predicted(chosen.predicted)[numbers]
            confidence = self.confidence[numbers]
            matching &= ~((confidence < chosen.low) | (confidence > chosen.high))
        if chosen.search:
            wanted = chosen.search.casefold()
            matching &= np.fromiter((wanted in self.folded[number] for number in numbers), bool, len(numbers))
        return matching

    def _is_predicted(self, position: int) -> npt.NDArray[np.bool_]:
        assert self.said is not None
        found = predict(self.said.probs, self.multi_label)
        return np.asarray(found[:, position] == 1 if self.multi_label else found == position)

    def label_texts(self, number: int) -> dict[str, str | None]:
        """The given label, the decided label and the predicted label of an image."""
        record, decision = self.records[number], self.log.current(self.names[number])
        known = self.said is not None and bool(np.isfinite(self.confidence[number]))
        return {
            "given": label_text(record.label, self.classes) if self.given[number] else None,
            "label": decision.label if decision is not None and decision.action == "label" else None,
            "predicted": label_text(self.predicted[number], self.classes) if known else None,
        }

    def neighbours(self, number: int, count: int = 6) -> list[dict[str, Any]]:
        """The labeled images that are nearest in feature space, the nearest first."""
        if self.features is None:
            return []
        with self.lock:
            labeled = np.flatnonzero(self.given | (self.state == 1))
        labeled = labeled[labeled != number]
        found, similarity = ordering.neighbours(self.features[number], self.features[labeled], count)
        texts = [self.label_texts(int(labeled[place])) for place in found]
        return [
            {
                "number": int(labeled[place]),
                "name": self.shown_names[labeled[place]],
                "label": text["label"] or text["given"] or "",
                "similarity": float(value),
            }
            for place, value, text in zip(found, similarity, texts, strict=True)
        ]

    # Decisions

    def decide(
        self, numbers: Sequence[int], action: str, label: Sequence[int], labels: Sequence[Sequence[int]] | None = None
    ) -> list[Decision]:
        """Store one decision on some images, with one label for all or with `labels` for each. It is on disk when this
        returns.
        """
        wanted = dict(zip(numbers, labels or [label] * len(numbers), strict=True))
        if action == "label" and not self.multi_label and any(len(each) != 1 for each in wanted.values()):
            raise ConfigError("give one class")
        with self.lock:
            entries = [
                Entry(
                    self.names[number],
                    action,  # type: ignore[arg-type]
                    self._text(each) if action == "label" else "",
                    said=self.label_texts(number)["predicted"] or "",
                    confidence=float(self.confidence[number]) if np.isfinite(self.confidence[number]) else None,
                    audit=bool(self.audited[number]),
                )
                for number, each in wanted.items()
            ]
            return self._keep(entries)

    def _text(self, label: Sequence[int]) -> str:
        return label_text(tuple(sorted(set(label))) if self.multi_label else label[0], self.classes)

    def undo(self) -> list[Decision]:
        """Undo the latest decision, with all decisions that were made together with it."""
        with self.lock:
            entries = [Entry(each.image, "undo", undoes=each.number) for each in self.log.last_batch()]
            return self._keep(entries) if entries else []

    def _keep(self, entries: Sequence[Entry]) -> list[Decision]:
        decisions = self.log.append(entries, self.who)
        for image in {each.image for each in decisions}:
            self._note(image)
        return decisions

    def _note(self, image: str) -> None:
        # A decision on an image that is no longer in the session is kept in the file, and ignored here.
        if image in self.number_of:
            decision = self.log.current(image)
            self.state[self.number_of[image]] = 0 if decision is None else _STATE_OF[decision.action]

    # Figures

    def tally(self) -> dict[str, Any]:
        """The numbers of decided and given labels of each class, and the number of images of each list in
        each state."""
        with self.lock:
            decided = {image: each for image, each in self.log.all_current().items() if image in self.number_of}
            labels = Counter(
                name for each in decided.values() if each.action == "label" for name in each.label.split("|")
            )
            states = {name: Counter(self.state[each.numbers].tolist()) for name, each in self.listings.items()}
        given: Counter[str] = Counter()
        for record, is_given in zip(self.records, self.given, strict=True):
            if is_given:
                given.update(label_text(record.label, self.classes).split("|"))
        return {
            "classes": [{"name": name, "labeled": labels[name], "given": given[name]} for name in self.classes],
            "states": {
                name: {state: counted[place] for place, state in enumerate(STATES)} for name, counted in states.items()
            },
            "decisions": len(self.log.decisions),
        }

    def audit(self) -> dict[str, Any]:
        """Accuracy of the predictions on images that were drawn at random and then labeled.

        The prediction is the one that labels.csv has for the decision.
        """
        with self.lock:
            judged = [
                each
                for image, each in self.log.all_current().items()
                if each.audit == "yes" and each.action == "label" and each.said and image in self.number_of
            ]
        rows = []
        for name in (None, *self.classes):
            own = [each for each in judged if name is None or name in each.said.split("|")]
            if name is not None and self.multi_label:
                right = sum(name in each.label.split("|") for each in own)
            else:
                right = sum(each.said == each.label for each in own)
            low, high = wilson_interval(np.array(right), np.array(len(own)))
            rows.append(
                {
                    "name": name,
                    "right": right,
                    "count": len(own),
                    "low": None if np.isnan(low) else float(low),
                    "high": None if np.isnan(high) else float(high),
                }
            )
        return {"all": rows[0], "classes": rows[1:], "every": ordering.AUDIT_EVERY}

    def close(self) -> None:
        self.log.close()


def open_run(folder: Path, who: str | None = None) -> Session:
    """The unlabeled and the labeled images of a finished run, with the predictions of its best model for the unlabeled
    ones.
    """
    run = Run(folder)
    dataset = load_configured(run.settings)
    if dataset.classes != run.classes or dataset.multi_label != run.multi_label:
        raise DataError(f"{run.settings.data}: not the classes of {folder}; name the data that the run was trained on")
    by_id = {record.id: record for record in dataset.records}
    index = {name: position for position, name in enumerate(run.classes)}
    pseudo_labels, unknown = run.pseudo_labels, np.full(len(run.classes), np.nan)
    records, given, probs = [], [], []
    for row in run.split:
        if row.split not in ("labeled", "unlabeled"):
            continue
        if row.id not in by_id:
            raise DataError(f"{run.settings.data}: has no image {row.id!r}, which {folder} was trained on; restore it")
        label = (
            parse_label(row.label, index, run.multi_label, str(folder / "split.csv"))
            if row.split == "labeled"
            else None
        )
        # A label that the source has for an unlabeled image is not used.
        records.append(Record(row.id, by_id[row.id].path, label, by_id[row.id].group))
        given.append(row.split == "labeled")
        probs.append(pseudo_labels.get(row.id, unknown))
    said = None
    if pseudo_labels:
        values = np.stack(probs)
        said = Said(values, align_by_history(run, values))
    title = f"{run.settings.method} on {Path(run.settings.data).name}"
    return Session(title, dataset, records, given, folder, said=said, who=who)


def align_by_history(run: Run, probs: Floats) -> Floats | None:
    """Eq. (10) with the marginals of the best epoch; None for methods without class-specific alignment."""
    needed = ("labeled_marginals", "unlabeled_marginals", "temperatures")
    if any(name not in run.history for name in needed):
        return None
    labeled, unlabeled, temperatures = (run.history[name][run.result["best_epoch"] - 1] for name in needed)
    if not all(np.isfinite(array).all() for array in (labeled, unlabeled, temperatures)):
        return None
    import torch

    from csda.alignment import align, temper

    values = np.stack([1 - probs, probs], axis=-1) if run.multi_label else probs
    known = np.isfinite(probs).all(axis=1)
    q, x, u, t = (torch.from_numpy(np.asarray(each, np.float64)) for each in (values, labeled, unlabeled, temperatures))
    aligned = align(q[torch.from_numpy(known)], temper(x, t), u).numpy()
    result = np.full_like(probs, np.nan)
    result[known] = aligned[..., 1] if run.multi_label else aligned
    return result


def open_folder(
    data: Path, folder: Path, classes: Sequence[str] = (), who: str | None = None, source: str | None = None
) -> Session:
    """The images of a folder before any training. Decisions are stored in `folder`.

    With `classes` the images need no labels. Images in validation or test parts of the source are left out.
    """
    known = _recall(data, folder, classes, source)
    if known["classes"] is not None:
        dataset = load_unlabeled(data, known["classes"])
    else:
        try:
            dataset = load_dataset(data, known["source"])
        except DataError as error:
            raise DataError(f"{error}; images without labels can be reviewed with --classes a,b,c") from None
    if dataset.draw is not None:
        raise ConfigError(f"{data}: drawn images have their labels already; name a folder of images")
    if not (folder / REVIEW_FILE).is_file():
        with explained(folder):
            folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / REVIEW_FILE, json.dumps(known, indent=1, ensure_ascii=False) + "\n")
    records = [record for record in dataset.records if record.part not in ("val", "test")]
    given = [record.label is not None for record in records]
    return Session(data.resolve().name, dataset, records, given, folder, who=who)


def _recall(data: Path, folder: Path, classes: Sequence[str], source: str | None) -> dict[str, Any]:
    """Read review.json, and refuse to continue the review of other data or classes."""
    clean = list(clean_names((name, "--classes") for name in classes).values()) or None
    if clean is not None and len(clean) < 2:
        raise ConfigError("--classes needs two names or more, separated by commas")
    wanted = {"data": str(data.absolute()), "classes": clean, "source": source}
    if (folder / REVIEW_FILE).is_file():
        known = read_review(folder)
        if clean is None:
            wanted["classes"] = known["classes"]
        if known != wanted:
            raise ConfigError(f"{folder}: has a review of other images or classes; give another --out")
        return known
    return wanted


def _user() -> str:
    with suppress(OSError, KeyError, ImportError):
        return getpass.getuser()
    return ""
