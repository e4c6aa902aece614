"""The learners of a finished run, the shares that they are mixed by, and the mixture of their weights."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from generalist.core.errors import GeneralistError, RunError
from generalist.core.run import AVERAGE, GLOBAL, PART, RunDirectory
from generalist.core.schedule import Schedule
from generalist.recipe import Recipe, load_recipe, stage_recipes
from generalist.tensors.flat import ORDINARY
from generalist.training.artefacts import load_weights, share_of
from generalist.training.global_learner import mix as mix_vectors
from generalist.training.options import lead_index

Gamma = float | list[float] | tuple[float, ...] | Mapping[str, float]
State = dict[str, Tensor]

Source = Literal["raw", "averaged", "parts"]
"""What is mixed of each learner: its weights, its own average of them, or its part of the global learner."""

_ENDING = {"raw": "", "averaged": AVERAGE, "parts": PART}

ROUNDING = 1e-9
"""How far rounding may take shares from a sum of 1, or from an end of the dial."""


@dataclass(frozen=True)
class Learners:
    """The learners of one snapshot, in the recipe's order."""

    run: RunDirectory
    recipe: Recipe
    """The recipe of the run's last stage, if it has stages."""
    epoch: int
    last: bool
    """Whether it is the run's last snapshot."""
    source: Source
    """What `states` are: the learners' weights, their averages over time, or their parts of the global learner."""
    states: list[State]
    own_gamma: dict[str, float]
    """The run's own shares: its mixing weights at that epoch, or for parts those that give the global learner."""
    about: dict[str, Any]
    """The header of the lead learner's file."""

    @property
    def names(self) -> list[str]:
        return [learner.name for learner in self.recipe.learners]

    @property
    def lead(self) -> int:
        return lead_index(self.recipe.mixing, self.recipe.learners)

    @property
    def order(self) -> list[str]:
        """The dial's order: the lead learner, the others that train against a threat, then those that do not."""
        options = self.recipe.learners
        ranks = {name: (i != self.lead, not options[i].threats(), i) for i, name in enumerate(self.names)}
        return sorted(self.names, key=lambda name: ranks[name])


def learners_of(
    run: RunDirectory, epoch: int | None = None, *, source: Source | None = None, trust_code: bool = False
) -> Learners:
    """The learners of the run's last snapshot, or of that of `epoch`.

    `source` says what is loaded of them; by default their parts of the global learner if the run has kept these, else
    what the run's own mixing uses.
    """
    if source is not None and source not in get_args(Source):
        raise GeneralistError(f"source is raw, averaged or parts, not {source!r}")
    whole = load_recipe(run.require().recipe, trust_code=trust_code)
    recipe = stage_recipes(whole, trust_code=trust_code)[-1]
    names = [learner.name for learner in recipe.learners]
    if len(names) < 2:
        raise RunError(f"{run.path} has one learner, so there is nothing to mix: train a recipe with two, as digits-d")
    epochs = [e for e in run.snapshot_epochs() if (run.snapshots / str(e) / f"{GLOBAL}.safetensors").is_file()]
    if not epochs:
        raise RunError(
            f"{run.path} has no snapshots of its learners: every run keeps one when its last epoch ends, so finish it "
            f"with `generalist train {shlex.quote(str(run.path))} --resume`, or train it again"
        )
    chosen = epochs[-1] if epoch is None else epoch
    kept = ", ".join(map(str, epochs))
    if chosen not in epochs:
        raise RunError(f"{run.path} has no snapshot of epoch {chosen}; kept: {kept} (see train.snapshots.every)")
    source = source or default_source(recipe)
    if source == "parts" and not recipe.mixing.parts:
        raise RunError(f"{run.path} kept no parts of its global learner: train with `mixing.parts=true`, or mix raw")
    if source == "averaged" and (without := [one.name for one in recipe.learners if one.averaging is None]):
        raise RunError(
            f"{run.path} kept no average of {', '.join(without)}: train with `averaging` in every learner, or mix raw"
        )
    loaded = [load_weights(run.snapshots / str(chosen) / f"{name}{_ENDING[source]}.safetensors") for name in names]
    states = [{key: _widened(tensor) for key, tensor in state.items()} for state, _ in loaded]
    _check_alike(states, run, chosen)
    if all(_equal(states[0], state) for state in states[1:]):
        raise RunError(
            f"the learners of {run.path} are all equal after epoch {chosen}: they have just been redistributed; "
            f"choose another with --epoch (kept: {kept})"
        )
    about = loaded[lead_index(recipe.mixing, recipe.learners)][1]
    own = recipe.gammas_at(chosen)
    if source == "parts":
        own = [share_of(header, run.snapshots / str(chosen)) for _, header in loaded]
        if idle := [name for name, share in zip(names, own, strict=True) if share == 0]:
            raise RunError(
                f"by epoch {chosen} {idle[0]} has given nothing to the global learner, so there is no part of it: mix "
                f"raw, or choose another epoch (kept: {kept})"
            )
    own_gamma = dict(zip(names, own, strict=True))
    return Learners(run, recipe, chosen, chosen == epochs[-1], source, states, own_gamma, about)


