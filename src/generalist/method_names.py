"""What the papers call a run, judging by its learners; else a name that tells it apart from theirs."""

from __future__ import annotations

from collections.abc import Sequence

from generalist.objectives.base import ObjectiveOptions
from generalist.objectives.hat import HatOptions
from generalist.objectives.norms import SeveralNormsOptions
from generalist.objectives.score import ScoreOptions
from generalist.objectives.trades import TradesOptions
from generalist.objectives.wrapper import WrapperOptions
from generalist.training.learner_options import LearnerOptions

VARIANTS = {
    frozenset({"nt", "linf"}): "generalist-d-nt-linf",
    frozenset({"linf", "l2"}): "generalist-d-linf-l2",
    frozenset({"nt", "linf", "l2"}): "generalist-t",
}


def method_of(learners: Sequence[LearnerOptions]) -> str:
    """What the papers call this set of learners; else the names of the objectives, joined."""
    if len(learners) == 1:
        return _baseline(learners[0])
    norms = {learner.threat.norm if learner.threat else "nt" for learner in learners}
    if all(map(_one_task, learners)) and len(norms) == len(learners) and (name := VARIANTS.get(frozenset(norms))):
        return name
    return "+".join(_baseline(learner) for learner in learners)


def _one_task(learner: LearnerOptions) -> bool:
    """Whether it learns one task like the papers' learners, even if with the help of another one."""
    objective = learner.objective
    if isinstance(objective, HatOptions):
        objective = objective.around
    return objective.kind in ("nt", "at") or (objective.kind == "at-distil" and bool(learner.companions()))


def _baseline(learner: LearnerOptions) -> str:
    """The papers' baselines are in linf, and those against several norms in the default norms, unless their names say
    otherwise."""
    name, beside = _named(learner.objective)
    norms = [threat.norm for threat in learner.threats()]
    return name if norms in ([], ["linf", *beside]) else f"{name} ({', '.join(norms)})"


def _named(objective: ObjectiveOptions) -> tuple[str, list[str]]:
    """An objective's name, and the norms that it takes besides the learner's own if nothing else is requested."""
    fields = type(objective).model_fields
    if isinstance(objective, WrapperOptions):
        inside, beside = _named(objective.around)
        usual = fields["around"].default
        kind = objective.kind
        return kind if objective.around.kind == getattr(usual, "kind", usual) else f"{kind} around {inside}", beside
    beside = [threat.norm for threat in fields["beside"].default] if isinstance(objective, SeveralNormsOptions) else []
    if isinstance(objective, TradesOptions):
        return f"trades-{objective.beta:g}", beside
    if isinstance(objective, ScoreOptions) and objective.form == "at":
        return f"{objective.kind}-at", beside  # the papers do not say which form is theirs; the default is score
    return objective.kind, beside
