"""The command line: what it shows, what a run leaves, how it stops, and a pinned list of its options."""

from __future__ import annotations

import io
import json
import os
import pkgutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from cli_helpers import run_main
from rich.console import Console

import generalist
from generalist import api, cli, console, console_mix
from generalist.bench.evaluate import STANDARD
from generalist.bench.train import ENGINES
from generalist.console import clear_endings, importing, training_listener
from generalist.core.run import RunDirectory
from generalist.evaluation.plan import PRESETS
from generalist.export import FORMATS
from generalist.recipe import load_recipe
from generalist.shipped import shipped_names, shipped_text
from generalist.training.artefacts import load_weights

COMMANDS = {
    "train": {"RECIPE", "--set", "--out", "--device", "--resume", "--from", "--track", "--trust-code"},
    "evaluate": {
        "SUBJECT",
        "--model",
        "--data",
        "--root",
        "--preset",
        "--attacks",
        "--threats",
        "--mode",
        "--samples",
        "--batch-size",
        "--precision",
        "--shards",
        "--merge",
        "--resume",
        "--corruptions",
        "--perturbations",
        "--official",
        "--seed",
        "--device",
        "--out",
        "--json",
        "--trust-code",
    },
    "mix": {
        "RUN",
        "--gamma",
        "--curve",
        "--epoch",
        "--source",
        "--statistics",
        "--out",
        "--test",
        "--natural-at-least",
        "--robust-at-least",
        "--samples",
        "--steps",
        "--device",
        "--json",
        "--trust-code",
    },
    "sweep": {
        "DEFINITION",
        "--set",
        "--storage",
        "--out",
        "--trials",
        "--timeout",
        "--show",
        "--csv",
        "--svg",
        "--list",
        "--device",
        "--trust-code",
    },
    "export": {"SUBJECT", "--to", "--out", "--model", "--force", "--trust-code"},
    "compare": {"RUNS", "--paper", "--seeds", "--format", "--trust-code"},
    "report": {"RUNS", "--out", "--figures", "--formats", "--images", "--device", "--trust-code"},
    "bench train": {
        "--recipe",
        "--set",
        "--iterations",
        "--device",
        "--engines",
        "--published",
        "--synthetic",
        "--json",
        "--trust-code",
    },
    "bench evaluate": {
        "SUBJECT",
        "--data",
        "--threat",
        "--samples",
        "--attacks",
        "--batch-size",
        "--precision",
        "--device",
        "--json",
    },
    "data list": {"--root"},
    "data get": {"NAME", "--root"},
    "data check": {"NAME", "--root"},
    "recipes list": {"WORD"},
    "recipes show": {"NAME", "--resolved"},
}
"""Every command with its arguments and options beside --version: whoever changes one of these does it on purpose."""

QUICK = ["--set", "train.epochs=1", "--set", "validation.steps=2", "--set", "model.width=4", "--device", "cpu"]


def commands() -> dict[str, Any]:
    """Every command of the application by its words."""
    group: Any = typer.main.get_command(cli.app)
    found = {}
    for name, command in group.commands.items():
        inner = getattr(command, "commands", None)
        found |= {f"{name} {sub}": c for sub, c in inner.items()} if inner else {name: command}
    return found


# -- pinned ----------------------------------------------------------------------------------------------------------


def test_public_names_are_pinned() -> None:
    assert generalist.__all__ == ["GeneralistError", "__version__", "evaluate", "gradcam", "load", "mix", "train"]
    assert all(hasattr(generalist, name) for name in generalist.__all__)


