"""The documents tell the truth: links lead somewhere, commands and fields exist, code blocks run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from generalist.cli import app
from generalist.core.registry import Registry
from generalist.data.sets import DATASETS
from generalist.models import MODELS
from generalist.objectives import OBJECTIVES
from generalist.recipe import load_recipe
from generalist.shipped import shipped_names

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("**/*.md"))]
IDS = [page.name for page in PAGES]
BUILT = "reference/cli.md"
"""Made when the site is built, whose own test follows the links to it."""
MADE_BY_RUNS = {
    "recipe.yaml",
    "environment.json",
    "metrics.jsonl",
    "model.safetensors",
    "last.safetensors",
    "config.json",
    "corruptions.json",
}
_FILE = re.compile(r"(?<![\w/.-])((?:[\w-]+/)*[\w-]+\.(?:py|md|cff|txt|toml|yaml|json|jsonl|safetensors))\b")


def blocks(page: Path, language: str) -> list[str]:
    """The fenced code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> Iterator[list[str]]:
    """The words after `generalist` of every command shown, in blocks and in running text."""
    lines = [line for block in blocks(page, "sh") for line in block.replace("\\\n", " ").splitlines()]
    shown = [line for block in blocks(page, "console") for line in block.splitlines()]
    lines += [line.removeprefix("$ ") for line in shown if line.startswith("$ ")]
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    lines += [line for line in re.findall(r"`(generalist [^`]+)`", prose) if "|" not in line]
    for line in lines:
        words = shlex.split(line.partition(" | ")[0], comments=True)
        while words and "=" in words[0]:
            words.pop(0)
        if words[:1] == ["torchrun"] and "generalist" in words:  # torchrun ... -m generalist ...
            words = words[words.index("generalist") :]
        if words[:1] == ["generalist"]:
            yield words[1:]


def parsed(words: list[str]) -> dict[str, Any]:
    """The parameters of the innermost command, read as the command line reads them; a wrong option raises."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        assert words and words[0] in command.commands, f"there is no command {' '.join(words)!r}"
        command, words = command.commands[words[0]], words[1:]
    parameters: dict[str, Any] = command.make_context("generalist", list(words)).params
    return parameters


def own_files(page: Path) -> set[str]:
    """The files that a page tells its reader to write."""
    return set(re.findall(r'^```\w+ title="([^"]+)"$', page.read_text(), re.MULTILINE))


def anchor(title: str) -> str:
    return re.sub(r"[^\w -]", "", title.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("https://"):
            continue
        path, _, heading = target.partition("#")
        file = (page.parent / path) if path else page
        if target == BUILT:
            continue
        assert file.exists(), f"{page.name} links to {target}"
        if heading:
            titles = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert heading in map(anchor, titles), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_files_that_are_named_exist(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    prose = re.sub(r"https?://\S+", "", prose)
    for name in set(_FILE.findall(prose)) - MADE_BY_RUNS - own_files(page) - {"__init__.py", BUILT}:
        assert (ROOT / name).is_file() or (page.parent / name).is_file(), f"{page.name} names {name}"
    for folder in re.findall(r"`(src/[\w/]+/)`", prose):
        assert (ROOT / folder).is_dir(), f"{page.name} names {folder}"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_commands_parse(page: Path) -> None:
    for words in commands(page):
        if words == ["train"]:  # the command's name, not a call of it
            continue
        found = parsed(words)
        recipe = found.get("recipe") or (found.get("name") if "recipes" in words else None)
        if recipe is not None and not recipe.startswith("runs/") and recipe not in {"NAME", *own_files(page)}:
            assert recipe in shipped_names(), f"{page.name}: {words}"


def test_a_wrong_command_would_be_found() -> None:
    assert parsed(["train", "digits-t", "--set", "train.epochs=2"])["changes"] == ["train.epochs=2"]
    with pytest.raises(AssertionError, match="no command"):
        parsed(["tarin", "digits-t"])
    with pytest.raises(Exception, match="--sett"):
        parsed(["train", "digits-t", "--sett", "train.epochs=2"])
    assert len(list(commands(ROOT / "README.md"))) > 10


def test_changes_shown_in_the_readme_fit_their_recipes() -> None:
    checked = 0
    for words in commands(ROOT / "README.md"):
        if words[0] != "train" or "train.epochs=abc" in words:
            continue
        found = parsed(words)
        if changes := found["changes"]:
            overrides = [change for change in changes if ":mine" not in change]  # mymodels is the reader's own
            load_recipe(found["recipe"], overrides=overrides, trust_code=found["trust_code"])
            checked += 1
    assert checked >= 4


def test_fields_named_in_the_method_exist() -> None:
    recipe: Any = load_recipe("cifar10-resnet18-d-published-code").model_dump()
    text = (ROOT / "docs" / "method.md").read_text()
    fields = set(re.findall(r"`((?:mixing|learners|train|validation)\.[\w.]+)", text))
    logged = {"validation.drift", "validation.mixing_gap", "validation.ensemble"}
    assert len(fields - logged) > 15
    for field in fields - logged:
        node = recipe
        for part in field.replace(".N.", ".0.").split("."):
            node = node[int(part)] if part.isdecimal() else node[part]


def test_the_method_describes_what_the_styles_set() -> None:
    paper, published, ours = (
        load_recipe(f"cifar10-resnet18-d{suffix}") for suffix in ("-paper", "-published-code", "-plain")
    )
    assert [r.mixing.gamma.values[-1] for r in (paper, published, ours)] == [0, 0.4, 0.4]
    assert [r.learning_rate(r.learners[1]) for r in (paper, published, ours)] == [0.1, 0.01, 0.01]
    assert [r.learners[0].schedule.breakpoints(120)[2] for r in (paper, published, ours)] == [60, 80, 80]
    assert [r.mixing.source for r in (paper, published, ours)] == ["raw", "averaged", "raw"]
    assert [r.mixing.warmup for r in (paper, published, ours)] == [False, True, True]
    assert [r.mixing.counters for r in (paper, published, ours)] == ["copy", "truncate", "copy"]
    assert [r.mixing.redistribution.reset for r in (paper, published, ours)] == [False, False, True]
    assert [r.mixing.redistribution.when for r in (paper, published, ours)] == [
        "epoch-end",
        "every-iteration",
        "epoch-end",
    ]
    assert [r.learners[0].threat.eps for r in (paper, published, ours) if r.learners[0].threat] == [
        8 / 255,
        0.031,
        8 / 255,
    ]
    assert [r.learners[0].attack.step for r in (paper, published, ours)] == [None, 0.007, None]
    assert [r.learners[0].attack.batchnorm for r in (paper, published, ours)] == ["eval"] * 3
    assert [r.validation.split for r in (paper, published, ours)] == ["test", "test", "held-out"]
    assert [r.validation.min_natural for r in (paper, published, ours)] == [0, 0.88, 0]
    assert [r.validation.steps for r in (paper, published, ours)] == [20, 10, 20]
    assert [r.validation.every for r in (paper, published, ours)] == [1, 1, 5]
    assert published.mixing.redistribution.last_apart(published.train.epochs) == 74


def test_the_readme_shows_the_digits_recipe_of_today() -> None:
    text, recipe = (ROOT / "README.md").read_text(), load_recipe("digits-t")
    epochs, threats = recipe.train.epochs, [str(threat) for threat in recipe.threats()]
    assert set(re.findall(r"\bpgd-20/(\w+:[\d.]+\d)", text)) == set(threats)
    assert set(re.findall(r"\b(l\w+:0\.\d+) \d\d\.\d", text)) == set(threats)
    assert re.search(rf"^digits-t +linf \+ natural \+ l2 +{epochs}  default$", text, re.MULTILINE)
    apart = recipe.mixing.redistribution.last_apart(epochs)
    assert f"snapshots/{apart}, {epochs}/" in text
    assert f"--from runs/digits-t@{apart} --set train.start_epoch={apart}" in text


@pytest.fixture
def registries() -> Iterator[None]:
    """Forget afterwards what a document's code has registered."""
    kinds: list[Registry[Any]] = [MODELS, OBJECTIVES, DATASETS]
    before = [dict(kind._things) for kind in kinds]
    yield
    for kind, things in zip(kinds, before, strict=True):
        kind._things.clear()
        kind._things.update(things)


