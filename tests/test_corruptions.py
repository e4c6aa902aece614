"""Common corruptions: the published strengths, the definitions written out again, and what every one of them keeps."""

from __future__ import annotations

from typing import Any

import corruption_definitions as definitions
import numpy as np
import pytest
import torch
from corruption_definitions import corrupted, pictures
from torch import Tensor, nn

from generalist.core.errors import DataError, GeneralistError
from generalist.data.corruptions import COMMON, CORRUPTIONS, EXTRA, SEQUENCES, corrupt, is_noise, perturb_sequence
from generalist.data.corruptions.registry import Draws
from generalist.data.corruptions.sequences import warp
from generalist.data.corruptions.weather import frost_texture

ALL = (*COMMON, *EXTRA)


# The published strengths

PUBLISHED: dict[str, tuple[list[Any], list[Any]]] = {
    "gaussian_noise": ([0.04, 0.06, 0.08, 0.09, 0.10], [0.08, 0.12, 0.18, 0.26, 0.38]),
    "shot_noise": ([500, 250, 100, 75, 50], [60, 25, 12, 5, 3]),
    "impulse_noise": ([0.01, 0.02, 0.03, 0.05, 0.07], [0.03, 0.06, 0.09, 0.17, 0.27]),
    "speckle_noise": ([0.06, 0.1, 0.12, 0.16, 0.2], [0.15, 0.2, 0.35, 0.45, 0.6]),
    "gaussian_blur": ([0.4, 0.6, 0.7, 0.8, 1], [1, 2, 3, 4, 6]),
    "brightness": ([0.05, 0.1, 0.15, 0.2, 0.3], [0.1, 0.2, 0.3, 0.4, 0.5]),
    "contrast": ([0.75, 0.5, 0.4, 0.3, 0.15], [0.4, 0.3, 0.2, 0.1, 0.05]),
    "pixelate": ([0.95, 0.9, 0.85, 0.75, 0.65], [0.6, 0.5, 0.4, 0.3, 0.25]),
    "jpeg_compression": ([80, 65, 58, 50, 40], [25, 18, 15, 10, 7]),
    # Of those with several numbers: the first at each severity.
    "defocus_blur": ([0.3, 0.4, 0.5, 1, 1.5], [3, 4, 6, 8, 10]),
    "glass_blur": ([0.05, 0.25, 0.4, 0.25, 0.4], [0.7, 0.9, 1, 1.1, 1.5]),
    "motion_blur": ([6, 6, 6, 8, 9], [10, 15, 15, 15, 20]),
    "zoom_blur": ([1.06, 1.11, 1.16, 1.21, 1.26], [1.11, 1.16, 1.21, 1.26, 1.31]),
    "snow": ([0.1, 0.1, 0.15, 0.25, 0.3], [0.1, 0.2, 0.55, 0.55, 0.55]),
    "frost": ([1, 1, 0.9, 0.85, 0.75], [1, 0.8, 0.7, 0.65, 0.6]),
    "fog": ([0.2, 0.5, 0.75, 1, 1.5], [1.5, 2, 2.5, 2.5, 3]),
    "elastic_transform": ([0, 1.6, 2.56, 3.2, 3.2], [488, 488, 12.2, 17.08, 29.28]),
    "spatter": ([0.62, 0.65, 0.65, 0.65, 0.65], [0.65, 0.65, 0.65, 0.65, 0.67]),
    "saturate": ([0.3, 0.1, 1.5, 2, 2.5], [0.3, 0.1, 2, 5, 20]),
}
WHOLE = [  # (name, severity, side, the whole strength)
    ("defocus_blur", 4, 32, (1, 0.2)),
    ("defocus_blur", 1, 224, (3, 0.1)),
    ("glass_blur", 5, 32, (0.4, 1, 2)),
    ("glass_blur", 3, 224, (1, 2, 3)),
    ("motion_blur", 5, 32, (9, 2.5)),
    ("motion_blur", 5, 224, (20, 15)),
    ("zoom_blur", 5, 32, (1.26, 0.01)),
    ("zoom_blur", 5, 224, (1.31, 0.03)),
    ("snow", 5, 32, (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8)),
    ("snow", 5, 224, (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55)),
    ("frost", 5, 32, (0.75, 0.45)),
    ("frost", 2, 224, (0.8, 0.6)),
    ("fog", 5, 32, (1.5, 1.75)),
    ("fog", 5, 224, (3, 1.4)),
    ("elastic_transform", 2, 32, (1.6, 6.4, 2.24)),
    ("elastic_transform", 2, 224, (488, 19.52, 48.8)),
    ("spatter", 3, 32, (0.65, 0.3, 1, 0.69, 0.5, 0)),
    ("spatter", 5, 224, (0.67, 0.4, 1, 0.65, 1.5, 1)),
    ("saturate", 5, 32, (2.5, 0.2)),
    ("saturate", 5, 224, (20, 0.2)),
]


