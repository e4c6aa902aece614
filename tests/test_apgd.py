"""Auto-PGD against its definition, written out once more for one sample, and against its authors' own code."""

import math

import numpy as np
import pytest
import torch
from attack_targets import (
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

from generalist.attacks import losses
from generalist.attacks.apgd import APGD, SEARCHES, TargetedAPGD, checkpoints, search, starting_point
from generalist.attacks.apgd_l1 import project_to_ball_and_box, sparse_step
from generalist.attacks.ascent import Ascent
from generalist.attacks.threats import L1, L2, Linf
from generalist.core import random
from generalist.core.errors import GeneralistError

THREATS = {"linf": Linf(0.1), "l2": L2(0.6), "l1": L1(1.5)}
every_threat = pytest.mark.parametrize("threat", THREATS.values(), ids=THREATS.keys())
ATTACKS = {"ce": APGD(loss="ce", steps=15), "dlr": APGD(loss="dlr", steps=15), "t": TargetedAPGD(steps=15)}
every_attack = pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())


# The definition once more: one sample, lists and numpy, on logits W tanh(V x)


class Plain:
    def __init__(self, seed=1):
        self.v = random.normal(seed, "v", shape=(8, 16)).double()
        self.w = 3 * random.normal(seed, "w", shape=(4, 8)).double()

    def __call__(self, x):
        return torch.tanh(x @ self.v.T) @ self.w.T

    def loss_and_gradient(self, x, y):
        v, w = self.v.numpy(), self.w.numpy()
        hidden = np.tanh(v @ x)
        logits = w @ hidden
        top = logits.max()
        log_sum = top + math.log(np.exp(logits - top).sum())
        error = np.exp(logits - log_sum) - np.eye(len(w))[y]
        return log_sum - logits[y], v.T @ ((1 - hidden**2) * (w.T @ error))


def onto(threat, x, point):
    delta = point - x
    if threat.name == "linf":
        delta = np.clip(delta, -threat.eps, threat.eps)
    elif (length := math.sqrt((delta**2).sum())) > threat.eps:
        delta = delta * threat.eps / length
    return np.clip(x + delta, 0, 1)


def direction(threat, gradient):
    return np.sign(gradient) if threat.name == "linf" else gradient / math.sqrt((gradient**2).sum())


def apgd_again(model, x, y, start, threat, steps):
    """Algorithm 1 with its own letters: points x[k], losses f[k], step sizes, checkpoints w[j]."""
    points = [onto(threat, x, x + start)]
    f, gradient = model.loss_and_gradient(points[0], y)
    heights, f_max, x_max, g_max = [f], f, points[0], gradient
    eta, w, shares = 2 * threat.eps, [0], [0.0, 0.22]
    while shares[-1] <= 1:
        w.append(math.ceil(round(shares[-1] * steps, 9)))
        shares.append(shares[-1] + max(shares[-1] - shares[-2] - 0.03, 0.06))
    eta_at, f_max_at, visited, halvings = [eta], [f_max], [points[0]], []
    j = 1
    ups = 0
    for k in range(steps):
        z = onto(threat, x, points[k] + eta * direction(threat, gradient))
        if k == 0:
            following = z
        else:
            following = onto(threat, x, points[k] + 0.75 * (z - points[k]) + 0.25 * (points[k] - points[k - 1]))
        f, gradient = model.loss_and_gradient(following, y)
        visited.append(following)
        ups += f > heights[k]
        if f > f_max:
            f_max, x_max, g_max = f, following, gradient
        points.append(following)
        heights.append(f)
        if j < len(w) and k + 1 == w[j]:
            few = ups < 0.75 * (w[j] - w[j - 1])
            # the step in force before this checkpoint was that of the period before
            stuck = eta_at[j - 1] == eta_at[max(j - 2, 0)] and f_max_at[j - 1] == f_max
            if few or stuck:
                eta = eta / 2
                points[k + 1], heights[k + 1], gradient = x_max, f_max, g_max
                halvings.append(k + 1)
            eta_at.append(eta)
            f_max_at.append(f_max)
            ups = 0
            j += 1
    return visited, halvings


