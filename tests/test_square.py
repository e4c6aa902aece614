"""Square: its schedule, windows and budgets as the paper has them, its count of queries, and another's Square."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from attack_targets import digits_network, in_round, part, right_digits
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from generalist.attacks import square
from generalist.attacks.painters import PAINTERS, Draws, Painter, opposite_pyramids, pyramid
from generalist.attacks.square import Square
from generalist.attacks.threats import L1, L2, Linf, Threat
from generalist.core import random
from generalist.core.errors import DataError, GeneralistError
from generalist.data.sets import Batch

THREATS: dict[str, Threat] = {"linf": Linf(0.15), "l2": L2(0.6), "l1": L1(2.5)}
every_norm = pytest.mark.parametrize("norm", THREATS)
SHAPES = [(1, 8, 8), (3, 5, 7), (2, 1, 9), (1, 3, 2)]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


@pytest.fixture(scope="module")
def network() -> nn.Module:
    return digits_network()


def images(count: int, *shape: int) -> Tensor:
    return random.uniform(5, "images", torch.arange(count), shape=shape)


def batch_of(x: Tensor, y: Tensor | None = None) -> Batch:
    return Batch(x, torch.zeros(len(x)).long() if y is None else y, torch.arange(len(x)) + 70)


def draws(count: int) -> Draws:
    return Draws(0, "test", torch.arange(count), torch.zeros(count).long())


def windows(painter: Painter, count: int, queries: range, what: str) -> Tensor:
    """The windows that these queries draw, as masks [Q,B,1,H,W]."""
    top, left = painter.corners(draws(count), queries, what)
    rows, columns = painter.inside(top, painter.height), painter.inside(left, painter.width)
    return (rows[..., :, None] & columns[..., None, :])[:, :, None]


def planned(painter: Painter, count: int, query: int) -> list[Tensor]:
    """What is planned for one query alone."""
    return [part[0] for part in painter.plan(draws(count), range(query, query + 1))]


def proposed(painter: Painter, best: Tensor, query: int) -> Tensor:
    return painter.proposal(best, painter.given, planned(painter, len(best), query))


# The schedule


def test_windows_shrink_as_the_paper_says() -> None:
    attack = Square(queries=10_000)
    expected = {0: 1, 10: 1, 11: 2, 50: 2, 51: 4, 200: 4, 201: 8, 500: 8, 501: 16, 1001: 32, 2001: 64, 4001: 128}
    expected |= {6000: 128, 6001: 256, 8000: 256, 8001: 512, 9999: 512}
    assert {query: 0.8 / attack.share(query) for query in expected} == expected
    # Half the queries: the first half of the schedule, as in AutoAttack, or the same schedule in half the time.
    half, fast = Square(queries=5000), Square(queries=5000, rescaled=True)
    assert all(half.share(i) == attack.share(i) and fast.share(i) == attack.share(2 * i) for i in range(0, 5000, 7))


@pytest.mark.parametrize("rescaled", [True, False])
@pytest.mark.parametrize("queries", [40, 1000, 5000, 20_000])
def test_the_schedule_is_pyautoattacks(queries: int, rescaled: bool) -> None:
    theirs = pytest.importorskip("pyautoattack.square")
    oracle = theirs.SquareAttack(nn.Identity(), p_init=0.8, n_queries=queries, resc_schedule=rescaled, device="cpu")
    attack = Square(queries=queries, rescaled=rescaled)
    assert all(attack.share(i) == pytest.approx(oracle.p_selection(i)) for i in range(0, queries, 3))


@pytest.mark.parametrize("queries", [1, 2, 3, 40, 5000])
def test_stages_are_all_queries_but_the_start_in_order(queries: int) -> None:
    attack = Square(queries=queries)
    stages = attack.stages()
    assert [i for _, stage in stages for i in stage] == list(range(1, queries))
    assert all(attack.share(i) == share for share, stage in stages for i in stage)
    assert len(stages) <= 10


# Windows and budgets


@every_shape
@every_norm
def test_windows_are_squares_inside_the_image_that_reach_everywhere(norm: str, shape: tuple[int, ...]) -> None:
    painter = PAINTERS.get(norm)(torch.full((64, *shape), 0.5), 0.1)
    for share in (0.8, 0.2, 0.01):
        painter.resize(share)
        assert 1 <= painter.side <= min(shape[1:])
        masks = windows(painter, 64, range(1, 25), "window")
        assert masks.shape == (24, 64, 1, *shape[1:])
        assert (masks.sum((2, 3, 4)) == painter.side**2).all()
        assert (masks.any(4).sum((2, 3)) == painter.side).all()
        assert masks.any(0).any(0).all()


@every_norm
def test_a_query_is_the_same_however_many_are_drawn_at_once(norm: str) -> None:
    x = images(8, 3, 5, 7)
    painter = PAINTERS.get(norm)(x, 0.3)
    painter.resize(0.3)
    start = painter.start(draws(8))
    plan = painter.plan(draws(8), range(3, 9))
    for i, query in enumerate(range(3, 9)):
        assert torch.equal(
            painter.proposal(start, painter.given, [part[i] for part in plan]), proposed(painter, start, query)
        )
    assert painter.chunk() >= 1


def test_sides_follow_the_share() -> None:
    linf, l2 = (PAINTERS.get(norm)(torch.zeros(1, 3, 32, 32), 0.1) for norm in ("linf", "l2"))
    for share in (0.8, 0.05, 0.8 / 512):
        linf.resize(share)
        l2.resize(share)
        assert linf.side == max(round(math.sqrt(share * 32 * 32)), 1)
        assert l2.side % 2 == 1 and l2.side >= 3 and 0 <= l2.side - linf.side <= 2


@every_shape
@every_norm
def test_every_query_is_inside_ball_and_box(norm: str, shape: tuple[int, ...]) -> None:
    threat, x = THREATS[norm], images(16, *shape)
    x[0], x[1] = 0, 1
    painter = PAINTERS.get(norm)(x, threat.eps)
    best = painter.start(draws(16))
    for query in range(1, 40):
        painter.resize(0.8 / query)
        assert best.isfinite().all() and float(best.min()) >= 0 and float(best.max()) <= 1
        assert float(threat.norm(best - x).max()) <= threat.eps * (1 + 1e-5)
        best = proposed(painter, best, query)
    assert not torch.equal(best, x)


def test_linf_starts_with_stripes_and_repaints_one_sign_a_channel() -> None:
    x = torch.full((8, 3, 5, 7), 0.5)
    painter = PAINTERS.get("linf")(x, 0.1)
    start = painter.start(draws(8))
    assert torch.equal(start, start[:, :, :1].expand_as(start))
    assert torch.allclose((start - x).abs(), torch.tensor(0.1))
    painter.resize(0.4)
    after = proposed(painter, start, 3)
    mask = windows(painter, 8, range(3, 4), "window")[0]
    assert torch.equal(after[~mask.expand_as(x)], start[~mask.expand_as(x)])
    inside = torch.where(mask, after - x, torch.nan)
    assert torch.equal(inside.nan_to_num(-9).amax((2, 3)), inside.nan_to_num(9).amin((2, 3)))
    assert not torch.equal(after, start)


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 5, 7), (2, 1, 9)], ids=str)
def test_a_repainted_window_spends_the_budget_exactly(shape: tuple[int, ...]) -> None:
    """Far from the walls nothing is clipped, so a start and all that follows have norm eps."""
    threat = L2(0.2)
    x = torch.full((12, *shape), 0.5).double()
    painter = PAINTERS.get("l2")(x, threat.eps)
    delta = painter.start(draws(12)) - x
    full = torch.full((12,), threat.eps).double()
    assert torch.allclose(threat.norm(delta), full)
    for query in range(1, 30):
        painter.resize(0.8 / query)
        new = painter.repainted(delta, planned(painter, 12, query))
        assert torch.allclose(threat.norm(new), full)
        first, second = (windows(painter, 12, range(query, query + 1), what)[0] for what in ("window", "erased"))
        assert torch.equal(new * ~(first | second), delta * ~(first | second))
        assert not (new * (second & ~first)).any()
        delta = new
    # What a clipped perturbation lost is spent again.
    assert torch.allclose(threat.norm(painter.repainted(delta / 3, planned(painter, 12, 50))), full)


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 5, 7), (2, 1, 9)], ids=str)
def test_in_l1_a_window_gets_its_share_times_the_channels_and_the_whole_is_projected(shape: tuple[int, ...]) -> None:
    """Far from the walls: what both windows held and the channel's part of what was not used, times the channels."""
    eps, channels = 0.2, shape[0]
    x = torch.full((12, *shape), 0.5).double()
    painter = PAINTERS.get("l1")(x, eps)
    best = painter.start(draws(12))
    for query in range(1, 30):
        painter.resize(0.8 / query)
        plan, delta = planned(painter, 12, query), 0.9 * (best - x)  # a tenth of eps is not used
        new = painter.repainted(delta, plan)
        first, second = (windows(painter, 12, range(query, query + 1), what)[0] for what in ("window", "erased"))
        held = (delta.abs() * (first | second)).sum((2, 3))
        unused = (eps - delta.abs().sum((1, 2, 3))).clamp_min(0)[:, None]
        assert torch.allclose((new.abs() * first).sum((2, 3)), channels * held + unused)
        assert torch.equal(new * ~(first | second), delta * ~(first | second))
        assert not (new * (second & ~first)).any()
        best = painter.proposal(x + delta, painter.given, plan)
        over = new.abs().sum((1, 2, 3)) > 1.001 * eps
        assert torch.allclose(L1(eps).project(new), best - x) and bool(over.any()) is (channels > 1)
    assert channels == 1 or float(((best - x) == 0).double().mean()) > 0.2  # sparse


