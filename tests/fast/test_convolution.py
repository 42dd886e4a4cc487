"""Fused blocks against torch in float64, and against the same blocks run by torch in bfloat16."""

from __future__ import annotations

from copy import deepcopy
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from csda.fast.blocks import _run, fuse
from csda.models.alexnet import Block, alexnet
from csda.models.backbones import build_encoder
from csda.models.encoder import Encoder
from csda.models.two_stream import TwoStream


def _error(value: Tensor, exact: Tensor) -> float:
    # Detached, since torch warns once of a scalar made of what requires a gradient, and a warning is an error here.
    value, exact = value.detach().double(), exact.detach().double()
    return float((value - exact).norm() / exact.norm())


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
    from csda.fast.convolution import run_blocks

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


# Two segments and three, some of two images, and tiles that end within a segment; as many programs as there are tiles,
# or so few that each passes several.
@pytest.mark.parametrize(
    ("channels", "size", "sizes", "programs"),
    [
        ((3, 32, 32), 12, (4, 9, 2), 4),
        ((3, 32, 32), 12, (2, 9), 264),
        ((1, 32), 8, (9, 3), 264),
        ((32, 64, 64), 8, (5, 2), 4),
        ((64, 128), 4, (2, 3, 2), 4),
    ],
)
def test_segments_give_what_passes_one_after_the_other_give(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    channels: tuple[int, ...],
    size: int,
    sizes: tuple[int, ...],
    programs: int,
) -> None:
    from csda.fast import convolution

    for kind in (convolution.FORWARD, convolution.INPUT_GRADIENT, convolution.WEIGHT_GRADIENT):
        for pair, tiles in kind.items():
            monkeypatch.setitem(kind, pair, tiles._replace(programs=programs))
    monkeypatch.setattr(convolution, "REDUCERS", programs)
    dtype, tolerance = (torch.bfloat16, 0.03) if device.type == "cuda" else (torch.float32, 1e-4)
    network = _network(*channels).to(device)
    exact = deepcopy(network).double()
    images = torch.cat([torch.rand(number, channels[0], size, size) / (part + 1) for part, number in enumerate(sizes)])
    images = images.to(device)
    side = size >> len(network)
    weight = torch.randn(len(images), channels[-1], side, side, device=device)

    middle = channels[0] > 3
    inputs = images.clone().requires_grad_(middle)
    parts = (inputs,) if middle else inputs.split(sizes)
    norms, parameters = [block[2] for block in network], list(network.parameters())
    outputs = convolution.run_blocks(parts, norms, parameters, dtype, sizes)
    outputs.backward(weight.to(outputs.dtype))
    exact_inputs = images.double().requires_grad_(middle)
    exact_outputs = torch.cat([exact(part) for part in exact_inputs.split(sizes)])
    exact_outputs.backward(weight.double())

    for ours, theirs in zip(outputs.split(sizes), exact_outputs.split(sizes), strict=True):
        assert _error(ours, theirs) < tolerance
    if middle:
        for ours, theirs in zip(inputs.grad.split(sizes), exact_inputs.grad.split(sizes), strict=True):
            assert _error(ours, theirs) < 10 * tolerance
    for (name, value), true in zip(network.named_parameters(), exact.parameters(), strict=True):
        assert _error(value.grad, true.grad) < 10 * tolerance, name
    for (name, value), true in zip(network.named_buffers(), exact.buffers(), strict=True):
        assert _error(value, true) < tolerance, name


