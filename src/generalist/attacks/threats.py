"""Threat models: how far an image may be moved, and how to move inside that ball.

A threat is a norm and a radius `eps`, in units of the pixel range [0, 1]. Attacks do not depend on the norm: they call
the hooks of a threat, each of which works sample by sample on a perturbation [B, ...] of any floating type. No hook
waits for the device or makes a shape that depends on values, so each may run inside a CUDA graph capture.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, ValidationError, model_validator
from torch import Tensor

from generalist.core import random
from generalist.core.errors import GeneralistError
from generalist.core.options import Number, Options, first_problem, format_number
from generalist.core.registry import Registry


def widen(values: Tensor) -> Tensor:
    """At least float32: half precision overflows in sums of squares and rounds away small gradients."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def per_sample(values: Tensor, like: Tensor) -> Tensor:
    """Values [B] in the shape [B, 1, ...], to broadcast over images `like`."""
    return values.reshape(-1, *[1] * (like.dim() - 1))


def perturb(x: Tensor, delta: Tensor) -> Tensor:
    """The image `x` + `delta`, clipped to [0, 1].

    Clipping never moves a projected perturbation out of the ball: as 0 <= x <= 1, a clipped coordinate lies between x
    and x + delta, so each |delta_i| can only shrink, and with it every norm.
    """
    return (x + delta).clamp(0, 1)


def _rows(values: Tensor) -> Tensor:
    """One row per sample, at least float32."""
    return widen(values).flatten(1)


def _shaped(rows: Tensor, like: Tensor) -> Tensor:
    return rows.reshape(like.shape).to(like.dtype)


def _finite(grad: Tensor) -> Tensor:
    """Gradient rows with nan as 0 and inf as the largest number, so that one bad coordinate does not spoil an image."""
    return torch.nan_to_num(_rows(grad))


