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
import math
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
THREAT = "linf:0.18"
GLOBAL, MIXED, ENSEMBLE = "global learner", "mixed weights", "mixed outputs"
SETTINGS = {"redistribution every 2 epochs": 2, "no redistribution": 0}
"""Two ways to train: learners that stay close to one another, and learners that do not."""


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
        if excess == 0:
            return 0.0
        return excess / self.drift if self.drift else math.inf

    def lemma_excess(self) -> Tensor:
        """By how much mixing outputs changes the loss beyond sum_a gamma_a |l_a - l_a'|; Lemma 1 says: never."""
        bound = sum((gamma * self.differences[name] for name, gamma in self.gammas.items()), torch.zeros(()))
        return self.differences[ENSEMBLE] - bound


def replaced(images: ImageSet, position: int, other: ImageSet, source: int) -> ImageSet:
    """`images` with one example, label included, taken from another set."""
    pixels, labels = images.images.clone(), images.labels.clone()
    pixels[position], labels[position] = other.images[source], other.labels[source]
    return ImageSet(pixels, labels, images.classes, images.name)


def run_once(data: ImageSet, test: ImageSet, out: Path, *, epochs: int, every: int) -> RunDirectory:
    """Train on all of `data`. Test images serve the drift's log alone; no epoch is chosen by them."""
    overrides = [
        f"train.epochs={epochs}",
        f"mixing.redistribution.every={every}",
        f"validation.every={epochs}",
        f"validation.images={len(test)}",
        "validation.split=test",
        "validation.steps=1",
        "validation.rule=last",
        "train.threads=1",
    ]
    return train(RECIPE, overrides=overrides, out=out, device="cpu", data={"train": data, "test": test})


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
    out: Path, *, images: int = 512, epochs: int = 16, pairs: int = 5, every: int = 2, seed: int = 0
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
    reference = run_once(base, test, out / "reference", epochs=epochs, every=every)
    natural = Points(to_unit(test.images), test.labels)
    kinds = {"natural": natural, "attacked": attacked(load(reference, which="last"), natural)}
    before = {kind: outcome(reference, points) for kind, points in kinds.items()}
    changes: dict[str, list[Change]] = {kind: [] for kind in kinds}
    for number, (position, source) in enumerate(zip(positions, sources, strict=True)):
        data = replaced(base, position, pool, source)
        run = run_once(data, test, out / f"replaced-{number}", epochs=epochs, every=every)
        for kind, points in kinds.items():
            changes[kind].append(compare(before[kind], outcome(run, points)))
    return changes


def rows(changes: dict[str, list[Change]]) -> dict[str, list[str]]:
    """The table's rows by name, two cells for each kind of point."""
    gammas = next(iter(changes.values()))[0].gammas
    shown: dict[str, list[str]] = {}
    for subject in [*gammas, ENSEMBLE, MIXED, GLOBAL]:
        name = f"{subject} learner, gamma {gammas[subject]:.2f}" if subject in gammas else subject
        stacked = [torch.stack([change.differences[subject] for change in found]) for found in changes.values()]
        shown[name] = [f"{value:.3f}" for values in stacked for value in (values.max().item(), values.mean().item())]
    per_kind = list(changes.values())
    drifts = [sum(change.drift for change in found) / len(found) for found in per_kind]
    shown["sum of gamma_a eps_a"] = _largest([[change.weighted() for change in found] for found in per_kind])
    shown["drift (mean)"] = _largest([[drift] for drift in drifts])
    for subject in (MIXED, GLOBAL):
        needed = [[change.constant(subject) for change in found] for found in per_kind]
        shown[f"C needed: {subject}"] = _largest(needed)
    eq37 = [[change.mixing_terms.max().item() / max(change.drift, 1e-12) for change in found] for found in per_kind]
    shown["C needed: Eq. 37 alone"] = _largest(eq37)
    excess = [torch.stack([change.lemma_excess() for change in found]) for found in per_kind]
    shown["Lemma 1 exceeded by"] = _largest([[values.max().item()] for values in excess])
    shown["  at this share of points"] = _largest([[(values > 1e-3).double().mean().item()] for values in excess])
    return shown


def _largest(values: list[list[float]]) -> list[str]:
    return [cell for found in values for cell in (f"{max(found):.3g}", "")]


def table(changes: dict[str, dict[str, list[Change]]]) -> Table:
    """All settings, one below the other."""
    title = f"Change of the loss when one training example is replaced; attacked: PGD-20, {THREAT}"
    shown = Table(title=title, title_justify="left", min_width=len(title))
    for column in ("", "natural: largest", "mean", "attacked: largest", "mean"):
        shown.add_column(column, justify="right" if column else "left", no_wrap=True)
    for setting, found in changes.items():
        shown.add_row(f"[bold]{setting}[/bold]")
        for name, cells in rows(found).items():
            shown.add_row(name, *cells)
        shown.add_section()
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--images", type=int, default=512, help="training images")
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=5, help="replaced examples")
    given = parser.parse_args()
    changes = {}
    with tempfile.TemporaryDirectory() as folder:
        for setting, every in SETTINGS.items():
            out = Path(folder) / str(every)
            sizes = {"images": given.images, "epochs": given.epochs, "pairs": given.pairs}
            changes[setting] = measure(out, every=every, **sizes)
    console.print(f"{RECIPE}, {given.images} training images, {given.epochs} epochs, {given.pairs} replaced examples")
    console.print(table(changes))


if __name__ == "__main__":
    main()
