"""AR-AT: loss, gradients and the steps of what is trained beside, by formula in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from objectives_toy import Toy, assert_finite, assert_same_gradients, cross_entropy_attack, extreme, make_toy
from torch import Tensor, nn
from training_helpers import TinyNet, make_trainer, tiny_recipe

from generalist.core.errors import GeneralistError
from generalist.models.registry import MODELS
from generalist.objectives.ar_at import Beside, RepresentationRegularized

DECAY = 5e-4


def begun(path: Path, layers: list[str], *, trust: float = 0.3) -> tuple[Toy, RepresentationRegularized, Beside]:
    """At the start of an epoch, with a second BatchNorm that differs from the first."""
    toy = make_toy({"kind": "ar-at", "layers": layers, "bottleneck": 1.0}, path)
    objective = toy.objective
    assert isinstance(objective, RepresentationRegularized) and isinstance(objective.beside.module, Beside)
    toy.learner.model.train()
    objective.epoch_start(1)
    beside = objective.beside.module
    assert isinstance(beside.network, TinyNet)
    with torch.no_grad():
        beside.network.norm.weight.mul_(torch.tensor([1.5, 0.6, 1.1], dtype=torch.float64))
        beside.network.norm.bias.add_(torch.tensor([0.2, -0.1, 0.3], dtype=torch.float64))
        beside.network.norm.running_var.mul_(1.7)  # type: ignore[union-attr, operator]
        for head in beside.predictors:  # an answer of zeros has no direction
            head[3].bias.add_(torch.linspace(0.1, 0.3, len(head[3].bias)))  # type: ignore[index]
    objective.trust.fill_(trust)
    return toy, objective, beside


def normed(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """BatchNorm with the batch's own statistics."""
    axes = [axis for axis in range(x.dim()) if axis != 1]
    mean, variance = x.mean(axes, keepdim=True), x.var(axes, correction=0, keepdim=True)
    shape = [1, -1] + [1] * (x.dim() - 2)
    return (x - mean) / (variance + 1e-5).sqrt() * weight.view(shape) + bias.view(shape)


@pytest.mark.parametrize("layers", [[], ["norm"], ["conv", "norm"]], ids=str)
def test_loss_gradients_and_steps(tmp_path: Path, layers: list[str]) -> None:
    toy, _, beside = begun(tmp_path, layers)
    own = {name: p.detach().clone().requires_grad_() for name, p in toy.learner.model.named_parameters()}
    second = {name: p.detach().clone().requires_grad_() for name, p in beside.network.norm.named_parameters()}  # type: ignore[union-attr, operator]
    heads = [[p.detach().clone().requires_grad_() for p in head.parameters()] for head in beside.predictors]
    attacked = cross_entropy_attack(toy)

    def passed(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, list[Tensor]]:
        convolved = F.conv2d(x, own["conv.weight"], own["conv.bias"], padding=1)
        maps = normed(convolved, weight, bias)
        given = maps.relu().flatten(1)
        logits = given @ own["linear.weight"].T + own["linear.bias"]
        known = {"conv": convolved.relu().mean((2, 3)), "norm": maps.relu().mean((2, 3))}
        return logits, [known[name] for name in layers] or [given]

    logits, robust = passed(attacked, own["norm.weight"], own["norm.bias"])
    clean, natural = passed(toy.batch.x, second["weight"], second["bias"])
    apart = []
    for (down, weight, bias, up, offset), z, target in zip(heads, robust, natural, strict=True):
        answer = normed(z @ down.T, weight, bias).relu() @ up.T + offset
        cosine = (answer * target.detach()).sum(1) / (answer.norm(dim=1) * target.detach().norm(dim=1))
        apart.append(1 - cosine.mean())
    y, rows = toy.batch.y, torch.arange(6)
    losses = [-each.log_softmax(1)[rows, y].mean() for each in (logits, clean)]
    expected = 0.3 * losses[0] + 0.7 * losses[1] + 30 * torch.stack(apart).mean()
    inside = [*second.values(), *(p for head in heads for p in head)]
    wanted = torch.autograd.grad(expected, [*own.values(), *inside])

    gradients, metrics = toy.gradients()
    torch.testing.assert_close(metrics["loss"], expected.detach(), rtol=1e-10, atol=1e-12)
    assert_same_gradients(gradients, list(wanted[: len(own)]))
    found = [*beside.network.norm.parameters(), *beside.predictors.parameters()]  # type: ignore[union-attr, operator]
    for now, was, gradient in zip(found, inside, wanted[len(own) :], strict=True):
        torch.testing.assert_close(now, was - float(toy.progress.lr) * (gradient + DECAY * was), rtol=1e-9, atol=1e-11)
    assert metrics["trust"] == 0.3 and metrics["natural_loss"] == pytest.approx(float(losses[1].detach()))