def _scaled(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Each row divided by its largest entry, and that entry, so that squares of tiny or huge rows stay in range."""
    largest = rows.abs().amax(1, keepdim=True)
    return torch.where(largest > 0, rows / largest, 0), largest


def _unit_l2(rows: Tensor) -> Tensor:
    """Each row divided by its Euclidean norm; a row of zeros stays zero."""
    scaled, _ = _scaled(rows)
    # A scaled row has an entry of 1, so its norm is at least 1: the bound only affects rows of zeros.
    length: Tensor = torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
    return scaled / length.clamp_min(1)


def _l2_norm(rows: Tensor) -> Tensor:
    scaled, largest = _scaled(rows)
    length: Tensor = torch.linalg.vector_norm(scaled, dim=1)
    return length * largest.squeeze(1)


@dataclass(frozen=True)
class Threat(ABC):
    """All perturbations whose norm is at most `eps`."""

    name: ClassVar[str]

    eps: float

    @abstractmethod
    def project(self, delta: Tensor) -> Tensor:
        """The point of the ball that is nearest to `delta` in Euclidean distance."""

    @abstractmethod
    def random_start(self, seed: int, purpose: str, index: Tensor, step: random.Key, like: Tensor) -> Tensor:
        """A point drawn uniformly from the ball for each sample, of the shape, type and device of `like`.

        It depends on (seed, purpose, sample index, step) and not on the batch around the sample.
        """

    @abstractmethod
    def steepest(self, grad: Tensor) -> Tensor:
        """The step of unit norm that raises a function with gradient `grad` the most; zero where the gradient is."""

    @abstractmethod
    def norm(self, delta: Tensor) -> Tensor:
        """The norm of each sample's perturbation, [B]."""

    @abstractmethod
    def default_step(self, steps: int) -> float:
        """The step size for an attack with so many steps."""

    def __str__(self) -> str:
        return f"{self.name}:{_plain(self.eps)}"


THREATS: Registry[type[Threat]] = Registry("threat norm")


@THREATS.register("linf")
class Linf(Threat):
    """No pixel moves by more than eps."""

    name = "linf"

    def project(self, delta: Tensor) -> Tensor:
        return delta.clamp(-self.eps, self.eps)

    def random_start(self, seed: int, purpose: str, index: Tensor, step: random.Key, like: Tensor) -> Tensor:
        draw = random.uniform(seed, purpose, index, step, shape=like.shape[1:], device=like.device)
        return (self.eps * (2 * draw.to(widen(like).dtype) - 1)).to(like.dtype)

    def steepest(self, grad: Tensor) -> Tensor:
        return torch.nan_to_num(grad).sign()

    def norm(self, delta: Tensor) -> Tensor:
        return _rows(delta).abs().amax(1)

    def default_step(self, steps: int) -> float:
        """A quarter of eps whatever the number of steps: 2/255 for 8/255, as is usual in adversarial training."""
        return self.eps / 4


@THREATS.register("l2")
class L2(Threat):
    """The Euclidean length of the perturbation is at most eps."""

    name = "l2"

    def project(self, delta: Tensor) -> Tensor:
        rows = _rows(delta)
        # Exactly 1 inside the ball, also at delta = 0, where the quotient is inf.
        shrink = (self.eps / _l2_norm(rows)).clamp(max=1)
        return _shaped(rows * shrink.unsqueeze(1), delta)

    def random_start(self, seed: int, purpose: str, index: Tensor, step: random.Key, like: Tensor) -> Tensor:
        """A direction uniform on the sphere, at a radius eps * u^(1/n): volume grows as the n-th power of radius."""
        draw = random.normal(seed, f"{purpose}/direction", index, step, shape=like.shape[1:], device=like.device)
        rows = _rows(draw.to(widen(like).dtype))
        u = random.uniform(seed, f"{purpose}/radius", index, step, shape=(1,), device=like.device).to(rows.dtype)
        return _shaped(self.eps * u ** (1 / rows.shape[1]) * _unit_l2(rows), like)

    def steepest(self, grad: Tensor) -> Tensor:
        return _shaped(_unit_l2(_finite(grad)), grad)

    def norm(self, delta: Tensor) -> Tensor:
        return _l2_norm(_rows(delta))

    def default_step(self, steps: int) -> float:
        """A quarter of eps whatever the number of steps."""
        return self.eps / 4


@THREATS.register("l1")
@dataclass(frozen=True)
class L1(Threat):
    """The absolute values of the perturbation sum to at most eps."""

    name = "l1"

    sparsity: float = 0.05
    """The share of the coordinates that one step changes. The true steepest step would change only the single best one,
    which soon reaches the end of [0, 1]; sparse descent changes the best few by equal amounts."""

    def project(self, delta: Tensor) -> Tensor:
        """Shrink every |delta_i| by the same theta, so that they sum to eps; inside the ball, change nothing.

        With u the sorted |delta_i|, sum_i max(u_i - theta, 0) = eps gives theta >= (u_1 + ... + u_j - eps) / j for
        each j, with equality where j counts the u_i above theta. So theta is the largest of these quotients. They are
        computed from u_i - u_1, which shifts theta equally, so that eps is not rounded away beside a large u.
        """
        rows = _rows(delta)
        sizes = rows.abs()
        below = sizes - sizes.amax(1, keepdim=True)
        counts = torch.arange(1, rows.shape[1] + 1, device=rows.device, dtype=rows.dtype)
        sums = below.sort(1, descending=True).values.cumsum(1)
        theta = ((sums - self.eps) / counts).amax(1, keepdim=True)
        inside = sizes.sum(1, keepdim=True) <= self.eps
        return _shaped(torch.where(inside, rows, rows.sign() * (below - theta).clamp_min(0)), delta)

    def random_start(self, seed: int, purpose: str, index: Tensor, step: random.Key, like: Tensor) -> Tensor:
        """The first n of n + 1 exponential draws, divided by the sum of all, are uniform in the simplex; random signs
        spread them over the ball."""
        count = like[0].numel()
        u = random.uniform(seed, f"{purpose}/size", index, step, shape=(count + 1,), device=like.device)
        spacings = -torch.log1p(-u.to(widen(like).dtype))
        signs = 2 * random.integers(2, seed, f"{purpose}/sign", index, step, shape=(count,), device=like.device) - 1
        shares = spacings[:, :count] / spacings.sum(1, keepdim=True)
        return _shaped(self.eps * signs * shares, like)

    def steepest(self, grad: Tensor) -> Tensor:
        rows = _finite(grad)
        best = rows.abs().topk(max(1, round(self.sparsity * rows.shape[1])), dim=1).indices
        signs = rows.gather(1, best).sign()
        # Coordinates without gradient do not count, so the step has norm 1 however few others there are.
        share = signs / signs.abs().sum(1, keepdim=True).clamp_min(1)
        return _shaped(torch.zeros_like(rows).scatter(1, best, share), grad)

    def norm(self, delta: Tensor) -> Tensor:
        return _rows(delta).abs().sum(1)

    def default_step(self, steps: int) -> float:
        """2.5 eps over the number of steps, at most eps: eps / 4 for 10 steps.

        Each step changes few coordinates, so a long attack takes smaller steps to reach more of them.
        """
        return self.eps * min(1.0, 2.5 / max(steps, 1))


@dataclass(frozen=True, eq=False)
class Reweighted(Threat):
    """A threat whose perturbations are scaled at each pixel by a share above 0 and at most 1.

    For linf this gives each pixel a bound of its own.
    """

    name: ClassVar[str] = "reweighted"

    inner: Threat
    share: Tensor
    """[B, 1, H, W], or one number for all."""

    def project(self, delta: Tensor) -> Tensor:
        return self.share * self.inner.project(delta / self.share)

    def random_start(self, seed: int, purpose: str, index: Tensor, step: random.Key, like: Tensor) -> Tensor:
        return self.share * self.inner.random_start(seed, purpose, index, step, like)

    def steepest(self, grad: Tensor) -> Tensor:
        return self.inner.steepest(grad)

    def norm(self, delta: Tensor) -> Tensor:
        return self.inner.norm(delta / self.share)

    def default_step(self, steps: int) -> float:
        return self.inner.default_step(steps)

    def __str__(self) -> str:
        return str(self.inner)


@dataclass(frozen=True, eq=False)
class Shrunk(Reweighted):
    """A share of a threat, with steps that are shorter by the same factor."""

    name: ClassVar[str] = "shrunk"

    def steepest(self, grad: Tensor) -> Tensor:
        return self.share * self.inner.steepest(grad)


class ThreatOptions(Options):
    """A threat model. A recipe may also write it as one word, `linf:8/255`."""

    norm: Literal["linf", "l2", "l1"]
    """How the size of a perturbation is measured: the largest change of any pixel, the Euclidean length, or the sum of
    absolute changes."""

    eps: Number = Field(gt=0, le=1e6)
    """The largest size of a perturbation, for pixels in [0, 1]; `8/255` is fine. For linf at most 1."""

    @model_validator(mode="before")
    @classmethod
    def _accept_word(cls, value: Any) -> Any:
        if isinstance(value, dict | ThreatOptions):
            return value
        norm, colon, eps = value.partition(":") if isinstance(value, str) else ("", "", "")
        if not colon:
            raise ValueError("a threat is a norm and an eps; write norm:eps, as in linf:8/255")
        return {"norm": norm.strip().lower(), "eps": eps.strip()}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.norm == "linf" and self.eps > 1:
            raise ValueError(f"eps of linf is for pixels in [0, 1] and at most 1: write 8/255, not 8 (got {self.eps})")
        return self

    def build(self) -> Threat:
        return THREATS.get(self.norm)(self.eps)

    def __str__(self) -> str:
        return str(self.build())


def parse_threat(text: str) -> ThreatOptions:
    """The threat written as `norm:eps`, for example `linf:8/255`."""
    try:
        return ThreatOptions.model_validate(text)
    except ValidationError as error:
        reason = first_problem(error)
        remedy = "" if "8/255" in reason else "; write norm:eps, as in linf:8/255"
        raise GeneralistError(f"threat {text!r}: {reason}{remedy}") from None


def _plain(eps: float) -> str:
    """Short, and exact: `parse_threat` reads the same number back."""
    return str(format_number(eps)).removesuffix(".0")
