"""Eq. (11) and (13), one class after the other."""

from __future__ import annotations

from reference import alignment
from reference.alignment import Matrix, Vector


def ema(before: float, value: float, momentum: float) -> float:
    return before * momentum + value * (1 - momentum)


class ClassMarginals:
    def __init__(
        self, n: int, momentum: float, condition: str = "label", absent: str = "replace", share: str = "class"
    ) -> None:
        self.n, self.momentum, self.condition, self.absent, self.share = n, momentum, condition, absent, share
        self.labeled = [[1 / n] * n for _ in range(n)]
        self.unlabeled = [[1 / n] * n for _ in range(n)]
        self.labeled_confidence = [1 / n] * n
        self.unlabeled_confidence = [1 / n] * n
        self.labeled_observed = [False] * n
        self.unlabeled_observed = [False] * n

    def start(self, probs: Matrix, labels: list[int]) -> None:
        by_label = alignment.class_means(probs, labels, self.n)
        by_prediction = alignment.class_means(probs, [alignment.argmax(p) for p in probs], self.n)
        for i in range(self.n):
            row = by_label[i]
            if self.condition == "prediction" and by_prediction[i] is not None:
                row = by_prediction[i]
            assert row is not None
            classes = labels if row is by_label[i] else [alignment.argmax(p) for p in probs]
            confidence = self.confidence(i, row, classes)
            self.labeled[i], self.labeled_confidence[i], self.labeled_observed[i] = row, confidence, True
            self.unlabeled[i], self.unlabeled_confidence[i], self.unlabeled_observed[i] = row, confidence, True

    def confidence(self, i: int, mean: Vector, classes: list[int]) -> float:
        """c_i, with K or K_i in its denominator."""
        return mean[i] * classes.count(i) / len(classes) if self.share == "batch" else mean[i]

    def update_labeled(self, probs: Matrix, labels: list[int]) -> None:
        classes = labels if self.condition == "label" else [alignment.argmax(p) for p in probs]
        for i, mean in enumerate(alignment.class_means(probs, classes, self.n)):
            momentum = self.momentum if self.labeled_observed[i] else 0.0
            if mean is None:
                if self.share == "batch":
                    self.labeled_confidence[i] = ema(self.labeled_confidence[i], 0.0, momentum)
                continue
            self.labeled[i] = [ema(self.labeled[i][j], mean[j], momentum) for j in range(self.n)]
            self.labeled_confidence[i] = ema(self.labeled_confidence[i], self.confidence(i, mean, classes), momentum)
            self.labeled_observed[i] = True

    def update_unlabeled(self, probs: Matrix) -> None:
        classes = [alignment.argmax(q) for q in probs]
        means = alignment.class_means(probs, classes, self.n)
        rows, confidences = list(self.unlabeled), list(self.unlabeled_confidence)
        for i, mean in enumerate(means):
            if mean is None:
                momentum = 0.0 if self.absent == "replace" else self.momentum
                row = alignment.absent_row(i, self.labeled, self.unlabeled)
                confidence = alignment.absent_confidence(i, self.labeled_confidence, self.unlabeled_confidence)
            else:
                momentum = self.momentum if self.unlabeled_observed[i] else 0.0
                row, confidence = mean, self.confidence(i, mean, classes)
                self.unlabeled_observed[i] = True
            rows[i] = [ema(self.unlabeled[i][j], row[j], momentum) for j in range(self.n)]
            confidences[i] = ema(self.unlabeled_confidence[i], confidence, momentum)
        self.unlabeled, self.unlabeled_confidence = rows, confidences

    def align(self, q: Vector, temperature: float | str, lowest: float = 0.0) -> Vector:
        tempered = []
        for i in range(self.n):
            confidences = {"adaptive": self.labeled_confidence, "unlabeled": self.unlabeled_confidence}
            if isinstance(temperature, str):
                T = alignment.temperature(confidences[temperature][i], lowest)
            else:
                T = temperature
            tempered.append(alignment.temper(self.labeled[i], T))
        return alignment.align(q, tempered, self.unlabeled)