README_CODE = blocks(ROOT / "README.md", "python")
CONTRIBUTING_CODE = blocks(ROOT / "CONTRIBUTING.md", "python")


@pytest.mark.parametrize("number", range(len(README_CODE)))
@pytest.mark.usefixtures("registries")
def test_the_readmes_code_runs(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(README_CODE[number], f"README.md block {number}", "exec", dont_inherit=True), {"__name__": "readme"})
    made = list(tmp_path.glob("runs/*/model.safetensors"))
    assert bool(made) == ("generalist.train(" in README_CODE[number])
    assert ("natural" in capsys.readouterr().out) == ("evaluate" in README_CODE[number])


@pytest.mark.usefixtures("registries")
def test_the_skeletons_in_contributing_work(tmp_path: Path) -> None:
    import torch

    import generalist
    from generalist.attacks.threats import parse_threat

    space: dict[str, object] = {"__name__": "contributing"}
    for code in CONTRIBUTING_CODE:
        exec(compile(code, "CONTRIBUTING.md", "exec", dont_inherit=True), space)
    learners = [{"name": "natural", "objective": {"kind": "squared", "scale": 10}, "optimizer": {"lr": 0.05}}]
    recipe = {
        "data": {"name": "stripes", "augmentation": {"crop": 0, "flip": False}},
        "model": {"name": "linear-8x8"},
        "learners": learners,
        "train": {"epochs": 3, "batch_size": 50},
        "validation": {"images": 50},
    }
    run = generalist.train(recipe, out=tmp_path / "run", device="cpu")
    model = generalist.load(run, which="last")
    assert generalist.evaluate(model, "stripes", attacks=["natural"])["natural"].value == 1.0
    x, y = torch.full((2, 1, 8, 8), 0.5), torch.tensor([0, 1])
    moved = space["one_step"](model, x, y, threat=parse_threat("linf:0.1").build())  # type: ignore[operator]
    assert torch.allclose((moved - x).abs().amax((1, 2, 3)), torch.full((2,), 0.1))


def test_the_citation_is_whole() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors", "version", "license"} <= citation.keys()
    assert all({"type", "title", "authors", "year"} <= reference.keys() for reference in citation["references"])
    assert [len(reference["authors"]) for reference in citation["references"]] == [2, 5]
    assert all(
        author.keys() == {"family-names", "given-names"} for r in citation["references"] for author in r["authors"]
    )


def test_versions_agree() -> None:
    import generalist

    assert str(yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]) == generalist.__version__
    assert f"## {generalist.__version__}" in (ROOT / "CHANGELOG.md").read_text()
