"""Mean predictions of each class, kept by exponential moving averages, Eq. (11)."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from csda.alignment import (
    absent_confidence,
    absent_rows,
    align,
    align_agnostic,
    change_basis,
    class_sums,
    estimate_basis,
    normalize,
    shrink,
    temper,
    temperatures,
)
from csda.arguments import (
    readable,
    require_choice,
    require_labels,
    require_number,
    require_shape,
    require_tensor,
    require_whole,
)
from csda.errors import DataError


class ClassMarginals(nn.Module):
    """Eq. (11) to (14). Keep the marginal prediction and mean confidence of each class, and align with them.

    Eq. (11) is EMA_t = EMA_{t-1} · ω + z_t · (1 − ω), where z_t is the mean over the batch's samples of a class. A
    class with no labeled sample in the batch keeps its row of `labeled`. A class that was predicted for no unlabeled
    sample gets the estimate of Eq. (13). Rows begin uniform, and a class's first observation replaces its row; `start`
    replaces all of them at once.

    Args:
        num_classes: n.
        momentum: ω.
        temperature: "adaptive" for Eq. (14), "unlabeled" for the same with c^u instead of c^x, which grows as the
            labels are memorised, or one number for every class; 1 switches tempering off.
            It is applied when aligning and never written back into `labeled`.
        temperature_floor: lower bound of Eq. (14).
        condition: what row i of `labeled` is the mean over: labeled samples whose "label" is i, as in the paper, or
            whose "prediction" is i, as on the unlabeled side. "truth" takes the samples with prediction i as well, and
            averages their labels: how often a sample predicted as i is of class j. This is useful if the model has not
            learned from these samples.
        against: what λ^x is divided by: λ^u, from "unlabeled" samples, as in the paper, or the mean predictions on the
            same "labeled" samples. With the condition "truth" the latter divides observed by predicted frequencies of
            the same samples, which calibrates predictions class by class and does not depend on the class frequencies
            of the unlabeled samples.
        shrinkage: κ of `shrink`; 0 for none.
        basis: "diagonal" for Eq. (8), or ρ of `estimate_basis` for the general M of Eq. (7).
        absent: whether the estimate of Eq. (13) is to "replace" the row, as in the paper, or is averaged into it by
        "ema".
        share: whether c_i is divided by the samples of the "class", K_i as Eq. (12) is explained, or by all samples of
            the "batch", K, so that c_i also grows with the frequency of the class, as the paper says of T and of γ = 1.
        num_labels: K in a multi-label task, with two classes each: then buffers and arguments have an axis K before
            that of the classes, and labels are 0 or 1, [B, K].
        process_group: processes that share their samples and so hold the same averages.

    Attributes:
        labeled: λ^x [n, n]; row i is the mean prediction for class i.
        unlabeled: λ^u [n, n]. A sample belongs to the class that is predicted for it.
        labeled_confidence: c^x [n].
        unlabeled_confidence: c^u [n]. Not the diagonal of λ^u: Eq. (13) averages other ratios for it.

    >>> marginals = ClassMarginals(num_classes=2, temperature=1.0)
    >>> marginals.start(torch.tensor([[0.8, 0.2], [0.4, 0.6]]), torch.tensor([0, 1]))
    >>> marginals.update_unlabeled(torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.4, 0.6]]))
    >>> marginals.unlabeled
    tensor([[0.8100, 0.1900],
            [0.4000, 0.6000]])
    >>> marginals.align(torch.tensor([[0.81, 0.19]]))
    tensor([[0.8000, 0.2000]])
    """

    labeled: Tensor
    unlabeled: Tensor
    labeled_confidence: Tensor
    unlabeled_confidence: Tensor
    labeled_observed: Tensor
    unlabeled_observed: Tensor
    labeled_predicted: Tensor
    labeled_numbers: Tensor

    def __init__(
        self,
        num_classes: int,
        momentum: float = 0.95,
        temperature: float | Literal["adaptive", "unlabeled"] = "adaptive",
        temperature_floor: float = 0.0,
        *,
        condition: Literal["label", "prediction", "truth"] = "label",
        against: Literal["unlabeled", "labeled"] = "unlabeled",
        shrinkage: float = 0.0,
        basis: float | Literal["diagonal"] = "diagonal",
        absent: Literal["replace", "ema"] = "replace",
        share: Literal["class", "batch"] = "class",
        num_labels: int | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        _require_sizes(num_classes, num_labels)
        require_number("momentum", momentum, 1, below=True)
        if isinstance(temperature, str):
            require_choice("temperature", temperature, "adaptive", "unlabeled")
        else:
            require_number("temperature", temperature)
        require_number("temperature_floor", temperature_floor, 1)
        require_choice("condition", condition, "label", "prediction", "truth")
        require_choice("against", against, "unlabeled", "labeled")
        require_number("shrinkage", shrinkage)
        if isinstance(basis, str):
            require_choice("basis", basis, "diagonal")
        else:
            require_number("basis", basis)
        require_choice("absent", absent, "replace", "ema")
        require_choice("share", share, "class", "batch")
        self.num_classes = num_classes
        self.num_labels = num_labels
        self.momentum = momentum
        self.temperature = temperature
        self.temperature_floor = temperature_floor
        self.condition = condition
        self.against = against
        self.shrinkage = shrinkage
        self.basis = basis
        self.absent = absent
        self.share = share
        self.process_group = process_group
        classes = _shape(num_classes, num_labels)
        for part in ("labeled", "unlabeled"):
            self.register_buffer(part, torch.empty(*classes, num_classes))
            self.register_buffer(f"{part}_confidence", torch.empty(classes))
            # 1 if a row is a mean of samples, else 0; a float, so that it has the dtype of the rows.
            self.register_buffer(f"{part}_observed", torch.empty(classes))
        # The mean prediction of the samples behind each row of λ^x, and their number in the last pass over all.
        self.register_buffer("labeled_predicted", torch.empty(*classes, num_classes))
        self.register_buffer("labeled_numbers", torch.empty(classes))
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Forget all samples: rows and confidences are uniform again, in place."""
        uniform = (self.labeled, self.unlabeled, self.labeled_predicted)
        for values in (*uniform, self.labeled_confidence, self.unlabeled_confidence):
            values.fill_(1 / self.num_classes)
        for none in (self.labeled_observed, self.unlabeled_observed, self.labeled_numbers):
            none.zero_()

    def extra_repr(self) -> str:
        return (
            f"num_classes={self.num_classes}, momentum={self.momentum}, temperature={self.temperature!r}, "
            f"temperature_floor={self.temperature_floor}, condition={self.condition!r}, against={self.against!r}, "
            f"shrinkage={self.shrinkage}, basis={self.basis!r}, absent={self.absent!r}, "
            f"share={self.share!r}, num_labels={self.num_labels}"
        )

    @torch.no_grad()
    def start(self, probs: Tensor, labels: Tensor) -> None:
        """Take λ^x and c^x exactly from one pass over the labeled set, and set λ^u := λ^x and c^u := c^x.

        If `condition` is not "label", a class that is never predicted starts from the predictions on the samples with
        this label, and its row counts as one without samples.

        Args:
            probs: [N, n], predictions on the whole labeled set.
            labels: int64 [N].
        """
        self._require(probs, labels)
        require_labels(labels, self.num_classes)
        rows, own, present, numbers = self._class_means(probs, labels)
        predictions = rows
        if missing := (~present).nonzero().tolist():
            names = ", ".join(" = ".join(map(str, class_index)) for class_index in missing)
            kind = "class" if present.dim() == 1 else "label"
            raise DataError(f"No labeled image has {kind} {names}; label at least one or leave that {kind} out.")
        if self.condition != "label":
            predicted_rows, predicted_own, predicted, numbers = self._class_means(
                self._told(probs, labels), probs.argmax(-1)
            )
            predicted_as, *_ = self._class_means(probs, probs.argmax(-1))
            rows = torch.where(predicted[..., None], predicted_rows, rows)
            own = torch.where(predicted, predicted_own, own)
            predictions = torch.where(predicted[..., None], predicted_as, predictions)
        self.labeled.copy_(rows)
        self.labeled_predicted.copy_(predictions)
        self.labeled_numbers.copy_(numbers)
        # λ^u is always a mean of predictions.
        self.unlabeled.copy_(predictions if self.condition == "truth" else rows)
        for confidence in (self.labeled_confidence, self.unlabeled_confidence):
            confidence.copy_(own)
        for observed in (self.labeled_observed, self.unlabeled_observed):
            observed.fill_(1)

    @torch.no_grad()
    def update_labeled(self, probs: Tensor, labels: Tensor) -> None:
        """Eq. (11) and (12). λ_i^x ← λ_i^x · ω + mean p · (1 − ω), and c_i^x likewise, for each class i in the batch.

        Args:
            probs: p [B, n], predictions on labeled samples.
            labels: int64 [B]. Values are checked only on a CPU, because a step on a GPU must copy nothing to the host.
        """
        self._require(probs, labels)
        if readable(labels):
            require_labels(labels, self.num_classes)
        classes = labels if self.condition == "label" else probs.argmax(-1)
        rows, own, present, _ = self._class_means(self._told(probs, labels), classes)
        rate = 1 - self.momentum * self.labeled_observed
        if_present = rate * present
        self.labeled.lerp_(rows, if_present[..., None])
        if self.condition == "truth":
            self.labeled_predicted.lerp_(self._class_means(probs, classes)[0], if_present[..., None])
        # With "batch", a class that is not in the batch has a share of 0.
        self.labeled_confidence.lerp_(own, rate if self.share == "batch" else if_present)
        self.labeled_observed.masked_fill_(present, 1)

    @torch.no_grad()
    def update_unlabeled(self, probs: Tensor) -> None:
        """Eq. (13). λ_i^u ← λ_i^u · ω + mean q · (1 − ω), or its estimate where no sample was predicted as i.

        Args:
            probs: q [B, n], predictions on unlabeled samples.
        """
        self._require(probs)
        rows, own, present, _ = self._class_means(probs, probs.argmax(-1))
        confidence = torch.where(present, own, absent_confidence(self.labeled_confidence, self.unlabeled_confidence))
        rows = torch.where(present[..., None], rows, absent_rows(self.labeled, self.unlabeled))
        rate = 1 - self.momentum * self.unlabeled_observed
        rate = rate.masked_fill(~present, 1 if self.absent == "replace" else 1 - self.momentum)
        self.unlabeled.lerp_(rows, rate[..., None])
        self.unlabeled_confidence.lerp_(confidence, rate)
        self.unlabeled_observed.masked_fill_(present, 1)

    @torch.no_grad()
    def align(self, probs: Tensor) -> Tensor:
        """Eq. (10), with Normalize((λ_i^x)^T_i) instead of λ_i^x, or with the rows M λ^u.

        Args:
            probs: q [B, n].

        Returns:
            q̃ [B, n].
        """
        self._require(probs)
        labeled, divisor = temper(self.labeled, self.temperatures()), self.unlabeled
        if self.against == "labeled":
            divisor = self.labeled_predicted
        if not isinstance(self.basis, str):
            labeled = normalize(change_basis(estimate_basis(labeled, divisor, self.basis), divisor).clamp(min=0))
        if self.shrinkage:
            labeled, divisor = (shrink(rows, self.labeled_numbers, self.shrinkage) for rows in (labeled, divisor))
        return align(probs, labeled, divisor)

    @torch.no_grad()
    def start_unlabeled(self, probs: Tensor) -> None:
        """Take λ^u and c^u exactly from one pass over the unlabeled set, after `start`. A class that no sample is
        predicted as keeps its values.

        Args:
            probs: [N, n], predictions on the whole unlabeled set.
        """
        self._require(probs)
        rows, own, present, _ = self._class_means(probs, probs.argmax(-1))
        self.unlabeled.copy_(torch.where(present[..., None], rows, self.unlabeled))
        self.unlabeled_confidence.copy_(torch.where(present, own, self.unlabeled_confidence))

    @torch.no_grad()
    def temperatures(self) -> Tensor:
        """Eq. (14). T [n], or the constant that is used instead."""
        if self.temperature == "adaptive":
            return temperatures(self.labeled_confidence, self.temperature_floor)
        if self.temperature == "unlabeled":
            return temperatures(self.unlabeled_confidence, self.temperature_floor)
        return torch.full_like(self.labeled_confidence, self.temperature)

    def _require(self, probs: Tensor, *labels: Tensor) -> None:
        _require_batch(self.labeled_confidence.shape, probs, *labels)

    def _told(self, probs: Tensor, labels: Tensor) -> Tensor:
        """The values that rows of λ^x are means of: predictions, or labels as distributions."""
        if self.condition != "truth":
            return probs
        return (labels[..., None] == torch.arange(self.num_classes, device=labels.device)).to(probs.dtype)

    def _class_means(self, probs: Tensor, classes: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Eq. (12). The mean over the samples of each class, 0 without any; c; which classes have samples; how many."""
        sums, numbers = class_sums(probs.to(self.labeled.dtype), classes)
        _reduce(self.process_group, sums, numbers)
        rows = sums / numbers.clamp(min=1)[..., None]
        own = _diagonal(rows) if self.share == "class" else _diagonal(sums) / numbers.sum(-1, keepdim=True)
        return rows, own, numbers > 0, numbers


class AgnosticMarginals(nn.Module):
    """Eq. (11) for the marginals of all classes together, and ReMixMatch's alignment with them.

    It has the methods of `ClassMarginals` but no confidences. If a queue needs those, keep both.

    Args:
        num_classes: n.
        momentum: ω.
        source: what the labeled marginal is the mean of: the "prediction", as in this paper, or the "label", as in
            ReMixMatch.
        num_labels: K in a multi-label task, as in `ClassMarginals`.
        process_group: processes that share their samples.

    Attributes:
        labeled: λ^x [n].
        unlabeled: λ^u [n].

    >>> marginals = AgnosticMarginals(num_classes=2)
    >>> marginals.update_labeled(torch.tensor([[0.8, 0.2], [0.2, 0.8]]), torch.tensor([0, 1]))
    >>> marginals.update_unlabeled(torch.tensor([[0.8, 0.2], [0.7, 0.3]]))
    >>> marginals.align(torch.tensor([[0.6, 0.4]]))
    tensor([[0.3333, 0.6667]])
    """

    labeled: Tensor
    unlabeled: Tensor
    labeled_observed: Tensor
    unlabeled_observed: Tensor

    def __init__(
        self,
        num_classes: int,
        momentum: float = 0.95,
        *,
        source: Literal["prediction", "label"] = "prediction",
        num_labels: int | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        _require_sizes(num_classes, num_labels)
        require_number("momentum", momentum, 1, below=True)
        require_choice("source", source, "prediction", "label")
        self.num_classes = num_classes
        self.num_labels = num_labels
        self.momentum = momentum
        self.source = source
        self.process_group = process_group
        for part in ("labeled", "unlabeled"):
            self.register_buffer(part, torch.empty(_shape(num_classes, num_labels)))
            self.register_buffer(f"{part}_observed", torch.empty(()))
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Forget all samples: both marginals are uniform again, in place."""
        for values in (self.labeled, self.unlabeled):
            values.fill_(1 / self.num_classes)
        for observed in (self.labeled_observed, self.unlabeled_observed):
            observed.zero_()

    def extra_repr(self) -> str:
        return (
            f"num_classes={self.num_classes}, momentum={self.momentum}, source={self.source!r}, "
            f"num_labels={self.num_labels}"
        )

    @torch.no_grad()
    def start(self, probs: Tensor, labels: Tensor) -> None:
        """Take λ^x exactly from one pass over the labeled set, predictions [N, n] and labels [N], and λ^u := λ^x."""
        _require_batch(self.labeled.shape, probs, labels)
        require_labels(labels, self.num_classes)
        for observed in (self.labeled_observed, self.unlabeled_observed):
            observed.zero_()
        self.update_labeled(probs, labels)
        self.unlabeled.copy_(self.labeled)
        self.unlabeled_observed.copy_(self.labeled_observed)

    @torch.no_grad()
    def update_labeled(self, probs: Tensor, labels: Tensor) -> None:
        """Eq. (11). λ^x ← λ^x · ω + mean p · (1 − ω), for predictions p [B, n] on samples with labels [B].

        Values of labels are checked only on a CPU, as in `ClassMarginals`.
        """
        _require_batch(self.labeled.shape, probs, labels)
        if readable(labels):
            require_labels(labels, self.num_classes)
        if self.source == "label":
            probs = labels[..., None] == torch.arange(probs.shape[-1], device=probs.device)
        self._average(self.labeled, self.labeled_observed, probs)

    @torch.no_grad()
    def update_unlabeled(self, probs: Tensor) -> None:
        """Eq. (11). λ^u ← λ^u · ω + mean q · (1 − ω), for predictions q [B, n]."""
        _require_batch(self.labeled.shape, probs)
        self._average(self.unlabeled, self.unlabeled_observed, probs)

    @torch.no_grad()
    def start_unlabeled(self, probs: Tensor) -> None:
        """Take λ^u exactly from one pass over the unlabeled set, predictions [N, n], after `start`."""
        _require_batch(self.labeled.shape, probs)
        self.unlabeled_observed.zero_()
        self.update_unlabeled(probs)

    @torch.no_grad()
    def align(self, probs: Tensor) -> Tensor:
        """Eq. (10) without its subscripts, for predictions q [B, n]."""
        _require_batch(self.labeled.shape, probs)
        return align_agnostic(probs, self.labeled, self.unlabeled)

    def _average(self, average: Tensor, observed: Tensor, values: Tensor) -> None:
        total = values.to(average.dtype).sum(0)
        number = torch.full_like(observed, values.shape[0])
        _reduce(self.process_group, total, number)
        rate = (1 - self.momentum * observed) * (number > 0)
        average.lerp_(total / number.clamp(min=1), rate)
        observed.masked_fill_(number > 0, 1)


def _require_sizes(num_classes: int, num_labels: int | None) -> None:
    require_whole("num_classes", num_classes, 1)
    if num_labels is not None:
        require_whole("num_labels", num_labels, 1)


def _require_batch(classes: torch.Size, probs: Tensor, *labels: Tensor) -> None:
    """Predictions [B, n], or [B, K, n], and labels [B], or [B, K], if they are needed."""
    require_tensor("probs", probs)
    batch = probs.shape[:1]
    require_shape("probs", probs, *batch, *classes)
    for values in labels:
        require_shape("labels", values, *batch, *classes[:-1])


def _shape(num_classes: int, num_labels: int | None) -> tuple[int, ...]:
    return (num_classes,) if num_labels is None else (num_labels, num_classes)


def _diagonal(rows: Tensor) -> Tensor:
    return rows.diagonal(dim1=-2, dim2=-1)


def _reduce(group: dist.ProcessGroup | None, *sums: Tensor) -> None:
    if group is not None:
        for values in sums:
            dist.all_reduce(values, group=group)
