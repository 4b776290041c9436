"""A diagnosis for a terminal: the verdict, where each class's time went, findings worst first, and what to trust."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from tailscope.model import ClassRow, Diagnosis, Finding
from tailscope.render import text_classes, words
from tailscope.render.parts import Heading, Item, Lead, Told
from tailscope.safe import printable
from tailscope.units import seconds as _seconds

STATUS_STYLE = {
    "found": "bold red",
    "nothing": "bold green",
    "inconclusive": "bold yellow",
    "no-data": "bold yellow",
}
OBJECTIVE_STYLE = {"broken": "bold red", "kept": "green", "undecided": "yellow"}
TRUST_MARK = {"pass": ("ok  ", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "bold red")}


def render(diagnosis: Diagnosis, console: Console) -> None:
    for part in parts(diagnosis):
        console.print(part)


def parts(diagnosis: Diagnosis) -> Iterator[RenderableType]:
    """All there is to say, in order."""
    yield lead(diagnosis)
    yield Text(words.scope(diagnosis), "dim")
    for warning in diagnosis.trace.get("warnings", ()):
        yield Text(f"warning: {words.sentence(warning)}", "yellow")
    shown = [row for row in diagnosis.classes if row.n]
    if shown:
        yield Text()
        yield _classes(shown, {entry["class"]: entry for entry in diagnosis.trace.get("attainment", ())})
        yield Text(words.CLASSES_NOTE, "dim")
    over_time = list(text_classes.over_time(diagnosis.trace.get("class_times", ())))
    if over_time:
        yield Text()
        yield Heading(words.WHEN)
        yield from over_time
    cells = list(text_classes.cells(diagnosis.trace.get("shapes", ())))
    if cells:
        yield Text()
        yield Heading(words.CELLS)
        yield from cells
    for name, key in (("tenant", "tenants"), ("priority", "priorities")):
        groups = text_classes.groups(name, diagnosis.trace.get(key, ()))
        if groups:
            yield Text()
            yield groups
    objectives = [(row, objective) for row in diagnosis.classes for objective in row.objectives]
    if objectives:
        yield Text()
        yield Heading(words.OBJECTIVES)
        for row, objective in objectives:
            yield Text(
                f"  {objective.status:10} {words.objective(row, objective)}",
                OBJECTIVE_STYLE[objective.status],
            )
    blame = _blame(diagnosis)
    if blame:
        yield Text()
        yield Heading(words.BLAME)
        yield blame
    for finding in told(diagnosis.findings):
        yield Text()
        yield finding
    yield Text()
    yield Heading(words.RULES)
    for check in diagnosis.checks:
        yield Text.assemble(
            "  ", (f"{check.rule:20}", "bold"), f" {check.status:13} {words.sentence(check.reason)}"
        )
    yield Text()
    yield Heading(words.TRUST)
    for entry in diagnosis.trust:
        mark, style = TRUST_MARK[entry.status]
        yield Text.assemble("  ", (mark, style), f"  {entry.check:16} {words.sentence(entry.detail)}")
    if diagnosis.missing:
        yield Text()
        yield Heading(words.MISSING)
        for text in diagnosis.missing:
            yield Item(words.sentence(text))


def lead(diagnosis: Diagnosis) -> Lead:
    verdict = diagnosis.verdict
    return Lead(verdict.status.upper(), STATUS_STYLE[verdict.status], words.sentence(verdict.text))


def told(findings: Sequence[Finding]) -> Iterator[Told]:
    """Every finding in its place, those of a time that an earlier one explains as one line."""
    numbers = words.same_times(findings)
    for number, (finding, same) in enumerate(zip(findings, numbers, strict=True), 1):
        yield Told(
            number,
            finding.rule,
            finding.status,
            finding.severity,
            words.sentence(finding.title),
            words.about(finding),
            () if same is not None else tuple(words.rows(finding)),
            same,
        )


def _classes(rows: list[ClassRow], attained: dict[str, dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    for name, justify in (
        ("class", "left"),
        ("metric", "left"),
        ("n", "right"),
        ("p50", "right"),
        ("p95", "right"),
    ):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("p99", justify="right")
    table.add_column("tail above typical, and where it went", overflow="fold")
    shown = list(words.shown(rows))
    last = {row.klass: i for i, row in enumerate(shown)}
    for i, row in enumerate(shown):
        table.add_row(
            printable(row.klass, 24),
            row.metric,
            f"{row.n:,}",
            _seconds(row.p50_s),
            _seconds(row.p95_s),
            words.p99(row),
            words.excess(row),
            style="red" if row.slo_broken else None,
        )
        entry = attained.get(row.klass) if i == last[row.klass] else None
        if entry:
            name = printable(row.klass, 24)
            table.add_row(name, "SLO", f"{entry['n']:,}", "", "", "", text_classes.attained(entry))
    return table


def _blame(diagnosis: Diagnosis) -> Table | None:
    """Victim class x culprit class; nothing where only one class could be blamed."""
    entries = {(e["victim"], e["culprit"]): e["request_seconds"] for e in diagnosis.trace.get("blame", ())}
    victims, culprits = (list(dict.fromkeys(key[i] for key in entries)) for i in (0, 1))
    if len(culprits) < 2:
        return None
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("waited", no_wrap=True)
    for culprit in culprits:
        table.add_column(f"for {printable(culprit, 24)}", justify="right", no_wrap=True)
    for victim in victims:
        seconds = [entries.get((victim, culprit)) for culprit in culprits]
        table.add_row(
            printable(victim, 24),
            *(words.blamed(s) for s in seconds),
        )
    return table
