"""What a learner does with a batch: one objective a file."""

from generalist.objectives import (  # noqa: F401  (importing registers them)
    agr,
    ar_at,
    at,
    at_half,
    at_linf_l2,
    at_max,
    awp,
    distil,
    e_at,
    fast_at,
    fat,
    hat,
    iat,
    mart,
    msd,
    nt,
    part,
    ramp,
    rmc,
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
