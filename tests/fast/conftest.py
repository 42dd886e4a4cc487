"""Kernels are tested on a GPU, or on the CPU by Triton's interpreter: `TRITON_INTERPRET=1 pytest tests/fast`."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        return torch.device("cuda")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels need a GPU, or TRITON_INTERPRET=1")
    return torch.device("cpu")