def test_fifteen_common_and_four_extra() -> None:
    assert len(COMMON) == 15 and len(EXTRA) == 4
    assert sorted(ALL) == CORRUPTIONS.names() == sorted(PUBLISHED) == sorted([*definitions.DEFINITIONS, "frost"])
    assert [name for name in ALL if CORRUPTIONS.get(name).extra] == list(EXTRA)


@pytest.mark.parametrize("name", ALL)
def test_strengths_are_the_published_ones(name: str) -> None:
    small, large = PUBLISHED[name]
    chosen = CORRUPTIONS.get(name)
    for side, values in ((32, small), (224, large)):
        assert [chosen.strength(severity, side, side)[0] for severity in range(1, 6)] == values


@pytest.mark.parametrize(("name", "severity", "side", "values"), WHOLE)
def test_whole_strengths(name: str, severity: int, side: int, values: tuple[float, ...]) -> None:
    assert CORRUPTIONS.get(name).strength(severity, side, side) == values


# The definitions

SIZES = {"small": (40, 32), "large": (72, 80)}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", definitions.DEFINITIONS)
def test_against_the_definition(name: str, size: str) -> None:
    height, width = SIZES[size]
    x = pictures(3, height, width)
    for severity in range(1, 6):
        chosen = CORRUPTIONS.get(name)
        strength = chosen.small[severity - 1] if size == "small" else chosen.large[severity - 1]
        draws = Draws(seed=7, purpose=f"corruption/{name}/{severity}", index=torch.tensor([2]))
        image = x[2].permute(1, 2, 0).double().numpy().copy()
        expected = definitions.down(definitions.DEFINITIONS[name](image, strength, draws))
        found = (corrupted(x, name, severity, seed=7)[2] * 255).permute(1, 2, 0).numpy()
        apart = np.abs(found - expected)
        assert apart.max() < 1.01, f"severity {severity}"  # rounding may move a value to the next of 256 levels
        assert (apart > 0.01).mean() < 0.01, f"severity {severity}"


@pytest.mark.parametrize(("side", "strengths"), [(32, "small"), (96, "large")])
def test_frost_lays_a_texture_over_the_image(side: int, strengths: str) -> None:
    x = pictures(4, side, side)
    for severity in range(1, 6):
        image, ice = getattr(CORRUPTIONS.get("frost"), strengths)[severity - 1]
        draws = Draws(seed=0, purpose=f"corruption/frost/{severity}", index=torch.arange(4))
        texture = frost_texture(x, draws)
        assert float(texture.min()) >= 0 and float(texture.max()) <= 1
        assert all(0.2 < mean < 0.7 for mean in texture.mean((1, 2, 3)).tolist())
        assert (texture.std((1, 2, 3)) > 0.05).all()
        expected = (image * x + ice * texture).clamp(0, 1) * 255
        assert ((corrupted(x, "frost", severity) * 255 - expected).abs() < 1.01).all()


