"""The names that expressions can use: the fields of a metrics record, and short names for the usual ones.

Short names: `natural`, `robust` (mean PGD accuracy over the threats), `worst` (the lowest of them), `linf`, `l2`, `l1`
(if one threat has that norm), `drift`, `mixing_gap`, `ensemble`, `train_seconds` (training so far, without
validation). All accuracies are the global learner's, as fractions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from generalist.core.errors import SweepError
from generalist.core.run import GLOBAL, RunDirectory
from generalist.evaluation.accuracy import NATURAL
from generalist.recipe import Recipe, stage_recipe, stage_recipes


def measurements(record: Mapping[str, Any], *, train_seconds: float) -> dict[str, Any]:
    """A validation record with the short names added."""
    validation = record["validation"]
    accuracy = validation["accuracy"][GLOBAL]
    robust = {name: value for name, value in accuracy.items() if name != NATURAL}
    short: dict[str, Any] = {NATURAL: accuracy[NATURAL], "train_seconds": train_seconds}
    short |= {name: value for name, value in validation.items() if name != "accuracy"}
    if robust:
        short |= {"robust": sum(robust.values()) / len(robust), "worst": min(robust.values())}
    norms = [name.partition(":")[0] for name in robust]
    short |= {norm: value for norm, value in zip(norms, robust.values(), strict=True) if norms.count(norm) == 1}
    return {**short, **record}


def example_record(recipe: Recipe, *, trust_code: bool = False) -> dict[str, Any]:
    """A record like those of the recipe's runs, with ones as values: it has every name that an expression can use."""
    recipe = stage_recipes(recipe, trust_code=trust_code)[-1]
    learners = [learner.name for learner in recipe.learners]
    names = [NATURAL, *(str(threat.build()) for threat in recipe.threats())]
    by_learner = dict.fromkeys(learners, 1.0)
    accuracy = {subject: dict.fromkeys(names, 1.0) for subject in (GLOBAL, *learners)}
    record: dict[str, Any] = {
        "epoch": 1,
        "step": 1,
        "lr": by_learner,
        "gamma": by_learner,
        "images_per_second": 1.0,
        "validation": {"accuracy": accuracy, "ensemble": 1.0, "drift": 1.0, "mixing_gap": 1.0},
        "task_loss": by_learner,
        "clipped_loss": by_learner,
        "regret": 1.0,
        "regret_rounds": 1,
        "best_epoch": 1,
    }
    return measurements(record, train_seconds=1.0)


def final_measurements(
    run: RunDirectory, recipe: Recipe, *, epoch: Literal["best", "last"], trust_code: bool = False
) -> dict[str, Any]:
    """The measurements of a finished run, at the epoch whose model it keeps as the best, or at the last.

    The accuracies are those of the last stage; the seconds are summed over all.
    """
    records = run.read_metrics()
    validated = [record for record in records if "validation" in record]
    if not validated:
        raise SweepError(f"{run.path} has no validation in its metrics.jsonl: remove the directory and start again")
    wanted = validated[-1]["best_epoch" if epoch == "best" else "epoch"]
    chosen = next(record for record in reversed(validated) if record["epoch"] == wanted)
    parts = [(run.stage(stage.name), stage_recipe(recipe, stage, trust_code=trust_code)) for stage in recipe.stages]
    parts = [*parts[:-1], (run, parts[-1][1] if parts else recipe)]  # the last stage is the run itself
    seconds = [train_seconds(part.read_metrics(), batch_size=own.train.batch_size) for part, own in parts]
    return measurements(chosen, train_seconds=round(sum(seconds), 2))


def train_seconds(records: Sequence[Mapping[str, Any]], *, batch_size: int) -> float:
    """Seconds that the iterations took, from the logged speeds: every epoch of a resumed run counts once, and a run
    that begins at a `train.start_epoch` counts its own epochs alone."""
    total = 0.0
    for record in records:
        speed = record.get("images_per_second") or math.nan
        total += record["step"] / record["epoch"] * batch_size / speed  # all epochs have as many steps
    return round(total, 2)
