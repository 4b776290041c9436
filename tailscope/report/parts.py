"""What sections of the page are made of."""

from __future__ import annotations

from tailscope.report.html import Child, Html, el


def section(name: str, title: str, lead: Child, *content: Child, cls: str = "") -> Html:
    return el(
        "section",
        el("h2", title, id=f"{name}-title"),
        el("p", lead, cls="lead") if lead else None,
        *content,
        id=name,
        aria_labelledby=f"{name}-title",
        cls=cls or None,
    )


def chart(name: str, title: str, says: Child, *controls: Child, height: int = 340) -> Html:
    """A place for a chart, with the sentence on what to see in it. `says` is of all of the trace; a script replaces it
    where it shows a part."""
    return el(
        "figure",
        el(
            "figcaption",
            el("h3", title, id=f"{name}-label"),
            el("p", says, cls="says", id=f"{name}-says"),
        ),
        el("div", *controls, cls="controls") if controls else None,
        el(
            "div",
            el("p", "This chart is drawn by a script; the numbers below it are not.", cls="waiting"),
            cls="plot",
            id=f"plot-{name}",
            data_chart=name,
            style=f"min-height:{height}px",
            role="group",
            aria_labelledby=f"{name}-label",
            aria_describedby=f"{name}-says",
        ),
        cls="chart",
    )


def behind(summary: str, *content: Child) -> Html:
    """The table behind a chart."""
    return el("details", el("summary", summary), *content, cls="behind")


def choice(name: str, label: str, options: list[tuple[str, str]], chosen: str = "") -> Html:
    return el(
        "label",
        el("span", label),
        el(
            "select",
            [el("option", text, value=value, selected=value == chosen) for value, text in options],
            id=name,
        ),
        cls="choice",
    )


def lacking(*sentences: str) -> Html:
    """In place of a panel whose data the trace does not have: what it is and how to add it."""
    return el("p", el("strong", "Not in this trace. "), " ".join(sentences), cls="lacking")


def listed(names: list[str], most: int = 4) -> str:
    """A few names in words."""
    shown = names[:most]
    more = len(names) - len(shown)
    if more:
        return f"{', '.join(shown)} and {more} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else "".join(shown)
