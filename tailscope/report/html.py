"""HTML from Python values. Text is escaped unless it is `Html` already, so that nothing of a trace becomes markup."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

from tailscope.safe import printable

#: Longest text of one element.
MOST_TEXT = 4_000
_VOID = ("input", "meta", "br", "link")


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


Child = Any


def text(value: object, limit: int = MOST_TEXT) -> Html:
    """Anybody's text, on one line, as text."""
    return Html(html.escape(printable(str(value), limit), quote=True))


def el(name: str, *children: Child, **attributes: object) -> Html:
    """An element. Children may be text, elements, None or sequences of these; `cls` is class, `for_` for, `data_x` data-x."""
    written = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID:
        return Html(f"<{name}{written}>")
    return Html(f"<{name}{written}>{join(*children)}</{name}>")


def join(*children: Child) -> Html:
    return Html("".join(_flat(children)))


def _flat(children: Iterable[Child]) -> Iterable[str]:
    for child in children:
        if child is None:
            continue
        if isinstance(child, Html):
            yield child
        elif isinstance(child, str):
            yield text(child)
        else:
            yield from _flat(child)


def _attribute(key: str, value: object) -> str:
    if value is None or value is False:
        return ""
    name = {"cls": "class"}.get(key, key.rstrip("_").replace("_", "-"))
    return f" {name}" if value is True else f' {name}="{value if isinstance(value, Html) else text(value)}"'


def table(
    caption: str,
    head: Sequence[str],
    rows: Iterable[Sequence[Child]],
    *,
    numbers: int = 1,
    until: int = 99,
    cls: str = "",
) -> Html:
    """A table that scrolls by itself where it is wider than its place. The columns from `numbers` on, `until` one, are
    numbers; the first names the row. Of class `stacked` its cells wrap on a narrow screen, and roles say that it is a
    table still."""
    stacked = "stacked" in cls.split()

    def role(name: str) -> str | None:
        return name if stacked else None

    body = []
    for row in rows:
        cells = []
        for i, cell in enumerate(row):
            if isinstance(cell, Html) and cell.startswith("<td"):
                # A cell may bring its own element.
                cells.append(Html(f'<td role="cell"{cell[3:]}') if stacked else cell)
            elif i == 0:
                cells.append(el("th", cell, scope="row", role=role("rowheader")))
            else:
                number = numbers <= i < until
                cells.append(
                    el(
                        "td",
                        cell,
                        cls="num" if number else None,
                        role=role("cell"),
                        data_head=head[i] if stacked and number and cell else None,
                    )
                )
        body.append(el("tr", cells, role=role("row")))
    heads = [
        el("th", name, scope="col", cls="num" if numbers <= i < until else None, role=role("columnheader"))
        for i, name in enumerate(head)
    ]
    return el(
        "div",
        el(
            "table",
            el("caption", caption),
            el("thead", el("tr", heads, role=role("row")), role=role("rowgroup")),
            el("tbody", body, role=role("rowgroup")),
            cls=cls or None,
            role=role("table"),
        ),
        cls="scroll",
        tabindex="0",
        role="region",
        aria_label=caption,
    )
