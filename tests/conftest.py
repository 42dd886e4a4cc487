"""What all tests share: caches in the folder of the test or of the session, one thread each, and a run."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from csda.runs import Run


@pytest.fixture(autouse=True, scope="session")
def _cache_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For what is made once for several tests."""
    folder = tmp_path_factory.mktemp("caches")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CSDA_CACHE", str(folder / "csda"))
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
        yield


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CSDA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True, scope="session")
def _no_wait_for_the_disk() -> Iterator[None]:
    """A training waits some fifty times, and only a power cut shows whether it did; no test cuts the power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def _heeds_ctrl_c() -> None:
    """A shell that starts the tests in the background makes them, and every process they start, ignore Ctrl-C."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny import make_images

    return make_images(tmp_path_factory.mktemp("tiny") / "images")


@pytest.fixture(scope="session")
def tiny_run(tiny_images: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run of `csda`; nobody writes into it."""
    from tiny import train_tiny

    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CSDA_CACHE", str(folder / "cache"))
        return train_tiny(tiny_images, folder / "run", tensorboard=True)


@pytest.fixture
def made_up_stream(monkeypatch: pytest.MonkeyPatch) -> Any:
    """For an engine that is to capture without a GPU: a stream, and one as the current one."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    return stream
