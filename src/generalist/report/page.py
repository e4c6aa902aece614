"""The page: its sections in one HTML file that loads nothing and runs only its own script."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import count
from pathlib import Path

from generalist._version import __version__
from generalist.core.errors import GeneralistError
from generalist.core.files import check_folder, check_target, write_text
from generalist.report.drawing import ROLES, Drawing
from generalist.report.html import Html, join, short, tag
from generalist.report.printed import Figures, check_formats, write_figures
from generalist.report.runs import Collection, collect
from generalist.report.samples import recorded
from generalist.report.section import Section, names
from generalist.report.section_accuracy import attacks_section, classes_section, corruptions_section
from generalist.report.section_images import disagreement_section, gallery_section
from generalist.report.section_setup import environment_section, recipes_section
from generalist.report.section_summary import summary_section
from generalist.report.section_tradeoff import dial_section, tradeoff_section
from generalist.report.section_training import training_section
from generalist.training.environment import choose_device

MOST_IMAGES = 24


@dataclass(frozen=True)
class Written:
    """The files that a report wrote."""

    page: Path
    size: int
    """The page's size in bytes."""
    figures: Sequence[Path]
    lacking: str
    """Characters that appear as boxes in PDF and PNG."""
    runs: int
    networks: int


def write_report(
    paths: Sequence[str | Path],
    out: str | Path = "report.html",
    *,
    figures: str | Path | None = None,
    formats: Sequence[str] = ("svg", "pdf", "png"),
    images: int = 6,
    device: str = "auto",
    trust_code: bool = False,
) -> Written:
    """One page about these runs; with `figures`, every figure is also written to files there.

    `images` is the number of examples shown for each network and threat, and of disagreements of each kind; with 0,
    there are no pictures, and no network is loaded. Everything is read and checked before anything is written.
    """
    page = Path(out)
    if not 0 <= images <= MOST_IMAGES:
        raise GeneralistError(f"--images is a number from 0 to {MOST_IMAGES}, not {images}")
    if figures is not None:
        check_formats(formats)
    choose_device(device)
    found = collect([Path(path) for path in paths], trust_code=trust_code)
    check_target(page, ".html")
    if figures is not None:
        check_folder(Path(figures))
    command = [*(str(path) for path in paths), "--out", str(page)]
    sections = make_sections(found, command, images=images, device=device, trust_code=trust_code)
    text = render(found, sections)
    write_text(page, text)
    written = write_figures(_named(sections), Path(figures), formats) if figures is not None else Figures([], "")
    return Written(page, len(text.encode()), written.files, written.lacking, len(found.runs), len(found.networks))


def make_sections(
    found: Collection, command: Sequence[str], *, images: int, device: str, trust_code: bool
) -> list[Section]:
    records = [entry for network in found.networks if (entry := recorded(network)) is not None] if images else []
    sections = [
        summary_section(found),
        tradeoff_section(found),
        dial_section(found),
        attacks_section(found),
        classes_section(found),
        corruptions_section(found),
        gallery_section(found, records, each=images) if images else None,
        disagreement_section(found, records, most=images, device=device, trust_code=trust_code)
        if images and len(found.networks) > 1
        else None,
        training_section(found),
        recipes_section(found),
        environment_section(found, command),
    ]
    return [section for section in sections if section is not None]


def _named(sections: Sequence[Section]) -> list[Drawing]:
    """All drawings; names that collide get a number that no other name has."""
    drawings = [drawing for section in sections for drawing in section.drawings]
    own, taken = {drawing.name for drawing in drawings}, set[str]()
    for drawing in drawings:
        numbered = (name for i in count(2) if (name := f"{drawing.name}-{i}") not in taken | own)
        drawing.name = drawing.name if drawing.name not in taken else next(numbered)
        taken.add(drawing.name)
    return drawings


# -- the file ---------------------------------------------------------------------------------------------------------


def render(found: Collection, sections: Sequence[Section]) -> str:
    """The page's HTML."""
    title = f"Report: {names([short(run.name, 60) for run in found.runs], 3)}"
    style, script = join(_file("report.css"), _roles()), _file("report.js")
    # Whatever a hostile name might smuggle in, the browser runs only this script and style, and fetches nothing.
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="generator", content=f"generalist {__version__}"),
        tag("title", title),
        tag("style", style),
    )
    links = [tag("a", section.menu or section.title, href=f"#{section.key}") for section in sections]
    top = tag(
        "header",
        tag("nav", *links, aria_label="Sections"),
        tag("button", "Dark theme", id="theme", type="button", hidden=True),
        class_="top",
    )
    counts = f"{_counted(len(found.runs), 'run')}, {_counted(len(found.networks), 'evaluated network')}"
    main = tag(
        "main",
        tag("h1", title),
        tag("p", counts, class_="about"),
        *(section.html() for section in sections),
        id="main",
    )
    body = tag(
        "body",
        tag("a", "Skip to the content", href="#main", class_="skip"),
        top,
        main,
        tag("div", id="tip", role="tooltip", hidden=True),
        tag("script", script),
    )
    return "<!doctype html>\n" + tag("html", head, body, lang="en") + "\n"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _file(name: str) -> Html:
    """A file of this package, inserted into the page unchanged."""
    return Html(resources.files("generalist.report").joinpath(name).read_text(encoding="utf-8"))


def _roles() -> Html:
    """Classes for the roles of colours: fill, stroke and background. Heat has the same colours in both themes."""
    rules = [".f-none{fill:none}"]
    for role, colour in ROLES.items():
        value = colour if role.startswith("h") else f"var(--{role})"
        rules.append(f".f-{role}{{fill:{value}}}.s-{role}{{stroke:{value}}}")
        if role.startswith("h"):
            rules.append(f"td.b-{role}{{background:{value}}}td.f-{role}{{color:{value}}}")
    return Html("\n".join(rules))


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
