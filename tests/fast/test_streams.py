"""What runs beside the rest of a step: the same results, on a GPU at the same time."""

from __future__ import annotations

import pytest
import torch

from csda.engine import Engine, make_optimizer, set_learning_rate
from csda.fast.streams import beside, join
from csda.methods.base import StepOutput


def test_on_the_cpu_it_runs_at_once() -> None:
    log = []
    with beside(torch.device("cpu")):
        log.append("beside")
    log.append("after")
    join()
    assert log == ["beside", "after"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("capture", [False, True])
def test_what_follows_sees_all_of_it(capture: bool) -> None:
    """A chain of small products beside a backward pass, read by the next step, as the queue is."""
    device = torch.device("cuda")
    weight = torch.nn.Parameter(torch.full((64, 64), 0.1, device=device))
    state = torch.ones(64, 64, device=device)
    optimizer = make_optimizer("sgd", [weight], device)
    set_learning_rate(optimizer, 0.5)
    engine = Engine(optimizer, device, capture=capture)

    def compute(scale: torch.Tensor) -> StepOutput:
        loss = (weight * state.clone()).mean() * scale  # as the contents of a queue are
        given = weight.detach() * scale
        with beside(given.device, given):  # by its number, where the engine goes by its kind
            total = given
            for _ in range(200):
                total = torch.tanh(total + given)
            state.copy_(total)
        return StepOutput(loss)

    expected_weight, expected_state = 0.1, 1.0
    for step in range(12):
        scale = 1.0 + step / 10
        engine.step(compute, torch.tensor(scale, device=device))
        given = torch.tensor(expected_weight * scale)
        expected_weight -= 0.5 * expected_state * scale / 64**2
        total = given
        for _ in range(200):
            total = torch.tanh(total + given)
        expected_state = total.item()
    assert engine.remark is None
    torch.testing.assert_close(weight.detach().cpu(), torch.full((64, 64), expected_weight))
    torch.testing.assert_close(state.cpu(), torch.full((64, 64), expected_state))
