"""The table of benchmarks/baselines.py: which methods there are, what their runs say, and how the table is written.

Every figure is read from the runs' own files (recipe.yaml, environment.json, metrics.jsonl, evaluation/*/summary.json),
so the table can be made again at any time, from whatever is there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from generalist.core.errors import GeneralistError
from generalist.core.files import write_json, write_text
from generalist.core.run import RunDirectory
from generalist.core.schedule import Schedule
from generalist.recipe import Recipe, load_recipe, stage_recipe
from generalist.shipped import shipped_names
from generalist.sweep.measurements import final_measurements

NATURAL, PGD, AA = "natural", "pgd-20", "aa"
UNION, MEAN = "union_worst_case", "mean_over_threats"
GENERALISTS = ("d", "d-linf-l2", "t")

PASSES: dict[str, float] = {
    "at": 23,
    "trades-6": 27,
    "trades-1": 27,
    "nt": 3,
    "generalist-d": 26,
    "generalist-d-linf-l2": 46,
    "generalist-t": 49,
    "at-max": 45,
    "at-linf-l2": 46,
    "msd": 44,
    "e-at": 23,
    "ramp": 49,
    "fast-at": 5,
    "mart": 26,
    "awp": 26,
    "at-half": 26,
    "fat": 23,
    "iat": 26,
    "rst": 26,
    "score": 27,
    "score-at": 23,
    "agr": 26,
    "part": 25,
    "rmc": 68,
}
"""The queue, with the most important rows first, and what an image costs in an epoch with PGD-10, counted in forward
passes: a step of an attack is 2 (forward, gradient of the image), a training pass 3 (forward, gradients of activations
and of weights). So AT is 10 x 2 + 3. rmc: both ends, and the curve at half their length."""


@dataclass(frozen=True)
class Method:
    """A row: a shipped recipe with the changes that all rows share."""

    name: str
    recipe: str
    changes: tuple[str, ...]
    resolved: Recipe

    @property
    def epochs(self) -> list[int]:
        """The epochs of the run, or of each of its stages."""
        recipe = self.resolved
        stages = [stage_recipe(recipe, stage, trust_code=False) for stage in recipe.stages]
        return [stage.train.epochs for stage in stages or [recipe]]

    def against(self, threats: Sequence[str]) -> str:
        """What its learners train against: just the norm if that is one of the table's threats, else with its eps."""
        words = []
        for learner in self.resolved.learners:
            own = [str(threat) for threat in learner.threats()]
            words.append(", ".join(t.partition(":")[0] if t in threats else t for t in own) or NATURAL)
        return " + ".join(words)

    def cost(self, epochs: int) -> float | None:
        """Passes per image relative to AT of so many epochs, if this method's are known."""
        own = self.resolved.train.epochs / epochs
        return round(own * PASSES[self.name] / PASSES["at"], 2) if self.name in PASSES else None


def family_of(dataset: str) -> dict[str, str]:
    """The shipped recipes of a family by the name of the method, in the order of the queue."""
    prefix, shipped = f"baseline-{dataset}-", shipped_names()
    found = {name.removeprefix(prefix): name for name in shipped if name.startswith(prefix)}
    if not found:
        raise GeneralistError(f"no recipe is called {prefix}METHOD; try --dataset cifar10-resnet18 or digits")
    for variant in GENERALISTS:
        # The plain one of two, as the baselines are not tuned either.
        names = (f"{dataset}-{variant}-plain", f"{dataset}-{variant}")
        if own := [name for name in names if name in shipped]:
            found[f"generalist-{variant}"] = own[0]
    known = [name for name in PASSES if name in found]
    return {name: found[name] for name in [*known, *sorted(found.keys() - PASSES.keys())]}


