"""Eq. (11) and (13), one class after the other."""

from __future__ import annotations

from reference import alignment
from reference.alignment import Matrix, Vector


def ema(before: float, value: float, momentum: float) -> float:
    return before * momentum + value * (1 - momentum)


class ClassMarginals:
    def __init__(
        self,
        n: int,
        momentum: float,
        condition: str = "label",
        absent: str = "replace",
        share: str = "class",
        against: str = "unlabeled",
        shrinkage: float = 0.0,
        basis: float | str = "diagonal",
    ) -> None:
        self.n, self.momentum, self.condition, self.absent, self.share = n, momentum, condition, absent, share
        self.against, self.shrinkage, self.basis = against, shrinkage, basis
        self.labeled_predicted = [[1 / n] * n for _ in range(n)]
        self.labeled_numbers = [0.0] * n
        self.labeled = [[1 / n] * n for _ in range(n)]
        self.unlabeled = [[1 / n] * n for _ in range(n)]
        self.labeled_confidence = [1 / n] * n
        self.unlabeled_confidence = [1 / n] * n
        self.labeled_observed = [False] * n
        self.unlabeled_observed = [False] * n

    def start(self, probs: Matrix, labels: list[int]) -> None:
        by_label = alignment.class_means(probs, labels, self.n)
        by_prediction = alignment.class_means(probs, [alignment.argmax(p) for p in probs], self.n)
        predicted = [alignment.argmax(p) for p in probs]
        of_labels = alignment.class_means(self.told(probs, labels), predicted, self.n)
        for i in range(self.n):
            row = prediction = by_label[i]
            classes = labels
            if self.condition != "label" and by_prediction[i] is not None:
                row, prediction, classes = of_labels[i], by_prediction[i], predicted
            assert row is not None
            assert prediction is not None
            confidence = self.confidence(i, row, classes)
            self.labeled[i], self.labeled_confidence[i], self.labeled_observed[i] = row, confidence, True
            self.unlabeled[i], self.unlabeled_confidence[i], self.unlabeled_observed[i] = prediction, confidence, True
            self.labeled_predicted[i] = prediction
            self.labeled_numbers[i] = float((labels if self.condition == "label" else predicted).count(i))

    def start_unlabeled(self, probs: Matrix) -> None:
        for i, mean in enumerate(alignment.class_means(probs, [alignment.argmax(p) for p in probs], self.n)):
            if mean is not None:
                self.unlabeled[i] = mean
                self.unlabeled_confidence[i] = self.confidence(i, mean, [alignment.argmax(p) for p in probs])

    def told(self, probs: Matrix, labels: list[int]) -> Matrix:
        """Labels as distributions where rows are of the truth."""
        if self.condition != "truth":
            return probs
        return [[1.0 if label == j else 0.0 for j in range(self.n)] for label in labels]

    def confidence(self, i: int, mean: Vector, classes: list[int]) -> float:
        """c_i, with K or K_i in its denominator."""
        return mean[i] * classes.count(i) / len(classes) if self.share == "batch" else mean[i]

    def update_labeled(self, probs: Matrix, labels: list[int]) -> None:
        classes = labels if self.condition == "label" else [alignment.argmax(p) for p in probs]
        predictions = alignment.class_means(probs, classes, self.n)
        for i, mean in enumerate(alignment.class_means(self.told(probs, labels), classes, self.n)):
            momentum = self.momentum if self.labeled_observed[i] else 0.0
            prediction = predictions[i]
            if self.condition == "truth" and prediction is not None:
                self.labeled_predicted[i] = [
                    ema(self.labeled_predicted[i][j], prediction[j], momentum) for j in range(self.n)
                ]
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
        divisor = self.unlabeled if self.against == "unlabeled" else self.labeled_predicted
        if not isinstance(self.basis, str):
            changed = alignment.change_basis(alignment.estimate_basis(tempered, divisor, self.basis), divisor)
            tempered = [alignment.normalize([max(value, 0.0) for value in row]) for row in changed]
        if self.shrinkage:
            return alignment.align_shrunken(q, tempered, divisor, self.labeled_numbers, self.shrinkage)
        return alignment.align(q, tempered, divisor)
