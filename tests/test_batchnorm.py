"""Re-estimated BatchNorm statistics against averages taken by hand, and a model that is otherwise given back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from generalist.core import random
from generalist.core.errors import GeneralistError
from generalist.tensors.batchnorm import reestimate, statistics_names, tracked


def noise(purpose: str, *shape: int) -> Tensor:
    return random.normal(1, purpose, shape=shape).double()


def batches() -> list[Tensor]:
    """Three of different sizes and scales: a plain average differs from one that weighs by images."""
    return [noise("a", 4, 2, 3, 3), 3 * noise("b", 6, 2, 3, 3) + 1, 0.5 * noise("c", 2, 2, 3, 3) - 2]


def average(values: list[Tensor]) -> Tensor:
    return torch.stack(values).mean(0)


def channel_mean(x: Tensor) -> Tensor:
    return x.mean((0, 2, 3))


def channel_variance(x: Tensor) -> Tensor:
    return x.var((0, 2, 3), unbiased=True)


def test_statistics_are_the_batches_plain_averages() -> None:
    model = nn.BatchNorm2d(2, momentum=0.3).double()
    model(5 * batches()[1])  # statistics of some other past
    assert reestimate(model, batches()) == 3
    assert model.running_mean is not None and model.running_var is not None and model.num_batches_tracked is not None
    torch.testing.assert_close(model.running_mean, average([channel_mean(x) for x in batches()]), rtol=1e-13, atol=0)
    torch.testing.assert_close(model.running_var, average([channel_variance(x) for x in batches()]), rtol=1e-13, atol=0)
    assert int(model.num_batches_tracked) == 3 and model.momentum == 0.3


def test_a_later_layer_sees_what_the_first_makes_of_a_batch() -> None:
    first, second = nn.BatchNorm2d(2).double(), nn.BatchNorm2d(2).double()
    with torch.no_grad():
        first.weight.copy_(torch.tensor([2.0, -0.5]))
        first.bias.copy_(torch.tensor([0.3, 0.1]))
    reestimate(nn.Sequential(first, nn.ReLU(), second), batches())
    seen = []
    for x in batches():
        centred = x - channel_mean(x)[None, :, None, None]
        scale = (x.var((0, 2, 3), unbiased=False) + first.eps).sqrt()
        scaled = centred / scale[None, :, None, None] * first.weight[None, :, None, None]
        seen.append((scaled + first.bias[None, :, None, None]).clamp(min=0).detach())
    assert second.running_mean is not None and second.running_var is not None
    torch.testing.assert_close(second.running_mean, average([channel_mean(x) for x in seen]), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(second.running_var, average([channel_variance(x) for x in seen]), rtol=1e-12, atol=1e-14)


def small() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3, momentum=0.7), nn.Dropout(0.5), nn.BatchNorm2d(3, momentum=None)]
    return nn.Sequential(*layers).double()


def test_only_statistics_change() -> None:
    model = small().train()
    model[1].eval()  # a layer that its owner keeps in evaluation mode
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = torch.get_rng_state()
    reestimate(model, batches())
    assert torch.equal(torch.get_rng_state(), state), "dropout has drawn"
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert [module.training for module in model] == [True, False, True, True] and model.training
    assert (model[1].momentum, model[3].momentum) == (0.7, None)


def test_statistics_do_not_depend_on_the_past_or_on_the_mode() -> None:
    first, second = small().eval(), small().train()
    second(7 * batches()[0])
    for model in (first, second):
        reestimate(model, batches())
    assert all(torch.equal(a, b) for a, b in zip(first.buffers(), second.buffers(), strict=True))


def failing() -> Iterator[Tensor]:
    yield batches()[0]
    raise ValueError("no more images")


@pytest.mark.parametrize("given", [failing, lambda: iter([batches()[0], torch.zeros(2, 9, 3, 3)]), lambda: iter([])])
def test_what_fails_leaves_the_model_as_it_was(given) -> None:
    model = small().train()
    model(batches()[0])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises((ValueError, RuntimeError, GeneralistError)):
        reestimate(model, given())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(module.training for module in model.modules()) and model[1].momentum == 0.7


def test_layers_without_statistics_are_left_alone() -> None:
    model = nn.Sequential(nn.BatchNorm2d(2, track_running_stats=False), nn.BatchNorm2d(2)).double()
    assert list(tracked(model)) == ["1"]
    assert statistics_names(model) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    reestimate(model, batches())
    assert model[0].running_mean is None
    with pytest.raises(GeneralistError, match="no BatchNorm statistics"):
        reestimate(nn.Conv2d(2, 3, 3).double(), batches())


def test_a_bare_layer_names_its_statistics() -> None:
    model = nn.BatchNorm1d(4)
    assert statistics_names(model) == set(model.state_dict()) - {"weight", "bias"}
