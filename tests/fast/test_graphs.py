"""Functions that are captured once and replayed, and the gate that pauses other threads meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from csda.engine import Engine, make_optimizer, set_learning_rate, using
from csda.fast.graphs import EAGER_BATCHES, CaptureGate, Graphs
from csda.research.bench.noise import open_trainer

CPU = torch.device("cpu")


def test_a_thread_that_captures_waits_until_all_others_pause() -> None:
    gate, log, counts = CaptureGate(), [], [0] * 4

    def train(number: int) -> None:
        with gate.training():
            for step in range(200):
                gate.pause()
                counts[number] += 1
                if step % 50 == number:
                    with gate.exclusive():
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


def test_a_training_that_fails_leaves() -> None:
    gate = CaptureGate()
    with pytest.raises(ValueError, match="broken"), gate.training():
        raise ValueError("broken")
    with gate.exclusive():
        pass


@pytest.fixture
def graphs(made_up_stream: Any, monkeypatch: pytest.MonkeyPatch) -> Graphs:
    """As on a GPU, with streams and graphs made up: a graph runs what was captured, on tensors of its own."""
    made = Graphs(CPU, None, enabled=False)
    made.enabled, made._stream = True, made_up_stream

    def capture(program: Any, execute: Callable[..., None], inputs: tuple[Tensor, ...]) -> None:
        program.inputs = tuple(value.clone() for value in inputs)
        program.graph = SimpleNamespace(replay=lambda: execute(program.inputs))

    monkeypatch.setattr(made, "_capture", capture)
    return made


def test_what_is_replayed_reads_the_tensors_of_the_call(graphs: Graphs) -> None:
    sums = _Sums(CPU)
    for value in range(5):
        for size in (2, 3):
            graphs.run(sums.add, torch.full((size,), float(value)), None, eager=2)
    assert sums.total.item() == (0 + 1 + 2 + 3 + 4) * (2 + 3)
    captured = [(program.calls, tuple(program.inputs[0].shape)) for program in graphs.programs.values()]
    assert captured == [(5, (2,)), (5, (3,))]


def test_other_arguments_make_another_graph(graphs: Graphs) -> None:
    seen: list[tuple[str, float]] = []

    def look(name: str, value: Tensor) -> None:
        seen.append((name, value.item()))

    for step in range(3):
        for name in ("a", "b"):
            graphs.run(look, name, torch.tensor(float(step)), eager=1)
    assert seen == [(name, float(step)) for step in range(3) for name in ("a", "b")]
    assert len(graphs.programs) == 2


def test_what_is_not_to_be_captured_is_called() -> None:
    seen: list[object] = []
    graphs = Graphs(CPU, None, enabled=False)
    graphs.run(lambda *arguments: seen.extend(arguments), 1, None, eager=0)
    assert seen == [1, None]
    assert graphs.programs == {}


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
    engine = Engine(device, generator=generator, capture=capture)

    def update(shift: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        images = torch.rand(32, 6, device=device, generator=generator)
        if spoil:
            images.sum().item()
        (network(images) - shift).square().mean().backward()
        optimizer.step()

    for step in range(10):
        engine.run(update, torch.full((1,), float(step), device=device))
    return engine, torch.cat([parameter.detach().flatten() for parameter in network.parameters()])


@gpu
def test_replayed_steps_are_the_eager_ones() -> None:
    captured, weights = _train_on_gpu(capture=True)
    _, expected = _train_on_gpu(capture=False)
    assert captured.remark is None
    assert captured.fast is not None
    assert [program.graph is not None for program in captured.fast.graphs.programs.values()] == [True]
    torch.testing.assert_close(weights, expected)


@gpu
def test_a_step_that_cannot_be_captured_runs_eagerly_and_says_so() -> None:
    engine, weights = _train_on_gpu(capture=True, spoil=True)
    _, expected = _train_on_gpu(capture=False)
    assert engine.remark is not None
    assert engine.remark.startswith("steps run eagerly, because capture in a CUDA graph failed: ")
    torch.testing.assert_close(weights, expected)


@gpu
def test_threads_capture_and_replay_side_by_side() -> None:
    _, expected = _train_on_gpu(capture=False)
    results: list[Tensor] = []

    def train() -> None:
        with using(torch.device("cuda"), "float32"), torch.cuda.stream(torch.cuda.Stream()):
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
def test_a_replayed_pass_is_the_eager_one() -> None:
    device = torch.device("cuda")
    results = []
    for capture in (False, True):
        sums = _Sums(device)
        graphs = Graphs(device, sums.generator, enabled=capture)
        for value in range(8):
            for size in (2, 3):
                graphs.run(sums.add, torch.full((size,), float(value), device=device), None, eager=2)
        assert graphs.remark is None
        assert [program.graph is not None for program in graphs.programs.values()] == [True, True] * capture
        results.append((sums.total.item(), sums.drawn.item()))
    assert results[0][0] == sum(range(8)) * (2 + 3)
    assert results[0] == results[1]


@gpu
def test_a_queue_renewed_by_epoch_is_the_same_by_replay() -> None:
    small = {"preset": "paper", "image_size": 32, "capacity": 16, "refresh_batch_size": 8, "threads": 1}
    states = []
    for capture in (False, True):
        trainer = open_trainer("csda", {**small, "device": "cuda", "precision": "float32", "cuda_graph": capture})
        model, method, parts = trainer.model, trainer.method, trainer.parts
        assert len(parts.unlabeled) > 8 * EAGER_BATCHES
        parts.seed(3)
        with trainer.engine.arithmetic():
            method.begin(model, parts.labeled, parts.unlabeled)
            for _ in range(2):
                method.end_epoch(model, parts.labeled, parts.unlabeled)
        assert trainer.engine.remark is None
        assert trainer.engine.fast is not None
        programs = trainer.engine.fast.graphs.programs.values()
        assert any(program.graph is not None for program in programs) == capture
        states.append(method.state_dict())
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], msg=name)