def test_public_names_are_there_before_they_are_loaded() -> None:
    program = """
import sys, generalist
assert set(generalist.__all__) <= set(dir(generalist)) and "torch" not in sys.modules
from generalist import *
from generalist import api
assert train is api.train is generalist.train and "torch" in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="module 'generalist' has no attribute 'trian'"):
        generalist.trian  # noqa: B018


def test_no_module_takes_the_place_of_a_public_function() -> None:
    """An imported module becomes an attribute of its package: one called `gradcam` would be found for the function."""
    modules = {module.name for module in pkgutil.iter_modules(generalist.__path__)}
    assert "api" in modules and not modules & set(generalist.__all__)
    program = "import generalist; generalist.dial.curve, generalist.export.export_model, generalist.report_is_no_name"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stderr.endswith("module 'generalist' has no attribute 'report_is_no_name'\n"), "the others are there"
    program = "import generalist.report, generalist; assert callable(generalist.gradcam)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_data_that_lie_there_are_listed_as_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mnist").mkdir()
    code, out, _ = run_main(["data", "list", "--root", str(tmp_path)], monkeypatch, capsys)
    rows = [[cell.strip() for cell in line.split("│")[1:4]] for line in out.splitlines() if line.startswith("│")]
    fetched = {name: here for name, _, here in rows}
    assert code == 0 and (fetched["mnist"], fetched["cifar10"], fetched["digits"]) == ("yes", "no", "-")
    code, _, err = run_main(["data", "get", "imagenet"], monkeypatch, capsys)
    assert code == 2 and "ImageNet, are a folder: --set data.name=folder" in err


def test_recipes_are_found_by_a_word(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_main(["recipes", "list", "MNIST"], monkeypatch, capsys)
    names = [line.split("│")[1].strip() for line in out.splitlines() if line.startswith("│")]
    assert code == 0 and names == [name for name in shipped_names() if "mnist" in name] and names
    code, _, err = run_main(["recipes", "list", "nothing"], monkeypatch, capsys)
    assert code == 2 and "no recipe has 'nothing' in its name" in err


@pytest.mark.parametrize("listening", [lambda: training_listener("digits-d"), console_mix.curve_listener])
def test_a_bar_without_an_end_yet_names_none(listening: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading data, building and compiling come before the number of iterations is told."""
    terminal = Console(file=io.StringIO(), force_terminal=True, width=80)
    for module in (console, console_mix):
        monkeypatch.setattr(module, "console", terminal)
    with listening():
        pass
    shown = terminal.file.getvalue()  # type: ignore[attr-defined]
    assert "0/?" in shown and "None" not in shown


def test_training_says_how_far_it_is_where_no_terminal_looks_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a minute without a line, and not in between; a long start is not taken for a minute of iterations."""
    now = [100.0]
    monkeypatch.setattr("generalist.console.time.monotonic", lambda: now[0])
    with training_listener("digits-d") as listener:
        now[0] += 90
        for done in range(1, 301):
            listener.iteration(done, 600)
            now[0] += 0.5
            if done == 200:
                accuracy = {"global": {"natural": 0.5}}
                record = {"epoch": 1, "validation": {"accuracy": accuracy}, "gamma": {}, "images_per_second": 10.0}
                listener.epoch(record)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "iteration 122 of 600, 4 min left"
    assert lines[1].startswith("epoch    1") and len(lines) == 2


def test_commands_and_options_are_pinned() -> None:
    found = {}
    for name, command in commands().items():
        options = {
            parameter.name.upper() if parameter.param_type_name == "argument" else parameter.opts[0]
            for parameter in command.params
        }
        found[name] = options - {"--help"}
    assert found == {name: options | {"--version"} for name, options in COMMANDS.items()}


def test_options_name_what_there_is_to_choose() -> None:
    """In words of their own: to ask the modules that know would load PyTorch."""
    options = {(name, option.opts[0]): option for name, command in commands().items() for option in command.params}
    assert options["evaluate", "--preset"].help == f"{', '.join(PRESETS)} [default: standard]."
    assert options["export", "--to"].help == f"{', '.join(FORMATS)}."
    assert options["bench train", "--engines"].default == ",".join(ENGINES)
    assert options["bench evaluate", "--attacks"].default == ",".join(STANDARD)


# -- without PyTorch -------------------------------------------------------------------------------------------------

CALLS = """
import json, sys
from generalist import cli

codes = []
for args in json.loads(sys.argv[1]):
    sys.argv = ["generalist", *args]
    try:
        cli.main()
    except SystemExit as ending:
        codes.append(ending.code)
    assert "torch" not in sys.modules, args
