"""Flat storage: views of one vector that behave exactly like the module they replace."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from training_helpers import TinyNet, reference_uniform

from generalist.core.errors import GeneralistError
from generalist.tensors.flat import Flat


class Tied(nn.Module):
    """Two layers that share their weights, and a BatchNorm layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(4)
        self.again = self.norm

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.again(self.second(torch.relu(self.norm(self.first(x)))))
        return out


def network(*, channels_last: bool = False) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = nn.Sequential(
            nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 7, 1), nn.BatchNorm2d(7)
        ).double()
    return layers.to(memory_format=torch.channels_last) if channels_last else layers  # type: ignore[call-overload]


def images() -> Tensor:
    return torch.from_numpy(reference_uniform(0, "images", count=4 * 3 * 36)).reshape(4, 3, 6, 6)


def tensors_of(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *(b for b in module.buffers() if b.is_floating_point())]


@pytest.mark.parametrize("channels_last", [False, True])
def test_parameters_and_buffers_are_views_of_the_vector(channels_last: bool) -> None:
    module = network(channels_last=channels_last)
    flat = Flat(module)
    start, end = flat.vector.data_ptr(), flat.vector.data_ptr() + 8 * flat.size
    for tensor in tensors_of(module):
        assert start <= tensor.data_ptr() < end
    for parameter in module.parameters():
        assert parameter.data_ptr() < start + 8 * flat.parameter_size
    flat.vector.fill_(0.25)
    assert all(bool((tensor == 0.25).all()) for tensor in tensors_of(module))
    with torch.no_grad():
        module[0].bias.fill_(7)  # type: ignore[index, operator, union-attr]
    assert int((flat.parameters == 7).sum()) == 5
    flat.counters.fill_(9)
    assert [int(module[i].num_batches_tracked) for i in (1, 4)] == [9, 9]  # type: ignore[index, arg-type]


def test_no_two_tensors_overlap() -> None:
    module = network()
    flat = Flat(module)
    flat.vector.zero_()
    for tensor in tensors_of(module):
        tensor.data.add_(1)
    assert flat.vector.unique().tolist() == [0, 1]
    assert int(flat.vector.sum()) == sum(tensor.numel() for tensor in tensors_of(module))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tensors_lie_at_multiples_of_128_bytes(dtype: torch.dtype) -> None:
    flat = Flat(network().to(dtype))
    element = flat.vector.element_size()
    for slot in flat.slots:
        assert slot.offset * element % 128 == 0
        assert (slot.view(flat.vector).data_ptr() - flat.vector.data_ptr()) % 128 == 0
    assert flat.parameter_size * element % 128 == 0


def _layout(tensor: Tensor) -> tuple[bool, bool]:
    return tensor.is_contiguous(), tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("channels_last", [False, True])
def test_memory_layout_is_kept(channels_last: bool) -> None:
    module = network(channels_last=channels_last)
    before = [_layout(tensor) for tensor in tensors_of(module)]
    Flat(module)
    assert [_layout(tensor) for tensor in tensors_of(module)] == before
    assert (not module[0].weight.is_contiguous()) == channels_last  # type: ignore[index, operator, union-attr]


@pytest.mark.parametrize("channels_last", [False, True])
def test_forward_and_backward_are_unchanged(channels_last: bool) -> None:
    plain = network(channels_last=channels_last)
    module = copy.deepcopy(plain)
    flat = Flat(module)
    gradients = []
    for net in (plain, module):
        net.train()
        out = net(images())
        gradients.append(torch.autograd.grad(out.square().sum(), list(net.parameters())))
    for theirs, ours in zip(*gradients, strict=True):
        assert torch.equal(theirs, ours)
    for theirs, ours in zip(plain.state_dict().values(), module.state_dict().values(), strict=True):
        assert torch.equal(theirs, ours)
    assert flat.counters.tolist() == [1, 1]
    gathered = torch.zeros_like(flat.parameters)
    flat.gather_gradients(list(gradients[1]), gathered)
    for slot, gradient in zip(flat.parameter_slots, gradients[0], strict=True):
        assert torch.equal(slot.view(gathered), gradient)


@pytest.mark.parametrize("channels_last", [False, True])
def test_state_dict_and_read_are_inverse(channels_last: bool) -> None:
    module = network(channels_last=channels_last)
    flat = Flat(module)
    module.train()
    module(images())
    state = flat.state_dict()
    assert state.keys() == module.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in module.state_dict().items())
    other = Flat(network(channels_last=not channels_last))
    vector, counters = other.read(state)
    other.load(vector, counters)
    for theirs, ours in zip(module.state_dict().values(), other.module.state_dict().values(), strict=True):
        assert torch.equal(theirs, ours)
    state["0.weight"].fill_(0)
    assert bool(flat.vector.any()), "a state dict is a copy"


