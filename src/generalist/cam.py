"""Grad-CAM for any network: where it looks when it predicts a class."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from generalist.core.errors import GeneralistError
from generalist.models.activation_maps import class_activation_maps
from generalist.tensors.modes import frozen


def gradcam(model: nn.Module, images: Tensor, target: int | Tensor | None = None, layer: str | None = None) -> Tensor:
    """The evidence for a class at every pixel, >= 0, [B, H, W], of images [B, C, H, W] in [0, 1].

    `target` is a class for all images or one for each, [B]; by default the predicted class. `layer` is the name of a
    module whose output is a feature map, as in `model.named_modules()`; by default the last one before pooling. The
    model is left unchanged.
    """
    _check_images(images)
    like = next(model.parameters(), images)
    dtype = like.dtype if like.is_floating_point() else images.dtype
    x = images.detach().to(like.device, dtype)
    y = None if target is None else _targets(target, model, x)
    return class_activation_maps(model, x, y, layer=layer).squeeze(1)


def _check_images(images: Tensor) -> None:
    if not isinstance(images, Tensor) or images.dim() != 4 or not images.is_floating_point() or images.numel() == 0:
        shape = f"{images.dtype} {list(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
        raise GeneralistError(f"images must be a float tensor [B, C, H, W], not {shape}")
    low, high = (float(end) for end in images.detach().aminmax())
    if not (low >= 0 and high <= 1):  # false for nan, too
        raise GeneralistError(f"images must lie in [0, 1], not in [{low:g}, {high:g}]: divide by 255, or undo scaling")


def _targets(target: int | Tensor, model: nn.Module, x: Tensor) -> Tensor:
    """One class for each image, each of which the model has."""
    with frozen(model), torch.no_grad():
        classes = model(x[:1]).shape[1]
    given = torch.as_tensor(target, device=x.device)
    y = given.expand(len(x)) if given.dim() == 0 else given
    if y.dtype.is_floating_point or y.dtype == torch.bool or y.shape != (len(x),):
        raise GeneralistError(f"target must be a class, or one for each of the {len(x)} images, not {target!r:.80}")
    if int(y.min()) < 0 or int(y.max()) >= classes:
        raise GeneralistError(f"target: the model has {classes} classes, 0 to {classes - 1}, not {target!r:.80}")
    return y.long()
