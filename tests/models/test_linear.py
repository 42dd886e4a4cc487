"""The linear layer: torch's own on the CPU, and on a GPU no less exact."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from csda.models.linear import Linear


def test_on_the_cpu_it_is_the_layer_of_torch() -> None:
    layer, plain = Linear(5, 3), nn.Linear(5, 3)
    plain.load_state_dict(layer.state_dict())
    values = torch.rand(4, 5)
    assert torch.equal(layer(values), plain(values))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(values), plain(values))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("inputs", "outputs"), [(256, 7), (64, 128)])
def test_gradients_are_no_less_exact_than_by_torch(inputs: int, outputs: int) -> None:
    torch.manual_seed(0)
    layer, plain = Linear(inputs, outputs).cuda(), nn.Linear(inputs, outputs).cuda()
    exact = nn.Linear(inputs, outputs).cuda().double()
    for other in (plain, exact):
        other.load_state_dict(layer.state_dict())
    values, weight = torch.rand(48, inputs, device="cuda"), torch.randn(48, outputs, device="cuda")
    errors = []
    for each, kind in ((exact, torch.float64), (plain, torch.float32), (layer, torch.float32)):
        given = values.to(kind).requires_grad_()
        with torch.autocast("cuda", torch.bfloat16, enabled=each is not exact):
            result = each(given)
        result.backward(weight.to(result.dtype))
        found = [result, given.grad, each.weight.grad, each.bias.grad]
        if each is exact:
            true = found
        else:
            assert result.dtype == torch.bfloat16
            errors.append(
                [((ours - theirs).norm() / theirs.norm()).item() for ours, theirs in zip(found, true, strict=True)]
            )
    for ours, theirs in zip(errors[1], errors[0], strict=True):
        assert ours < 1.1 * theirs
        assert ours < 0.01
