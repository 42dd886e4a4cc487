"""Small pictures of the images that a report shows, and Grad-CAM maps, made at the end of a run."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from csda import examples
from csda.data.augment import plain
from csda.data.decode import UnreadableError, read_image
from csda.data.prepared import PreparedData
from csda.data.records import Pixels, Record
from csda.grad_cam import grad_cam
from csda.models.two_stream import TwoStream

Array = npt.NDArray[np.generic]

SIZE = 128
"""Longer side of a picture in pixels."""
QUALITY = 78
BYTES = 1_700_000
"""Largest size of all thumbnails of a run in bytes, so that a report stays below 5 MB."""
MAPPED = 16
"""Batch size for maps."""


def illustrate(
    data: PreparedData,
    model: TwoStream,
    device: torch.device,
    test_probs: npt.NDArray[np.float32],
    unlabeled_probs: npt.NDArray[np.float32],
) -> dict[str, Array]:
    """Contents of `thumbnails.npz`: WebP pictures of the examples, and Grad-CAM maps of some."""
    split, labels = data.split, data.encode(data.split.test)
    multi_label = data.dataset.multi_label
    judged = [split.test[row] for row in examples.choose_judged(test_probs, labels)]
    guessed = [split.unlabeled[row] for row in examples.choose_unlabeled(unlabeled_probs, multi_label=multi_label)]
    # At most half of the images are unlabeled, so that there is room for labeled ones.
    guessed = list(dict.fromkeys(guessed))[: examples.IMAGES // 2]
    chosen = list(dict.fromkeys([*dict.fromkeys(judged), *guessed]))
    if len(chosen) > examples.IMAGES:
        chosen = list(dict.fromkeys(judged))[: examples.IMAGES - len(guessed)] + guessed
    rows = {record.id: row for row, record in enumerate(data.dataset.records)}
    pictures = _within_bytes(
        [(record.id, encode_picture(_view(record, data.pixels[rows[record.id]]))) for record in chosen]
    )
    kept = {name for name, _ in pictures}
    seen = [
        (split.test[row], name)
        for pairs in examples.choose_seen(test_probs, labels)
        for row, name in pairs
        if split.test[row].id in kept
    ]
    return {
        "ids": np.array([name for name, _ in pictures], dtype=np.str_),
        "ends": np.cumsum([len(content) for _, content in pictures], dtype=np.int64),
        "bytes": np.frombuffer(b"".join(content for _, content in pictures), dtype=np.uint8),
        **_maps(model, device, data.pixels, [(rows[record.id], record, name) for record, name in seen]),
    }


def encode_picture(pixels: Pixels) -> bytes:
    """Encode an image [H, W, C] as WebP, with a longer side of at most SIZE."""
    image = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    image.thumbnail((SIZE, SIZE), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=QUALITY, method=4)
    return buffer.getvalue()


def _view(record: Record, pixels: Pixels) -> Pixels:
    """The image as the network sees it, but as large as a thumbnail if its file is larger."""
    if record.path is None or pixels.shape[0] >= SIZE:
        return pixels
    try:
        return read_image(record.path, SIZE, pixels.shape[-1])
    except UnreadableError:
        return pixels


def _within_bytes(pictures: Sequence[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    total, kept = 0, []
    for name, content in pictures:
        total += len(content)
        if total > BYTES:
            break
        kept.append((name, content))
    return kept


def _maps(
    model: TwoStream, device: torch.device, pixels: Pixels, seen: Iterable[tuple[int, Record, int]]
) -> dict[str, Array]:
    """Grad-CAM maps of images for one class each, as bytes from 0 to 255; empty if the network has no feature map."""
    seen = list(seen)
    maps = []
    for start in range(0, len(seen), MAPPED):
        part = seen[start : start + MAPPED]
        images = plain(torch.from_numpy(pixels[[row for row, _, _ in part]]).to(device))
        found = grad_cam(model, images, torch.tensor([name for _, _, name in part], device=device))
        if found is None:
            return {}
        maps.append((found * 255).round().to(torch.uint8).cpu().numpy())
    if not maps:
        return {}
    return {
        "map_ids": np.array([record.id for _, record, _ in seen], dtype=np.str_),
        "map_classes": np.array([name for _, _, name in seen], dtype=np.int64),
        "maps": np.concatenate(maps),
    }
