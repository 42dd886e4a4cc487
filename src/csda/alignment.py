"""Class-Specific Distribution Alignment: the paper's Eq. (7) to (10) and (12) to (17) as pure functions on tensors.

The symbols, as in the paper (Huang et al., "Class-Specific Distribution Alignment for Semi-Supervised Medical Image
Classification", 2023):

    n             number of classes
    q, q̃          prediction on an unlabeled sample, before and after alignment
    λ^x, λ^u      marginal predictions on labeled and unlabeled data; row i is the marginal of class i
    c^x, c^u      mean class confidence on labeled and unlabeled data
    T             temperatures
    L, γ          length of the queue, resampling parameter
    τ, δ          thresholds of the queue, their upper bound

Every function accepts leading axes: K labels of two classes each have marginals [K, 2, 2] and predictions [B, K, 2].
Values are never copied to the host and shapes never depend on them, so all of this can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST_DIVISOR = 1e-6


def normalize(values: Tensor) -> Tensor:
    """Normalize(·): scale the last axis to sum to one; a row of zeros becomes uniform.

    Args:
        values: [..., n], not negative.

    >>> normalize(torch.tensor([[1.0, 3.0], [0.0, 0.0]]))
    tensor([[0.2500, 0.7500],
            [0.5000, 0.5000]])
    """
    values = values.masked_fill(values.sum(-1, keepdim=True) == 0, 1)
    return values / values.sum(-1, keepdim=True)


def change_basis(matrix: Tensor, unlabeled: Tensor) -> Tensor:
    """Eq. (7). λ_i^x|_j = Normalize(Σ_k m_ik · λ_k^u|_j), and Eq. (8) where the matrix is diagonal.

    Args:
        matrix: M [n, n] with matrix[i, k] = m_ik.
        unlabeled: λ^u [n, n].

    Returns:
        λ^x [n, n].

    >>> unlabeled = torch.tensor([[0.8, 0.2], [0.4, 0.6]])
    >>> change_basis(torch.tensor([[1.0, 0.0], [1.0, 1.0]]), unlabeled)
    tensor([[0.8000, 0.2000],
            [0.6000, 0.4000]])
    """
    return normalize(matrix @ unlabeled)


def estimate_basis(labeled: Tensor, unlabeled: Tensor, ridge: float) -> Tensor:
    """Eq. (7), solved for M. M minimises ‖M λ^u − λ^x‖² + ρ ‖M − 1‖² and equals (λ^x λ^uᵀ + ρ 1)(λ^u λ^uᵀ + ρ 1)⁻¹. As
    ρ → 0, and if the rows of λ^u are independent, M λ^u = λ^x, and alignment with `change_basis(M, λ^u)` is the paper's
    diagonal case. As ρ → ∞, M is the identity and alignment changes nothing.

    Args:
        labeled: λ^x [n, n].
        unlabeled: λ^u [n, n].
        ridge: ρ, above 0.

    Returns:
        M [n, n] with matrix[i, k] = m_ik; its elements may be negative.

    >>> estimate_basis(torch.tensor([[0.8, 0.2], [0.2, 0.8]]), torch.eye(2), ridge=1.0)
    tensor([[0.9000, 0.1000],
            [0.1000, 0.9000]])
    """
    labeled, unlabeled_rows = labeled.double(), unlabeled.double()
    diagonal = ridge * torch.eye(unlabeled.shape[-1], dtype=torch.float64, device=unlabeled.device)
    moments, gram = labeled @ unlabeled_rows.mT + diagonal, unlabeled_rows @ unlabeled_rows.mT + diagonal
    return (moments @ _invert(gram)).to(unlabeled.dtype)


def transition(labeled: Tensor, unlabeled: Tensor) -> Tensor:
    """Eq. (9). m_ii = λ_i^x ⊘ λ_i^u, a vector for each class; ⊘ divides element by element.

    Args:
        labeled: λ^x [n, n].
        unlabeled: λ^u [n, n].

    Returns:
        [n, n]; row i is the vector m_ii.

    >>> transition(torch.tensor([[0.9, 0.1], [0.3, 0.7]]), torch.tensor([[0.6, 0.4], [0.3, 0.7]]))
    tensor([[1.5000, 0.2500],
            [1.0000, 1.0000]])
    """
    return labeled / unlabeled.clamp(min=SMALLEST_DIVISOR)


def align(probs: Tensor, labeled: Tensor, unlabeled: Tensor) -> Tensor:
    """Eq. (10). q̃ = Normalize(q ⊗ λ_i^x ⊘ λ_i^u) with i = argmax q.

    Args:
        probs: q [B, n], one prediction per sample.
        labeled: λ^x [n, n].
        unlabeled: λ^u [n, n].

    Returns:
        q̃ [B, n].

    >>> labeled = torch.tensor([[0.6, 0.4], [0.2, 0.8]])
    >>> unlabeled = torch.tensor([[0.9, 0.1], [0.2, 0.8]])
    >>> align(torch.tensor([[0.6, 0.4], [0.3, 0.7]]), labeled, unlabeled)
    tensor([[0.2000, 0.8000],
            [0.3000, 0.7000]])
    """
    n = probs.shape[-1]
    i = probs.argmax(-1)[..., None, None].expand(*probs.shape[:-1], 1, n)
    m_ii = transition(labeled, unlabeled).expand(*probs.shape, n).gather(-2, i).squeeze(-2)
    return normalize(probs * m_ii)


def align_agnostic(probs: Tensor, labeled: Tensor, unlabeled: Tensor) -> Tensor:
    """Eq. (10) without its subscripts. q̃ = Normalize(q ⊗ λ^x ⊘ λ^u), the distribution alignment of ReMixMatch.

    Args:
        probs: q [B, n].
        labeled: λ^x [n].
        unlabeled: λ^u [n].

    Returns:
        q̃ [B, n].

    >>> align_agnostic(torch.tensor([[0.6, 0.4]]), torch.tensor([0.5, 0.5]), torch.tensor([0.75, 0.25]))
    tensor([[0.3333, 0.6667]])
    """
    return normalize(probs * labeled / unlabeled.clamp(min=SMALLEST_DIVISOR))


def class_sums(probs: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Eq. (12), before its division. Σ_k p(x_k) over the samples k of class i, and their number K_i.

    The quotient of the two is the batch's λ_i, and its i-th element c_i = 1/K_i · Σ_k p(x_k)|_i. Both are returned, not
    their quotient, because sums and counts can be added up over processes.

    Args:
        probs: p [B, n].
        classes: int64 [B], the class of each sample.

    Returns:
        Sums [n, n] and numbers int64 [n].

    >>> sums, numbers = class_sums(torch.tensor([[0.7, 0.3], [0.5, 0.5], [0.1, 0.9]]), torch.tensor([0, 0, 1]))
    >>> sums / numbers[:, None]
    tensor([[0.6000, 0.4000],
            [0.1000, 0.9000]])
    """
    members = classes[..., None] == torch.arange(probs.shape[-1], device=probs.device)
    # In double precision: autocast and TF32 would round a product in single precision.
    sums = torch.einsum("b...i,b...j->...ij", members.double(), probs.double())
    return sums.to(probs.dtype), members.sum(0)


