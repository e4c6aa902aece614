"""The curve of the dial: accuracies along the trade-off, their Pareto front, and the point that fits a wish."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from generalist._version import __version__
from generalist.core.errors import GeneralistError, RunError
from generalist.core.files import check_folder, write_text
from generalist.core.options import Fraction, Options, first_problem
from generalist.core.run import RunDirectory
from generalist.dial.learners import ROUNDING, Learners, Source, learners_of
from generalist.dial.turning import Dial, Kind, Statistics, check_statistics
from generalist.evaluation.accuracy import NATURAL, Accuracy

MAX_POINTS = 101
MAX_BYTES = 64 << 20
"""A larger file is no curve."""
FOR_REPORT = (
    "test accuracies are for reporting: front and suggestion were made on the validation images, and a gamma chosen by "
    "looking at the test column is optimistic there"
)
CHOSEN_ON_TEST = (
    "the run validates on its test images (validation.split: test): statistics, front and suggestion are chosen on "
    "them, and these accuracies are optimistic"
)


class Measured(Options):
    """An accuracy as curve.json keeps it."""

    correct: int = Field(ge=0)
    """Images that are classified correctly."""

    total: int = Field(ge=1)
    """All images."""

    value: float = Field(ge=0, le=1)
    """The accuracy."""

    interval: tuple[float, float]
    """Its 95% Wilson interval."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.correct > self.total:
            raise ValueError(f"of {self.total} images {self.correct} cannot be right")
        return self

    @classmethod
    def of(cls, accuracy: Accuracy) -> Self:
        return cls(correct=accuracy.correct, total=accuracy.total, value=accuracy.value, interval=accuracy.interval)


class Point(Options):
    """One model of the curve."""

    gamma: dict[str, float]
    """Every learner's share, in the dial's order."""

    statistics: Kind
    """Where its BatchNorm statistics come from."""

    validation: dict[str, Measured]
    """Accuracy on the validation images: `natural`, and under PGD by threat."""

    test: dict[str, Measured] | None = None
    """The same on the test images, if asked for."""

    pareto: bool = False
    """Whether no other point is at least as good in every accuracy and better in one, on the validation images."""

    @property
    def natural(self) -> float:
        return self.validation[NATURAL].value

    @property
    def robust(self) -> float:
        """The lowest of the PGD accuracies; the natural one if the run has no threat."""
        attacked = [accuracy.value for name, accuracy in self.validation.items() if name != NATURAL]
        return min(attacked, default=self.natural)


class Wish(Options):
    """What a point must have, as fractions of the validation images."""

    natural_at_least: Fraction | None = None
    """Natural accuracy, from 0 to 1."""

    robust_at_least: Fraction | None = None
    """PGD accuracy in every threat, from 0 to 1."""

    def shortfall(self, point: Point) -> float:
        """By how much a point misses the wish, summed over both accuracies; 0 if it is granted."""
        wanted = ((self.natural_at_least, point.natural), (self.robust_at_least, point.robust))
        missed = [least - value for least, value in wanted if least is not None]
        return sum(miss for miss in missed if miss > ROUNDING)  # in floats, 99.9 / 100 is more than 999 / 1000

    def __str__(self) -> str:
        wanted = (("natural", self.natural_at_least), ("robust", self.robust_at_least))
        return " and ".join(f"{name} accuracy of at least {_percent(v)}" for name, v in wanted if v is not None)


class Suggestion(Options):
    """The answer to a wish."""

    wish: Wish
    """What was asked for."""

    granted: bool
    """Whether any point of the curve has it."""

    gamma: dict[str, float]
    """The shares of the best point that has it, or of the one that comes closest."""

    text: str
    """The answer in words."""


