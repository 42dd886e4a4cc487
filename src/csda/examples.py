"""Choose the images that a report shows; NumPy only, so that training, which keeps them, and report, which shows them,
make the same choice.

N images, n classes. Labels are class indices [N], or 0/1 [N, n] in a multi-label set. Choices are rows, the most
telling first.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from csda import metrics

Array = npt.NDArray[np.floating]
Labels = npt.NDArray[np.int64]
Rows = list[int]

MISTAKES = 6
"""Images of a class that were taken for others, with the most confidence."""
CELL = 4
"""Images behind a cell of the confusion matrix."""
CELLS = 64
"""Cells that have images; where there are more, those with the most images."""
GUESSES = 8
"""Pseudo-labels of a class."""
SEEN = 4
"""Images of a class for which it is shown where the network looks."""
IMAGES = 480
"""Images of a run in all."""


def choose_mistakes(probs: Array, labels: Labels) -> list[Rows]:
    """For each class, its images that were taken for another, the surest first.

    With several labels an image: for each label the images that lack it and have its highest probabilities from one
    half on, then those that have it and its lowest below one half.
    """
    if labels.ndim == 2:
        chosen = []
        found = metrics.predict(probs, multi_label=True)
        for scores, said, present in zip(probs.T, found.T, labels.T, strict=True):
            alarms = _highest(scores, (present == 0) & (said == 1), MISTAKES // 2)
            misses = _highest(-scores, (present == 1) & (said == 0), MISTAKES // 2)
            chosen.append(alarms + misses)
        return chosen
    sure, wrong = probs.max(axis=1), probs.argmax(axis=1) != labels
    return [_highest(sure, wrong & (labels == name), MISTAKES) for name in range(probs.shape[1])]


def choose_cells(probs: Array, labels: Labels) -> dict[tuple[int, int], Rows]:
    """The surest images behind each cell (truth, prediction) of the confusion matrix, fullest cells first."""
    n, predicted, sure = probs.shape[1], probs.argmax(axis=1), probs.max(axis=1)
    counts = metrics.confusion(labels, predicted, n)
    fullest = [divmod(int(cell), n) for cell in np.argsort(-counts, axis=None, kind="stable")[:CELLS]]
    return {
        (truth, guess): _highest(sure, (labels == truth) & (predicted == guess), CELL)
        for truth, guess in fullest
        if counts[truth, guess]
    }


def choose_guesses(probs: Array, *, multi_label: bool = False) -> list[Rows]:
    """For each class some unlabeled images that are taken for it, evenly from the surest to the least sure.

    With several labels an image: those with the label's highest probabilities.
    """
    if multi_label:
        return [_highest(scores, np.ones(len(scores), dtype=bool), GUESSES) for scores in probs.T]
    chosen, predicted, sure = [], probs.argmax(axis=1), probs.max(axis=1)
    for name in range(probs.shape[1]):
        ranked = _highest(sure, predicted == name, len(probs))
        places = np.unique(np.linspace(0, len(ranked) - 1, min(GUESSES, len(ranked))).round().astype(int))
        chosen.append([ranked[place] for place in places])
    return chosen


def choose_seen(probs: Array, labels: Labels) -> list[list[tuple[int, int]]]:
    """For each class some of its images, each with the class whose evidence is to be shown: the one predicted.

    Half of them are the surest that were recognised, half the surest that were not. With several labels an image: those
    that have the label and its highest probabilities, and the label itself.
    """
    if labels.ndim == 2:
        columns = zip(probs.T, labels.T, strict=True)
        best = [_highest(scores, present == 1, SEEN) for scores, present in columns]
        return [[(row, name) for row in rows] for name, rows in enumerate(best)]
    predicted, sure = probs.argmax(axis=1), probs.max(axis=1)
    chosen = []
    for name in range(probs.shape[1]):
        right = _highest(sure, (labels == name) & (predicted == name), SEEN // 2)
        wrong = _highest(sure, (labels == name) & (predicted != name), SEEN // 2)
        chosen.append([(row, int(predicted[row])) for row in right + wrong])
    return chosen


def choose_judged(probs: Array, labels: Labels) -> Iterator[int]:
    """All rows of a part with known labels that a report shows, the most telling first, some of them repeatedly."""
    yield from _in_turn(choose_mistakes(probs, labels))
    yield from _in_turn([[row for row, _ in pairs] for pairs in choose_seen(probs, labels)])
    if labels.ndim == 1:
        yield from _in_turn(list(choose_cells(probs, labels).values()))


def choose_unlabeled(probs: Array, *, multi_label: bool = False) -> Iterator[int]:
    """All rows of the unlabeled part that a report shows."""
    yield from _in_turn(choose_guesses(probs, multi_label=multi_label))


def _in_turn(groups: list[Rows]) -> Iterator[int]:
    """One of each group, then a second of each: where a limit cuts, it cuts all groups alike."""
    for place in range(max(map(len, groups), default=0)):
        yield from (rows[place] for rows in groups if place < len(rows))


def _highest(scores: Array, among: npt.NDArray[np.bool_], count: int) -> Rows:
    (rows,) = np.nonzero(among)
    ranked: Rows = rows[np.argsort(-scores[rows], kind="stable")][:count].tolist()
    return ranked
