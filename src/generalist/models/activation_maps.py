"""Class-activation maps: which pixels speak for a class (Grad-CAM, Selvaraju et al., 2017)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from generalist.core.errors import GeneralistError
from generalist.tensors.modes import frozen


def class_activation_maps(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """For each image the evidence for its class y, >= 0, [B, 1, H, W]; in evaluation mode.

    relu(sum_c w_c A_c), A being the last feature map of the network and w_c the mean over its positions of the
    gradient of y's logit; enlarged to the size of the image. The last feature map is the last four-dimensional output
    of any of the network's modules that has more than one position.
    """
    found: list[Tensor] = []

    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.dim() == 4 and output.shape[2:].numel() > 1:
            found[:] = [output]

    hooks = [module.register_forward_hook(keep) for module in model.modules()]
    try:
        with frozen(model), torch.enable_grad():
            # Not `model(x)`: a compiled call may have been compiled without the hooks.
            logits = model.forward(x.detach().requires_grad_())
            if not found:
                raise GeneralistError(
                    "the network has no feature map of more than one position to make class-activation maps of; "
                    "choose a convolutional one"
                )
            features = found[0]
            (gradient,) = torch.autograd.grad(logits.gather(1, y[:, None]).sum(), features)
    finally:
        for hook in hooks:
            hook.remove()
    evidence = (gradient.float().mean((2, 3), keepdim=True) * features.detach().float()).sum(1, keepdim=True)
    return F.interpolate(evidence.relu(), size=x.shape[2:], mode="bilinear", align_corners=False)
