"""The dial: another point of the trade-off from the learners of one finished run, without training.

A snapshot keeps every learner as it was before redistribution. The dial mixes their weights by other shares than the
run's own. The BatchNorm statistics of a mixture can be mixed like the weights, as in training, or re-estimated on
training images; which of the two is better differs from run to run, so the run's own validation rule decides.
"""

from generalist.dial.curves import Curve, Measured, Point, Suggestion, Wish, curve, pareto, read_curve, suggest
from generalist.dial.learners import Gamma, Learners, Source, gammas_of, learners_of, mixed_state, mixture_file
from generalist.dial.turning import Dial, Mixture, Statistics, check_statistics, mix

__all__ = [
    "Curve",
    "Dial",
    "Gamma",
    "Learners",
    "Measured",
    "Mixture",
    "Point",
    "Source",
    "Statistics",
    "Suggestion",
    "Wish",
    "check_statistics",
    "curve",
    "gammas_of",
    "learners_of",
    "mix",
    "mixed_state",
    "mixture_file",
    "pareto",
    "read_curve",
    "suggest",
]
