"""Answers to images that differ from known ones only in a small window: the early layers are computed only around it.

A convolution's answer changes only where it reads a change. So a search that repaints windows keeps the first steps'
results for its best images, and computes only the boxes of a proposal that can differ. The boxes of a value have one
size for all samples, are shifted to lie inside the image, and hold every pixel that can differ; in memory they follow
the whole images of that value. A step reads a pixel from the box if there is one, else from the whole image. A rejected
proposal thus costs nothing more; an accepted one's boxes are copied into the whole images. Boxes grow from layer to
layer: from the first one that covers most of its image on, everything is computed as usual.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from generalist.tensors.folding import FoldedConv
from generalist.tensors.fusion_plan import Shape, Step

if TYPE_CHECKING:
    from generalist.tensors.fused import FusedNetwork

MOST = 0.6
"""The largest share of an image for a box: the saving must pay for a kernel that reads with more care."""

LEAST = 3
"""The fewest values with boxes that are worthwhile: fewer save less than a step of the network."""

MEMORY = 1 / 32
"""The share of a GPU's memory for boxes and known images: a recorded search keeps them once for each size of
windows."""

COPIED_PIXELS = 128
GROUP = 64
"""Pixels, and channels of each, that a program copies."""

Interval = tuple[int, int]
"""The first and the last row (or column)."""


def reached(layer: FoldedConv, axis: int, changed: Interval, length: int) -> Interval | None:
    """The rows (axis 0) or columns (1) of a convolution's answer, of `length` in all, that read a change."""
    kernel, stride = layer.weight.shape[2 + axis], layer.stride[axis]
    padding, dilation = int(layer.padding[axis]), layer.dilation[axis]
    # Row o reads from row o * stride - padding, and `span` rows further:
    span = dilation * (kernel - 1)
    first = -((span - padding - changed[0]) // stride)  # rounded up
    last = (changed[1] + padding) // stride
    first, last = max(first, 0), min(last, length - 1)
    return (first, last) if first <= last else None


def changed_rows(steps: Sequence[Step], shapes: Sequence[Shape], axis: int, window: Interval) -> list[Interval]:
    """For every value, the rows or columns that can differ if those of the window in the images do."""
    changed: list[Interval] = [window]
    for step, shape in zip(steps, shapes[1:], strict=True):
        length = shape[1 + axis]
        ways = [reached(step.layer, axis, changed[step.x], length)]
        if step.residual is not None:
            ways.append(changed[step.residual])
        if step.side is not None:
            ways.append(reached(step.side[1], axis, changed[step.side[0]], length))
        met = [way for way in ways if way is not None]
        # A stride larger than the kernel may step over the whole change; an interval is never empty all the same.
        changed.append((min(way[0] for way in met), max(way[1] for way in met)) if met else (0, 0))
    return changed


@dataclass(frozen=True)
class Boxes:
    """The boxes of one value."""

    shape: Shape
    """The shape of the value."""
    height: int
    width: int
    tops: tuple[int, ...]
    """For each top row of a window, that of its box."""
    lefts: tuple[int, ...]

    @property
    def share(self) -> float:
        """The share of the image that a box covers."""
        return self.height * self.width / (self.shape[1] * self.shape[2])


def boxes(steps: Sequence[Step], shapes: Sequence[Shape], side: int) -> list[Boxes]:
    """The boxes of windows of that side, for every value except the images."""
    sizes: list[list[int]] = []
    corners: list[list[tuple[int, ...]]] = []
    for axis in (0, 1):
        windows = [(first, first + side - 1) for first in range(shapes[0][1 + axis] - side + 1)]
        by_window = [changed_rows(steps, shapes, axis, window)[1:] for window in windows]
        by_value = list(zip(*by_window, strict=True))
        sizes.append([max(last - first + 1 for first, last in changed) for changed in by_value])
        ends = [shape[1 + axis] - size for shape, size in zip(shapes[1:], sizes[axis], strict=True)]
        corners.append(
            [tuple(min(first, end) for first, _ in changed) for changed, end in zip(by_value, ends, strict=True)]
        )
    return [Boxes(*fields) for fields in zip(shapes[1:], *sizes, *corners, strict=True)]


def boxed_values(steps: Sequence[Step], shapes: Sequence[Shape], side: int) -> list[Boxes]:
    """The boxes of the first values, as far as they are small; the last value is always whole, as the head needs it."""
    found = boxes(steps, shapes, side)[:-1]
    end = next((i for i, one in enumerate(found) if one.share > MOST), len(found))
    return found[:end]


@dataclass(frozen=True)
class View:
    """A value as the kernels read it: whole images, followed in memory by the boxes if it has any."""

    memory: Tensor
    channels: int
    height: int
    width: int
    boxed: bool = False
    number: int = 0
    """The number among the values with boxes."""
    box_height: int = 0
    box_width: int = 0


class Windows:
    """A network's answers around windows of one side in a batch of images of one size. It stores nothing of a batch."""

    def __init__(self, network: FusedNetwork, boxes: Sequence[Boxes], *, batch: int, side: int) -> None:
        from generalist.tensors import triton_around

        self.network, self.batch, self.side = network, batch, side
        self._triton: Any = triton_around
        self._boxes = tuple(boxes)
        self._starts = tuple(accumulate(elements(boxes, batch), initial=0))
        self.device = network.kernels[network.plan.steps[0].layer].forward_matrix.device
        self._tops = torch.tensor([one.tops for one in boxes], dtype=torch.int32, device=self.device)
        self._lefts = torch.tensor([one.lefts for one in boxes], dtype=torch.int32, device=self.device)
        self._parts = torch.tensor(list(self._copies()), dtype=torch.int32, device=self.device)

    def _copies(self) -> Iterator[tuple[int, ...]]:
        """The arguments of each program of the copying kernel, as it reads them."""
        for number, (one, start) in enumerate(zip(self._boxes, self._starts, strict=False)):
            channels, height, width = one.shape
            for group in range(channels // GROUP):
                for pixel in range(0, one.height * one.width, COPIED_PIXELS):
                    sizes = (height, width, one.height, one.width, channels // GROUP, group, pixel)
                    yield start // GROUP, 2 * self.batch * number, *sizes

    def corners(self, top: Tensor, left: Tensor) -> Tensor:
        """The corners of every value's boxes, int32 [Q,V,2,B], from the windows' top rows and left columns [Q,B]."""
        found = torch.stack([self._tops[:, top], self._lefts[:, left]], 1)
        return found.permute(2, 0, 1, 3).contiguous()

    def fill(self, x: Tensor) -> Tensor:
        """The memory for all boxes, with the first steps' results for these images."""
        values = [x.contiguous(memory_format=torch.channels_last)]
        memory = torch.empty(self._starts[-1], device=x.device, dtype=self.network.dtype)
        for step, whole in zip(self.network.plan.steps, self.known(memory), strict=False):
            values.append(whole.copy_(self.network.step(step, values)))
        return memory

    def known(self, memory: Tensor) -> list[Tensor]:
        """The whole images [B,C,H,W] of every value that has boxes."""
        found = []
        for one, start in zip(self._boxes, self._starts, strict=False):
            channels, height, width = one.shape
            end = start + self.batch * height * width * channels
            found.append(memory[start:end].view(self.batch, height, width, channels).permute(0, 3, 1, 2))
        return found

    def logits(self, x: Tensor, corners: Tensor, memory: Tensor) -> Tensor:
        """The network's answer to images that differ from the memory's only in the windows of `corners` [V,2,B]."""
        x = x.contiguous(memory_format=torch.channels_last)
        values, views = [x], [View(x, *x.shape[1:])]
        for i, step in enumerate(self.network.plan.steps):
            out = self._view(i, memory) if i < len(self._boxes) else None
            kernel = self.network.kernels[step.layer]
            if out is not None and kernel.images:
                self._triton.image_conv_around(x, kernel.forward_matrix, kernel.bias, corners, relu=step.relu, out=out)
                made = out.memory
            elif any(views[value].boxed for value in step.reads):
                made = self._around(step, views, corners, out)
            else:
                made = self.network.step(step, values)
            values.append(made)
            views.append(out or View(made, *made.shape[1:]))
        logits: Tensor = self.network.head.forward(values[-1])
        return logits

    def _around(self, step: Step, views: Sequence[View], corners: Tensor, out: View | None) -> Tensor:
        """A step that reads boxes, and writes boxes or whole images."""
        kernel, side = self.network.kernels[step.layer], None
        bias = kernel.bias
        if step.side is not None:
            other = self.network.kernels[step.side[1]]
            bias, side = bias + other.bias, (views[step.side[0]], other.forward_matrix)
        made: Tensor = self._triton.conv3x3_around(
            views[step.x],
            kernel.forward_matrix,
            bias,
            corners,
            stride=2 if kernel.strided else 1,
            residual=None if step.residual is None else views[step.residual],
            side=side,
            relu=step.relu,
            out=out,
        )
        return made

    def _view(self, number: int, memory: Tensor) -> View:
        one = self._boxes[number]
        part = memory[self._starts[number] : self._starts[number + 1]]
        return View(part, *one.shape, boxed=True, number=number, box_height=one.height, box_width=one.width)

    def keep(self, accepted: Tensor, corners: Tensor, memory: Tensor) -> None:
        """Where accepted, bool [B], make the images of the last `logits` those of the memory."""
        self._triton.keep(memory, accepted, corners, self._parts)


def elements(boxes: Sequence[Boxes], batch: int) -> list[int]:
    """The number of elements in every value's memory."""
    return [batch * one.shape[0] * (one.shape[1] * one.shape[2] + one.height * one.width) for one in boxes]


def fits(counts: Sequence[int], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a GPU has room for that many elements, of all values together."""
    if device.type != "cuda":
        return True
    return sum(counts) * dtype.itemsize <= MEMORY * torch.cuda.get_device_properties(device).total_memory
