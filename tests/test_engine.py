"""Devices, optimisers, and the step itself; here on the CPU, where steps are eager."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from csda.engine import CROWD, Crowd, Engine, choose_device, make_optimizer, restore_optimizer, set_learning_rate
from csda.errors import ConfigError
from csda.replay import repeat
from csda.research.bench.noise import open_trainer

CPU = torch.device("cpu")


@dataclass
class Output:
    loss: Tensor
    logs: dict[str, Tensor] = field(default_factory=dict)


def _weight(value: float = 2.0) -> nn.Parameter:
    return nn.Parameter(torch.tensor([value]))


def test_a_step_is_one_update_of_plain_gradient_descent() -> None:
    weight = _weight()
    optimizer = make_optimizer("sgd", [weight], CPU)
    set_learning_rate(optimizer, 0.1)
    engine = Engine(optimizer, CPU)
    engine.step(lambda target: Output((weight - target).square().sum()), torch.tensor([1.0]))
    assert weight.item() == pytest.approx(2.0 - 0.1 * 2 * (2.0 - 1.0))
    engine.step(lambda target: Output((weight - target).square().sum()), torch.tensor([1.0]))
    assert weight.item() == pytest.approx(1.8 - 0.1 * 2 * 0.8)


def test_figures_are_means_over_the_steps_since_the_last_call() -> None:
    weight = _weight(0.0)
    optimizer = make_optimizer("sgd", [weight], CPU)
    engine = Engine(optimizer, CPU)

    def compute(value: Tensor) -> Output:
        return Output(weight.sum() + value, {"double": 2 * value, "flag": (value > 2).float()})

    for value in (1.0, 2.0, 6.0):
        engine.step(compute, torch.tensor(value))
    assert engine.figures() == pytest.approx({"loss": 3.0, "double": 6.0, "flag": 1 / 3})
    engine.step(compute, torch.tensor(5.0))
    assert engine.figures() == pytest.approx({"loss": 5.0, "double": 10.0, "flag": 1.0})


def test_two_kinds_of_steps_keep_their_own_figures() -> None:
    weight = _weight(0.0)
    engine = Engine(make_optimizer("sgd", [weight], CPU), CPU)

    def first(value: Tensor) -> Output:
        return Output(weight.sum() + value)

    def second(value: Tensor) -> Output:
        return Output(weight.sum() + value, {"more": value})

    engine.step(first, torch.tensor(1.0))
    assert engine.figures() == {"loss": 1.0}
    engine.step(second, torch.tensor(2.0))
    assert engine.figures() == {"loss": 2.0, "more": 2.0}


def test_bf16_computes_in_bf16_and_keeps_the_weights() -> None:
    layer = nn.Linear(4, 4)
    engine = Engine(make_optimizer("sgd", list(layer.parameters()), CPU), CPU, "bf16")
    seen = []

    def compute(images: Tensor) -> Output:
        result = layer(images)
        seen.append(result.dtype)
        return Output(result.float().sum())

    engine.step(compute, torch.ones(2, 4))
    assert seen == [torch.bfloat16]
    assert layer.weight.dtype == torch.float32


def test_gradients_do_not_pile_up() -> None:
    used, unused = _weight(), _weight()
    optimizer = make_optimizer("sgd", [used, unused], CPU)
    set_learning_rate(optimizer, 1.0)
    engine = Engine(optimizer, CPU)
    engine.step(lambda: Output((used * unused).sum()))
    assert (used.item(), unused.item()) == (0.0, 0.0)
    engine.step(lambda: Output(used.sum()))
    assert (used.item(), unused.item()) == (-1.0, 0.0)


def test_on_the_cpu_nothing_is_captured() -> None:
    engine = Engine(make_optimizer("sgd", [_weight()], CPU), CPU, capture=True)
    assert not engine.capture
    assert engine.remark is None


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_an_optimiser_goes_on_where_it_was(name: str) -> None:
    def steps(weight: nn.Parameter, optimizer: torch.optim.Optimizer, count: int) -> None:
        set_learning_rate(optimizer, 0.1)
        engine = Engine(optimizer, CPU)
        for _ in range(count):
            engine.step(lambda: Output(weight.square().sum()))

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


def test_a_thread_alone_waits_until_all_others_hold_still() -> None:
    crowd, log, counts = Crowd(), [], [0] * 4

    def train(number: int) -> None:
        with crowd.member():
            for step in range(200):
                crowd.make_way()
                counts[number] += 1
                if step % 50 == number:
                    with crowd.alone():
                        before = list(counts)
                        time.sleep(0.002)
                        log.append(counts == before)

    threads = [threading.Thread(target=train, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert counts == [200] * 4
    assert log == [True] * 16


def test_a_member_that_fails_leaves() -> None:
    crowd = Crowd()
    with pytest.raises(ValueError, match="broken"), crowd.member():
        raise ValueError("broken")
    with crowd.alone():
        pass


def test_without_an_engine_what_is_repeated_is_called() -> None:
    seen: list[object] = []
    repeat(lambda *arguments: seen.extend(arguments), 1, None, "a")
    assert seen == [1, None, "a"]


def test_passes_between_steps_are_repeated_by_their_engine() -> None:
    engine = Engine(make_optimizer("sgd", [_weight()], CPU), CPU)
    seen: list[tuple[object, ...]] = []

    def look(*arguments: object) -> None:
        seen.append(arguments)

    with engine.arithmetic():
        for value in (torch.zeros(2), torch.ones(2), torch.ones(3)):
            repeat(look, "a", value, None)
        with pytest.raises(ValueError, match="broken"), engine.arithmetic():
            raise ValueError("broken")
        repeat(look, "b", torch.ones(3), None)
    repeat(look)
    assert [arguments[0] for arguments in seen[:-1]] == ["a", "a", "a", "b"]
    assert [int(arguments[1].sum()) for arguments in seen[:-1] if isinstance(arguments[1], Tensor)] == [0, 2, 3, 3]
    assert seen[-1] == ()
    assert sorted(program.steps for program in engine._programs.values()) == [1, 1, 2]


def test_what_is_replayed_reads_the_tensors_of_the_call(made_up_stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, with streams and graph made up: a graph runs what was captured, on tensors of its own."""
    monkeypatch.setattr("csda.engine._EAGER_CALLS", 2)
    engine: Any = Engine(make_optimizer("sgd", [_weight()], CPU), CPU)
    engine.capture, engine._stream = True, made_up_stream
    captured: list[tuple[int, ...]] = []

    def capture(program: Any, execute: Callable[..., None], inputs: tuple[Tensor, ...]) -> None:
        program.inputs = tuple(value.clone() for value in inputs)
        program.graph = SimpleNamespace(replay=lambda: execute(*program.inputs))
        captured.append(tuple(inputs[0].shape))

    monkeypatch.setattr(engine, "_try_capture", capture)
    sums = _Sums(CPU)
    with engine.arithmetic():
        for value in range(5):
            for size in (2, 3):
                repeat(sums.add, torch.full((size,), float(value)), None)
    assert sums.total.item() == (0 + 1 + 2 + 3 + 4) * (2 + 3)
    assert captured == [(2,), (3,)]


