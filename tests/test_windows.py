"""Answers around windows: the boxes against what a network's values really change in, and the kernels against whole
images, bit by bit.

On a GPU: `pytest -m gpu tests/test_windows.py`. Without one: `TRITON_INTERPRET=1 pytest tests/test_windows.py`, where
triton is installed; that takes five minutes.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from test_fused import (
    Net,
    disturbed,
    images,
    late_stride,
    registered,
    residual_blocks,
    shortcut,
    side_and_residual,
)
from torch import Tensor

from generalist.attacks.square import Square, SquareFound
from generalist.attacks.threats import L2, Linf, Threat
from generalist.data.sets import Batch
from generalist.models.resnet import basic_block, cifar_stem, resnet
from generalist.tensors import fused
from generalist.tensors.capture import Recorder
from generalist.tensors.fused import FusedNetwork, fuse
from generalist.tensors.windows import MOST, Windows, boxed_values, boxes

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
interpreter = pytest.mark.skipif(not INTERPRETED, reason="needs triton and TRITON_INTERPRET=1")

# -- boxes ------------------------------------------------------------------------------------------------------------


def strides_in_a_row(net: Any, x: Tensor) -> Tensor:
    return net.down_2(net.relu(net.down(net.stem(x))))  # type: ignore[no-any-return]


BODIES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "residuals": residual_blocks,
    "shortcut": shortcut,
    "side-and-residual": side_and_residual,
    "stride-on-the-second": late_stride,
    "strides-in-a-row": strides_in_a_row,
}


@pytest.mark.parametrize("side", [1, 2, 3, 6])
@pytest.mark.parametrize("size", [(8, 8), (9, 7), (12, 10)], ids=str)
@pytest.mark.parametrize("case", BODIES)
def test_boxes_hold_all_that_changes_and_little_more(case: str, size: tuple[int, int], side: int) -> None:
    height, width = size
    torch.manual_seed(0)  # in some networks a change of one pixel is lost on its way
    network = fuse(disturbed(Net(BODIES[case])), torch.float64, shape=(3, height, width), triton=False)
    found = boxes(network.plan.steps, network.shapes, side)
    x = torch.rand(4, 3, height, width, dtype=torch.float64)
    before = network.values(x)
    most = [(0, 0) for _ in found]
    for top in range(height - side + 1):
        for left in range(width - side + 1):
            moved = x.clone()
            moved[:, :, top : top + side, left : left + side] += torch.randn(4, 3, side, side)
            for i, (old, new) in enumerate(zip(before[1:], network.values(moved)[1:], strict=True)):
                box = found[i]
                assert old.shape[1:] == box.shape
                rows, columns = ((new - old).abs().amax((0, 1)) > 1e-9).nonzero().T
                assert len(rows) > 0
                first = (box.tops[top], box.lefts[left])
                assert min(first) >= 0
                assert first[0] + box.height <= box.shape[1] and first[1] + box.width <= box.shape[2]
                assert int(rows.min()) >= first[0] and int(rows.max()) < first[0] + box.height
                assert int(columns.min()) >= first[1] and int(columns.max()) < first[1] + box.width
                extent = int(rows.max() - rows.min()) + 1, int(columns.max() - columns.min()) + 1
                most[i] = max(most[i][0], extent[0]), max(most[i][1], extent[1])
    assert most == [(box.height, box.width) for box in found]


@pytest.mark.parametrize(
    ("side", "sizes"),
    [
        (1, [3, 5, 7, 9, 11, 7, 9, 11]),
        (3, [5, 7, 9, 11, 13, 8, 10, 12]),
        (10, [12, 14, 16, 18, 20, 11]),
        (14, [16, 18, 20, 22, 24]),
        (20, [22, 24]),
        (29, []),
    ],
)
def test_boxes_of_a_resnet18(side: int, sizes: list[int]) -> None:
    network = fuse(registered("resnet18"), torch.float64, shape=(3, 32, 32), triton=False)
    found = boxed_values(network.plan.steps, network.shapes, side)
    assert [box.height for box in found] == [box.width for box in found] == sizes
    assert all(box.share <= MOST for box in found)


def test_the_last_value_is_whole() -> None:
    network = fuse(disturbed(Net(residual_blocks)), torch.float64, shape=(3, 32, 32), triton=False)
    assert len(boxes(network.plan.steps, network.shapes, 1)) == 3
    assert len(boxed_values(network.plan.steps, network.shapes, 1)) == 2


def test_plain_networks_have_no_windows() -> None:
    network = fuse(disturbed(Net(residual_blocks)), torch.float64, shape=(3, 32, 32), triton=False)
    assert network.windows(images(2, 32), 1) is None


# -- kernels ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where a network runs, in which type, on how many images, and with windows of which sides."""

    device: str
    dtype: torch.dtype
    batch: int
    size: int

    def network(self) -> FusedNetwork:
        """A ResNet-18, or for the interpreter its first half."""
        if self.device == "cuda":
            model = registered("resnet18", torch.float32)
        else:
            torch.manual_seed(0)
            model = disturbed(resnet(cifar_stem(3), basic_block, [1, 2], channels=64, num_classes=5), torch.float32)
        found = fuse(model.to(self.device), self.dtype, shape=(3, self.size, self.size), triton=True)
        assert found.row_by_row
        return found

    def images(self) -> Tensor:
        return images(self.batch, self.size, torch.float32).to(self.device)

    def corners(self, side: int) -> tuple[Tensor, Tensor]:
        """Top and left [1,B]: those of the image's own corners first, then any."""
        torch.manual_seed(side)
        end = self.size - side
        top, left = torch.randint(end + 1, (2, self.batch))
        top[:3], left[:3] = torch.tensor([0, end, 0]), torch.tensor([0, end, end])
        return top.unsqueeze(0).to(self.device), left.unsqueeze(0).to(self.device)


