"""A folded network as a list of fused convolutions, with a backward pass of its own.

A folded residual network consists of convolutions: each adds a bias and perhaps a residual and is rectified, all in
one kernel. Its gradient with respect to the images consists of convolutions again: each adds what arrives on other
paths and applies the mask of the ReLU below it, also in one kernel. With autograd, each of these would be a separate
pass over memory.

`plan` finds that list in a folded network's graph; whatever follows the last convolution (average, linear layer) is
left to autograd. The kernels are Triton's on a GPU in half precision, for every layer that one fits, and plain torch
elsewhere; both compute the same function.

Factors in float16 keep eleven bits, as many as TensorFloat-32 keeps of float32, and sums are float32 in both: so a
network in float16 is as close to the exact answer as cuDNN's float32 convolutions are under PyTorch's default flags, in
half the time. What float16 lacks is range: stored values saturate, and each sample's gradient is scaled into range.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from generalist.tensors.folding import CannotFoldError, FoldedConv, FoldedNetwork, fold, trace
from generalist.tensors.fusion_plan import Step, plan, value_shapes
from generalist.tensors.windows import LEAST, Windows, boxed_values, elements, fits

MOST_ELEMENTS = 2**31 - 1
"""Of one value, because the kernels count elements in 32 bits."""


class FusedNetwork(FoldedNetwork):
    """A folded network that runs by its plan."""

    def __init__(self, graph: fx.GraphModule, dtype: torch.dtype, *, shape: Sequence[int], triton: bool) -> None:
        self.plan = plan(graph)
        self.shapes = shapes = value_shapes(self.plan.steps, shape)
        self.most_images = MOST_ELEMENTS // max(math.prod(one) for one in shapes)
        self._windows: dict[tuple[int, int], Windows | None] = {}
        self.kernels: dict[FoldedConv, Any] = {}
        self.head: Any = None
        if triton:
            from generalist.tensors.fused_triton import TritonConv, find_head, fitting

            self.kernels = {layer: TritonConv(layer) for layer in fitting(self.plan)}
            self.head = find_head(self.plan)
        super().__init__(graph, dtype)

    @property
    def whole(self) -> bool:
        """Whether our own kernels fit all of its convolutions."""
        return all(step.layer in self.kernels for step in self.plan.steps)

    @property
    def row_by_row(self) -> bool:
        """Whether an image's answer and gradient are bit for bit the same, however many images are in the batch. Our
        kernels sum in an order that does not depend on the number of rows; libraries choose theirs by it."""
        return self.whole and self.head is not None

    def refresh(self) -> None:
        for layer in self.layers:
            if self.head is not None and layer is self.head.linear:
                self.head.refresh()
            else:
                (self.kernels.get(layer, layer) if isinstance(layer, FoldedConv) else layer).refresh()

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) > self.most_images:
            return torch.cat([self(part) for part in torch.split(x, self.most_images)])
        out: Tensor = _Convolutions.apply(x, self)  # type: ignore[no-untyped-call]
        logits: Tensor = self.plan.tail(out) if self.head is None else out
        return logits

    def windows(self, x: Tensor, side: int) -> Windows | None:
        """Its answers to images that differ from others only in windows of that side, if that is faster than computing
        whole images; `x` has the images' shape. Answers are the same bit by bit, as no sum's order changes."""
        if not self.row_by_row or tuple(x.shape[1:]) != self.shapes[0] or len(x) > self.most_images:
            return None
        place = (len(x), side)
        if place not in self._windows:
            boxes = boxed_values(self.plan.steps, self.shapes, side)
            counts = elements(boxes, len(x))
            worth = len(boxes) >= LEAST and max(counts) <= MOST_ELEMENTS and fits(counts, self.dtype, x.device)
            self._windows[place] = Windows(self, boxes, batch=len(x), side=side) if worth else None
        return self._windows[place]

    def values(self, x: Tensor) -> list[Tensor]:
        """The images and the results of all steps."""
        values = [_nhwc(x)]
        for step in self.plan.steps:
            values.append(self.step(step, values))
        return values

    def step(self, step: Step, values: Sequence[Tensor]) -> Tensor:
        """The result of one step, given the values before it."""
        x = values[step.x]
        residual = None if step.residual is None else values[step.residual]
        side = None if step.side is None else (values[step.side[0]], step.side[1])
        kernel = self.kernels.get(step.layer)
        if kernel is not None:
            out: Tensor = kernel.forward(
                x,
                residual=residual,
                side=None if side is None else (side[0], self.kernels[side[1]]),
                relu=step.relu,
            )
            return out
        out = step.layer(x.to(self.dtype))
        if residual is not None:
            out = out + residual
        if side is not None:
            out = out + side[1](side[0].to(self.dtype))
        return _nhwc(F.relu(out) if step.relu else out).to(self.dtype)

    def input_gradient(self, g: Tensor, values: Sequence[Tensor]) -> Tensor:
        """The gradient with respect to the images, given that of the answer."""
        steps, first_reader = self.plan.steps, self.plan.first_reader
        if self.head is not None:
            g = self.head.backward(g, values[-1])
        else:
            g = _nhwc(_masked(g, values[-1]) if steps[-1].relu else g)
        gradient: dict[int, Tensor] = {len(steps): g}
        sides: dict[int, tuple[Tensor, FoldedConv]] = {}
        for i in reversed(range(len(steps))):
            step, own = steps[i], gradient.pop(i + 1)
            if step.residual is not None:
                _accumulate(gradient, step.residual, own)
            if step.side is not None:
                sides[step.side[0]] = (own, step.side[1])
            rectified = step.x > 0 and steps[step.x - 1].relu and first_reader[step.x] == i
            gradient[step.x] = self._backward(
                step.layer,
                own,
                values[step.x],
                residual=gradient.pop(step.x, None),
                side=sides.pop(step.x, None) if first_reader[step.x] == i else None,
                masked=rectified,
            )
        return gradient[0]

    def _backward(
        self,
        layer: FoldedConv,
        g: Tensor,
        x: Tensor,
        *,
        residual: Tensor | None,
        side: tuple[Tensor, FoldedConv] | None,
        masked: bool,
    ) -> Tensor:
        kernel = self.kernels.get(layer)
        if kernel is not None:
            out: Tensor = kernel.backward(
                g,
                x,
                residual=residual,
                side=None if side is None else (side[0], self.kernels[side[1]]),
                masked=masked,
            )
            return out
        out = _plain_input_gradient(layer, g, x)
        if residual is not None:
            out = out + residual
        if side is not None:
            out = out + _plain_input_gradient(side[1], side[0], x)
        return _nhwc(_masked(out, x) if masked else out)


class _Convolutions(torch.autograd.Function):
    """From images to the plan's last value, or to the logits if there is a kernel for the head."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, network: FusedNetwork) -> Tensor:
        values = network.values(x)
        ctx.network = network
        ctx.save_for_backward(*values)
        if network.head is None:
            return values[-1].clone()  # the tail may change it in place, but the backward pass needs it unchanged
        out: Tensor = network.head.forward(values[-1])
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        values = ctx.saved_tensors
        if ctx.network.dtype != torch.float16:
            return ctx.network.input_gradient(g, values).to(values[0].dtype), None
        g, exponent = _in_range(g)
        gradient = ctx.network.input_gradient(g, values).to(values[0].dtype)
        return torch.ldexp(gradient, exponent.reshape(-1, *[1] * (gradient.dim() - 1))), None


