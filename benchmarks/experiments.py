"""Experiments from a file, each a training and its evaluations, from which docs/results/log.md is written.

    python benchmarks/experiments.py benchmarks/cifar10.yaml --out runs/log                     # all of them
    python benchmarks/experiments.py benchmarks/cifar10.yaml --out runs/log --only 011-lr,014-awp --jobs 2 --minutes 25
        python benchmarks/experiments.py benchmarks/cifar10.yaml --out runs/log --dry-run           # only the commands

The file has `experiments`, each with a `recipe`, changes to it (`set`), what it starts from (`from`), what is measured
(`evaluate`, the words after `generalist evaluate RUN`) and why it is run (`about`). One that is `like` an earlier one
inherits everything that it does not say itself. A `set` and an `evaluate` next to `experiments` apply to all: an
experiment's own changes come after those, and its own `evaluate` replaces the other. One with `seeds` is run with each
of them, as NAME-SEED, and the table has the mean and the standard deviation. One that starts from an epoch of another
(`from: NAME@EPOCH[#SUBJECT]`) begins as soon as that has saved the snapshot; if both have seeds, each seed starts from
its own.

Everything is a command of `generalist`; finished commands are not repeated, and the same call continues where an
earlier one ended. After each step, and every minute while one runs, the program writes OUT/NAME.json (commands,
environment, evaluations, validations; for a training that has not ended, or never will, its state so far) and a
table, OUT/experiments.md. The exit code is 1 if a step has failed.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import signal
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from pydantic import Field, PrivateAttr, ValidationError
from steps import Step, Steps, add_options, check_options, read_steps

from generalist.attacks.threats import parse_threat
from generalist.cli import app
from generalist.console import clear_endings
from generalist.core.errors import GeneralistError
from generalist.core.files import write_json, write_text
from generalist.core.options import Options, first_problem
from generalist.core.plain_yaml import load_yaml
from generalist.core.run import GLOBAL, RunDirectory
from generalist.evaluation.accuracy import NATURAL
from generalist.evaluation.named import attack_named
from generalist.recipe import load_recipe
from generalist.shift_figures import shift_figures

TOLD = ("accuracy", "ensemble", "drift", "mixing_gap")
"""What is kept of a validation."""


# -- the file ---------------------------------------------------------------------------------------------------------


class Experiment(Options):
    """One training and the measurements of it."""

    recipe: str | None = None
    """A shipped recipe's name, or a file."""
    like: str | None = None
    """An earlier experiment, from which everything that is not given here is taken."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Fields and their values."""
    source: str | None = Field(default=None, alias="from")
    """`RUN[@EPOCH][#SUBJECT]`; the name of another experiment stands for its run."""
    evaluate: list[str] | None = None
    """The words after `generalist evaluate RUN`, one line per call."""
    about: str = ""
    """Why it is run."""
    seeds: list[int] | None = None
    """Run once with each of them; by default with the recipe's own seed."""
    _group: str | None = PrivateAttr(default=None)
    """The name that its seeds share."""


class Plan(Options):
    """All experiments of a file."""

    set: dict[str, Any] = Field(default_factory=dict)
    evaluate: list[str] = Field(default_factory=list)
    experiments: dict[str, Experiment]

    def changes_of(self, name: str) -> list[str]:
        """`FIELD=VALUE`, as for --set; later ones win."""
        changes = overlaid(self.set, self.experiments[name].set)
        return [f"{field}={value if isinstance(value, str) else json.dumps(value)}" for field, value in changes.items()]

    def evaluations_of(self, name: str) -> list[list[str]]:
        """The words after the run in each call."""
        own = self.experiments[name].evaluate
        return [shlex.split(words) for words in (self.evaluate if own is None else own)]


