"""Several processes train what one does: the same predictions, in float64 and with gloo, to 1e-8."""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from csda.distributed import Ranks, _explained
from csda.engine import choose_device
from csda.errors import ConfigError, RunError
from csda.methods import METHODS
from csda.models.backbones import BACKBONES, build_encoder
from csda.models.batch_norm import SharedBatchNorm2d
from csda.models.two_stream import TwoStream
from csda.presets import configure
from csda.progress import Reporter
from csda.runs import Run
from csda.training import require_possible
from in_double import train_all, train_in
from tiny import LABELS, arguments, train_tiny

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
CASES: tuple[dict[str, Any], ...] = (
    # upper-bound is the baseline's code.
    *({"method": name, "dropout": 0.0} for name in METHODS if name not in ("upper-bound", "csda-folds")),
    {"method": "csda-folds", "dropout": 0.0, "folds": 2, "fold_epochs": 1},
    {"dropout": 0.5},
    {
        "dropout": 0.0,
        "refresh": "epoch",
        "order": "train_first",
        "teacher_update": "epoch",
        "temperature": "adaptive",
    },
    {"dropout": 0.0, "passes": "two", "teacher_mode": "train"},
    # On one place an image, as 32 pixels leave, so deep a network multiplies the rounding of statistics beyond 1e-8.
    *({"backbone": name, "image_size": 64, "lr": 0.001} for name in ("efficientnet_lite0", "mobilenet_v2")),
)


def _cache() -> dict[str, str]:
    """That of this test: the server of forks has that of the test which started it."""
    return {"CSDA_CACHE": os.environ["CSDA_CACHE"]}


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