def _in_range(g: Tensor) -> tuple[Tensor, Tensor]:
    """Each sample's gradient divided by the power of two above its largest entry, and that power: in float16, the
    gradient of a loss of nearly 0 would vanish. This is exact, as the backward pass that follows is linear."""
    exponent = torch.frexp(g.abs().flatten(1).amax(1)).exponent.clamp(-100, 100)
    return torch.ldexp(g, -exponent.reshape(-1, *[1] * (g.dim() - 1))), exponent


def _nhwc(value: Tensor) -> Tensor:
    """The memory layout of the kernels: callers and torch's own operations may use another one."""
    return value.contiguous(memory_format=torch.channels_last)


def _masked(g: Tensor, value: Tensor) -> Tensor:
    return torch.where(value > 0, g, 0)


def _accumulate(gradient: dict[int, Tensor], value: int, g: Tensor) -> None:
    gradient[value] = gradient[value] + g if value in gradient else g


def _plain_input_gradient(layer: FoldedConv, g: Tensor, x: Tensor) -> Tensor:
    out: Tensor = torch.ops.aten.convolution_backward(
        g,
        x.to(g.dtype),
        layer.weight,
        None,
        layer.stride,
        layer.padding,
        layer.dilation,
        False,
        [0, 0],
        layer.groups,
        [True, False, False],
    )[0]
    return out


def fuse(model: nn.Module, dtype: torch.dtype, *, shape: Sequence[int], triton: bool) -> FusedNetwork:
    """The network for images of `shape` in evaluation mode, folded and fused; `CannotFoldError` says why not."""
    return FusedNetwork(trace(model, dtype), dtype, shape=shape, triton=triton)


def fastest(model: nn.Module, dtype: torch.dtype, *, shape: Sequence[int], compiled: bool = False) -> FoldedNetwork:
    """The network in evaluation mode in its fastest form here: fused if our own kernels fit all of its convolutions,
    else folded. `CannotFoldError` says why it can be neither."""
    fused = wholly_fused(model, dtype, shape=shape) if dtype == torch.bfloat16 else None
    return fold(model, dtype, compiled=compiled) if fused is None else fused


def wholly_fused(model: nn.Module, dtype: torch.dtype, *, shape: Sequence[int]) -> FusedNetwork | None:
    """The network in half precision if our own kernels fit all of its convolutions, else None."""
    first = next(model.parameters(), None)
    if first is None or not (first.is_cuda and importlib.util.find_spec("triton")):
        return None
    try:
        fused = fuse(model, dtype, shape=shape, triton=True)
    except CannotFoldError:
        return None
    return fused if fused.whole else None


def like_tensor_float(model: nn.Module, *, shape: Sequence[int]) -> FusedNetwork | None:
    """A float32 network in float16, with the precision of cuDNN's convolutions under PyTorch's default flags.

    None if the flags demand more, or if the kernels do not cover the network from the images to the logits.
    """
    if not tensor_float():
        return None
    fused = wholly_fused(model, torch.float16, shape=shape)
    return fused if fused is not None and fused.head is not None else None


def tensor_float() -> bool:
    """Whether PyTorch's flags allow float32 convolutions to multiply in TensorFloat-32."""
    return bool(torch.backends.cudnn.conv.fp32_precision == "tf32")  # type: ignore[attr-defined]
