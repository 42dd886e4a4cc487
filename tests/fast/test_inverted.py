"""Fused layers of MobileNetV2 and EfficientNet-Lite against torch in float64."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from csda.fast import inverted
from csda.models.backbones import build_encoder
from csda.models.mobilenet import InvertedResidual, Layer


def _error(value: Tensor, exact: Tensor) -> float:
    value, exact = value.detach().double(), exact.detach().double()
    return float((value - exact).norm() / exact.norm().clamp_min(1e-12))


def _values(*shape: int, device: torch.device, seed: int = 0) -> Tensor:
    """What the kernels read: float32 in the interpreter, which shows that the mathematics is exact, else bfloat16."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(seed)
    return torch.randn(shape).to(device, dtype).contiguous(memory_format=torch.channels_last)


def _tolerance(device: torch.device) -> float:
    return 0.01 if device.type == "cuda" else 2e-5


# Several programs along rows and channels, a single row block, channels that fill no tile.
@pytest.mark.parametrize("shape", [(3, 16, 7, 5), (2, 24, 12, 12), (4, 40, 3, 3), (2, 200, 5, 6)])
@pytest.mark.parametrize("active", [False, True])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_norm_gives_what_torch_gives(
    device: torch.device, shape: tuple[int, ...], active: bool, adds: bool, training: bool
) -> None:
    from csda.fast.normalization import normalize

    norm = nn.BatchNorm2d(shape[1], eps=1e-3).to(device).train(training)
    nn.init.uniform_(norm.weight, 0.5, 2.5)
    nn.init.normal_(norm.bias, 1.0)
    exact = deepcopy(norm).double()
    # A mean far from zero, beside which a sum of squares would lose the variance.
    values = (_values(*shape, device=device) + 30.0).contiguous(memory_format=torch.channels_last)
    shortcut = _values(*shape, device=device, seed=1)
    ours, theirs = ([value.detach().clone().requires_grad_() for value in (values, shortcut)] for _ in range(2))
    result = normalize(ours[0], norm, active=active, shortcut=ours[1] if adds else None)
    true = exact(theirs[0].double())
    # At the corners of ReLU6 rounding decides whether a gradient passes.
    weight = torch.where(((true.abs() < 0.05) | ((true - 6.0).abs() < 0.05)), 0.0, torch.randn_like(true))
    true = F.relu6(true) if active else true
    true = true + theirs[1].double() if adds else true
    weight = weight.to(values.dtype)
    result.backward(weight)
    true.backward(weight.double())

    tolerance = _tolerance(device)
    assert _error(result, true) < tolerance
    assert _error(ours[0].grad, theirs[0].grad) < 3 * tolerance
    if adds:
        assert torch.equal(ours[1].grad, weight)
    for name, value in norm.named_parameters():
        assert _error(value.grad, exact.get_parameter(name).grad) < 3 * tolerance, name
    for name, value in norm.named_buffers():
        assert _error(value, exact.get_buffer(name)) < tolerance, name


@pytest.mark.parametrize("kernel", [3, 5])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("tensorflow", [False, True])
@pytest.mark.parametrize(("channels", "height", "width"), [(16, 9, 6), (40, 5, 12), (200, 3, 4)])
def test_depthwise_gives_what_torch_gives(
    device: torch.device, kernel: int, stride: int, tensorflow: bool, channels: int, height: int, width: int
) -> None:
    layer = Layer(channels, channels, kernel, stride, groups=channels, tensorflow=tensorflow).to(device)
    convolution = layer[0]
    assert isinstance(convolution, nn.Conv2d)
    exact = deepcopy(convolution).double()
    values = _values(3, channels, height, width, device=device)
    ours, theirs = values.clone().requires_grad_(), values.double().requires_grad_()
    result = inverted._filter(convolution, ours)
    true = exact(theirs)
    weight = _values(*true.shape, device=device, seed=1)
    result.backward(weight)
    true.backward(weight.double())
    tolerance = _tolerance(device)
    assert result.is_contiguous(memory_format=torch.channels_last)
    assert _error(result, true) < tolerance
    assert _error(ours.grad, theirs.grad) < tolerance
    assert _error(convolution.weight.grad, exact.weight.grad) < tolerance
    assert convolution.weight.grad.stride() == convolution.weight.stride()


