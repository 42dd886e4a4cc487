"""The optional tier: everything that exists only to make a training faster on a GPU.

The engine creates an `Accelerator` and calls it; nothing else in the core uses this package. Nothing here changes what
a training computes: these versions are tested against the core.

    graphs.py       steps captured in CUDA graphs and replayed
    overlap.py      the teacher's half of a step, on a second stream
    blocks.py       the paper's convolution blocks as one function, by the kernels of convolution.py
    inverted.py     layers of MobileNetV2 and EfficientNet-Lite, by the kernels of normalization.py and depthwise.py
    linear.py       large weights that are also kept in bfloat16, by the kernels of update.py
    padded.py       layers with padded channels
    views.py        augmentation by the kernels of warp.py
    streaming.py    pixels that stay on the host
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from csda.data.augment import Augmentation
from csda.distributed import Ranks
from csda.fast import kernels
from csda.fast.blocks import fuse
from csda.fast.graphs import EAGER_BATCHES, EAGER_STEPS, Graphs
from csda.fast.inverted import fuse_layers
from csda.fast.linear import Linear, average_weights, in_step, keep_rounded
from csda.fast.overlap import overlap_halves, overlapping
from csda.fast.padded import pad_channels, pad_outputs
from csda.fast.views import FusedAugmentation
from csda.methods.self_training import SelfTraining
from csda.models.two_stream import TwoStream


class Accelerator:
    """Speeds up the steps of one training. `csda.engine.Engine` documents the arguments."""

    def __init__(
        self,
        device: torch.device,
        precision: str,
        *,
        generator: torch.Generator | None,
        capture: bool,
        kernels: bool,
        ranks: Ranks,
    ) -> None:
        self.device = device
        self.precision = precision
        self.wants_kernels = kernels
        self.ranks = ranks
        self.layers: list[Linear] = []
        self.graphs = Graphs(device, generator, self.layers, enabled=capture)

    @property
    def remark(self) -> str | None:
        return self.graphs.remark

    def views(self, augmentation: Augmentation) -> Augmentation:
        if not self.wants_kernels or not kernels.supported(self.device) or not augmentation.as_in_the_paper:
            return augmentation
        return FusedAugmentation(augmentation.rotation, augmentation.translation, augmentation.flip)

    def prepare(self, model: TwoStream, method: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Replace modules and functions of these objects by faster ones; weights and their names stay."""
        # Memory of an eager step must not be freed during a capture.
        self.graphs.before_capture = partial(optimizer.zero_grad, set_to_none=True)
        pad_channels(method)
        if not self.ranks.alone:  # processes that share a pass communicate in between
            return
        if self.wants_kernels and self.precision == "bf16" and kernels.supported(self.device):
            model.student, model.teacher = fuse(model.student), fuse(model.teacher)
            if fuse_layers(model):
                pad_outputs(model.head)
            if isinstance(optimizer, torch.optim.SGD):
                self.layers += keep_rounded(model, optimizer)
                model.average_weights = partial(average_weights, model)  # type: ignore[method-assign]
        if self.device.type == "cuda":
            overlap_halves(model, method, optimizer, self.device)
        if isinstance(method, SelfTraining):
            repeated = partial(self.graphs.run, method.queue_at, eager=EAGER_BATCHES)
            method.queue_at = repeated  # type: ignore[method-assign]

    def run(self, function: Callable[..., None], *arguments: object) -> None:
        """Run a step: eagerly at first, then captured and replayed."""
        self.graphs.run(self._step, function, *arguments, eager=EAGER_STEPS)

    def _step(self, function: Callable[..., None], *arguments: object) -> None:
        with overlapping(), in_step(self.layers):
            function(*arguments)
