"""Grad-CAM: a map of the regions in an image that raise a network's logit of a class.

Selvaraju et al., "Grad-CAM: Visual Explanations from Deep Networks via Gradient-based Localization", 2017.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from csda.models.two_stream import TwoStream

SIDE = 7
"""Smallest height and width of a map. Deeper layers of small images have coarser maps."""


def grad_cam(model: TwoStream, images: Tensor, classes: Tensor) -> Tensor | None:
    """Maps [B, h, w] from 0 to 1 for a class [B] of images [B, C, H, W]; None if the network has no feature map.

    The activations A_k of the deepest layer with at least 7×7 cells are weighted by the mean gradient α_k of the
    class's logit, and the positive part of Σ_k α_k A_k is divided by its maximum. A network on sequences of patches,
    such as a vision transformer, has no such layer.
    """
    side = min(SIDE, images.shape[-1])
    # So that gradients exist even if the network is frozen.
    images = images.detach().requires_grad_()
    found: list[Tensor | None] = [None]

    def keep(_module: nn.Module, _inputs: object, output: object) -> None:
        if not isinstance(output, Tensor) or output.ndim < 3:
            return
        if output.ndim != 4 or output.shape[2] != output.shape[3]:
            found[0] = None
        elif output.shape[2] >= side and output.requires_grad:
            found[0] = output

    hooks = [module.register_forward_hook(keep) for module in model.student.modules()]
    training = model.training
    model.eval()
    try:
        with torch.enable_grad():
            logits = model.head(model.student(images))
            activations = found[0]
            if activations is None:
                return None
            chosen = logits.gather(1, classes[:, None]).sum()
            (gradients,) = torch.autograd.grad(chosen, activations)
    finally:
        for hook in hooks:
            hook.remove()
        model.train(training)
    weights = gradients.float().mean(dim=(2, 3), keepdim=True)
    maps = (weights * activations.detach().float()).sum(dim=1).relu()
    return maps / maps.amax(dim=(1, 2), keepdim=True).clamp_min(1e-12)