def read_plan(path: Path) -> Plan:
    """Read the file, with `like` and `seeds` resolved; every command is checked before any is run."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise GeneralistError(f"{path}: {error}") from None
    try:
        plan = Plan.model_validate(load_yaml(text, str(path)))
    except ValidationError as error:
        raise GeneralistError(f"{path}: {first_problem(error)}") from None
    experiments = dict[str, Experiment]()
    for name, experiment in each_seed(filled_in(plan.experiments)):
        if name in experiments:
            raise GeneralistError(f"{path}: two experiments are called {name!r}")
        experiments[name] = experiment
    plan = plan.model_copy(update={"experiments": experiments})
    for name in experiments:
        try:
            check_experiment(plan, name)
        except GeneralistError as error:
            raise GeneralistError(f"{path}: {name}: {error}") from None
    return plan


def filled_in(experiments: Mapping[str, Experiment]) -> dict[str, Experiment]:
    """Each experiment with what it inherits from the one that it is like."""
    whole = dict[str, Experiment]()
    for name, own in experiments.items():
        if own.like is not None:
            if own.like not in whole:
                raise GeneralistError(f"{name}: like {own.like!r}, but no experiment before it is called so")
            below = whole[own.like]
            inherited = {"set": overlaid(below.set, own.set)}
            for field in ("recipe", "source", "evaluate", "seeds"):
                if getattr(own, field) is None:
                    inherited[field] = getattr(below, field)
            own = own.model_copy(update=inherited)
        whole[name] = own
    return whole


def overlaid(below: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Changes on top of others: a field that is set as a whole drops earlier changes within it."""
    kept = {name: value for name, value in below.items() if not any(f"{name}.".startswith(f"{new}.") for new in own)}
    return {**kept, **own}


def each_seed(experiments: Mapping[str, Experiment]) -> Iterator[tuple[str, Experiment]]:
    """The experiments, with one for each seed of those that have seeds."""
    several = {name for name, experiment in experiments.items() if experiment.seeds}
    for name, experiment in experiments.items():
        if not experiment.seeds:
            yield name, experiment
        origin, rest = split_source(experiment.source)
        for seed in experiment.seeds or ():
            if origin in several and seed not in (experiments[origin].seeds or ()):
                raise GeneralistError(f"{name}: from {origin!r} of its own seed, but {origin} has no seed {seed}")
            source = f"{origin}-{seed}{rest}" if origin in several else experiment.source
            changes = {**experiment.set, "train.seed": seed}
            one = experiment.model_copy(update={"set": changes, "source": source})
            one._group = name
            yield f"{name}-{seed}", one


def split_source(source: str | None) -> tuple[str, str]:
    """`NAME[@EPOCH][#SUBJECT]` as NAME and the rest."""
    name = re.split("[@#]", source or "", maxsplit=1)[0]
    return name, (source or "")[len(name) :]


