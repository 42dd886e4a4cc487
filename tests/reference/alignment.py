"""Eq. (7) to (10) and (12) to (17), one loop an index."""

from __future__ import annotations

from fractions import Fraction
from math import floor

Vector = list[float]
Matrix = list[list[float]]


def argmax(values: Vector) -> int:
    best = 0
    for j in range(len(values)):
        if values[j] > values[best]:
            best = j
    return best


def divisor(value: float) -> float:
    return max(value, 1e-6)


def normalize(values: Vector) -> Vector:
    total = sum(values)
    if total == 0:
        return [1 / len(values) for _ in values]
    return [value / total for value in values]


def change_basis(m: Matrix, unlabeled: Matrix) -> Matrix:
    n = len(m)
    return [normalize([sum(m[i][k] * unlabeled[k][j] for k in range(n)) for j in range(n)]) for i in range(n)]


def transition(labeled: Matrix, unlabeled: Matrix) -> Matrix:
    n = len(labeled)
    return [[labeled[i][j] / divisor(unlabeled[i][j]) for j in range(n)] for i in range(n)]


def align(q: Vector, labeled: Matrix, unlabeled: Matrix) -> Vector:
    i = argmax(q)
    return align_agnostic(q, labeled[i], unlabeled[i])


def align_agnostic(q: Vector, labeled: Vector, unlabeled: Vector) -> Vector:
    return normalize([q[j] * labeled[j] / divisor(unlabeled[j]) for j in range(len(q))])


def class_means(probs: Matrix, classes: list[int], n: int) -> list[Vector | None]:
    """Row i is the mean over the samples of class i; None where there is no such sample."""
    means: list[Vector | None] = []
    for i in range(n):
        members = [p for p, y in zip(probs, classes, strict=True) if y == i]
        means.append([sum(p[j] for p in members) / len(members) for j in range(n)] if members else None)
    return means


def absent_confidence(i: int, labeled_confidence: Vector, unlabeled_confidence: Vector) -> float:
    n = len(labeled_confidence)
    factor = 0.0
    for k in range(n):
        factor += unlabeled_confidence[k] / divisor(labeled_confidence[k]) / n
    return labeled_confidence[i] * factor


def absent_row(i: int, labeled: Matrix, unlabeled: Matrix) -> Vector:
    n = len(labeled)
    row = []
    for j in range(n):
        factor = 0.0
        for k in range(n):
            factor += unlabeled[k][j] / divisor(labeled[k][j]) / n
        row.append(labeled[i][j] * factor)
    return normalize(row)


def temperature(labeled_confidence: float, lowest: float = 0.0) -> float:
    return max(1 - labeled_confidence, lowest)


def temper(row: Vector, T: float) -> Vector:
    return normalize([value**T for value in row])


def queue_lengths(confidence: Vector, capacity: int, gamma: float, minimum: int = 0) -> list[int]:
    """In rational numbers; what lies below an integer by less than a millionth of itself is that integer."""
    weights = [Fraction(c**gamma) for c in confidence]
    total = sum(weights)
    if total == 0:
        weights, total = [Fraction(1) for _ in weights], Fraction(len(weights))
    rest = capacity - minimum * len(weights)
    return [minimum + floor(rest * weight / total * (1 + Fraction(1, 10**6))) for weight in weights]


def threshold(unlabeled_confidence: float, delta: float) -> float:
    return min(unlabeled_confidence, delta)


def enqueue(aligned: Vector, unlabeled_confidence: Vector, delta: float) -> bool:
    i = argmax(aligned)
    return max(aligned) > threshold(unlabeled_confidence[i], delta)
