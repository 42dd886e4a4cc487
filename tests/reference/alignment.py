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


def solve(a: list[list[Fraction]], b: list[Fraction]) -> list[Fraction]:
    """x with a x = b, exactly, by elimination with the largest pivot."""
    n = len(b)
    rows = [[*a[i], b[i]] for i in range(n)]
    for k in range(n):
        largest = max(range(k, n), key=lambda i: abs(rows[i][k]))
        rows[k], rows[largest] = rows[largest], rows[k]
        for i in range(n):
            if i != k:
                factor = rows[i][k] / rows[k][k]
                rows[i] = [x - factor * y for x, y in zip(rows[i], rows[k], strict=True)]
    return [rows[k][n] / rows[k][k] for k in range(n)]


def least_squares(design: Matrix, target: Vector, ridge: float, centre: Vector) -> Vector:
    """The x for which Σ_j (Σ_k design[j][k] x_k − target_j)² + ridge · Σ_k (x_k − centre_k)² is least."""
    n = len(centre)
    d = [[Fraction(value) for value in row] for row in design]
    normal = [
        [sum(row[k] * row[m] for row in d) + (Fraction(ridge) if k == m else 0) for m in range(n)] for k in range(n)
    ]
    right = [
        sum(row[k] * Fraction(t) for row, t in zip(d, target, strict=True)) + Fraction(ridge) * Fraction(centre[k])
        for k in range(n)
    ]
    return [float(value) for value in solve(normal, right)]


def estimate_basis(labeled: Matrix, unlabeled: Matrix, ridge: float) -> Matrix:
    """One row of M after the other: λ_i^x from the rows of λ^u, and near the i-th of them."""
    n = len(labeled)
    design = [[unlabeled[k][j] for k in range(n)] for j in range(n)]
    return [least_squares(design, labeled[i], ridge, [float(i == k) for k in range(n)]) for i in range(n)]


def align_shrunken(q: Vector, labeled: Matrix, unlabeled: Matrix, numbers: Vector, strength: float) -> Vector:
    """By what was observed in labeled samples predicted as i over what was expected, with `strength` more of each."""
    i = argmax(q)
    ratios = []
    for j in range(len(q)):
        observed, expected = numbers[i] * labeled[i][j], numbers[i] * unlabeled[i][j]
        ratios.append((observed + strength) / (expected + strength))
    return normalize([q[j] * ratios[j] for j in range(len(q))])


def shift_weights(shares: Matrix, mean: Vector, ridge: float) -> Vector:
    return [max(value, 0.0) for value in least_squares(shares, mean, ridge, [1.0] * len(mean))]


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