def check_experiment(plan: Plan, name: str) -> None:
    """Refuse a name that cannot be a file's, a recipe that cannot be read, and words that `evaluate` would refuse."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
        raise GeneralistError("a name is made of letters, digits, '-', '_' and '.'")
    experiment = plan.experiments[name]
    if experiment.recipe is None:
        raise GeneralistError("it has no recipe, and is not like one that has")
    load_recipe(experiment.recipe, overrides=plan.changes_of(name))
    try:
        evaluations = plan.evaluations_of(name)
    except ValueError as error:
        raise GeneralistError(f"evaluate: {error}") from None
    origin, _ = split_source(experiment.source)
    if origin in {other._group for other in plan.experiments.values()} - {None}:
        raise GeneralistError(f"from {origin!r}, which has several seeds: name one of them")
    for words in evaluations:
        check_evaluation(words)


def check_evaluation(words: Sequence[str]) -> None:
    """Refuse what `generalist evaluate RUN` would refuse."""
    group: Any = typer.main.get_command(app)
    try:
        asked = group.commands["evaluate"].make_context("evaluate", ["RUN", *words]).params
    except Exception as error:  # typer's classes for this differ between versions
        raise GeneralistError(f"evaluate: {getattr(error, 'format_message', error.__str__)()}") from None
    for attack in map(str.strip, (asked["attacks"] or NATURAL).split(",")):
        if attack != NATURAL:
            attack_named(attack)
    for threat in (asked["threats"] or "linf:8/255").split(","):
        parse_threat(threat.strip())


# -- steps ------------------------------------------------------------------------------------------------------------


class Experiments(Steps):
    """The steps of all experiments, below one directory."""

    def __init__(self, plan: Plan, options: argparse.Namespace) -> None:
        names = list(plan.experiments) if options.only is None else list(dict.fromkeys(options.only))
        if unknown := [name for name in names if name not in plan.experiments]:
            raise GeneralistError(f"unknown {', '.join(unknown)}; there are {', '.join(plan.experiments)}")
        super().__init__(options.out, names, jobs=options.jobs, minutes=options.minutes, grace=options.grace)
        self.plan, self.options = plan, options
        self.noted = {"commit": options.commit, "jobs": options.jobs}

    def run_of(self, name: str) -> Path:
        return self.out / "runs" / name

    def steps_of(self, name: str) -> list[Step]:
        """All steps of an experiment, finished or not."""
        experiment, run = self.plan.experiments[name], self.run_of(name)
        assert experiment.recipe is not None, "read_plan has checked it"
        changes = [word for change in self.plan.changes_of(name) for word in ("--set", change)]
        device = ["--device", self.options.device] if self.options.device != "auto" else []
        source = []
        if experiment.source is not None:
            known, rest = split_source(experiment.source)
            source = ["--from", f"{self.run_of(known)}{rest}" if self._origin(name) else experiment.source]
        train = ["train", experiment.recipe, *changes, *source, *device, "--out", str(run)]
        asked = enumerate(self.plan.evaluations_of(name), start=1)
        measured = [Step(name, f"evaluate-{i}", ["evaluate", str(run), *words, *device], run) for i, words in asked]
        return [Step(name, "train", train, run), *measured]

    def _origin(self, name: str) -> str | None:
        """The experiment that it starts from."""
        origin, _ = split_source(self.plan.experiments[name].source)
        return origin if origin in self.plan.experiments else None

    def _epoch(self, name: str) -> str:
        """The epoch of that experiment; empty for its end."""
        _, rest = split_source(self.plan.experiments[name].source)
        return rest.partition("#")[0].removeprefix("@")

    def done(self, name: str) -> dict[str, dict[str, Any]]:
        """The steps for the current run that ended well: their log lines by command."""
        found = dict[str, dict[str, Any]]()
        if not RunDirectory(self.run_of(name)).last.is_file():
            return found
        for line in self.lines_of(name):
            if line["exit"] == 0:
                # What was measured before a training belongs to other weights.
                found = {line["command"]: line} if line["step"] == "train" else found | {line["command"]: line}
        return found

    def lines_of(self, name: str) -> list[dict[str, Any]]:
        return [line for line in read_steps(self.out / "steps.jsonl") if line["name"] == name]

    def next_step(self, name: str) -> Step | None:
        done = self.done(name)
        return next((step for step in self.steps_of(name) if step.command not in done), None)

    def waits_for(self, name: str) -> str | None:
        origin = self._origin(name)
        if origin is None or self.done(name) or self._can_be_left(origin, self._epoch(name)):
            return None
        return origin

    def _ready(self, waiting: Sequence[str]) -> str | None:
        """The experiment to continue: trainings come before evaluations of others, for which no branch waits."""
        due = [name for name in waiting if self.waits_for(name) is None]
        trainings = (name for name in due if (step := self.next_step(name)) is None or step.kind == "train")
        return next(trainings, due[0] if due else None)

    def _can_be_left(self, origin: str, epoch: str) -> bool:
        """Whether a branch has what it starts from: the end of the training, or the snapshot of an earlier epoch."""
        train = self.steps_of(origin)[0]
        if train.command in self.done(origin):
            return True
        snapshot = RunDirectory(train.run).snapshots / epoch / f"{GLOBAL}.safetensors"
        return bool(epoch) and self.begun(train) and snapshot.is_file()

    def lacks_result(self, step: Step) -> bool:
        return not RunDirectory(step.run).last.is_file()

    # -- results -------------------------------------------------------------------------------------------------------

    def write(self) -> None:
        records = [record for name in self.plan.experiments if (record := self.record(name)) is not None]
        for record in records:
            write_json(self.out / f"{record['name']}.json", record)
        write_text(self.out / "experiments.md", "".join(f"{line}\n" for line in table(records)))

    def record(self, name: str) -> dict[str, Any] | None:
        """What is known about an experiment; None before its first validation. Commands are those that were run."""
        done = self.done(name)
        run, experiment = RunDirectory(self.run_of(name)), self.plan.experiments[name]
        metrics = run.read_metrics()
        validations = [validation(line) for line in metrics if "validation" in line]
        train = self.steps_of(name)[0]
        if not done and not (validations and self.begun(train)):
            return None
        # Those from before the training belong to other weights.
        summaries = run.path.glob("evaluation/*/summary.json") if done else []
        times = sorted((path.stat().st_mtime, path.parent) for path in summaries)  # in order of time
        evaluated = [folder for time, folder in times if time >= run.last.stat().st_mtime]
        unfinished = {} if done else {"unfinished": {"command": train.command, "epochs": metrics[-1]["epoch"]}}
        return {
            "name": name,
            "group": experiment._group,
            "about": experiment.about,
            "environment": json.loads(run.environment.read_text()),
            "steps": [{key: line[key] for key in ("command", "seconds", "commit", "jobs")} for line in done.values()],
            **unfinished,
            "evaluations": [told(folder) for folder in evaluated],
            "validations": validations,
        }


def told(folder: Path) -> dict[str, Any]:
    """What is kept of an evaluation: only the means over corruptions, but for AutoAttack also what each part leaves."""
    summary = json.loads((folder / "summary.json").read_text())
    right = {name: [cell["correct"], cell["total"]] for name, cell in summary["accuracy"].items()}
    whole = summary["samples"] == summary["images"]
    images = f"all {summary['images']}" if whole else f"{summary['samples']} of {summary['images']}, drawn by a seed"
    kept: dict[str, Any] = {key: summary["identity"][key] for key in ("seed", "precision")}
    means, _ = shift_figures([folder])
    if means:
        kept["shifted"] = {name: [cell.value, cell.samples] for name, cell in means.items()}
    if parts := summary["after_each_part"]:
        kept["left_after"] = {
            name: {part: cell["correct"] for part, cell in after.items()} for name, after in parts.items()
        }
    of = {"subject": summary["subject"], "split": summary["split"], "images": images}
    return {**of, "right": right, "seconds": summary["seconds"], **kept}


def validation(line: dict[str, Any]) -> dict[str, Any]:
    found = {name: line["validation"][name] for name in TOLD if name in line["validation"]}
    return {"epoch": line["epoch"], "gamma": line["gamma"], "lr": line["lr"], "train": line["train"], **found}


def table(records: Sequence[dict[str, Any]]) -> list[str]:
    """A line in percent for each evaluated network, and one for networks that differ only in the seed."""
    networks: dict[tuple[str, str], dict[str, float]] = {}
    groups: dict[tuple[str, str], list[dict[str, float]]] = {}
    for record in records:
        for subject, own in figures(record["evaluations"]).items():
            networks[record["name"], subject] = own
            if record["group"] is not None:
                groups.setdefault((record["group"], subject), []).append(own)
    columns = list(dict.fromkeys(column for own in networks.values() for column in own))
    lines = [["experiment", "network", *columns], ["---", "---", *["---:"] * len(columns)]]
    for (name, subject), own in networks.items():
        lines.append([name, subject, *(f"{own[column]:.2f}" if column in own else "-" for column in columns)])
    for (name, subject), members in groups.items():
        lines.append([f"{name}, {len(members)} seeds", subject, *(spread(members, column) for column in columns)])
    return [f"| {' | '.join(line)} |" for line in lines]


def figures(evaluations: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By network, in percent: of several evaluations by one attack, that on the most images, else the lowest. On other
    images than those of the first evaluation, it counts as another network."""
    found: dict[str, dict[str, tuple[int, float]]] = {}
    for each in evaluations:
        split = each.get("split")
        usual = split == evaluations[0].get("split")
        own = found.setdefault(each["subject"] if usual else f"{each['subject']} on {split}", {})
        shares = {name: (correct / total, total) for name, (correct, total) in each["right"].items()}
        for name, (share, total) in (shares | each.get("shifted", {})).items():
            own[name] = max(own.get(name, (0, 0.0)), (total, -100 * share))
    return {subject: {name: -value for name, (_, value) in own.items()} for subject, own in found.items()}


def spread(members: Sequence[Mapping[str, float]], column: str) -> str:
    """Mean and standard deviation (of a sample), with the number of members if some lack the figure."""
    values = [own[column] for own in members if column in own]
    of = "" if len(values) == len(members) else f" ({len(values)})"
    if len(values) < 2:
        return f"{values[0]:.2f}{of}" if values else "-"
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}{of}"


# -- the command ------------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path, help="the file with the experiments")
    parser.add_argument("--out", type=Path, required=True, help="runs, logs and results go here")
    parser.add_argument("--only", type=lambda text: [name.strip() for name in text.split(",")], metavar="A,B")
    parser.add_argument("--commit", help="for the record, where this is no clone")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    add_options(parser, each="experiments")
    options = parser.parse_args(arguments)
    check_options(parser, options)
    return options


def main() -> None:
    options = parse()
    with clear_endings():
        experiments = Experiments(read_plan(options.plan), options)
        if options.dry_run:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # its reader may have seen enough, as `head` has
            for name in experiments.names:
                print("\n".join([name, *(f"    {step.command}" for step in experiments.steps_of(name))]))
            return
        experiments.run()
    experiments.leave("experiments.md")
    if experiments.failed:
        print(f"failed: {', '.join(experiments.failed)}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
