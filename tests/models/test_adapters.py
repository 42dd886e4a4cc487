"""Networks of timm and MONAI: encoders as others are, or a sentence."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import csda
from csda.distributed import Ranks
from csda.errors import ConfigError
from csda.models import adapters
from csda.models.backbones import build_encoder, check_encoder
from csda.models.two_stream import TwoStream
from csda.models.weights import read_weights
from tiny import train_tiny

MEAN, STD = (0.1, 0.2, 0.3), (0.5, 0.25, 0.125)


class _Small(nn.Module):
    """A network as timm makes them: `num_classes=0` takes the classifier away, and it knows its images."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.pretrained_cfg = {"mean": MEAN, "std": STD, "classifier": "head.fc"}
        self.conv = nn.Conv2d(3, 24, 8, 8)
        self.norm = nn.BatchNorm2d(24)
        self.drop = nn.Dropout(0.9)
        self.head = nn.Sequential()
        self.head.add_module("fc", nn.Linear(24, num_classes) if num_classes else nn.Identity())

    def forward(self, images: Tensor) -> Tensor:
        result: Tensor = self.head(self.drop(self.norm(self.conv(images))).amax((2, 3)))
        return result


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A package `timm` in the place of the real one; whether each network was to be fetched."""
    timm, calls = ModuleType("timm"), []

    def create_model(name: str, pretrained: bool = False, num_classes: int = 1000) -> nn.Module:
        calls.append(pretrained)
        if name == "small.absent":
            raise RuntimeError("Invalid pretrained tag (absent) for small.\nand more")
        if pretrained and name != "small":
            raise OSError("no route to host\nand more")
        network = _Small(num_classes)
        if pretrained:
            nn.init.constant_(network.conv.bias, 7.0)
        return network

    timm.create_model, timm.list_models = create_model, lambda: ["small", "smaller", "resnet18"]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "timm", timm)
    return calls


def test_a_network_of_timm_is_an_encoder(calls: list[bool]) -> None:
    check_encoder("timm:small", 40, 3, 0.5)
    encoder = build_encoder("timm:small", 40, 3, dropout=0.0)
    assert (encoder.width, len(encoder), encoder.training) == (24, 1, True)
    images = torch.rand(2, 3, 40, 40)
    normal = (images - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
    body = encoder[0][1]
    torch.testing.assert_close(encoder(images), body(normal))  # in training: nothing is left out at random
    grey = images[:, :1]
    encoder.eval()
    torch.testing.assert_close(encoder(grey), encoder(grey.repeat(1, 3, 1, 1)))
    assert not any(calls)


@pytest.mark.parametrize(
    ("backbone", "size", "message"),
    [
        ("timm:smal", 40, "backbone = 'timm:smal' is unknown to timm; did you mean timm:small or timm:smaller?"),
        ("timm:", 40, "backbone = 'timm:' is unknown to timm; look at its own list"),
        ("timm:small.absent", 40, "'timm:small.absent' cannot be built: Invalid pretrained tag (absent) for small."),
        ("timm:small", 4, "image_size = 4 does not fit backbone timm:small: Calculated padded input size"),
        ("monai:densenet12", 40, "'monai:densenet12' is unknown to monai; did you mean monai:DenseNet121 or"),
        (
            "keras:vgg",
            40,
            "'keras:vgg' is unknown; choose one of alexnet, resnet18, efficientnet_lite0, efficientnet_lite1, ",
        ),
    ],
)
def test_what_cannot_be_had_is_named(backbone: str, size: int, message: str, calls: list[bool]) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        check_encoder(backbone, size, 3, 0.5)
    assert "\n" not in str(caught.value)


def test_a_network_without_one_vector_an_image_is_refused(calls: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Small, "forward", lambda network, images: network.conv(images))
    with pytest.raises(ConfigError, match="timm:small does not give one feature vector per image"):
        check_encoder("timm:small", 40, 3, 0.5)


@pytest.mark.parametrize("library", adapters.LIBRARIES)
def test_a_package_that_is_missing_or_broken_is_named(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(error: Exception) -> Any:
        def fail_with(name: str) -> None:
            raise error

        return fail_with

    backbone = {"timm": "timm:resnet18", "monai": "monai:ResNet18"}[library]
    for error, message in (
        (ModuleNotFoundError(f"No module named {library!r}", name=library), f"; pip install 'csda[{library}]'"),
        (ModuleNotFoundError("No module named 'yaml'", name="yaml"), "cannot be loaded (No module named 'yaml')"),
        (
            RuntimeError("operator torchvision::nms does not exist"),
            "cannot be loaded (RuntimeError: operator torchvision::nms does not exist); a torchvision that was built",
        ),
    ):
        monkeypatch.setattr(adapters, "import_module", fail(error))
        with pytest.raises(ConfigError, match=re.escape(message)):
            check_encoder(backbone, 64, 3, 0.5)


def test_timm_fetches_its_weights(calls: list[bool]) -> None:
    weights = read_weights("timm:small", True, None)
    assert weights is not None
    encoder = build_encoder("timm:small", 40, 3, dropout=0.5)
    encoder.load_state_dict(weights)
    assert encoder[0][1].conv.bias.eq(7).all()
    with pytest.raises(ConfigError, match=r"weights of smaller \(no route to host\); .*weights=FILE") as caught:
        read_weights("timm:smaller", True, None)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="pretrained = true: no weights of monai:ResNet18 are known; give a file"):
        read_weights("monai:ResNet18", True, None)


def test_a_file_is_taken_whole_but_for_the_classifier(calls: list[bool], tmp_path: Path) -> None:
    file = str(tmp_path / "small.safetensors")
    tensors = _Small(num_classes=5).state_dict()
    save_file(tensors, file)
    weights = read_weights("timm:small", True, file)
    assert weights is not None
    assert not any(calls)
    encoder = build_encoder("timm:small", 40, 3, dropout=0.5)
    encoder.load_state_dict(weights)
    assert encoder[0][1].conv.weight.equal(tensors["conv.weight"])
    for change, message in (
        ({"conv.bias": None}, "because conv.bias is missing"),
        ({"conv.bias": torch.zeros(3)}, "because conv.bias is [3], not [24]"),
        ({"neck.weight": torch.zeros(3)}, "which has no neck.weight"),
    ):
        save_file({name: value for name, value in (tensors | change).items() if value is not None}, file)
        with pytest.raises(ConfigError, match=re.escape(f"does not fit timm:small, {message}; give another file")):
            read_weights("timm:small", False, file)


def test_a_run_fetches_once_and_predicts_without(calls: list[bool], tiny_images: Path, tmp_path: Path) -> None:
    run = train_tiny(tiny_images, tmp_path / "run", backbone="timm:small", pretrained=True, epochs=2, lr=1e-12)
    assert calls.count(True) == 1
    learned, _ = run.read_weights()
    torch.testing.assert_close(learned["student.0.1.conv.bias"], torch.full((24,), 7.0))
    calls.clear()
    paths = [tiny_images / image for image in run.predictions.ids]
    np.testing.assert_allclose(csda.load(run.folder).predict(paths, calibrated=False), run.predictions.probs, atol=1e-5)
    assert calls == [False]


def test_methods_that_mix_hidden_layers_refuse_it(calls: list[bool], tiny_images: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="layers"):
        train_tiny(tiny_images, tmp_path / "run", method="glm", backbone="timm:small", epochs=2)


def test_a_norm_that_does_more_is_not_replaced_by_one_that_does_not() -> None:
    class NormAndActivation(nn.BatchNorm2d):
        pass

    encoder = build_encoder("resnet18", 32, 3, dropout=0.5)
    encoder[0][1] = NormAndActivation(64)
    with pytest.raises(ConfigError, match="its own BatchNorm, NormAndActivation, which several processes cannot"):
        TwoStream(encoder, 3).share(Ranks())


def _require(module: str) -> None:
    try:
        importlib.import_module(module)
    except Exception as error:
        pytest.skip(f"{module} cannot be imported: {type(error).__name__}: {error}")


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("backbone", "width"),
    [
        ("timm:resnet18", 512),
        ("timm:mobilenetv3_small_050", 1024),
        ("monai:DenseNet121", 1024),
        ("monai:EfficientNetBN", 1280),
        ("monai:efficientnet-b1", 1280),
        ("monai:ResNet18", 512),
        ("monai:SEResNet50", 2048),
    ],
)
def test_the_packages_themselves(backbone: str, width: int, tmp_path: Path) -> None:
    _require({"timm": "timm", "monai": "monai.networks.nets"}[backbone.partition(":")[0]])
    encoder = build_encoder(backbone, 64, 1, dropout=0.0)
    assert encoder.width == width
    images = torch.rand(4, 1, 64, 64)
    torch.testing.assert_close(encoder(images), encoder(images))  # in training: nothing is left out at random
    file = str(tmp_path / "weights.pth")
    torch.save(encoder[0][1].state_dict() | {f"{adapters.open_network(backbone).classifiers[0]}weight": images}, file)
    again = build_encoder(backbone, 64, 1, dropout=0.0)
    weights = read_weights(backbone, False, file)
    assert weights is not None
    again.load_state_dict(weights)
    torch.testing.assert_close(again.eval()(images), encoder.eval()(images))
