"""When and how Triton kernels are used; without a GPU nothing here is used.

Where `supported` says no, the plain torch code runs, which is also what the kernels are tested against.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

_launch = threading.RLock()


def supported(device: torch.device) -> bool:
    """Whether there are kernels for this device: a GPU that has bfloat16, where Triton 3.3 is installed."""
    return device.type == "cuda" and _supported(torch.cuda.current_device() if device.index is None else device.index)


@contextmanager
def launching(tensor: Tensor) -> Iterator[None]:
    """Within this context kernels go to the tensor's device, and this is the only thread to launch any.

    Triton loads what launches a kernel under one module name. Python then gives one module to all that load the same
    file again, so that a thread which reads it late finds the launcher of another kernel.
    """
    with _launch, torch.cuda.device_of(tensor):
        yield


def matrix_dtype() -> torch.dtype:
    """What matrix products on a GPU compute in just now: bfloat16 under such an autocast, otherwise float32."""
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else torch.float32


def tile_width(channels: int, most: int) -> int:
    """Channels of a tile: a power of two, half of it where a quarter of the last tile would be empty."""
    width = min(most, max(16, 1 << (channels - 1).bit_length()))
    return max(16, width // 2) if channels * 4 < 3 * -(-channels // width) * width else width


@cache
def _supported(device: int) -> bool:
    if find_spec("triton") is None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    import triton.language

    # Kernels take tuples of numbers, as they can since 3.3.
    return hasattr(triton.language, "tuple")
