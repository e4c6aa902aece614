"""One table of all methods: CIFAR-10, ResNet-18, one GPU, the same short schedule and the same evaluation for all.

    python benchmarks/baselines.py --out runs/baselines                         # all methods, 30 epochs
    python benchmarks/baselines.py --out runs/baselines --jobs 2 --minutes 25   # two at a time; call again to go on
    python benchmarks/baselines.py --out runs/try --dataset digits --epochs 2 --samples 50 --methods at,nt,generalist-t

Each method is three steps, each a command of its own: `generalist train`, `generalist evaluate` with PGD-20 on all test
images, `generalist evaluate` with AutoAttack on some. Finished steps are not repeated: the same call continues where an
earlier one ended, however it ended. After every step OUT/baselines.md and baselines.json are rewritten. A method that
fails is listed with its reason, and the others go on; the next call tries it again.

`--jobs 2` runs two methods side by side: while one trains, the other imports and compiles. `--minutes M` starts no step
after that time; `--grace G` asks steps still running G minutes later to stop, which leaves a checkpoint.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from baselines_table import AA, NATURAL, PGD, Method, Table, Wanted, evaluation, family_of, read_row, rescaled, trained
from steps import Step, Steps, add_options, check_options, read_steps

from generalist.attacks.threats import parse_threat
from generalist.console import clear_endings
from generalist.core.errors import GeneralistError
from generalist.core.run import RunDirectory
from generalist.evaluation.named import attack_named
from generalist.recipe import Recipe, load_recipe

# -- what is requested ------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="runs, logs, baselines.json and baselines.md go here")
    parser.add_argument(
        "--dataset", default="cifar10-resnet18", help="a family: baseline-DATASET-*, DATASET-d, -t, ..."
    )
    parser.add_argument("--methods", default="all", metavar="A,B", help="as --dry-run names them, or all")
    parser.add_argument("--epochs", type=int, default=30, help="of every method; a shorter recipe keeps its own")
    parser.add_argument("--batch-size", type=int, help="of every method; learning rates grow with it")
    parser.add_argument("--samples", type=int, default=1000, help="test images for AutoAttack, drawn by a seed")
    parser.add_argument("--set", action="append", default=[], dest="changes", metavar="[METHOD:]FIELD=VALUE")
    parser.add_argument("--threats", metavar="A,B", help="default: those that the family's at-max trains against")
    parser.add_argument("--attack", default=AA, help="another one in AutoAttack's place, for a quick try")
    parser.add_argument("--precision", choices=["default", "fast"], default="default", help="of generalist evaluate")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    add_options(parser, each="methods")
    options = parser.parse_args(arguments)
    check_options(parser, options)
    if min(options.epochs, options.samples, options.batch_size or 1) < 1:
        parser.error("--epochs, --batch-size and --samples must be at least 1")
    if options.attack in (PGD, NATURAL):
        parser.error(f"--attack {options.attack} is a column already: name another one")
    return options


def choose_methods(options: argparse.Namespace) -> list[Method]:
    """The requested rows, in the order of the queue; every recipe is checked before anything runs."""
    family = family_of(options.dataset)
    names = list(family) if options.methods == "all" else [name.strip() for name in options.methods.split(",")]
    asked = [(text.partition("=")[0].rpartition(":")[0], text) for text in options.changes]
    for name in [*names, *(target for target, _ in asked if target)]:
        if name not in family:
            raise GeneralistError(f"unknown method {name!r}; {options.dataset} has {', '.join(family)}")
    methods = []
    for name, recipe in family.items():
        if name in names:
            whole = load_recipe(recipe)
            epochs = min(options.epochs, whole.train.epochs)
            own = [text.removeprefix(f"{target}:") for target, text in asked if target in ("", name)]
            changes = (*rescaled(whole, epochs=epochs, batch_size=options.batch_size), *own)
            methods.append(Method(name, recipe, changes, _load(name, recipe, changes)))
    return methods


def _load(name: str, recipe: str, changes: Sequence[str]) -> Recipe:
    try:
        return load_recipe(recipe, overrides=changes)
    except GeneralistError as error:
        raise GeneralistError(f"{name}: {error} (--set METHOD:FIELD=VALUE changes one method alone)") from None


def choose_evaluation(options: argparse.Namespace) -> Wanted:
    if options.threats is not None:
        threats = [str(parse_threat(text.strip())) for text in options.threats.split(",")]
    else:
        recipe = family_of(options.dataset).get("at-max")
        if recipe is None:
            raise GeneralistError(f"{options.dataset} has no at-max that would say which: give --threats")
        threats = [str(threat) for threat in load_recipe(recipe).threats()]
    attack_named(options.attack)
    return Wanted(tuple(dict.fromkeys(threats)), options.attack, options.samples, options.precision)


# -- steps ------------------------------------------------------------------------------------------------------------


class Bench(Steps):
    """The steps of all methods, below one directory."""

    def __init__(self, options: argparse.Namespace, methods: list[Method], wanted: Wanted) -> None:
        names = [method.name for method in methods]
        super().__init__(options.out, names, jobs=options.jobs, minutes=options.minutes, grace=options.grace)
        self.options, self.methods, self.wanted = options, methods, wanted

    def run_of(self, method: Method) -> Path:
        return self.out / "runs" / method.name

    # -- which steps there are ----------------------------------------------------------------------------------------

    def train_words(self, method: Method) -> list[str]:
        changes = [word for change in method.changes for word in ("--set", change)]
        return ["train", method.recipe, *changes, *self._device(), "--out", str(self.run_of(method))]

    def evaluate_words(self, method: Method, attack: str, images: int | None) -> list[str]:
        """`images`: the number of test images, if known; a subset of all of them is none."""
        words = ["evaluate", str(self.run_of(method)), "--attacks", f"{NATURAL},{attack}"]
        words += ["--threats", ",".join(self.wanted.threats)]
        if attack != PGD and (images is None or self.wanted.samples < images):
            words += ["--samples", str(self.wanted.samples)]
        precision = ["--precision", self.wanted.precision] if self.wanted.precision != "default" else []
        return [*words, *precision, *self._device()]

    def _device(self) -> list[str]:
        return ["--device", self.options.device] if self.options.device != "auto" else []

    def steps_of(self, method: Method) -> list[Step]:
        """All three steps, finished or not."""
        plain = evaluation(self.run_of(method), self.wanted, PGD)
        images = plain[1]["images"] if plain else None
        words = {"train": self.train_words(method)}
        words |= {a: self.evaluate_words(method, a, images) for a in (PGD, self.wanted.attack)}
        return [Step(method.name, kind, each, self.run_of(method)) for kind, each in words.items()]

    def next_step(self, name: str) -> Step | None:
        method = next(method for method in self.methods if method.name == name)
        run = self.run_of(method)
        train, plain, strong = self.steps_of(method)
        if not trained(run):
            return train
        found = evaluation(run, self.wanted, PGD)
        if found is None:
            return plain
        samples = self.wanted.subset(found[1]["images"])
        return strong if evaluation(run, self.wanted, self.wanted.attack, samples) is None else None

    def check(self) -> None:
        """Refuse existing runs made with other settings: a table must not mix two."""
        for method in self.methods:
            run = RunDirectory(self.run_of(method))
            if run.exists():
                there = load_recipe(run.recipe).model_dump(exclude={"name"})
                asked = method.resolved.model_dump(exclude={"name"})
                if changed := [name for name in asked if asked[name] != there[name]]:
                    raise GeneralistError(
                        f"{run.path} was trained with other settings ({', '.join(changed)}): repeat those, or choose "
                        "another --out"
                    )

    # -- what it leaves -----------------------------------------------------------------------------------------------

    def table(self) -> Table:
        steps = read_steps(self.out / "steps.jsonl")
        rows = [read_row(method, self.run_of(method), self.wanted, steps=steps) for method in self.methods]
        commands = {method.name: [step.command for step in self.steps_of(method)] for method in self.methods}
        command = shlex.join(["python", "benchmarks/baselines.py", *sys.argv[1:]])
        options = self.options
        return Table(
            options.dataset, options.epochs, command, self.wanted, rows, commands, options.jobs, options.batch_size
        )

    def write(self) -> None:
        self.table().write(self.out)


def show_queue(bench: Bench) -> None:
    """The queue, and how much longer than AT each method takes, by the number of passes."""
    for method in bench.methods:
        cost = method.cost(bench.options.epochs)
        epochs = " + ".join(map(str, method.epochs))
        print(f"{method.name:<22} {epochs:>12} epochs, {'?' if cost is None else cost} times AT")
        for step in bench.steps_of(method):
            print(f"    {step.command}")
    costs = [method.cost(bench.options.epochs) or 0 for method in bench.methods]
    print(f"in all {sum(costs):.1f} times AT, and {len(costs)} starts and evaluations")


def main() -> None:
    options = parse()
    with clear_endings():
        bench = Bench(options, choose_methods(options), choose_evaluation(options))
        if options.dry_run:
            show_queue(bench)
            return
        bench.run()
    bench.leave("baselines.md")


if __name__ == "__main__":
    main()
