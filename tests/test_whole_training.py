"""A run is what its algorithm says: predictions after every epoch are those of a plain loop, to 1e-9."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import numpy as np
import pytest

from csda.runs import Run
from in_double import use_double
from reference.whole_training import train_by_hand
from tiny import train_tiny

CASES = {
    "baseline": ("baseline", "default", {}),
    "upper bound": ("upper-bound", "default", {}),
    "self-train": ("self-train", "default", {}),
    "nm": ("nm", "default", {}),
    "da": ("da", "default", {}),
    "vcq": ("vcq", "default", {}),
    "csda": ("csda", "default", {}),
    "csda as the paper has it": ("csda", "paper", {}),
    "csda with marginals of the first epoch": ("csda", "default", {"labeled_from": "start"}),
    "csda with shares of the batch": ("csda", "paper", {"share": "batch"}),
}
"""Method, preset and settings."""


def _train_twice(images: Path, out: Path) -> None:
    use_double()
    for case, (method, preset, settings) in CASES.items():
        run = train_tiny(images, out / case, method=method, preset=preset, epochs=4, seed=3, lr=0.05, **settings)
        np.save(out / f"{case}.npy", np.stack([values.numpy() for values in train_by_hand(images, run)]))


@pytest.fixture(scope="module")
def trained(tiny_images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trainings of a process of their own, which computes in float64 by changing torch."""
    out = tmp_path_factory.mktemp("whole")
    process = multiprocessing.get_context("spawn").Process(target=_train_twice, args=(tiny_images, out))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    return out


@pytest.mark.parametrize("case", CASES)
def test_a_plain_loop_predicts_the_same(case: str, trained: Path) -> None:
    found = Run(trained / case).history["test_probs"]
    assert found.dtype == np.float64
    assert np.abs(np.diff(found, axis=0)).max(axis=(1, 2)).min() > 1e-3  # every epoch has learned something
    np.testing.assert_allclose(found, np.load(trained / f"{case}.npy"), rtol=0, atol=1e-9)