def rescaled(recipe: Recipe, *, epochs: int, batch_size: int | None = None) -> list[str]:
    """The changes that give a recipe another length and another batch size.

    Each learning rate grows with the batch (the linear rule of Goyal et al., 2017), and an average over iterations
    reaches back over the same share of training as before: learners that restart from one that lags would lose most of
    what they have learnt in between."""
    times = (batch_size or recipe.train.batch_size) / recipe.train.batch_size
    rates = {f"learners.{i}": learner.optimizer.lr for i, learner in enumerate(recipe.learners)}
    for i, stage in enumerate(recipe.stages):
        for j, learner in enumerate(stage.change.get("learners", [])):
            rates[f"stages.{i}.change.learners.{j}"] = learner["optimizer"]["lr"]
    changes = [f"train.epochs={epochs}"]
    if times != 1:
        changes.append(f"train.batch_size={batch_size}")
        changes += [f"{at}.optimizer.lr={lr * times:g}" for at, lr in rates.items() if isinstance(lr, float)]
    shorter = times * recipe.train.epochs / epochs
    decay = recipe.mixing.decay
    if shorter != 1:
        if isinstance(decay, Schedule):
            changes.append(f"mixing.decay.values={[value**shorter for value in decay.values]}")
        elif decay:
            changes.append(f"mixing.decay={decay**shorter:g}")
    return changes


# -- what is there ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wanted:
    """The evaluation that every row gets."""

    threats: tuple[str, ...]
    attack: str
    samples: int
    precision: str

    def columns(self, attack: str) -> list[str]:
        return [f"{attack}/{threat}" for threat in self.threats]

    def subset(self, images: int) -> int:
        """The number of test images for the strong attack."""
        return min(self.samples, images)


def trained(run: Path) -> bool:
    """Whether the run has finished. Nothing else is evaluated here, so its weights may be gone afterwards."""
    return RunDirectory(run).last.is_file() or any(run.glob("evaluation/*/summary.json"))


def evaluation(
    run: Path, wanted: Wanted, attack: str, samples: int | None = None
) -> tuple[Path, dict[str, Any]] | None:
    """The directory and the summary of the evaluation by `attack` of so many images (None: of all), if it is done."""
    for path in sorted(run.glob("evaluation/*/summary.json")):
        summary = json.loads(path.read_text())
        identity, count = summary["identity"], summary["images"] if samples is None else samples
        asked = (identity["columns"], summary["samples"], identity["precision"])
        if asked == (wanted.columns(attack), count, wanted.precision) and summary["subject"] == "best":
            return path.parent, summary
    return None


@dataclass
class Row:
    """What is known about a method so far."""

    method: Method
    status: str
    """`done`, `evaluated in part`, `trained`, `begun`, `failed` or `not started`."""
    reason: str = ""
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    minutes: dict[str, Any] = field(default_factory=dict)
    images: dict[str, int] = field(default_factory=dict)
    evaluations: list[Path] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    best_epoch: int | None = None

    def value(self, name: str) -> float | None:
        return self.figures[name]["value"] if name in self.figures else None


def read_row(method: Method, run: Path, wanted: Wanted, *, steps: Sequence[Mapping[str, Any]]) -> Row:
    """The row of a method, from its run and from the log of the steps."""
    own = [step for step in steps if step["name"] == method.name]
    failed = own[-1].get("reason", "") if own else ""
    row = Row(method, "begun" if run.is_dir() else "not started", failed)
    kinds = dict.fromkeys(str(step["step"]) for step in own)
    wall = {kind: sum(step["seconds"] for step in own if step["step"] == kind) for kind in kinds}
    row.minutes["wall"] = {kind: round(seconds / 60, 2) for kind, seconds in wall.items()}
    if RunDirectory(run).environment.is_file():
        keys = ("generalist", "commit", "python", "torch", "device")
        environment = json.loads(RunDirectory(run).environment.read_text())
        row.environment = {key: environment.get(key) for key in keys}
    if trained(run):
        _read_figures(row, run, wanted)
    if failed and row.status != "done":
        row.status = "failed"
    return row


def _read_figures(row: Row, run: Path, wanted: Wanted) -> None:
    recipe = load_recipe(RunDirectory(run).recipe)
    measured = final_measurements(RunDirectory(run), recipe, epoch="best")
    row.status, row.best_epoch = "trained", measured["epoch"]
    row.minutes["training"] = round(measured["train_seconds"] / 60, 2)
    plain = evaluation(run, wanted, PGD)
    strong = evaluation(run, wanted, wanted.attack, wanted.subset(plain[1]["images"])) if plain else None
    for attack, found in ((PGD, plain), (wanted.attack, strong)):
        if found is None:
            continue
        folder, summary = found
        row.status = "done" if strong else "evaluated in part"
        row.evaluations.append(folder)
        row.images[attack] = summary["samples"]
        row.warnings += [text for text in summary["warnings"] if text not in row.warnings]
        row.minutes["evaluation"] = round(row.minutes.get("evaluation", 0) + summary["seconds"]["total"] / 60, 2)
        row.figures |= {column: summary["accuracy"][column] for column in wanted.columns(attack)}
        if attack == PGD:
            row.figures[NATURAL] = summary["accuracy"][NATURAL]
        else:
            row.figures |= {name: summary[name] for name in (UNION, MEAN) if name in summary}


