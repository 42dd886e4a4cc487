"""Views of an image that features or predictions are averaged over."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

KEPT = 0.64
"""Share of the width and height that the view of the middle shows."""


class ViewChoice(NamedTuple):
    """The views of an image that its prediction is the mean over: besides the image its three mirror images with
    `flips`, and with `middle` its enlarged middle, mirrored likewise."""

    flips: bool = False
    middle: bool = False

    def take(self, images: Tensor) -> list[Tensor]:
        """The views of images [B, C, H, W], each of the same shape."""
        shown = [images, enlarge_middle(images)] if self.middle else [images]
        return [view for each in shown for view in ([each, *mirror(each)] if self.flips else [each])]


PLAIN = ViewChoice()


def enlarge_middle(images: Tensor) -> Tensor:
    """The middle of images [B, C, H, W], as large as the images."""
    height, width = images.shape[2:]
    rows, columns = round(KEPT * height), round(KEPT * width)
    top, left = (height - rows) // 2, (width - columns) // 2
    middle = images[:, :, top : top + rows, left : left + columns]
    return F.interpolate(middle, size=(height, width), mode="bilinear", align_corners=False)


def mirror(images: Tensor) -> list[Tensor]:
    """The three mirror images of images [B, C, H, W]: left and right, top and bottom, and both exchanged."""
    return [images.flip(axes) for axes in ((3,), (2,), (2, 3))]
