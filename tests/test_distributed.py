"""Several processes train what one does: the same predictions, in float64 and with gloo, to 1e-8."""

from __future__ import annotations

import multiprocessing
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from csda.errors import ConfigError
from csda.methods import METHODS
from csda.models.backbones import BACKBONES, build_encoder
from csda.models.batch_norm import SharedBatchNorm2d
from csda.models.two_stream import TwoStream
from csda.ranks import Ranks
from csda.runs import Run
from csda.training import configure, require_possible
from in_double import train_all
from tiny import arguments

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["in_double", "csda.data.folder", "torch._dynamo", "torch.distributed.nn"])

SIZES: dict[str, Any] = {
    "batch_size": 7,
    "unlabeled_batch_size": 9,
    "eval_batch_size": 15,
    "steps_per_epoch": 2,
    "checkpoint_seconds": 1000,
}
"""None of them can be halved."""
QUEUE: dict[str, Any] = {"capacity": 13, "refresh_batch_size": 15}
CASES: dict[str, dict[str, Any]] = {
    **{name: {"method": name, "dropout": 0.0} for name in METHODS},
    "csda with dropout": {"dropout": 0.5},
    "csda by epoch": {
        "dropout": 0.0,
        "refresh": "epoch",
        "order": "train_first",
        "teacher_update": "epoch",
        "temperature": "adaptive",
    },
    "two passes, a training teacher": {"dropout": 0.0, "passes": "two", "teacher_mode": "train"},
}


def _environment(rank: int, size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def folders(tiny_images: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """All cases, trained by one process and by two."""
    alone, together = tmp_path_factory.mktemp("alone"), tmp_path_factory.mktemp("together")
    cases = []
    for case in CASES.values():
        own = METHODS[case.get("method", "csda")].settings.model_fields
        cases.append(SIZES | {key: value for key, value in QUEUE.items() if key in own} | case)
    port = _free_port()
    work = [(alone, {}), *((together, _environment(rank, 2, port)) for rank in range(2))]
    processes = [PROCESSES.Process(target=train_all, args=(tiny_images, out, cases, env)) for out, env in work]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    return alone, together


def _assert_same(run: Run, other: Run) -> None:
    np.testing.assert_allclose(run.predictions.probs, other.predictions.probs, rtol=0, atol=1e-8)
    assert run.predictions.ids == other.predictions.ids
    assert run.history.keys() == other.history.keys()
    for name, values in run.history.items():
        np.testing.assert_allclose(values, other.history[name], rtol=0, atol=1e-8, err_msg=name)
    for row, its in zip(run.metrics, other.metrics, strict=True):
        assert row | {"seconds": 0} == pytest.approx(its | {"seconds": 0}, rel=0, abs=1e-8)


@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_what_one_does(case: str, folders: tuple[Path, Path]) -> None:
    alone, together = (Run(folder / str(list(CASES).index(case))) for folder in folders)
    assert together.environment["processes"] == 2
    assert alone.history["test_probs"].dtype == np.float64
    _assert_same(together, alone)