def proposal(x: Tensor, top: Tensor, left: Tensor, side: int, seed: int) -> Tensor:
    """Each image with a window at its own place painted anew."""
    torch.manual_seed(seed)
    new = x.clone()
    for image, row, column in zip(new, top[0].tolist(), left[0].tolist(), strict=True):
        image[:, row : row + side, column : column + side] = torch.rand(3, side, side).to(x)
    return new


ON_GPU = [
    pytest.param((Place("cuda", dtype, batch, 32), side), marks=pytest.mark.gpu, id=f"gpu-{name}-{batch}-{side}")
    for dtype, name in ((torch.float16, "float16"), (torch.bfloat16, "bfloat16"))
    for batch, side in ((37, 1), (37, 3), (37, 5), (37, 10), (37, 14), (416, 4))
]
ON_GPU += [
    pytest.param((Place("cuda", torch.float16, 37, size), 3), marks=pytest.mark.gpu, id=f"gpu-images-of-{size}")
    for size in (28, 33)  # odd numbers of rows in the last stage, or from the first on
]
CASES = ON_GPU + [
    # Boxes that go far into the second stage, beyond the step with a side; and whole images with a side that has boxes.
    pytest.param((Place("cpu", torch.float32, 3, size), side), marks=interpreter, id=f"interpreter-{size}-{side}")
    for size, side in ((20, 1), (20, 9), (19, 1), (19, 8))
]


def windows_of(network: FusedNetwork, x: Tensor, side: int) -> Windows:
    found = network.windows(x, side)
    assert found is not None and network.windows(x, side) is found
    return found


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_answers_and_what_is_kept_are_those_of_whole_images(case: tuple[Place, int]) -> None:
    place, side = case
    network, x = place.network(), place.images()
    windows = windows_of(network, x, side)
    memory = windows.fill(x)
    values = network.values(x)[1:]
    kept = windows.known(memory)
    assert len(kept) >= 3 and all(torch.equal(known, value) for known, value in zip(kept, values, strict=False))
    for turn in (0, 1):  # the second from what the first has left
        top, left = (corner.roll(turn, 1) for corner in place.corners(side))
        corners = windows.corners(top, left)[0]
        new = proposal(x, top, left, side, seed=turn)
        if turn == 1:
            new = new.contiguous(memory_format=torch.channels_last)
        proposed = network.values(new)[1:]
        found, expected = windows.logits(new, corners, memory), network.head.forward(proposed[-1])
        assert found.dtype == expected.dtype and torch.equal(found, expected)
        assert not torch.equal(found, network.head.forward(values[-1]))
        assert all(torch.equal(known, value) for known, value in zip(kept, values, strict=False))
        accepted = torch.arange(place.batch, device=place.device) % 2 == turn
        windows.keep(accepted, corners, memory)
        x = torch.where(accepted[:, None, None, None], new, x)
        before, values = (
            values,
            [torch.where(accepted[:, None, None, None], new, old) for new, old in zip(proposed, values, strict=True)],
        )
        for known, value, old in zip(kept, values, before, strict=False):
            assert torch.equal(known, value) and not torch.equal(value, old)


