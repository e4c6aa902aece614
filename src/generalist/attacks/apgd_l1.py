"""Auto-PGD for l1: sparse steps whose sparsity adapts, projected onto ball and box at once.

Croce and Hein, "Mind the box: l1-APGD for sparse adversarial attacks on image classifiers" (ICML 2021). The
stages, the start's size and the rounding of the sparsity follow AutoAttack's reference implementation where it differs.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from generalist.attacks.ascent import Ascent, Labels, Trail, pick
from generalist.attacks.threats import Threat, per_sample
from generalist.tensors.capture import Given

START_SIZE = 0.8
"""Mean size of the start's coordinates before projection: that of standard normal noise."""

SPARSER = 1.5
"""The best perturbation has this many times more coordinates than a step changes; also the decay of the step size."""

SMALLEST_STEP = 0.1
"""Length of the smallest step, in units of eps; the largest is eps."""

SETTLED = 0.95
"""If a period leaves the best perturbation at least this share of its coordinates, its sparsity has settled, and steps
become smaller."""

STAGES = ((3, 30), (2, 30), (1, 40))
"""(radius over eps, percent of the steps): larger balls first; each stage starts from the best of the one before."""


def project_to_ball_and_box(x: Tensor, delta: Tensor, eps: float) -> Tensor:
    """The perturbation nearest to `delta` with l1 norm at most eps that keeps `x` in [0, 1].

    It is sign(delta_i) * clamp(|delta_i| - theta, 0, room_i), where room_i is the distance to the wall of the box. As
    theta falls, a coordinate starts to grow at |delta_i| and stops at |delta_i| - room_i. Between such corners the sum
    of the sizes grows at a rate that is the number of growing coordinates. Going through the corners from the largest
    down gives the sum at each, and theta >= 0 lies after the last corner where the sum is at most eps.
    """
    rows, images = delta.flatten(1).double(), x.flatten(1).double()
    size = rows.abs()
    room = torch.where(rows > 0, 1 - images, images)
    corners, order = torch.cat([size, size - room], 1).sort(1, descending=True)
    growing = torch.where(order < size.shape[1], 1.0, -1.0).double().cumsum(1)
    fall = F.pad(corners[:, :-1] - corners[:, 1:], (1, 0))
    sums = (fall * F.pad(growing[:, :-1], (1, 0))).cumsum(1)
    last = ((sums <= eps).sum(1, keepdim=True) - 1).clamp_min(0)
    # Where no coordinate grows after the last corner, each is at its wall, and any smaller theta gives the same.
    theta = corners.gather(1, last) - (eps - sums.gather(1, last)) / growing.gather(1, last).clamp_min(1)
    kept = torch.minimum((size - theta.clamp_min(0)).clamp_min(0), room)
    return (rows.sign() * kept).reshape(delta.shape).to(delta.dtype)


def sparse_step(gradient: Tensor, share: Tensor) -> Tensor:
    """The step of l1 norm 1 that moves a `share` [B] of the coordinates, those of largest gradient, equally far."""
    rows = torch.nan_to_num(gradient.flatten(1))
    sizes = rows.abs()
    count = (share * sizes.shape[1]).ceil().long().clamp(1, sizes.shape[1])
    least = sizes.sort(1, descending=True).values.gather(1, count.unsqueeze(1) - 1)
    signs = torch.where(sizes >= least, rows.sign(), 0)
    return (signs / signs.abs().sum(1, keepdim=True).clamp_min(1)).reshape(gradient.shape)


def search_l1(ascent: Ascent, x: Tensor, labels: Labels, start: Tensor, *, threat: Threat, steps: int) -> Tensor:
    """The most wrong image on the path from `start`, through balls of three, two and one eps."""
    # Far out, so that projection leaves few coordinates: starts become sparse, like good perturbations, and diverse.
    start = start * (START_SIZE * x[0].numel() / threat.eps)
    point, left = x + start, steps
    for radius, percent in STAGES:
        eps = radius * threat.eps
        count = left if radius == 1 else min(left, -(-percent * steps // 100))
        left -= count
        trail = _climb(ascent, x, labels, _walled(x, point - x, eps), eps=eps, steps=count)
        point = trail.best.x
    return trail.most_wrong


def _climb(ascent: Ascent, x: Tensor, labels: Labels, start: Tensor, *, eps: float, steps: int) -> Trail:
    """Ascend in one ball, beginning with the sparsity of `start`."""
    trail = ascent.begin(start, labels)
    total = x[0].numel()
    used = _changed(start, x)
    share = used / total / SPARSER
    size = torch.full_like(used, eps)
    period = max(steps * 4 // 100, 1)
    step = ascent.repeated("step-l1", partial(_step, ascent, eps), eps)
    for i in range(1, steps + 1):
        trail = step(trail, (x, size, share, *labels))
        if i % period == 0:
            here, best = trail.here, trail.best
            used_now = _changed(best.x, x)
            sparser = used_now < SETTLED * used
            size = torch.where(sparser, eps, (size / SPARSER).clamp_min(SMALLEST_STEP * eps))
            used, share = used_now, used_now / total / SPARSER
            x_now, gradient = pick(sparser, best.x, here.x), pick(sparser, best.gradient, here.gradient)
            trail = trail._replace(here=here._replace(x=x_now, gradient=gradient))
    return trail


def _step(ascent: Ascent, eps: float, trail: Trail, given: Given) -> Trail:
    x, size, share, *labels = given
    here = trail.here
    delta = here.x - x + per_sample(size, x).to(x.dtype) * sparse_step(here.gradient, share)
    return ascent.go(trail, _walled(x, delta, eps), tuple(labels))


def _walled(x: Tensor, delta: Tensor, eps: float) -> Tensor:
    return (x + project_to_ball_and_box(x, delta, eps)).clamp(0, 1)


def _changed(image: Tensor, x: Tensor) -> Tensor:
    """How many coordinates differ, [B]."""
    return (image != x).flatten(1).sum(1).to(torch.float32)
