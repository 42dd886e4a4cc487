"""Check arguments of the public classes: a `ValueError` names the argument and its allowed values.

Shapes and Python numbers are always checked. Values of labels and indices are checked only if that copies nothing from
a GPU, so that a training step can be captured in a CUDA graph.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


def require_whole(name: str, value: object, least: int, most: int | None = None) -> None:
    in_range = (
        isinstance(value, int) and not isinstance(value, bool) and least <= value <= (value if most is None else most)
    )
    if not in_range:
        allowed = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"Expected argument `{name}` to be a whole number {allowed}, but got {value!r}.")


def require_number(name: str, value: object, most: float = math.inf, *, below: bool = False) -> None:
    """A finite number from 0 to `most`, or `below` it."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not (number and 0 <= value <= most and not (below and value == most)):  # type: ignore[operator]
        allowed = (
            "of at least 0" if most == math.inf else f"from 0 to {most:g}" + (", which is excluded" if below else "")
        )
        raise ValueError(f"Expected argument `{name}` to be a number {allowed}, but got {value!r}.")


def require_choice(name: str, value: object, *choices: str) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"Expected argument `{name}` to be one of {', '.join(map(repr, choices))}, but got {value!r}.")


def require_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"Expected argument `{name}` to be a tensor, but got a {type(value).__name__}.")


def require_shape(name: str, values: Tensor, *shape: int) -> None:
    require_tensor(name, values)
    if values.shape != shape:
        raise ValueError(f"Expected argument `{name}` to have the shape {list(shape)}, but got {list(values.shape)}.")


def require_labels(labels: Tensor, num_classes: int) -> None:
    """Require whole numbers from 0 to n − 1."""
    values = labels.numpy(force=True)
    outside = values[(values < 0) | (values >= num_classes) | (values != np.floor(values))]
    if len(outside):
        raise ValueError(
            f"Expected argument `labels` to be whole numbers from 0 to {num_classes - 1}, but got {outside[0]}."
        )


def require_positions(name: str, indices: Tensor) -> None:
    """Require numbers of at least 0."""
    values = indices.numpy(force=True)
    if len(values) and values.min() < 0:
        raise ValueError(f"Expected argument `{name}` to be whole numbers of at least 0, but got {values.min()}.")


def readable(values: Tensor) -> bool:
    """Whether values can be read without waiting for a GPU, and outside of a function that is being compiled."""
    return values.device.type == "cpu" and not torch.compiler.is_compiling()
