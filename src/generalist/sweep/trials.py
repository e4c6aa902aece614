"""Which worker does which trial, and the state of each trial.

A trial has a number, from 0, which is also that of its run directory. Optuna's records cannot be reopened once their
worker is dead, so a lost attempt is closed, and another attempt at the same number takes its place. A trial has the
state of its latest attempt. All changes here are made under the sweep's lock.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, cast

from generalist.core.files import clear_write_errors, try_lock
from generalist.core.random import host_seed
from generalist.sweep.definition import Sweep
from generalist.sweep.options import SearchOptions
from generalist.sweep.storage import Shared, optuna_module

if TYPE_CHECKING:
    from optuna import Trial
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

NUMBER, WORKER, ERROR, FREED = "number", "worker", "error", "freed"
MAX_LOSSES = 3
"""How many workers may die over a trial before it is given up."""

State = Literal["waiting", "running", "complete", "pruned", "failed"]


@dataclass(frozen=True)
class Row:
    """One trial, as shown in tables."""

    number: int
    state: State
    choice: dict[str, Any]
    values: tuple[float, ...] | None
    measures: dict[str, float] = field(default_factory=dict)
    epoch: int | None = None
    worker: str = ""
    error: str = ""
    losses: int = 0
    """Attempts whose worker died."""


@dataclass(frozen=True)
class Claim:
    """A trial that this worker has taken."""

    trial: Trial
    attempt: int
    """Optuna's own identifier of the attempt."""
    number: int
    choice: dict[str, Any]
    reported: frozenset[int]
    """Epochs whose value an earlier attempt has already reported."""
    hold: IO[str]
    """The lock that tells others on this machine that its worker is alive; closed at the end."""


def attempts(shared: Shared) -> dict[int, list[FrozenTrial]]:
    """The attempts at each trial, oldest first."""
    found: dict[int, list[FrozenTrial]] = {}
    for attempt in shared.study.get_trials(deepcopy=False):
        number = attempt.user_attrs.get(NUMBER)
        if isinstance(number, int):
            found.setdefault(number, []).append(attempt)
    return found


def rows(shared: Shared) -> list[Row]:
    """Every trial, by number."""
    return [_row(shared.sweep, number, tries) for number, tries in sorted(attempts(shared).items())]


def _row(sweep: Sweep, number: int, tries: list[FrozenTrial]) -> Row:
    latest = tries[-1]
    attributes = latest.user_attrs
    measures = attributes.get("measures")
    state = cast(State, {"FAIL": "failed"}.get(latest.state.name, latest.state.name.lower()))
    if state == "failed" and ERROR not in attributes:
        state = "waiting"  # lost: it goes to the next worker that asks
    return Row(
        number=number,
        state=state,
        choice=_choice(sweep, number, tries),
        values=tuple(latest.values) if state == "complete" and latest.values is not None else None,
        measures=measures if isinstance(measures, dict) else {},
        epoch=attributes.get("epoch"),
        worker=str(attributes.get(WORKER, "")),
        error=str(attributes.get(ERROR, "")),
        losses=sum(1 for attempt in tries if _lost(attempt)),
    )


def _choice(sweep: Sweep, number: int, tries: list[FrozenTrial]) -> dict[str, Any]:
    """A trial's parameters; an attempt that was never started has none of its own."""
    drawn = next((attempt.params for attempt in reversed(tries) if attempt.params), None)
    return dict(sweep.choice(number) if drawn is None else drawn)


def _lost(attempt: FrozenTrial) -> bool:
    """Whether its worker died during it, without having been asked to stop."""
    failed = attempt.state.name == "FAIL"
    return failed and ERROR not in attempt.user_attrs and FREED not in attempt.user_attrs


# -- claiming ---------------------------------------------------------------------------------------------------------


