"""Generalist: train image classifiers that are accurate and robust at once, and evaluate robustness honestly."""

from generalist._version import __version__
from generalist.api import evaluate, load, train

__all__ = ["__version__", "evaluate", "load", "train"]
