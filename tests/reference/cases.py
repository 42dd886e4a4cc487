"""Random cases: probabilities with the edges that occur in training, and a guard against copies to the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

thoroughly = settings(max_examples=300, deadline=None, derandomize=True, database=None)

CLASS_NUMBERS = st.one_of(st.integers(2, 9), st.sampled_from([2, 7, 30]))


@dataclass
class Case:
    """A source of random tensors of one dtype for n classes."""

    n: int
    dtype: torch.dtype
    random: np.random.Generator

    @property
    def tolerance(self) -> dict[str, float]:
        return {"rtol": 2e-4, "atol": 2e-5} if self.dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-12}

    @contextmanager
    def default_dtype(self) -> Iterator[None]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    def probs(self, *shape: int, n: int | None = None) -> Tensor:
        """Distributions [*shape, n]: smooth, peaked, with exact zeros, with ties, and with all on one class."""
        n = n or self.n
        rows = np.empty((int(np.prod(shape)), n))
        for row in rows:
            match self.random.integers(6):
                case 0:
                    row[:] = self.random.random(n) + 1e-3
                case 1:
                    row[:] = self.random.random(n) ** 8
                case 2:
                    row[:] = self.random.random(n) * (self.random.random(n) < 0.5)
                case 3:
                    row[:] = self.random.integers(0, 3, n)
                case 4:
                    row[:] = np.eye(n)[self.random.integers(n)]
                case 5:
                    row[:] = 1
            row[:] = row / row.sum() if row.sum() > 0 else 1 / n
        return torch.tensor(rows.reshape(*shape, n), dtype=self.dtype)

    def marginals(self) -> Tensor:
        return self.probs(self.n)

    def confidences(self) -> Tensor:
        match self.random.integers(4):
            case 0:
                values = np.zeros(self.n)
            case 1:
                values = self.random.integers(0, 3, self.n) / 2
            case _:
                values = self.random.random(self.n)
        return torch.tensor(values, dtype=self.dtype)

    def labels(self, size: int) -> Tensor:
        """Mostly a few of the classes, so that others are absent."""
        return torch.tensor(self.random.integers(self.random.integers(1, self.n + 1), size=size), dtype=torch.int64)


@st.composite
def cases(draw: Callable[..., Any], numbers: st.SearchStrategy[int] = CLASS_NUMBERS) -> Case:
    return Case(
        n=draw(numbers),
        dtype=draw(st.sampled_from([torch.float32, torch.float64])),
        random=np.random.default_rng(draw(st.integers(0, 2**32 - 1))),
    )


class OnDevice(TorchDispatchMode):
    """Refuses every operation that would copy to the host, or whose shape depends on values."""

    REFUSED = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "item", "equal", "bincount", "_unique2")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in self.REFUSED, f"{name} copies to the host"
        if name in ("index", "index_put", "index_put_"):
            assert all(i is None or i.dtype != torch.bool for i in args[1]), "a boolean index copies to the host"
        return func(*args, **(kwargs or {}))
