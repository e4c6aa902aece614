"""PGD against its definition, in float64, written out once more without torch."""

import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn import functional as F

from generalist.attacks.pgd import AttackOptions, pgd, starting_point
from generalist.attacks.threats import L1, L2, Linf, Threat, ThreatOptions
from generalist.core import random
from generalist.core.errors import DataError, GeneralistError

THREATS = {"linf": Linf(0.1), "l2": L2(0.6), "l1": L1(1.5, sparsity=0.2)}
every_threat = pytest.mark.parametrize("threat", THREATS.values(), ids=THREATS.keys())


def images(count: int = 5, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return random.uniform(7, "images", torch.arange(count), shape=shape or (1, 4, 4)).to(dtype)


def network(*, dtype: torch.dtype = torch.float64, norm: bool = True) -> nn.Sequential:
    torch.manual_seed(3)
    layers = [nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6) if norm else nn.Identity(), nn.Tanh(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(24, 3)).to(dtype)


def attack(model, x: Tensor, y: Tensor, threat: Threat, **changes) -> Tensor:
    settings = {"seed": 0, "purpose": "attack", "index": torch.arange(len(x)), "step": 0, "loss": None}
    settings |= {name: changes.pop(name) for name in list(changes) if name in settings}
    return pgd(model, x, y, threat=threat, options=AttackOptions(**changes), **settings)


# The same attack again, one sample at a time, on logits W tanh(V x)


def l1_threshold(sizes: np.ndarray, eps: float) -> float:
    low, high = 0.0, sizes.max()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(sizes - middle, 0).sum() > eps else (low, middle)
    return high


def project_again(threat: Threat, delta: np.ndarray) -> np.ndarray:
    if threat.name == "linf":
        return np.clip(delta, -threat.eps, threat.eps)
    if threat.name == "l2":
        return delta * min(1.0, threat.eps / max(np.sqrt((delta**2).sum()), 1e-300))
    if np.abs(delta).sum() <= threat.eps:
        return delta
    return np.sign(delta) * np.maximum(np.abs(delta) - l1_threshold(np.abs(delta), threat.eps), 0)


def step_again(threat: Threat, grad: np.ndarray) -> np.ndarray:
    if threat.name == "linf":
        return np.sign(grad)
    if threat.name == "l2":
        return grad / np.sqrt((grad**2).sum())
    count = max(1, round(threat.sparsity * grad.size))
    step = np.zeros_like(grad)
    for i in sorted(range(grad.size), key=lambda i: -abs(grad[i]))[:count]:
        step[i] = np.sign(grad[i]) / count
    return step


def pgd_again(v, w, x, y, threat, start, size, steps):
    adversarial = np.clip(x + project_again(threat, start), 0, 1)
    for _ in range(steps):
        hidden = np.tanh(v @ adversarial)
        odds = np.exp(w @ hidden - (w @ hidden).max())
        error = odds / odds.sum() - np.eye(len(w))[y]
        grad = v.T @ ((1 - hidden**2) * (w.T @ error))
        delta = project_again(threat, adversarial - x + size * step_again(threat, grad))
        adversarial = np.clip(x + delta, 0, 1)
    return adversarial


@pytest.mark.parametrize("start", ["none", "uniform", "gaussian"])
@every_threat
def test_pgd_is_what_the_definition_says(threat, start):
    v = random.normal(1, "v", shape=(8, 16)).double()
    w = random.normal(1, "w", shape=(3, 8)).double()
    x, y = images(6, 16), torch.tensor([0, 1, 2, 0, 1, 2])
    first = starting_point(
        threat, start, seed=5, purpose="here", index=torch.arange(6), step=2, like=x
    )  # its own distribution is tested with the threats
    result = attack(
        lambda z: torch.tanh(z @ v.T) @ w.T, x, y, threat, steps=7, start=start, seed=5, purpose="here", step=2
    )
    size = threat.default_step(7)
    for i in range(6):
        again = pgd_again(v.numpy(), w.numpy(), x[i].numpy(), int(y[i]), threat, first[i].numpy(), size, steps=7)
        assert np.allclose(result[i].numpy(), again, atol=1e-10)
    assert not torch.allclose(result, x)


def test_linf_pgd_reaches_the_optimum_of_a_linear_model():
    """For two classes the loss grows with w.x, so the worst image moves each pixel by eps against the margin."""
    w = random.normal(2, "w", shape=(2, 16)).double()
    x, y = images(6, 16), torch.tensor([0, 1, 0, 1, 0, 1])
    direction = torch.stack([(w[1 - label] - w[label]).sign() for label in y])
    best = (x + 0.1 * direction).clamp(0, 1)
    result = attack(lambda z: z @ w.T, x, y, Linf(0.1), steps=10)
    assert torch.allclose(result, best, atol=1e-12)


def test_l2_pgd_reaches_the_optimum_of_a_linear_model_away_from_the_walls():
    w = random.normal(2, "w", shape=(2, 16)).double()
    x, y = torch.full((2, 16), 0.5).double(), torch.tensor([0, 1])
    best = torch.stack([x[i] + 0.3 * F.normalize(w[1 - y[i]] - w[y[i]], dim=0) for i in range(2)])
    result = attack(lambda z: z @ w.T, x, y, L2(0.3), steps=40)
    assert torch.allclose(result, best, atol=1e-3)


# What always holds


@pytest.mark.parametrize("batchnorm", ["eval", "train"])
@pytest.mark.parametrize("start", ["none", "uniform", "gaussian"])
@every_threat
def test_result_is_an_image_in_the_ball_with_a_larger_loss(threat, start, batchnorm):
    model, x, y = network(dtype=torch.float32), images(dtype=torch.float32), torch.tensor([0, 1, 2, 0, 1])
    result = attack(model, x, y, threat, start=start, batchnorm=batchnorm)
    assert not result.requires_grad and result.dtype == x.dtype and result.shape == x.shape
    assert float(result.min()) >= 0 and float(result.max()) <= 1
    assert float(threat.norm(result - x).max()) <= threat.eps * (1 + 1e-5)
    model.train(batchnorm == "train")
    with torch.no_grad():
        assert float(F.cross_entropy(model(result), y)) > float(F.cross_entropy(model(x), y))


@every_threat
def test_result_does_not_depend_on_the_batch(threat):
    model, x, y = network(), images(6), torch.tensor([0, 1, 2, 0, 1, 2])
    index = torch.tensor([4, 8, 15, 16, 23, 42])
    whole = attack(model, x, y, threat, index=index)
    order = torch.tensor([5, 1, 2])
    part = attack(model, x[order], y[order], threat, index=index[order])
    assert torch.allclose(part, whole[order], atol=1e-9)
    assert not torch.allclose(attack(model, x, y, threat, index=index, purpose="other", steps=1), whole)


@pytest.mark.parametrize("batchnorm", ["eval", "train"])
def test_the_model_is_left_as_it_was(batchnorm):
    model = network()
    model[0].bias.requires_grad_(False)
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attack(model, images(), torch.zeros(5).long(), Linf(0.1), batchnorm=batchnorm)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert [p.requires_grad for p in model.parameters()] == [True, False, True, True, True, True]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_batchnorm_mode_under_attack():
    seen = []
    model = network()
    model[1].register_forward_hook(lambda module, *_: seen.append(module.training))
    for batchnorm in ("eval", "train"):
        attack(model, images(), torch.zeros(5).long(), Linf(0.1), batchnorm=batchnorm, steps=1)
    assert seen == [False, True]


def test_no_steps():
    model, x, y = network(), images(), torch.zeros(5).long()
    assert torch.equal(attack(model, x, y, Linf(0.1), steps=0, start="none"), x)
    start = attack(model, x, y, Linf(0.1), steps=0)
    assert 0 < float((start - x).abs().max()) <= 0.1 + 1e-9


def test_gaussian_start_is_small_noise():
    x = torch.full((50, 1, 16, 16), 0.5).double()
    start = attack(network(), x, torch.zeros(50).long(), Linf(0.1), steps=0, start="gaussian") - x
    assert float(start.std()) == pytest.approx(1e-3, rel=0.05)


@every_threat
def test_saturated_and_constant_models_give_no_nan(threat):
    x, y = images(), torch.zeros(5).long()
    for scale in (0.0, 1e-30, 1e30):
        result = attack(lambda z, scale=scale: z.flatten(1)[:, :3] * scale, x, y, threat)
        assert bool(result.isfinite().all())
        assert float(threat.norm(result - x).max()) <= threat.eps * (1 + 1e-9)


def test_loss_of_the_callers_own():
    """TRADES' loss: the divergence from the clean prediction, whose gradient at the image itself is zero."""
    model, x, y = network().eval(), images(), torch.zeros(5).long()
    clean = F.log_softmax(model(x), dim=1).detach()

    def divergence(logits: Tensor, labels: Tensor) -> Tensor:
        return F.kl_div(F.log_softmax(logits, dim=1), clean, log_target=True, reduction="sum")

    result = attack(model, x, y, Linf(0.1), start="gaussian", loss=divergence)
    with torch.no_grad():
        assert float(divergence(model(result), y)) > 100 * float(divergence(model(x + 1e-3), y))


def test_under_autocast_and_no_grad():
    seen = []

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        seen.append(logits.dtype)
        return F.cross_entropy(logits, labels, reduction="sum")

    model, x, y = network(dtype=torch.float32), images(dtype=torch.float32), torch.zeros(5).long()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype == torch.bfloat16
        result = attack(model, x, y, Linf(0.1), loss=loss, steps=2)
    assert seen == [torch.float32] * 2 and result.dtype == torch.float32
    assert float((result - x).abs().max()) == pytest.approx(0.1, rel=1e-5)


@every_threat
def test_attack_needs_no_values(threat):
    """On the meta device there are shapes and no values: an attack that waited for one would fail."""
    model, x = network(dtype=torch.float32).to("meta"), torch.zeros(2, 1, 4, 4, device="meta")
    y = index = torch.zeros(2, dtype=torch.int64, device="meta")
    for batchnorm in ("eval", "train"):
        assert attack(model, x, y, threat, index=index, batchnorm=batchnorm).shape == x.shape


@pytest.mark.gpu
@every_threat
def test_attack_in_a_captured_graph_is_the_eager_one(threat):
    model, x = network(dtype=torch.float32).cuda(), images(dtype=torch.float32).cuda()
    y, index, step = torch.zeros(5).long().cuda(), torch.arange(5).cuda(), torch.zeros((), dtype=torch.int64).cuda()

    def run() -> Tensor:
        return attack(model, x, y, threat, index=index, step=step, batchnorm="train")

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    for epoch in (1, 2):
        step.fill_(epoch)
        graph.replay()
        assert torch.allclose(result, run(), atol=1e-6)


# Mistakes


def test_wrong_arguments_are_refused():
    model, y = network(), torch.zeros(5).long()
    with pytest.raises(DataError, match="divide bytes by 255"):
        attack(model, torch.zeros(5, 1, 4, 4, dtype=torch.uint8), y, Linf(0.1))
    with pytest.raises(DataError, match="one number per image"):
        attack(model, images(), y, Linf(0.1), index=torch.arange(4))
    with pytest.raises(GeneralistError, match="no gradient"):
        attack(lambda z: z.detach().flatten(1)[:, :3], images(), y, Linf(0.1))


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": -1},
        {"steps": 1.5},
        {"step": 0},
        {"step": math.nan},
        {"start": "zero"},
        {"batchnorm": None},
        {"eps": 1},
    ],
)
def test_wrong_options_are_refused(wrong):
    with pytest.raises(ValidationError):
        AttackOptions(**wrong)


def test_options_read_fractions():
    assert AttackOptions(step="2/255").step == 2 / 255
    default = {"steps": 10, "step": None, "start": None, "batchnorm": "eval", "scale": None}
    assert AttackOptions().model_dump() == default
    assert ThreatOptions(norm="linf", eps="8/255").model_dump() == {"norm": "linf", "eps": "8/255"}