EPS = 4 / 255


def searched(network: Any, batch: Batch, queries: int, threat: Threat) -> SquareFound:
    round = torch.zeros_like(batch.y)
    return Square(queries=queries, rescaled=True).run_round(network, batch, round, threat=threat, seed=3)


SEARCHES = [
    pytest.param(Place("cuda", torch.float16, 37, 32), 200, marks=pytest.mark.gpu, id="gpu-float16"),
    pytest.param(Place("cuda", torch.bfloat16, 37, 32), 200, marks=pytest.mark.gpu, id="gpu-bfloat16"),
    pytest.param(Place("cuda", torch.float16, 416, 32), 60, marks=pytest.mark.gpu, id="gpu-float16-416"),
    pytest.param(Place("cpu", torch.float32, 3, 20), 7, marks=interpreter, id="interpreter"),
]


@pytest.mark.parametrize("recorded", [False, True], ids=["plain", "recorded"])
@pytest.mark.parametrize(("place", "queries"), SEARCHES)
def test_square_finds_the_same_around_windows(
    place: Place, queries: int, recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = place.network()
    if recorded:
        network.recorder = Recorder(torch.device(place.device))
    x = place.images()
    with torch.no_grad():
        y = network(x).argmax(1)
    y[1] = (y[1] + 1) % 5  # wrong as it is
    sides: set[int] = set()
    own = Windows.fill
    monkeypatch.setattr(Windows, "fill", lambda self, x: (sides.add(self.side), own(self, x))[1])
    for turn in range(2 if recorded else 1):  # other images on what is recorded by then
        index = torch.arange(place.batch, device=place.device) + 1000 * turn
        batch = Batch(x=x.roll(turn, 0).contiguous(memory_format=torch.channels_last), y=y.roll(turn, 0), index=index)
        found = searched(network, batch, queries, Linf(EPS))
        assert sides >= {1, 2, 3}
        plain = searched(lambda images: network(images), batch, queries, Linf(EPS))
        assert torch.equal(found.x, plain.x)
        assert torch.equal(found.broken, plain.broken) and torch.equal(found.queries, plain.queries)
        start = searched(network, batch, 1, Linf(EPS))
        searching = (found.x != start.x).flatten(1).any(1)
        assert int(searching.sum()) > place.batch // 4  # windows were accepted
        assert int((found.queries == queries).sum()) > 0  # and some images were hunted to the end


@pytest.mark.parametrize("place", [pytest.param(Place("cpu", torch.float32, 3, 20), marks=interpreter)])
def test_where_windows_do_not_fit_it_is_asked_about_whole_images(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    network, x = place.network(), place.images()
    assert network.windows(x, 3) is not None
    assert network.windows(x, 16) is None  # too few boxes are small
    assert network.windows(x[:, :, :16, :16], 3) is None
    monkeypatch.setattr(fused, "MOST_ELEMENTS", 2 * 20 * 20 * 64)
    assert network.windows(x[:2], 3) is None
    asked = []
    monkeypatch.setattr(Windows, "fill", lambda self, x: asked.append(x))
    batch = Batch(x=x[:2], y=network(x[:2]).argmax(1), index=torch.arange(2))
    assert searched(network, batch, 5, L2(0.1)).x.shape == (2, 3, 20, 20) and not asked
