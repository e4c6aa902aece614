"""The nearest point of a hyperplane inside the box of images, for each norm: the step that FAB is made of.

Given an image x in [0, 1]^d and the plane value + <normal, z - x> = 0, only coordinates with a slope can help, each
in one direction and only as far as the box has room. With slopes a_i = |normal_i|, rooms r_i and the gap |value| that
must be closed, what remains is to choose amounts 0 <= m_i <= r_i with sum a_i m_i = gap and the smallest norm. Each
norm has a closed form after one sort (Croce & Hein 2020, "Minimally distorted adversarial examples with a fast
adaptive boundary attack", section 2). If the plane does not meet the box, every coordinate goes to its wall.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor

from generalist.attacks.threats import L1, L2, Linf, Threat
from generalist.core.registry import Registry

Amounts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(slopes [B, d], rooms [..., B, d], gap [..., B, 1]) to the amounts of smallest norm; gap is float64.

Amounts where the slope is 0 are ignored."""

AMOUNTS: Registry[Amounts] = Registry("norm of a projection onto hyperplanes")

LONGEST = 16384
"""The longest row that the GPU kernel takes: a row has to fit into the registers of one block of threads."""

DUALS: Registry[type[Threat]] = Registry("norm of a projection onto hyperplanes")
DUALS.register("linf")(L1)
DUALS.register("l2")(L2)
DUALS.register("l1")(Linf)


def dual_norm(threat: Threat, normal: Tensor) -> Tensor:
    """How fast a function with gradient `normal` can change per unit of the threat's norm, [B]."""
    return DUALS.get(threat.name)(1.0).norm(torch.nan_to_num(normal))


def step_to_plane(threat: Threat, rows: Tensor, normal: Tensor, value: Tensor) -> Tensor:
    """The smallest step, in the threat's norm, from `rows` x onto the plane value + <normal, z - x> = 0 inside [0, 1].

    `value` [..., B] is the function at `rows` [..., B, d], and `normal` [B, d] its gradient, which must be finite;
    several points may share a plane. The step is zero where the gradient is. If the plane does not meet the box, it
    leads to the corner nearest to the plane. It is never nan.
    """
    amounts = AMOUNTS.get(threat.name)
    sizes = normal.abs()
    # Divided by the largest slope, so that the squares of tiny and of huge gradients stay in range.
    scale = sizes.amax(-1, keepdim=True).clamp_min(torch.finfo(sizes.dtype).tiny)
    gap = torch.nan_to_num(value).double().unsqueeze(-1) / scale
    direction = normal.sign() * -gap.sign().to(normal.dtype)
    room = torch.where(direction > 0, 1 - rows, rows)
    # Where the direction is 0 there is no step, whatever the amount.
    return direction * amounts(sizes / scale, room, gap.abs())


@AMOUNTS.register("linf")
def linf_amounts(slopes: Tensor, rooms: Tensor, gap: Tensor) -> Tensor:
    """All coordinates move equally far until their room is used up: m_i = min(r_i, t)."""
    return torch.minimum(rooms, _level(slopes, rooms, gap).to(rooms.dtype))


@AMOUNTS.register("l2")
def l2_amounts(slopes: Tensor, rooms: Tensor, gap: Tensor) -> Tensor:
    """Coordinates move in proportion to their slope until their room is used up: m_i = min(r_i, t a_i)."""
    weights = slopes.square()
    # A slope whose square underflows to 0 is left out; its cap would be inf.
    caps = torch.where(weights > 0, rooms / slopes, 0)
    return torch.minimum(rooms, _level(weights, caps, gap).to(caps.dtype) * slopes)


@AMOUNTS.register("l1")
def l1_amounts(slopes: Tensor, rooms: Tensor, gap: Tensor) -> Tensor:
    """The steepest coordinates use up their room, one after the other, until the gap is closed."""
    ordered, order = slopes.sort(dim=-1, descending=True, stable=True)
    order = order.expand_as(rooms)
    room = rooms.gather(-1, order)
    closed = ordered * room
    before = closed.cumsum(-1, dtype=torch.float64) - closed
    amounts = torch.where(ordered > 0, ((gap - before) / ordered).clamp_min(0), 0)
    return torch.zeros_like(room).scatter(-1, order, torch.minimum(amounts, room.double()).to(room.dtype))


def _level(weights: Tensor, caps: Tensor, gap: Tensor) -> Tensor:
    """The t [..., 1] with sum_i weights_i min(caps_i, t) = gap, or the largest cap where no t is enough.

    The sum is piecewise linear in t with its kinks at the caps, so a sort tells on which piece the solution lies. Sums
    over all pixels are computed in float64, the sort in the images' own type. On a GPU a kernel does it without a sort.
    """
    if _has_kernel(caps):
        from generalist.tensors.triton_level import level

        return level(weights, caps, gap)
    order = _ascending(caps)
    caps, weights = caps.gather(-1, order), weights.expand_as(caps).gather(-1, order)
    full = weights * caps
    # What the coordinates with smaller caps close, and the total weight of the others, those from cap i on. The latter
    # is summed from the end: subtracting from the total would lose digits.
    before = full.cumsum(-1, dtype=torch.float64) - full
    free = weights.flip(-1).cumsum(-1, dtype=torch.float64).flip(-1)
    piece = (before + caps * free < gap).sum(-1, keepdim=True).clamp_max(caps.shape[-1] - 1)
    # With no weight left the quotient is 0 or huge; the largest cap bounds it in either case.
    slope = free.gather(-1, piece).clamp_min(torch.finfo(free.dtype).tiny)
    return torch.minimum((gap - before.gather(-1, piece)) / slope, caps[..., -1:])


def _ascending(values: Tensor) -> Tensor:
    """Indices that sort each row. On the CPU by NumPy, which takes a seventh of PyTorch's time for rows of 64."""
    plain = type(values) is Tensor and values.device.type == "cpu"  # subclasses may have no values to read
    return torch.from_numpy(np.argsort(values.numpy(), axis=-1)) if plain else values.argsort(dim=-1)


def _has_kernel(caps: Tensor) -> bool:
    """Whether there is a kernel for rows of this type and length."""
    plain = type(caps) is Tensor and caps.is_cuda and caps.dtype == torch.float32
    return plain and caps.shape[-1] <= LONGEST and _triton()


@cache
def _triton() -> bool:
    return importlib.util.find_spec("triton") is not None
