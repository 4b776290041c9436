"""A diagnosis for a terminal: the verdict, where each class's time went, findings worst first, and what to trust."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from tailscope.model import ClassRow, Diagnosis, Finding, Objective, Party
from tailscope.render import text_classes
from tailscope.render.parts import Heading, Item, Lead, Told
from tailscope.render.units import seconds as _seconds
from tailscope.safe import printable

STATUS_STYLE = {
    "found": "bold red",
    "nothing": "bold green",
    "inconclusive": "bold yellow",
    "no-data": "bold yellow",
}
OBJECTIVE_STYLE = {"broken": "bold red", "kept": "green", "undecided": "yellow"}
TRUST_MARK = {"pass": ("ok  ", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "bold red")}
#: Parts of an excess smaller than this are not worth a place in a line.
SMALLEST_PART = 0.03
#: Parts of an excess that are named; what is left is their rest.
MOST_PARTS = 4

#: Share of a finding's window that an earlier one of the same claim covers where it sees the same time.
SAME_WINDOW = 0.5

#: Observers before the engine.
OUTSIDE = ("client", "gateway")
#: What lasts less than this is shown with milliseconds.
SHORT_NS = 10_000_000_000


def render(diagnosis: Diagnosis, console: Console) -> None:
    for part in parts(diagnosis):
        console.print(part)


def parts(diagnosis: Diagnosis) -> Iterator[RenderableType]:
    """All there is to say, in order."""
    yield lead(diagnosis)
    yield Text(_scope(diagnosis), "dim")
    for warning in diagnosis.trace.get("warnings", ()):
        yield Text(f"warning: {printable(warning, 400)}", "yellow")
    shown = [row for row in diagnosis.classes if row.n]
    if shown:
        yield Text()
        yield _classes(shown, {entry["class"]: entry for entry in diagnosis.trace.get("attainment", ())})
        yield Text(
            "The parts are explained in docs/components.md; n_eff: what n is worth, as latencies come in bursts.",
            "dim",
        )
    over_time = list(text_classes.over_time(diagnosis.trace.get("class_times", ())))
    if over_time:
        yield Text()
        yield Heading("When")
        yield from over_time
    cells = list(text_classes.cells(diagnosis.trace.get("shapes", ())))
    if cells:
        yield Text()
        yield Heading("Requests that wait more than others of their class")
        yield from cells
    for name, key in (("tenant", "tenants"), ("priority", "priorities")):
        groups = text_classes.groups(name, diagnosis.trace.get(key, ()))
        if groups:
            yield Text()
            yield groups
    objectives = [(row, objective) for row in diagnosis.classes for objective in row.objectives]
    if objectives:
        yield Text()
        yield Heading("Objectives")
        for row, objective in objectives:
            yield Text(
                f"  {objective.status:10} {_objective(row, objective)}", OBJECTIVE_STYLE[objective.status]
            )
    blame = _blame(diagnosis)
    if blame:
        yield Text()
        yield Heading("Who made whom wait, in request-seconds")
        yield blame
    for finding in told(diagnosis.findings):
        yield Text()
        yield finding
    yield Text()
    yield Heading("Rules")
    for check in diagnosis.checks:
        yield Text.assemble(
            "  ", (f"{check.rule:20}", "bold"), f" {check.status:13} {printable(check.reason, 300)}"
        )
    yield Text()
    yield Heading("Trust")
    for entry in diagnosis.trust:
        mark, style = TRUST_MARK[entry.status]
        yield Text.assemble("  ", (mark, style), f"  {entry.check:16} {printable(entry.detail, 400)}")
    if diagnosis.missing:
        yield Text()
        yield Heading("More telemetry would decide more")
        for text in diagnosis.missing:
            yield Item(printable(text, 400))


def lead(diagnosis: Diagnosis) -> Lead:
    verdict = diagnosis.verdict
    return Lead(verdict.status.upper(), STATUS_STYLE[verdict.status], printable(verdict.text, 600))


def told(findings: Sequence[Finding]) -> Iterator[Told]:
    """Every finding in its place, those of a time that an earlier one explains as one line."""
    in_full: list[tuple[int, Finding]] = []
    for number, finding in enumerate(findings, 1):
        same = next((i for i, earlier in in_full if _same_time(finding, earlier)), None)
        if same is None:
            in_full.append((number, finding))
        share = "" if finding.share_of_tail is None else f", {finding.share_of_tail:.0%} of the tail's excess"
        yield Told(
            number,
            finding.rule,
            finding.status,
            finding.severity,
            printable(finding.title, 300),
            f"{finding.rule}, {finding.status}, {finding.basis}{share}",
            () if same is not None else tuple(_rows(finding)),
            same,
        )


def _scope(diagnosis: Diagnosis) -> str:
    trace = diagnosis.trace
    window = ""
    if trace["first_ns"] is not None:
        first, last = _time(trace["first_ns"]), _time(trace["last_ns"])
        window = f"{first:%Y-%m-%d %H:%M:%S} to {last:%H:%M:%S} UTC, "
    rows = sum(count for name, count in trace["rows"].items() if name != "sources")
    counts = f"{trace['requests']:,} requests, {trace['steps']:,} engine steps"
    return f"{printable(trace['path'])}: {window}{counts} (from {rows:,} rows of {len(trace['rows'])} tables)"


def _time(ns: int) -> datetime:
    return datetime.fromtimestamp(ns / 1e9, UTC)


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
    shown = list(_shown(rows))
    last = {row.klass: i for i, row in enumerate(shown)}
    for i, row in enumerate(shown):
        table.add_row(
            printable(row.klass, 24),
            row.metric,
            f"{row.n:,}",
            _seconds(row.p50_s),
            _seconds(row.p95_s),
            _p99(row),
            _excess(row),
            style="red" if row.slo_broken else None,
        )
        entry = attained.get(row.klass) if i == last[row.klass] else None
        if entry:
            name = printable(row.klass, 24)
            table.add_row(name, "SLO", f"{entry['n']:,}", "", "", "", text_classes.attained(entry))
    return table


def _objective(row: ClassRow, objective: Objective) -> str:
    above = "" if objective.above is None else f": {objective.above:,} of {objective.n:,} above"
    seen = f", {row.observer}'s view" if row.observer in OUTSIDE and row.metric != "ITL" else ""
    return f"{printable(row.klass)} {row.metric}{seen} {objective.quantile} < {_seconds(objective.limit_s)}{above}"


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
            *("-" if s is None else f"{s:,.0f}" if s >= 100 else f"{s:.3g}" for s in seconds),
        )
    return table


def _shown(rows: list[ClassRow]) -> Iterator[ClassRow]:
    """The rows, one for a class of which nothing but its size can be said."""
    by_class: dict[str, list[ClassRow]] = {}
    for row in rows:
        by_class.setdefault(row.klass, []).append(row)
    for same in by_class.values():
        # A client's view stands beside the engine's of the same metric.
        told = {row.metric for row in same if row.observer not in OUTSIDE}
        same = [
            replace(row, metric=f"{row.metric} ({row.observer})")
            if row.observer in OUTSIDE and row.metric in told
            else row
            for row in same
        ]
        if all(row.p50_s is None and row.basis == "requests" for row in same):
            yield replace(same[0], metric="-")
        else:
            yield from same


def _p99(row: ClassRow) -> str:
    if row.range99_s:
        low, high = row.range99_s
        return f"> {_seconds(low)}" if high is None else f"{_seconds(low)}-{_seconds(high)}"
    if row.p99_s is None:
        if row.reason != "too-few-samples" or row.n_eff is None:
            return "-"
        return f"withheld (n_eff {row.n_eff:.0f})"
    interval = f" [{_seconds(row.ci99_s[0])}, {_seconds(row.ci99_s[1])}]" if row.ci99_s else ""
    return _seconds(row.p99_s) + interval


def _excess(row: ClassRow) -> str:
    if row.excess_s is None:
        plain = row.basis == "histogram" or row.metric == "queue" or row.p50_s is not None
        return "" if plain else "too few requests"
    parts = sorted(row.excess.items(), key=lambda item: -abs(item[1]))
    shown = [(name, s) for name, s in parts if abs(s) >= SMALLEST_PART * abs(row.excess_s)][:MOST_PARTS]
    rest = row.excess_s - sum(s for _, s in shown)
    if abs(rest) >= SMALLEST_PART * abs(row.excess_s):
        shown.append(("rest", rest))
    total = f"{row.tail_rule}: {_signed(row.excess_s)}"
    return f"{total} = {' '.join(f'{_signed(s)} {name}' for name, s in shown)}" if shown else total


def _signed(seconds: float) -> str:
    return f"{'-' if seconds < 0 else '+'}{_seconds(abs(seconds))}"


def _same_time(finding: Finding, earlier: Finding) -> bool:
    """Whether a rule sees in the same classes and metrics, and then, the time that another's finding before it explains."""
    if finding.rule == earlier.rule or not finding.claims or finding.claims != earlier.claims:
        return False
    if (
        "inconclusive" in (finding.status, earlier.status)
        or not finding.explains.keys() <= earlier.explains.keys()
    ):
        return False
    if not finding.window_ns or not earlier.window_ns:
        return True
    common = min(finding.window_ns[1], earlier.window_ns[1]) - max(finding.window_ns[0], earlier.window_ns[0])
    return common >= SAME_WINDOW * (finding.window_ns[1] - finding.window_ns[0])


