"""Choose the images that a report shows. Training stores them and the report shows them, so both use this module.

NumPy only. N images, n classes. Labels are class indices [N], or 0/1 [N, n] in a multi-label set. Choices are row
numbers, the most useful first.
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
"""Number of most confident mistakes shown for each class."""
CELL = 4
"""Number of images shown for a cell of the confusion matrix."""
CELLS = 64
"""Number of cells shown with images, those with the most images."""
GUESSES = 8
"""Number of pseudo-labels shown for each class."""
SEEN = 4
"""Number of Grad-CAM maps shown for each class."""
IMAGES = 480
"""Number of images of a run in total."""


def choose_mistakes(probs: Array, labels: Labels) -> list[Rows]:
    """For each class, its images that were predicted as another, the most confident first.

    With several labels per image: for each label, the images without it with the highest probabilities of at least 0.5,
    then the images with it with the lowest probabilities below 0.5.
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
    """The most confident images of each cell (truth, prediction) of the confusion matrix, largest cells first."""
    n, predicted, sure = probs.shape[1], probs.argmax(axis=1), probs.max(axis=1)
    counts = metrics.confusion(labels, predicted, n)
    fullest = [divmod(int(cell), n) for cell in np.argsort(-counts, axis=None, kind="stable")[:CELLS]]
    return {
        (truth, guess): _highest(sure, (labels == truth) & (predicted == guess), CELL)
        for truth, guess in fullest
        if counts[truth, guess]
    }


def choose_guesses(probs: Array, *, multi_label: bool = False) -> list[Rows]:
    """For each class some unlabeled images predicted as it, evenly from the most to the least confident.

    With several labels per image: those with the label's highest probabilities.
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
    """For each class some of its images, each with the class to draw a Grad-CAM map for: the predicted one.

    Half of them are the most confident correct predictions, half the most confident mistakes. With several labels per
    image: the images of the label with its highest probabilities, and the label itself.
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
    """All rows of a part with known labels that a report shows, the most useful first, possibly repeated."""
    yield from _in_turn(choose_mistakes(probs, labels))
    yield from _in_turn([[row for row, _ in pairs] for pairs in choose_seen(probs, labels)])
    if labels.ndim == 1:
        yield from _in_turn(list(choose_cells(probs, labels).values()))


def choose_unlabeled(probs: Array, *, multi_label: bool = False) -> Iterator[int]:
    """All rows of the unlabeled part that a report shows."""
    yield from _in_turn(choose_guesses(probs, multi_label=multi_label))


def _in_turn(groups: list[Rows]) -> Iterator[int]:
    """The first of each group, then the second of each and so on, so that a limit cuts all groups alike."""
    for place in range(max(map(len, groups), default=0)):
        yield from (rows[place] for rows in groups if place < len(rows))


def _highest(scores: Array, among: npt.NDArray[np.bool_], count: int) -> Rows:
    (rows,) = np.nonzero(among)
    ranked: Rows = rows[np.argsort(-scores[rows], kind="stable")][:count].tolist()
    return ranked
