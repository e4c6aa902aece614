"""HTML by one small writer that escapes everything: only `tag` turns text into markup."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

VOID = {"br", "hr", "img", "input", "link", "meta"}
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]*")
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\u202a-\u202e\u2066-\u2069\ufffe\uffff]")
"""Characters that HTML and SVG files may not contain, and those that change the direction of writing: one of these in a
name would show the figures after it backwards."""
LONGEST = 400
"""The most characters of one piece of a user's text: longer names and values are cut."""


class Html(str):
    """Text that is already markup. Only `tag`, `join` and files of this package create it."""

    __slots__ = ()


Content = Html | str | None


def printable(text: str) -> str:
    """The text with every forbidden character replaced by a mark."""
    return _FORBIDDEN.sub("\ufffd", text)


def escape(text: str) -> str:
    """Plain text, safe as content and in a quoted attribute."""
    return html.escape(printable(text), quote=True)


def tag(name: str, /, *children: Content | Iterable[Content], **attributes: str | int | float | bool | None) -> Html:
    """An element. Attributes and children that are not Html are escaped; `class_` and `data_x` give `class`, `data-x`.

    An attribute that is True has no value; one that is None or False is left out.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no element")
    opened = f"<{name}{_attributes(attributes)}>"
    if name in VOID:
        return Html(opened)
    return Html(f"{opened}{join(*children)}</{name}>")


def join(*children: Content | Iterable[Content]) -> Html:
    """Children one after the other."""
    return Html("".join(_markup(child) for child in _flat(children)))


def _flat(children: Iterable[Content | Iterable[Content]]) -> Iterable[Content]:
    for child in children:
        if child is None or isinstance(child, str):
            yield child
        else:
            yield from child


def _markup(child: Content) -> str:
    if child is None:
        return ""
    return str(child) if isinstance(child, Html) else escape(child)


def _attributes(attributes: dict[str, str | int | float | bool | None]) -> str:
    parts = []
    for key, value in attributes.items():
        name = key.removesuffix("_").replace("_", "-")
        if value is None or value is False:
            continue
        parts.append(f" {name}" if value is True else f' {name}="{escape(str(value))}"')
    return "".join(parts)


def short(text: str, most: int = LONGEST) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def table(
    heads: Sequence[Content],
    rows: Iterable[Sequence[Content]],
    *,
    caption: str,
    sortable: bool = False,
    methods: Sequence[str] | None = None,
    classes: str = "",
) -> Html:
    """A table whose first column holds the row headers. Cells may be ready `td` elements; others are numbers or text.

    `methods` are the methods of the rows, by which the page hides them.
    """
    head = [_head(title, sortable) for title in heads]
    body = []
    for number, row in enumerate(rows):
        cells = [tag("th", row[0], scope="row"), *(_cell(cell) for cell in row[1:])]
        body.append(tag("tr", cells, data_method=methods[number] if methods else None))
    inner = tag(
        "table",
        tag("caption", tag("span", caption)),
        tag("thead", tag("tr", head)),
        tag("tbody", body),
        class_=f"{classes} sortable".strip() if sortable else classes or None,
    )
    # A wide table scrolls inside its own box, which must be reachable by keyboard.
    return tag("div", inner, class_="scroll", tabindex=0, role="region", aria_label=caption)


def _head(title: Content, sortable: bool) -> Html:
    if not sortable:
        return tag("th", title, scope="col")
    return tag("th", tag("button", title, type="button"), scope="col", aria_sort="none")


def _cell(cell: Content) -> Html:
    return cell if isinstance(cell, Html) and cell.startswith("<td") else tag("td", cell)


def folded(summary: str, *children: Content | Iterable[Content], opened: bool = False, group: bool = False) -> Html:
    """Content that opens when its summary is clicked. A `group` is one of several that fill a section."""
    return tag("details", tag("summary", summary), *children, open=opened, class_="group" if group else None)


def command(text: str) -> Html:
    """A command for copying."""
    return tag("code", text)
