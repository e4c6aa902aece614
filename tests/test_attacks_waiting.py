"""No attack waits for the device within its loop: only at the end, for the verdict (Square: also between stages)."""

from __future__ import annotations

import pytest
import torch
from attack_targets import labelled, network, noise
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from generalist.attacks.apgd import APGD, TargetedAPGD
from generalist.attacks.base import Attack
from generalist.attacks.cw import CW, CWL2
from generalist.attacks.fab import FAB
from generalist.attacks.fgsm import FGSM
from generalist.attacks.mim import MIM
from generalist.attacks.pgd_attack import PGD
from generalist.attacks.square import Square
from generalist.attacks.threats import L1, L2, Linf

WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero", "unique_dim", "_unique2"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
THREATS = {"linf": Linf(0.05), "l2": L2(0.2), "l1": L1(0.4)}
every_threat = pytest.mark.parametrize("threat", THREATS.values(), ids=THREATS.keys())


class Waits(TorchDispatchMode):
    """Counts operations whose result the host, or a shape, depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        masked = name in INDEXING and any(is_mask(index) for index in args[1] if index is not None)
        self.count += name in WAITING or masked
        return func(*args, **(kwargs or {}))


def is_mask(index: Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


def waits(attack: Attack, threat) -> int:
    model = network(4, dtype=torch.float32)
    batch = labelled(model, noise(6, dtype=torch.float32))
    round = torch.arange(6) % attack.rounds(4)
    with Waits() as mode:
        attack.run_round(model, batch, round, threat=threat, seed=0)
    return mode.count


BY_STEPS = {
    "apgd-ce": lambda n: APGD(steps=n, restarts=2),
    "apgd-dlr": lambda n: APGD(loss="dlr", steps=n, draws=2),
    "apgd-t": lambda n: TargetedAPGD(steps=n, restarts=2),
    "fab": lambda n: FAB(iterations=n, restarts=2),
    "fab-t": lambda n: FAB(iterations=n, targets=3, restarts=2),
    "pgd": lambda n: PGD(steps=n, restarts=3),
    "mim": lambda n: MIM(steps=n),
    "cw": lambda n: CW(steps=n),
}


@every_threat
@pytest.mark.parametrize("make", BY_STEPS.values(), ids=BY_STEPS.keys())
def test_a_loop_never_waits(make, threat) -> None:
    assert waits(make(2), threat) == waits(make(9), threat) == 1  # that of the verdict


def test_attacks_of_one_norm_or_of_one_step() -> None:
    assert waits(FGSM(), Linf(0.05)) == 1
    assert waits(CWL2(steps=3, searches=2), L2(0.2)) == waits(CWL2(steps=6, searches=4), L2(0.2)) == 1


@every_threat
def test_square_waits_between_stages_only(threat) -> None:
    tiny = type(threat)(1e-4)  # nothing is broken, so every stage runs
    for queries in (40, 400):
        assert waits(Square(queries=queries), tiny) == len(Square(queries=queries).stages()) + 1


def test_waiting_is_noticed() -> None:
    x = torch.arange(4.0)
    with Waits() as mode:
        bool(x.sum() > 1)
        x[x > 1]
        x.nonzero()
        x[x > 1] = 0
        x[torch.tensor([0, 1])]
    assert mode.count == 4