@pytest.mark.parametrize("threat", [Linf(0.1), Linf(0.4), L2(0.6), L2(2.0)], ids=str)
def test_the_path_is_that_of_the_definition(threat):
    model, batch = Plain(), noise(12, 16, classes=4)
    start = threat.random_start(5, "start", batch.index, 0, batch.x)
    path = []

    class Spy(Ascent):
        def _measure(self, x, labels):
            path.append(x.clone())
            return super()._measure(x, labels)

    search(Spy(model, losses.cross_entropy), batch.x, (batch.y,), start, threat=threat, steps=30)
    path = torch.stack(path)
    assert len(path) == 31
    halved = 0
    for i in range(12):
        again, halvings = apgd_again(model, batch.x[i].numpy(), int(batch.y[i]), start[i].numpy(), threat, steps=30)
        assert np.abs(path[:, i].numpy() - np.stack(again)).max() < 1e-9
        halved += len(halvings)
    assert halved > 12  # otherwise the test has not seen the logic it is for


def test_checkpoints():
    assert checkpoints(100) == [22, 41, 57, 70, 80, 87, 93, 99]
    assert checkpoints(1) == [1]
    for steps in (2, 5, 10, 37, 1000):
        ends = checkpoints(steps)
        assert ends == sorted(set(ends)) and ends[0] >= 1 and ends[-1] <= steps


# Losses


@pytest.mark.parametrize("classes", [2, 3, 4, 10])
def test_losses_by_hand(classes):
    logits = random.normal(1, "logits", torch.arange(20), shape=(classes,)).double()
    y = random.integers(classes, 1, "y", torch.arange(20))
    for i, label in enumerate(y.tolist()):
        z = logits[i].tolist()
        order = sorted(z, reverse=True)
        wrong = sorted((k for k in range(classes) if k != label), key=lambda k: -z[k])
        gap = z[wrong[0]] - z[label]
        assert losses.margin(logits, y)[i].item() == pytest.approx(gap)
        expected = gap / (order[0] - order[2]) if classes > 2 else gap
        assert losses.dlr(logits, y)[i].item() == pytest.approx(expected)
        for rank, target in enumerate(wrong, start=1):
            targets = losses.likely_wrong(logits, y, rank)
            assert targets[i].item() == target
            gap = z[target] - z[label]
            expected = gap / (order[0] - (order[2] + order[3]) / 2) if classes > 3 else gap
            assert losses.dlr_targeted(logits, y, targets)[i].item() == pytest.approx(expected)


def test_losses_of_equal_and_of_huge_logits_have_finite_gradients():
    y = torch.zeros(3, dtype=torch.int64)
    for scale in (0.0, 1e30):
        logits = (scale * torch.tensor([[1.0, 1, 1, 1, 1], [1, 0, 0, 0, 0], [0, 1, 1, 1, 1]])).requires_grad_()
        for loss in (losses.cross_entropy, losses.margin, losses.dlr):
            value = loss(logits, y)
            assert value.isfinite().all()
            assert torch.autograd.grad(value.sum(), logits)[0].isfinite().all()
        value = losses.dlr_targeted(logits, y, y + 1)
        assert value.isfinite().all() and torch.autograd.grad(value.sum(), logits)[0].isfinite().all()


# Against the authors' code


NORMS = {"linf": "Linf", "l2": "L2", "l1": "L1"}


def count_changed(delta):
    """Theirs, for l1, counts also what rounding leaves of unchanged coordinates; so one verdict in thirty differs."""
    return (delta.abs() > 1e-6).flatten(1).sum(1).float()


