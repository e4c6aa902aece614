"""The command `generalist evaluate`."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from generalist.console import importing, print_version
from generalist.core import ranks
from generalist.core.errors import GeneralistError, InterruptedRunError
from generalist.core.run import RunDirectory

SLOWEST = 7 * 86_400.0
"""Seconds that the first process waits for the others: attacks take more or less long on different parts."""

Version = Annotated[bool, typer.Option("--version", help="Print the version.", callback=print_version, is_eager=True)]
Names = Annotated[str | None, typer.Option(help="Attacks, by commas: natural,pgd-20,aa [default: the preset's].")]


def evaluate(
    subject: Annotated[str, typer.Argument(help="A run directory, or a weights file.", metavar="RUN|FILE")],
    model: Annotated[
        str | None, typer.Option(help="best, last, or a learner's NAME[@EPOCH]; several by commas [default: best].")
    ] = None,
    data: Annotated[str | None, typer.Option(help="A data set's name [default: the run's own test images].")] = None,
    root: Annotated[
        Path | None, typer.Option(help="Where --data lies [default: as `generalist data` has it]; `folder` needs it.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="standard, quick, papers [default: standard].")] = None,
    attacks: Names = None,
    threats: Annotated[
        str | None, typer.Option(help="As in linf:8/255,l2:128/255 [default: those the run's learners train against].")
    ] = None,
    mode: Annotated[
        str | None, typer.Option(help="each: every attack on all; cascade: on survivors [default: the preset's].")
    ] = None,
    samples: Annotated[int | None, typer.Option(help="A seeded random subset of so many images.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows of a batch [default: by device and samples].")] = None,
    precision: Annotated[str, typer.Option(help="default, or fast: search in bfloat16.")] = "default",
    shards: Annotated[str, typer.Option(help="Evaluate the i-th of n parts.", metavar="I/N")] = "1/1",
    merge: Annotated[bool, typer.Option("--merge", help="Join the parts that --shards left; nothing is run.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an evaluation was stopped.")] = False,
    corruptions: Annotated[
        str | None, typer.Option(help="Corrupted images as well: common, extra, all, or names by commas.")
    ] = None,
    perturbations: Annotated[
        bool, typer.Option("--perturbations", help="Sequences of small perturbations as well: accuracy, flip rate.")
    ] = False,
    official: Annotated[
        Path | None, typer.Option(help="Folder with the official CIFAR-C/-P files [default: generated corruptions].")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of random starts and of --samples.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Directory for evaluations [default: RUN/evaluation; of a file: evaluation].")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print summary.json and nothing else; of several, a list.")
    ] = False,
    trust_code: Annotated[
        bool, typer.Option("--trust-code", help="Allow import paths in the recipe or --data, which run code.")
    ] = False,
    version: Version = False,
) -> None:
    """Measure accuracy, natural and under attack. Under torchrun every process evaluates its part of the samples.

    Example: generalist evaluate runs/digits-t --preset quick
    """
    with importing():  # all of it: later on Ctrl-C is answered by an exception
        from generalist import api, console_evaluation  # noqa: F401
        from generalist.evaluation.directory import merge_below

    if model is not None and Path(subject).is_file():
        raise GeneralistError("--model chooses a network of a run; a weights file is one already: leave it out")
    if merge:
        _only_merge(
            model=model,
            data=data,
            root=root,
            preset=preset,
            attacks=attacks,
            threats=threats,
            mode=mode,
            samples=samples,
        )
        _only_merge(corruptions=corruptions, official=official, perturbations=perturbations or None)
        _only_merge(batch_size=batch_size, resume=resume or None, seed=seed or None)
        _only_merge(shards=None if shards == "1/1" else shards, precision=None if precision == "default" else precision)
        if ranks.tells():  # nothing is computed, and one process is enough
            _print([merge_below(out or Path(subject))], as_json=as_json)
        return
    arguments: dict[str, Any] = {
        "data": data,
        "root": root,
        "threats": _listed(threats),
        "attacks": _listed(attacks),
        "preset": preset or ("standard" if attacks is None else None),
        "mode": _one_of("mode", mode, ("each", "cascade")),
        "samples": samples,
        "batch_size": batch_size,
        "precision": _one_of("precision", precision, ("default", "fast")),
        "shards": shards,
        "seed": seed,
        "device": device,
        "out": out or _default_out(Path(subject)),
        "resume": resume,
        "corruptions": _listed(corruptions),
        "perturbations": perturbations,
        "official": official,
        "trust_code": trust_code,
    }
    if arguments["corruptions"] == []:
        raise GeneralistError("--corruptions names none: write common, extra, all, or names by commas")
    networks = _networks(Path(subject), model)
    _print((_run(subject, {**arguments, "which": which}, quiet=as_json) for which in networks), as_json=as_json)


def _only_merge(**given: object) -> None:
    """Refuse options that only make sense for an evaluation."""
    for name, value in given.items():
        if value is not None:
            option = name.replace("_", "-")
            raise GeneralistError(
                f"--merge joins existing parts: give only the evaluation's folder, without --{option}"
            )


def _networks(subject: Path, model: str | None) -> list[str]:
    """The networks to evaluate, in order; a name that the run does not have is reported before the first starts."""
    from generalist.weights import weights_file

    names = list(dict.fromkeys(_listed(model) or [])) if model is not None else ["best"]
    if not names:
        raise GeneralistError("--model names no network: leave it out for the best one")
    if len(names) > 1 and ranks.launched()[1] > 1:
        raise GeneralistError("under torchrun --model names one network: call it once for each")
    for name in names:
        if not (file := weights_file(subject, name)).is_file() and subject.is_dir():
            run = RunDirectory(subject)
            early = run.exists() and not run.last.is_file() and name == "best"
            why = ": the run has not reached its first validation" if early else ""
            raise GeneralistError(f"there is no weights file {file}{why}")
    return names


def _print(summaries: Iterable[dict[str, Any]], *, as_json: bool) -> None:
    """Print each summary as soon as it is available; as JSON, all of them at the end."""
    from generalist.console_evaluation import show_evaluation

    found = []
    for summary in summaries:
        found.append(summary)
        if ranks.tells() and not as_json:
            show_evaluation(summary)
    if ranks.tells() and as_json:
        sys.stdout.write(json.dumps(found[0] if len(found) == 1 else found, indent=2, sort_keys=True) + "\n")


def _run(subject: str, arguments: dict[str, Any], *, quiet: bool) -> dict[str, Any]:
    rank, world = ranks.launched()
    with _clear_stops():
        if world > 1:
            return _run_ranks(subject, arguments, quiet=quiet or rank > 0)
        return _run_alone(subject, arguments, quiet=quiet)


def _run_alone(subject: str, arguments: dict[str, Any], *, quiet: bool) -> dict[str, Any]:
    from generalist import api
    from generalist.console_evaluation import evaluation_listener

    if quiet:
        return api.evaluate(subject, **arguments).summary
    with evaluation_listener() as listener:
        return api.evaluate(subject, listener=listener, **arguments).summary


def _run_ranks(subject: str, arguments: dict[str, Any], *, quiet: bool) -> dict[str, Any]:
    """Rank i evaluates part i of the samples; when all are done, the first rank joins them into one summary."""
    from generalist.core import distributed
    from generalist.evaluation.directory import merge
    from generalist.training.environment import choose_device

    if arguments["shards"] != "1/1":
        raise GeneralistError("torchrun's processes share the samples by themselves: leave --shards out")
    if arguments["corruptions"] or arguments["perturbations"]:
        raise GeneralistError(
            "corruptions are measured by one process: evaluate the attacks under torchrun and the corruptions without"
        )
    with distributed.start(choose_device(arguments["device"]), timeout=SLOWEST) as group:
        own = {"shards": f"{group.rank + 1}/{group.world}", "device": str(group.device)}
        found = _run_alone(subject, {**arguments, **own}, quiet=quiet)
        folder = Path(found["directory"])  # its name is a fingerprint of everything that was evaluated
        group.check_alike({"the weights, images or attacks": folder.name})
        summary: dict[str, Any] = group.from_first(merge(folder) if group.first else None)
    return summary


def _default_out(subject: Path) -> Path:
    """Inside a run for its own networks; for a file or an exported folder, where the command runs."""
    return subject / "evaluation" if RunDirectory(subject).exists() else Path("evaluation")


def _listed(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def _one_of(name: str, value: str | None, known: tuple[str, ...]) -> str | None:
    if value is not None and value not in known:
        raise GeneralistError(f"--{name} is {' or '.join(known)}, not {value!r}")
    return value


@contextmanager
def _clear_stops() -> Iterator[None]:
    """SIGINT and SIGTERM end the process at once, as every finished batch is recorded already."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise InterruptedRunError("stopped; every finished batch is recorded: go on with --resume", number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
