"""Generalist: train image classifiers that are accurate and robust at once."""

from generalist._version import __version__

__all__ = ["__version__"]
