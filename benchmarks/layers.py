"""The dial turned in one part of the network at a time: where do the other learners cost the least robustness?

    python benchmarks/layers.py runs/headline/runs/d-1 --test --json layers.json

In one part after another (the stem, each stage, the classifier; `--depth` gives more of them), the shares of all
learners but the lead are multiplied by each of `--factors`: 0 leaves only the lead learner there, 1 is the run's own
mix. The lead's share makes up for the difference. BatchNorm's scales, shifts and statistics go with their part. The
table has the changes of accuracy against the run's own mix, in points, on the same images under the same attack, and
their ratio.
If a point of natural accuracy costs less robustness in some parts than in the whole network, a gamma that differs
between parts is worth a training. It uses the held-out images, or with --test the test images, which must not be used
for choosing anything.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import nn

from generalist import dial
from generalist.console import clear_endings, print_table
from generalist.core.errors import GeneralistError
from generalist.core.files import write_json
from generalist.core.run import RunDirectory
from generalist.dial.learners import Learners, State
from generalist.weights import network_of

WHOLE = "the whole network"


def parts_of(names: Sequence[str], depth: int) -> list[str]:
    """The parts, by the first words of their tensors' names. In a list of stages, each stage is a part, but a list of
    single layers (such as a convolution and its BatchNorm) is one part as a whole. A tensor beside the modules is a
    part of its own. A module that holds all others, such as the one around a normalization, is looked into."""
    modules = {name.partition(".")[0] for name in names if "." in name}
    if len(modules) == 1 and any(name.count(".") > 1 for name in names):
        (outer,) = modules
        inside = [name.removeprefix(f"{outer}.") for name in names if "." in name]
        return [*(name for name in names if "." not in name), *(f"{outer}.{part}" for part in parts_of(inside, depth))]
    found = list[str]()
    for name in names:
        words = name.split(".")[:-1] or [name]
        numbered = next((i for i, word in enumerate(words) if word.isdecimal()), len(words))
        part = ".".join(words[: max(depth, 2 if numbered == 1 and len(words) > 2 else 1)])
        if part not in found:
            found.append(part)
    return found


def shares(learners: Learners, factor: float) -> list[float]:
    """The run's own shares, with those of all but the lead learner times `factor`."""
    own = [learners.own_gamma[name] for name in learners.names]
    scaled = [factor * share for share in own]
    scaled[learners.lead] = 1 - sum(scaled) + scaled[learners.lead]
    if scaled[learners.lead] < 0:
        raise GeneralistError(f"--factors: {factor:g} leaves less than nothing to {learners.names[learners.lead]}")
    return scaled


def mixed(learners: Learners, part: str | None, factor: float) -> State:
    """The run's own mix except in one part; None: in all of them."""
    own, other = (
        dial.mixed_state(learners.states, shares(learners, each), lead=learners.lead) for each in (1.0, factor)
    )
    return {name: other[name] if part is None or f"{name}.".startswith(f"{part}.") else own[name] for name in own}


def measure(machine: dial.Dial, state: State, *, test: bool) -> dict[str, list[int]]:
    """The number of right images and of all, by `natural` and threat."""
    learners = machine.learners
    network: nn.Module = network_of(state, learners.about, learners.run.path, trust_code=machine.trust_code)
    network = network.to(machine.device).eval()
    found = machine.test(network) if test else machine.validate(network)
    return {name: [accuracy.correct, accuracy.total] for name, accuracy in found.items()}


def explore(machine: dial.Dial, factors: Sequence[float], *, depth: int = 1, test: bool = False) -> dict[str, Any]:
    """Accuracies of the run's own mix, and with each part turned by each factor."""
    learners = machine.learners
    for factor in factors:
        shares(learners, factor)
    first, *others = learners.states
    differing = [name for name, tensor in first.items() if not all(torch.equal(tensor, each[name]) for each in others)]
    parts = parts_of(differing, depth)
    turned = [(part, factor) for part in (None, *parts) for factor in factors]
    return {
        "run": learners.run.path.name,
        "epoch": learners.epoch,
        "source": learners.source,
        "own_gamma": learners.own_gamma,
        "steps": machine.steps,
        "images": "test" if test else learners.recipe.validation.split,
        "own": measure(machine, mixed(learners, None, 1.0), test=test),
        "turned": [
            {
                "part": part or WHOLE,
                "factor": factor,
                "right": measure(machine, mixed(learners, part, factor), test=test),
            }
            for part, factor in turned
        ],
    }


def show(found: dict[str, Any]) -> None:
    own = found["own"]
    accuracies = ", ".join(f"{name} {100 * right / total:.2f}" for name, (right, total) in own.items())
    print(f"{found['run']}, epoch {found['epoch']}, {found['images']} images: {accuracies}")
    table = Table(title="Change of accuracy, in points")
    for column in ("part", "others times", *own, "points lost for one of natural"):
        table.add_column(column, justify="left" if column == "part" else "right")
    for row in found["turned"]:
        change = {name: 100 * (right - own[name][0]) / total for name, (right, total) in row["right"].items()}
        natural, *attacked = change.values()
        price = f"{-sum(attacked) / len(attacked) / natural:.2f}" if natural and attacked else "-"
        table.add_row(row["part"], f"{row['factor']:g}", *(f"{value:+.2f}" for value in change.values()), price)
    print_table(table)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run of two or more learners")
    parser.add_argument("--factors", type=float, nargs="+", default=[0.0, 2.0], help="[%(default)s]")
    parser.add_argument("--depth", type=int, default=1, help="words of a part's name [%(default)s]")
    parser.add_argument("--epoch", type=int, help="the snapshot [the last]")
    parser.add_argument("--test", action="store_true", help="on the test images")
    parser.add_argument("--samples", type=int, help="a seeded random subset of so many images")
    parser.add_argument("--steps", type=int, help="of PGD [the run's]")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything there")
    options = parser.parse_args(arguments)
    with clear_endings():
        learners = dial.learners_of(RunDirectory(options.run), options.epoch)
        machine = dial.Dial(learners, device=options.device, samples=options.samples, steps=options.steps)
        machine.check_samples(test=options.test)
        found = explore(machine, options.factors, depth=options.depth, test=options.test)
        if options.json is not None:
            write_json(options.json, found)
        show(found)


if __name__ == "__main__":
    main()
