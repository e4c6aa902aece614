"""The networks that a recipe can name."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from generalist.core.registry import Registry

ModelFactory = Callable[..., nn.Module]
"""Called as `factory(num_classes=..., in_channels=..., **options)`; the model maps [0, 1] images to logits."""

MODELS: Registry[ModelFactory] = Registry("model")
