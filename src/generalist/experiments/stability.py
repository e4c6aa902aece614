"""How much does one training example matter? The stability bound of the second paper (Theorem 2), measured on digits.

Two training sets that differ in one example are trained with everything else equal. A network's eps is the largest
change of its loss over the test points between the two runs. The theorem bounds the eps of the mixed network by

    sum_a gamma_a eps_a + C sum_a gamma_a ||theta_a - theta_bar||^2

with an unknown constant C. This measures every other quantity, and so how large C would have to be. It also looks at
the two steps of the proof: that averaging outputs amplifies no change (Lemma 1), and that mixing weights is nearly
averaging outputs (Eq. 36). docs/method.md has the output and says what it means.

Run it: python -m generalist.experiments.stability
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn

from generalist.api import load, train
from generalist.attacks.accuracy import logits_of
from generalist.attacks.pgd import AttackOptions, pgd
from generalist.attacks.threats import parse_threat
from generalist.console import console
from generalist.core.errors import DataError
from generalist.core.random import permutation
from generalist.core.run import RunDirectory
from generalist.data.digits import load_digits
from generalist.data.sets import ImageSet, to_unit
from generalist.tensors.flat import Flat
from generalist.training.global_learner import mix
from generalist.training.measures import ensemble

RECIPE = "digits-t"
THREAT = "linf:0.15"
GLOBAL, MIXED, ENSEMBLE = "global learner", "mix of the weights", "mix of the outputs"


@dataclass(frozen=True)
class Points:
    """Test points that are the same for every run: an adversarial image made anew for each run would be another z."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Outcome:
    """What one run leaves: its networks' losses at each point, and how far apart its learners ended."""

    gammas: dict[str, float]
    losses: dict[str, Tensor]
    """Cross-entropy by subject: the learners by name, the mixtures, the global learner."""
    drift: float
    """sum_a gamma_a ||theta_a - theta_bar||^2, theta_bar the global learner, as the run logged it."""


@dataclass(frozen=True)
class Change:
    """The effect of one replaced example at each point."""

    gammas: dict[str, float]
    differences: dict[str, Tensor]
    """|loss - loss'| by subject."""
    mixing_terms: Tensor
    """The proof's (I) + (III): what separates mixed weights from mixed outputs, in both runs."""
    drift: float
    """Mean of both runs: (I) + (III) <= L M (drift + drift') = C (drift + drift') / 2 with C = 2 L M."""

    def weighted(self) -> float:
        """sum_a gamma_a eps_a, eps_a the largest difference over the points."""
        return sum(gamma * self.differences[name].max().item() for name, gamma in self.gammas.items())

    def constant(self, subject: str) -> float:
        """The smallest C with which the bound holds for `subject` here; 0 where it holds without the second term."""
        excess = max(0.0, self.differences[subject].max().item() - self.weighted())
        return excess / self.drift if excess else 0.0

    def lemma_violations(self) -> float:
        """Share of the points at which mixing outputs changes the loss by more than sum_a gamma_a |l_a - l_a'|."""
        bound = sum((gamma * self.differences[name] for name, gamma in self.gammas.items()), torch.zeros(()))
        return (self.differences[ENSEMBLE] > bound + 1e-6).float().mean().item()


def replaced(images: ImageSet, position: int, other: ImageSet, source: int) -> ImageSet:
    """`images` with one example, label included, taken from another set."""
    pixels, labels = images.images.clone(), images.labels.clone()
    pixels[position], labels[position] = other.images[source], other.labels[source]
    return ImageSet(pixels, labels, images.classes, images.name)


def run_once(data: ImageSet, test: ImageSet, out: Path, *, epochs: int, recipe: str = RECIPE) -> RunDirectory:
    """Train on all of `data`. Test images serve the drift's log alone; no epoch is chosen by them."""
    overrides = [
        f"train.epochs={epochs}",
        f"validation.every={epochs}",
        f"validation.images={len(test)}",
        "validation.split=test",
        "validation.rule=last",
        "train.threads=1",
    ]
    return train(recipe, overrides=overrides, out=out, device="cpu", data={"train": data, "test": test})


def outcome(run: RunDirectory, points: Points) -> Outcome:
    """The losses of every network of a finished run."""
    record = run.read_metrics()[-1]
    gammas: dict[str, float] = record["gamma"]
    shares = list(gammas.values())
    flats = [Flat(load(run, which=name)) for name in gammas]
    mixed = Flat(load(run, which="last"))
    logits = {name: logits_of(flat.module, points.x) for name, flat in zip(gammas, flats, strict=True)}
    outputs = ensemble(list(logits.values()), shares)
    logits[GLOBAL] = logits_of(mixed.module, points.x)
    mixed.vector.copy_(mix([flat.vector for flat in flats], shares))
    logits |= {ENSEMBLE: outputs, MIXED: logits_of(mixed.module, points.x)}
    losses = {name: F.cross_entropy(values.double(), points.y, reduction="none") for name, values in logits.items()}
    return Outcome(gammas, losses, record["validation"]["drift"])


