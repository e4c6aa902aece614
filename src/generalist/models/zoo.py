"""Networks of timm, if it is installed: `timm/NAME`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from torch import nn

from generalist.core.errors import GeneralistError

PREFIX = "timm/"


def timm_factory(name: str) -> Callable[..., nn.Module]:
    """The factory of the network with this name in timm, without the prefix."""
    timm = _import_timm()
    # The name must be in timm's own list, because timm would also follow a name to a repository on the internet.
    known = timm.list_models()
    if name not in known:
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {PREFIX + near[0]!r}?" if near else "timm.list_models() has the names"
        raise GeneralistError(f"timm has no model {name!r}; {hint}")

    def create(*, num_classes: int, in_channels: int, **options: Any) -> nn.Module:
        model: nn.Module = timm.create_model(name, num_classes=num_classes, in_chans=in_channels, **options)
        return model

    return create


def _import_timm() -> Any:
    try:
        return importlib.import_module("timm")
    except ImportError as error:
        raise GeneralistError(
            f"models named {PREFIX}NAME need timm: pip install 'generalist-at[zoo]' ({error})"
        ) from error
    except RuntimeError as error:
        # torchvision registers operators when timm imports it, which fails in a build for another torch.
        raise GeneralistError(
            "timm cannot be imported, most likely for a torchvision made for another torch: "
            f"install matching ones with pip install 'generalist-at[zoo]' ({error})"
        ) from error
