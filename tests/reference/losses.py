"""Eq. (18), sample by sample."""

from __future__ import annotations

from math import exp, log, log1p

from reference.alignment import Matrix, Vector


def cross_entropy(logits: Vector, target: Vector) -> float:
    highest = max(logits)
    log_sum = highest + log(sum(exp(z - highest) for z in logits))
    return sum(t * (log_sum - z) for t, z in zip(target, logits, strict=True))


def binary_cross_entropy(logits: Vector, target: Vector) -> float:
    def softplus(z: float) -> float:
        return max(z, 0.0) + log1p(exp(-abs(z)))

    return sum(t * softplus(-z) + (1 - t) * softplus(z) for t, z in zip(target, logits, strict=True))


def mean_over_filled(losses: Vector, mask: list[bool]) -> float:
    filled = [loss for loss, is_filled in zip(losses, mask, strict=True) if is_filled]
    return sum(filled) / len(filled) if filled else 0.0


def unlabeled_loss(logits: Matrix, targets: Matrix, mask: list[bool]) -> float:
    return mean_over_filled([cross_entropy(z, t) for z, t in zip(logits, targets, strict=True)], mask)
