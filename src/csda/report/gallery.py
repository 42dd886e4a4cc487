"""The images of a report, as data addresses: mistakes, confusions, pseudo-labels, and Grad-CAM maps."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
import numpy.typing as npt
from PIL import Image

from csda import examples, metrics
from csda.data.splits import label_text
from csda.report.tables import judged_part
from csda.runs import Run

HEAT = matplotlib.colormaps["viridis"]
"""Colours of maps, from purple for no evidence to yellow. They are visible on red tissue and on grey."""


@dataclass(frozen=True, slots=True)
class Shown:
    """One image of a page.

    `source` is its data address, `words` the text below it, `sentence` the text for readers who cannot see it. `right`
    says whether the model was right, None if that is unknown. `heat` is the address of a map over the image.
    """

    source: str
    words: str
    sentence: str
    right: bool | None
    heat: str | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Images under a heading, with a remark on their number."""

    heading: str
    remark: str
    images: tuple[Shown, ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """Images of one cell of the confusion matrix."""

    truth: str
    predicted: str
    count: int
    right: bool
    images: tuple[Shown, ...]


@dataclass(frozen=True, slots=True)
class Gallery:
    """All images of a report. Lists are empty if the run stored no images."""

    mistakes: list[Group]
    cells: list[list[Cell]]
    guesses: list[Group]
    seen: list[Group]

    def __bool__(self) -> bool:
        return bool(self.mistakes or self.cells or self.guesses or self.seen)


@dataclass(frozen=True, slots=True)
class Opinion:
    """The prediction of one run for an image, and whether it is right."""

    colour: str
    words: str
    right: bool


@dataclass(frozen=True, slots=True)
class Dispute:
    """An image for which the runs predict different classes, with all predictions."""

    source: str
    sentence: str
    opinions: tuple[Opinion, ...]


@dataclass(frozen=True, slots=True)
class DisputeGroup:
    """The shown images of one class, with a remark on the number of all."""

    heading: str
    remark: str
    disputes: tuple[Dispute, ...]


def collect(run: Run) -> Gallery:
    """The images of a report: those that are chosen and stored in the run folder."""
    if not run.thumbnails.pictures:
        return Gallery([], [], [], [])
    wall = _Wall(run)
    return Gallery(wall.mistakes(), wall.cells(), wall.guesses(), wall.seen())


def collect_disputes(runs: Sequence[tuple[str, str, Run]], most: int = 6) -> list[DisputeGroup]:
    """For each class, images for which the runs predict different classes, those with the largest difference first.

    `runs` are given as (name, colour, run). The list is empty if the runs have different test images, or several labels
    per image.
    """
    walls = [_Wall(run) for _, _, run in runs]
    first = walls[0]
    if first.run.multi_label or any(wall.ids != first.ids for wall in walls):
        return []
    pictures = {image: picture for wall in walls for image, picture in wall.run.thumbnails.pictures.items()}
    probs = np.stack([wall.probs for wall in walls])
    decided = probs.argmax(axis=2)
    differs = (decided != decided[0]).any(axis=0)
    # Total variation between the two runs with the largest difference.
    apart = np.abs(probs[:, None] - probs[None]).sum(axis=-1).max(axis=(0, 1)) / 2
    groups = []
    for label, heading in enumerate(first.classes):
        rows = np.flatnonzero(differs & (first.labels == label))
        kept = [row for row in rows[np.argsort(-apart[rows], kind="stable")].tolist() if first.ids[row] in pictures]
        disputes = []
        for row in kept[:most]:
            opinions = tuple(
                Opinion(colour, f"{first.classes[guess]} {_percent(float(wall.probs[row, guess]))}", guess == label)
                for (_, colour, _), wall, guess in zip(runs, walls, decided[:, row].tolist(), strict=True)
            )
            said = ", ".join(f"{name}: {each.words}" for (name, _, _), each in zip(runs, opinions, strict=True))
            sentence = f"{first.ids[row]}, {heading}; {said}"
            disputes.append(Dispute(address(pictures[first.ids[row]]), sentence, opinions))
        if disputes:
            total = int((first.labels == label).sum())
            groups.append(DisputeGroup(heading, f"{len(rows)} of {total} differ", tuple(disputes)))
    return groups


class _Wall:
    def __init__(self, run: Run) -> None:
        self.run, self.classes = run, run.classes
        part = judged_part(run)
        self.probs, self.labels = run.predictions.part(part)
        self.ids = [
            row for row, split in zip(run.predictions.ids, run.predictions.splits, strict=True) if split == part
        ]
        self.predicted = metrics.decide(self.probs, run.multi_label)

    def mistakes(self) -> list[Group]:
        groups = []
        for name, rows in enumerate(examples.choose_mistakes(self.probs, self.labels)):
            truth = self.labels[:, name] == 1 if self.run.multi_label else self.labels == name
            wrong = np.array([self._is_wrong(row, name) for row in range(len(self.probs))], dtype=bool)
            count = int(wrong.sum()) if self.run.multi_label else int((wrong & truth).sum())
            remark = (
                f"{count} of {len(truth)} wrong" if self.run.multi_label else f"{count} of {int(truth.sum())} wrong"
            )
            shown = self._judged(rows, name)
            if shown:
                groups.append(Group(self.classes[name], remark, shown))
        return groups

    def cells(self) -> list[list[Cell]]:
        """Rows of cells, one row for each true class."""
        if self.run.multi_label:
            return []
        chosen = examples.choose_cells(self.probs, self.labels)
        counts = metrics.confusion(self.labels, metrics.predict(self.probs), len(self.classes))
        rows = []
        for truth, name in enumerate(self.classes):
            cells = [
                Cell(name, self.classes[guess], int(counts[truth, guess]), truth == guess, shown)
                for guess in np.argsort(-counts[truth], kind="stable").tolist()
                if (truth, guess) in chosen and (shown := self._judged(chosen[truth, guess], truth, named=False))
            ]
            if cells:
                rows.append(cells)
        return rows

    def guesses(self) -> list[Group]:
        if not self.run.pseudo_labels:
            return []
        ids, probs = list(self.run.pseudo_labels), np.array(list(self.run.pseudo_labels.values()))
        decided = metrics.predict(probs, self.run.multi_label)
        groups = []
        for name, rows in enumerate(examples.choose_guesses(probs, multi_label=self.run.multi_label)):
            count = int(decided[:, name].sum()) if self.run.multi_label else int((decided == name).sum())
            shown = tuple(
                image for row in rows if (image := self._guessed(ids[row], float(probs[row, name]), name)) is not None
            )
            if shown:
                groups.append(Group(self.classes[name], f"{count:,} of {len(ids):,} unlabeled images", shown))
        return groups

    def seen(self) -> list[Group]:
        groups = []
        for name, pairs in enumerate(examples.choose_seen(self.probs, self.labels)):
            shown = []
            for row, target in pairs:
                heat = self.run.thumbnails.maps.get((self.ids[row], target))
                if heat is None:
                    continue
                for image in self._judged([row], name):
                    words = f"evidence for {self.classes[target]}"
                    shown.append(
                        Shown(image.source, image.words, f"{image.sentence}; {words}", image.right, draw_heat(heat))
                    )
            if shown:
                groups.append(Group(self.classes[name], "", tuple(shown)))
        return groups

    def _is_wrong(self, row: int, name: int) -> bool:
        found = self.predicted[row]
        if isinstance(found, tuple):
            return (name in found) != bool(self.labels[row, name])
        return bool(found != self.labels[row])

    def _judged(self, rows: Iterable[int], name: int, *, named: bool = True) -> tuple[Shown, ...]:
        """The images of some rows, with the prediction below them; only its probability if the heading names it."""
        shown = []
        for row in rows:
            picture = self.run.thumbnails.pictures.get(self.ids[row])
            if picture is None:
                continue
            wrong = self._is_wrong(row, name)
            if self.run.multi_label:
                there, share = bool(self.labels[row, name]), float(self.probs[row, name])
                words = f"{'has it' if there else 'lacks it'}, {_percent(share)}"
                sentence = f"{self.ids[row]}: {words} for {self.classes[name]}"
            else:
                guess, share = int(self.probs[row].argmax()), float(self.probs[row].max())
                full = f"{self.classes[guess]} {_percent(share)}"
                words = full if named else _percent(share)
                sentence = f"{self.ids[row]}: {self.classes[int(self.labels[row])]}, predicted as {full}"
            shown.append(Shown(address(picture), words, sentence, not wrong))
        return tuple(shown)

    def _guessed(self, image: str, share: float, name: int) -> Shown | None:
        picture = self.run.thumbnails.pictures.get(image)
        if picture is None:
            return None
        truth = self.run.truth.get(image)
        right: bool | None = None
        words = _percent(share)
        if truth is not None and self.run.multi_label:
            right = bool(self.run.encode([truth])[0, name])
            words = f"{words}, {'has it' if right else 'lacks it'}"
        elif truth is not None:
            right = truth == label_text(name, self.classes)
            words = words if right else f"{words}, is {truth}"
        return Shown(address(picture), words, f"{image}: predicted as {self.classes[name]}, {words}", right)


def address(picture: bytes, kind: str = "webp") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(picture).decode()}"


def draw_heat(evidence: npt.NDArray[np.uint8]) -> str:
    """A map as an image to lay over the picture. It is more opaque where there is more evidence."""
    # Enlarged here, because browsers enlarge small images in different ways.
    smooth = np.asarray(Image.fromarray(evidence).resize((48, 48), Image.Resampling.BICUBIC))
    pixels = HEAT(smooth, alpha=0.3 + 0.4 * (smooth / 255.0), bytes=True)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "WEBP", quality=60, alpha_quality=60)
    return address(buffer.getvalue())


def _percent(share: float) -> str:
    return ">99 %" if share > 0.995 else f"{share:.0%}".replace("%", " %")