class Curve(Options):
    """What `generalist mix RUN --curve N` found: RUN/mix/curve.json."""

    version: str
    """The version of generalist that made it."""

    epoch: int = Field(ge=1)
    """The epoch of the snapshot whose learners are mixed."""

    source: Source = "raw"
    """What is mixed: their weights, their averages over time, or their parts of the global learner."""

    own_gamma: dict[str, float]
    """The shares of the run's own network, in the dial's order."""

    split: Literal["held-out", "test"]
    """Which images `validation` refers to."""

    steps: int = Field(ge=1)
    """Steps of PGD."""

    statistics: Statistics
    """Which BatchNorm statistics were asked for."""

    points: list[Point] = Field(min_length=1)
    """Every point, by rising share of the lead learner."""

    suggestion: Suggestion | None = None
    """The answer to the wish, if there was one."""

    notes: list[str] = Field(default_factory=list)
    """Remarks that must be shown with these numbers."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = {tuple(self.own_gamma), *(tuple(point.gamma) for point in self.points)}
        columns = {tuple(point.validation) for point in self.points}
        tested = {tuple(point.test) if point.test is not None else None for point in self.points}
        if len(names) != 1 or len(columns) != 1 or NATURAL not in self.points[0].validation:
            raise ValueError("points: all must have the run's learners and the same accuracies, natural among them")
        if tested not in ({None}, columns):
            raise ValueError("points: all or none must have been tested, in what they were validated in")
        return self


# -- grids ------------------------------------------------------------------------------------------------------------


def grid(learners: int, points: int) -> list[tuple[float, ...]]:
    """Shares on the simplex with `points` along every edge, ordered by the first learner's share.

    For two learners these are all; for three, they fill the triangle, points (points + 1) / 2 in all. For more, where
    a full grid would explode, they are the corners, the edges and the centre.
    """
    if not 2 <= points <= MAX_POINTS:
        raise GeneralistError(f"a curve has 2 to {MAX_POINTS} points along an edge, not {points}")
    steps = points - 1
    if learners <= 3:
        return [tuple(part / steps for part in parts) for parts in _compositions(steps, learners)]
    found = {_spread(learners, {corner: 1.0}) for corner in range(learners)}
    for a, b in combinations(range(learners), 2):
        found |= {_spread(learners, {a: i / steps, b: (steps - i) / steps}) for i in range(1, steps)}
    return sorted({*found, (1 / learners,) * learners})


def _compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every way to write `total` as an ordered sum of so many non-negative integers, in rising order."""
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        yield from ((first, *rest) for rest in _compositions(total - first, parts - 1))


def _spread(learners: int, shares: dict[int, float]) -> tuple[float, ...]:
    return tuple(shares.get(i, 0.0) for i in range(learners))


# -- judging ----------------------------------------------------------------------------------------------------------


def pareto(rows: Sequence[Sequence[float]]) -> list[bool]:
    """Which rows are not dominated by another row, one that is at least as large everywhere and larger somewhere."""

    def dominates(a: Sequence[float], b: Sequence[float]) -> bool:
        return all(x >= y for x, y in zip(a, b, strict=True)) and any(x > y for x, y in zip(a, b, strict=True))

    return [not any(dominates(other, row) for other in rows) for row in rows]


def suggest(points: Sequence[Point], wish: Wish) -> Suggestion:
    """The most robust point that grants the wish, or the most accurate one if the wish is for robustness only.

    If no point grants it, the one that comes closest, with a text that says so.
    """
    for_natural = wish.natural_at_least is None and wish.robust_at_least is not None

    def merit(point: Point) -> tuple[float, float]:
        return (point.natural, point.robust) if for_natural else (point.robust, point.natural)

    granted = [point for point in points if wish.shortfall(point) == 0]
    if granted:
        best = max(granted, key=merit)
        which = "most accurate" if for_natural else "most robust"
        text = f"the {which} point with {wish}: {_describe(best)}"
    else:
        best = min(points, key=lambda point: (wish.shortfall(point), *(-value for value in merit(point))))
        text = f"no point of this curve has {wish}; the nearest: {_describe(best)}"
    return Suggestion(wish=wish, granted=bool(granted), gamma=best.gamma, text=text)


def _describe(point: Point) -> str:
    shares = ", ".join(f"{name} {share:.3g}" for name, share in point.gamma.items())
    return f"gamma {shares} (natural {_percent(point.natural)}, robust {_percent(point.robust)})"


def _percent(value: float) -> str:
    return f"{100 * value:.2f}%"


# -- measuring --------------------------------------------------------------------------------------------------------