def test_segments_matter_in_training_alone(device: torch.device) -> None:
    from csda.fast.convolution import run_blocks

    network = _network(3, 32).to(device)
    parts = torch.rand(2, 3, 8, 8, device=device), 0.3 * torch.rand(3, 3, 8, 8, device=device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def run(sizes: tuple[int, ...] | None) -> Tensor:
        with torch.no_grad():
            return run_blocks(parts, [network[0][2]], list(network.parameters()), dtype, sizes)

    assert torch.equal(run((5,)), run(None))
    assert _error(run((2, 3)), run(None)) > 0.1
    network.eval()
    assert torch.equal(run((2, 3)), run(None))


@pytest.mark.usefixtures("device")
def test_segments_share_programs_by_their_work() -> None:
    from csda.fast.convolution import _ends

    assert _ends((1280, 5120), 128, 660) == (10, 50)
    assert _ends((524288, 2097152), 128, 660) == (132, 660)
    assert _ends((524288, 2097152), 128, 396) == (79, 396)
    assert _ends((8192, 32768), 64, 33) == (7, 33)
    assert _ends((8, 32768), 128, 4, passes=2) == (1, 4)
    assert _ends((700,), 128, 4) == (4,)
    assert _ends((300,), 128, 4, passes=2) == (4,)


def test_on_the_cpu_the_plain_blocks_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("csda.fast.blocks._run", None)
    network = fuse(alexnet(32, 3))
    with torch.autocast("cpu", torch.bfloat16):
        network(torch.rand(2, 3, 32, 32))
        network[0](torch.rand(2, 3, 32, 32))
        network.forward_apart(torch.rand(2, 3, 32, 32), torch.rand(3, 3, 32, 32))


def test_where_kernels_can_images_that_pass_apart_take_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fused(blocks: list[nn.Module], *images: Tensor, sizes: list[int]) -> Tensor:
        calls.append(sizes)
        return torch.cat([nn.Sequential(*blocks)(part) for part in images])

    torch.manual_seed(0)
    model = TwoStream(build_encoder("alexnet", 32, 3, dropout=0.0), 4)
    twin = deepcopy(model)
    parts = torch.rand(3, 3, 32, 32), 0.2 * torch.rand(5, 3, 32, 32)
    expected = twin.forward_apart(*parts)
    monkeypatch.setattr("csda.fast.blocks._run", fused)
    monkeypatch.setattr("csda.fast.blocks._fusible", lambda blocks, *images: len(blocks) == 5)
    model.student = fuse(model.student)
    assert torch.equal(model.forward_apart(*parts), expected)
    assert calls == [[3, 5]]


def _steps(network: Encoder, *images: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and the gradient of the first weights; several tensors of images pass apart."""
    network.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        logits = network.forward_apart(*images) if len(images) > 1 else network(*images)
    logits.float().square().mean().backward()
    gradient = network[0][0].weight.grad
    return logits.detach(), gradient.clone()


def _images(sizes: tuple[int, ...], *shape: int) -> list[Tensor]:
    """Tensors of images, each darker than the one before."""
    return [torch.rand(number, *shape, device="cuda") / (part + 1) for part, number in enumerate(sizes)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("sizes", [(64,), (23, 41)])
def test_the_network_is_no_less_exact_than_by_torch_and_repeats_itself(sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    network = alexnet(64, 3, dropout=0.0).cuda().to(memory_format=torch.channels_last)
    images = _images(sizes, 3, 64, 64)
    exact = deepcopy(network).double()
    true_logits = exact.forward_apart(*(part.double() for part in images))
    true_logits.square().mean().backward()
    true_gradient = exact[0][0].weight.grad
    plain_logits, plain_gradient = _steps(deepcopy(network), *images)
    logits, gradient = _steps(fuse(deepcopy(network)), *images)
    again_logits, again_gradient = _steps(fuse(deepcopy(network)), *images)
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
        whole = _run(list(network[:5]), images)
        values = images
        for stage in network[:5]:
            values = fuse(Encoder(stage))(values)
        in_parts = _run(list(network[:5]), *images.split((5, 11)))
    assert _error(values, whole) < 0.1
    assert torch.equal(in_parts, whole)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_one_set_of_launches_agrees_with_one_for_each_segment() -> None:
    torch.manual_seed(0)
    network = alexnet(64, 3, dropout=0.0).cuda()
    twin = deepcopy(network)
    images = _images((23, 7, 130), 3, 64, 64)
    with torch.autocast("cuda", torch.bfloat16):
        logits = fuse(network).forward_apart(*images)
        body, tail = twin.split()
        expected = tail(torch.cat([fuse(Encoder(*body))(part) for part in images]))
    # The same products of the same numbers, but for the order of sums and what rounds differently for it.
    assert _error(logits, expected) < 0.02
    logits.float().square().mean().backward()
    expected.float().square().mean().backward()
    for (name, ours), theirs in zip(network.named_parameters(), twin.parameters(), strict=True):
        assert _error(ours.grad, theirs.grad) < 0.1, name
    for (name, value), other in zip(network.named_buffers(), twin.buffers(), strict=True):
        assert _error(value, other) < 1e-3, name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("sizes", [(16,), (9, 14)])
def test_a_step_is_captured_and_replayed(sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    network = fuse(alexnet(32, 3, dropout=0.0).cuda())
    images = _images(sizes, 3, 32, 32)
    expected, _ = _steps(network, *images)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        logits, gradient = _steps(network, *images)
    for part in images:
        part.copy_(torch.rand_like(part))
    fresh, fresh_gradient = _steps(fuse(deepcopy(network)), *images)
    graph.replay()
    torch.testing.assert_close(logits, fresh)
    torch.testing.assert_close(gradient, fresh_gradient)
    first_logits, first_gradient = logits.clone(), gradient.clone()
    graph.replay()
    assert torch.equal(logits, first_logits)
    assert torch.equal(gradient, first_gradient)
    assert _error(logits, expected) > 0.1
