"""The documentation as a site: it builds without a warning, its links lead somewhere, its commands run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest
from doc_pages import PAGES, Block, Shown, blocks, commands, run_page, shape_of
from test_cli import COMMANDS

ROOT = Path(__file__).parents[1]

NOT_RUN = {
    "tutorial.md": ["installs packages"],
    "baselines.md": ["needs CIFAR-10 and a GPU", "needs CIFAR-10 and a GPU"],
    "export.md": ["needs a run on CIFAR-10"],
    "others-weights.md": ["needs robustbench, CIFAR-10 and a GPU", "needs a folder of images of these classes"],
    "own-model-and-data.md": ["needs a folder of photographs"],
    "resume.md": ["needs somebody to press Ctrl-C"],
    "track.md": ["starts a server", "needs wandb and mlflow"],
}
"""Every block that the tests leave out, and why: whoever adds one does it on purpose."""


class Page(HTMLParser):
    """What a page refers to and what can be referred to in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors.add(found.get("id", ""))
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag in {"script", "img", "iframe"} and "src" in found:
            self.loaded.append(found["src"])
        if tag == "link" and found.get("rel") in {"stylesheet", "preload", "icon", "preconnect"}:
            self.loaded.append(found["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built strictly: a warning of MkDocs is an error."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "NO_MKDOCS_2_WARNING": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}


def test_every_internal_link_resolves(pages: dict[Path, Page]) -> None:
    followed = 0
    for path, page in pages.items():
        for link in page.links:
            target, fragment = urldefrag(link)
            if re.match(r"[a-z]+:", target):
                continue
            file = (path.parent / unquote(target)).resolve() if target else path
            assert file.is_file(), f"{path.name} links to {link}"
            if fragment and file in pages:
                assert unquote(fragment) in pages[file].anchors, f"{path.name} links to {link}"
            followed += 1
    assert followed > 200


def test_a_reader_fetches_nothing_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        for source in page.loaded:
            assert not re.match(r"(?:[a-z]+:)?//", source), f"{path.name} loads {source}"
            assert (path.parent / urldefrag(source)[0]).resolve().is_file(), f"{path.name} loads {source}"
    for sheet in site.rglob("*.css"):
        assert re.search(r"@import|url\(['\"]?(?:https?:)?//", sheet.read_text()) is None, sheet.name


def test_the_reference_is_made_from_the_code(site: Path) -> None:
    command_line, python = ((site / "reference" / f"{name}.html").read_text() for name in ("cli", "api"))
    for words, options in COMMANDS.items():
        assert f">generalist {words}<" in command_line
        assert all(option in command_line for option in options if option.startswith("--"))
    for name in ("generalist.train", "generalist.export.export_model", "generalist.tracking.Tracker"):
        assert f'id="{name}"' in python
    assert "The whole recipe is checked before" in python  # of a docstring


# -- the pages as programs --------------------------------------------------------------------------------------------


def test_what_is_not_run_is_listed() -> None:
    found = {page.name: [block.reason for block in blocks(page) if block.reason is not None] for page in PAGES}
    assert {name: reasons for name, reasons in found.items() if reasons} == NOT_RUN


def test_pages_are_read_as_they_stand() -> None:
    shown = [shown for page in PAGES for block in blocks(page) for shown in commands_of(block)]
    assert len(shown) > 40 and sum(one.fails for one in shown) >= 5
    fences = sum(page.read_text().count("\n```") for page in PAGES)
    assert fences == 2 * sum(len(blocks(page)) for page in PAGES) + untagged()
    assert shape_of("│ natural │  98.5 │ in 3 s") == "natural # in # s"
    assert shape_of("best-digits-test-e8ae3afae2a6") == "best-digits-test-#"
    assert shape_of("│ *  │ 0.80, 0.20 │ 98.00 │ reestimated │") == shape_of("│    │ 1.00, 0.00 │ 98.50 │ mixed │")
    assert shape_of("* Pareto front") == "* Pareto front" and shape_of("mixed statistics  1") == "mixed statistics #"


def commands_of(block: Block) -> list[Shown]:
    return commands(block) if block.language in {"sh", "console"} else []


def untagged() -> int:
    """Lines of fences without a language: listings that are nobody's output."""
    return sum(2 * len(re.findall(r"^```\n.*?^```$", without_tagged(page), re.MULTILINE | re.DOTALL)) for page in PAGES)


def without_tagged(page: Path) -> str:
    return re.sub(r"^```\w.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_the_commands_of_a_page_run_and_print_what_it_shows(page: Path, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    for shown, printed in run_page(page, folder):
        shapes = {shape_of(line) for line in printed}
        for line in shown.output:
            assert line == "..." or shape_of(line) in shapes, f"{shown.command}\nshows {line!r} and prints {printed}"