class _Sums:
    """Something that changes in place with every call, and draws."""

    def __init__(self, device: torch.device) -> None:
        self.generator = torch.Generator(device).manual_seed(5)
        self.total = torch.zeros((), device=device)
        self.drawn = torch.zeros((), device=device)

    def add(self, values: Tensor, nothing: None) -> None:
        self.total.add_(values.sum())
        self.drawn.add_(torch.rand((), device=values.device, generator=self.generator))


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def _train_on_gpu(*, capture: bool, spoil: bool = False) -> tuple[Engine, Tensor]:
    device = torch.device("cuda")
    network = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1)).to(device)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.linspace(-0.4, 0.5, parameter.numel()).view_as(parameter))
    generator = torch.Generator(device).manual_seed(5)
    optimizer = make_optimizer("sgd", list(network.parameters()), device)
    set_learning_rate(optimizer, 0.1)
    engine = Engine(optimizer, device, generator=generator, capture=capture)

    def compute(shift: Tensor) -> Output:
        images = torch.rand(32, 6, device=device, generator=generator)
        if spoil:
            images.sum().item()
        return Output((network(images) - shift).square().mean())

    for step in range(10):
        engine.step(compute, torch.full((1,), float(step), device=device))
    return engine, torch.cat([parameter.detach().flatten() for parameter in network.parameters()])


@gpu
def test_replayed_steps_are_the_eager_ones() -> None:
    captured, weights = _train_on_gpu(capture=True)
    eager, expected = _train_on_gpu(capture=False)
    assert captured.remark is None
    torch.testing.assert_close(weights, expected)
    assert captured.figures()["loss"] == pytest.approx(eager.figures()["loss"], rel=1e-5)


@gpu
def test_a_step_that_cannot_be_captured_runs_eagerly_and_says_so() -> None:
    engine, weights = _train_on_gpu(capture=True, spoil=True)
    _, expected = _train_on_gpu(capture=False)
    assert engine.remark is not None
    assert engine.remark.startswith("steps run eagerly, since capture in a CUDA graph failed: ")
    torch.testing.assert_close(weights, expected)


@gpu
def test_threads_capture_and_replay_side_by_side() -> None:
    _, expected = _train_on_gpu(capture=False)
    results: list[Tensor] = []

    def train() -> None:
        with CROWD.member(), torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(5):
                results.append(_train_on_gpu(capture=True)[1].cpu())

    threads = [threading.Thread(target=train) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 30
    for weights in results:
        torch.testing.assert_close(weights, expected.cpu())


@gpu
def test_a_replayed_pass_is_the_eager_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("csda.engine._EAGER_CALLS", 2)
    device = torch.device("cuda")
    results = []
    for capture in (False, True):
        sums = _Sums(device)
        optimizer = make_optimizer("sgd", [nn.Parameter(torch.zeros(1, device=device))], device)
        engine = Engine(optimizer, device, generator=sums.generator, capture=capture)
        with engine.arithmetic():
            for value in range(8):
                for size in (2, 3):
                    repeat(sums.add, torch.full((size,), float(value), device=device), None)
        assert engine.remark is None
        assert [program.graph is not None for program in engine._programs.values()] == [capture, capture]
        results.append((sums.total.item(), sums.drawn.item()))
    assert results[0][0] == sum(range(8)) * (2 + 3)
    assert results[0] == results[1]


@gpu
def test_a_queue_renewed_by_epoch_is_the_same_by_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("csda.engine._EAGER_CALLS", 2)
    small = {"preset": "paper", "image_size": 32, "capacity": 16, "refresh_batch_size": 8, "threads": 1}
    states = []
    for capture in (False, True):
        session = open_trainer("csda", {**small, "device": "cuda", "precision": "float32", "cuda_graph": capture})
        model, method, parts = session.model, session.method, session.parts
        parts.seed(3)
        with session.engine.arithmetic():
            method.begin(model, parts.labeled, parts.unlabeled)
            for _ in range(2):
                method.end_epoch(model, parts.labeled, parts.unlabeled)
        assert session.engine.remark is None
        assert any(program.graph is not None for program in session.engine._programs.values()) == capture
        states.append(method.state_dict())
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], msg=name)
