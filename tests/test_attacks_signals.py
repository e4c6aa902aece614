"""Signs of hidden gradients, each on a model made to show it and on one that does not."""

from __future__ import annotations

import cProfile
import sys

import pytest
import torch
from attack_targets import Flat, digits_network, labelled, network, noise, right_digits
from torch import Tensor, nn

from generalist.attacks import losses
from generalist.attacks.signals import (
    answers_at_random,
    answers_by_company,
    answers_in_steps,
    gives_probabilities,
    not_rising,
    takes_gradients,
    zero_gradient,
)
from generalist.attacks.threats import L2, Linf
from generalist.core import random
from generalist.data.sets import Batch


class Rounding(nn.Module):
    """Rounds its input to 8 levels, so that it has no gradient, as a careless defence does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model((x * 8).round() / 8)


class Noisy(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.passes = model, 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return self.model(x + 0.1 * random.normal(self.passes, "noise", shape=x.shape))


def batch_for(model: nn.Module, count: int = 40) -> Batch:
    return labelled(model, noise(count, dtype=torch.float32))


@pytest.mark.parametrize("threat", [Linf(0.1), L2(0.5)], ids=str)
def test_an_honest_network_shows_nothing(threat) -> None:
    model = digits_network()
    batch = right_digits(model, 60)
    model.train()
    assert not zero_gradient(model, batch).any() and not answers_in_steps(model, batch, seed=0).any()
    assert not answers_at_random(model, batch.x).any() and not answers_by_company(model, batch.x).any()
    assert not gives_probabilities(model, batch.x).any()
    assert not_rising(model, batch, threat=threat, seed=0).float().mean() < 0.05
    assert model.training and all(parameter.requires_grad for parameter in model.parameters())


def test_a_network_that_rounds_its_input() -> None:
    model = Rounding(network(dtype=torch.float32))
    batch = batch_for(model)
    assert zero_gradient(model, batch).all() and not answers_at_random(model, batch.x).any()
    assert not_rising(model, batch, threat=Linf(0.1), seed=0).all()
    # Of 16 pixels some lie within 2/255 of a step, in most images.
    assert answers_in_steps(model, batch, seed=0).float().mean() > 0.3
    assert answers_in_steps(model, batch, seed=0, noise=0.2).all()
    assert not answers_in_steps(model, batch, seed=0, noise=1e-9).any()


def test_a_constant_network_has_no_gradient_but_no_steps() -> None:
    batch = labelled(Flat(), noise(5, dtype=torch.float32))
    assert zero_gradient(Flat(), batch).all()
    assert not answers_in_steps(Flat(), batch, seed=0).any()
    assert not_rising(Flat(), batch, threat=Linf(0.1), seed=0).all()


def test_a_network_that_answers_at_random() -> None:
    model = network(dtype=torch.float32)
    batch = batch_for(model)
    assert answers_at_random(Noisy(model), batch.x).all()
    assert not answers_at_random(model, batch.x).any()
    dropout = nn.Sequential(nn.Dropout(), model).train()
    assert not answers_at_random(dropout, batch.x).any() and dropout.training  # evaluation mode has no dropout


def test_a_very_sure_network_has_no_gradient_of_the_cross_entropy_alone() -> None:
    model = network(dtype=torch.float32)
    batch = batch_for(model)

    def sure(x: Tensor) -> Tensor:
        return 1e6 * model(x)

    assert zero_gradient(sure, batch).float().mean() > 0.9
    assert not zero_gradient(sure, batch, loss=losses.dlr).any()
    assert not answers_in_steps(sure, batch, seed=0).any()


def test_a_network_whose_answers_depend_on_the_batch() -> None:
    model = network(dtype=torch.float32)
    batch = batch_for(model)
    of_the_batch = nn.Sequential(nn.BatchNorm2d(batch.x.shape[1], track_running_stats=False), model)
    assert answers_by_company(of_the_batch, batch.x).all() and len(answers_by_company(model, batch.x)) == 20
    assert not answers_by_company(of_the_batch, batch.x[:1]).any()


class Purifying(nn.Module):
    """Moves an image to where the model is surer before it answers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            near = x.detach().requires_grad_()
            self.model(near).amax(1).sum().backward()
        return self.model(x + 0.01 * near.grad)


def test_a_network_that_takes_gradients_of_its_own() -> None:
    model = network(dtype=torch.float32)
    x = batch_for(model).x
    assert takes_gradients(Purifying(model), x) and not takes_gradients(model, x)
    assert sys.getprofile() is None and not answers_at_random(Purifying(model), x).any()


def test_a_profiler_goes_on_after_it_was_asked_whether_a_network_takes_gradients() -> None:
    model = network(dtype=torch.float32)
    x = batch_for(model).x
    with cProfile.Profile() as profiler:
        assert not takes_gradients(model, x)
        sum([1])
    assert any("sum" in str(entry.code) for entry in profiler.getstats())


def test_probabilities_are_no_logits() -> None:
    model = network(dtype=torch.float32)
    x = batch_for(model).x
    assert gives_probabilities(nn.Sequential(model, nn.Softmax(1)), x).all()
    assert not gives_probabilities(nn.Sequential(model, nn.LogSoftmax(1)), x).any()
    assert not gives_probabilities(nn.Sequential(model, nn.Sigmoid()), x).all()


def test_signs_are_repeatable_and_of_the_sample_alone() -> None:
    model = Rounding(network(dtype=torch.float64))
    batch = labelled(model, noise(20))
    rows = torch.tensor([3, 17, 4])
    few = Batch(x=batch.x[rows], y=batch.y[rows], index=batch.index[rows])
    assert torch.equal(answers_in_steps(model, few, seed=1), answers_in_steps(model, batch, seed=1)[rows])
    assert torch.equal(zero_gradient(model, few), zero_gradient(model, batch)[rows])