def oracle(monkeypatch, model, batch, threat, start, *, loss="ce", rank=None):
    """Which samples the authors' code breaks in one run from the same start."""
    base = pytest.importorskip("pyautoattack.autopgd_base", exc_type=ImportError)
    monkeypatch.setattr(base, "L0_norm", count_changed)
    settings = {"norm": NORMS[threat.name], "eps": threat.eps, "device": "cpu"}
    if rank is None:
        attack = base.APGDAttack(model, loss=loss, **settings)
    else:
        attack = base.APGDAttack_targeted(model, **settings)
        with torch.no_grad():
            attack.y_target = model(batch.x).argsort(1)[:, -1 - rank]
    attack.init_hyperparam(batch.x)
    point, right = batch.x + start, None
    # For l1 they, too, go through larger balls; the l1 start is drawn out before it is projected.
    for eps, steps in [(3, 30), (2, 30), (1, 40)] if threat.name == "l1" else [(1, 100)]:
        attack.eps, attack.n_iter = eps * threat.eps, steps
        if threat.name == "l1":
            first = point if right is not None else batch.x + start * (0.8 * batch.x[0].numel() / threat.eps)
            point = first + base.L1_projection(batch.x, first - batch.x, attack.eps)
        point, right, _, _ = attack.attack_single_run(batch.x, batch.y, x_init=point)
    return right == 0


KINDS = [{"loss": "ce"}, {"loss": "dlr"}, {"rank": 1}, {"rank": 3}]


