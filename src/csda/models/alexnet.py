"""The paper's network: a small AlexNet, the one of the GLM and Neighbor Matching experiments.

Five blocks `Conv(k=4, s=2, p=1) → ReLU → BatchNorm` halve the image five times; two linear layers with dropout end
the encoder θ_e in 256 features, and `ReLU → Linear` is the shared head θ_fc. With 128×128 colour images and seven
classes that is 9,691,591 parameters, the paper's 9.692M.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import torch
from torch import Tensor, nn

from csda.fast import kernels
from csda.fast.linear import Linear
from csda.models.dropout import Dropout
from csda.models.encoder import Encoder

FEATURES = 256
_CHANNELS = (32, 32, 64, 64, 128)
_HIDDEN = 4096


class Block(nn.Sequential):
    """`Conv(k=4, s=2, p=1) → ReLU → BatchNorm`."""

    def __init__(self, inputs: int, outputs: int) -> None:
        convolution = nn.Conv2d(inputs, outputs, kernel_size=4, stride=2, padding=1)
        super().__init__(convolution, nn.ReLU(), nn.BatchNorm2d(outputs))

    def forward(self, values: Tensor) -> Tensor:
        if _fusible([self], values):
            return _fused([self], values)
        for layer in self:
            values = layer(values)
        return values


class AlexNet(Encoder):
    """Blocks, then linear layers, or a part of them; called together, the blocks run together."""

    def forward(self, *images: Tensor) -> Tensor:
        blocks = list(takewhile(lambda stage: isinstance(stage, Block), self))
        if not _fusible(blocks, *images):
            return super().forward(*images)
        values = _fused(blocks, *images)
        for stage in list(self)[len(blocks) :]:
            values = stage(values)
        return values

    def forward_apart(self, *images: Tensor) -> Tensor:
        *blocks, linear = self
        if not _fusible(blocks, *images) or not all(_fusible(blocks, part) for part in images):
            return super().forward_apart(*images)
        features: Tensor = linear(_fused(blocks, *images, sizes=[len(part) for part in images]))
        return features


def alexnet(image_size: int, channels: int, dropout: float = 0.5) -> AlexNet:
    """The encoder θ_e as a sequence of six stages, images [B, channels, S, S] to features [B, 256]."""
    blocks = [Block(*sizes) for sizes in zip((channels, *_CHANNELS), _CHANNELS, strict=False)]
    flat = _CHANNELS[-1] * (image_size // 2 ** len(_CHANNELS)) ** 2
    linear = nn.Sequential(
        nn.Flatten(),
        Dropout(dropout),
        Linear(flat, _HIDDEN),
        nn.ReLU(),
        Dropout(dropout),
        Linear(_HIDDEN, FEATURES),
    )
    return AlexNet(*blocks, linear)


def _fusible(blocks: Sequence[nn.Module], *inputs: Tensor) -> bool:
    """Whether `_fused` gives what the blocks would: bfloat16 on a GPU, BatchNorm that learns or only predicts."""
    values, number = inputs[0], sum(map(len, inputs))
    if not blocks or not kernels.usable(values) or kernels.matrix_dtype() != torch.bfloat16:
        return False
    norms = _norms(blocks)
    learns = torch.is_grad_enabled() and any(value.requires_grad for block in blocks for value in block.parameters())
    return (
        len(norms) == len(blocks)
        and all(norm.training == norms[0].training for norm in norms)
        and (norms[0].training or not learns)
        and number > 1
        and max(8, values.shape[1]) * number * values.shape[2:].numel() < 2**31  # the kernels count in 32 bits
        # Images are packed, be they one tensor or several, and no gradient goes to them.
        and (not any(part.requires_grad for part in inputs) if values.shape[1] < _CHANNELS[0] else len(inputs) == 1)
    )


def _fused(blocks: Sequence[nn.Module], *inputs: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
    from csda.fast.convolution import run_blocks

    parameters = [value for block in blocks for value in block.parameters()]
    return run_blocks(inputs, _norms(blocks), parameters, torch.bfloat16, sizes)


def _norms(blocks: Sequence[nn.Module]) -> list[nn.BatchNorm2d]:
    """BatchNorm as it is here; one that works across processes is another class."""
    return [module for block in blocks for module in block.children() if type(module) is nn.BatchNorm2d]