def curve(
    run: RunDirectory,
    points: int,
    *,
    epoch: int | None = None,
    source: Source | None = None,
    statistics: Statistics = "best",
    test: bool = False,
    natural_at_least: float | None = None,
    robust_at_least: float | None = None,
    samples: int | None = None,
    steps: int | None = None,
    device: str = "auto",
    data: Any = None,
    trust_code: bool = False,
    listener: Callable[[int, int, Point], None] = lambda done, total, point: None,
) -> Curve:
    """Measure the models of a grid of shares on the run's validation images, and write RUN/mix/curve.json.

    `points` is the number along an edge: see `grid`. `test` measures the test images as well. Wishes are fractions;
    `samples` takes a seeded random subset of either set, or all of it if it is smaller; `steps` of PGD are by default
    those of the run's validation.
    """
    check_statistics(statistics)
    wish = _wish(natural_at_least, robust_at_least)
    learners = learners_of(run, epoch, source=source, trust_code=trust_code)
    if robust_at_least is not None and not learners.recipe.threats():
        raise RunError(f"{run.path} measures no threat, so there is no robust accuracy to ask for: leave it out")
    shares = grid(len(learners.names), points)
    if samples is not None and samples < 1:
        raise GeneralistError(f"samples: cannot measure on {samples} images; ask for 1 or more")
    dial = Dial(learners, device=device, data=data, samples=samples, steps=steps, trust_code=trust_code)
    dial.check_samples(test=test)
    check_folder(run.path / "mix")
    found: list[Point] = []
    for row in shares:
        gamma = dict(zip(learners.order, row, strict=True))
        found.append(_point(dial, gamma, statistics, test=test))
        listener(len(found), len(shares), found[-1])
    front = pareto([[accuracy.value for accuracy in point.validation.values()] for point in found])
    found = [point.model_copy(update={"pareto": best}) for point, best in zip(found, front, strict=True)]
    made = Curve(
        version=__version__,
        epoch=learners.epoch,
        source=learners.source,
        own_gamma={name: learners.own_gamma[name] for name in learners.order},
        split=learners.recipe.validation.split,
        steps=dial.steps,
        statistics=statistics,
        points=found,
        suggestion=suggest(found, wish) if wish else None,
        notes=_notes(learners, found, test=test),
    )
    # Not with sorted keys: the order of the learners is the one that --gamma uses.
    write_text(run.path / "mix" / "curve.json", made.model_dump_json(indent=2) + "\n")
    return made


def _point(dial: Dial, gamma: dict[str, float], statistics: Statistics, *, test: bool) -> Point:
    mixture = dial.turn([gamma[name] for name in dial.learners.names], statistics=statistics)
    accuracy = mixture.measured.get(mixture.statistics) or dial.validate(mixture.model)
    tested = dial.test(mixture.model) if test else None
    return Point(
        gamma=gamma,
        statistics=mixture.statistics,
        validation={name: Measured.of(value) for name, value in accuracy.items()},
        test={name: Measured.of(value) for name, value in tested.items()} if tested else None,
    )


def _wish(natural: float | None, robust: float | None) -> Wish | None:
    if natural is None and robust is None:
        return None
    try:
        return Wish(natural_at_least=natural, robust_at_least=robust)
    except ValidationError as error:
        raise GeneralistError(f"{first_problem(error)}: give a fraction, as 0.89") from None


def _notes(learners: Learners, points: Sequence[Point], *, test: bool) -> list[str]:
    measured = [accuracy for point in points for accuracy in point.validation.values()]
    farthest = max(max(one.interval[1] - one.value, one.value - one.interval[0]) for one in measured)
    notes = [
        f"on {measured[0].total} validation images: 95% intervals reach up to {100 * farthest:.1f} points up or down, "
        "and differences within them mean little"
    ]
    if isinstance(warning := learners.about.get("warning"), str):
        notes.append(warning)
    elif learners.recipe.validation.split == "test":
        notes.append(CHOSEN_ON_TEST)
    return [*notes, FOR_REPORT] if test else notes


def read_curve(run: RunDirectory) -> Curve:
    """The curve that is stored in a run."""
    path = run.require().path / "mix" / "curve.json"
    if not path.is_file():
        command = shlex.join(["generalist", "mix", str(run.path), "--curve", "11"])
        raise RunError(f"{run.path} has no curve; make one with `{command}`")
    if path.stat().st_size > MAX_BYTES:
        raise RunError(f"{path} is larger than {MAX_BYTES} bytes: that is too much for a curve")
    try:
        return Curve.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise RunError(f"{path} is damaged: {first_problem(error)}"[:300]) from None