def test_water_where_there_is_no_drop_is_the_image() -> None:
    x = torch.full((1, 3, 32, 32), 0.5)
    found = corrupted(x, "spatter", 1)
    assert (found == (0.5 * 255 + 0.5) // 1 / 255).float().mean() > 0.5
    assert (found >= 0.5 - 1 / 255).all()


MONOTONE = {
    "small": [
        "gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise", "defocus_blur", "gaussian_blur", "zoom_blur",
        "snow", "fog", "brightness", "contrast", "jpeg_compression",
    ],
    "large": [
        "gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise", "defocus_blur", "gaussian_blur", "zoom_blur",
        "brightness", "contrast", "pixelate", "jpeg_compression", "motion_blur",
    ],
}  # fmt: skip


@pytest.mark.parametrize("size", MONOTONE)
@pytest.mark.parametrize("name", ALL)
def test_damage_grows_with_severity(name: str, size: str) -> None:
    """The mean squared error grows at every step where the published strengths make it; elsewhere there is damage.

    Glass blur alternates sigma and passes, saturate fades before it saturates, elastic deformation trades the affine
    map for local waves, frost darkens what it whitens: their order is by the effect on classifiers.
    """
    side = 32 if size == "small" else 72
    x = pictures(24 if size == "small" else 6, side, side)
    errors = [float((corrupted(x, name, severity) - x).square().mean()) for severity in range(1, 6)]
    assert min(errors) > 1e-6
    if name in MONOTONE[size]:
        assert errors == sorted(errors) and errors[0] < 0.9 * errors[-1]


# What every corruption keeps


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", ALL)
def test_range_type_and_batch_split(name: str, channels: int) -> None:
    if name == "saturate" and channels == 1:
        with pytest.raises(DataError, match="leave it out"):
            corrupted(pictures(1, channels=1), name, 1)
        return
    x = pictures(5, channels=channels)
    before = x.clone()
    for severity in (1, 3, 5):
        whole = corrupted(x, name, severity)
        assert torch.equal(x, before)
        assert whole.dtype == torch.float32 and whole.shape == x.shape
        assert float(whole.min()) >= 0 and float(whole.max()) <= 1
        assert torch.allclose(whole * 255, (whole * 255).round(), atol=1e-4)
        order = torch.tensor([3, 0, 4])
        again = corrupt(x[order], name=name, severity=severity, index=order, seed=0)
        assert torch.equal(again, whole[order])


@pytest.mark.parametrize("name", ALL)
def test_tiny_images(name: str) -> None:
    x = pictures(2, 8, 8)
    assert corrupted(x, name, 5).shape == x.shape
    assert float((corrupted(x, name, 5) - x).abs().max()) > 0


@pytest.mark.parametrize("name", ["gaussian_noise", "glass_blur", "snow", "fog", "elastic_transform", "motion_blur"])
def test_draws_belong_to_seed_sample_and_severity(name: str) -> None:
    x = pictures(1).expand(2, -1, -1, -1)
    found = corrupted(x, name, 3)
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found, corrupted(x, name, 3, seed=1))
    assert torch.equal(found, corrupted(x, name, 3))


@pytest.mark.parametrize(
    ("images", "changes", "message"),
    [
        (torch.rand(2, 3, 32, 32) + 1, {}, "divide by 255"),
        (torch.full((2, 3, 32, 32), float("nan")), {}, "nan"),
        (torch.zeros(2, 3, 32, 32, dtype=torch.uint8), {}, "floats"),
        (torch.zeros(2, 2, 32, 32), {}, "1 or 3 channels"),
        (torch.zeros(2, 3, 4, 32), {}, "8 x 8"),
        (torch.zeros(3, 32, 32), {}, "shape"),
        (torch.zeros(0, 3, 32, 32), {"index": torch.arange(0)}, "shape"),
        (torch.zeros(2, 3, 32, 32), {"severity": 0}, "1 to 5"),
        (torch.zeros(2, 3, 32, 32), {"severity": 6}, "1 to 5"),
        (torch.zeros(2, 3, 32, 32), {"severity": True}, "1 to 5"),
        (torch.zeros(2, 3, 32, 32), {"name": "gausian_noise"}, "did you mean 'gaussian_noise'"),
        (torch.zeros(2, 3, 32, 32), {"name": "os:system"}, "trust"),
        (torch.zeros(2, 3, 32, 32), {"index": torch.arange(3)}, "index"),
        (torch.zeros(2, 3, 32, 32), {"index": torch.zeros(2)}, "index"),
    ],
)
def test_wrong_input_is_told(images: Tensor, changes: dict[str, Any], message: str) -> None:
    arguments = {"name": "fog", "severity": 1, "index": torch.arange(2), "seed": 0} | changes
    with pytest.raises(GeneralistError, match=message):
        corrupt(images, **arguments)