def default_source(recipe: Recipe) -> Source:
    """What the dial of a run mixes by default."""
    return "parts" if recipe.mixing.parts else recipe.mixing.source


def _widened(tensor: Tensor) -> Tensor:
    """The tensor in at least single precision: snapshots may be stored in half, but nothing is computed in it."""
    return tensor.float() if tensor.dtype == torch.half else tensor


def _check_alike(states: Sequence[State], run: RunDirectory, epoch: int) -> None:
    shapes = [{name: (tensor.shape, tensor.dtype) for name, tensor in state.items()} for state in states]
    if any(other != shapes[0] for other in shapes[1:]):
        raise RunError(f"the snapshot of epoch {epoch} in {run.path} is damaged: its learners differ in architecture")
    for name, (_, dtype) in shapes[0].items():
        if dtype not in ORDINARY:
            raise RunError(f"the snapshot of epoch {epoch} in {run.path} is damaged: {name!r} holds {dtype}")


def _equal(first: State, second: State) -> bool:
    return all(torch.equal(tensor, second[name]) for name, tensor in first.items() if tensor.is_floating_point())


# -- shares -----------------------------------------------------------------------------------------------------------


def gammas_of(learners: Learners, gamma: Gamma) -> list[float]:
    """The learners' shares, in the recipe's order.

    One number is the lead learner's share, and the rest is split as the recipe's `mixing` says. N - 1 numbers are the
    shares of all learners but the last of `Learners.order`, which gets the rest. A mapping may leave out shares of 0.
    """
    names, order = learners.names, learners.order
    if isinstance(gamma, Mapping):
        if unknown := [name for name in gamma if name not in names]:
            raise RunError(f"gamma: there is no learner {unknown[0]!r}; the learners are {', '.join(names)}")
        return _checked([gamma.get(name, 0.0) for name in names], names)
    numbers: list[Any] = list(gamma) if isinstance(gamma, list | tuple) else [gamma]
    if len(numbers) == 1 and len(names) > 2 and learners.recipe.mixing.gammas is None:
        lead = _checked([numbers[0], 1 - _number(numbers[0])], [order[0], "the others"])[0]
        mixing = learners.recipe.mixing.model_copy(update={"gamma": Schedule.model_validate(lead)})
        return learners.recipe.model_copy(update={"mixing": mixing}).gammas_at(learners.epoch)
    if len(numbers) != len(names) - 1:
        raise RunError(
            f"gamma: {len(numbers)} shares for {len(names)} learners; give {len(names) - 1}, those of "
            f"{', '.join(order[:-1])}: {order[-1]} gets the rest"
        )
    shares = dict(zip(order, [*numbers, 1 - math.fsum(map(_number, numbers))], strict=True))
    return _checked([shares[name] for name in names], names)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RunError(f"gamma: {value!r} is not a share; give numbers from 0 to 1, as in 0.8")
    return float(value)


def _checked(shares: Sequence[Any], names: Sequence[str]) -> list[float]:
    """The shares, refused if they do not lie on the simplex; those within rounding of 0 or 1 are set to it."""
    numbers = [_number(share) for share in shares]
    for name, number in zip(names, numbers, strict=True):
        if not -ROUNDING <= number <= 1 + ROUNDING:
            raise RunError(f"gamma: the share of {name} would be {number:g}; shares lie in [0, 1] and add up to 1")
    if abs(math.fsum(numbers) - 1) > ROUNDING:
        raise RunError(f"gamma: the shares add up to {math.fsum(numbers):g}; make it 1")
    return [0.0 if number < ROUNDING else 1.0 if number > 1 - ROUNDING else number for number in numbers]


@torch.no_grad()
def mixed_state(states: Sequence[State], gammas: Sequence[float], *, lead: int = 0) -> State:
    """sum_a gamma_a state_a: weights and float buffers alike, as training mixes them; counters of the lead learner.

    A learner without a share is left out, so that a share of 1 gives that learner exactly.
    """
    parts = [(state, gamma) for state, gamma in zip(states, gammas, strict=True) if gamma != 0]
    if len(parts) == 1:
        return {name: tensor.clone() for name, tensor in parts[0][0].items()}
    return {
        name: mix_vectors([state[name] for state, _ in parts], [gamma for _, gamma in parts])
        if tensor.is_floating_point()
        else tensor.clone()
        for name, tensor in states[lead].items()
    }


def mixture_file(learners: Learners, gammas: Mapping[str, float], statistics: str = "best") -> Path:
    """Where a mixture is stored in its run: RUN/mix/gamma-0.80.safetensors, named after the shares in the dial's order
    without the last one, and after any options that are not the default."""
    shares = "-".join(_short(gammas[name]) for name in learners.order[:-1])
    place = "" if learners.last else f"-epoch-{learners.epoch}"
    kind = "" if learners.source == default_source(learners.recipe) else f"-{learners.source}"
    asked = "" if statistics == "best" else f"-{statistics}-statistics"
    return learners.run.path / "mix" / f"gamma-{shares}{place}{kind}{asked}.safetensors"


def _short(share: float) -> str:
    # In full where two digits are not exact, so that different shares never have the same name.
    return f"{share:.2f}" if abs(share - round(share, 2)) < ROUNDING else repr(share)