print(json.dumps(codes))
"""


def codes_without_torch(calls: list[list[str]], **variables: str) -> list[int]:
    """The exit codes of some command lines in one process, none of which may import torch."""
    command = [sys.executable, "-c", CALLS, json.dumps(calls)]
    environment = os.environ | variables
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    codes: list[int] = json.loads(done.stdout.splitlines()[-1])
    return codes


def test_help_and_lists_do_without_torch() -> None:
    groups = ["", "bench", "data", "recipes"]
    calls = [[*command.split(), flag] for command in [*groups, *COMMANDS] for flag in ("--help", "--version")]
    calls += [["recipes", "list"], ["recipes", "show", "digits-t"], ["data", "list"], ["data", "check", "digits"]]
    assert codes_without_torch(calls) == [0] * len(calls)


def test_mistakes_in_a_command_line_are_told_without_torch() -> None:
    calls = [["train", "digits-t", "--epochs", "3"], ["trian", "digits-t"], ["recipes", "show", "digit-t"]]
    assert codes_without_torch(calls) == [2] * len(calls)


@pytest.mark.parametrize("words", ["generalist ", "generalist train --"])
def test_completion_does_without_torch(words: str) -> None:
    place = str(words.count(" "))
    assert codes_without_torch([[]], _GENERALIST_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=place) == [0]


# -- help and lists --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["", "bench", "data", "recipes", *COMMANDS])
def test_version(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shown = run_main([*command.split(), "--version"], monkeypatch, capsys)
    assert shown == (0, f"generalist {generalist.__version__}\n", "")


@pytest.mark.parametrize("command", ["", "bench", "data", "recipes", *COMMANDS])
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_shows_an_example(
    command: str, flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run_main([*command.split(), flag], monkeypatch, capsys)
    assert code == 0
    assert f"Example: generalist {command}".strip() in " ".join(out.split())


def test_an_unknown_recipe_costs_a_line_that_can_be_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run_main(["train", "digits-tt"], monkeypatch, capsys)
    assert code == 2 and "did you mean 'digits-t'?" in err and len(err) < 200


@pytest.mark.parametrize("command", ["", "bench", "data", "recipes"])
def test_help_tells_what_each_command_does_in_a_whole_sentence(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = run_main([*command.split(), "--help"], monkeypatch, capsys)
    lines = out.split("Commands:\n")[1].splitlines()
    assert lines and [line for line in lines if line.endswith("...")] == []


def test_recipes_list(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run_main(["recipes", "list"], monkeypatch, capsys)
    assert (code, err) == (0, "")
    assert [name for name in shipped_names() if name not in out] == []
    monkeypatch.setattr(cli, "console", Console(width=80))
    _, out, _ = run_main(["recipes", "list"], monkeypatch, capsys)
    assert "published" in out and "\N{HORIZONTAL ELLIPSIS}" not in out, "a narrow terminal loses nothing"


def test_recipes_list_says_what_would_be_trained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "console", Console(width=300))
    _, out, _ = run_main(["recipes", "list"], monkeypatch, capsys)
    shown = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    for (name, *cells), expected in zip(shown, shipped_names(), strict=True):
        recipe = load_recipe(expected)
        learners = " + ".join(learner.name for learner in recipe.learners)
        assert (name, *cells) == (expected, learners, str(recipe.train.epochs), recipe.style)


def test_recipes_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run_main(["recipes", "show", "digits-t"], monkeypatch, capsys)
    assert (code, out, err) == (0, shipped_text("digits-t"), "")
    _, resolved, _ = run_main(["recipes", "show", "digits-t", "--resolved"], monkeypatch, capsys)
    (tmp_path / "mine.yaml").write_text(resolved)
    assert load_recipe(tmp_path / "mine.yaml") == load_recipe("digits-t")


def test_data_list_and_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run_main(["data", "list"], monkeypatch, capsys)
    assert code == 0
    assert all(name in out for name in ("digits", "cifar10", "cifar100", "svhn", "mnist", "fashion-mnist"))
    assert run_main(["data", "check", "digits"], monkeypatch, capsys)[0] == 0
    code, out, err = run_main(["data", "check", "cifar10", "--root", str(tmp_path)], monkeypatch, capsys)
    assert code == 2 and "missing" in out
    assert err == "error: cifar10 is incomplete or damaged; run: generalist data get cifar10\n"


@pytest.mark.parametrize(
    "args", [["train"], ["train", "digits-t", "--epochs", "3"], ["trian", "digits-t"], ["data", "x"]]
)
def test_a_command_line_that_is_none(
    args: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run_main(args, monkeypatch, capsys)
    assert code == 2
    assert "rror" in err and "Traceback" not in err and len(err.strip().split("\n")) <= 5


def test_our_own_fault_is_a_traceback_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a bug")

    monkeypatch.setattr(api, "train", fail)
    code, _, err = run_main(["train", "digits-t"], monkeypatch, capsys)
    assert code == 1
    assert "AssertionError: a bug\n" in err and "a bug in generalist" in err


def test_too_little_memory_is_a_clear_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 8.00 GiB of which 1.00 "
            "GiB is free. If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF"
        )

    monkeypatch.setattr(api, "train", fail)
    code, _, err = run_main(["train", "digits-t"], monkeypatch, capsys)
    assert code == 2 and err.count("\n") == 1
    assert err.startswith("error: CUDA out of memory. Tried to allocate 20.00 GiB. Make train.batch_size or validation")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian"], "no such command 'trian'"),
        (["evaluate"], "missing argument 'RUN|FILE' (see generalist evaluate -h)"),
        (["evaluate", "x", "--samples", "abc"], "invalid value for '--samples'"),
        (["evaluate", "x", "--epochs", "3"], "no such option: --epochs (see generalist evaluate -h)"),
        (["train", "digits-t", "--batch-size", "3"], "no such option: --batch-size; fields of a recipe are set as in"),
        (
            ["train", "digits-t", "--threads", "1"],
            "--threads; fields of a recipe are set as in --set train.epochs=20 (see",
        ),
        (["sweep", "x", "--trials"], "option '--trials' requires an argument"),
    ],
)
def test_a_mistaken_call_costs_one_line(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run_main(words, monkeypatch, capsys)
    assert (code, out) == (2, "") and err.startswith("error: ") and said in err and err.count("\n") == 1, err


def test_help_is_shown_in_full(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for words, expected in (([], 2), (["data"], 2), (["train", "-h"], 0), (["--help"], 0)):
        code, out, err = run_main(words, monkeypatch, capsys)
        assert code == expected and "Usage: generalist" in out + err and (out + err).count("\n") > 5, words


def test_control_c_amid_imports_ends_the_process_at_once() -> None:
    """What is imported half would fail later on, as if that were a fault of ours."""
    before = signal.getsignal(signal.SIGINT)
    try:
        for usual, inside in ((signal.default_int_handler, signal.SIG_DFL), (signal.SIG_IGN, signal.SIG_IGN)):
            signal.signal(signal.SIGINT, usual)  # ignored, as nohup has it, it stays so
            with importing():
                assert signal.getsignal(signal.SIGINT) == inside
            assert signal.getsignal(signal.SIGINT) == usual
    finally:
        signal.signal(signal.SIGINT, before)
    with pytest.raises(SystemExit) as ended, clear_endings():
        raise KeyboardInterrupt
    assert ended.value.code == 130


HEAVY = """
import json, signal, sys
from generalist import cli

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name in ("numpy", "torch"):
            print(" ".join(words), signal.getsignal(signal.SIGINT) is signal.SIG_DFL)
            raise SystemExit

