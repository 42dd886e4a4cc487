"""When and how Triton kernels are used. Without a GPU nothing here is used.

If `supported` is false the plain torch code runs. The kernels are tested against that code.
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
    """Whether there are kernels for this device: a GPU with bfloat16, and Triton 3.3 or later."""
    return device.type == "cuda" and _supported(torch.cuda.current_device() if device.index is None else device.index)


@contextmanager
def launching(tensor: Tensor) -> Iterator[None]:
    """A context in which kernels run on the tensor's device, and no other thread launches kernels.

    Triton loads the launcher of every kernel under one module name. If two threads load launchers at the same time,
    Python can give one of them the launcher of another kernel.
    """
    with _launch, torch.cuda.device_of(tensor):
        yield


def matrix_dtype() -> torch.dtype:
    """The dtype of matrix products on a GPU at this moment: that of autocast if it is on, otherwise float32."""
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else torch.float32


def tile_width(channels: int, most: int) -> int:
    """Channels per tile: a power of two, halved if more than a quarter of the tiles' channels would be empty."""
    width = min(most, max(16, 1 << (channels - 1).bit_length()))
    return max(16, width // 2) if channels * 4 < 3 * -(-channels // width) * width else width


@cache
def _supported(device: int) -> bool:
    if find_spec("triton") is None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    import triton.language

    # The kernels take tuples of numbers, which needs Triton 3.3.
    return hasattr(triton.language, "tuple")
