"""The kernel of FAB's projections against the sort: on a GPU, and through Triton's interpreter on any machine.

On a GPU: `pytest -m gpu tests/test_triton_level.py`. Without one, where triton is installed:
`TRITON_INTERPRET=1 pytest tests/test_triton_level.py`.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from torch import Tensor

from generalist.attacks.projections import _level, step_to_plane
from generalist.attacks.threats import L2, Linf, Threat

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None

PLACES = [
    pytest.param("cuda", marks=pytest.mark.gpu),
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="needs triton and TRITON_INTERPRET=1")),
]


def problem(kind: str, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Weights [7, d], caps [2, 7, d] and gaps [2, 7, 1], from easy to hopeless."""
    generator = torch.Generator().manual_seed(columns)
    weights = torch.rand(7, columns, generator=generator)
    caps = torch.rand(2, 7, columns, generator=generator)
    gap = 0.3 * columns * torch.rand(2, 7, 1, generator=generator, dtype=torch.float64)
    if kind == "weights of 0":
        weights = weights * (weights > 0.5)
    if kind == "caps of 0":
        caps = caps * (caps > 0.5)
    if kind == "sizes apart":
        weights, caps = weights**20, caps**20
    scale = {"out of reach": 100.0, "nothing to do": 0.0, "without end": torch.inf}.get(kind, 1.0)
    return weights * (kind != "no weights"), caps, gap * scale


KINDS = [
    "easy",
    "weights of 0",
    "caps of 0",
    "sizes apart",
    "out of reach",
    "nothing to do",
    "without end",
    "no weights",
]


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("columns", [1, 5, 64, 300, 3072])
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_finds_the_level_that_the_sort_finds(kind: str, columns: int, device: str) -> None:
    from generalist.tensors.triton_level import level

    weights, caps, gap = problem(kind, columns)
    found = level(weights.to(device), caps.to(device), gap.to(device))
    torch.testing.assert_close(found.cpu(), _level(weights, caps, gap), rtol=1e-11, atol=1e-15)


@pytest.mark.gpu
@pytest.mark.parametrize("threat", [Linf(0.1), L2(1.0)], ids=str)
@pytest.mark.parametrize("columns", [64, 3072, 20_000])
def test_steps_to_a_plane_are_those_of_the_cpu(columns: int, threat: Threat) -> None:
    generator = torch.Generator().manual_seed(0)
    points = torch.rand(2, 5, columns, generator=generator)
    normal, value = torch.randn(5, columns, generator=generator), torch.randn(2, 5, generator=generator)
    found = step_to_plane(threat, points.cuda(), normal.cuda(), value.cuda())
    torch.testing.assert_close(found.cpu(), step_to_plane(threat, points, normal, value), rtol=1e-5, atol=1e-7)
