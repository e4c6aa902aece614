"""What a learner does with a batch: one objective a file."""

from generalist.objectives import (  # noqa: F401  (importing registers them)
    at,
    at_half,
    at_linf_l2,
    at_max,
    e_at,
    msd,
    nt,
    part,
    ramp,
    rmc,
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
