"""Fused blocks against torch in float64, and against the same blocks run by torch in bfloat16."""

from __future__ import annotations

from copy import deepcopy
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from csda import kernels
from csda.models.alexnet import AlexNet, Block, _fused, alexnet


def _error(value: Tensor, exact: Tensor) -> float:
    return float((value.double() - exact.double()).norm() / exact.double().norm())


def _network(*channels: int) -> nn.Sequential:
    """Blocks whose norms are not the identity."""
    torch.manual_seed(0)
    network = nn.Sequential(*(Block(*pair) for pair in pairwise(channels)))
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias)
    return network


# Images of one and of three channels, a last block of one pixel, blocks in the middle, one block alone.
@pytest.mark.parametrize(
    ("channels", "size", "batch"), [((3, 32, 32), 12, 3), ((1, 32), 4, 2), ((32, 64, 64), 4, 5), ((64, 128), 2, 3)]
)
@pytest.mark.parametrize("channels_last", [False, True])
def test_blocks_give_what_torch_gives(
    device: torch.device, channels: tuple[int, ...], size: int, batch: int, channels_last: bool
) -> None:
    from csda.kernels.convolution import run_blocks

    on_gpu = device.type == "cuda"
    # The matrix units of a GPU are for bfloat16; the interpreter shows that the mathematics is exact.
    dtype, tolerance = (torch.bfloat16, 0.03) if on_gpu else (torch.float32, 1e-4)
    network = _network(*channels).to(device)
    if channels_last:
        network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    exact = deepcopy(network).double()
    images = torch.rand(batch, channels[0], size, size, device=device)
    weight = torch.randn(batch, channels[-1], size >> len(network), size >> len(network), device=device)

    middle = channels[0] > 3
    inputs = images.clone().requires_grad_(middle)
    # Images may come in several tensors, of which one may be empty and one strided.
    parts = (inputs,) if middle else (inputs[:1], inputs[:0], inputs[1:].mT.contiguous().mT)
    norms, parameters = [block[2] for block in network], list(network.parameters())
    outputs = run_blocks(parts, norms, parameters, dtype)
    outputs.backward(weight.to(outputs.dtype))
    exact_inputs = images.double().requires_grad_(middle)
    exact_outputs = exact(exact_inputs)
    exact_outputs.backward(weight.double())

    assert _error(outputs, exact_outputs) < tolerance
    if middle:
        assert _error(inputs.grad, exact_inputs.grad) < 10 * tolerance
    for (name, value), true in zip(network.named_parameters(), exact.parameters(), strict=True):
        assert _error(value.grad, true.grad) < 10 * tolerance, name
        assert value.grad.stride() == value.stride(), name
    for (name, value), true in zip(network.named_buffers(), exact.buffers(), strict=True):
        assert _error(value, true) < tolerance, name

    network.eval()
    exact.eval()
    with torch.no_grad():
        assert _error(run_blocks((images,), norms, parameters, dtype), exact(images.double())) < tolerance


def test_on_the_cpu_the_plain_blocks_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("csda.models.alexnet._fused", None)
    network = alexnet(32, 3)
    with torch.autocast("cpu", torch.bfloat16):
        network(torch.rand(2, 3, 32, 32))
        network[0](torch.rand(2, 3, 32, 32))


def _steps(network: AlexNet, images: Tensor, own_kernels: bool) -> tuple[Tensor, Tensor]:
    """Logits and the gradient of the first weights."""
    network.zero_grad()
    with torch.autocast("cuda", torch.bfloat16), kernels.allowed(own_kernels):
        logits = network(images)
    logits.float().square().mean().backward()
    gradient = network[0][0].weight.grad
    return logits.detach(), gradient.clone()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_network_is_no_less_exact_than_by_torch_and_repeats_itself() -> None:
    torch.manual_seed(0)
    network = alexnet(64, 3, dropout=0.0).cuda().to(memory_format=torch.channels_last)
    images = torch.rand(64, 3, 64, 64, device="cuda")
    exact = deepcopy(network).double()
    true_logits = exact(images.double())
    true_logits.square().mean().backward()
    true_gradient = exact[0][0].weight.grad
    plain_logits, plain_gradient = _steps(deepcopy(network), images, own_kernels=False)
    logits, gradient = _steps(deepcopy(network), images, own_kernels=True)
    again_logits, again_gradient = _steps(deepcopy(network), images, own_kernels=True)
    assert torch.equal(logits, again_logits)
    assert torch.equal(gradient, again_gradient)
    assert not torch.equal(logits, plain_logits)
    assert _error(logits, true_logits) < 1.5 * _error(plain_logits, true_logits)
    assert _error(gradient, true_gradient) < 1.5 * _error(plain_gradient, true_gradient)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_whole_and_its_stages_agree() -> None:
    torch.manual_seed(0)
    network = alexnet(32, 1, dropout=0.0).cuda()
    images = torch.rand(16, 1, 32, 32, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        whole = _fused(network[:5], images)
        values = images
        for stage in network[:5]:
            values = stage(values)
        in_parts = _fused(network[:5], *images.split((5, 11)))
    assert _error(values, whole) < 0.1
    assert torch.equal(in_parts, whole)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_step_is_captured_and_replayed() -> None:
    torch.manual_seed(0)
    network = alexnet(32, 3, dropout=0.0).cuda()
    images = torch.rand(16, 3, 32, 32, device="cuda")
    expected, _ = _steps(network, images, own_kernels=True)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        logits, gradient = _steps(network, images, own_kernels=True)
    images.copy_(torch.rand_like(images))
    fresh, fresh_gradient = _steps(deepcopy(network), images, own_kernels=True)
    graph.replay()
    torch.testing.assert_close(logits, fresh)
    torch.testing.assert_close(gradient, fresh_gradient)
    assert _error(logits, expected) > 0.1
