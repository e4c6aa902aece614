"""Directions of gradients, for the objectives that combine or follow them."""

from __future__ import annotations

import torch
from torch import Tensor


def unit(values: Tensor) -> Tensor:
    """The tensor over its Euclidean norm, whatever its shape; zeros stay zeros.

    Scaled by the largest entry first: the squares of tiny and of huge gradients stay in range.
    """
    largest = values.abs().amax()
    scaled = torch.where(largest > 0, values / largest, 0)
    length: Tensor = torch.linalg.vector_norm(scaled)
    return scaled / length.clamp_min(1)  # an entry of 1 makes it at least 1, so the bound acts on zeros alone