def _rows(finding: Finding) -> Iterator[tuple[str, tuple[str, ...]]]:
    yield "cause", (_party(finding.culprit),)
    yield "waiting", ("; ".join(_party(victim) for victim in finding.victims),)
    if finding.window_ns:
        first, last = (_time(ns) for ns in finding.window_ns)
        short = finding.window_ns[1] - finding.window_ns[0] < SHORT_NS
        shown = [
            t.isoformat(timespec="milliseconds" if short else "seconds")[11:].split("+")[0]
            for t in (first, last)
        ]
        yield "when", (f"{shown[0]} to {shown[1]} UTC",)
    rows = {
        "evidence": [printable(entry.text, 400) for entry in finding.evidence],
        "against": [printable(entry.text, 400) for entry in finding.counter_evidence],
        "change": [
            printable(f"{i}. {remedy.do}: {remedy.flag} ({remedy.versions}). Cost: {remedy.cost}", 800)
            for i, remedy in enumerate(finding.remedies, 1)
        ],
        "confirm": [printable(text, 400) for text in finding.confirm_by],
    }
    for label, texts in rows.items():
        if texts:
            yield label, tuple(texts)


def _party(party: Party) -> str:
    detail = ", ".join(
        f"{printable(str(k)).replace('_', ' ')} {printable(f'{v:.3g}' if isinstance(v, float) else str(v))}"
        for k, v in party.detail.items()
        if v is not None
    )
    return f"{party.kind} {printable(party.id)}" + (f" ({detail})" if detail else "")