def shrink(rows: Tensor, numbers: Tensor, strength: float) -> Tensor:
    """K_i λ_i + κ: the counts of each class among the samples of row i, plus κ for every class.

    Alignment with such counts multiplies by (K_i λ_i^x|_j + κ) / (K_i λ_i^u|_j + κ). With many labeled samples this is
    close to Eq. (9), with few it is close to 1. So a few samples of a rare class change a prediction little.

    Args:
        rows: λ [n, n].
        numbers: K [n], the labeled samples that row i of λ^x is the mean over.
        strength: κ; above 0.

    >>> shrink(torch.tensor([[0.8, 0.2], [0.5, 0.5]]), torch.tensor([10.0, 0.0]), strength=2.0)
    tensor([[10.,  4.],
            [ 2.,  2.]])
    """
    return numbers[..., None] * rows + strength


def shift_weights(shares: Tensor, mean: Tensor, ridge: float) -> Tensor:
    """Black-box shift estimation: the w ≥ 0 near the minimum of ‖Ĉ w − μ‖² + ρ ‖w − 1‖².

    w_k is how many times as frequent class k is among the unlabeled samples (Lipton et al., "Detecting and correcting
    for label shift with black box predictors", 2018; the ridge as in Azizzadenesheli et al., 2019). The unlabeled class
    prior is Normalize(w ⊗ π), where π is the labeled class prior.

    Args:
        shares: Ĉ [n, n], the part of all labeled predictions that lies on class j for samples labeled k, at [j, k].
        mean: μ [n], the mean prediction on unlabeled samples.
        ridge: ρ, above 0.

    Returns:
        w [n].

    >>> shift_weights(torch.diag(torch.tensor([0.5, 0.5])), torch.tensor([0.2, 0.8]), ridge=1e-6)
    tensor([0.4000, 1.6000])
    """
    exact, target = shares.double(), mean.double()[..., None]
    diagonal = ridge * torch.eye(shares.shape[-1], dtype=torch.float64, device=shares.device)
    inverse = _invert(exact.mT @ exact + diagonal)
    return (inverse @ (exact.mT @ target + ridge))[..., 0].clamp(min=0).to(shares.dtype)


def absent_confidence(labeled_confidence: Tensor, unlabeled_confidence: Tensor) -> Tensor:
    """Eq. (13), first case. c_i^u = c_i^x · 1/n Σ_k c_k^u / c_k^x, for a class i that was not predicted in the batch.

    Args:
        labeled_confidence: c^x [n].
        unlabeled_confidence: c^u [n] of the step before.

    Returns:
        [n], the estimate for every class.

    >>> absent_confidence(torch.tensor([0.8, 0.4]), torch.tensor([0.4, 0.4]))
    tensor([0.6000, 0.3000])
    """
    ratios = unlabeled_confidence / labeled_confidence.clamp(min=SMALLEST_DIVISOR)
    return labeled_confidence * ratios.mean(-1, keepdim=True)


