"""EfficientNet-Lite0: EfficientNet-B0 (Tan & Le, "EfficientNet: Rethinking Model Scaling for Convolutional Neural
Networks", 2019) without squeeze-and-excitation and with ReLU6, as its authors published it for small devices.

It comes from TensorFlow, whose padding and BatchNorm it keeps, since the published weights were trained with them.
"""

from __future__ import annotations

from csda.models.encoder import Encoder
from csda.models.mobilenet import Group, Normalize, build_stages

_STAGES = (
    [Group(1, 16, 1, 1)],
    [Group(6, 24, 2, 2)],
    [Group(6, 40, 2, 2, 5)],
    [Group(6, 80, 3, 2), Group(6, 112, 3, 1, 5)],
    [Group(6, 192, 4, 2, 5), Group(6, 320, 1, 1)],
)


def efficientnet_lite0(image_size: int, channels: int, dropout: float = 0.5) -> Encoder:
    """EfficientNet-Lite0 without its classifier, images of any size to 1,280 features."""
    # (x − 127) / 128 for pixels x from 0 to 255.
    return build_stages(Normalize((127 / 255,) * 3, (128 / 255,) * 3), _STAGES, dropout, tensorflow=True)
