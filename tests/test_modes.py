"""A borrowed network comes back as it was."""

import pytest
import torch
from torch import Tensor, nn

from generalist.tensors.modes import frozen, restored


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.kept = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.kept(self.norm(self.conv(x))).mean(dim=(2, 3)))


def make() -> Net:
    """In train mode, but for one module that its owner keeps in eval mode; one parameter is not trained."""
    torch.manual_seed(0)
    net = Net().train()
    net.kept.eval()
    net.head.bias.requires_grad_(False)
    return net


def state(net: nn.Module) -> tuple[list[bool], list[bool], dict[str, Tensor]]:
    modes = [module.training for module in net.modules()]
    flags = [parameter.requires_grad for parameter in net.parameters()]
    return modes, flags, {name: value.clone() for name, value in net.state_dict().items()}


def assert_same(net: nn.Module, before: tuple[list[bool], list[bool], dict[str, Tensor]]) -> None:
    after = state(net)
    assert after[:2] == before[:2]
    assert after[2].keys() == before[2].keys()
    assert all(torch.equal(after[2][name], value) for name, value in before[2].items())


IMAGES = torch.linspace(0, 1, 2 * 36).reshape(2, 1, 6, 6)


@pytest.mark.parametrize("training", [False, True, None])
def test_everything_is_restored(training):
    net = make()
    before = state(net)
    buffers = dict(net.named_buffers())
    with frozen(net, training=training):
        assert not any(parameter.requires_grad for parameter in net.parameters())
        net(IMAGES)
    assert_same(net, before)
    assert all(buffer is buffers[name] for name, buffer in net.named_buffers())


@pytest.mark.parametrize("training", [False, True, None])
def test_everything_is_restored_after_an_error(training):
    net = make()
    before = state(net)
    net.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), frozen(net, training=training):
        net(IMAGES)
    assert_same(net, before)


def test_mode_meanwhile():
    net = make()
    with frozen(net):
        assert not any(module.training for module in net.modules())
    with frozen(net, training=True):
        assert all(module.training for module in net.modules())
    with frozen(net, training=None):
        assert net.training and not net.kept.training


def test_train_mode_does_update_the_copies():
    net = make()
    with frozen(net, training=True):
        net(IMAGES)
        assert int(net.norm.num_batches_tracked) == 1
        assert not torch.equal(net.norm.running_mean, torch.zeros(4))
    assert int(net.norm.num_batches_tracked) == 0


def test_an_earlier_forward_can_still_go_backward():
    net = make()
    value = net(IMAGES).square().sum()
    with frozen(net, training=True):
        net(IMAGES)
    value.backward()
    assert net.conv.weight.grad is not None


def test_a_shared_buffer_stays_shared():
    first, second = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    second.running_mean = first.running_mean
    net = nn.Sequential(first, second)
    with frozen(net, training=True):
        assert first.running_mean is second.running_mean
    assert first.running_mean is second.running_mean


def test_nesting():
    net = make()
    before = state(net)
    with frozen(net, training=True):
        with frozen(net):
            assert not net.training
        assert net.training and not net.conv.weight.requires_grad
    assert_same(net, before)


def test_restored_keeps_bits() -> None:
    tensors = [torch.randn(5), torch.arange(3)]
    before = [tensor.clone() for tensor in tensors]
    with restored(tensors):
        for tensor in tensors:
            tensor.mul_(3)
    assert all(torch.equal(one, other) for one, other in zip(tensors, before, strict=True))
