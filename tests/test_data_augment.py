"""Augmentation against a plain restatement for one sample at a time."""

import pytest
import torch
from torch import Tensor

from generalist.core.errors import DataError
from generalist.core.random import integers
from generalist.data.augment import AugmentOptions, crop_and_flip
from generalist.data.sets import ImageSet, from_arrays

COUNT, HEIGHT, WIDTH = 24, 9, 7


@pytest.fixture
def data() -> ImageSet:
    images = integers(256, 0, "test/images", shape=(COUNT, 3, HEIGHT, WIDTH)).to(torch.uint8)
    return from_arrays(images, torch.arange(COUNT) % 5)


def restated(image: Tensor, sample: int, *, epoch: int, seed: int, options: AugmentOptions) -> Tensor:
    """Crop out of a zero-padded copy, mirror, blank a square: one pixel at a time, from the definition."""

    def number(high: int, purpose: str) -> int:
        return int(integers(high, seed, f"augment/{purpose}", torch.tensor([sample]), epoch))

    pad = options.crop
    top, left = (number(2 * pad + 1, side) if pad else 0 for side in ("top", "left"))
    flip = bool(number(2, "flip")) if options.flip else False
    out = torch.zeros(3, HEIGHT, WIDTH)
    for row in range(HEIGHT):
        for column in range(WIDTH):
            source_row = row + top - pad
            source_column = (WIDTH - 1 - column if flip else column) + left - pad
            if 0 <= source_row < HEIGHT and 0 <= source_column < WIDTH:
                out[:, row, column] = image[:, source_row, source_column].double().div(255).float()
    if options.cutout:
        centre_row, centre_column = number(HEIGHT, "cutout-top"), number(WIDTH, "cutout-left")
        for row in range(centre_row - options.cutout // 2, centre_row - options.cutout // 2 + options.cutout):
            for column in range(
                centre_column - options.cutout // 2, centre_column - options.cutout // 2 + options.cutout
            ):
                if 0 <= row < HEIGHT and 0 <= column < WIDTH:
                    out[:, row, column] = 0
    return out


@pytest.mark.parametrize(
    "options",
    [
        AugmentOptions(),
        AugmentOptions(crop=2, flip=False),
        AugmentOptions(crop=0, flip=True),
        AugmentOptions(crop=3, flip=True, cutout=4),
        AugmentOptions(crop=0, flip=False, cutout=3),
        AugmentOptions(crop=0, flip=False),
    ],
)
def test_equals_the_restatement(data: ImageSet, options: AugmentOptions) -> None:
    batch = data.augmented(torch.arange(COUNT), epoch=3, seed=11, options=options)
    for sample in range(COUNT):
        expected = restated(data.images[sample], sample, epoch=3, seed=11, options=options)
        assert torch.equal(batch.x[sample], expected), sample


def test_same_for_any_batch_and_order(data: ImageSet) -> None:
    options = AugmentOptions(cutout=3)
    whole = data.augmented(torch.arange(COUNT), epoch=1, seed=5, options=options)
    shuffled = torch.arange(COUNT).flip(0)[torch.arange(COUNT) * 5 % COUNT]
    for part in shuffled.split(7):
        batch = data.augmented(part, epoch=1, seed=5, options=options)
        assert torch.equal(batch.x, whole.x[part])
        assert torch.equal(batch.y, data.labels[part])
        for key, value in batch.augmentation.items():
            assert torch.equal(value, whole.augmentation[key][part]), key


def test_epoch_may_be_a_tensor_and_matters(data: ImageSet) -> None:
    index, options = torch.arange(COUNT), AugmentOptions()
    one = data.augmented(index, epoch=7, seed=5, options=options)
    assert torch.equal(one.x, data.augmented(index, epoch=torch.tensor(7), seed=5, options=options).x)
    assert not torch.equal(one.x, data.augmented(index, epoch=8, seed=5, options=options).x)
    assert not torch.equal(one.x, data.augmented(index, epoch=7, seed=6, options=options).x)


def test_every_corner_and_both_flips_are_drawn(data: ImageSet) -> None:
    drawn = data.augmented(torch.arange(COUNT).repeat(1), epoch=0, seed=0, options=AugmentOptions(crop=2)).augmentation
    several = [
        data.augmented(torch.arange(COUNT), epoch=e, seed=0, options=AugmentOptions(crop=2)).augmentation
        for e in range(20)
    ]
    assert set(torch.cat([d["top"] for d in several]).tolist()) == {0, 1, 2, 3, 4}
    assert set(torch.cat([d["left"] for d in several]).tolist()) == {0, 1, 2, 3, 4}
    share = torch.cat([d["flip"] for d in several]).float().mean()
    assert 0.4 < share < 0.6
    assert drawn["flip"].dtype == torch.bool


def test_a_mask_follows_its_sample(data: ImageSet) -> None:
    options = AugmentOptions(crop=2)
    batch = data.augmented(torch.arange(COUNT), epoch=0, seed=0, options=options)
    mask = data.batch(torch.arange(COUNT)).x > 0.5
    assert torch.equal(crop_and_flip(mask, batch.augmentation, padding=2), batch.x > 0.5)


def test_refuses_to_lose_the_image(data: ImageSet) -> None:
    for options in (AugmentOptions(crop=WIDTH), AugmentOptions(crop=0, cutout=WIDTH)):
        with pytest.raises(DataError, match=f"below {WIDTH}"):
            data.augmented(torch.arange(2), epoch=0, seed=0, options=options)


@pytest.mark.parametrize(
    "wrong",
    [{"crop": -1}, {"cutout": -1}, {"crop": 1.5}, {"scale": [0.5, 0.2]}, {"scale": [0.5]}, {"ratio": [0, 1]}, {"x": 1}],
)
def test_option_refusals(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        AugmentOptions(**wrong)  # type: ignore[arg-type]


@pytest.mark.gpu
def test_same_on_a_gpu(data: ImageSet) -> None:
    options = AugmentOptions(cutout=3)
    index = torch.arange(COUNT)
    here = data.augmented(index, epoch=1, seed=5, options=options)
    there = data.to("cuda").augmented(index.cuda(), epoch=1, seed=5, options=options)
    assert torch.equal(here.x, there.x.cpu())


@pytest.mark.gpu
def test_can_be_replayed_in_a_graph(data: ImageSet) -> None:
    resident, options = data.to("cuda"), AugmentOptions(cutout=3)
    index, epoch = torch.arange(COUNT, device="cuda"), torch.tensor(0, device="cuda")
    resident.augmented(index, epoch=epoch, seed=5, options=options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch = resident.augmented(index, epoch=epoch, seed=5, options=options)
    epoch.fill_(4)
    graph.replay()
    expected = data.augmented(torch.arange(COUNT), epoch=4, seed=5, options=options)
    assert torch.equal(batch.x.cpu(), expected.x)
