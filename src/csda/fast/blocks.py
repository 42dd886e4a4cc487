"""The paper's encoder, with its convolution blocks computed by one function."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import torch
from torch import Tensor, nn

from csda.fast import kernels
from csda.models.alexnet import Block
from csda.models.encoder import Encoder

ACTIVATIONS = 32
"""Smallest number of channels of an activation. Images have fewer."""


class FusedEncoder(Encoder):
    """An encoder, or a part of one, whose first blocks are computed together by kernels where these support them."""

    def forward(self, *images: Tensor) -> Tensor:
        blocks = self._blocks()
        if not _fusible(blocks, *images):
            return super().forward(*images)
        return self._rest(blocks, _run(blocks, *images))

    def forward_apart(self, *images: Tensor) -> Tensor:
        blocks = self._blocks()
        body, _ = self.split()
        together = len(blocks) == len(body) and _fusible(blocks, *images)
        if not together or not all(_fusible(blocks, part) for part in images):
            return super().forward_apart(*images)
        return self._rest(blocks, _run(blocks, *images, sizes=[len(part) for part in images]))

    def _blocks(self) -> list[nn.Module]:
        return list(takewhile(lambda stage: isinstance(stage, Block), self))

    def _rest(self, blocks: Sequence[nn.Module], values: Tensor) -> Tensor:
        for stage in list(self)[len(blocks) :]:
            values = stage(values)
        return values


def fuse(encoder: Encoder) -> Encoder:
    """An encoder with the same stages, so with the same weights and names. An encoder without such blocks is returned
    as it is.
    """
    if not isinstance(encoder[0], Block):
        return encoder
    return FusedEncoder(*encoder, width=encoder.width).train(encoder.training)


def _fusible(blocks: Sequence[nn.Module], *inputs: Tensor) -> bool:
    """Whether the kernels give the same result as the blocks: bfloat16 on a GPU, and BatchNorm that learns or only
    predicts.
    """
    values, number = inputs[0], sum(map(len, inputs))
    if not blocks or not kernels.supported(values.device) or kernels.matrix_dtype() != torch.bfloat16:
        return False
    norms = _norms(blocks)
    learns = torch.is_grad_enabled() and any(value.requires_grad for block in blocks for value in block.parameters())
    return (
        len(norms) == len(blocks)
        and all(norm.training == norms[0].training for norm in norms)
        and (norms[0].training or not learns)
        and number > 1
        and all(side % 2 ** len(blocks) == 0 for side in values.shape[2:])  # every block halves the image exactly
        and max(8, values.shape[1]) * number * values.shape[2:].numel() < 2**31  # the kernels count in 32 bits
        # Images are packed, be they one tensor or several, and no gradient goes to them.
        and (not any(part.requires_grad for part in inputs) if values.shape[1] < ACTIVATIONS else len(inputs) == 1)
    )


def _run(blocks: Sequence[nn.Module], *inputs: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
    from csda.fast.convolution import run_blocks

    parameters = [value for block in blocks for value in block.parameters()]
    return run_blocks(inputs, _norms(blocks), parameters, torch.bfloat16, sizes)


def _norms(blocks: Sequence[nn.Module]) -> list[nn.BatchNorm2d]:
    """The BatchNorm layers of torch. A BatchNorm over several processes is of another class and is left out."""
    return [module for block in blocks for module in block.children() if type(module) is nn.BatchNorm2d]
