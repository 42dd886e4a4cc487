"""Augment a whole batch at once, from uint8 pixels to float images, with parameters drawn for each sample.

The weak view is the paper's: rotation within ±10° and translation by up to a tenth of the image, zeros outside, pixels
in [0, 1], not standardised. The strong view is for FixMatch and similar methods: a wider affine map, two random colour
changes and a cut-out, similar to RandAugment (Cubuk et al., 2020). The preset `strong` adds zoom and mild colour
changes to the weak view, and reflects images at their borders.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class StandIn(NamedTuple):
    """Images to use if `real`, a 0-dim bool on the device, is false; repeated from the first if too few."""

    source: Tensor
    rows: Tensor | None
    real: Tensor


class Selection(NamedTuple):
    """The location of a batch's images: `rows` [B] of `source`, uint8 [N, H, W, C], or all of it.

    A kernel can read them there without a copy, and the host need not know whether a stand-in is used.
    """

    source: Tensor
    rows: Tensor | None = None
    stand_in: StandIn | None = None

    @property
    def size(self) -> int:
        return len(self.source if self.rows is None else self.rows)

    def pixels(self) -> Tensor:
        """The images themselves, [B, H, W, C]."""
        pixels = self.source if self.rows is None else self.source[self.rows]
        if self.stand_in is None:
            return pixels
        others = Selection(*self.stand_in[:2]).pixels()
        others = others[torch.arange(self.size, device=others.device) % len(others)]
        return torch.where(self.stand_in.real, pixels, others)


def plain(pixels: Tensor) -> Tensor:
    """uint8 [B, H, W, C] to float [B, C, H, W] in [0, 1], nothing else."""
    return pixels.permute(0, 3, 1, 2).float().div_(255.0)


@dataclass(frozen=True, slots=True)
class Augmentation:
    """The strength of the changes in a weak view.

    `weak` and `strong` draw the parameters of each sample; `weak_view` and `strong_view` make float images [B, C, H, W]
    in [0, 1] from random numbers in [−1, 1): twelve per sample for a strong view, five for the paper's weak view,
    twelve for other weak views.

    Attributes:
        rotation: largest angle, in degrees.
        translation: largest shift, as a share of the image.
        flip: whether images are mirrored at random, left to right and top to bottom.
        zoom: largest factor of enlarging or shrinking.
        enlarge: largest further factor of enlarging.
        border: pixels beyond the border: zeros, or the reflected image.
        color: largest relative change of brightness, contrast and saturation, and twice that of the tint.
    """

    rotation: float = 10.0
    translation: float = 0.1
    flip: bool = False
    zoom: float = 1.0
    enlarge: float = 1.0
    border: Literal["zeros", "reflection"] = "zeros"
    color: float = 0.0

    @property
    def as_in_the_paper(self) -> bool:
        """Whether a weak view is only moved, rotated and mirrored, with zeros outside."""
        return self.zoom == self.enlarge == 1.0 and self.color == 0.0 and self.border == "zeros"

    def weak(self, images: Selection, generator: torch.Generator) -> Tensor:
        """A weak view: the paper's augmentation with the additions of the settings."""
        columns = 5 if self.as_in_the_paper else 12
        return self.weak_view(images, uniform(images.size, columns, images.source.device, generator))

    def strong(self, images: Selection, generator: torch.Generator) -> Tensor:
        """A strong view: a wide affine map, two colour changes and a cut-out."""
        return self.strong_view(images, uniform(images.size, 12, images.source.device, generator))

    def plain(self, images: Selection) -> Tensor:
        """The images without augmentation."""
        return plain(images.pixels())

    @property
    def weak_reach(self) -> tuple[float, float]:
        """The largest rotation, and the largest shift in half image widths."""
        return math.radians(self.rotation), 2.0 * self.translation

    @property
    def strong_reach(self) -> tuple[float, float]:
        return math.radians(max(30.0, self.rotation)), 2.0 * max(0.2, self.translation)

    def weak_view(self, images: Selection, draws: Tensor) -> Tensor:
        views = self._warp(images, draws, *self.weak_reach, self.zoom, self.enlarge)
        if self.color:
            brightness, contrast, saturation = (1.0 + self.color * draws[:, 6:9]).unbind(1)
            views = _recolor(views, brightness, contrast, saturation, 1.0 + self.color / 2.0 * draws[:, 9:12])
        return views

    def strong_view(self, images: Selection, draws: Tensor) -> Tensor:
        views = self._warp(images, draws, *self.strong_reach)
        # Two of the three changes of colour apply to each sample: `left_out` names the third.
        left_out = ((draws[:, 5] + 1.0) * 1.5).long().clamp_(0, 2)
        strength = 1.0 + 0.9 * draws[:, 6:9]
        views = _recolor(views, *strength.scatter(1, left_out[:, None], 1.0).unbind(1))
        return _cut_out(views, centre=draws[:, 9:11], side=0.25 * (draws[:, 11] + 1.0))

    def _warp(
        self,
        images: Selection,
        draws: Tensor,
        rotation: float,
        translation: float,
        zoom: float = 1.0,
        enlarge: float = 1.0,
    ) -> Tensor:
        angle, shift = draws[:, 0] * rotation, draws[:, 1:3] * translation
        mirror = torch.where(draws[:, 3:5] < 0.0, -1.0, 1.0) if self.flip else torch.ones_like(shift)
        if zoom * enlarge > 1.0:
            # The logarithm of the scale is uniform from −log(zoom · enlarge) to log(zoom); a scale below 1 enlarges.
            further = math.log(enlarge) / 2.0
            mirror = mirror * torch.exp(draws[:, 5:6] * (math.log(zoom) + further) - further)
        return _warp(plain(images.pixels()), angle, shift, mirror, self.border)


