"""The check after the fact: what counts as inside of ball and box, on images of any size."""

from __future__ import annotations

import pytest
import torch
from attack_targets import labelled
from torch import Tensor, nn

from generalist.attacks.apgd import APGD
from generalist.attacks.base import SLACK, verdict
from generalist.attacks.fgsm import FGSM
from generalist.attacks.pgd_attack import PGD
from generalist.attacks.threats import L1, L2, Linf, Threat
from generalist.core import random
from generalist.core.errors import GeneralistError
from generalist.data.sets import Batch

THREATS = {"linf": Linf(0.1), "l2": L2(0.6), "l1": L1(1.5)}
every_threat = pytest.mark.parametrize("threat", THREATS.values(), ids=THREATS.keys())


def grey(count: int, side: int) -> Batch:
    """Noise away from the walls, which would take a part of each perturbation."""
    index = torch.arange(count)
    x = 0.2 + 0.6 * random.uniform(7, "images", index, shape=(3, side, side))
    return Batch(x=x, y=torch.zeros(count, dtype=torch.int64), index=index)


class Plane(nn.Module):
    """Two classes, on either side of a plane that all pixels have a say in."""

    def forward(self, x: Tensor) -> Tensor:
        slopes = random.normal(1, "plane", shape=x.shape[1:])
        side = ((x - 0.5) * slopes).flatten(1).sum(1) / 100
        return torch.stack([side, -side], 1)


def moved(batch: Batch, threat: Threat, times: float) -> Tensor:
    """The images, moved by so many times eps in a random direction."""
    delta = random.normal(3, "delta", batch.index, shape=batch.x.shape[1:]).double()
    return batch.x + (times * threat.eps * delta / threat.norm(delta).reshape(-1, 1, 1, 1)).float()


@pytest.mark.parametrize("threat", [L2(2.0), L1(2e3)], ids=str)
@pytest.mark.parametrize("attack", [FGSM(), PGD(steps=3), APGD(steps=3)], ids=lambda attack: attack.name)
def test_rounding_on_large_images_costs_an_attack_nothing(attack, threat) -> None:
    """On a CPU a norm of 786,432 pixels is wrong in its sixth digit: all these were thrown away once."""
    batch = labelled(Plane(), grey(2, 512))
    found = attack.run(Plane(), batch, threat=threat, seed=0)
    assert found.broken.all()
    assert (threat.norm((found.x - batch.x).double()) <= threat.eps * (1 + SLACK) + SLACK).all()


@every_threat
def test_a_hair_outside_is_drawn_back_and_more_is_no_success(threat) -> None:
    batch = grey(4, 8)
    for times, size in ((0.5, 0.5), (1.0, 1.0), (1.0005, 1.0), (1.01, 0.0), (3.0, 0.0)):
        found = verdict(Plane(), batch, moved(batch, threat, times), threat=threat)
        norms = threat.norm((found.x - batch.x).double())
        assert torch.allclose(norms, torch.full_like(norms, size * threat.eps), rtol=5e-5)
        assert (norms <= threat.eps * (1 + SLACK) + SLACK).all()


@every_threat
def test_what_is_inside_stays_as_it_is(threat) -> None:
    batch = grey(4, 8)
    for times in (0.3, 0.999):
        x = moved(batch, threat, times)
        assert torch.equal(verdict(Plane(), batch, x, threat=threat).x, x)
    for bad in (torch.nan, -0.01, 1.01):
        x = batch.x.clone()
        x[1, 0, 0, 0] = bad
        assert torch.equal(verdict(Plane(), batch, x, threat=Linf(1.0)).x, batch.x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_images_in_half_precision_are_refused(dtype: torch.dtype) -> None:
    """They round by more than a hair: every success lay outside of its ball, and a model looked robust."""
    batch = grey(2, 8)
    batch = Batch(x=batch.x.to(dtype), y=batch.y, index=batch.index)
    with pytest.raises(GeneralistError, match=f"float32 or float64, not {dtype}"):
        FGSM().run(Plane(), batch, threat=Linf(0.1), seed=0)
