"""Sections that are tables and bars, whole without a script: classes, excess, blame, rules, trust."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tailscope.ledger.lines import COMPONENTS
from tailscope.model import ClassRow, Diagnosis
from tailscope.render import text_classes, words
from tailscope.report.columns import shown_name
from tailscope.report.html import Child, Html, el, table
from tailscope.report.parts import behind, section
from tailscope.safe import printable
from tailscope.units import seconds

#: Of a bar, parts below this share of it have no name of their own.
NAMED_SHARE = 0.02
#: Classes in a matrix, those with most seconds; a larger one is cut.
MOST_BLAMED = 24
#: Bars of excess.
MOST_BARS = 40
#: Of a class that heads a row or column so much is shown, as in a terminal.
LONGEST_NAME = 24
TRUST_MARK = {"pass": "✓ ok", "warn": "! warn", "fail": "✕ FAIL"}
CHECK_MARK = {"found": "▲", "clear": "✓", "inconclusive": "?", "no-data": "–", "failed": "✕"}


def classes(diagnosis: Diagnosis) -> list[Html]:
    """The class table as in the terminal, and what stands below it there."""
    rows = [row for row in diagnosis.classes if row.n]
    if not rows:
        return []
    attained = {entry["class"]: entry for entry in diagnosis.trace.get("attainment", ())}
    shown = list(words.shown(rows))
    last = {row.klass: i for i, row in enumerate(shown)}
    cells: list[Sequence[Child]] = []
    for i, row in enumerate(shown):
        broken = el("strong", " SLO broken", cls="broken") if row.slo_broken else None
        name = printable(row.klass, LONGEST_NAME)
        cells.append(
            (
                name,
                el("td", row.metric, broken),
                f"{row.n:,}",
                seconds(row.p50_s),
                seconds(row.p95_s),
                words.p99(row),
                el("td", words.excess(row), cls="words"),
            )
        )
        entry = attained.get(row.klass) if i == last[row.klass] else None
        if entry:
            told = el("td", text_classes.attained(entry), cls="words")
            cells.append((name, el("td", "SLO"), f"{entry['n']:,}", "", "", "", told))
    head = ("class", "metric", "n", "p50", "p95", "p99", "tail above typical, and where it went")
    return [
        table("Latency by class", head, cells, numbers=2, until=6, cls="classes stacked"),
        el("p", words.CLASSES_NOTE, cls="note"),
        *_beside(diagnosis),
    ]


def _beside(diagnosis: Diagnosis) -> list[Html]:
    found = []
    for heading, lines in (
        (words.WHEN, text_classes.over_time(diagnosis.trace.get("class_times", ()))),
        (words.CELLS, text_classes.cells(diagnosis.trace.get("shapes", ()))),
    ):
        told = [el("li", line.plain.strip()) for line in lines]
        if told:
            found += [el("h3", heading), el("ul", told, cls="plain")]
    for name, key in (("tenant", "tenants"), ("priority", "priorities")):
        entries = diagnosis.trace.get(key, ())
        if len(entries) > 1:
            found.append(_groups(name, entries))
    objectives = [(row, o) for row in diagnosis.classes for o in row.objectives]
    if objectives:
        mark = {"broken": "✕", "kept": "✓", "undecided": "?"}
        found += [
            el("h3", words.OBJECTIVES),
            el(
                "ul",
                [
                    el(
                        "li",
                        el("strong", f"{mark[o.status]} {o.status}"),
                        " ",
                        words.objective(row, o),
                        cls=o.status,
                    )
                    for row, o in objectives
                ],
                cls="plain",
            ),
        ]
    return found


def _groups(name: str, entries: Sequence[Mapping[str, Any]]) -> Html:
    head = (name, "n", "failed", "tokens", "TTFT p50", "p95", "p99", "E2E p50", "p95", "p99")
    rows = []
    for entry in entries:
        label = "(none)" if entry["id"] is None else str(entry["id"])
        share = entry["share_of_tokens"]
        rows.append(
            (
                f"{label} ({entry['members']:,})" if entry["members"] > 1 else label,
                f"{entry['n']:,}",
                f"{entry['failed']:,}",
                "-" if share is None else f"{share:.0%}",
                *(seconds(entry[m][q]) for m in ("ttft", "e2e") for q in ("p50_s", "p95_s", "p99_s")),
            )
        )
    return table(f"By {name}", head, rows)


# -- excess ------------------------------------------------------------------------------------


def excess(diagnosis: Diagnosis) -> Html | None:
    rows = [row for row in words.shown([r for r in diagnosis.classes if r.n]) if row.excess_s and row.excess]
    if not rows:
        return None
    of = len(rows)
    kept = sorted(range(of), key=lambda i: -(rows[i].excess_s or 0.0) * rows[i].tail_n)[:MOST_BARS]
    rows = [rows[i] for i in sorted(kept)]
    worst = max(rows, key=lambda row: (row.excess_s or 0.0) / (row.p50_s or 1.0))
    name, most = max(worst.excess.items(), key=lambda item: item[1])
    lead = (
        f"What the slowest requests of each class take beyond typical ones of their kind, booked to components. Out of "
        f"proportion most is {worst.metric} of {worst.klass}: {words.signed(worst.excess_s or 0.0)} above typical, "
        f"{seconds(most)} of it {name}: {COMPONENTS.get(name, '')}."
    )
    used = {name for row in rows for name in row.excess}
    legend = [(name, told) for name, told in COMPONENTS.items() if name in used]
    return section(
        "excess",
        "Where the excess went",
        lead,
        el("div", [_bar(row) for row in rows], cls="bars"),
        el(
            "p",
            "Each bar is the whole of its own excess; what lies left of a line was less than typical."
            + (f" {len(rows)} of {of} rows, those with most request-seconds." if of > len(rows) else ""),
            cls="note",
        ),
        behind(
            "What the components mean, and all their numbers",
            table(
                "Components",
                ("component", "what it is"),
                [(n, el("td", t, cls="words")) for n, t in legend],
                numbers=9,
            ),
            table(
                "Excess by component, seconds",
                ("component", *(f"{row.klass} {row.metric}" for row in rows)),
                [
                    (n, *(words.signed(row.excess[n]) if n in row.excess else "-" for row in rows))
                    for n, _ in legend
                ],
            ),
        ),
    )


def _bar(row: ClassRow) -> Html:
    parts = sorted(row.excess.items(), key=lambda item: -abs(item[1]))
    whole = sum(abs(s) for _, s in parts) or 1.0
    named = [(n, s) for n, s in parts if abs(s) >= NAMED_SHARE * whole]
    rest = sum(s for n, s in parts if abs(s) < NAMED_SHARE * whole)
    if abs(rest) >= NAMED_SHARE * whole / 4:
        named.append(("smaller parts", rest))
    less = [(n, s) for n, s in named if s < 0]
    more = [(n, s) for n, s in named if s >= 0]
    total = sum(abs(s) for _, s in named) or 1.0
    name = f"{printable(row.klass, LONGEST_NAME)} {row.metric}"
    told = ", ".join(f"{words.signed(s)} {n}" for n, s in named)
    segments = [_segment(n, s, total) for n, s in reversed(less)]
    if less:
        segments.append(el("i", cls="zero"))
    segments += [_segment(n, s, total) for n, s in more]
    return el(
        "div",
        el(
            "div",
            el("strong", name),
            el("span", f"{row.tail_rule}: {words.signed(row.excess_s or 0.0)}"),
            cls="bar-head",
        ),
        el("div", segments, cls="bar", role="img", aria_label=f"{name}: {told}"),
        el(
            "ul",
            [
                el(
                    "li",
                    el("i", cls=f"swatch {css_of(n)}", aria_hidden="true"),
                    f"{words.signed(s)} {n}",
                )
                for n, s in (*more, *less)
            ],
            cls="legend",
            aria_hidden="true",
        ),
        cls="bar-row",
        data_class=shown_name(row.klass),
    )


def _segment(name: str, value: float, total: float) -> Html:
    share = abs(value) / total
    label = name if share >= 0.2 and value >= 0 else None
    cls = f"segment {css_of(name)}" + (" less" if value < 0 else "")
    return el(
        "i",
        el("b", label) if label else None,
        cls=cls,
        style=f"flex-grow:{share:.4f}",
        title=f"{words.signed(value)} {name}",
    )


def css_of(component: str) -> str:
    return "p-" + component.replace(" ", "-").replace("_", "-")


# -- blame -------------------------------------------------------------------------------------


def blame(diagnosis: Diagnosis) -> Html | None:
    entries = {(e["victim"], e["culprit"]): e["request_seconds"] for e in diagnosis.trace.get("blame", ())}
    total = sum(entries.values())
    if not entries or total <= 0:
        return None
    culprits = _largest(
        {c for _, c in entries}, lambda name: sum(s for (_, c), s in entries.items() if c == name)
    )
    victims = _largest(
        {v for v, _ in entries}, lambda name: sum(s for (v, _), s in entries.items() if v == name)
    )
    (victim, culprit), most = max(entries.items(), key=lambda item: item[1])
    lead = (
        f"{words.blamed(total)} request-seconds were spent waiting for others' prefill, budget, slots or KV cache. "
        f"{most / total:.0%} of them are {victim} waiting for {'its own class' if victim == culprit else culprit}."
    )
    rows = []
    for v in victims:
        cells: list[Child] = [printable(v, LONGEST_NAME)]
        for c in culprits:
            value = entries.get((v, c))
            share = 0.0 if value is None else value / total
            told = (
                None
                if value is None
                else [words.blamed(value), el("small", f" {share:.0%}" if share >= 0.005 else " <1%")]
            )
            cells.append(el("td", told or "-", cls="num heat", style=f"--heat:{share**0.5:.2f}"))
        rows.append(cells)
    return section(
        "blame",
        words.BLAME,
        lead,
        table(
            "Request-seconds, and their share of all",
            ("waited", *(f"for {printable(c, LONGEST_NAME)}" for c in culprits)),
            rows,
            cls="matrix",
        ),
    )


def _largest(names: set[str], size: Any) -> list[str]:
    return sorted(sorted(names, key=lambda n: (-size(n), n))[:MOST_BLAMED])


# -- rules and trust ---------------------------------------------------------------------------


def rules(diagnosis: Diagnosis) -> Html:
    counts: dict[str, int] = {}
    for check in diagnosis.checks:
        counts[check.status] = counts.get(check.status, 0) + 1
    lead = (
        f"{len(diagnosis.checks)} rules looked: "
        + ", ".join(f"{n} {status}" for status, n in counts.items())
        + "."
    )
    rows = [
        (
            check.rule,
            el("td", f"{CHECK_MARK[check.status]} {check.status}", cls=f"status {check.status}"),
            el("td", check.reason, cls="words"),
        )
        for check in diagnosis.checks
    ]
    return section(
        "rules",
        words.RULES,
        lead,
        table("What each rule says", ("rule", "status", "why"), rows, numbers=9, cls="stacked"),
    )


def trust(diagnosis: Diagnosis) -> Html:
    doubtful = [entry.check for entry in diagnosis.trust if entry.status != "pass"]
    lead = (
        f"{len(doubtful)} of {len(diagnosis.trust)} checks ask for caution: {', '.join(doubtful)}."
        if doubtful
        else f"All {len(diagnosis.trust)} checks pass."
    )
    rows = [
        (
            entry.check,
            el("td", TRUST_MARK[entry.status], cls=f"status {entry.status}"),
            el("td", entry.detail, cls="words"),
        )
        for entry in diagnosis.trust
    ]
    sources = [
        (
            s["kind"],
            f"{s['files']:,}",
            *(f"{s[key] or 0:,}" for key in ("rows", "rows_rejected", "rows_duplicate")),
        )
        for s in diagnosis.trace.get("sources", ())
    ]
    missing = [
        el("h3", words.MISSING),
        el("ul", [el("li", text) for text in diagnosis.missing], cls="plain"),
    ]
    return section(
        "trust",
        "Trust and coverage",
        lead,
        table("Checks", ("check", "status", "detail"), rows, numbers=9, cls="stacked"),
        missing if diagnosis.missing else None,
        table("What was read", ("kind", "files", "rows", "rejected", "duplicate"), sources)
        if sources
        else None,
        table(
            "Rows by table",
            ("table", "rows"),
            [(name, f"{count:,}") for name, count in diagnosis.trace["rows"].items() if name != "sources"],
        )
        if diagnosis.trace["rows"]
        else None,
    )
