"""The roofline bound of a step, counted from layer shapes, and the rates of the device.

Layers with weights and batch normalisations are counted, with activations in the precision of the run and parameters in
float32. Every layer is one pass over its input. Elementwise functions (ReLU, dropout) are part of that pass, and
savings by caches between layers are ignored.

- A layer with weights. Forward: two operations per multiply-add; its input is read, its output written. Backward: twice
  the operations, for the gradients of weights and input; the gradient of the output and the input are read, the
  gradient of the input is written. The first layer needs no gradient of its input.
- Batch normalisation: forward, sums are taken when its input is written and applied when its output is read, at no
  cost. Backward in training, its input is read for two more sums, and again for the gradient of the input.
- Parameters are read forward and backward, and their gradient is written. The update reads both and writes the
parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from csda.engine import Precision
from csda.research.bench.timing import Action

FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class Work:
    """Operations of matrix products, and bytes read or written."""

    operations: int = 0
    bytes: int = 0

    def __add__(self, other: Self) -> Work:
        return Work(self.operations + other.operations, self.bytes + other.bytes)


@dataclass(frozen=True, slots=True)
class _Layer:
    inputs: int
    outputs: int
    multiply_adds: int
    """0 in batch normalisation."""


def value_bytes(precision: Precision) -> int:
    """Bytes per activation."""
    return 2 if precision == "bf16" else FLOAT32


def training_work(network: nn.Module, images: tuple[int, ...], precision: Precision) -> Work:
    """Forward, backward and update of a network on images [B, C, H, W]."""
    operations, values = 0, 0
    for position, layer in enumerate(_layers(network, images)):
        first = position == 0
        operations += (2 + (2 if first else 4)) * layer.multiply_adds
        if layer.multiply_adds:
            values += layer.inputs + layer.outputs
            values += layer.outputs + (1 if first else 2) * layer.inputs
        else:
            values += 2 * layer.inputs
    return Work(operations, values * value_bytes(precision) + 6 * parameter_bytes(network))


def inference_work(network: nn.Module, images: tuple[int, ...], precision: Precision) -> Work:
    """A forward pass of a network in evaluation on images [B, C, H, W]."""
    layers = [layer for layer in _layers(network, images) if layer.multiply_adds]
    values = sum(layer.inputs + layer.outputs for layer in layers)
    operations = 2 * sum(layer.multiply_adds for layer in layers)
    return Work(operations, values * value_bytes(precision) + parameter_bytes(network))


def average_work(network: nn.Module) -> Work:
    """A moving average of all parameters: two are read, one is written."""
    return Work(bytes=3 * parameter_bytes(network))


def augmentation_work(images: tuple[int, ...], precision: Precision) -> Work:
    """uint8 images are read, float images are written."""
    return Work(bytes=math.prod(images) * (1 + value_bytes(precision)))


def parameter_bytes(network: nn.Module) -> int:
    return FLOAT32 * sum(value.numel() for value in network.parameters())


def _layers(network: nn.Module, images: tuple[int, ...]) -> list[_Layer]:
    """The counted layers in order, found by a forward pass on torch's meta device."""
    layers = []

    def note(layer: nn.Module, inputs: tuple[Tensor], outputs: Tensor) -> None:
        per_output = layer.weight[0].numel() if isinstance(layer, nn.Conv2d | nn.Linear) else 0
        layers.append(_Layer(inputs[0].numel(), outputs.numel(), outputs.numel() * per_output))

    network = network.to("meta").eval()
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear | nn.BatchNorm2d):
            layer.register_forward_hook(note)
    network(torch.empty(images, device="meta"))
    return layers


def copying(device: torch.device) -> tuple[Action, int]:
    """A large copy on the device, and the bytes it reads and writes."""
    source = torch.ones(2**30 if device.type == "cuda" else 2**26, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source), 2 * len(source)


def multiplying(device: torch.device, precision: Precision) -> tuple[Action, int]:
    """A large matrix product in the precision of the run, and its operations."""
    size = 8192 if device.type == "cuda" else 1024
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    left, right = (torch.randn(size, size, device=device).to(kind) for _ in range(2))
    product = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=product), 2 * size**3
