"""Features of a frozen network: computed once, cached, and used for training instead of pixels.

A frozen network gives the same features of an image in every epoch, so they are computed once, before the first epoch.
Then a head is trained on them, which takes seconds, where training the network takes minutes or hours.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from csda.config import RunConfig
from csda.data.augment import plain
from csda.data.cache import Progress, Rows, digest, load_cached, rows_done
from csda.data.prepared import PreparedData
from csda.data.records import Pixels
from csda.engine import Precision, arithmetic, name_device
from csda.folders import default_cache
from csda.models.encoder import Encoder
from csda.models.feature_encoder import Views, build_body
from csda.progress import Reporter, format_duration

Floats = npt.NDArray[np.float32]

BATCH_ON_CPU = 32
"""Images per batch on a CPU. With more, activations do not stay in its caches."""

ALSO: dict[Views, str] = {
    "plain": "",
    "zoomed": ", also of their middle (feature_views),",
    "mirrored": ", also mirrored (feature_views),",
}
"""The views of which features are the mean, in the announcement."""

BATCHES_AHEAD = 8
"""Number of GPU batches with one common copy to the host, so that the host reads images while the GPU computes."""


@dataclass(frozen=True, slots=True)
class Features:
    """Features [N, W] in the order of the data set's records, and the network that computed them.

    `body` is the state dict of the encoder and `digest` a hash of it.
    """

    array: Floats
    body: Mapping[str, Tensor]
    digest: str


class Extractor:
    """The frozen network in evaluation mode: uint8 pixels [N, H, W, C] to features [N, W]."""

    def __init__(self, body: Encoder, device: torch.device, precision: Precision, batch_size: int) -> None:
        self.width = body.width
        self.device, self.precision = device, precision
        self.batch_size = batch_size if device.type == "cuda" else min(batch_size, BATCH_ON_CPU)
        self.network: nn.Module = body.eval().to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]

    @property
    def chunk(self) -> int:
        """The best number of images per call."""
        return self.batch_size * (BATCHES_AHEAD if self.device.type == "cuda" else 1)

    @torch.inference_mode()
    def __call__(self, pixels: Pixels) -> Floats:
        """Compute features; a GPU computes a batch while the host copies the next one."""
        with arithmetic(self.device, self.precision):
            features = [
                self.network(plain(self._bring(pixels[start : start + self.batch_size]))).float()
                for start in range(0, len(pixels), self.batch_size)
            ]
        return torch.cat(features).cpu().numpy().astype(np.float32, copy=False)

    def _bring(self, pixels: Pixels) -> Tensor:
        images = torch.from_numpy(np.array(pixels))  # a copy, because a tensor needs writable memory
        return images.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else images


def open_features(
    config: RunConfig,
    data: PreparedData,
    weights: Mapping[str, Tensor],
    device: torch.device,
    reporter: Reporter,
    cache: Path | None = None,
) -> Features:
    """The features of each image, computed unless the cache has them.

    The cache key consists of the keys of the pixels, the network's name, weights, stages and views, and the precision.
    """
    stages, views = config.feature_stages, config.feature_views
    body = build_body(config.backbone, data.pixels.shape[1], data.pixels.shape[-1], stages, weights, views)
    own = body.state_dict()  # on the host, wherever the body goes
    known = digest_weights(own)
    made: list[Extractor] = []

    def extractor() -> Extractor:
        """Moved to the device when the first features are computed."""
        if not made:
            made.append(Extractor(body, device, config.precision, config.eval_batch_size))
        return made[0]

    def make(positions: Sequence[int]) -> Sequence[Floats]:
        return list(extractor()(data.pixels[list(positions)]))

    name = config.backbone.replace(":", "-").replace("/", "-")
    kind = {"stages": stages, "views": views if views != "plain" else ""}
    settings = f"{config.backbone}, weights {known}, {config.precision}" + "".join(
        f", {value} {name}" for name, value in kind.items() if value
    )
    rows = Rows(
        f"{data.dataset.name} {data.dataset.root}",
        settings,
        [digest(settings.encode(), key) for key in data.keys],
        (body.width,),
        make,
        workers=0,  # a second thread would break the capture of a CUDA graph on this device
        place="-".join(
            str(part) for part in (f"features/{name}", config.image_size, known[:8], *kind.values()) if part
        ),
        dtype=np.float32,
        chunk=BATCH_ON_CPU if device.type == "cpu" else BATCHES_AHEAD * config.eval_batch_size,
    )
    cache = cache or default_cache()
    missing = int((~rows_done(rows.folder(cache), len(rows.keys))).sum())
    if missing:
        reporter.note(_announce(config, data, missing, extractor(), device))
    array, _, remarks = load_cached(rows, cache, _shown(reporter.features, missing))
    for remark in remarks:
        reporter.note(remark)
    return Features(array, own, known)


def digest_weights(weights: Mapping[str, Tensor]) -> str:
    """A hash of a state dict, 16 hexadecimal digits."""
    summary = blake2b(digest_size=8)
    for name, value in sorted(weights.items()):
        values = value.detach().cpu().contiguous()
        summary.update(f"{name} {values.dtype} {list(values.shape)}".encode())
        summary.update(values.reshape(-1).view(torch.uint8).numpy().tobytes())
    return summary.hexdigest()


def _announce(config: RunConfig, data: PreparedData, missing: int, extractor: Extractor, device: torch.device) -> str:
    """Print what will be computed and how long it will take, estimated on a few images."""
    few = data.pixels[: min(extractor.batch_size, 16)]
    extractor(few)
    begun = time.perf_counter()
    extractor(few)
    seconds = (time.perf_counter() - begun) * missing / len(few)
    idle = "On the CPU" if torch.cuda.is_available() else "No GPU"
    place = idle if device.type == "cpu" else name_device(device)
    return (
        f"{place}: preset {config.preset}, features of {missing} images{ALSO[config.feature_views]} by "
        f"{config.backbone} at {config.image_size}×{config.image_size}, about {format_duration(seconds)}; they are "
        f"cached for other trainings"
    )


def _shown(show: Progress, missing: int) -> Progress:
    """Show progress over the missing rows; nothing if all are cached."""
    return show if missing else lambda done, total: None
