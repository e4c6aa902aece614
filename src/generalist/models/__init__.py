"""Networks by name. Inputs are images in [0, 1]; normalization lives inside the model."""

from generalist.models import preact, resnet, small, wide_resnet  # each registers its networks
from generalist.models.build import ModelOptions, build_model, check_model, check_size
from generalist.models.normalize import Normalized, NormalizeOptions
from generalist.models.registry import MODELS, ModelFactory

__all__ = [
    "MODELS",
    "ModelFactory",
    "ModelOptions",
    "NormalizeOptions",
    "Normalized",
    "build_model",
    "check_model",
    "check_size",
    "preact",
    "resnet",
    "small",
    "wide_resnet",
]
