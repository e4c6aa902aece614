"""Generalist: train image classifiers that are accurate and robust at once, and evaluate robustness honestly."""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

# Threads that wait for each other in PyTorch's loops spin for milliseconds. If two processes share the cores, each then
# burns the time that the other needs: measured 3 to 50 times slower on two cores, and 1.4 times with this.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from generalist._version import __version__

__all__ = ["GeneralistError", "__version__", "evaluate", "gradcam", "load", "mix", "train"]

if TYPE_CHECKING:
    from generalist.api import evaluate, load, mix, train
    from generalist.cam import gradcam
    from generalist.core.errors import GeneralistError
else:
    # Imported on first use: PyTorch takes seconds, and the command line's help works without it.
    _HOME = {"evaluate": "api", "gradcam": "cam", "load": "api", "mix": "api", "train": "api"}
    _HOME["GeneralistError"] = "core.errors"

    def __getattr__(name: str) -> Any:
        if name in ("dial", "export"):  # the documentation uses these names
            return import_module(f"{__name__}.{name}")
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
