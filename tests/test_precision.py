"""Precision is a matter of speed, not of results."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, stdev

import pytest
import torch

from tiny import train_tiny

SEEDS = range(10)


def test_bf16_and_float32_agree_within_the_spread_over_seeds(tiny_images: Path, tmp_path: Path) -> None:
    """On a GPU also with its own kernels and graphs against eager steps of torch's. Draws are others then, which five
    seeds are too few for."""
    plain = {"precision": "float32", "kernels": False, "cuda_graph": False}
    scores: dict[str, list[float]] = {}
    for name, settings in (("plain", plain), ("fast", {"precision": "bf16"})):
        runs = [train_tiny(tiny_images, tmp_path / f"{name}-{seed}", seed=seed, **settings) for seed in SEEDS]
        scores[name] = [run.result["auc_last20"] for run in runs]
    assert scores["fast"] != scores["plain"], "the precision changed nothing at all"
    assert abs(mean(scores["fast"]) - mean(scores["plain"])) <= stdev(scores["plain"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tf32_is_allowed_where_it_is_asked_for(tiny_images: Path, tmp_path: Path) -> None:
    train_tiny(tiny_images, tmp_path / "tf32", precision="tf32")
    assert torch.backends.cuda.matmul.allow_tf32
    train_tiny(tiny_images, tmp_path / "float32", precision="float32")
    assert not torch.backends.cuda.matmul.allow_tf32
