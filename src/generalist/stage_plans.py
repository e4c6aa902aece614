"""Where the runs of a recipe with stages get their weights, checked before the first of them trains."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from generalist.core.errors import RecipeError
from generalist.core.run import AVERAGE, GLOBAL, PART, RunDirectory
from generalist.recipe import FRESH, Recipe, StageOptions, stage_recipe
from generalist.training.artefacts import OTHER_NORMALIZE, artefact_file, branch_files, split_subject

Shapes = dict[str, tuple[int, ...]]
"""The shapes of a network's tensors, by name."""


@dataclass(frozen=True)
class Plan:
    """One training run: the recipe's only one, or one of its stages."""

    recipe: Recipe
    directory: RunDirectory
    source: str | dict[str, str] | None = None
    """The source of its weights, `RUN[@EPOCH][#SUBJECT]`, or one for each learner; None: fresh weights."""
    earlier: dict[str, Plan] = field(default_factory=dict)
    """The stages before this one, by name."""

    @property
    def waits(self) -> bool:
        """Whether a source of its weights is an earlier stage, which has yet to run."""
        return any(self.stage_of(text) is not None for text in self.starts())

    def sources(self) -> list[str]:
        """Everything that it reads from other runs: weights to start from, and those that its objectives ask for."""
        return [*self.starts(), *(text for learner in self.recipe.learners for text in learner.sources())]

    def source_files(self) -> dict[str, Path]:
        """The weights file of each subject that does not start fresh."""
        if isinstance(self.source, dict):
            return {name: artefact_file(self.locate(text), name) for name, text in self.source.items()}
        source = self.locate(self.source or "")
        if split_subject(source)[1] is None:
            return branch_files(source, [learner.name for learner in self.recipe.learners])
        # One network for all: a learner without a file of its own takes the global learner's.
        return {GLOBAL: artefact_file(source, GLOBAL)}

    def stage_of(self, text: str) -> str | None:
        """The stage that `STAGE[@EPOCH][#SUBJECT]` names, if it names one."""
        name = re.split("[@#]", text, maxsplit=1)[0]
        return name if name in self.earlier else None

    def locate(self, text: str) -> str:
        """The source with a stage's name replaced by its directory."""
        stage = self.stage_of(text)
        return str(self.earlier[stage].directory.path) + text[len(stage) :] if stage is not None else text

    def starts(self) -> list[str]:
        """Where its weights come from."""
        return list(self.source.values()) if isinstance(self.source, dict) else [self.source] if self.source else []


def plan_runs(recipe: Recipe, run: RunDirectory, *, start: str | None, trust_code: bool) -> list[Plan]:
    """The recipe's runs, in order; `start` is the source of the first one's weights."""
    if not recipe.stages:
        return [Plan(recipe, run, start)]
    first = recipe.stages[0]
    if start is not None and first.start != FRESH:
        raise RecipeError(f"stages.{first.name}.start", "says where the weights come from; leave --from out")
    plans: dict[str, Plan] = {}
    for i, stage in enumerate(recipe.stages):
        own = stage_recipe(recipe, stage, trust_code=trust_code)
        _check_learners(stage, own)
        directory = run if i == len(recipe.stages) - 1 else run.stage(stage.name)
        fresh = start if i == 0 else None
        source = stage.start
        if isinstance(source, dict):  # a learner that is not among them is fresh
            source = {name: text for name, text in source.items() if text != FRESH} or FRESH
        plan = Plan(own, directory, fresh if source == FRESH else source, dict(plans))
        for text in plan.sources():
            _check_left(stage, plan, text)
        plans[stage.name] = plan
    return list(plans.values())


def _check_learners(stage: StageOptions, recipe: Recipe) -> None:
    names = [learner.name for learner in recipe.learners]
    for name in stage.start if isinstance(stage.start, dict) else ():
        if name not in names:
            known = ", ".join(names)
            raise RecipeError(
                f"stages.{stage.name}.start.{name}", f"there is no such learner; the learners are {known}"
            )


def _check_left(stage: StageOptions, plan: Plan, text: str) -> None:
    """Refuse a source in an earlier stage that this stage will not leave behind.

    Found out only when its turn comes, the earlier stages would be lost, because a run cannot change its recipe.
    """
    name = plan.stage_of(text)
    if name is None:
        return
    field, recipe = f"stages.{stage.name}", plan.earlier[name].recipe
    parts = re.fullmatch(r"(?:@(\d{1,9}))?(?:#(.*))?", text[len(name) :], re.ASCII)
    if parts is None:
        raise RecipeError(field, f"{text!r}: write it as STAGE, STAGE@EPOCH, STAGE#SUBJECT or STAGE@EPOCH#SUBJECT")
    epoch, subject = parts.groups()
    if epoch is not None and not recipe.keeps_snapshot(int(epoch)):
        raise RecipeError(
            field, f"{text!r}: stage {name!r} keeps no epoch {epoch}; leave it out, or set its train.snapshots.every"
        )
    if subject is None:
        return
    averages = [learner.name + AVERAGE for learner in recipe.learners if learner.averaging]
    kept = [learner.name + PART for learner in recipe.learners if recipe.mixing.parts]
    subjects = [GLOBAL, *(learner.name for learner in recipe.learners), *averages, *kept]
    if subject not in subjects:
        raise RecipeError(field, f"{text!r}: stage {name!r} keeps no {subject!r}; say {', '.join(subjects)}")


def check_shapes(whole: Recipe, plans: Sequence[Plan], shapes: Sequence[Shapes]) -> None:
    """Refuse a stage whose network differs from that of an earlier stage it reads from, before that one trains."""
    known = {stage.name: own for stage, own in zip(whole.stages, shapes, strict=False)}
    for i, plan in enumerate(plans):
        for text in plan.starts():
            stage = plan.stage_of(text)
            if stage is not None and plan.earlier[stage].recipe.model.normalize != plan.recipe.model.normalize:
                raise RecipeError(f"stages.{whole.stages[i].name}.change.model.normalize", OTHER_NORMALIZE.format(text))
        for text in plan.sources():
            if (stage := plan.stage_of(text)) is not None and known[stage] != shapes[i]:
                odd = next(
                    name for name in {**known[stage], **shapes[i]} if known[stage].get(name) != shapes[i].get(name)
                )
                raise RecipeError(
                    f"stages.{whole.stages[i].name}",
                    f"{text!r} is another network: there {odd!r} is {known[stage].get(odd)}, and here "
                    f"{shapes[i].get(odd)}",
                )
