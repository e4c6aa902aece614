"""The page in a real browser: it loads alone, answers to clicks, keeps hostile text harmless, and is accessible.

Needs an installed Chromium (or Chrome). Screenshots are kept in the folder that GENERALIST_SCREENSHOTS names.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report_helpers import hostile_copy, small_runs

from generalist.report import write_report

pytestmark = pytest.mark.slow
playwright_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: see the dev extra")

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SERIOUS = {"serious", "critical"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = os.environ.get("GENERALIST_CHROMIUM") or next(
        (found for name in NAMES if (found := shutil.which(name))), None
    )
    if path is None:
        pytest.skip("no Chromium is installed: on Debian, apt-get install chromium")
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []  # its sandbox refuses root
    with playwright_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=arguments)
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return small_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def report(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("page") / "report.html"
    write_report(runs, out, device="cpu")
    return out


@pytest.fixture(scope="module")
def screenshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    named = os.environ.get("GENERALIST_SCREENSHOTS")
    folder = Path(named) if named else tmp_path_factory.mktemp("screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class Visit:
    """A page that was opened, and all that it said and asked for."""

    def __init__(self, browser: Any, file: Path, *, width: int = 1280, scheme: str = "light") -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.messages: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.as_uri())

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, *problem: object) -> None:
        self.context.close()

    def left_the_file(self) -> list[str]:
        return [url for url in self.requests[1:] if not url.startswith("data:image/png;base64,")]


def test_it_loads_alone_and_without_complaint(browser: Any, report: Path) -> None:
    with Visit(browser, report) as visit:
        assert visit.page.title().startswith("Report: digits-t, digits-d, digits-at")
        assert visit.requests[0] == report.as_uri()
        broken = visit.page.evaluate("[...document.images].filter(i => i.complete && !i.naturalWidth).length")
        assert broken == 0 and visit.page.locator("img").count() > 20
        assert visit.messages == [] and visit.left_the_file() == []


def first_column(table: Any) -> list[str]:
    found: list[str] = table.locator("tbody tr th").all_inner_texts()
    return found


def test_a_heading_sorts_its_table(browser: Any, report: Path) -> None:
    with Visit(browser, report) as visit:
        table = visit.page.locator("#attacks table")
        head = table.locator("thead th").filter(has_text="natural")
        assert head.get_attribute("aria-sort") == "none"
        column = table.locator("thead th").all_inner_texts().index("natural")

        def values() -> list[float]:
            cells = table.locator(f"tbody tr > :nth-child({column + 1})")
            return [float(text.split()[0]) for text in cells.all_inner_texts()]

        before = values()
        head.locator("button").click()
        assert values() == sorted(before, reverse=True) and head.get_attribute("aria-sort") == "descending"
        head.locator("button").press("Enter")
        assert values() == sorted(before) and head.get_attribute("aria-sort") == "ascending"
        table.locator("thead th button").first.click()
        assert first_column(table) == sorted(first_column(table)) and head.get_attribute("aria-sort") == "none"


def test_a_method_can_be_hidden_everywhere(browser: Any, report: Path) -> None:
    with Visit(browser, report) as visit:
        box = visit.page.locator("input[data-filter='at']")
        rows = visit.page.locator("#attacks tbody tr:visible")
        assert rows.count() == 3
        box.uncheck()
        assert rows.count() == 2 and visit.page.locator(".card:visible").count() == 2
        marks = visit.page.locator("#tradeoff svg [data-method='at']")
        shown = visit.page.locator("#tradeoff svg [data-method='at']:not([hidden])")
        assert marks.count() > 0 and shown.count() == 0 and not marks.first.is_visible()
        box.check()
        assert rows.count() == 3 and shown.count() == marks.count()


def test_a_point_says_what_it_is(browser: Any, report: Path) -> None:
    with Visit(browser, report) as visit:
        tip = visit.page.locator("#tip")
        assert not tip.is_visible()
        point = visit.page.locator("#tradeoff polygon[data-tip^='digits-at']").first
        point.scroll_into_view_if_needed()
        # Scrolling hides what was said, and says that it scrolled a frame later.
        visit.page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        point.hover(force=True)
        assert tip.is_visible() and "natural" in tip.inner_text()
        visit.page.locator("h1").hover()
        assert not tip.is_visible()


def test_a_finger_and_escape_show_and_hide_what_a_point_says(browser: Any, report: Path) -> None:
    with Visit(browser, report) as visit:
        tip, point = visit.page.locator("#tip"), visit.page.locator("#tradeoff polygon[data-tip^='digits-at']").first
        point.dispatch_event("pointerdown", {"pointerType": "touch", "clientX": 50, "clientY": 50, "bubbles": True})
        assert tip.is_visible() and "natural" in tip.inner_text()
        visit.page.keyboard.press("Escape")
        assert not tip.is_visible()


def test_names_are_sorted_from_the_first(browser: Any, report: Path) -> None:
    with Visit(browser, report) as visit:
        table = visit.page.locator("#attacks table")
        table.locator("thead th").filter(has_text="method").locator("button").click()
        methods = table.locator("tbody tr > :nth-child(2)").all_inner_texts()
        assert methods == sorted(methods) and len(set(methods)) > 1


def test_it_is_printed_with_dark_ink(browser: Any, report: Path) -> None:
    with Visit(browser, report, scheme="dark") as visit:
        visit.page.locator("#theme").click()
        visit.page.locator("#theme").click()  # dark by choice as well
        ink = "getComputedStyle(document.body).color"
        shown = visit.page.evaluate(ink)
        visit.page.emulate_media(media="print", color_scheme="dark")
        assert visit.page.evaluate(ink) == "rgb(27, 31, 36)" != shown


def background(visit: Visit) -> str:
    found: str = visit.page.evaluate("getComputedStyle(document.body).backgroundColor")
    return found


def test_the_theme_follows_the_system_until_it_is_switched(browser: Any, report: Path) -> None:
    with Visit(browser, report) as light, Visit(browser, report, scheme="dark") as dark:
        bright, dim = background(light), background(dark)
        assert bright != dim
        for visit, other in ((light, dim), (dark, bright)):
            button = visit.page.locator("#theme")
            own = background(visit)
            before = button.inner_text()
            button.click()
            assert background(visit) == other and button.inner_text() != before
            button.click()
            assert background(visit) == own


@pytest.mark.parametrize(
    ("name", "width", "scheme"), [("desktop", 1280, "light"), ("dark", 1280, "dark"), ("phone", 390, "light")]
)
def test_it_is_accessible_and_fits(
    browser: Any, report: Path, screenshots: Path, name: str, width: int, scheme: str
) -> None:
    from axe_playwright_python.sync_playwright import Axe

    with Visit(browser, report, width=width, scheme=scheme) as visit:
        visit.page.screenshot(path=screenshots / f"report-{name}.png", full_page=True)
        assert visit.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "no sideways scrolling"
        visit.page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
        assert visit.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nor with all opened"
        found = Axe().run(visit.page).response["violations"]
        serious = {rule["id"]: rule["nodes"][0]["html"][:200] for rule in found if rule["impact"] in SERIOUS}
        assert serious == {}


def test_hostile_text_runs_nothing_in_a_browser(browser: Any, runs: list[Path], tmp_path: Path) -> None:
    hostile = hostile_copy(runs[0], tmp_path)
    write_report([hostile, *runs[1:]], tmp_path / "page.html", device="cpu")
    with Visit(browser, tmp_path / "page.html") as visit:
        visit.page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
        for mark in visit.page.locator("#tradeoff polygon[data-tip]").all()[:3]:
            mark.hover(force=True)
        visit.page.locator("#attacks thead button").first.click()
        assert visit.page.evaluate("window.hacked") is None
        assert "<script>window.hacked=1<" in visit.page.locator("h1").inner_text().replace("\u2215", "/")
        assert visit.messages == [] and visit.left_the_file() == []
