"""Class-activation maps: which pixels speak for a class (Grad-CAM, Selvaraju et al., 2017)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from generalist.core.errors import GeneralistError
from generalist.tensors.modes import frozen

POOLING = (
    nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AvgPoolNd,
    nn.modules.pooling._AdaptiveAvgPoolNd,
    nn.modules.pooling._AdaptiveMaxPoolNd,
)
"""Layers after the feature map: their output tells less about position than their input."""


def class_activation_maps(model: nn.Module, x: Tensor, y: Tensor | None = None, *, layer: str | None = None) -> Tensor:
    """The evidence for each image's class y, >= 0, [B, 1, H, W]; the model is in evaluation mode meanwhile.

    relu(sum_c w_c A_c), where A is a feature map of the network and w_c the mean over its positions of the gradient of
    y's logit; enlarged to the size of the image. The feature map is the output of the module named `layer`; by default
    the last four-dimensional output of any of the network's modules with more than one position, except poolings.
    Without y, the class is the one that the network predicts.
    """
    found: list[Tensor] = []
    with frozen(model), torch.enable_grad(), _watched(_modules(model, layer), found):
        # Not `model(x)`, which may be a call compiled without the hooks.
        logits = model.forward(x.detach().requires_grad_())
        if not found:
            raise GeneralistError(_no_map(layer))
        features = found[0]
        target = logits.argmax(1) if y is None else y
        chosen = logits.gather(1, target[:, None]).sum()
        (gradient,) = torch.autograd.grad(chosen, features, allow_unused=True)
    if gradient is None:
        raise GeneralistError(f"the logits do not depend on the feature map of {layer or 'the network'}: name another")
    evidence = (gradient.float().mean((2, 3), keepdim=True) * features.detach().float()).sum(1, keepdim=True)
    return F.interpolate(evidence.relu(), size=x.shape[2:], mode="bilinear", align_corners=False)


def _modules(model: nn.Module, layer: str | None) -> list[nn.Module]:
    """The modules whose output may be the feature map."""
    named = dict(model.named_modules())
    if layer is None:
        return [module for module in named.values() if not isinstance(module, POOLING)]
    if layer not in named or not layer:
        known = [name for name, module in named.items() if isinstance(module, nn.Conv2d)]
        raise GeneralistError(
            f"the network has no layer {layer!r:.80}; its convolutions are {', '.join(known[-8:]) or 'none'}"
        )
    return [named[layer]]


@contextmanager
def _watched(modules: list[nn.Module], found: list[Tensor]) -> Iterator[None]:
    """Within this context, `found` receives the last feature map that any of the modules returns."""

    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.dim() == 4 and output.shape[2:].numel() > 1:
            found[:] = [output]

    hooks = [module.register_forward_hook(keep) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _no_map(layer: str | None) -> str:
    if layer is not None:
        return f"layer {layer!r:.80} returns no feature map [B, C, H, W] of more than one position: name another"
    return (
        "the network has no feature map of more than one position to make class-activation maps of; "
        "choose a convolutional one"
    )
