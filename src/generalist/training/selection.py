"""Which epoch's network is the best, and the warnings about that choice."""

from __future__ import annotations

from generalist.training.checkpoint import Best
from generalist.training.options import Job

TEST_SELECTION = "model selected on the test set: these accuracies are optimistic (validation.split: test)"
LEAKED = (
    "a run that this one starts or learns from has trained on images held out here: their accuracies are optimistic"
)
BELOW = "no epoch has the natural accuracy of validation.min_natural: the best is the one that comes nearest"


def is_best(score: float, best: Best, job: Job) -> bool:
    """Whether a validated epoch replaces the `best` so far. Before `validation.start`, every new epoch does."""
    latest = job.validation.rule == "last" and score >= 0
    return _stands_in(best, job) or latest or score > best.score


def said_of(best: Best | None, job: Job) -> list[str]:
    """Warnings about the best epoch, once `validation.start` has passed."""
    return [BELOW] if best is not None and best.score < 0 and not _stands_in(best, job) else []


def as_warning(said: list[str]) -> dict[str, str]:
    """The warnings as every output keeps them; no entry if there are none."""
    return {"warning": "; ".join(said)} if said else {}


def _stands_in(best: Best, job: Job) -> bool:
    return best.epoch < job.validation.first_epoch(job.train.epochs)
