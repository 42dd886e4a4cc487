"""One thread at a time launches kernels."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from csda.fast.kernels import launching


def test_threads_launch_one_after_the_other() -> None:
    inside, most = 0, 0
    together = threading.Barrier(4)

    def launch() -> None:
        nonlocal inside, most
        together.wait(10)
        with launching(torch.zeros(1)), launching(torch.zeros(1)):
            inside += 1
            most = max(most, inside)
            time.sleep(0.01)
            inside -= 1

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(launch) for _ in range(4)]:
            done.result()
    assert most == 1


def test_a_launch_that_fails_does_not_keep_others_waiting() -> None:
    with pytest.raises(RuntimeError), launching(torch.zeros(1)):
        raise RuntimeError

    def launch() -> bool:
        with launching(torch.zeros(1)):
            return True

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(launch).result(10)
