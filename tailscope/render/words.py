"""The words and numbers of a diagnosis, the same wherever it is read: in a terminal, on a page, in a ticket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from tailscope.model import ClassRow, Diagnosis, Finding, Objective, Party
from tailscope.safe import printable
from tailscope.units import amount, clock, seconds

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

#: Characters of a sentence.
LONGEST = 1000

CLASSES_NOTE = (
    "The parts are explained in docs/components.md; n_eff: what n is worth, as latencies come in bursts."
)
WHEN = "When"
CELLS = "Requests that wait more than others of their class"
OBJECTIVES = "Objectives"
BLAME = "Who made whom wait, in request-seconds"
RULES = "Rules"
TRUST = "Trust"
MISSING = "More telemetry would decide more"


def sentence(text: str) -> str:
    """What a rule, a check or a note says, however long: only its names are anybody's."""
    return printable(text, LONGEST)


def scope(diagnosis: Diagnosis) -> str:
    """Of what the diagnosis is: trace, time, and how much there is."""
    trace = diagnosis.trace
    window = ""
    if trace["first_ns"] is not None:
        first, last = at(trace["first_ns"]), at(trace["last_ns"])
        window = f"{first:%Y-%m-%d %H:%M:%S} to {last:%H:%M:%S} UTC, "
    rows = sum(count for name, count in trace["rows"].items() if name != "sources")
    counts = f"{trace['requests']:,} requests, {trace['steps']:,} engine steps"
    return f"{printable(trace['path'])}: {window}{counts} (from {rows:,} rows of {len(trace['rows'])} tables)"


def at(ns: int) -> datetime:
    return datetime.fromtimestamp(ns / 1e9, UTC)


def objective(row: ClassRow, objective: Objective) -> str:
    above = "" if objective.above is None else f": {objective.above:,} of {objective.n:,} above"
    seen = f", {row.observer}'s view" if row.observer in OUTSIDE and row.metric != "ITL" else ""
    return f"{printable(row.klass)} {row.metric}{seen} {objective.quantile} < {seconds(objective.limit_s)}{above}"


def shown(rows: Sequence[ClassRow]) -> Iterator[ClassRow]:
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


def p99(row: ClassRow) -> str:
    if row.range99_s:
        low, high = row.range99_s
        return f"> {seconds(low)}" if high is None else f"{seconds(low)}-{seconds(high)}"
    if row.p99_s is None:
        if row.reason != "too-few-samples" or row.n_eff is None:
            return "-"
        return f"withheld (n_eff {row.n_eff:.0f})"
    interval = f" [{seconds(row.ci99_s[0])}, {seconds(row.ci99_s[1])}]" if row.ci99_s else ""
    return seconds(row.p99_s) + interval


def parts(row: ClassRow) -> list[tuple[str, float]]:
    """Of a row with an excess its largest parts, and what is left of it as `rest`."""
    excess_s = row.excess_s or 0.0
    sized = sorted(row.excess.items(), key=lambda item: -abs(item[1]))
    told = [(name, s) for name, s in sized if abs(s) >= SMALLEST_PART * abs(excess_s)][:MOST_PARTS]
    rest = excess_s - sum(s for _, s in told)
    if abs(rest) >= SMALLEST_PART * abs(excess_s):
        told.append(("rest", rest))
    return told


def excess(row: ClassRow) -> str:
    if row.excess_s is None:
        plain = row.basis == "histogram" or row.metric == "queue" or row.p50_s is not None
        return "" if plain else "too few requests"
    told = parts(row)
    total = f"{row.tail_rule}: {signed(row.excess_s)}"
    return f"{total} = {' '.join(f'{signed(s)} {name}' for name, s in told)}" if told else total


def signed(value: float) -> str:
    return f"{'-' if value < 0 else '+'}{seconds(abs(value))}"


def blamed(value: float | None) -> str:
    """A number of request-seconds in a matrix whose heading says the unit."""
    return "-" if value is None else amount(value)


# -- findings ----------------------------------------------------------------------------------


def same_times(findings: Sequence[Finding]) -> list[int | None]:
    """Of each finding the number, from 1, of the earlier one that explains the time that it sees too."""
    told: list[tuple[int, Finding]] = []
    numbers: list[int | None] = []
    for number, finding in enumerate(findings, 1):
        same = next((i for i, earlier in told if same_time(finding, earlier)), None)
        if same is None:
            told.append((number, finding))
        numbers.append(same)
    return numbers


def same_time(finding: Finding, earlier: Finding) -> bool:
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


def about(finding: Finding) -> str:
    """Rule, status, basis and the share of the tail it explains."""
    share = "" if finding.share_of_tail is None else f", {finding.share_of_tail:.0%} of the tail's excess"
    return f"{finding.rule}, {finding.status}, {finding.basis}{share}"


def when(finding: Finding) -> str | None:
    if not finding.window_ns:
        return None
    first, last = finding.window_ns
    short = last - first < SHORT_NS
    return f"{clock(first, short)} to {clock(last, short)} UTC"


def rows(finding: Finding) -> Iterator[tuple[str, tuple[str, ...]]]:
    """What is told of a finding beside its title: label and sentences, in order."""
    yield "cause", (party(finding.culprit),)
    yield "waiting", ("; ".join(party(victim) for victim in finding.victims),)
    moment = when(finding)
    if moment:
        yield "when", (moment,)
    told = {
        "evidence": [sentence(entry.text) for entry in finding.evidence],
        "against": [sentence(entry.text) for entry in finding.counter_evidence],
        "change": [
            sentence(f"{i}. {remedy.do}: {remedy.flag} ({remedy.versions}). Cost: {remedy.cost}")
            for i, remedy in enumerate(finding.remedies, 1)
        ],
        "confirm": [sentence(text) for text in finding.confirm_by],
    }
    for label, texts in told.items():
        if texts:
            yield label, tuple(texts)


def party(party: Party) -> str:
    detail = ", ".join(
        f"{printable(str(k)).replace('_', ' ')} {printable(amount(v) if isinstance(v, float) else str(v))}"
        for k, v in party.detail.items()
        if v is not None
    )
    return f"{party.kind} {printable(party.id)}" + (f" ({detail})" if detail else "")
