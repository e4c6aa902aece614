"""The demonstration: Generalist-T on handwritten digits beside natural and adversarial training of equal budget."""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path

import generalist
from generalist.api import evaluate, load, train
from generalist.console import accuracy_table, clear_endings, console, training_listener
from generalist.core.errors import RunError
from generalist.core.files import write_text
from generalist.core.run import RunDirectory
from generalist.recipe import load_recipe
from generalist.training.loop import Listener

RECIPES = ("digits-nt", "digits-at", "digits-t")
GENERALIST = "digits-t: the generalist"
ATTACK = "pgd-20"
MARKER = ".generalist-demo"


def clear(out: Path) -> None:
    """Make room for the three runs. A demonstration is repeated often, but it deletes no other runs."""
    before = [out / name for name in RECIPES if (out / name).exists()]
    if before and not (out / MARKER).is_file():
        raise RunError(f"{before[0]} was not made by the demonstration, which would replace it; choose another --out")
    for path in before:
        shutil.rmtree(path)
    write_text(out / MARKER, "The demonstration of generalist replaces its runs in this folder.\n")


def accuracies(run: RunDirectory, which: str, threats: list[str]) -> dict[str, float]:
    """Test accuracy of one network of a run: natural, and under PGD-20 in each threat model."""
    found = evaluate(load(run, which=which), "digits", threats=threats, attacks=["natural", ATTACK])
    return {name: accuracy.value for name, accuracy in found.items()}


def run_demo(out: Path) -> dict[str, dict[str, float]]:
    """Train the three recipes below `out`; returns the test accuracies by row of the table."""
    rows: dict[str, dict[str, float]] = {}
    recipe = load_recipe("digits-t")
    threats = [str(threat) for threat in recipe.threats()]
    for name in RECIPES:
        started = time.monotonic()
        with training_listener(name) as listener:  # shows the bar with the time left; validations would bury the table
            quiet = Listener(say=listener.say, iteration=listener.iteration)
            run = train(name, out=out / name, device="cpu", listener=quiet)
        console.print(f"trained {name} in {time.monotonic() - started:.0f} s")
        rows[GENERALIST if name == "digits-t" else name] = accuracies(run, "last", threats)
    for learner in recipe.learners:
        rows[f"  its {learner.name} learner"] = accuracies(RunDirectory(out / "digits-t"), learner.name, threats)
    return rows


def summary(rows: dict[str, dict[str, float]]) -> str:
    """How far the generalist is from each specialist, in points."""
    ours, natural, robust = rows[GENERALIST], rows["digits-nt"], rows["digits-at"]
    against = {name: natural if name == "natural" else robust for name in ours}
    points = [f"{name} {100 * (ours[name] - against[name][name]):+.1f}" for name in ours]
    return "The generalist against the specialist of each column, in points: " + ", ".join(points)


def demonstrate(out: Path) -> None:
    """Train, evaluate and show the result."""
    clear(out)
    console.print(f"generalist {generalist.__version__}: natural, linf and l2 learners, one network in the end")
    rows = run_demo(out)
    console.print(accuracy_table("Test accuracy (%) on 500 handwritten digits", rows))
    console.print(summary(rows), soft_wrap=True)
    console.print(f"runs: {', '.join(str(out / name) for name in RECIPES)}", soft_wrap=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    with clear_endings():
        demonstrate(parser.parse_args().out)


if __name__ == "__main__":
    main()