@pytest.mark.parametrize("threat", [Linf(0.1), L2(0.4), pytest.param(L1(1.0), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=["ce", "dlr", "target-1", "target-3"])
def test_the_authors_own_code_breaks_the_same_samples(kind, threat, monkeypatch):
    model = trained()
    batch = right_ones(model, digits(200))
    attack = APGD(**kind) if "loss" in kind else TargetedAPGD()
    round = in_round(batch, kind.get("rank", 1) - 1)
    broken = attack.run_round(model, batch, round, threat=threat, seed=0).broken
    start = starting_point(attack.name, batch, round, threat=threat, seed=0)
    theirs = oracle(monkeypatch, model, batch, threat, start, **kind)
    assert 0.02 < theirs.float().mean() < 0.9  # a model on which the attacks could differ
    missed, agreement = int(theirs.sum()) - int(broken.sum()), (broken == theirs).float().mean().item()
    assert abs(missed) <= 1 and agreement >= 0.99


def test_the_verdict_is_that_of_a_fresh_forward_pass():
    model = trained()
    batch = digits(60)
    found = TargetedAPGD(steps=10, targets=2).run(model, batch, threat=Linf(0.18), seed=0)
    with torch.no_grad():
        wrong = model(batch.x).argmax(1) != batch.y
        assert torch.equal(model(found.x).argmax(1) != batch.y, found.broken)
    assert wrong.any() and found.broken[wrong].all()
    assert torch.equal(found.x[wrong], batch.x[wrong])


# A sample's result depends on the sample alone


@every_threat
@every_attack
def test_neighbours_and_order_change_nothing_at_equal_batch_size(attack, threat):
    model, batch = network(4, dtype=torch.float32), noise(8, classes=4, dtype=torch.float32)
    whole = attack.run(model, batch, threat=threat, seed=3)
    order = torch.tensor([3, 1, 7, 0, 6, 2, 5, 4])
    turned = attack.run(model, part(batch, order), threat=threat, seed=3)
    assert torch.equal(turned.x, whole.x[order]) and torch.equal(turned.broken, whole.broken[order])
    padded = attack.run(model, part(batch, torch.tensor([2, 5, 2, 2, 2, 2, 2, 2])), threat=threat, seed=3)
    assert torch.equal(padded.x[:2], whole.x[[2, 5]])


@every_threat
@every_attack
def test_batch_size_changes_nothing_in_float64(attack, threat):
    model, batch = network(4), noise(6, classes=4)
    whole = attack.run(model, batch, threat=threat, seed=3)
    for size in (1, 2, 5):
        rows = torch.arange(size)
        few = attack.run(model, part(batch, rows), threat=threat, seed=3)
        assert torch.allclose(few.x, whole.x[rows], atol=1e-9) and torch.equal(few.broken, whole.broken[rows])


@every_attack
def test_rounds_are_the_attack(attack):
    """Handing only survivors from round to round, as a suite does, gives the same verdicts."""
    model = network(4)
    batch = labelled(model, noise(10, classes=4))
    threat = Linf(0.05)
    whole = attack.run(model, batch, threat=threat, seed=0)
    broken = torch.zeros(10, dtype=torch.bool)
    for i in range(attack.rounds(4)):
        left = (~broken).nonzero().squeeze(1)
        rest = part(batch, left)
        broken[left] = attack.run_round(model, rest, in_round(rest, i), threat=threat, seed=0).broken
    assert torch.equal(broken, whole.broken)
    assert 0 < broken.sum() < 10


@every_threat
@pytest.mark.parametrize(
    "attack", [APGD(steps=2, restarts=3), TargetedAPGD(steps=3, targets=2, restarts=2)], ids=["restarts", "targets"]
)
def test_a_batch_may_hold_samples_in_different_rounds(attack, threat):
    model = network(4)
    batch = labelled(model, noise(6))
    count = attack.rounds(4)
    each = [attack.run_round(model, batch, in_round(batch, i), threat=threat, seed=1) for i in range(count)]
    assert not torch.equal(each[0].x, each[-1].x)
    rows = torch.tensor([0, 0, 4, 1, 5, 3])
    round = torch.tensor([0, count - 1, 1, 2, 0, 1])
    mixed = attack.run_round(model, part(batch, rows), round, threat=threat, seed=1)
    for i, (row, number) in enumerate(zip(rows.tolist(), round.tolist(), strict=True)):
        assert torch.allclose(mixed.x[i], each[number].x[row], atol=1e-9)
        assert mixed.broken[i] == each[number].broken[row]


class Random(nn.Module):
    """Logits with noise of its own on top, as a randomised defence has it."""

    def __init__(self, model):
        super().__init__()
        self.model, self.passes = model, 0

    def forward(self, x):
        self.passes += 1
        return self.model(x + 0.3 * random.normal(self.passes, "noise", shape=x.shape).to(x))


def test_draws_average_gradients_losses_and_margins():
    batch = noise(5, classes=4)
    single, several = (Ascent(Random(network(4)), losses.dlr, draws=n) for n in (1, 3))
    passes = [single.begin(batch.x, (batch.y,)).here for _ in range(3)]
    assert not torch.equal(passes[0].gradient, passes[1].gradient)
    mean = several.begin(batch.x, (batch.y,)).here
    assert torch.allclose(mean.gradient, sum(one.gradient for one in passes) / 3)
    assert torch.allclose(mean.loss, sum(one.loss for one in passes) / 3)
    model = Random(network(4))
    APGD(steps=2, draws=5).run_round(model, batch, in_round(batch, 0), threat=Linf(0.1), seed=0)
    assert model.passes == 3 * 5 + 1  # the start and two steps, and the verdict


def test_seeds_restarts_and_targets_start_apart():
    model, batch, threat = network(4), noise(3, classes=4), Linf(0.1)
    starts = [
        starting_point(name, batch, in_round(batch, round), threat=threat, seed=seed)
        for name, round, seed in [("apgd-t", 0, 0), ("apgd-t", 1, 0), ("apgd-t", 0, 1), ("apgd-ce", 0, 0)]
    ]
    assert all(not torch.equal(a, b) for i, a in enumerate(starts) for b in starts[:i])
    assert all(torch.allclose(threat.norm(start), torch.tensor(0.1).double()) for start in starts)
    assert APGD(loss="dlr", restarts=3).rounds(10) == 3 and APGD(loss="dlr").name == "apgd-dlr"
    assert [TargetedAPGD(restarts=2).rounds(classes) for classes in (2, 3, 4, 10, 1000)] == [2, 4, 6, 18, 18]
    assert model.training is False


# Few classes, low precision, models without gradient


@pytest.mark.parametrize("classes", [2, 3, 4])
@every_threat
@every_attack
def test_few_classes(attack, threat, classes):
    model = network(classes)
    batch = labelled(model, noise(10))
    found = attack.run(model, batch, threat=threat, seed=0)
    assert is_allowed(found, batch, threat) and found.broken.any()


class Halved(nn.Module):
    """A model that computes in half the precision, or with autocast's mixture."""

    def __init__(self, model, dtype):
        super().__init__()
        self.model, self.dtype = model.to(dtype), dtype

    def forward(self, x):
        return self.model(x.to(self.dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_attack
def test_low_precision(attack, dtype):
    model = Halved(network(4), dtype).train()
    batch = noise(8, classes=4, dtype=torch.float32)
    found = attack.run(model, batch, threat=Linf(0.1), seed=0)
    assert found.x.dtype == torch.float32 and is_allowed(found, batch, Linf(0.1))
    assert model.training and all(parameter.requires_grad for parameter in model.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())


@every_threat
@every_attack
def test_no_gradient_gives_no_nan(attack, threat):
    check_flat_model(attack, threat)


class Spoiled(nn.Module):
    """Logits of nan wherever an image's first pixel is above one half."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        bad = (x.flatten(1)[:, :1] > 0.5).to(x.dtype)
        return self.model(x) + torch.where(bad > 0, torch.nan, 0)


@every_threat
def test_points_without_an_answer_are_not_taken(threat):
    batch = noise(20)
    x = batch.x.clone()
    x[:, 0, 0, 0] = 0.45
    model = Spoiled(network())
    batch = labelled(model, type(batch)(x=x, y=batch.y, index=batch.index))
    ascent = Ascent(model, losses.cross_entropy)
    start = torch.zeros_like(x)
    start[:10, 0, 0, 0] = 0.08  # half of the paths begin where there is none
    assert ascent.begin(x + start, (batch.y,)).here.loss.isneginf().sum() == 10
    found = SEARCHES[threat.name](ascent, x, (batch.y,), start, threat=threat, steps=20)
    with torch.no_grad():
        answered = ~model(found).isnan().any(1)
    assert answered[10:].all() and found.isfinite().all()


# The parts of l1


def test_projection_onto_ball_and_box_is_the_nearest_point():
    """Its conditions: one theta for all coordinates between their bounds, and it is 0 unless the norm is eps."""
    x = random.uniform(3, "x", torch.arange(50), shape=(30,)).double()
    delta = 2 * random.normal(3, "delta", torch.arange(50), shape=(30,)).double()
    x[0], delta[0] = 1.0, 3.0  # nowhere to go
    for eps in (0.01, 1.0, 5.0, 100.0):
        result = project_to_ball_and_box(x, delta, eps)
        assert ((x + result >= -1e-12) & (x + result <= 1 + 1e-12)).all()
        assert (result.abs().sum(1) <= eps + 1e-9).all()
        assert (result * delta >= 0).all()
        room = torch.where(delta > 0, 1 - x, x)
        for i in range(50):
            size, sought = result[i].abs(), delta[i].abs()
            free = (size > 1e-12) & (size < room[i] - 1e-12)
            short = sought - size
            theta = short[free].max() if free.any() else None
            if size.sum() < eps - 1e-9:
                assert torch.allclose(size, torch.minimum(sought, room[i]))
            elif theta is not None:
                assert torch.allclose(short[free], theta.expand(int(free.sum())), atol=1e-9)
                assert (sought[size <= 1e-12] <= theta + 1e-9).all() or (room[i] == 0).any()
                assert (short[size >= room[i] - 1e-12] >= theta - 1e-9).all() or (room[i] == 0).any()


def test_sparse_steps():
    gradient = torch.tensor([[[3.0, -2.0, 1.0, 0.0, -0.5]]]).expand(3, 1, 5)
    steps = sparse_step(gradient, torch.tensor([0.0, 0.4, 1.0]))
    assert torch.allclose(
        steps[:, 0], torch.tensor([[1, 0, 0, 0, 0], [0.5, -0.5, 0, 0, 0], [0.25, -0.25, 0.25, 0, -0.25]])
    )
    assert (sparse_step(torch.zeros(2, 5), torch.ones(2)) == 0).all()


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"restarts": -1}, {"steps": 1.5}, {"loss": "kl"}, {"draws": 0}])
def test_settings_that_make_no_sense(wrong):
    with pytest.raises(GeneralistError, match="apgd"):
        APGD(**wrong)
