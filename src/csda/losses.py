"""The losses, Eq. (18) and (19).

In a multi-label task the K labels of a sample are independent, so its loss is the sum of K binary cross-entropies.
"""

from __future__ import annotations

from typing import TypeVar

import torch.nn.functional as F
from torch import Tensor

Number = TypeVar("Number", float, Tensor)


def labeled_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Eq. (18), L_s = 1/K Σ_k H(x_k, y_k): the mean cross-entropy of the K labeled samples.

    Args:
        logits: [K, n].
        targets: classes, int64 [K], or probabilities [K, n].

    >>> import torch
    >>> labeled_loss(torch.tensor([[0.0, 0.0]]), torch.tensor([1]))
    tensor(0.6931)
    """
    return F.cross_entropy(logits, targets)


def unlabeled_loss(logits: Tensor, targets: Tensor, mask: Tensor, count: Tensor | None = None) -> Tensor:
    """Eq. (18), L_u = 1/L Σ_l H(u_l, q̃_l): the mean soft cross-entropy of the filled slots, 0 if none is filled.

    Args:
        logits: [L, n].
        targets: q̃ [L, n].
        mask: bool [L], the filled slots.
        count: number to divide by instead of the number of filled slots. Processes that each compute a part of the
            queue divide by the mean of their numbers.

    >>> import torch
    >>> logits, targets = torch.tensor([[0.0, 0.0], [9.0, 0.0]]), torch.tensor([[0.25, 0.75], [0.0, 1.0]])
    >>> unlabeled_loss(logits, targets, torch.tensor([True, False]))
    tensor(0.6931)
    """
    return _masked_mean(F.cross_entropy(logits, targets, reduction="none"), mask, count)


def multilabel_labeled_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Eq. (18), L_s for K labels: logits [B, K] and targets [B, K] of 0 and 1.

    >>> import torch
    >>> multilabel_labeled_loss(torch.zeros(1, 2), torch.tensor([[0.0, 1.0]]))
    tensor(1.3863)
    """
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(-1).mean()


def multilabel_unlabeled_loss(logits: Tensor, targets: Tensor, mask: Tensor, count: Tensor | None = None) -> Tensor:
    """Eq. (18), L_u for K labels: logits and targets [L, K], the mask [L] and the count as in `unlabeled_loss`.

    >>> import torch
    >>> multilabel_unlabeled_loss(torch.zeros(2, 2), torch.rand(2, 2), torch.tensor([True, False]))
    tensor(1.3863)
    """
    return _masked_mean(F.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(-1), mask, count)


def consistency_loss(probs: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """Squared error of probabilities [B, n], averaged over the samples in the mask, bool [B]; 0 if the mask is empty.

    It is bounded, so a wrong target has a limited effect. GLM and LSSE use it instead of L_u.

    >>> import torch
    >>> consistency_loss(torch.tensor([[0.5, 0.5]]), torch.tensor([[1.0, 0.0]]), torch.tensor([True]))
    tensor(0.5000)
    """
    return _masked_mean((probs - targets).square().sum(-1), mask, None)


def total_loss(labeled: Tensor, unlabeled: Tensor, weight: float | Tensor) -> Tensor:
    """Eq. (18). L = L_s + η · L_u.

    Args:
        labeled: L_s.
        unlabeled: L_u.
        weight: η.

    >>> import torch
    >>> total_loss(torch.tensor(1.0), torch.tensor(2.0), weight=0.5)
    tensor(2.)
    """
    return labeled + weight * unlabeled


def ramp(epoch: Number, epochs: int) -> Number:
    """Eq. (19). η = epoch / epochs, for numbers and for tensors.

    >>> ramp(64, 256)
    0.25
    """
    return epoch / epochs


def _masked_mean(losses: Tensor, mask: Tensor, count: Tensor | None) -> Tensor:
    count = mask.sum() if count is None else count
    return losses.masked_fill(~mask, 0).sum() / count.masked_fill(count == 0, 1)
