"""Experiments from a file, each a training and its evaluations; what docs/results/log.md is written from.

    python benchmarks/experiments.py benchmarks/cifar10.yaml --out runs/log                     # all of them
    python benchmarks/experiments.py benchmarks/cifar10.yaml --out runs/log --only 011-at,012-awp --jobs 2 --minutes 25
    python benchmarks/experiments.py benchmarks/cifar10.yaml --out runs/log --dry-run           # the commands alone

The file has `experiments`, each with a `recipe`, changes to it (`set`), what it starts from (`from`), what is measured
(`evaluate`, the words after `generalist evaluate RUN`) and why it is run (`about`). A `set` and an `evaluate` beside
`experiments` are for all: an experiment's own changes come after those, its own `evaluate` takes the other's place. One
with `seeds` is run with each of them, as NAME-SEED, and the table has the mean and the standard deviation.

Everything is a command of `generalist`; what is done is not repeated, and the same call goes on where an earlier one
ended. After each step OUT/NAME.json (commands, environment, evaluations, validations) and a table, OUT/experiments.md,
are written.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError
from steps import Step, Steps, add_options, check_options, read_steps

from generalist.core.errors import GeneralistError
from generalist.core.files import write_json, write_text
from generalist.core.options import Options
from generalist.core.run import RunDirectory
from generalist.recipe import load_recipe

TOLD = ("accuracy", "ensemble", "drift", "mixing_gap")
"""What is kept of a validation."""


class Experiment(Options):
    """One training and what is measured of it."""

    recipe: str
    """A shipped recipe's name, or a file."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Fields and their values."""
    source: str | None = Field(default=None, alias="from")
    """`RUN[@EPOCH]`; the name of another experiment stands for its run."""
    evaluate: list[str] | None = None
    """The words after `generalist evaluate RUN`, a line for each call."""
    about: str = ""
    """Why it is run."""
    seeds: list[int] = Field(default_factory=list)
    """Once with each of them; left out: with the recipe's own."""
    group: str | None = None
    """The name that its seeds share; it is filled in."""


class Plan(Options):
    """All of them."""

    set: dict[str, Any] = Field(default_factory=dict)
    evaluate: list[str] = Field(default_factory=list)
    experiments: dict[str, Experiment]


def read_plan(path: Path) -> Plan:
    """The file, checked: names are file names, and every recipe can be read."""
    try:
        plan = Plan.model_validate(yaml.safe_load(path.read_text()))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValidationError) as error:
        raise GeneralistError(f"{path}: {error}") from None
    plan = plan.model_copy(update={"experiments": dict(each_seed(plan.experiments))})
    for name, experiment in plan.experiments.items():
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
            raise GeneralistError(f"{path}: {name!r} must be made of letters, digits, '-', '_' and '.'")
        try:
            load_recipe(experiment.recipe, overrides=changes_of(plan, experiment))
        except GeneralistError as error:
            raise GeneralistError(f"{path}: {name}: {error}") from None
    return plan


def each_seed(experiments: Mapping[str, Experiment]) -> Iterator[tuple[str, Experiment]]:
    """The experiments, those with seeds once for each."""
    for name, experiment in experiments.items():
        if not experiment.seeds:
            yield name, experiment
        for seed in experiment.seeds:
            changes = {**experiment.set, "train.seed": seed}
            yield f"{name}-{seed}", experiment.model_copy(update={"set": changes, "group": name})


def changes_of(plan: Plan, experiment: Experiment) -> list[str]:
    """`FIELD=VALUE`, as --set takes them; a later one wins."""
    changes = {**plan.set, **experiment.set}
    return [f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in changes.items()]


