"""The layers of a fused network that have Triton kernels, with their weights in the form that the kernels need."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from generalist.tensors import triton_conv
from generalist.tensors.folding import FoldedConv, FoldedLinear
from generalist.tensors.fusion_plan import Plan, Step, mean_and_linear


class TritonConv:
    """A convolution with the BatchNorm behind it: matrices of the forward pass and the input gradient, and a bias."""

    def __init__(self, layer: FoldedConv) -> None:
        self.layer = layer
        out, channels, height, width = layer.weight.shape
        self.taps, self.strided = height * width, layer.stride == (2, 2)
        self.images = channels < triton_conv.IMAGE_CHANNELS
        self.channels = channels
        device, dtype = layer.weight.device, layer.weight.dtype
        columns = triton_conv.IMAGE_CHANNELS if self.images else channels
        self.forward_matrix = torch.empty(self.taps * channels, out, device=device, dtype=dtype)
        self.backward_matrix = torch.empty(self.taps * out, columns, device=device, dtype=dtype)
        self.bias = torch.empty(out, device=device, dtype=torch.float32)

    def refresh(self) -> None:
        conv, batchnorm = self.layer.source[0], self.layer.batchnorm[0]
        assert batchnorm is not None and batchnorm.running_mean is not None and batchnorm.running_var is not None
        triton_conv.fold(
            conv.weight,
            (batchnorm.weight, batchnorm.bias, batchnorm.running_mean, batchnorm.running_var, batchnorm.eps),
            forward=self.forward_matrix,
            backward=self.backward_matrix,
            bias=self.bias,
            reverse=not self.strided,
        )

    def forward(
        self, x: Tensor, *, residual: Tensor | None, side: tuple[Tensor, TritonConv] | None, relu: bool
    ) -> Tensor:
        if self.images:
            return triton_conv.image_conv(x, self.forward_matrix, self.bias, relu=relu)
        bias = self.bias if side is None else self.bias + side[1].bias
        return triton_conv.conv3x3(
            x,
            self.forward_matrix,
            stride=2 if self.strided else 1,
            bias=bias,
            residual=residual,
            side=None if side is None else (side[0], side[1].forward_matrix),
            relu=relu,
        )

    def backward(
        self,
        g: Tensor,
        x: Tensor,
        *,
        residual: Tensor | None,
        side: tuple[Tensor, TritonConv] | None,
        masked: bool,
    ) -> Tensor:
        mask = x if masked else None
        if self.images:
            out = triton_conv.image_gradient(g, self.backward_matrix, self.channels, x.dtype)
            return out if residual is None else out + residual
        if self.strided:
            other = None if side is None else (side[0], side[1].backward_matrix)
            size = (x.shape[2], x.shape[3])
            return triton_conv.strided_input_gradient(
                g, self.backward_matrix, size=size, side=other, residual=residual, mask=mask
            )
        return triton_conv.conv3x3(g, self.backward_matrix, residual=residual, mask=mask)


class TritonHead:
    """The average over the image and the linear layer after the last, rectified features."""

    def __init__(self, linear: FoldedLinear) -> None:
        self.linear = linear
        # In float32 whatever the network's type: PyTorch's flags exempt matrix products, and here it costs nothing.
        self.weight = torch.empty_like(linear.weight, dtype=torch.float32)
        self.bias = torch.empty_like(linear.bias, dtype=torch.float32)

    @torch.no_grad()
    def refresh(self) -> None:
        source = self.linear.source[0]
        self.weight.copy_(source.weight)
        self.bias.copy_(source.bias) if source.bias is not None else self.bias.zero_()

    def forward(self, features: Tensor) -> Tensor:
        return triton_conv.head(features, self.weight, self.bias)

    def backward(self, g: Tensor, features: Tensor) -> Tensor:
        return triton_conv.head_gradient(g.contiguous(), self.weight, features)


def find_head(plan: Plan) -> TritonHead | None:
    """The head's kernels if the network ends in mean, linear layer, logits; else None."""
    layer = mean_and_linear(plan)
    if layer is None or not plan.steps[-1].relu:
        return None
    channels = layer.weight.shape[1]
    return TritonHead(layer) if channels >= 64 and channels & (channels - 1) == 0 else None


def fitting(plan: Plan) -> Iterator[FoldedConv]:
    """The layers that the kernels can run."""
    steps = plan.steps
    fits = {i for i, step in enumerate(steps) if _runs(step) and _has_norm(step.layer)}
    # A side is part of its step's kernel and, backwards, of the kernel of the first step that reads the same value: all
    # of them have kernels, or none has.
    together = [(i, plan.first_reader[step.side[0]], step.side[1]) for i, step in enumerate(steps) if step.side]
    while misfits := {
        i for a, b, side in together for i in (a, b) if i in fits and not (_takes(steps[b], side) and {a, b} <= fits)
    }:
        fits -= misfits
    for i in sorted(fits):
        yield steps[i].layer
        side = steps[i].side
        if side is not None:
            yield side[1]


def _takes(step: Step, side: FoldedConv) -> bool:
    """Whether the backward kernel of a step has room for that 1x1 convolution of stride 2 beside it."""
    return step.layer.stride == (2, 2) and _is_matrix(side) and _has_norm(side)


def _runs(step: Step) -> bool:
    """Whether there is a kernel for the step."""
    layer = step.layer
    out, channels = layer.weight.shape[:2]
    if layer.weight.shape[2:] != (3, 3) or layer.padding != (1, 1) or layer.dilation != (1, 1) or layer.groups != 1:
        return False
    if channels < triton_conv.IMAGE_CHANNELS:
        alone = step.x == 0 and step.residual is None and step.side is None and layer.stride == (1, 1)
        return alone and out in (64, 128) and channels * 9 <= 64
    typed = step.x > 0  # the images have their caller's type; the results of steps have the network's
    return typed and _is_matrix(layer) and layer.stride in ((1, 1), (2, 2))


def _is_matrix(layer: FoldedConv) -> bool:
    """Whether the channels of its input and output come in whole tiles."""
    return all(count % triton_conv.BLOCK_K == 0 and count % min(count, 128) == 0 for count in layer.weight.shape[:2])


def _has_norm(layer: FoldedConv) -> bool:
    """Whether the folding kernel accepts it: no bias of its own, a BatchNorm with weights, contiguous memory."""
    conv, batchnorm = layer.source[0], layer.batchnorm[0]
    whole = isinstance(batchnorm, nn.BatchNorm2d) and batchnorm.weight is not None and batchnorm.bias is not None
    orders = (torch.contiguous_format, torch.channels_last)
    return whole and conv.bias is None and any(conv.weight.is_contiguous(memory_format=order) for order in orders)
