"""Training: accuracies of the global learner and of every learner, gamma, loss, drift and mixing gap by epoch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from generalist.core.run import GLOBAL
from generalist.report.drawing import series_role
from generalist.report.html import Html, folded, short, table
from generalist.report.plots import Line, lines, thinned
from generalist.report.printed import file_name
from generalist.report.runs import Collection, Epoch, Run
from generalist.report.section import Section, called, grid, names, note, numbers

MOST_ROWS = 40
"""The most epochs in a table; metrics.jsonl has all."""
MOST_MARKS = 100
DASHES = ("", "6 3", "2 2", "8 3 2 3")

Value = Callable[[Epoch], float | None]


def training_section(found: Collection) -> Section:
    section = Section("training", "Training")
    trained = [run for run in found.runs if run.epochs]
    for number, run in enumerate(trained):
        section.add(folded(short(run.name, 80), _curves(section, run), opened=number == 0, group=True))
    if trained:
        section.add(
            note(
                "Accuracies on the validation images. Thick: the global learner. Dotted verticals: redistribution, "
                "when every learner restarts from the global one. Drift: the learners' mean squared distance from it. "
                "Mixing gap: how far the mixed network's logits are from the mixture of logits."
            )
        )
        ends = [[epoch for epoch in run.epochs if epoch.validation is not None][-1:] for run in trained]
        warned = {short(epoch.warning): None for end in ends for epoch in end if epoch.warning}
        section.parts += [note(text) for text in list(warned)[:4]]
    if lacking := [run for run in found.runs if not run.epochs]:
        commands = [called("train", run, "--resume") for run in lacking]
        section.missing(f"No epochs of {names([run.name for run in lacking])}", commands)
    return section


def _curves(section: Section, run: Run) -> Html:
    validated = [epoch for epoch in run.epochs if epoch.validation is not None]
    kinds = list(dict.fromkeys(kind for epoch in validated for kind in _accuracy(epoch, GLOBAL)))[:8]
    learners = _learners(run)
    subjects = [GLOBAL, *learners] if len(learners) > 1 else [GLOBAL]
    panels = [
        (f"{short(kind, 30)} accuracy", "%", {name: _accuracy_of(name, kind) for name in subjects}) for kind in kinds
    ]
    panels.append(("training loss", "", {name: _loss_of(name) for name in learners}))
    if len(learners) > 1:
        panels.append(("gamma", "share", {name: _gamma_of(name) for name in learners}))
        panels.append(("drift", "", {GLOBAL: _drift}))
        panels.append(("mixing gap", "", {GLOBAL: _gap}))
    figures = [_panel(section, run, title, unit, series) for title, unit, series in panels]
    return grid(*(figure for figure in figures if figure is not None))


def _learners(run: Run) -> list[str]:
    """The learners of the last epoch: a run's last stage may have others than its first."""
    return list(run.epochs[-1].gamma)[:12] or [learner.name for learner in run.recipe.learners]


def _panel(section: Section, run: Run, title: str, unit: str, series: dict[str, Value]) -> Html | None:
    drawn = []
    learners = _learners(run)
    for name, value in series.items():
        points = [(float(epoch.epoch), found) for epoch in run.epochs if (found := value(epoch)) is not None]
        if points:
            drawn.append(_line(name, points, learners.index(name) if name in learners else 0))
    if not drawn:
        return None
    marks = thinned([float(epoch.epoch) for epoch in run.epochs if epoch.redistributed], MOST_MARKS)
    alt = f"{short(run.name, 80)}: {title} by epoch, of {', '.join(line.name for line in drawn)}"
    drawing = lines(
        file_name("training", run.name, title.removesuffix(" accuracy")), title, unit, drawn, marks, alt=alt
    )
    return section.figure(drawing, details=numbers(_table(run, alt, series)))


def _line(name: str, points: Sequence[tuple[float, float]], number: int) -> Line:
    if name == GLOBAL:
        return Line(name, points, "ink", width=2.4)
    return Line(short(name, 30), points, series_role(number), dash=DASHES[number % len(DASHES)])


def _table(run: Run, caption: str, series: dict[str, Value]) -> Html:
    known = [epoch for epoch in run.epochs if any(value(epoch) is not None for value in series.values())]
    kept = thinned(known, MOST_ROWS)
    more = f" ({len(kept)} of {len(known)} epochs; metrics.jsonl has all)" if len(kept) < len(known) else ""
    rows = [
        [f"{epoch.epoch}{' *' if epoch.redistributed else ''}", *(_text(value(epoch)) for value in series.values())]
        for epoch in kept
    ]
    heads = ["epoch", *(short(name, 40) for name in series)]
    return table(heads, rows, caption=f"{caption}; * redistributed{more}")


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _accuracy(epoch: Epoch, subject: str) -> dict[str, float | None]:
    return epoch.validation.accuracy.get(subject, {}) if epoch.validation else {}


def _accuracy_of(subject: str, kind: str) -> Value:
    def value(epoch: Epoch) -> float | None:
        found = _accuracy(epoch, subject).get(kind)
        return None if found is None else 100 * found

    return value


def _loss_of(learner: str) -> Value:
    return lambda epoch: epoch.train.get(learner, {}).get("loss")


def _gamma_of(learner: str) -> Value:
    return lambda epoch: epoch.gamma.get(learner)


def _drift(epoch: Epoch) -> float | None:
    return epoch.validation.drift if epoch.validation else None


def _gap(epoch: Epoch) -> float | None:
    return epoch.validation.mixing_gap if epoch.validation else None