def test_many_programs_add_up_weights(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from csda.fast import depthwise

    monkeypatch.setattr(depthwise, "CORRELATE", depthwise.CORRELATE._replace(values=64))
    layer = Layer(16, 16, 3, 1, groups=16, tensorflow=False).to(device)
    convolution = layer[0]
    assert isinstance(convolution, nn.Conv2d)
    exact = deepcopy(convolution).double()
    values = _values(3, 16, 14, 14, device=device)
    inverted._filter(convolution, values).square().sum().backward()
    exact(values.double()).square().sum().backward()
    assert _error(convolution.weight.grad, exact.weight.grad) < 2 * _tolerance(device)


@pytest.mark.parametrize("backbone", ["mobilenet_v2", "efficientnet_lite0"])
def test_fused_networks_keep_their_names(backbone: str) -> None:
    encoder = build_encoder(backbone, 64, 3, 0.0)
    before = {name: value.data_ptr() for name, value in encoder.state_dict().items()}
    inverted.fuse_layers(encoder)
    assert {name: value.data_ptr() for name, value in encoder.state_dict().items()} == before
    assert not any(isinstance(module, InvertedResidual | Layer) for module in encoder.modules())


@pytest.mark.parametrize("backbone", ["mobilenet_v2", "efficientnet_lite0"])
def test_without_a_gpu_fused_networks_compute_the_same(backbone: str) -> None:
    torch.manual_seed(0)
    encoder = build_encoder(backbone, 64, 3, 0.0)
    fused = deepcopy(encoder)
    inverted.fuse_layers(fused)
    images = torch.rand(3, 3, 64, 64)
    assert torch.equal(fused(images), encoder(images))
    for ours, theirs in zip(fused.buffers(), encoder.buffers(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("backbone", ["mobilenet_v2", "efficientnet_lite0"])
def test_fused_networks_are_as_near_to_the_truth_as_torch_is(backbone: str) -> None:
    """Gradients in bfloat16 differ from those in float32 by some percent, whoever computes them."""
    torch.manual_seed(0)
    plain = build_encoder(backbone, 96, 3, 0.0).cuda().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    fused, exact = deepcopy(plain), deepcopy(plain).double()
    inverted.fuse_layers(fused)
    images = torch.rand(16, 3, 96, 96, device="cuda").contiguous(memory_format=torch.channels_last)
    weight = torch.randn(16, plain.width, device="cuda")
    gradients = {}
    for name, network, inputs in (
        ("plain", plain, images),
        ("fused", fused, images),
        ("exact", exact, images.double()),
    ):
        with torch.autocast("cuda", torch.bfloat16, enabled=name != "exact"):
            (network(inputs) * weight).sum().backward()
        gradients[name] = torch.cat([value.grad.flatten().double() for value in network.parameters()])
    assert _error(gradients["fused"], gradients["exact"]) < 1.2 * _error(gradients["plain"], gradients["exact"]) + 0.01
    for ours, theirs in zip(fused.buffers(), exact.buffers(), strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=0.05, atol=0.02)


def test_more_channels_change_nothing(device: torch.device) -> None:
    for tensorflow in (False, True):
        layer = Layer(3, 16, 3, 2, tensorflow=tensorflow)
        values = torch.rand(2, 3, 9, 8)
        torch.testing.assert_close(inverted._with_more_channels(layer[0], values), layer[0](values))


def test_sums_of_many_programs_are_added_up_in_between(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from csda.fast import normalization

    monkeypatch.setattr(normalization, "SUMS", normalization.SUMS._replace(values=64))
    monkeypatch.setattr(normalization, "SHARES", 4)
    norm = nn.BatchNorm2d(16).to(device)
    exact = deepcopy(norm).double()
    values = _values(3, 16, 12, 12, device=device)
    result = normalization.normalize(values, norm, active=False)
    assert _error(result, exact(values.double())) < _tolerance(device)
