"""Networks of other packages by name, `timm:NAME` and `monai:NAME`, each an encoder of one stage.

They are built with random weights; `csda.models.weights` loads others. They take three channels; grey is repeated.
Their own dropout is switched off, because it does not use the generator of the run, so a resumed run would end
differently. The run's dropout is applied to their features.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import nn

from csda.errors import ConfigError
from csda.models.dropout import Dropout
from csda.models.encoder import Encoder
from csda.models.mobilenet import Normalize

LIBRARIES = ("timm", "monai")

PREFIX = "0.1."
"""Prefix of the network's tensors in the encoder's state dict."""


class Network(NamedTuple):
    """A network without its classifier, and its normalisation of images."""

    body: nn.Module
    normalize: Normalize
    classifiers: tuple[str, ...]
    """Prefixes of the classifier's tensors."""


class _Family(NamedTuple):
    """Networks of MONAI that are built in the same way, by their names in MONAI."""

    names: tuple[str, ...]
    settings: dict[str, Any]
    classifier: str


_EFFICIENTNETS = tuple(f"efficientnet-b{number}" for number in range(8))
_MONAI = (
    _Family(
        tuple(f"DenseNet{depth}" for depth in (121, 169, 201, 264)),
        {"in_channels": 3, "out_channels": 1},
        "class_layers.out",
    ),
    _Family(
        ("SENet154", "SEResNet50", "SEResNet101", "SEResNet152", "SEResNext50", "SEResNext101"),
        {"in_channels": 3, "num_classes": 1},
        "last_linear",
    ),
    _Family(
        tuple(f"ResNet{depth}" for depth in (10, 18, 34, 50, 101, 152, 200)),
        {"n_input_channels": 3, "num_classes": 1},
        "fc",
    ),
    _Family(
        ("EfficientNetBN", *_EFFICIENTNETS),
        {"in_channels": 3, "num_classes": 1, "model_name": _EFFICIENTNETS[0], "pretrained": False},
        "_fc",
    ),
)


def is_adapted(backbone: str) -> bool:
    """Whether this is a network of another package."""
    return backbone.partition(":")[0] in LIBRARIES and ":" in backbone


def adapt(backbone: str, image_size: int, channels: int, dropout: float) -> Encoder:
    """The network as an encoder. Its width is found by passing a black image."""
    body, normalize, _ = open_network(backbone)
    with torch.device("cpu"), torch.no_grad():
        try:
            features = body.eval()(normalize(torch.zeros(1, channels, image_size, image_size)))
        except Exception as error:  # networks refuse a size with different errors
            raise ConfigError(
                f"image_size = {image_size} does not fit backbone {backbone}: {_first_line(error)}"
            ) from None
    if not isinstance(features, torch.Tensor) or features.ndim != 2:
        raise ConfigError(f"backbone {backbone} does not give one feature vector per image; choose another network")
    return Encoder(nn.Sequential(normalize, body.train(), Dropout(dropout)), width=features.shape[1])


def open_network(backbone: str, *, pretrained: bool = False) -> Network:
    """The network with random weights, or with timm's published ones."""
    library, _, name = backbone.partition(":")
    with torch.device("cpu"):  # not on the meta device: some networks compute with their tensors while they are built
        network = _open_timm(name, pretrained) if library == "timm" else _open_monai(name)
    for module in network.body.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for rate in ("drop_prob", "drop_connect_rate"):
            if hasattr(module, rate):
                setattr(module, rate, 0.0)
    return network


def _open_timm(name: str, pretrained: bool) -> Network:
    timm = _import("timm", "timm")
    known = timm.list_models()
    if name.partition(".")[0] not in known:
        raise _unknown("timm", name, known)
    try:
        body = timm.create_model(name, pretrained=pretrained, num_classes=0)
    except Exception as error:  # errors of the network connection, the server or the disk
        if pretrained:
            raise ConfigError(
                f"pretrained = true: timm could not get the weights of {name} ({_first_line(error)}); "
                "try again with a network, or give a file with weights=FILE"
            ) from None
        raise ConfigError(f"backbone = 'timm:{name}' cannot be built: {_first_line(error)}") from None
    about = body.pretrained_cfg
    classifiers = about.get("classifier") or ()
    classifiers = (classifiers,) if isinstance(classifiers, str) else classifiers
    return Network(body, Normalize(about["mean"], about["std"]), tuple(f"{each}." for each in classifiers))


def _open_monai(name: str) -> Network:
    family = next((family for family in _MONAI if name in family.names), None)
    if family is None:
        raise _unknown("monai", name, [known for family in _MONAI for known in family.names])
    networks = _import("monai", "monai.networks.nets")
    settings = family.settings | {"spatial_dims": 2}
    if name in _EFFICIENTNETS:
        settings["model_name"] = name
    # A class; for a ResNet, the function that sets its depth.
    made_by = {"ResNet": name.lower(), "effici": "EfficientNetBN"}.get(name[:6], name)
    body = getattr(networks, made_by)(**settings)
    body.set_submodule(family.classifier, nn.Identity())
    return Network(body, Normalize((0.0,) * 3, (1.0,) * 3), (f"{family.classifier}.",))


def _import(package: str, module: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name == package:
            raise ConfigError(f"backbone = '{package}:…' needs {package}; pip install 'csda[{package}]'") from None
        reason = str(error)
    except Exception as error:  # timm imports torchvision, which raises this if its operators are missing
        reason = f"{type(error).__name__}: {_first_line(error)}"
    raise ConfigError(
        f"backbone = '{package}:…': {package} is installed but cannot be loaded ({reason}); a torchvision that was "
        "built for another torch does this: install both from the same place"
    )


def _unknown(library: str, name: str, known: Sequence[str]) -> ConfigError:
    lower = {each.lower(): each for each in known}
    close = [lower[each] for each in difflib.get_close_matches(name.lower(), lower, n=3)]
    hint = f"did you mean {' or '.join(f'{library}:{each}' for each in close)}?" if close else "look at its own list"
    return ConfigError(f"backbone = '{library}:{name}' is unknown to {library}; {hint}")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