def claim(shared: Shared) -> Claim | None:
    """The next trial: one that another worker left, else a new one; None if all are done or in progress."""
    options = shared.sweep.options
    with shared.lock():
        _close_dead(shared)
        known = attempts(shared)
        waiting = _reopen_lost(shared, known)
        number = max(known, default=-1) + 1
        if not waiting:
            if number >= options.total:
                return None
            if options.method == "tpe":
                seed = host_seed(options.seed, "sweep/tpe", number) % 2**32
                shared.study.sampler = optuna_module().samplers.TPESampler(seed=seed, constant_liar=True)
            else:
                shared.study.enqueue_trial(shared.sweep.choice(number), user_attrs={NUMBER: number})
        trial = shared.study.ask(distributions(options.search))
        return _taken(shared, trial, int(trial.user_attrs.get(NUMBER, number)), known)


def _taken(shared: Shared, trial: Trial, number: int, known: dict[int, list[FrozenTrial]]) -> Claim | None:
    """Make the attempt this worker's own. Its name is set last: a running attempt without a name has a dead worker."""
    study_id = shared.storage.get_study_id_from_name(shared.study.study_name)
    attempt = shared.storage.get_trial_id_from_study_id_trial_number(study_id, trial.number)
    shared.storage.record_heartbeat(attempt)
    trial.set_user_attr(NUMBER, number)
    before = {step: value for tried in known.get(number, []) for step, value in tried.intermediate_values.items()}
    if len(shared.study.directions) == 1:
        for step, value in sorted(before.items()):
            trial.report(value, step)
    hold = take_lock(shared.place.folder, number)
    if hold is None:  # a worker that was considered dead still trains here: it will finish or die
        trial.set_user_attr(FREED, True)
        shared.study.tell(trial, state=optuna_module().trial.TrialState.FAIL)
        return None
    trial.set_user_attr(WORKER, worker_name())
    return Claim(trial, attempt, number, dict(trial.params), frozenset(before), hold)


def _close_dead(shared: Shared) -> None:
    """Close the attempts of dead workers: they gave no sign of life, or ran on this machine and hold no lock."""
    optuna = optuna_module()
    optuna.storages.fail_stale_trials(shared.study)
    for attempt in shared.study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,)):
        worker, number = attempt.user_attrs.get(WORKER), attempt.user_attrs.get(NUMBER)
        if worker is None or _abandoned(shared, number, str(worker)):
            shared.study.tell(attempt.number, state=optuna.trial.TrialState.FAIL, skip_if_finished=True)


def _reopen_lost(shared: Shared, known: dict[int, list[FrozenTrial]]) -> bool:
    """Queue another attempt at every trial whose latest one was lost; returns whether any attempt is in the queue.

    A trial that keeps killing its workers is given up.
    """
    optuna = optuna_module()
    waiting = False
    for number, tries in sorted(known.items()):
        latest = tries[-1]
        waiting = waiting or latest.state.name == "WAITING"
        if latest.state.name != "FAIL" or ERROR in latest.user_attrs or _held(shared, number):
            continue
        losses = sum(1 for attempt in tries if _lost(attempt))
        if losses < MAX_LOSSES:
            shared.study.enqueue_trial(_choice(shared.sweep, number, tries), user_attrs={NUMBER: number})
            waiting = True
            continue
        attributes = {NUMBER: number, ERROR: f"its worker died {losses} times"}
        shape: dict[str, Any] = {"params": latest.params, "distributions": latest.distributions}
        state = optuna.trial.TrialState.FAIL
        shared.study.add_trial(optuna.create_trial(state=state, user_attrs=attributes, **shape))
    return waiting


def distributions(search: Mapping[str, SearchOptions]) -> dict[str, BaseDistribution]:
    """The search spaces as Optuna's distributions."""
    kinds = optuna_module().distributions
    found: dict[str, BaseDistribution] = {}
    for key, space in search.items():
        if space.values is not None or space.variants is not None:
            found[key] = kinds.CategoricalDistribution(space.choices())
        elif space.integer:
            step = 1 if space.step is None else int(space.step)
            found[key] = kinds.IntDistribution(int(space.low or 0), int(space.last()), log=space.log, step=step)
        else:
            found[key] = kinds.FloatDistribution(space.low, space.last(), log=space.log, step=space.step)
    return found


