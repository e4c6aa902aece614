"""What the report is written with: HTML and SVG that escape, axes, pictures, figures as files."""

from __future__ import annotations

import warnings
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from report_helpers import Page

from generalist.report.axes import Scale
from generalist.report.drawing import ROLES, Drawing, heat_role
from generalist.report.html import Html, join, table, tag
from generalist.report.pictures import difference, overlay, picture
from generalist.report.printed import file_name, write_figures
from generalist.report.svg import file_text, inline


def test_everything_is_escaped_but_markup() -> None:
    assert tag("p", "a<b>&\"'", class_="x\"y'<") == ('<p class="x&quot;y&#x27;&lt;">a&lt;b&gt;&amp;&quot;&#x27;</p>')
    assert tag("p", tag("b", "x"), None, ["y", Html("<i>")]) == "<p><b>x</b>y<i></p>"
    assert tag("input", checked=True, disabled=False, id=None, data_x=1) == '<input checked data-x="1">'
    assert join("\x00\x1b\ud800") == "\ufffd\ufffd\ufffd"
    with pytest.raises(ValueError, match="no element"):
        tag("p onclick=x")


def test_a_name_cannot_turn_the_figures_behind_it() -> None:
    assert tag("p", "\u202eevil", ": 19.00") == "<p>\ufffdevil: 19.00</p>"
    assert tag("p", "\u2067evil\u2069") == "<p>\ufffdevil\ufffd</p>"
    assert tag("p", "\u0642\u0637 e\u0301 a\u200db") == "<p>\u0642\u0637 e\u0301 a\u200db</p>", "other scripts stay"


def test_tables_have_a_caption_and_heads_that_can_be_reached() -> None:
    page = Page(table(["a", "b"], [["x", "1"]], caption="What <it> is", sortable=True, methods=["m"]))
    assert page.all("div")[0]["tabindex"] == "0" and page.all("div")[0]["aria-label"] == "What <it> is"
    assert [th.get("scope") for th in page.all("th")] == ["col", "col", "row"]
    assert page.all("th")[0]["aria-sort"] == "none" and len(page.all("button")) == 2
    assert page.all("tr")[1]["data-method"] == "m"


def test_ticks_are_round_and_inside() -> None:
    assert Scale(0, 100, 0, 1).ticks(5) == [0, 20, 40, 60, 80, 100]
    assert Scale(96.2, 99.1, 0, 1).ticks(6) == pytest.approx([96.5, 97, 97.5, 98, 98.5, 99])
    assert Scale(0, 1e-6, 0, 1).ticks(4) == pytest.approx([0, 2.5e-7, 5e-7, 7.5e-7, 1e-6])
    assert Scale(0, 10, 100, 0)(2.5) == 75


def drawing() -> Drawing:
    figure = Drawing("fig", "A <title> & more", 100, 50)
    figure.text(5, 10, '<script>alert("x")</script> $5', bold=True, turned=True)
    figure.line(0, 0, 100, 50)
    for number, kind in enumerate(("circle", "square", "triangle", "diamond", "down", "cross")):
        figure.mark(10 * number, 20, kind, role=f"c{number}", hollow=bool(number % 2), tip="<b>")  # type: ignore[arg-type]
    return figure


def test_svg_is_well_formed_and_holds_text_as_text() -> None:
    root = ET.fromstring(file_text(drawing()))
    assert root.attrib["width"] == "19.00mm" and root.attrib["viewBox"] == "0 0 100 50"
    space = "{http://www.w3.org/2000/svg}"
    texts = [element.text for element in root.iter(f"{space}text")]
    assert texts == ['<script>alert("x")</script> $5']
    assert len(list(root.iter(f"{space}polygon"))) == 6 and not list(root.iter(f"{space}script"))
    themed = inline(drawing())
    assert 'role="img"' in themed and 'aria-label="A &lt;title&gt; &amp; more"' in themed
    assert 'class="s-paper f-c0"' in themed and "#" not in themed, "the page's themes choose the colours"


def test_figures_are_files_in_every_format(tmp_path: Path) -> None:
    files = write_figures([drawing()], tmp_path, ["svg", "pdf", "png"]).files
    assert [file.name for file in files] == ["fig.svg", "fig.pdf", "fig.png"]
    assert files[1].read_bytes().startswith(b"%PDF") and files[2].read_bytes().startswith(b"\x89PNG")
    before = [file.read_bytes() for file in files]
    assert before == [file.read_bytes() for file in write_figures([drawing()], tmp_path, ["svg", "pdf", "png"]).files]


def test_characters_that_cannot_be_printed_are_told_once_and_no_warning_escapes(tmp_path: Path) -> None:
    odd = drawing()
    odd.text(5, 5, "cat \u732b and\nmore\x07")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        written = write_figures([odd], tmp_path, ["svg", "pdf", "png"])
    assert written.lacking == "\u732b", "a control character has a mark that the font has"
    assert "\u732b" in written.files[0].read_text()


def test_names_of_files_are_safe() -> None:
    assert file_name("dial", "../../<x>", "linf:8/255") == "dial-..-..-x-linf-8-255"
    assert file_name("///") == "figure"


def test_every_colour_of_an_accuracy_is_known() -> None:
    assert all(heat_role(share) in ROLES for share in (-1, 0, 0.049, 0.5, 0.999, 1, 2))


def test_differences_and_overlays() -> None:
    clean, attacked = np.zeros((1, 2, 2), np.float32), np.zeros((1, 2, 2), np.float32)
    assert np.array_equal(difference(clean, attacked), np.full((1, 2, 2), 0.5, np.float32))
    attacked[0, 0] = [0.1, -0.05]
    assert difference(clean, attacked)[0, 0].tolist() == pytest.approx([1.0, 0.25])
    laid = overlay(np.zeros((3, 1, 2), np.float32), np.asarray([[0.0, 2.0]], np.float32))
    assert laid.shape == (3, 1, 2) and laid[0, 0, 1] > laid[2, 0, 1], "yellow where most evidence is"
    assert laid[2, 0, 0] > laid[0, 0, 0], "blue where there is none"
    assert 'alt="&lt;b&gt;"' in picture(clean, "<b>")
