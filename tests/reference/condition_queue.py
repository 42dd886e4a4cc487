"""The queue as a list that samples join and leave one at a time."""

from __future__ import annotations

from dataclasses import dataclass

from reference import alignment
from reference.alignment import Matrix, Vector


@dataclass
class Entry:
    index: int
    class_: int
    confidence: float
    target: Vector


class VariableConditionQueue:
    def __init__(
        self,
        capacity: int,
        gamma: float,
        delta: float,
        minimum_length: int = 0,
        repeats: str = "refresh",
        evict: str = "oldest",
    ) -> None:
        self.capacity, self.gamma, self.delta, self.minimum_length = capacity, gamma, delta, minimum_length
        self.repeats, self.evict = repeats, evict
        self.entries: list[Entry] = []  # from the oldest to the newest

    def push(
        self,
        indices: list[int],
        aligned: Matrix,
        labeled_confidence: Vector,
        unlabeled_confidence: Vector,
        targets: Matrix,
    ) -> None:
        for index, q, target in zip(indices, aligned, targets, strict=True):
            if not alignment.enqueue(q, unlabeled_confidence, self.delta):
                continue
            if self.repeats == "refresh":
                self.entries = [entry for entry in self.entries if entry.index != index]
            self.entries.append(Entry(index, alignment.argmax(q), max(q), target))

        lengths = alignment.queue_lengths(labeled_confidence, self.capacity, self.gamma, self.minimum_length)
        for i, length in enumerate(lengths):
            while sum(entry.class_ == i for entry in self.entries) > length:
                members = [entry for entry in self.entries if entry.class_ == i]
                leaving = members[0]
                if self.evict == "least_confident":
                    for entry in members:
                        if entry.confidence < leaving.confidence:
                            leaving = entry
                self.entries = [entry for entry in self.entries if entry is not leaving]
