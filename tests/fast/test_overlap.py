"""What runs on a second stream beside the rest of a step: the same results, on a GPU at the same time."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from csda.engine import Engine, make_optimizer, set_learning_rate
from csda.fast import overlap
from csda.fast.overlap import Pending, beside, overlapping
from csda.research.bench.noise import open_trainer
from csda.training import update

CPU = torch.device("cpu")


def test_outside_of_a_step_functions_are_called() -> None:
    seen = []

    def look(value: Tensor) -> Tensor:
        seen.append(value)
        return value + 1

    result = beside(look, CPU)(torch.zeros(2))
    assert len(seen) == 1
    assert type(result) is Tensor


@pytest.fixture
def joins(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The times at which somebody waited."""
    log: list[str] = []
    monkeypatch.setattr(overlap, "join", lambda: log.append("join"))
    return log


def test_whatever_uses_a_pending_tensor_first_waits(joins: list[str]) -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    uses: list[Any] = [
        lambda pending: pending * 2,
        lambda pending: torch.cat((values, pending)),
        lambda pending: torch.where(values > 2, values, pending),
        lambda pending: pending[0],
        lambda pending: pending.sum(),
        lambda pending: torch.stack([values, pending]),
        lambda pending: values + pending,
    ]
    for use in uses:
        joins.clear()
        result = use(values.clone().as_subclass(Pending))
        assert joins, "nobody waited"
        assert type(result) is Tensor
        torch.testing.assert_close(result, use(values))


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_gpu
@pytest.mark.parametrize("capture", [False, True])
def test_what_follows_sees_all_of_it(capture: bool) -> None:
    """A chain of small products beside a backward pass, read by the next step, as the queue is."""
    device = torch.device("cuda")
    weight = torch.nn.Parameter(torch.full((64, 64), 0.1, device=device))
    state = torch.ones(64, 64, device=device)
    optimizer = make_optimizer("sgd", [weight], device)
    set_learning_rate(optimizer, 0.5)
    engine = Engine(device, capture=capture)

    def renew(given: Tensor) -> Tensor:
        total = given
        for _ in range(200):
            total = torch.tanh(total + given)
        state.copy_(total)
        return total

    renew_beside = beside(renew, device)

    def step(scale: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = (weight * state.clone()).mean() * scale  # as the contents of a queue are
        assert isinstance(renew_beside(weight.detach() * scale), Pending)
        loss.backward()
        overlap.join()
        optimizer.step()

    expected_weight, expected_state = 0.1, 1.0
    for number in range(12):
        scale = 1.0 + number / 10
        engine.run(step, torch.tensor(scale, device=device))
        given = torch.tensor(expected_weight * scale)
        expected_weight -= 0.5 * expected_state * scale / 64**2
        total = given
        for _ in range(200):
            total = torch.tanh(total + given)
        expected_state = total.item()
    assert engine.remark is None
    torch.testing.assert_close(weight.detach().cpu(), torch.full((64, 64), expected_weight))
    torch.testing.assert_close(state.cpu(), torch.full((64, 64), expected_state))


SMALL = {"preset": "default", "precision": "float32", "image_size": 32, "batch_size": 8, "unlabeled_batch_size": 8}


@needs_gpu
@pytest.mark.parametrize("method", ["csda", "vcq", "da", "nm", "glm"])
def test_a_training_is_what_it_is_on_one_stream(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    states = []
    for apart in (False, True):
        with monkeypatch.context() as patch:
            if not apart:
                patch.setattr("csda.fast.overlap.beside", lambda function, device: function)
            trainer = open_trainer(method, {**SMALL, "capacity": 16, "lr": 0.002, "device": "cuda", "threads": 1})
        trainer.method.begin(trainer.model, trainer.parts.labeled, trainer.parts.unlabeled)
        for inputs in islice(trainer.sample(1), 12):
            trainer.engine.run(update, trainer, trainer.step, *inputs)
        assert trainer.engine.remark is None
        states.append({**trainer.model.state_dict(), **trainer.method.state_dict()})
    for name, value in states[0].items():
        if value.is_floating_point():
            torch.testing.assert_close(states[1][name], value, rtol=1e-3, atol=1e-4, msg=name)


def test_a_step_that_fails_ends_the_overlap() -> None:
    with pytest.raises(ValueError, match="broken"), overlapping():
        raise ValueError("broken")
    assert not overlap._thread.in_step
