"""Published weights that an encoder can begin with: where they are found, and which of its tensors is which."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from csda.errors import ConfigError
from csda.models import efficientnet, mobilenet
from csda.models.backbones import build_encoder


@dataclass(frozen=True, slots=True)
class Published:
    """How the weights of a backbone were published."""

    namings: tuple[Callable[[], Iterable[str]], ...]
    """Each gives the names of convolutions and norms, in the order of the network, as one publisher has them."""
    classifiers: tuple[str, ...]
    """What the names of tensors begin with that are left out."""
    packaged: Callable[[], Path] | None
    """The file that an installed package brings."""


PUBLISHED: dict[str, Published] = {
    "efficientnet_lite0": Published(
        (efficientnet.packaged_names, efficientnet.timm_names), ("_fc.", "classifier."), efficientnet.packaged_file
    ),
    "mobilenet_v2": Published((mobilenet.torchvision_names,), ("classifier.",), None),
}


def read_weights(backbone: str, pretrained: bool, file: str | None) -> dict[str, Tensor] | None:
    """The weights that the encoder begins with, a state dict of it; None where they are to be random.

    They are those of `file`, or with `pretrained` alone of an installed package.
    """
    if not pretrained and file is None:
        return None
    if backbone not in PUBLISHED:
        setting = "pretrained = true" if file is None else f"weights = {file!r}"
        raise ConfigError(
            f"{setting}: {backbone} begins with random weights alone; "
            f"leave it out, or choose backbone={' or '.join(PUBLISHED)}"
        )
    published = PUBLISHED[backbone]
    if file is not None:
        path = Path(file)
    elif published.packaged is not None:
        path = published.packaged()
    else:
        raise ConfigError(f"pretrained = true: no package brings weights of {backbone}; give a file with weights=FILE")
    return _fit(path, _read(path), backbone, published)


def _read(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ConfigError(f"{path}: does not exist; give the file of weights with weights=FILE") from None
    except Exception as error:  # whatever a file that is none makes the readers say
        raise ConfigError(
            f"{path}: no file of weights ({type(error).__name__}); give a .safetensors or .pth file of tensors by name"
        ) from None
    if not isinstance(tensors, dict) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise ConfigError(f"{path}: holds other things than tensors by name; give a state dict")
    return tensors


def _fit(path: Path, tensors: dict[str, Tensor], backbone: str, published: Published) -> dict[str, Tensor]:
    """The tensors under the encoder's names, if they are all that it has and the classifier is all that is left."""
    with torch.device("meta"):
        encoder = build_encoder(backbone, image_size=32, channels=3, dropout=0.0)
    layers = [name for name, module in encoder.named_modules() if isinstance(module, nn.Conv2d | nn.BatchNorm2d)]
    namings = [list(naming()) for naming in published.namings]
    naming = next((names for names in namings if f"{names[0]}.weight" in tensors), namings[0])
    theirs = dict(zip(layers, naming, strict=True))
    left, fitted = dict(tensors), {}
    for name, own in encoder.state_dict().items():
        layer, _, kind = name.rpartition(".")
        key = f"{theirs[layer]}.{kind}"
        if key not in left:
            raise ConfigError(f"{path}: does not fit {backbone}, since {key} is missing; give another file")
        fitted[name] = left.pop(key)
        if (shape := fitted[name].shape) != own.shape:
            raise ConfigError(
                f"{path}: does not fit {backbone}, since {key} is {list(shape)}, not {list(own.shape)}; "
                "give another file"
            )
    for key in left:
        if not key.startswith(published.classifiers):
            raise ConfigError(f"{path}: does not fit {backbone}, which has no {key}; give another file")
    return fitted
