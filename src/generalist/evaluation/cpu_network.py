"""A folded network on the CPU, in the layouts that are fastest there.

Where no gradient is wanted, values stay in the blocked layout of PyTorch's convolution library (oneDNN) from the first
convolution to the last; plain tensors would be reordered at each. On the four-layer network of the digits recipes, one
thread, 128 images, a forward pass takes 0.91 ms instead of 1.06. Gradients are left to autograd but for its two slow
spots: the images' own gradient, for which oneDNN is slow because they have few channels, and the gradient that the
average hands to the last ReLU in another layout. Neither a chain of transposed convolutions written out by hand nor
matrix products for small maps behind a stride of 2 was faster where it counts, with several threads at once: autograd
calls one convolution after the other without the interpreter, and code in Python waits for it at every operation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from generalist.tensors.folding import FoldedConv, FoldedNetwork
from generalist.tensors.fusion_plan import mean_and_linear, plan


class CpuNetwork(FoldedNetwork):
    """Images to logits in float32; `CannotFoldError` where the network is not convolutions and a tail.

    Nothing in it changes when it is used, so several threads may use one at once.
    """

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph, torch.float32)
        self.plan = plan(graph)
        sides = [step.side[1] for step in self.plan.steps if step.side is not None]
        layers = [*(step.layer for step in self.plan.steps), *sides]
        self._linear = mean_and_linear(self.plan)
        self._spread: dict[int, Tensor] = {}
        self._blocked = {layer: (layer.weight.to_mkldnn(), layer.bias.to_mkldnn()) for layer in layers}

    def __call__(self, x: Tensor) -> Tensor:
        x = x.to(self.dtype)
        if torch.is_grad_enabled() and x.requires_grad:
            return self._answer(self._with_gradient(x))
        features = self._last_value(x)
        if self._linear is None:
            return self._answer(features.to_dense())
        # The mean in the blocked layout: to leave that layout with few pixels takes longer than the mean does.
        means = torch.mkldnn_adaptive_avg_pool2d(features, (1, 1)).to_dense()
        return F.linear(means.flatten(1), self._linear.weight, self._linear.bias)

    def _answer(self, features: Tensor) -> Tensor:
        """What is behind the convolutions. A mean over the image is part of the linear layer's matrix: a mean over so
        few pixels costs as much as a convolution."""
        if self._linear is None:
            logits: Tensor = self.plan.tail(features)
            return logits
        pixels = features.shape[2] * features.shape[3]
        if pixels not in self._spread:
            self._spread[pixels] = self._linear.weight.repeat(1, pixels) / pixels
        return F.linear(features.permute(0, 2, 3, 1).flatten(1), self._spread[pixels], self._linear.bias)

    def _with_gradient(self, x: Tensor) -> Tensor:
        """The last value, as autograd can follow it."""
        values = [x]
        for step in self.plan.steps:
            plain = step.x > 0 or step.layer.groups > 1
            out: Tensor = step.layer(values[step.x]) if plain else _FirstConv.apply(x, step.layer)  # type: ignore[no-untyped-call]
            if step.residual is not None:
                out = out + values[step.residual]
            if step.side is not None:
                out = out + step.side[1](values[step.side[0]])
            values.append(torch.relu(out) if step.relu else out)
        last: Tensor = _GradientInNhwc.apply(values[-1])  # type: ignore[no-untyped-call]
        return last

    def _last_value(self, x: Tensor) -> Tensor:
        """What the last convolution makes of the images, in the blocked layout."""
        values = [x.contiguous().to_mkldnn()]
        for step in self.plan.steps:
            out = self._convolve(step.layer, values[step.x])
            if step.residual is not None:
                out = out + values[step.residual]
            if step.side is not None:
                out = out + self._convolve(step.side[1], values[step.side[0]])
            values.append(torch.relu_(out) if step.relu else out)
        return values[-1]

    def _convolve(self, layer: FoldedConv, x: Tensor) -> Tensor:
        weight, bias = self._blocked[layer]
        return torch.conv2d(x, weight, bias, layer.stride, layer.padding, layer.dilation, layer.groups)


class _FirstConv(torch.autograd.Function):
    """A convolution of the images; their gradient is a product of small matrices, summed where windows overlap."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: FoldedConv) -> Tensor:
        ctx.layer, ctx.size = layer, x.shape[2:]
        out: Tensor = layer(x)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        layer = ctx.layer
        weight = layer.weight
        windows = torch.matmul(weight.flatten(1).t(), g.flatten(2))
        kernel = weight.shape[2:]
        return F.fold(windows, ctx.size, kernel, layer.dilation, layer.padding, layer.stride), None


class _GradientInNhwc(torch.autograd.Function):
    """The value itself; its gradient in the layout of the convolutions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.contiguous(memory_format=torch.channels_last)
