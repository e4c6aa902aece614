"""What a learner does with a batch: one objective a file."""

from generalist.objectives import (  # noqa: F401  (importing registers them)
    agr,
    at,
    at_half,
    awp,
    fast_at,
    fat,
    iat,
    mart,
    nt,
    rst,
    score,
    trades,
)
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
