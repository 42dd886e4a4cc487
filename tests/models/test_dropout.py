"""Dropout with a generator of its own."""

from __future__ import annotations

import pytest
import torch

from csda.models.alexnet import alexnet
from csda.models.dropout import Dropout
from csda.models.two_stream import TwoStream


def test_values_are_kept_at_the_rate_and_scaled_so_that_the_mean_stays() -> None:
    dropout = Dropout(0.3)
    values = dropout(torch.ones(100_000))
    kept = values[values != 0]
    assert torch.equal(kept, torch.full_like(kept, 1 / 0.7))
    assert values.mean().item() == pytest.approx(1.0, abs=0.01)
    images = torch.rand(5)
    assert torch.equal(dropout.eval()(images), images)
    assert torch.equal(Dropout(0.0)(images), images)


def test_gradients_flow_through_what_is_kept() -> None:
    values = torch.ones(50, requires_grad=True)
    output = Dropout(0.5)(values)
    output.sum().backward()
    assert values.grad is not None
    assert torch.equal(values.grad, output.detach())


def test_draws_come_from_the_generator_alone() -> None:
    torch.manual_seed(0)
    model = TwoStream(alexnet(32, 3), 4)
    model.draw_from(torch.Generator().manual_seed(7))
    before, images = torch.get_rng_state(), torch.rand(6, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    first, second = model(images), model(images)
    assert not torch.equal(first, second)
    model.draw_from(torch.Generator().manual_seed(7))
    assert torch.equal(model(images), first)
    assert torch.equal(torch.get_rng_state(), before)
