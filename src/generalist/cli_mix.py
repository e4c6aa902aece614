"""The command `generalist mix`: the dial."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from generalist.console import importing, print_version
from generalist.core.errors import GeneralistError
from generalist.core.files import check_folder
from generalist.core.options import parse_number
from generalist.core.run import RunDirectory

Version = Annotated[bool, typer.Option("--version", help="Print the version.", callback=print_version, is_eager=True)]


def mix(
    run: Annotated[Path, typer.Argument(help="A finished run of two or more learners.", metavar="RUN")],
    gamma: Annotated[
        str | None,
        typer.Option(
            help="Make one model: the lead learner's share; or by commas the shares of all learners but the last: the "
            "lead one, the others with a threat, those without. For natural + linf + l2: LINF,L2.",
            metavar="SHARE[,SHARE]",
        ),
    ] = None,
    curve: Annotated[
        int | None, typer.Option(help="Measure so many models along every edge of the trade-off.", metavar="N")
    ] = None,
    epoch: Annotated[int | None, typer.Option(help="The snapshot to mix [default: the last].")] = None,
    source: Annotated[
        str | None,
        typer.Option(
            help="Mix the learners' raw weights, their averaged ones, or their parts of the global learner "
            "[default: parts, where they are kept, else what the run mixes]."
        ),
    ] = None,
    statistics: Annotated[
        str, typer.Option(help="Of BatchNorm: mixed, reestimated, or best: whichever validates better.")
    ] = "best",
    out: Annotated[
        Path | None, typer.Option(help="Weights file of --gamma [default: RUN/mix/gamma-SHARE.safetensors].")
    ] = None,
    test: Annotated[bool, typer.Option("--test", help="Measure the curve on the test images as well.")] = False,
    natural_at_least: Annotated[
        float | None, typer.Option(help="Suggest the most robust point with this natural accuracy, in percent.")
    ] = None,
    robust_at_least: Annotated[
        float | None, typer.Option(help="Suggest a point with this PGD accuracy in every threat, in percent.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help="Measure the curve on a seeded random subset of so many images.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Of the curve's PGD [default: the run's validation.steps].")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    trust_code: Annotated[
        bool, typer.Option("--trust-code", help="Allow import paths in the recipe, which run code.")
    ] = False,
    version: Version = False,
) -> None:
    """Turn the dial of a finished run. That is another point of the trade-off, without training.

    Example: generalist mix runs/digits-d --gamma 0.8
    """
    with importing():
        from generalist import dial

    if (gamma is None) == (curve is None):
        raise GeneralistError("give either --gamma for one model or --curve for many")
    dial.check_statistics(statistics)
    common: dict[str, Any] = {"epoch": epoch, "source": source, "statistics": statistics}
    common |= {"device": device, "trust_code": trust_code}
    if gamma is not None:
        given = (test, natural_at_least, robust_at_least, samples, steps)
        names = ("--test", "--natural-at-least", "--robust-at-least", "--samples", "--steps")
        _refuse(
            "--curve",
            {name: value is not None and value is not False for name, value in zip(names, given, strict=True)},
        )
        _one(RunDirectory(run), parse_gamma(gamma), out, common, as_json=as_json)
        return
    _refuse("--gamma", {"--out": out is not None})
    wishes = {
        "natural_at_least": _fraction("natural", natural_at_least),
        "robust_at_least": _fraction("robust", robust_at_least),
    }
    settings = {**common, **wishes, "test": test, "samples": samples, "steps": steps}
    _curve(RunDirectory(run), cast(int, curve), settings, as_json=as_json)


def parse_gamma(text: str) -> list[float]:
    """`0.8`, `4/5` or `0.5,0.25`."""
    try:
        numbers = [parse_number(part.strip()) for part in text.split(",")]
    except ValueError as error:
        raise GeneralistError(f"--gamma: {error}") from None
    for number in numbers:
        if not isinstance(number, float):
            raise GeneralistError(f"--gamma: {number!r} is not a share; write numbers from 0 to 1 (0.8 or 0.5,0.25)")
    return numbers


def _fraction(name: str, percent: float | None) -> float | None:
    if percent is None:
        return None
    if 0 < percent <= 1 or not 0 <= percent <= 100:
        raise GeneralistError(
            f"--{name}-at-least is in percent, from 0 to 100: write 89 and not 0.89 (got {percent:g})"
        )
    return percent / 100


def _refuse(owner: str, given: dict[str, bool]) -> None:
    """Refuse an option that would have no effect."""
    for name, present in given.items():
        if present:
            raise GeneralistError(f"{name} belongs to {owner}: leave it out")


def _one(run: RunDirectory, gamma: list[float], out: Path | None, common: dict[str, Any], *, as_json: bool) -> None:
    from generalist import dial
    from generalist.console_mix import mixture_record, show_mixture

    if out is not None and out.exists():
        raise GeneralistError(f"{out} exists already; choose another --out")
    which = {name: common[name] for name in ("epoch", "source", "trust_code")}
    learners = dial.learners_of(run, **which)
    gammas = dial.gammas_of(learners, gamma)
    check_folder(run.path / "mix" if out is None else out.parent)
    machine = dial.Dial(learners, device=common["device"], trust_code=common["trust_code"])
    mixture = machine.turn(gammas, statistics=common["statistics"])
    path = out or dial.mixture_file(learners, mixture.gammas, common["statistics"])
    mixture.save(path)
    if as_json:
        _write_json(mixture_record(mixture, path))
    else:
        show_mixture(mixture, path)


def _curve(run: RunDirectory, points: int, settings: dict[str, Any], *, as_json: bool) -> None:
    from generalist import dial
    from generalist.console_mix import curve_listener, show_curve

    if as_json:
        _write_json(dial.curve(run, points, **settings).model_dump(mode="json"))
        return
    with curve_listener() as listener:
        found = dial.curve(run, points, listener=listener, **settings)
    show_curve(found, run.path)


def _write_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2, sort_keys=True) + "\n")