def test_pyramids_are_the_papers_sums() -> None:
    for height, width in ((7, 3), (7, 4), (5, 5), (3, 1), (1, 1)):
        bump, n = pyramid(height, width), height // 2
        for r in range(1, height + 1):
            for s in range(1, width + 1):
                depth = n - max(abs(r - height // 2 - 1), abs(s - width // 2 - 1))
                for decay, found in ((2, bump), (4, pyramid(height, width, decay=4))):
                    wanted = sum(1 / (n + 1 - k) ** decay for k in range(depth + 1))
                    assert float(found[r - 1, s - 1]) == pytest.approx(wanted)
    pair = opposite_pyramids(7)
    assert (pair[:, :3] > 0).all() and (pair[:, 3:] < 0).all()
    assert float(pair[:, :3].norm()) == pytest.approx(1) and float(pair[:, 3:].norm()) == pytest.approx(1)


# Queries


class Counted:
    """Always sure of class 0, but wrong about sample i from its `wrong_at[i]`-th call on (the natural image is 0)."""

    def __init__(self, *wrong_at: int) -> None:
        self.wrong_at, self.calls = torch.tensor(wrong_at), 0

    def __call__(self, x: Tensor) -> Tensor:
        wrong = self.wrong_at <= self.calls
        self.calls += 1
        return torch.stack([~wrong, wrong], 1).float()


@every_norm
def test_queries_are_counted_exactly(norm: str) -> None:
    model = Counted(0, 1, 2, 17, 29, 30, 99)
    x = images(7, 1, 4, 4)
    found = Square(queries=30).run_round(model, batch_of(x), torch.zeros(7).long(), threat=THREATS[norm], seed=0)
    assert found.queries.tolist() == [0, 1, 2, 17, 29, 30, 30]
    assert model.calls == 30 + 2  # one for the natural images, one for the verdict


def test_a_batch_with_nothing_left_stops() -> None:
    model = Counted(1, 2)
    batch = batch_of(images(2, 1, 4, 4))
    found = Square(queries=500).run_round(model, batch, in_round(batch, 0), threat=Linf(0.1), seed=0)
    assert found.queries.tolist() == [1, 2] and model.calls < 20


@every_norm
def test_a_broken_sample_stays_what_it_is_whatever_its_companions_do(network: nn.Module, norm: str) -> None:
    """In float32 and bit by bit: batches of one size, in one of which nothing is left early."""
    batch, threat = right_digits(network, 60), type(THREATS[norm])(1.7 * THREATS[norm].eps)
    whole = Square(queries=60).run(network, batch, threat=threat, seed=0)
    for most in (int(whole.queries.min()), 20):
        easy = (whole.queries <= most).nonzero().squeeze(1)
        rows = easy[torch.arange(len(batch.y)) % len(easy)]
        again = Square(queries=60).run(network, part(batch, rows), threat=threat, seed=0)
        assert 0 < len(easy) < len(batch.y)
        assert torch.equal(again.x, whole.x[rows]) and torch.equal(again.queries, whole.queries[rows])


def test_a_search_keeps_what_shrinks_the_margin(network: nn.Module) -> None:
    batch = right_digits(network, 40)

    def margin(queries: int) -> tuple[Tensor, Tensor]:
        found = Square(queries=queries).run(network, batch, threat=Linf(0.05), seed=0)
        logits = network(found.x).detach()
        truth = batch.y.unsqueeze(1)
        return (logits.gather(1, truth) - logits.scatter(1, truth, -torch.inf).amax(1, True)).squeeze(1), found.broken

    (first, _), (last, broken) = margin(1), margin(60)
    assert (last <= first)[~broken].all() and float(last.mean()) < float(first.mean()) - 0.1


# What always holds


@every_norm
def test_what_is_found_is_inside_and_wrong_and_does_not_depend_on_the_batch(network: nn.Module, norm: str) -> None:
    model = copy.deepcopy(network).double()
    batch = right_digits(network, 40)
    batch = Batch(batch.x.double(), batch.y.clone(), batch.index)
    batch.y[3] = (batch.y[3] + 1) % 10  # wrong as it is
    attack, threat = Square(queries=80), THREATS[norm]
    whole = attack.run(model, batch, threat=threat, seed=0)
    assert float(whole.x.min()) >= 0 and float(whole.x.max()) <= 1
    assert float(threat.norm(whole.x - batch.x).max()) <= threat.eps * (1 + 1e-6)
    assert torch.equal(whole.broken, model(whole.x).argmax(1) != batch.y)
    assert 1 < int(whole.broken.sum()) < len(batch.y)
    assert whole.broken[3] and torch.equal(whole.x[3], batch.x[3]) and int(whole.queries[3]) == 0
    order = torch.tensor([17, 2, 31, 3, 5])
    few = attack.run(model, part(batch, order), threat=threat, seed=0)
    assert torch.equal(few.broken, whole.broken[order]) and torch.equal(few.queries, whole.queries[order])
    assert torch.allclose(few.x, whole.x[order], atol=1e-9)
    again = attack.run_round(model, batch, in_round(batch, 1), threat=threat, seed=0)
    mixed = torch.arange(len(batch.y)) % 2
    both = attack.run_round(model, batch, mixed, threat=threat, seed=0)
    assert torch.allclose(both.x, torch.where(mixed[:, None, None, None] == 0, whole.x, again.x), atol=1e-9)
    for other in (attack.run(model, batch, threat=threat, seed=1), again):
        assert not torch.equal(other.x, whole.x)


@every_norm
def test_logits_without_a_number_are_no_success(norm: str) -> None:
    """The model answers nan where a pixel was moved: kept out, so the verdict speaks of what can be answered."""
    x = images(3, 1, 4, 4)

    def model(z: Tensor) -> Tensor:
        moved = (z != x).flatten(1).any(1)
        return torch.where(moved[:, None], torch.nan, torch.tensor([1.0, 0.0, -torch.inf]))

    found = Square(queries=5).run(model, batch_of(x), threat=THREATS[norm], seed=0)
    assert torch.equal(found.x, x) and not found.broken.any() and (found.queries == 5).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_two_classes_in_any_precision(dtype: torch.dtype) -> None:
    w = random.normal(1, "w", shape=(2, 16))
    x = 0.5 + 0.05 * images(6, 1, 4, 4)
    y = (x.flatten(1) @ w.T).argmax(1)
    attack = Square(queries=100, rescaled=True)
    found = attack.run(lambda z: (z.flatten(1) @ w.T).to(dtype), batch_of(x, y), threat=Linf(0.4), seed=0)
    assert found.broken.all() and (found.queries < 100).all()


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16), nn.Linear(16, 3)).train()
    before = copy.deepcopy(model.state_dict())
    Square(queries=3).run(model, batch_of(images(4, 1, 4, 4)), threat=L2(0.1), seed=0)
    assert model.training and model[1].training and model[2].weight.requires_grad
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@every_norm
def test_a_query_never_looks_at_a_value(norm: str) -> None:
    """Tensors without values refuse to be read and have static shapes alone: so nothing waits for a device."""
    with FakeTensorMode():
        batch = batch_of(torch.empty(4, 3, 5, 7))
        search = square._Search(lambda z: z.flatten(1)[:, :3], batch)
        painter = PAINTERS.get(norm)(search.natural, 0.1)
        search.start(painter.start(draws(4)))
        search.run(painter, draws(4), 0.4, range(1, 5), key=None)
    assert search.hunt.best.shape == (4, 3, 5, 7)