sys.meta_path.insert(0, Finder())
for words in json.loads(sys.argv[1]):
    try:
        cli.app(words, standalone_mode=False)
    except SystemExit:
        pass
"""


def test_every_command_lets_control_c_end_its_imports() -> None:
    """An import that is broken off by an exception may swallow it, or leave errors of its own behind."""
    simple = [["train", "x"], ["evaluate", "x"], ["mix", "x"], ["compare", "x"], ["report", "x"], ["sweep", "--list"]]
    simple += [["export", "x", "--to", "onnx"], ["bench", "train"], ["bench", "evaluate"]]
    nested = [["data", "list"], ["data", "get", "x"], ["data", "check", "x"]]
    commands = [*simple, *nested, ["recipes", "show", "digits-t", "--resolved"]]
    call = [sys.executable, "-c", HEAVY, json.dumps(commands)]
    done = subprocess.run(call, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{' '.join(words)} True" for words in commands], done.stderr


def test_control_c_outside_of_training_is_quiet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "train", interrupt)
    assert run_main(["train", "digits-t"], monkeypatch, capsys) == (130, "", "")


def test_control_characters_do_not_reach_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run_main(["evaluate", "a\nb\udcff[red]\x1b[31m\x9b2J"], monkeypatch, capsys)
    assert code == 2
    assert err.startswith("error: there is no run") and err.count("\n") == 1 and "[red]" in err
    assert not {"\x1b", "\x9b"} & set(err)


# -- the run directory -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """One epoch of digits-t through the command line, in a process of its own."""
    folder = tmp_path_factory.mktemp("cli")
    done = generalist_process(["train", "digits-t", *QUICK], folder)
    out, err = done.communicate(timeout=120)
    assert done.returncode == 0, err
    assert "epoch    1  global: natural" in out and "run: runs/digits-t" in out
    return RunDirectory(folder / "runs" / "digits-t")


def generalist_process(args: list[str], folder: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "generalist", *args]
    return subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def test_files_of_a_run(run: RunDirectory) -> None:
    found = {str(path.relative_to(run.path)) for path in run.path.rglob("*") if path.is_file()}
    snapshots = {f"snapshots/1/{name}.safetensors" for name in ("global", "linf", "natural", "l2")}
    expected = {"recipe.yaml", "environment.json", "metrics.jsonl", "model.safetensors", "last.safetensors", *snapshots}
    assert found >= expected
    rest = found - expected - {".lock"}
    assert {Path(name).parent.name for name in rest} == {"checkpoints"}
    assert {Path(name).suffix for name in rest} == {".pt", ".sha256"}


def test_the_recipe_of_a_run(run: RunDirectory) -> None:
    recipe = load_recipe(run.recipe)
    assert (recipe.name, recipe.train.epochs, recipe.model.width) == ("digits-t", 1, 4)


def test_the_environment_of_a_run(run: RunDirectory) -> None:
    found = json.loads(run.environment.read_text())
    assert found["generalist"] == generalist.__version__
    assert {"python", "torch", "platform", "commit"} <= found.keys()
    assert (found["device"], found["seed"]) == ("cpu", 0)
    assert set(found["data"]) == {"train", "test"}
    assert all(len(checksum) == 64 for checksum in found["data"].values())


def test_the_metrics_of_a_run(run: RunDirectory) -> None:
    (record,) = run.read_metrics()
    learners = {"linf", "natural", "l2"}
    assert record["epoch"] == 1 and record["images_per_second"] > 0
    assert set(record["train"]) == learners and all(values["loss"] > 0 for values in record["train"].values())
    assert set(record["lr"]) == learners and set(record["gamma"]) == learners
    assert sum(record["gamma"].values()) == pytest.approx(1)
    validation = record["validation"]
    assert set(validation["accuracy"]) == learners | {"global"}
    for accuracy in validation["accuracy"].values():
        assert set(accuracy) == {"natural", "linf:0.18", "l2:0.7"}
        assert 0 <= accuracy["linf:0.18"] <= accuracy["natural"] <= 1
    assert validation["drift"] > 0 and validation["mixing_gap"] > 0 and 0 <= validation["ensemble"] <= 1
    assert record["regret"] == 0 and record["best_epoch"] == 1


def test_the_weights_of_a_run_say_what_they_are(run: RunDirectory) -> None:
    _, about = load_weights(run.last)
    assert about["model"]["name"] == "small" and about["shape"] == [1, 8, 8] and len(about["classes"]) == 10
    assert about["epoch"] == 1 and about["version"] == generalist.__version__


def test_a_second_run_gets_a_directory_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert run_main(["train", "digits-nt", *QUICK], monkeypatch, capsys)[0] == 0
    assert sorted(path.name for path in Path("runs").iterdir()) == ["digits-nt", "digits-nt-2"]


@pytest.mark.parametrize("name", ["../../up", "/abs/olute", "a b/c", "", "..."])
def test_a_recipe_s_name_cannot_leave_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "one" / "two"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    args = ["train", "digits-nt", *QUICK, "--set", f"name={json.dumps(name)}"]
    code, _, err = run_main(args, monkeypatch, capsys)
    assert code == 0, err
    (made,) = (folder / "runs").iterdir()
    assert (made / "last.safetensors").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


# -- signals ---------------------------------------------------------------------------------------------------------

EPOCHS = 10
LONG = [
    "train",
    "digits-d",
    *QUICK[2:],
    "--set",
    f"train.epochs={EPOCHS}",
    "--set",
    "validation.every=1",
    "--out",
    "run",
]


def stopped_in_the_middle(folder: Path, number: signal.Signals) -> tuple[int, str]:
    """Exit code and stderr of a training that gets the signal after its first epoch."""
    process = generalist_process(LONG, folder)
    metrics, deadline = folder / "run" / "metrics.jsonl", time.monotonic() + 60
    while not (metrics.is_file() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    return process.returncode, err


def test_runs_that_nothing_is_said_of_are_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["train", "digits-nt", "--set", "train.epochs=1", "--set", "model.width=4", "--device", "cpu"]
    code, _, err = run_main([*words, "--resume"], monkeypatch, capsys)
    assert code == 2 and "nothing to resume: there is no runs/digits-nt; name the run with --out RUN" in err
    code, out, err = run_main(words, monkeypatch, capsys)
    assert code == 0 and "already exists" not in out, err
    known = Path("runs/digits-nt/environment.json").read_bytes()
    written = Path("runs/digits-nt/last.safetensors").stat().st_mtime_ns
    code, out, err = run_main([*words, "--resume"], monkeypatch, capsys)
    assert code == 0 and "runs/digits-nt has finished (epoch 1 of 1): nothing is left to do" in out, err
    assert Path("runs/digits-nt/environment.json").read_bytes() == known
    assert Path("runs/digits-nt/last.safetensors").stat().st_mtime_ns == written, "what was measured of it still counts"
    code, out, err = run_main(words, monkeypatch, capsys)
    assert code == 0 and "runs/digits-nt already exists: this run is runs/digits-nt-2" in out, err
    code, _, err = run_main([*words, "--resume"], monkeypatch, capsys)
    assert code == 2 and "there are several, runs/digits-nt, runs/digits-nt-2; name the run" in err
    Path("runs/digits-nt/last.safetensors").unlink()
    code, out, err = run_main([*words, "--resume"], monkeypatch, capsys)
    assert code == 0 and "run: runs/digits-nt " in out, err


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_a_signal_leaves_a_checkpoint_and_resume_finishes(
    tmp_path: Path,
    number: signal.Signals,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found, err = stopped_in_the_middle(tmp_path, number)
    assert found == code, err
    assert err.startswith("error: stopped in epoch") and "go on with --resume" in err and err.count("\n") == 1
    directory = RunDirectory(tmp_path / "run")
    assert list(directory.checkpoints.glob("*.pt")) and not directory.last.exists()
    monkeypatch.chdir(tmp_path)
    measure = ["evaluate", "run", "--attacks", "natural", "--device", "cpu"]
    code, out, err = run_main(measure, monkeypatch, capsys)
    best = load_weights(directory.model)[1]["epoch"]
    said = f"Warning: measured before the run finished, on its network of epoch {best}\n"
    assert code == 0 and said in out, err
    code, out, err = run_main([*LONG, "--resume"], monkeypatch, capsys)
    assert code == 0, err
    assert "resuming run at step" in out
    code, out, err = run_main([*measure, "--out", "again"], monkeypatch, capsys)
    assert code == 0 and "before the run finished" not in out, err
    assert [record["epoch"] for record in directory.read_metrics()] == [*range(1, EPOCHS + 1)]
    assert directory.last.is_file()