def compare(first: Outcome, second: Outcome) -> Change:
    """What the replaced example changed."""
    differences = {name: (loss - second.losses[name]).abs() for name, loss in first.losses.items()}
    mixing = sum(((one.losses[MIXED] - one.losses[ENSEMBLE]).abs() for one in (first, second)), torch.zeros(()))
    return Change(first.gammas, differences, mixing, (first.drift + second.drift) / 2)


def attacked(model: nn.Module, points: Points) -> Points:
    """The same points moved by PGD-20 against `model`."""
    x = pgd(
        model,
        points.x,
        points.y,
        threat=parse_threat(THREAT).build(),
        options=AttackOptions(steps=20),
        seed=0,
        purpose="stability",
        index=torch.arange(len(points.y)),
    )
    return Points(x, points.y)


def measure(
    out: Path, *, images: int = 512, epochs: int = 16, pairs: int = 8, seed: int = 0
) -> dict[str, list[Change]]:
    """The effect of each of `pairs` replaced examples, on natural and on attacked test points.

    The first `images` training digits are the training set; each replacement is one of the digits left over.
    """
    pool, test = load_digits()
    if not 0 < images < len(pool):
        raise DataError(f"images must be 1 to {len(pool) - 1}, not {images}: replacements come from those left over")
    base = ImageSet(pool.images[:images], pool.labels[:images], pool.classes, pool.name)
    positions = permutation(images, seed, "stability/position")[:pairs].tolist()
    sources = (images + permutation(len(pool) - images, seed, "stability/source")[:pairs]).tolist()
    reference = run_once(base, test, out / "reference", epochs=epochs)
    natural = Points(to_unit(test.images), test.labels)
    kinds = {"natural": natural, f"attacked ({THREAT})": attacked(load(reference, which="last"), natural)}
    before = {kind: outcome(reference, points) for kind, points in kinds.items()}
    changes: dict[str, list[Change]] = {kind: [] for kind in kinds}
    for number, (position, source) in enumerate(zip(positions, sources, strict=True)):
        data = replaced(base, position, pool, source)
        run = run_once(data, test, out / f"replaced-{number}", epochs=epochs)
        for kind, points in kinds.items():
            changes[kind].append(compare(before[kind], outcome(run, points)))
    return changes


def table(changes: dict[str, list[Change]]) -> Table:
    """Largest and mean change of the loss by subject, over all pairs."""
    shown = Table(title="|loss - loss'| over test points and replaced examples", title_justify="left")
    shown.add_column("")
    shown.add_column("gamma", justify="right")
    for kind in changes:
        shown.add_column(f"{kind}: largest", justify="right")
        shown.add_column("mean", justify="right")
    gammas = next(iter(changes.values()))[0].gammas
    for subject in [*gammas, ENSEMBLE, MIXED, GLOBAL]:
        cells = []
        for found in changes.values():
            values = torch.stack([change.differences[subject] for change in found])
            cells += [f"{values.max().item():.3f}", f"{values.mean().item():.4f}"]
        name = f"{subject} learner" if subject in gammas else subject
        shown.add_row(name, f"{gammas[subject]:.2f}" if subject in gammas else "", *cells)
    return shown


def summary(changes: dict[str, list[Change]]) -> list[str]:
    """The bound and the steps of its proof, in words and numbers."""
    lines = []
    for kind, found in changes.items():
        count = len(found)
        weighted = max(change.weighted() for change in found)
        holds = {name: sum(change.constant(name) == 0 for change in found) for name in (MIXED, GLOBAL)}
        needed = {name: max(change.constant(name) for change in found) for name in (MIXED, GLOBAL)}
        mixing = max(change.mixing_terms.max().item() / change.drift for change in found if change.drift)
        lemma = sum(change.lemma_violations() for change in found) / count
        lines += [
            f"{kind}: sum gamma_a eps_a is at most {weighted:.3f}, drift {sum(c.drift for c in found) / count:.3f}",
            f"  bound without its second term: holds for {holds[MIXED]} of {count} pairs (mix of the weights), "
            f"{holds[GLOBAL]} of {count} (global learner)",
            f"  smallest C for all pairs: {needed[MIXED]:.3g} (mix of the weights), {needed[GLOBAL]:.3g} (global learner)",
            f"  smallest C for Eq. 37 alone: {mixing:.3g};  points where Lemma 1 fails: {100 * lemma:.1f}%",
        ]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--images", type=int, default=512, help="training images")
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=8, help="replaced examples")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        changes = measure(Path(folder), images=given.images, epochs=given.epochs, pairs=given.pairs)
    console.print(f"{RECIPE}, {given.images} training images, {given.epochs} epochs, {given.pairs} replaced examples")
    console.print(table(changes))
    for line in summary(changes):
        console.print(line, soft_wrap=True)


if __name__ == "__main__":
    main()