def test_mistakes_are_told() -> None:
    with pytest.raises(GeneralistError, match="queries"):
        Square(queries=0)
    with pytest.raises(GeneralistError, match="p_init"):
        Square(p_init=0.0)
    with pytest.raises(DataError, match=r"\[B,C,H,W\]"):
        Square().run(lambda x: x, batch_of(images(2, 9)), threat=L2(0.1), seed=0)
    with pytest.raises(GeneralistError, match="2 classes"):
        Square().run(lambda x: x.flatten(1)[:, :1], batch_of(images(2, 1, 3, 3)), threat=L2(0.1), seed=0)
    assert (Square().rounds(10), Square(restarts=3).rounds(10), Square().name) == (1, 3, "square")


# Another's Square


def short_of_the_last_row_and_column(self: Draws, high: int, what: str, queries: range) -> Tensor:
    """pyautoattack draws a window's corner below h - s and not up to it."""
    if what.endswith(("-top", "-left")):
        high = max(high - 1, 1)
    return random.integers(high, self.seed, f"{self.purpose}/{what}", *self._keys(queries))


@pytest.mark.parametrize("queries", [400, pytest.param(5000, marks=pytest.mark.slow)])
@every_norm
def test_robust_accuracy_agrees_with_pyautoattack(
    network: nn.Module, norm: str, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its windows never reach the last row and column, which on 8x8 pixels costs it 3 to 7 points in linf and l2.

    Ours, which reach them, must leave no more images than it does. With the same windows the searches
    differ in their random numbers only: over seeds the counts of 290 images vary by about 4, so the slack of 12 is 3
    of those. In l1 ours leaves fewer all the same: 120 to 128 over seeds, it 139 to 144. The schedule of 5,000 queries
    is AutoAttack's.
    """
    theirs = pytest.importorskip("pyautoattack.square")
    batch, threat = right_digits(network, 300), THREATS[norm]

    def left_by_ours() -> int:
        attack = Square(queries=queries, rescaled=rescaled)
        return int((~attack.run(network, batch, threat=threat, seed=0).broken).sum())

    rescaled = queries != 5000
    settings = {"eps": threat.eps, "n_queries": queries, "resc_schedule": rescaled, "device": "cpu"}
    attack = theirs.SquareAttack(network, norm=norm.capitalize(), **settings)
    with torch.no_grad():
        left = int((network(attack.perturb(batch.x, batch.y)).argmax(1) == batch.y).sum())
    assert left_by_ours() <= left
    monkeypatch.setattr(Draws, "below", short_of_the_last_row_and_column)
    assert -(25 if norm == "l1" else 12) <= left_by_ours() - left <= 12
