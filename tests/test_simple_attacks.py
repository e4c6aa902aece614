"""FGSM, MIM, PGD and the two attacks called CW: against definitions, against foolbox, and what holds for all."""

import math

import pytest
import torch
from attack_targets import (
    Flat,
    check_flat_model,
    digits,
    in_round,
    is_allowed,
    labelled,
    network,
    noise,
    part,
    right_ones,
    trained,
)
from torch import nn

from generalist.attacks.accuracy import logits_of
from generalist.attacks.cw import CW, CWL2
from generalist.attacks.fgsm import FGSM
from generalist.attacks.mim import MIM
from generalist.attacks.pgd import AttackOptions, pgd, starting_point
from generalist.attacks.pgd_attack import PGD
from generalist.attacks.threats import L1, L2, Linf
from generalist.core.errors import GeneralistError

THREATS = {"linf": Linf(0.1), "l2": L2(0.6), "l1": L1(1.5)}
every_threat = pytest.mark.parametrize("threat", THREATS.values(), ids=THREATS.keys())
ATTACKS = {attack.name: attack for attack in (FGSM(), MIM(steps=7), CW(steps=7), PGD(steps=7, restarts=2))}
every_attack = pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
SMALL_CW = CWL2(steps=60, searches=5, lr=0.05, weight=0.1)


# What holds for all


@every_threat
@every_attack
def test_results_are_allowed_and_verdicts_fresh(attack, threat):
    model, batch = network().train(), noise(12)
    found = attack.run(model, batch, threat=threat, seed=0)
    assert is_allowed(found, batch, threat)
    assert model.training and all(parameter.requires_grad for parameter in model.parameters())
    with torch.no_grad():
        model.eval()
        wrong = model(batch.x).argmax(1) != batch.y
        assert torch.equal(model(found.x).argmax(1) != batch.y, found.broken)
    assert wrong.any() and torch.equal(found.x[wrong], batch.x[wrong])


@every_threat
@every_attack
def test_neighbours_change_nothing(attack, threat):
    model, batch = network(dtype=torch.float32), noise(6, dtype=torch.float32)
    whole = attack.run(model, batch, threat=threat, seed=0)
    order = torch.tensor([4, 2, 0, 5, 1, 3])
    turned = attack.run(model, part(batch, order), threat=threat, seed=0)
    assert torch.equal(turned.x, whole.x[order]) and torch.equal(turned.broken, whole.broken[order])


@pytest.mark.parametrize("classes", [2, 3])
@every_attack
def test_batch_size_and_few_classes(attack, classes):
    model = network(classes)
    batch = labelled(model, noise(8))
    whole = attack.run(model, batch, threat=Linf(0.2), seed=0)
    assert whole.broken.any()
    for size in (1, 3):
        few = attack.run(model, part(batch, torch.arange(size)), threat=Linf(0.2), seed=0)
        assert torch.allclose(few.x, whole.x[:size], atol=1e-9)


@every_threat
@every_attack
def test_no_gradient_gives_no_nan(attack, threat):
    check_flat_model(attack, threat)


# Each against its definition


def loss_gradient(model, x, y):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(nn.functional.cross_entropy(model(x), y, reduction="sum"), x)[0]


def test_fgsm_is_one_step_of_the_sign():
    model = network()
    batch = labelled(model, noise(6))
    found = FGSM().run(model, batch, threat=Linf(0.1), seed=0)
    expected = (batch.x + 0.1 * loss_gradient(model, batch.x, batch.y).sign()).clamp(0, 1)
    assert torch.allclose(found.x, expected, atol=1e-12)


