"""Common corruptions of images after Hendrycks & Dietterich (2019), generated here: these are not the official files.

The definitions and strengths are the published ones; random numbers are this library's own, and frost is a drawn
texture instead of photographs. Numbers on these images can be compared with each other, but they are not numbers on
CIFAR-10-C, CIFAR-100-C or ImageNet-C: for those, `generalist.data.cifar_c` reads the official CIFAR files.
"""

from generalist.data.corruptions import blur, digital, noise, spatter, weather  # noqa: F401  (importing registers them)
from generalist.data.corruptions.apply import corrupt
from generalist.data.corruptions.registry import COMMON, CORRUPTIONS, EXTRA, SEVERITIES, Corruption
from generalist.data.corruptions.sequences import SEQUENCES, is_noise, perturb_sequence

__all__ = [
    "COMMON",
    "CORRUPTIONS",
    "EXTRA",
    "SEQUENCES",
    "SEVERITIES",
    "Corruption",
    "corrupt",
    "is_noise",
    "perturb_sequence",
]