# -- ending -----------------------------------------------------------------------------------------------------------


class TakenOverError(Exception):
    """This worker was considered dead, and its trial now belongs to another."""


@contextmanager
def _mine() -> Iterator[None]:
    try:
        yield
    except optuna_module().exceptions.UpdateFinishedTrialError as error:
        raise TakenOverError from error


def report(claimed: Claim, value: float, *, epoch: int) -> bool:
    """Report the value of an epoch; returns whether the trial does so badly that it should be stopped."""
    with _mine():
        if epoch not in claimed.reported:
            claimed.trial.report(value, epoch)
        return bool(claimed.trial.should_prune())


def finish(shared: Shared, claimed: Claim, values: list[float], *, measures: Mapping[str, float], epoch: int) -> None:
    """Record that the trial is complete."""
    _end(shared, claimed, {"measures": dict(measures), "epoch": epoch}, values=values)


def prune(shared: Shared, claimed: Claim, *, epoch: int) -> None:
    """Record that the trial was stopped early."""
    _end(shared, claimed, {"epoch": epoch}, state="PRUNED")


def fail(shared: Shared, claimed: Claim, reason: str) -> None:
    """Record that the trial itself cannot be done, so that nobody tries again."""
    _end(shared, claimed, {ERROR: " ".join(reason.split())[:500]}, state="FAIL")


def free(shared: Shared, claimed: Claim, *, lost: bool = False) -> None:
    """This worker stops before the end: another may continue, unless one does already. `lost`: it counts as a death."""
    with suppress(TakenOverError):
        _end(shared, claimed, {} if lost else {FREED: True}, state="FAIL")


def _end(shared: Shared, claimed: Claim, about: Mapping[str, Any], **outcome: Any) -> None:
    if "state" in outcome:
        outcome["state"] = optuna_module().trial.TrialState[outcome["state"]]
    with _mine():
        for name, value in about.items():
            claimed.trial.set_user_attr(name, value)
        shared.study.tell(claimed.trial, **outcome)


# -- signs of life on this machine ------------------------------------------------------------------------------------


def worker_name() -> str:
    return f"{platform.node()}:{os.getpid()}"


def lock_file(folder: Path, number: int) -> Path:
    return folder / "workers" / f"{number:04}.lock"


def take_lock(folder: Path, number: int) -> IO[str] | None:
    """A file that is locked while it stays open: it tells others on this machine which worker is alive."""
    path = lock_file(folder, number)
    with clear_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = _locked(path)
        if stream is not None:
            stream.truncate(0)
            stream.write(worker_name())
            stream.flush()
    return stream


def _locked(path: Path) -> IO[str] | None:
    stream = path.open("a")
    if try_lock(stream, path):
        return stream
    stream.close()
    return None


def _held(shared: Shared, number: int) -> bool:
    """Whether a worker on this machine is busy with the trial."""
    path = lock_file(shared.place.folder, number)
    if not path.is_file():
        return False
    with clear_write_errors(path):
        stream = _locked(path)
    if stream is not None:
        stream.close()
    return stream is None


def _abandoned(shared: Shared, number: Any, worker: str) -> bool:
    """Whether this worker of this machine has abandoned the trial: the lock file with its name is here, and unlocked.

    A lock file of an earlier worker proves nothing: the current one may run here with another folder.
    """
    if not isinstance(number, int) or not worker.startswith(f"{platform.node()}:"):
        return False
    path = lock_file(shared.place.folder, number)
    return path.is_file() and path.read_text(errors="replace") == worker and not _held(shared, number)