def test_black_and_white_images_survive() -> None:
    for level in (0.0, 1.0):
        x = torch.full((1, 3, 32, 32), level)
        for name in ALL:
            assert corrupted(x, name, 5).isfinite().all(), name


# Sequences


@pytest.mark.parametrize("name", list(SEQUENCES))
def test_sequences(name: str) -> None:
    x = pictures(3)
    frames = perturb_sequence(x, name=name, index=torch.arange(3), seed=0)
    count = {"translate": 16, "motion_blur": 21}.get(name, 31)
    assert frames.shape == (3, count, 3, 32, 32) and frames.dtype == torch.float32
    assert float(frames.min()) >= 0 and float(frames.max()) <= 1
    assert torch.allclose(frames * 255, (frames * 255).round(), atol=1e-4)
    alone = perturb_sequence(x[1:2], name=name, index=torch.tensor([1]), seed=0)
    assert torch.equal(alone, frames[1:2])
    step = (frames[:, 1:] - frames[:, :-1]).square().mean()
    assert 0 < float(step) < 0.02
    if is_noise(name):
        assert torch.equal(frames[:, 0], x)


def test_middle_frames_are_the_image() -> None:
    x = pictures(2)
    for name, middle in (("translate", 7), ("rotate", 15), ("scale", 15), ("shear", 15), ("brightness", 15)):
        assert torch.equal(perturb_sequence(x, name=name, index=torch.arange(2), seed=0)[:, middle], x), name


@pytest.mark.parametrize(
    ("name", "frame"), [("spatter", 0), ("spatter", 6), ("tilt", 0), ("tilt", 22), ("motion_blur", 4)]
)
def test_frames_against_their_definitions(name: str, frame: int) -> None:
    x = pictures(1)
    found = perturb_sequence(x, name=name, index=torch.arange(1), seed=3)[0, frame].permute(1, 2, 0).numpy() * 255
    image = x[0].permute(1, 2, 0).double().numpy()
    draws = Draws(seed=3, purpose=f"sequence/{name}", index=torch.arange(1))
    made = {
        "spatter": lambda: definitions.running_drops(image, draws, frame),
        "tilt": lambda: definitions.turned_in_space(image, frame),
        "motion_blur": lambda: definitions.moved(image, 9 * (frame - 20), 6, 1.8),
    }
    apart = np.abs(found - definitions.down(made[name]()))
    assert apart.max() < 1.01 and (apart > 0.01).mean() < 0.01


def test_geometry_by_hand() -> None:
    x = pictures(1)
    moved = perturb_sequence(x, name="translate", index=torch.arange(1), seed=0)
    assert torch.equal(moved[0, 9, :, :, 2:], x[0, :, :, :-2])  # frame 9 lies two pixels to the right
    assert (moved[0, 9, :, :, :2] == 0).all()
    quarter = warp(x, np.array([[0.0, 1, 0], [-1, 0, 0], [0, 0, 1]]))
    assert torch.allclose(quarter, torch.rot90(x, -1, (2, 3)))
    half = warp(x, np.diag([2.0, 2.0, 1.0]))
    assert (half[..., :8, :] == 0).all() and torch.allclose(half[..., 8:24, 8:24], nn.functional.avg_pool2d(x, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ALL)
def test_the_gpu_draws_the_same(name: str) -> None:
    """Last bits of floats may differ between devices, and with them a few of the 8-bit levels by one."""
    x = pictures(4)
    for severity in (1, 5):
        there = corrupt(x.cuda(), name=name, severity=severity, index=torch.arange(4), seed=0)
        apart = (there.cpu() - corrupted(x, name, severity)).abs() * 255
        assert there.is_cuda and (apart > 0.01).float().mean() < 0.01
