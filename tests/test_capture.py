"""Recorded steps: attacks find the same with a recorder as without one, batch after batch, whatever was recorded first.

On a GPU the steps are CUDA graphs; on the CPU they run on the recording's own tensors, which shows every tensor that is
kept beyond the next step or closed over instead of given.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from attack_targets import labelled, network, noise
from torch import Tensor, nn

from generalist.attacks.apgd import APGD, TargetedAPGD
from generalist.attacks.base import Attack
from generalist.attacks.cw import CW
from generalist.attacks.fab import FAB
from generalist.attacks.mim import MIM
from generalist.attacks.pgd_attack import PGD
from generalist.attacks.square import Square
from generalist.attacks.threats import L1, L2, Linf, Threat
from generalist.data.sets import Batch
from generalist.tensors.capture import Recorder, recorded

ATTACKS: dict[str, Attack] = {
    "apgd-ce": APGD(steps=25),
    "apgd-dlr": APGD(loss="dlr", steps=25, restarts=2),
    "apgd-t": TargetedAPGD(steps=25, targets=3),
    "fab": FAB(iterations=10),
    "fab-t": FAB(iterations=10, targets=3, restarts=2),
    "square": Square(queries=90, restarts=2),
    "pgd": PGD(steps=7, restarts=2),
    "mim": MIM(steps=7),
    "cw": CW(steps=7),
}
THREATS: dict[str, Threat] = {"linf": Linf(0.08), "l2": L2(0.4), "l1": L1(1.0)}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Recording:
    """A network whose callers' steps are recorded."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model.requires_grad_(False)
        self.recorder = Recorder(next(model.parameters()).device)

    def __call__(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x)
        return logits


def batches(model: nn.Module, device: str) -> list[Batch]:
    """Three of one size, and a smaller one in between."""
    whole = labelled(model, noise(33))
    parts = [slice(0, 10), slice(10, 20), slice(20, 23), slice(23, 33)]
    return [
        Batch(x=whole.x[part].to(device), y=whole.y[part].to(device), index=whole.index[part].to(device))
        for part in parts
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("threat", THREATS.values(), ids=THREATS.keys())
@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
def test_attacks_find_the_same(attack: Attack, threat: Threat, device: str) -> None:
    model = network(4).to(device)
    recording = Recording(model)
    broken = 0
    for batch in batches(network(4), device):
        round = torch.arange(len(batch.y), device=device) % attack.rounds(4)
        plain = attack.run_round(model, batch, round, threat=threat, seed=1)
        replayed = attack.run_round(recording, batch, round, threat=threat, seed=1)
        torch.testing.assert_close(replayed.x, plain.x, rtol=1e-9, atol=1e-9)
        assert torch.equal(replayed.broken, plain.broken)
        broken += int(plain.broken.sum())
    assert 0 < broken < 33  # otherwise there is little to agree on
    assert recording.recorder._recordings


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


def swapped(state: Pair, given: tuple[Tensor, ...]) -> Pair:
    """Each to the other's place, one of them with something added."""
    return Pair(state.second, state.first + given[0])


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_may_change_places_and_all_that_is_given_counts(device: str) -> None:
    holder: Any = type("Holder", (), {"recorder": Recorder(torch.device(device))})()
    step = recorded(holder, "swap", swapped)
    for start, added in ((1.0, 10.0), (2.0, 20.0)):
        plain = state = Pair(torch.full((3,), start, device=device), torch.full((3,), -start, device=device))
        given = (torch.full((3,), added, device=device),)
        for _ in range(5):
            plain, state = swapped(plain, given), step(state, given)
            assert torch.equal(plain.first, state.first) and torch.equal(plain.second, state.second)


def in_place(state: Pair, given: tuple[Tensor, ...]) -> Pair:
    """The first is changed where it is; the second is made of what it was before and of what it is now."""
    before = state.first.clone()
    state.first.add_(given[0])
    return Pair(state.first, state.second + before * state.first)


@pytest.mark.parametrize("device", DEVICES)
def test_a_tensor_may_be_changed_in_place(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The warm-up of a recording changes it, too, and that is undone. Only what is new is copied."""
    holder: Any = type("Holder", (), {"recorder": Recorder(torch.device(device))})()
    step = recorded(holder, "in place", in_place)
    for start, added in ((1.0, 10.0), (2.0, 20.0)):
        plain, state = (
            Pair(torch.full((3,), start, device=device), torch.full((3,), -start, device=device)) for _ in range(2)
        )
        given = (torch.full((3,), added, device=device),)
        for i in range(5):
            plain, last = in_place(plain, given), state
            state = step(state, given)
            assert torch.equal(plain.first, state.first) and torch.equal(plain.second, state.second)
            assert i == 0 or state.first is last.first
    copied: list[Tensor] = []
    copy = Tensor.copy_
    monkeypatch.setattr(Tensor, "copy_", lambda own, other: (copied.append(own), copy(own, other))[1])
    (recording,) = holder.recorder._recordings.values()
    recording._once()
    assert [tensor is recording._own[1] for tensor in copied] == [True]


def test_without_a_recorder_the_step_is_itself() -> None:
    assert recorded(nn.Linear(2, 2), "key", swapped) is swapped