def _train(
    images: Path, out: Path, cases: Sequence[dict[str, Any]], size: int, *, double: bool = True, nudge: float = 0.0
) -> None:
    """Train all cases in so many processes; 0 is one that nobody told of others."""
    port = _free_port()
    environments = [_cache() | _environment(rank, size, port) for rank in range(size)] or [_cache()]
    given = images, out, cases
    processes = [PROCESSES.Process(target=train_all, args=(*given, each, double, nudge)) for each in environments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
        assert process.exitcode == 0


def _assert_same(run: Run, other: Run, case: str) -> None:
    np.testing.assert_allclose(run.predictions.probs, other.predictions.probs, rtol=0, atol=1e-8, err_msg=case)
    assert run.predictions.ids == other.predictions.ids
    assert run.history.keys() == other.history.keys()
    for name, values in run.history.items():
        np.testing.assert_allclose(values, other.history[name], rtol=0, atol=1e-8, err_msg=f"{case}: {name}")
    for row, its in zip(run.metrics, other.metrics, strict=True):
        assert row | {"seconds": 0} == pytest.approx(its | {"seconds": 0}, rel=0, abs=1e-8), case


def test_two_processes_train_what_one_does(tiny_images: Path, tmp_path: Path) -> None:
    cases = []
    for case in CASES:
        own = METHODS[case.get("method", "csda")].settings.model_fields
        cases.append(SIZES | {key: value for key, value in QUEUE.items() if key in own} | case)
    _train(tiny_images, tmp_path / "alone", cases, 0)
    _train(tiny_images, tmp_path / "together", cases, 2)
    for number, case in enumerate(CASES):
        alone, together = (Run(tmp_path / name / str(number)) for name in ("alone", "together"))
        assert (alone.environment["processes"], together.environment["processes"]) == (1, 2)
        assert alone.history["test_probs"].dtype == np.float64
        _assert_same(together, alone, str(case))


def test_what_separates_one_process_from_two_is_rounding(tiny_images: Path, tmp_path: Path) -> None:
    """Within 18 steps in float32 predictions drift apart as far as in float64, where two processes agree, after a
    change of the first weights as small as the rounding of float32."""
    case = SIZES | QUEUE | {"dropout": 0.0, "steps_per_epoch": 6}
    probs = {}
    for name, size, double, nudge in (
        ("alone", 0, False, 0.0),
        ("together", 2, False, 0.0),
        ("in double", 0, True, 0.0),
        ("rounded once", 0, True, 1e-7),
    ):
        _train(tiny_images, tmp_path / name, [case], size, double=double, nudge=nudge)
        probs[name] = Run(tmp_path / name / "0").history["test_probs"]
    drift = np.abs(probs["alone"] - probs["together"]).max()
    rounded = np.abs(probs["in double"] - probs["rounded once"]).max()
    assert probs["alone"].dtype == np.float32
    assert 1e-5 < rounded < 0.05
    assert 1e-5 < drift < 0.05
    assert rounded / 20 < drift < rounded * 20


def _train_apart(folder: Path) -> list[str]:
    """What two processes say, each of which has images of its own under the same path."""
    port = _free_port()
    environments = [_cache() | _environment(rank, 2, port) for rank in range(2)]
    processes = [
        PROCESSES.Process(target=train_in, args=(folder / str(rank), folder / "run", each))
        for rank, each in enumerate(environments)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    return [(folder / str(rank) / "said").read_text() for rank in range(2)]


@pytest.mark.parametrize("difference", ["one pixel", "fewer images"])
def test_different_images_are_refused_by_all_processes(difference: str, tiny_images: Path, tmp_path: Path) -> None:
    for rank in range(2):
        shutil.copytree(tiny_images, tmp_path / str(rank) / "images")
    image = tmp_path / "1" / "images" / "rare" / "03.png"
    if difference == "one pixel":
        pixels = np.array(Image.open(image))
        pixels[0, 0, 0] ^= 1
        Image.fromarray(pixels).save(image)
    else:
        image.unlink()
    expected = (
        "DataError: images: images, labels or groups of process 1 differ from those of process 0; give all processes "
        "the same data, under the same path"
    )
    assert _train_apart(tmp_path) == [expected] * 2
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("error", "gone"),
    [
        (RuntimeError("[../third_party/gloo/transport/tcp/pair.cc:544] Connection closed by peer [::1]:1"), True),
        (RuntimeError("[pair.cc:446] Timed out waiting 1800000ms for recv operation to complete"), True),
        (torch.distributed.DistNetworkError("The client socket has failed to connect"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (1x2 and 3x4)"), False),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), False),
    ],
)
def test_an_error_is_reported_as_what_it_is(error: RuntimeError, gone: bool) -> None:
    expected = (RunError, "another process of this training ended") if gone else (RuntimeError, re.escape(str(error)))
    with pytest.raises(expected[0], match=expected[1]), _explained():
        raise error


def _torchrun(*command: str) -> subprocess.CompletedProcess[str]:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with TemporaryDirectory() as folder:  # for the logs that torchrun leaves
        environment = os.environ | {"TMPDIR": folder}
        return subprocess.run(
            [*run, *command], env=environment, capture_output=True, text=True, timeout=120, check=False
        )


def test_a_process_that_dies_ends_the_run_which_another_number_resumes(tiny_images: Path, tmp_path: Path) -> None:
    program, out, victim = str(Path(__file__).with_name("in_double.py")), tmp_path / "0", "0"
    settings = SIZES | QUEUE | {"dropout": 0.0, "checkpoint_seconds": 0}
    died = _torchrun(program, victim, *arguments(tiny_images, out, settings | {"tensorboard": "false"}))
    assert died.returncode == 1
    [message] = [line for line in died.stderr.splitlines() if line.startswith("csda: ")]
    assert message == (
        "csda: stopped, because another process of this training ended or all were told to stop; "
        "continue with --resume and its folder as --out, on any number of processes"
    )
    # What the first process prints, and it alone.
    assert died.stdout.count("epoch 1/3") == died.stdout.count("epoch 2/3") == 1
    assert "epoch 3/3" not in died.stdout
    kept = Run(out).metrics
    assert [row["epoch"] for row in kept] == [1, 2]

    _train(tiny_images, tmp_path, [settings | {"resume": True}, settings], 0)
    assert Run(out).metrics[:2] == kept
    _assert_same(Run(out), Run(tmp_path / "1"), "resumed by one process")


def test_a_mistake_is_told_once(tiny_images: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    refused = _torchrun("-m", "csda", *arguments(tiny_images, tmp_path, {}))
    assert refused.returncode == 1
    assert [line for line in refused.stderr.splitlines() if line.startswith("csda: ")] == [
        f"csda: {tmp_path}: not empty, and not a run; give another --out"
    ]


@pytest.mark.parametrize(
    ("method", "chosen", "message"),
    [
        ("csda", {"batch_size": 3}, "batch_size = 3 is too small for 4 processes"),
        ("csda", {"batch_size": 4, "unlabeled_batch_size": 2}, "unlabeled_batch_size = 2 is too small for 4 processes"),
        ("baseline", {"batch_size": 4, "unlabeled_batch_size": 2}, None),
    ],
)
def test_more_processes_than_images_in_a_batch_are_refused(
    method: str, chosen: dict[str, int], message: str | None
) -> None:
    config = configure({"method": method, "labels": LABELS} | chosen)
    if message is None:
        require_possible(config, Ranks(0, 4, 0))
    else:
        with pytest.raises(ConfigError, match=message):
            require_possible(config, Ranks(0, 4, 0))


def test_each_process_takes_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto", 1) == torch.device("cuda:1")
    assert choose_device("cuda:0", 1) == torch.device("cuda:0")
    assert choose_device("cpu", 1) == torch.device("cpu")
    with pytest.raises(ConfigError, match="GPU 2 does not exist here; start one process for each"):
        choose_device("auto", 2)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_parts_are_all_samples_in_order(size: int) -> None:
    for count in (0, 1, 7, 10):
        spans = [Ranks(rank, size, rank).span(count) for rank in range(size)]
        assert [row for span in spans for row in range(count)[span]] == list(range(count))
        lengths = [span.stop - span.start for span in spans]
        assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("backbone", BACKBONES)
def test_shared_networks_keep_names_and_weights(backbone: str) -> None:
    model = TwoStream(build_encoder(backbone, 32, 3, dropout=0.0), 3)
    before = model.state_dict()
    frozen = {name for name, value in model.named_parameters() if not value.requires_grad}
    model.share(Ranks(0, 2, 0))
    assert any(isinstance(module, SharedBatchNorm2d) for module in model.modules())
    assert list(model.state_dict()) == list(before)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert {name for name, value in model.named_parameters() if not value.requires_grad} == frozen


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NCCL needs a GPU")
@pytest.mark.parametrize(("method", "precision"), [("csda", "float32"), ("baseline", "float32"), ("baseline", "bf16")])
def test_nccl_with_one_process(
    method: str, precision: str, tiny_images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole way through NCCL, inside of the CUDA graph too, where there is one GPU."""
    notes: list[str] = []
    monkeypatch.setattr(Reporter, "note", lambda reporter, text: notes.append(text))
    settings = {"method": method, "precision": precision, "dropout": 0.0, "steps_per_epoch": 8, "device": "cuda"}
    settings |= {"kernels": False}  # which do not serve the BatchNorm of several processes
    alone = train_tiny(tiny_images, tmp_path / "alone", **settings)
    for name, value in _environment(0, 1, _free_port()).items():
        monkeypatch.setenv(name, value)
    joined = train_tiny(tiny_images, tmp_path / "joined", **settings)
    assert not any("eagerly" in note for note in notes)
    # Another BatchNorm and other kernels of cuDNN: 24 steps of a few images make 0.005 of their rounding in float32.
    np.testing.assert_allclose(joined.predictions.probs, alone.predictions.probs, rtol=0, atol=5e-2)