def test_mim_by_hand():
    model, threat = network(), L2(0.6)
    batch = labelled(model, noise(6))
    start = starting_point(threat, "uniform", seed=4, purpose="mim/l2:0.6", index=batch.index, step=0, like=batch.x)
    found = MIM(steps=5, decay=0.5).run(model, batch, threat=threat, seed=4)
    for i in range(6):
        x, y = batch.x[i : i + 1], batch.y[i : i + 1]
        point, gathered = (x + start[i : i + 1]).clamp(0, 1), 0
        for _ in range(5):
            gradient = loss_gradient(model, point, y)
            gathered = 0.5 * gathered + gradient / gradient.abs().sum()
            delta = point + 0.15 * gathered / gathered.square().sum().sqrt() - x
            delta = delta * min(1.0, 0.6 / delta.square().sum().sqrt().item())
            point = (x + delta).clamp(0, 1)
        assert torch.allclose(found.x[i], point[0], atol=1e-9)


def test_mim_without_memory_is_pgd():
    model, threat = network(), Linf(0.1)
    batch = labelled(model, noise(6))
    found = MIM(steps=6, decay=0.0).run(model, batch, threat=threat, seed=4)
    settings = {"options": AttackOptions(steps=6), "seed": 4, "purpose": f"mim/{threat}", "index": batch.index}
    assert torch.allclose(found.x, pgd(model, batch.x, batch.y, threat=threat, **settings), atol=1e-12)


def test_pgd_gives_the_verdicts_of_accuracy_under_pgd():
    model, batch = network(), noise(30)
    x = pgd(
        model,
        batch.x,
        batch.y,
        threat=Linf(0.05),
        options=AttackOptions(steps=20),
        seed=2,
        purpose="pgd/linf:0.05",
        index=batch.index,
    )
    right = (logits_of(model, batch.x).argmax(1) == batch.y) & (logits_of(model, x).argmax(1) == batch.y)
    found = PGD(steps=20).run(model, batch, threat=Linf(0.05), seed=2)
    assert torch.equal(found.broken, ~right) and right.any()


def test_restarts_only_help():
    model = trained()
    batch = right_ones(model, digits(100))
    one, many = (PGD(steps=5, restarts=n).run(model, batch, threat=Linf(0.15), seed=0).broken for n in (1, 4))
    assert bool((many | ~one).all()) and many.sum() > one.sum()
    assert PGD(restarts=3).rounds(10) == 3 and CW().rounds(10) == 1
    three = PGD(steps=5, restarts=3)
    round = torch.arange(len(batch.y)) % 3
    mixed = three.run_round(model, batch, round, threat=Linf(0.15), seed=0).x
    for i in range(3):
        alone = three.run_round(model, batch, in_round(batch, i), threat=Linf(0.15), seed=0).x
        assert torch.equal(mixed[round == i], alone[round == i])


def test_cw_climbs_the_margin():
    """On a linear model the margin's gradient is the same everywhere, so the best corner is reached."""
    w = torch.tensor([[1.0, -2.0, 0.5], [0.0, 1.0, 0.0]], dtype=torch.float64)
    batch = labelled(lambda x: x @ w.T, noise(5, 3))
    found = CW(steps=10).run(lambda x: x @ w.T, batch, threat=Linf(0.01), seed=0)
    away = torch.stack([(w[1 - y] - w[y]).sign() for y in batch.y])
    assert torch.allclose(found.x, (batch.x + 0.01 * away).clamp(0, 1), atol=1e-12)


# Carlini and Wagner's own