def absent_rows(labeled: Tensor, unlabeled: Tensor) -> Tensor:
    """Eq. (13), first case, for the rows. λ_i^u|_j = Normalize(λ_i^x|_j · 1/n Σ_k λ_k^u|_j / λ_k^x|_j).

    "The rest of the unlabeled marginal distribution is also updated in this way": column by column, since one factor
    for the whole row would cancel under Normalize.

    Args:
        labeled: λ^x [n, n].
        unlabeled: λ^u [n, n] of the step before.

    Returns:
        [n, n], the estimate for every row.

    >>> absent_rows(torch.tensor([[0.5, 0.5], [0.5, 0.5]]), torch.tensor([[0.8, 0.2], [0.6, 0.4]]))
    tensor([[0.7000, 0.3000],
            [0.7000, 0.3000]])
    """
    ratios = unlabeled / labeled.clamp(min=SMALLEST_DIVISOR)
    return normalize(labeled * ratios.mean(-2, keepdim=True))


def temperatures(labeled_confidence: Tensor, floor: float = 0.0) -> Tensor:
    """Eq. (14). T_i = max(1 − c_i^x, floor).

    Args:
        labeled_confidence: c^x [n].
        floor: lower bound of the temperatures; the paper has none.

    >>> temperatures(torch.tensor([0.75, 0.5]))
    tensor([0.2500, 0.5000])
    """
    return (1 - labeled_confidence).clamp(min=floor)


def temper(labeled: Tensor, temperatures: Tensor) -> Tensor:
    """Eq. (14), applied. Normalize((λ_i^x)^T_i): T_i = 1 leaves row i as it is, T_i → 0 makes it uniform.

    Args:
        labeled: λ^x [n, n].
        temperatures: T [n].

    >>> temper(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0.5, 1.0]))
    tensor([[0.7500, 0.2500],
            [0.2000, 0.8000]])
    """
    return normalize(labeled ** temperatures[..., None])


def queue_lengths(confidence: Tensor, capacity: int, gamma: float, minimum: int = 0) -> Tensor:
    """Eq. (15). len_i = ⌊L · (c_i^x)^γ / Σ_k (c_k^x)^γ⌋; all lengths are equal if all confidences are zero.

    A share that is below an integer by less than one millionth of its value is rounded up to it, so that floating-point
    error does not cost a slot: three equal classes share nine slots as 3, 3, 3. The sum of the lengths never exceeds L.
    Each class first gets `minimum` slots, and Eq. (15) divides the rest.

    Args:
        confidence: c^x [n].
        capacity: L, less than half a million.
        gamma: γ; 0 makes all lengths equal, 1 proportional to the confidence.
        minimum: smallest number of slots of a class; the paper has none.

    Returns:
        int64 [n].

    >>> queue_lengths(torch.tensor([0.8, 0.4, 0.2]), capacity=10, gamma=1.0)
    tensor([5, 2, 1])
    """
    exact = confidence.to(torch.promote_types(confidence.dtype, torch.float32))
    shares = (capacity - minimum * confidence.shape[-1]) * normalize(exact**gamma)
    return minimum + (shares * (1 + 1e-6)).floor().long()


def thresholds(confidence: Tensor, delta: float) -> Tensor:
    """Eq. (16). τ_i = min(c_i^u, δ).

    Args:
        confidence: c^u [n].
        delta: δ.

    >>> thresholds(torch.tensor([0.5, 0.125]), delta=0.25)
    tensor([0.2500, 0.1250])
    """
    return confidence.clamp(max=delta)


def admitted(aligned: Tensor, thresholds: Tensor) -> Tensor:
    """Eq. (17). Enqueue(u, q̃) ⟺ max q̃ > τ_i with i = argmax q̃.

    Args:
        aligned: q̃ [B, n].
        thresholds: τ [n].

    Returns:
        bool [B].

    >>> admitted(torch.tensor([[0.6, 0.4], [0.3, 0.7]]), torch.tensor([0.6, 0.5]))
    tensor([False,  True])
    """
    maximum, i = aligned.max(-1, keepdim=True)
    return (maximum > thresholds.expand_as(aligned).gather(-1, i)).squeeze(-1)


def _invert(matrix: Tensor) -> Tensor:
    """The inverse of positive definite matrices [..., n, n], by Gauss and Jordan.

    Written element by element, because torch's GPU solvers copy their status to the host.
    """
    n = matrix.shape[-1]
    identity = torch.eye(n, dtype=matrix.dtype, device=matrix.device)
    values = torch.cat((matrix, identity.expand_as(matrix)), dim=-1)
    for k in range(n):
        pivot = values[..., k : k + 1, :] / values[..., k : k + 1, k : k + 1]
        values = values - (values[..., k : k + 1] - identity[:, k : k + 1]) * pivot
    return values[..., n:]
