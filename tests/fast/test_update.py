"""Update and average by the kernels against torch's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from csda.engine import make_optimizer, set_learning_rate

# Less than a block, one, several, and a last one that is not full.
sizes = pytest.mark.parametrize("shape", [(1, 1), (7, 13), (32, 32), (3, 1024), (37, 113)], ids=str)


def _values(shape: tuple[int, int], device: torch.device, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def _copy(weight: Tensor) -> Tensor:
    """For what is rounded: to bfloat16, but by the interpreter, which cuts bfloat16 off, to float16."""
    kind = torch.bfloat16 if weight.is_cuda else torch.float16
    return torch.full_like(weight, float("nan"), dtype=kind)


@sizes
def test_descent_is_that_of_sgd(device: torch.device, shape: tuple[int, int]) -> None:
    from csda.fast import update

    weight, gradient = _values(shape, device, 0), _values(shape, device, 1).bfloat16()
    rate = torch.tensor(0.25, device=device)
    # A power of two, so that no product is rounded, whatever multiplies.
    expected, copy = weight - 0.25 * gradient.float(), _copy(weight)
    update.descend(weight, gradient, rate, copy)
    assert torch.equal(weight, expected)
    assert torch.equal(copy, expected.to(copy.dtype))


@sizes
def test_descent_at_any_rate(device: torch.device, shape: tuple[int, int]) -> None:
    from csda.fast import update

    weight, gradient = _values(shape, device, 0), _values(shape, device, 1).bfloat16()
    rate = torch.tensor(0.03, device=device)
    exact = weight.double() - rate.double() * gradient.double()
    # A GPU rounds once; the interpreter rounds the product, too.
    expected = exact.float()
    update.descend(weight, gradient, rate, _copy(weight))
    if device.type == "cuda":
        assert torch.equal(weight, expected)
    else:
        torch.testing.assert_close(weight, expected, rtol=1e-6, atol=1e-7)


@sizes
@pytest.mark.parametrize("share", [0.0, 2**-10, 0.25, 0.5, 0.75, 1.0])
def test_the_average_is_that_of_lerp(device: torch.device, shape: tuple[int, int], share: float) -> None:
    from csda.fast import update

    weight, other = _values(shape, device, 0), _values(shape, device, 1)
    copy, before = _copy(weight), other.clone()
    expected = torch.lerp(weight, other, share)
    update.average(weight, other, share, copy)
    assert torch.equal(weight, expected)
    assert torch.equal(copy, expected.to(copy.dtype))
    assert torch.equal(other, before)


@pytest.mark.parametrize("share", [0.001, 0.1, 0.4999, 0.501, 0.9, 0.997])
def test_the_average_with_any_share(device: torch.device, share: float) -> None:
    from csda.fast import update

    weight, other = _values((37, 113), device, 0), _values((37, 113), device, 1)
    expected = torch.lerp(weight, other, share)
    update.average(weight, other, share, _copy(weight))
    # Where the product is rounded and where not may differ.
    torch.testing.assert_close(weight, expected, rtol=1.2e-7, atol=3e-7)


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@gpu
@pytest.mark.parametrize("rate", [0.03, 1e-4, 0.7])
def test_weights_go_where_the_fused_optimiser_takes_them(rate: float) -> None:
    from csda.fast import update

    device = torch.device("cuda")
    weight = _values((2048, 4096), device, 0) * 0.02
    gradient = (_values((2048, 4096), device, 1) * 1e-3).bfloat16()
    trained = nn.Parameter(weight.clone())
    trained.grad = gradient.float()
    optimizer = make_optimizer("sgd", [trained], device)
    set_learning_rate(optimizer, rate)
    optimizer.step()
    copy = _copy(weight)
    update.descend(weight, gradient, optimizer.param_groups[0]["lr"], copy)
    # The optimiser rounds to float64 and then to float32, which in some 2⁻²⁸ of all cases is not rounding once.
    apart = weight != trained.detach()
    assert apart.sum() <= 4
    torch.testing.assert_close(weight, trained.detach(), rtol=1.2e-7, atol=0)
    assert torch.equal(copy, weight.bfloat16())


@gpu
def test_a_replay_reads_rate_gradient_and_weights_anew() -> None:
    from csda.fast import update

    device = torch.device("cuda")
    weight, other = _values((64, 48), device, 0), _values((64, 48), device, 1)
    gradient, rate = _values((64, 48), device, 2).bfloat16(), torch.tensor(0.0, device=device)
    copy, other_copy = _copy(weight), _copy(other)

    def move() -> None:
        update.descend(weight, gradient, rate, copy)
        update.average(other, weight, 0.25, other_copy)

    move()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        move()
    for seed, value in ((3, 0.5), (4, 0.125)):
        weight.copy_(_values((64, 48), device, seed))
        gradient.copy_(_values((64, 48), device, seed + 10))
        rate.fill_(value)
        expected = weight - value * gradient.float()
        expected_other = torch.lerp(other, expected, 0.25)
        graph.replay()
        assert torch.equal(weight, expected)
        assert torch.equal(copy, expected.bfloat16())
        assert torch.equal(other, expected_other)
        assert torch.equal(other_copy, expected_other.bfloat16())
