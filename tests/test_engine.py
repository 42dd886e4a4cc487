"""Devices, optimisers, figures, and torch's process-wide switches; what is captured is tested in tests/fast."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from csda.engine import (
    Engine,
    Figures,
    backends,
    choose_device,
    make_optimizer,
    restore_optimizer,
    set_learning_rate,
    using,
)
from csda.errors import ConfigError

CPU = torch.device("cpu")


@dataclass
class Output:
    loss: Tensor
    logs: dict[str, Tensor] = field(default_factory=dict)


def _weight(value: float = 2.0) -> nn.Parameter:
    return nn.Parameter(torch.tensor([value]))


def test_figures_are_means_over_the_steps_since_the_last_call() -> None:
    figures = Figures()
    for value in (1.0, 2.0, 6.0):
        given = torch.tensor(value)
        figures.add(Output(given, {"double": 2 * given, "flag": (given > 2).float()}))
    assert figures.read() == pytest.approx({"loss": 3.0, "double": 6.0, "flag": 1 / 3})
    figures.add(Output(torch.tensor(5.0), {"double": torch.tensor(10.0), "flag": torch.tensor(1.0)}))
    assert figures.read() == pytest.approx({"loss": 5.0, "double": 10.0, "flag": 1.0})


def test_two_kinds_of_steps_keep_their_own_figures() -> None:
    figures = Figures()
    figures.add(Output(torch.tensor(1.0)))
    assert figures.read() == {"loss": 1.0}
    figures.add(Output(torch.tensor(2.0), {"more": torch.tensor(2.0)}))
    assert figures.read() == {"loss": 2.0, "more": 2.0}


def test_bf16_computes_in_bf16_and_keeps_the_weights() -> None:
    layer = nn.Linear(4, 4)
    with Engine(CPU, "bf16").arithmetic():
        assert layer(torch.ones(2, 4)).dtype == torch.bfloat16
    with Engine(CPU).arithmetic():
        assert layer(torch.ones(2, 4)).dtype == torch.float32
    assert layer.weight.dtype == torch.float32


def test_on_the_cpu_functions_are_called() -> None:
    engine, seen = Engine(CPU, capture=True), []
    engine.run(lambda *arguments: seen.append(arguments), 1, None, "a")
    assert seen == [(1, None, "a")]
    assert engine.fast is None
    assert engine.remark is None


def _switches() -> tuple[bool, bool, bool]:
    cudnn = torch.backends.cudnn
    return torch.backends.cuda.matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark


def test_a_training_leaves_the_switches_of_the_process_as_they_were() -> None:
    before = _switches()
    gpu = torch.device("cuda")
    with backends(gpu, "bf16"):
        assert _switches() == (True, True, True)
        with backends(gpu, "tf32"):
            assert _switches() == (True, True, True)
        assert _switches() == (True, True, True)
    assert _switches() == before
    with pytest.raises(ValueError, match="broken"), backends(gpu, "bf16"):
        raise ValueError("broken")
    assert _switches() == before
    with backends(gpu, "float32"):
        assert _switches() == (False, False, True)
    assert _switches() == before
    with using(CPU, "bf16"):
        assert _switches() == before


def test_trainings_that_want_other_switches_wait_for_each_other() -> None:
    """TF32 is a switch of the whole process: a run in float32 beside one in bf16 would compute with it."""
    before, seen, gpu = _switches(), [], torch.device("cuda")
    inside, leave = threading.Barrier(3), threading.Event()

    def train(precision: str) -> None:
        with backends(gpu, precision):  # type: ignore[arg-type]
            if precision != "float32":
                inside.wait(10)
                leave.wait(10)
            seen.append((precision, _switches()[0]))

    threads = [threading.Thread(target=train, args=(precision,)) for precision in ("bf16", "tf32")]
    for thread in threads:
        thread.start()
    inside.wait(10)
    other = threading.Thread(target=train, args=("float32",))
    other.start()
    other.join(0.1)
    assert other.is_alive()
    assert not seen
    leave.set()
    for thread in (*threads, other):
        thread.join(10)
    assert sorted(seen[:2]) == [("bf16", True), ("tf32", True)]
    assert seen[2:] == [("float32", False)]
    assert _switches() == before


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_an_optimiser_goes_on_where_it_was(name: str) -> None:
    def steps(weight: nn.Parameter, optimizer: torch.optim.Optimizer, count: int) -> None:
        set_learning_rate(optimizer, 0.1)
        for _ in range(count):
            optimizer.zero_grad()
            weight.square().sum().backward()
            optimizer.step()

    whole = _weight()
    steps(whole, make_optimizer(name, [whole], CPU), 4)  # type: ignore[arg-type]
    part = _weight()
    first = make_optimizer(name, [part], CPU)  # type: ignore[arg-type]
    steps(part, first, 2)
    second = make_optimizer(name, [part], CPU)  # type: ignore[arg-type]
    restore_optimizer(second, first.state_dict())
    steps(part, second, 2)
    assert part.item() == whole.item()


def test_restoring_keeps_the_tensor_that_a_graph_reads() -> None:
    weight = _weight()
    rate = torch.tensor(0.5)
    optimizer = torch.optim.Adam([weight], lr=rate)
    restore_optimizer(optimizer, torch.optim.Adam([_weight()], lr=torch.tensor(0.1)).state_dict())
    assert optimizer.param_groups[0]["lr"] is rate
    set_learning_rate(optimizer, 0.25)
    assert rate.item() == 0.25


def test_devices_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_device("cpu") == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == CPU
    for name, message in (("cuda", "not available"), ("mps", "not available"), ("toaster", "unknown"), ("", "unknown")):
        with pytest.raises(ConfigError, match=f"device = '{name}' is {message}"):
            choose_device(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto") == torch.device("cuda")
    assert choose_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ConfigError, match=r"device = 'cuda:2' does not exist; there are 2"):
        choose_device("cuda:2")