def test_cw_l2_finds_the_distance_to_a_plane():
    w = torch.tensor([[1.0, -2.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)

    def model(x):
        return 4 * x @ w.T - torch.tensor([2.5, 0.0], dtype=x.dtype)

    x = 0.5 + 0.1 * noise(6, 4).x
    batch = labelled(model, type(noise(1))(x=x, y=torch.zeros(6, dtype=torch.int64), index=torch.arange(6)))
    distance = (4 * x @ w[0] - 2.5).abs() / 12
    nearest, found = CWL2(steps=300, searches=8, weight=0.1).nearest(model, batch.x, batch.y)
    assert found.all()
    reached = (nearest - x).square().sum(1).sqrt()
    assert (reached >= distance - 1e-12).all() and (reached <= 1.05 * distance + 2e-3).all()
    eps = distance.median().item() * 1.2
    result = CWL2(steps=300, searches=8, weight=0.1).run(model, batch, threat=L2(eps), seed=0)
    assert torch.equal(result.broken, reached <= eps) and 0 < result.broken.sum() < 6


def test_cw_l2_on_a_network():
    model = network()
    batch = labelled(model, noise(8))
    found = SMALL_CW.run(model, batch, threat=L2(0.4), seed=0)
    assert is_allowed(found, batch, L2(0.4)) and found.broken.any()
    flat = labelled(Flat(), noise(3))
    none = SMALL_CW.run(Flat(), flat, threat=L2(0.4), seed=0)
    assert not none.broken.any() and torch.equal(none.x, flat.x)
    with pytest.raises(GeneralistError, match="use cw"):
        SMALL_CW.run(model, batch, threat=Linf(0.1), seed=0)


# Against foolbox


def as_foolbox(model):
    foolbox = pytest.importorskip("foolbox", exc_type=ImportError)
    return foolbox, foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu")


@pytest.mark.parametrize("threat", [Linf(0.05), L2(0.3)], ids=str)
def test_fgsm_against_foolbox(threat):
    model = trained()
    batch = right_ones(model, digits(200))
    foolbox, wrapped = as_foolbox(model)
    theirs = {"linf": foolbox.attacks.LinfFastGradientAttack, "l2": foolbox.attacks.L2FastGradientAttack}
    _, x, broken = theirs[threat.name](random_start=False)(wrapped, batch.x, batch.y, epsilons=threat.eps)
    found = FGSM().run(model, batch, threat=threat, seed=0)
    assert torch.allclose(found.x, x, atol=1e-5)
    assert (found.broken == broken).float().mean() >= 0.99 and broken.any() and not broken.all()


@pytest.mark.parametrize("threat", [Linf(0.1), L2(0.4)], ids=str)
def test_pgd_against_foolbox(threat):
    model = trained()
    batch = right_ones(model, digits(200))
    foolbox, wrapped = as_foolbox(model)
    theirs = {"linf": foolbox.attacks.LinfPGD, "l2": foolbox.attacks.L2PGD}[threat.name]
    attack = theirs(abs_stepsize=threat.eps / 4, steps=20, random_start=False)
    _, _, broken = attack(wrapped, batch.x, batch.y, epsilons=threat.eps)
    options = AttackOptions(steps=20, start="none")
    ours = pgd(model, batch.x, batch.y, threat=threat, options=options, seed=0, purpose="", index=batch.index)
    with torch.no_grad():
        assert ((model(ours).argmax(1) != batch.y) == broken).float().mean() >= 0.99
    found = PGD(steps=20).run(model, batch, threat=threat, seed=0)  # from a random start, which theirs has not
    assert abs(found.broken.float().mean() - broken.float().mean()) < 0.02
    assert math.isclose(0.5, broken.float().mean(), abs_tol=0.45)


@pytest.mark.parametrize(
    "make",
    [
        lambda: PGD(steps=0),
        lambda: PGD(step=0.0),
        lambda: MIM(decay=math.nan),
        lambda: MIM(steps=True),
        lambda: CW(steps=-1),
        lambda: CWL2(lr=0.0),
        lambda: CWL2(confidence=-1.0),
        lambda: CWL2(searches=0),
    ],
)
def test_settings_that_make_no_sense(make):
    with pytest.raises(GeneralistError, match="must be"):
        make()


def test_a_model_of_one_output_is_refused():
    batch = noise(2)
    with pytest.raises(GeneralistError, match="2 classes"):
        PGD().run(lambda x: x.flatten(1).sum(1, keepdim=True), batch, threat=Linf(0.1), seed=0)