def test_each_batchnorm_sees_images_of_one_kind(tmp_path: Path) -> None:
    toy, _, beside = begun(tmp_path, [])
    model = toy.learner.model
    attacked = cross_entropy_attack(toy)
    before = [net.get_buffer("norm.running_mean").clone() for net in (model, beside.network)]
    toy.gradients()
    for net, was, x in zip((model, beside.network), before, (attacked, toy.batch.x), strict=True):
        maps = F.conv2d(x, model.get_parameter("conv.weight"), model.get_parameter("conv.bias"), padding=1)
        torch.testing.assert_close(net.get_buffer("norm.running_mean"), 0.9 * was + 0.1 * maps.mean((0, 2, 3)))


def test_trust_is_the_accuracy_on_natural_training_images(tmp_path: Path) -> None:
    toy, objective, beside = begun(tmp_path, [])
    with torch.no_grad():  # the learner goes on; what is beside it shares all but BatchNorm
        toy.learner.model.get_parameter("linear.bias").add_(torch.tensor([0.4, 0.0, -0.4]))
        toy.learner.model.get_parameter("norm.weight").mul_(3)
    objective.epoch_start(2)
    batch = objective.learner.images.batch(objective.learner.index)
    network = TinyNet(num_classes=3, in_channels=1).double().eval()
    apart = {name: t for name, t in beside.network.state_dict().items() if name.startswith("norm.")}
    network.load_state_dict({**toy.learner.model.state_dict(), **apart})
    right = (network(batch.x.double()).argmax(1) == batch.y).double().mean()
    assert 0 < right < 1 and float(objective.trust) == pytest.approx(float(right))


def test_the_second_batchnorm_begins_as_the_first(tmp_path: Path) -> None:
    """With the weights that the learner has when training begins, not those of its birth."""
    toy = make_toy("ar-at", tmp_path)
    with torch.no_grad():
        toy.learner.model.get_parameter("norm.weight").fill_(0.7)
    toy.objective.epoch_start(1)
    assert isinstance(toy.objective, RepresentationRegularized)
    network = toy.objective._network()
    assert all(
        torch.equal(a, b)
        for a, b in zip(network.state_dict().values(), toy.learner.model.state_dict().values(), strict=True)
    )
    toy.learner.model.get_parameter("norm.weight").data.fill_(0.5)
    toy.objective.epoch_start(2)
    assert bool((network.get_parameter("norm.weight") == 0.7).all()), "afterwards it goes its own way"


@pytest.mark.parametrize("reset", [True, False])
def test_a_reset_forgets_its_momenta_too(tmp_path: Path, reset: bool) -> None:
    toy = make_toy("ar-at", tmp_path)
    toy.objective.epoch_start(1)
    toy.gradients()
    before = {name: tensor.clone() for name, tensor in toy.objective.state_dict().items()}
    toy.learner.receive(toy.learner.flat.vector.clone(), toy.learner.flat.counters.clone(), reset=reset)
    after = toy.objective.state_dict()
    momenta = [name for name in after if name.startswith("optimizer.")]
    assert momenta and all(before[name].any() for name in momenta)
    assert all(bool(after[name].any()) != reset for name in momenta)
    assert torch.equal(after["beside"], before["beside"])


def test_finite_where_probabilities_underflow(tmp_path: Path) -> None:
    toy = make_toy("ar-at", tmp_path)
    toy.objective.epoch_start(1)
    extreme(toy)
    assert_finite(toy)


def test_mistakes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GeneralistError, match=r"no layer 'layer4'; its last BatchNorm layers are norm"):
        make_toy({"kind": "ar-at", "layers": ["layer4"]}, tmp_path / "a")

    class Convolution(nn.Module):
        def __init__(self, *, num_classes: int, in_channels: int) -> None:
            super().__init__()
            self.conv = nn.Conv2d(in_channels, num_classes, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.conv(x).flatten(1)
            return out

    monkeypatch.setitem(MODELS._things, "convolution", Convolution)
    learner = {"name": "robust", "objective": "ar-at", "threat": "linf:0.1", "optimizer": {"lr": 0.1}}
    with pytest.raises(GeneralistError, match="no linear layer as its classifier: name the layers"):
        make_trainer(tiny_recipe([learner], model={"name": "convolution"}), tmp_path / "b")