def test_state_dict_of_another_vector() -> None:
    flat = Flat(network())
    doubled = flat.state_dict(2 * flat.vector, flat.counters + 3)
    for name, tensor in flat.module.state_dict().items():
        expected = tensor + 3 if name.endswith("num_batches_tracked") else 2 * tensor
        assert torch.equal(doubled[name], expected), name


def test_views_follow_the_vector_and_are_what_a_state_dict_copies() -> None:
    flat = Flat(Tied())
    vector, counters = 2 * flat.vector, flat.counters + 3
    views, copied = flat.views(vector, counters), flat.state_dict(vector, counters)
    assert list(views) == list(copied) == list(flat.module.state_dict())
    for name, view in views.items():
        assert torch.equal(view, copied[name]) and view.dtype == copied[name].dtype
    vector.add_(1)
    counters.add_(1)
    assert all(torch.equal(view, copied[name] + 1) for name, view in views.items()), "and the copies stay"


def test_read_converts_half_precision() -> None:
    flat = Flat(network())
    half = {name: t.half() if t.is_floating_point() else t for name, t in flat.state_dict().items()}
    vector, _ = flat.read(half)
    assert vector.dtype == torch.float64
    assert torch.equal(vector, flat.vector.half().double())


def test_tied_tensors_are_stored_once_and_saved_under_every_name() -> None:
    module = Tied()
    flat = Flat(module)
    assert module.first.weight is module.second.weight
    assert [slot.name for slot in flat.slots].count("second.weight") == 0
    saved = flat.state_dict(2 * flat.vector, flat.counters + 5)
    assert saved.keys() == module.state_dict().keys()
    assert torch.equal(saved["second.weight"], 2 * module.first.weight)
    assert torch.equal(saved["second.weight"], saved["first.weight"])
    assert int(saved["norm.num_batches_tracked"]) == int(saved["again.num_batches_tracked"]) == 5
    reader = Flat(Tied())
    reader.load(*reader.read(saved))
    assert torch.equal(reader.vector, 2 * flat.vector)
    assert reader.counters.tolist() == [5]


def test_weights_of_another_architecture_are_refused() -> None:
    flat = Flat(TinyNet(num_classes=3, in_channels=1))
    good = flat.state_dict()
    with pytest.raises(GeneralistError, match=r"missing tensor 'conv\.bias'"):
        flat.read({name: tensor for name, tensor in good.items() if name != "conv.bias"})
    with pytest.raises(GeneralistError, match="unexpected tensor 'more'"):
        flat.read({**good, "more": torch.zeros(1)})
    with pytest.raises(GeneralistError, match=r"'linear\.bias' has shape \(4,\), expected \(3,\)"):
        flat.read({**good, "linear.bias": torch.zeros(4)})
    with pytest.raises(GeneralistError, match="num_batches_tracked"):
        flat.read({**good, "norm.num_batches_tracked": torch.zeros(3, dtype=torch.int64)})
    for odd in (torch.complex64, torch.float8_e4m3fn):
        for name in ("linear.bias", "norm.num_batches_tracked"):
            with pytest.raises(GeneralistError, match=f"{name}' holds {odd}"):
                flat.read({**good, name: torch.zeros_like(good[name], dtype=torch.float32).to(odd)})
    assert all(torch.equal(tensor, good[name]) for name, tensor in flat.state_dict().items()), "reading changes nothing"


def test_mixed_dtypes_and_empty_modules_are_refused() -> None:
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(GeneralistError, match="mixes dtypes"):
        Flat(mixed)
    with pytest.raises(GeneralistError, match="no parameters"):
        Flat(nn.ReLU())
    with pytest.raises(GeneralistError, match="no parameters"):
        Flat(nn.BatchNorm1d(3, affine=False))


def with_table(*entries: int) -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2))
    module.register_buffer("table", torch.tensor(entries))
    return module


def test_weights_that_go_with_other_constants_are_those_of_another_network() -> None:
    flat, other = Flat(with_table(3, 1, 2)), with_table(1, 2, 3)
    flat.read(with_table(3, 1, 2).state_dict())
    for module in (other, with_table(3, 1, 2, 0)):
        with pytest.raises(GeneralistError, match="they belong to another 'table'"):
            flat.read(module.state_dict())
    flat.become(other.state_dict())
    assert flat.module.table.tolist() == [1, 2, 3]
    assert torch.equal(flat.module[0].weight, other[0].weight)  # type: ignore[index]
    with pytest.raises(GeneralistError, match="they belong to another 'table'"):
        flat.become(with_table(1, 2, 3, 4).state_dict())


def test_constants_stay_where_they_are() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    module.register_buffer("table", torch.tensor([3, 1, 2]))
    module.register_buffer("scale", torch.tensor([0.5]), persistent=False)
    flat = Flat(module)
    assert "table" not in {slot.name for slot in flat.slots}
    assert torch.equal(flat.state_dict(torch.zeros_like(flat.vector))["table"], torch.tensor([3, 1, 2]))
    assert "scale" not in flat.state_dict()
    assert flat.counters.shape == (0,)