class Experiments(Steps):
    """The steps of all experiments, below one directory."""

    def __init__(self, plan: Plan, options: argparse.Namespace) -> None:
        names = list(plan.experiments) if options.only is None else options.only
        if unknown := [name for name in names if name not in plan.experiments]:
            raise GeneralistError(f"unknown {', '.join(unknown)}; there are {', '.join(plan.experiments)}")
        super().__init__(options.out, names, jobs=options.jobs, minutes=options.minutes, grace=options.grace)
        self.plan, self.options = plan, options

    def run_of(self, name: str) -> Path:
        return self.out / "runs" / name

    # -- which steps there are ----------------------------------------------------------------------------------------

    def steps_of(self, name: str) -> list[Step]:
        """All of an experiment, done or not."""
        experiment, run = self.plan.experiments[name], self.run_of(name)
        changes = [word for change in changes_of(self.plan, experiment) for word in ("--set", change)]
        source = ["--from", self._source(experiment.source)] if experiment.source is not None else []
        device = ["--device", self.options.device] if self.options.device != "auto" else []
        train = ["train", experiment.recipe, *changes, *source, *device, "--out", str(run)]
        asked = self.plan.evaluate if experiment.evaluate is None else experiment.evaluate
        evaluations = [["evaluate", str(run), *shlex.split(words), *device] for words in asked]
        measured = [Step(name, f"evaluate-{i}", words, run) for i, words in enumerate(evaluations, start=1)]
        return [Step(name, "train", train, run), *measured]

    def _source(self, text: str) -> str:
        name, at, epoch = text.partition("@")
        return f"{self.run_of(name)}{at}{epoch}" if name in self.plan.experiments else text

    def next_step(self, name: str) -> Step | None:
        done = {line.get("command") for line in read_steps(self.out / "steps.jsonl") if line.get("exit") == 0}
        return next((step for step in self.steps_of(name) if step.command not in done), None)

    def lacks_result(self, step: Step) -> bool:
        return False  # a command that ended well is done

    # -- what it leaves -----------------------------------------------------------------------------------------------

    def write(self) -> None:
        records = [record for name in self.names if (record := self.record(name)) is not None]
        for record in records:
            write_json(self.out / f"{record['name']}.json", record)
        write_text(self.out / "experiments.md", "".join(f"{line}\n" for line in table(records)))

    def record(self, name: str) -> dict[str, Any] | None:
        """What is known of an experiment; None before its first step has ended."""
        ended = [line for line in read_steps(self.out / "steps.jsonl") if line["name"] == name]
        if not ended:
            return None
        run, experiment = RunDirectory(self.run_of(name)), self.plan.experiments[name]
        environment = json.loads(run.environment.read_text()) if run.environment.is_file() else {}
        summaries = [json.loads(path.read_text()) for path in sorted(run.path.glob("evaluation/*/summary.json"))]
        return {
            "name": name,
            "group": experiment.group,
            "about": experiment.about,
            "commands": [step.command for step in self.steps_of(name)],
            "commit": self.options.commit or environment.get("commit"),
            "environment": environment,
            "steps": [{key: line[key] for key in ("step", "exit", "seconds", "reason")} for line in ended],
            "shared_by": self.jobs,
            "evaluations": [told(summary) for summary in summaries],
            "validations": [validation(line) for line in run.read_metrics() if "validation" in line],
        }


def told(summary: dict[str, Any]) -> dict[str, Any]:
    """What is kept of an evaluation."""
    figures = {name: [cell["correct"], cell["total"]] for name, cell in summary["accuracy"].items()}
    whole = summary["samples"] == summary["images"]
    images = f"all {summary['images']}" if whole else f"{summary['samples']} of {summary['images']}, drawn by a seed"
    return {"subject": summary["subject"], "images": images, "right": figures, "seconds": summary["seconds"]}


def validation(line: dict[str, Any]) -> dict[str, Any]:
    found = {name: line["validation"][name] for name in TOLD if name in line["validation"]}
    return {"epoch": line["epoch"], "gamma": line["gamma"], "lr": line["lr"], "train": line["train"], **found}


def table(records: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each network that was evaluated, in percent, and one for those that differ in the seed alone."""
    networks = {(r["name"], subject): own for r in records for subject, own in figures(r["evaluations"]).items()}
    groups: dict[tuple[str, str], list[dict[str, float]]] = {}
    for record in records:
        for (name, subject), own in networks.items():
            if name == record["name"] and record["group"] is not None:
                groups.setdefault((record["group"], subject), []).append(own)
    columns = list(dict.fromkeys(column for own in networks.values() for column in own))
    lines = [["experiment", "network", *columns], ["---", "---", *["---:"] * len(columns)]]
    for (name, subject), own in networks.items():
        lines.append([name, subject, *(f"{own[column]:.2f}" if column in own else "-" for column in columns)])
    for (name, subject), members in groups.items():
        lines.append([f"{name}, {len(members)} seeds", subject, *(spread(members, column) for column in columns)])
    return [f"| {' | '.join(line)} |" for line in lines]


def figures(evaluations: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By network, in percent. Natural accuracy comes with every evaluation: that on the most images is told."""
    found: dict[str, dict[str, tuple[int, float]]] = {}
    for each in evaluations:
        own = found.setdefault(each["subject"], {})
        for name, (correct, total) in each["right"].items():
            own[name] = max(own.get(name, (0, 0.0)), (total, 100 * correct / total))
    return {subject: {name: value for name, (_, value) in own.items()} for subject, own in found.items()}


def spread(members: Sequence[Mapping[str, float]], column: str) -> str:
    """Mean and standard deviation (of a sample) over those that have the figure."""
    values = [own[column] for own in members if column in own]
    if len(values) < 2:
        return f"{values[0]:.2f}" if values else "-"
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"


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
    try:
        experiments = Experiments(read_plan(options.plan), options)
        if options.dry_run:
            for name in experiments.names:
                print("\n".join([name, *(f"    {step.command}" for step in experiments.steps_of(name))]))
            return
        experiments.run()
    except GeneralistError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"table: {experiments.out / 'experiments.md'}")
    if experiments.stopped:
        sys.exit(128 + experiments.stopped)


if __name__ == "__main__":
    main()