class FeatureViews(Augmentation):
    """Views of images with features [N, W] only: every view is the features."""

    def weak(self, images: Selection, generator: torch.Generator) -> Tensor:
        return images.pixels().float()

    def strong(self, images: Selection, generator: torch.Generator) -> Tensor:
        return images.pixels().float()

    def plain(self, images: Selection) -> Tensor:
        return images.pixels().float()


def uniform(rows: int, columns: int, device: torch.device, generator: torch.Generator) -> Tensor:
    """Independent uniform random numbers in [−1, 1)."""
    return torch.empty(rows, columns, device=device).uniform_(-1.0, 1.0, generator=generator)


def _warp(images: Tensor, angle: Tensor, shift: Tensor, mirror: Tensor, border: str = "zeros") -> Tensor:
    """Rotate, scale, mirror and translate by bilinear sampling.

    `shift` is in half image widths; `mirror` is the scale of each axis, negative if the image is mirrored.
    """
    cosine, sine = torch.cos(angle), torch.sin(angle)
    across, down = mirror.unbind(1)
    first = torch.stack((cosine * across, -sine * down, shift[:, 0]), dim=1)
    second = torch.stack((sine * across, cosine * down, shift[:, 1]), dim=1)
    theta = torch.stack((first, second), dim=1)
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode=border, align_corners=False)


def _recolor(
    views: Tensor, brightness: Tensor, contrast: Tensor, saturation: Tensor, tint: Tensor | None = None
) -> Tensor:
    """Multiply brightness, distance from the mean, distance from grey [B each] and channels [B, 3], within [0, 1]."""
    brightness, contrast, saturation = (each[:, None, None, None] for each in (brightness, contrast, saturation))
    views = views * brightness
    average = views.mean(dim=(1, 2, 3), keepdim=True)
    views = average + (views - average) * contrast
    grey = views.mean(dim=1, keepdim=True)
    views = grey + (views - grey) * saturation
    if tint is not None and views.shape[1] == tint.shape[1]:
        views = views * tint[:, :, None, None]
    return views.clamp(0.0, 1.0)


def _cut_out(images: Tensor, centre: Tensor, side: Tensor) -> Tensor:
    """Grey squares of `side` half image widths around `centre`, both in the coordinates of `affine_grid`."""
    size = images.shape[-1]
    axis = (2.0 * torch.arange(size, device=images.device) + 1.0) / size - 1.0
    outside_x = (axis - centre[:, :1]).abs() > side[:, None]
    outside_y = (axis - centre[:, 1:]).abs() > side[:, None]
    return torch.where((outside_x[:, None, :] | outside_y[:, :, None])[:, None], images, 0.5)
