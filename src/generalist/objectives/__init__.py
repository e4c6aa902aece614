"""What a learner does with a batch: one objective a file."""

from generalist.objectives import at, at_half, nt, trades  # noqa: F401  (importing registers them)
from generalist.objectives.base import (
    OBJECTIVES,
    Inputs,
    LearnerView,
    Objective,
    ObjectiveChoice,
    ObjectiveOptions,
    Progress,
)

__all__ = ["OBJECTIVES", "Inputs", "LearnerView", "Objective", "ObjectiveChoice", "ObjectiveOptions", "Progress"]
