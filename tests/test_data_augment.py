"""Augmentation against a plain restatement for one sample at a time."""

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from generalist.core.errors import DataError
from generalist.core.random import integers
from generalist.data.augment import AugmentOptions, crop_and_flip, recolor
from generalist.data.sets import ImageSet, from_arrays

COUNT, HEIGHT, WIDTH = 24, 9, 7
STRONG = AugmentOptions(crop=0, shift=4, cutout=3, erase=0.5, color=1)


@pytest.fixture
def data() -> ImageSet:
    images = integers(256, 0, "test/images", shape=(COUNT, 3, HEIGHT, WIDTH)).to(torch.uint8)
    return from_arrays(images, torch.arange(COUNT) % 5)


def restated(image: Tensor, sample: int, *, epoch: int, seed: int, options: AugmentOptions) -> Tensor:
    """Other colours, a crop out of a zero-padded copy or a shifted piece, mirrored, with blank areas: one pixel at a
    time, from the definition."""

    def number(high: int, purpose: str, scale: int | None = None) -> int:
        drawn = int(integers(scale or high, seed, f"augment/{purpose}", torch.tensor([sample]), epoch))
        return drawn * high // scale if scale else drawn

    channels, height, width = image.shape
    if options.color:
        reach = round(1024 * options.color)
        factors = [1024 - reach + number(2 * reach + 1, name) for name in ("brightness", "contrast", "saturation")]
        image = recolored(image, *factors)
    pad = options.crop
    top, left = (number(2 * pad + 1, side) if pad else 0 for side in ("top", "left"))
    flip = bool(number(2, "flip")) if options.flip else False
    padded = torch.zeros(channels, height + 2 * pad, width + 2 * pad)
    padded[:, pad : pad + height, pad : pad + width] = image.double().div(255).float()
    out = padded[:, top : top + height, left : left + width].clone()
    if options.shift:
        lost = number(options.shift + 1, "shift")
        narrower = number(lost + 1, "shift-columns", scale=2**31)
        rows, columns = height - lost + narrower, width - narrower
        top, to_top = (number(lost - narrower + 1, f"shift-{name}", scale=2**31) for name in ("top", "to-top"))
        left, to_left = (number(narrower + 1, f"shift-{name}", scale=2**31) for name in ("left", "to-left"))
        piece = out[:, top : top + rows, left : left + columns].clone()
        out = torch.zeros_like(out)
        out[:, to_top : to_top + rows, to_left : to_left + columns] = piece
    out = out.flip(-1) if flip else out
    if options.cutout:
        row, column = (number(n, f"cutout-{s}") - options.cutout // 2 for n, s in ((height, "top"), (width, "left")))
        out[:, max(row, 0) : row + options.cutout, max(column, 0) : column + options.cutout] = 0
    if options.erase and number(2**24, "erase") < options.erase * 2**24:
        least_rows, least_columns = max(1, height // 8), max(1, width // 8)
        rows = least_rows + number(max(1, height * 5 // 8 - least_rows + 1), "erase-rows")
        columns = least_columns + number(max(1, width * 5 // 8 - least_columns + 1), "erase-columns")
        row = number(height - rows + 1, "erase-top", scale=2**31)
        column = number(width - columns + 1, "erase-left", scale=2**31)
        out[:, row : row + rows, column : column + columns] = 0
    return out


def recolored(image: Tensor, brightness: int, contrast: int, saturation: int) -> Tensor:
    """Bytes, by fractions: halves are rounded up."""

    def stretched(value: int, around: int, factor: int) -> int:
        return min(255, max(0, around + math.floor(Fraction((value - around) * factor, 1024) + Fraction(1, 2))))

    def grey(*channels: int) -> int:
        if len(channels) != 3:
            return sum(channels) // len(channels)
        red, green, blue = channels
        return math.floor(Fraction(77 * red + 150 * green + 29 * blue, 256) + Fraction(1, 2))

    pixels = [[stretched(value, 0, brightness) for value in pixel] for pixel in image.flatten(1).T.tolist()]
    mean = sum(grey(*pixel) for pixel in pixels) // len(pixels)
    pixels = [[stretched(value, mean, contrast) for value in pixel] for pixel in pixels]
    pixels = [[stretched(value, grey(*pixel), saturation) for value in pixel] for pixel in pixels]
    return torch.tensor(pixels, dtype=torch.uint8).T.reshape(image.shape)


@pytest.mark.parametrize(
    "options",
    [
        AugmentOptions(),
        AugmentOptions(crop=2, flip=False),
        AugmentOptions(crop=0, flip=True),
        AugmentOptions(crop=3, flip=True, cutout=4),
        AugmentOptions(crop=0, flip=False, cutout=3),
        AugmentOptions(crop=0, flip=False),
        AugmentOptions(crop=0, flip=False, shift=5),
        AugmentOptions(crop=0, flip=True, shift=6),
        AugmentOptions(crop=0, flip=False, erase=1),
        AugmentOptions(crop=1, flip=True, erase=0.6),
        AugmentOptions(crop=0, flip=False, color=0.5),
        STRONG,
    ],
)
def test_equals_the_restatement(data: ImageSet, options: AugmentOptions) -> None:
    batch = data.augmented(torch.arange(COUNT), epoch=3, seed=11, options=options)
    for sample in range(COUNT):
        expected = restated(data.images[sample], sample, epoch=3, seed=11, options=options)
        assert torch.equal(batch.x[sample], expected), sample


@pytest.mark.parametrize("shape", [(3, 32, 32), (2, 20, 33), (1, 8, 8), (1, 1, 6)])
def test_equals_the_restatement_for_images_of_any_shape(shape: tuple[int, int, int]) -> None:
    images = from_arrays(
        integers(256, 0, "test/images", shape=(COUNT, *shape)).to(torch.uint8), [0] * COUNT, layout="NCHW"
    )
    shift = min(shape[1:]) - 1
    options = AugmentOptions(crop=0, shift=shift, erase=0.7, color=0.4)
    batch = images.augmented(torch.arange(COUNT), epoch=2, seed=7, options=options)
    for sample in range(COUNT):
        expected = restated(images.images[sample], sample, epoch=2, seed=7, options=options)
        assert torch.equal(batch.x[sample], expected), sample


@pytest.mark.parametrize("options", [AugmentOptions(cutout=3), STRONG])
def test_same_for_any_batch_and_order(data: ImageSet, options: AugmentOptions) -> None:
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


@pytest.mark.parametrize("options", [AugmentOptions(crop=2), AugmentOptions(crop=0, shift=4)])
def test_a_mask_follows_its_sample(data: ImageSet, options: AugmentOptions) -> None:
    batch = data.augmented(torch.arange(COUNT), epoch=0, seed=0, options=options)
    mask = data.batch(torch.arange(COUNT)).x > 0.5
    assert torch.equal(crop_and_flip(mask, batch.augmentation, padding=options.crop), batch.x > 0.5)


def test_a_shift_shows_pieces_of_every_size_and_a_rectangle_is_as_frequent_as_asked(data: ImageSet) -> None:
    options = AugmentOptions(crop=0, flip=False, shift=3, erase=0.25)
    drawn = [data.augmented(torch.arange(COUNT), epoch=e, seed=0, options=options).augmentation for e in range(40)]
    lost, places = (
        torch.stack([torch.cat([d[f"{what}_{side}"] for d in drawn]) for side in ("top", "left")])
        for what in ("lost", "to")
    )
    assert {tuple(pair) for pair in lost.T.tolist()} == {(a, b) for a in range(4) for b in range(4) if a + b <= 3}
    assert (places >= 0).all() and (places <= lost).all()
    assert {tuple(pair) for pair in zip(lost[0].tolist(), places[0].tolist(), strict=True)} >= {(3, 0), (3, 3), (1, 1)}
    assert 0.2 < (torch.cat([d["erase_rows"] for d in drawn]) > 0).float().mean() < 0.3


def test_grey_images_have_no_saturation_and_floats_become_bytes() -> None:
    images = integers(256, 0, "test/images", shape=(COUNT, 1, HEIGHT, WIDTH)).to(torch.uint8)
    options = AugmentOptions(crop=0, flip=False, color=0.5)
    grey, index = from_arrays(images, torch.arange(COUNT) % 5), torch.arange(COUNT)
    bytes_ = grey.augmented(index, epoch=0, seed=0, options=options)
    off = 0.4 * (-1) ** torch.arange(WIDTH)  # to the nearest byte, from above and from below
    floats = from_arrays(((images.float() + off) / 255).clamp(0, 1), torch.arange(COUNT) % 5)
    assert torch.equal(floats.augmented(index, epoch=0, seed=0, options=options).x, bytes_.x)
    unsaturated = bytes_.augmentation | {"saturation": torch.full((COUNT,), 1024)}
    assert torch.equal(recolor(images, unsaturated), recolor(images, bytes_.augmentation))
    assert not torch.equal(recolor(images, unsaturated), images)


def test_refuses_to_lose_the_image(data: ImageSet) -> None:
    for wrong in ({"crop": WIDTH}, {"crop": 0, "cutout": WIDTH}, {"crop": 0, "shift": WIDTH}):
        options = AugmentOptions(**wrong)
        with pytest.raises(DataError, match=f"below {WIDTH}"):
            data.augmented(torch.arange(2), epoch=0, seed=0, options=options)


@pytest.mark.parametrize(
    "wrong",
    [
        {"crop": -1},
        {"cutout": -1},
        {"crop": 1.5},
        {"shift": 3},
        {"crop": 0, "shift": -1},
        {"erase": 1.5},
        {"color": -0.1},
        {"scale": [0.5, 0.2]},
        {"scale": [0.5]},
        {"ratio": [0, 1]},
        {"x": 1},
    ],
)
def test_option_refusals(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        AugmentOptions(**wrong)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("options", [AugmentOptions(cutout=3), STRONG])
def test_same_on_a_gpu(data: ImageSet, options: AugmentOptions) -> None:
    index = torch.arange(COUNT)
    here = data.augmented(index, epoch=1, seed=5, options=options)
    there = data.to("cuda").augmented(index.cuda(), epoch=1, seed=5, options=options)
    assert torch.equal(here.x, there.x.cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("options", [AugmentOptions(cutout=3), STRONG])
def test_can_be_replayed_in_a_graph(data: ImageSet, options: AugmentOptions) -> None:
    resident = data.to("cuda")
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
