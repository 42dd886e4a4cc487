"""A linear layer whose gradients come in float32 straight from the matrix product, where a GPU computes in bfloat16."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from csda import kernels


class Linear(nn.Linear):
    """`nn.Linear`, but for one thing: under autocast torch rounds the gradients of the weights to bfloat16 and writes
    them once more in float32, and adds up those of the bias at a tenth of the memory's pace."""

    def forward(self, values: Tensor) -> Tensor:
        if (
            kernels.usable(values)
            and kernels.matrix_dtype() == torch.bfloat16
            and "dtype" in torch.ops.aten.mm.overloads()
        ):
            product: Tensor = _Product.apply(values, self.weight, self.bias)  # type: ignore[no-untyped-call]
            return product
        return super().forward(values)


class _Product(torch.autograd.Function):
    """values [B, I] · weightᵀ [I, O] + bias [O] in bfloat16."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        values, weight = values.bfloat16(), weight.bfloat16()
        ctx.save_for_backward(values, weight)
        return F.linear(values, weight, bias.bfloat16())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        values, weight = ctx.saved_tensors
        of_values = gradient @ weight if ctx.needs_input_grad[0] else None
        of_weight = torch.mm(gradient.T, values, out_dtype=torch.float32)
        of_bias = torch.mm(gradient.new_ones(1, len(gradient)), gradient, out_dtype=torch.float32)[0]
        return of_values, of_weight, of_bias
