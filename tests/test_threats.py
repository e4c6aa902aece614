"""The hooks of every threat: projection, start, step, norm."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from generalist.attacks.threats import L1, L2, THREATS, Linf, Threat, ThreatOptions, parse_threat, perturb
from generalist.core import random
from generalist.core.errors import GeneralistError

NORMS = ["linf", "l2", "l1"]
quick = settings(max_examples=40, deadline=None)
norms = st.sampled_from(NORMS)
radii = st.floats(1e-3, 1.0)
scales = st.sampled_from([1e-30, 1e-3, 1.0, 30.0, 1e15])
seeds = st.integers(0, 10**6)
rows = st.integers(1, 12).flatmap(
    lambda n: st.lists(st.lists(st.floats(-4, 4), min_size=n, max_size=n), min_size=1, max_size=4)
)


def threat_of(norm: str, eps: float) -> Threat:
    return ThreatOptions(norm=norm, eps=eps).build()


def gaussian(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    return random.normal(seed, "test", shape=shape).double() * scale


def by_definition(norm: str, delta: Tensor) -> Tensor:
    flat = delta.double().flatten(1)
    return {"linf": flat.abs().amax(1), "l2": (flat**2).sum(1).sqrt(), "l1": flat.abs().sum(1)}[norm]


def l1_by_bisection(row: Tensor, eps: float) -> Tensor:
    sizes = row.abs()
    if float(sizes.sum()) <= eps:
        return row
    low, high = 0.0, float(sizes.max())
    for _ in range(200):
        middle = (low + high) / 2
        if float((sizes - middle).clamp_min(0).sum()) > eps:
            low = middle
        else:
            high = middle
    return row.sign() * (sizes - high).clamp_min(0)


# Projection


@quick
@given(norm=norms, eps=radii, values=rows)
def test_projection_is_inside_idempotent_and_optimal(norm, eps, values):
    threat, delta = threat_of(norm, eps), torch.tensor(values, dtype=torch.float64)
    inside = threat.project(delta)
    assert bool((by_definition(norm, inside) <= eps * (1 + 1e-12)).all())
    assert torch.allclose(threat.project(inside), inside, rtol=1e-12, atol=1e-12)
    # The nearest point p of a convex set is the one with <delta - p, z - p> <= 0 for every z of the set.
    for seed in range(5):
        z = threat.random_start(seed, "z", torch.arange(len(values)), 0, delta)
        assert bool((((delta - inside) * (z - inside)).sum(1) <= 1e-9).all())
        assert bool(((delta - inside).norm(dim=1) <= (delta - z).norm(dim=1) + 1e-9).all())


@quick
@given(norm=norms, eps=radii, seed=seeds, share=st.floats(0, 0.999))
def test_projection_is_the_identity_inside(norm, eps, seed, share):
    threat, like = threat_of(norm, eps), torch.zeros(3, 2, 4, 4)
    delta = share * threat.random_start(seed, "inside", torch.arange(3), 0, like)
    assert torch.equal(threat.project(delta), delta)


@quick
@given(eps=radii, values=rows)
def test_l1_projection_against_bisection(eps, values):
    delta = torch.tensor(values, dtype=torch.float64)
    expected = torch.stack([l1_by_bisection(row, eps) for row in delta])
    assert torch.allclose(L1(eps).project(delta), expected, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("norm", NORMS)
def test_hooks_keep_type_and_shape_and_stay_in_the_ball(norm, dtype):
    threat, delta = threat_of(norm, 0.5), gaussian(1, 3, 3, 8, 8).to(dtype)
    slack = 1 + 16 * torch.finfo(dtype).eps
    for result in (threat.project(delta), threat.random_start(0, "p", torch.arange(3), 2, delta)):
        assert result.dtype == dtype and result.shape == delta.shape
        assert bool((by_definition(norm, result) <= 0.5 * slack).all())
    step = threat.steepest(delta)
    assert step.dtype == dtype and step.shape == delta.shape
    assert torch.allclose(by_definition(norm, step), torch.ones(3).double(), rtol=1e-2)


@pytest.mark.parametrize("scale", [0.0, 1e-38, 1e15, 1e30])
@pytest.mark.parametrize("norm", NORMS)
def test_projection_of_extreme_perturbations(norm, scale):
    delta = gaussian(2, 4, 3, 8, 8, scale=scale).float()
    inside = threat_of(norm, 0.5).project(delta)
    assert bool(inside.isfinite().all())
    assert bool((by_definition(norm, inside) <= 0.5 * (1 + 1e-5)).all())
    if norm != "linf" and scale > 1:
        assert torch.allclose(by_definition(norm, inside), torch.full((4,), 0.5).double(), rtol=1e-5)


# Clipping


@quick
@given(norm=norms, eps=radii, seed=seeds)
def test_clipping_a_projected_perturbation_stays_in_the_ball(norm, eps, seed):
    threat = threat_of(norm, eps)
    x = random.uniform(seed, "x", shape=(4, 1, 5, 5)).double()
    x[0], x[1] = 0.0, 1.0
    image = perturb(x, threat.project(gaussian(seed, 4, 1, 5, 5)))
    assert float(image.min()) >= 0 and float(image.max()) <= 1
    assert bool((by_definition(norm, image - x) <= eps * (1 + 1e-9)).all())


# Steepest step


@quick
@given(norm=norms, seed=seeds, scale=scales)
def test_steepest_step_has_unit_norm(norm, seed, scale):
    grad = gaussian(seed, 5, 3, 4, 4, scale=scale).float()
    step = threat_of(norm, 1.0).steepest(grad)
    assert torch.allclose(by_definition(norm, step), torch.ones(5).double(), rtol=1e-5)


@quick
@given(norm=norms, values=rows)
def test_steepest_step_attains_the_dual_norm(norm, values):
    grad = torch.tensor(values, dtype=torch.float64)
    threat = L1(1.0, sparsity=1e-6) if norm == "l1" else threat_of(norm, 1.0)  # one coordinate: the steepest proper
    step = threat.steepest(grad)
    gain = (grad * step).sum(1)
    dual = by_definition({"linf": "l1", "l2": "l2", "l1": "linf"}[norm], grad)
    assert torch.allclose(gain, dual, rtol=1e-9, atol=1e-12)
    for seed in range(5):
        other = threat.random_start(seed, "other", torch.arange(len(values)), 0, grad)
        assert bool(((grad * other).sum(1) <= gain + 1e-9).all())
    assert bool((step.abs().sum(1)[grad.abs().sum(1) == 0] == 0).all())


def test_l1_step_changes_the_best_share_of_the_coordinates():
    grad = gaussian(3, 2, 3, 10, 10)
    step = L1(1.0).steepest(grad)
    assert (step != 0).flatten(1).sum(1).tolist() == [15, 15]
    best = grad.flatten(1).abs().sort(1, descending=True).values[:, :15].mean(1)
    assert torch.allclose((grad * step).flatten(1).sum(1), best)


def test_l1_step_has_unit_norm_even_with_few_nonzero_gradients():
    grad = torch.zeros(1, 100)
    grad[0, 7] = -3.0
    step = L1(1.0).steepest(grad)
    assert step[0, 7] == -1 and float(step.abs().sum()) == 1


@pytest.mark.parametrize("norm", NORMS)
def test_zero_and_broken_gradients_give_no_nan(norm):
    threat = threat_of(norm, 1.0)
    assert torch.equal(threat.steepest(torch.zeros(2, 3, 4, 4)), torch.zeros(2, 3, 4, 4))
    grad = torch.zeros(3, 40)
    grad[0], grad[1, 3], grad[2, 3] = math.nan, -math.inf, 1e-42
    step = threat.steepest(grad)
    assert bool(step.isfinite().all())
    assert not bool(step[0].any())
    assert float(step[1, 3]) == pytest.approx(-1.0) and float(step[2, 3]) == pytest.approx(1.0)


# Random start


@pytest.mark.parametrize("norm", NORMS)
def test_random_start_depends_on_the_sample_and_not_on_the_batch(norm):
    threat, like = threat_of(norm, 0.5), torch.zeros(6, 3, 4, 4)
    index = torch.tensor([5, 3, 9, 0, 100000, 7])
    whole = threat.random_start(1, "a", index, 4, like)
    order = torch.tensor([2, 0, 5])
    assert torch.equal(threat.random_start(1, "a", index[order], torch.tensor(4), like[order]), whole[order])
    for seed, purpose, step in [(2, "a", 4), (1, "b", 4), (1, "a", 5)]:
        assert not torch.allclose(threat.random_start(seed, purpose, index, step, like), whole)
    assert torch.unique(whole, dim=0).shape[0] == 6


@pytest.mark.parametrize("norm", NORMS)
def test_random_start_is_uniform_in_the_ball(norm):
    eps, n, count = 0.7, 5, 40000
    start = threat_of(norm, eps).random_start(0, "u", torch.arange(count), 0, torch.zeros(count, n).double())
    size = by_definition(norm, start) / eps
    assert float(size.max()) <= 1 + 1e-9
    # In a ball of n dimensions the n-th power of the norm is uniform on [0, 1], whatever the norm.
    levels = torch.linspace(0.1, 0.9, 9).double()
    assert torch.allclose(torch.quantile(size**n, levels), levels, atol=0.015)
    second = {"linf": 1 / 3, "l2": 1 / (n + 2), "l1": 2 / ((n + 1) * (n + 2))}[norm]
    assert torch.allclose(start.mean(0) / eps, torch.zeros(n).double(), atol=0.012)
    assert torch.allclose((start / eps).square().mean(0), torch.full((n,), second).double(), rtol=0.05)
    products = (start.T @ start / count / eps**2 - second * torch.eye(n)).abs()
    assert float(products.max()) < 0.05 * second


# Static shapes


@pytest.mark.parametrize("norm", NORMS)
def test_hooks_need_no_values(norm):
    """Tensors of the meta device have shapes and no values: a hook that looked at one would fail."""
    threat, delta = threat_of(norm, 0.5), torch.zeros(2, 3, 4, 4, device="meta")
    start = threat.random_start(0, "p", torch.zeros(2, dtype=torch.int64, device="meta"), 0, delta)
    for result in (threat.project(delta), threat.steepest(delta), start):
        assert result.shape == delta.shape and result.device.type == "meta"
    assert threat.norm(delta).shape == (2,)


# Norms, names, options


@quick
@given(norm=norms, seed=seeds, scale=scales)
def test_norm(norm, seed, scale):
    delta = gaussian(seed, 4, 2, 3, 3, scale=scale).float()
    assert torch.allclose(threat_of(norm, 1.0).norm(delta).double(), by_definition(norm, delta), rtol=1e-5, atol=0)


def test_default_steps():
    assert Linf(8 / 255).default_step(10) == pytest.approx(2 / 255)
    assert L2(0.5).default_step(100) == 0.125
    assert [L1(12.0).default_step(steps) for steps in (0, 1, 10, 100)] == [12, 12, 3, pytest.approx(0.3)]


@pytest.mark.parametrize(
    "text", ["linf:8/255", "linf:6.5/255", "l2:128/255", "l2:0.5", "l1:12", "linf:1", "linf:0.031"]
)
def test_a_name_reads_back(text):
    options = parse_threat(text)
    assert str(options) == text == str(options.build())
    assert parse_threat(str(options.build())) == options
    assert isinstance(options.build(), THREATS.get(options.norm))


@quick
@given(norm=norms, eps=radii)
def test_every_name_reads_back_exactly(norm, eps):
    assert parse_threat(str(threat_of(norm, eps))) == ThreatOptions(norm=norm, eps=eps)


def test_a_recipe_may_write_one_word():
    assert ThreatOptions.model_validate("l2:128/255") == ThreatOptions(norm="l2", eps=128 / 255)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("linf", "as in linf:8/255"),
        ("linf:8", "write 8/255"),
        ("l3:1", "'linf', 'l2' or 'l1'"),
        ("l2:nan", "valid number"),
        ("l2:inf", "valid number"),
        ("l2:-1", "greater than 0"),
        ("l2:0", "greater than 0"),
        ("l2:1/0", "denominator"),
        ("l2:1e9", "1000000"),
        ("l2:1:2", "valid number"),
        ("", "as in linf:8/255"),
        (None, "as in linf:8/255"),
        (["linf"], "as in linf:8/255"),
    ],
)
def test_wrong_threats_are_refused_in_one_line(text, says):
    with pytest.raises(GeneralistError, match="threat ") as caught:
        parse_threat(text)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_options_are_strict():
    with pytest.raises(ValidationError):
        ThreatOptions(norm="linf", eps=0.1, sparsity=0.1)
    with pytest.raises(ValidationError):
        ThreatOptions(norm="linf", eps=True)


def test_threats_are_values():
    assert Linf(0.1) == Linf(0.1) != L2(0.1)
    assert len({Linf(0.1), Linf(0.1), L1(0.1), L1(0.1, sparsity=0.5)}) == 3