# -- how the table is written -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """All rows, and what they have in common."""

    dataset: str
    epochs: int
    command: str
    wanted: Wanted
    rows: list[Row]
    commands: dict[str, list[str]]
    """The commands of each method."""
    jobs: int
    batch_size: int | None = None
    """The batch size of every method, unless each recipe's own is used."""

    def sorted_rows(self) -> list[Row]:
        """The rows with a figure, the most robust under all threats first, then by the other figures."""
        keys = [UNION, *self.wanted.columns(PGD), NATURAL]
        known = [row for row in self.rows if row.figures]
        return sorted(known, key=lambda row: [-1.0 if (v := row.value(k)) is None else v for k in keys], reverse=True)

    def write(self, out: Path) -> None:
        write_json(out / "baselines.json", self.as_json(out))
        write_text(out / "baselines.md", self.as_markdown())

    def as_json(self, out: Path) -> dict[str, Any]:
        wanted = self.wanted
        return {
            "format": 1,
            "command": self.command,
            "dataset": self.dataset,
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "jobs": self.jobs,
            "threats": list(wanted.threats),
            "attack": wanted.attack,
            "samples": wanted.samples,
            "precision": wanted.precision,
            "rows": [self._row_json(row, out) for row in self.rows],
        }

    def _row_json(self, row: Row, out: Path) -> dict[str, Any]:
        method = row.method
        return {
            "method": method.name,
            "recipe": method.recipe,
            "changes": list(method.changes),
            "against": method.against(self.wanted.threats),
            "epochs": method.epochs,
            "cost_relative_to_at": method.cost(self.epochs),
            "status": row.status,
            "reason": row.reason,
            "best_epoch": row.best_epoch,
            "figures": row.figures,
            "images": row.images,
            "minutes": row.minutes,
            "warnings": row.warnings,
            "run": f"runs/{method.name}",
            "evaluations": [path.relative_to(out).as_posix() for path in row.evaluations],
            "commands": self.commands[method.name],
            "environment": row.environment,
        }

    def as_markdown(self) -> str:
        rows = self.sorted_rows()
        parts = [
            f"# Baselines of {self.dataset}, {self.epochs} epochs",
            f"```sh\n{self.command}\n```",
            "Every method was trained on the same short schedule and evaluated in the same way. A schedule this short "
            "ranks the methods only under this budget: at their full length they may stand in another order.",
        ]
        if rows:
            parts += [self._grid(rows), "\n".join(f"- {note}" for note in self._notes(rows))]
        else:
            parts.append("No figure is there yet.")
        if warned := [f"- {row.method.name}: {text}" for row in rows for text in row.warnings]:
            parts.append("What the evaluation warns of:\n\n" + "\n".join(warned))
        if lacking := [row for row in self.rows if row.status != "done"]:
            names: dict[str, list[str]] = {}
            for row in lacking:
                names.setdefault(f"{row.status} ({row.reason})" if row.reason else row.status, []).append(
                    row.method.name
                )
            parts.append("Not done:\n\n" + "\n".join(f"- {', '.join(own)}: {how}" for how, own in names.items()))
        return "\n\n".join(parts) + "\n"

    def _grid(self, rows: list[Row]) -> str:
        wanted, norms = self.wanted, [threat.partition(":")[0] for threat in self.wanted.threats]
        names = {NATURAL: NATURAL}
        for attack in (PGD, wanted.attack):
            short = {PGD: "PGD-20", AA: "AA"}.get(attack, attack)
            labels = norms if len(set(norms)) == len(norms) else list(wanted.threats)
            names |= {f"{attack}/{t}": f"{short} {label}" for t, label in zip(wanted.threats, labels, strict=True)}
        if len(wanted.threats) > 1:
            names |= {UNION: "union", MEAN: "mean"}
        best = {name: max((row.value(name) or 0 for row in rows), default=0) for name in names}
        heads = ["method", "trains against", "epochs", "cost", *names.values(), "training, min", "evaluation, min"]
        lines = [heads, ["---", "---", *["---:"] * (len(heads) - 2)]]
        for row in rows:
            cells = [_percent(row.value(name), best=best[name]) for name in names]
            times = [f"{row.minutes[kind]:.1f}" if kind in row.minutes else "-" for kind in ("training", "evaluation")]
            epochs = " + ".join(map(str, row.method.epochs))
            cost = row.method.cost(self.epochs)
            told = [row.method.name, row.method.against(wanted.threats), epochs, "-" if cost is None else f"{cost:.2f}"]
            lines.append([*told, *cells, *times])
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def _notes(self, rows: list[Row]) -> list[str]:
        """What one must know to read the table, the most important first."""
        wanted, name = self.wanted, self._attack_name()
        notes = [
            f"Test accuracy in percent; threats {' and '.join(wanted.threats)}. The highest of a column is bold, "
            "even where the next one differs from it by no more than chance."
        ]
        if len(wanted.threats) > 1:
            notes.append(
                f"union: right under {name} in every threat, image by image; the rows are sorted by it. mean: of the "
                f"accuracies under it{', which the papers call union' if wanted.attack == AA else ''}."
            )
        return [
            *notes,
            *self._about_images(rows),
            "Of each run the weights of its best epoch: the highest sum of natural accuracy and accuracy under the "
            "threats that it trains against, on images held out of training, unless its recipe has another rule.",
            "Epochs: one number for each stage. A recipe shorter than the schedule keeps its own length."
            + self._about_batches(),
            "Cost: forward and backward passes an image through all of training, those of at being 1; counted, while "
            "minutes depend on what else ran.",
            "Minutes of training are those of the iterations, with compilation, without start and validation; those of "
            "evaluation leave out its start." + self._about_sharing(),
            *self._about_environments(rows),
        ]

    def _about_images(self, rows: list[Row]) -> list[str]:
        """How many images each figure is measured on, and how accurate it is."""
        notes, wanted = [], self.wanted
        columns = {PGD: [NATURAL, *wanted.columns(PGD)], wanted.attack: [*wanted.columns(wanted.attack), UNION]}
        whole = {row.images[PGD] for row in rows if PGD in row.images}
        for attack, what in ((PGD, "natural and PGD-20"), (wanted.attack, self._attack_name())):
            cells = [row.figures[name] for row in rows for name in columns[attack] if name in row.figures]
            if not cells:
                continue
            half = 100 * max((cell["interval"][1] - cell["interval"][0]) / 2 for cell in cells)
            counts = {row.images[attack] for row in rows if attack in row.images}
            which = "all {:,} test images" if counts == whole else "{:,} of them, the same for all, drawn by seed 0"
            notes.append(
                f"{what}: {which.format(max(counts))}; 95% intervals (Wilson) of at most {half:.1f} points either way, "
                "each in baselines.json."
            )
        return notes

    def _about_environments(self, rows: list[Row]) -> list[str]:
        """What the runs were trained on: one line, unless they differ in more than the commit."""
        commits: dict[str, dict[str, None]] = {}
        for place in (row.environment for row in rows if row.environment):
            versions = f"generalist {place['generalist']}, torch {place['torch']}, Python {place['python']}"
            own = commits.setdefault(f"{versions}; device: {place['device']}", {})
            if place["commit"]:
                own[place["commit"][:12]] = None
        return [f"One seed. {where}" + f"; commit {', '.join(own)}" * bool(own) + "." for where, own in commits.items()]

    def _about_batches(self) -> str:
        size = self.batch_size
        return f" Batches of {size} images; learning rates are the recipes' in proportion to it." if size else ""

    def _attack_name(self) -> str:
        return "AutoAttack (AA)" if self.wanted.attack == AA else self.wanted.attack

    def _about_sharing(self) -> str:
        return f" Up to {self.jobs} processes shared the device, which makes both longer." if self.jobs > 1 else ""


def _percent(value: float | None, *, best: float) -> str:
    if value is None:
        return "-"
    text = f"{100 * value:.2f}"
    return f"**{text}**" if value == best and value > 0 else text
