"""The words of tailscope: what a collector and a rule are, and what a diagnosis consists of."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import pyarrow as pa

from tailscope.schema import Table
from tailscope.source import Options, Source, Tally

# -- collectors --------------------------------------------------------------------------------


class Collector(Protocol):
    """Turns one kind of file into rows of declared tables. Parses, maps, yields; judges nothing."""

    @property
    def name(self) -> str:
        """The module's stem."""

    @property
    def version(self) -> str:
        """Raised when the mapping changes, so that a trace says how its rows were made."""

    @property
    def reads(self) -> str:
        """One sentence: which files, of which emitters and versions."""

    @property
    def tables(self) -> tuple[Table, ...]:
        """Tables it may yield."""

    def recognises(self, head: bytes, name: str) -> bool:
        """Whether a file that begins with `head` (up to 64 KiB, uncompressed) is one of these.

        Content decides; the file's `name` may only break a tie.
        """

    def read(self, source: Source) -> Iterator[tuple[Table, pa.Table]]:
        """Yield Arrow tables of exactly `table.arrow`, each of at most some 10^5 rows.

        `instance` is NULL where the content names none, `source` always. What cannot be used is
        counted in `source.tally`; BadInput is raised only where nothing of the file can be used.
        """


class Sample(Protocol):
    """How a table begins: its columns in order, and the values of each in its first rows, as text."""

    @property
    def columns(self) -> tuple[str, ...]: ...

    @property
    def timestamps(self) -> tuple[str, ...]:
        """Columns that hold instants by their type."""

    def values(self, column: str) -> list[str]: ...


class TableCollector(Collector, Protocol):
    """The collector that reads any table by `Options.mapping`. It recognises nothing by itself."""

    def table_of(self, source: Source) -> Sample | None:
        """How the file begins if it is a table of any kind."""


class SpanCollector(Collector, Protocol):
    """The collector that also reads what a receiver of spans gets."""

    def receive(
        self, message: bytes, is_json: bool, options: Options, tally: Tally
    ) -> Iterator[tuple[Table, pa.Table]]:
        """Rows of one export request of OTLP, as `read` gives them. Raises BadInput for one that is none."""


class Pages(Protocol):
    @property
    def known(self) -> int:
        """Series seen so far."""

    """The pages of metrics of one server, which is scraped again and again."""

    def read(self, page: bytes, time_ns: int) -> Iterator[tuple[Table, pa.Table]]:
        """Rows of a page scraped at `time_ns`, as `Collector.read` gives them."""


class PageCollector(Collector, Protocol):
    """The collector that also reads metrics as they are scraped."""

    def pages(self, options: Options, tally: Tally) -> Pages: ...


def request_key(*parts: object) -> str:
    """Identity of a row of `requests`: 64 bits of a hash of the parts, as 16 hex digits."""
    text = "\x1f".join("" if part is None else str(part) for part in parts)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


# -- rules -------------------------------------------------------------------------------------

Severity = Literal["high", "medium", "low"]
Basis = Literal["measured", "inferred"]
FindingStatus = Literal["found", "inconclusive"]
CheckStatus = Literal["found", "clear", "inconclusive", "no-data", "failed"]
TrustStatus = Literal["pass", "warn", "fail"]
VerdictStatus = Literal["found", "nothing", "inconclusive", "no-data"]

SEVERITIES: tuple[Severity, ...] = ("high", "medium", "low")
#: Share of a class's excess from which a finding is high, or medium (design: below that, low).
HIGH_SHARE, MEDIUM_SHARE = 0.3, 0.1


@dataclass(frozen=True)
class Threshold:
    """A number a rule decides by: named, with its unit, and the reason it has this value."""

    name: str
    value: float
    unit: str
    why: str


@dataclass(frozen=True)
class Remedy:
    """Something to change. `flag` is the engine's own spelling, `versions` where it exists."""

    do: str
    flag: str
    versions: str
    cost: str


@dataclass(frozen=True)
class Party:
    """A culprit or victim: a class, tenant, request, instance, engine, rank, link, expert or process."""

    kind: str
    id: str
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Evidence:
    """A sentence with the numbers behind it; `data` holds them unrounded, in base units."""

    text: str
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    rule: str
    status: FindingStatus
    severity: Severity
    basis: Basis
    title: str
    culprit: Party
    victims: tuple[Party, ...]
    share_of_tail: float | None
    window_ns: tuple[int, int] | None
    evidence: tuple[Evidence, ...]
    counter_evidence: tuple[Evidence, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    confirm_by: tuple[str, ...] = ()
    #: (class, metric) -> component seconds this finding explains; for the verdict's union. Not shown.
    explains: Mapping[str, float] = field(default_factory=dict)
    #: The time it explains, where other rules may explain the same: they are not added up. Not shown.
    claims: str = ""
    #: Share of all of the steps' time that it costs, whether or not a tail shows it: capacity, not a wait. Not shown.
    standing: float = 0.0


@dataclass(frozen=True)
class Decision:
    """What a rule says of its rows: findings, or why there are none."""

    status: CheckStatus
    reason: str
    findings: tuple[Finding, ...] = ()


#: Reasons of parts of a trace that are told of.
MOST_REASONS = 3


def summed_up(decisions: Sequence[Decision], missing: str) -> Decision:
    """What parts of a trace that were judged apart say together: found where one is, else inconclusive where one is, else
    clear; `missing` where there are none."""
    findings = tuple(finding for decision in decisions for finding in decision.findings)
    statuses: tuple[CheckStatus, ...] = ("found", "inconclusive", "clear", "no-data")
    for status in statuses:
        reasons = dict.fromkeys(decision.reason for decision in decisions if decision.status == status)
        if reasons:
            return Decision(status, "; ".join(list(reasons)[:MOST_REASONS]), findings)
    return Decision("no-data", missing)


Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Signal:
    """What Prometheus computes for an alert: PromQL, what it is held against, and when that means anything.

    The metrics are vLLM's own, by the names of its newest version, or those of `tailscope serve`; never both. As in a
    rule's query `$name` is a threshold. `guard` continues the expression: `and …`, `unless …`.
    """

    expr: str
    test: str
    guard: str = ""

    @property
    def source(self) -> Literal["vllm", "tailscope"]:
        return "vllm" if "vllm:" in self.expr else "tailscope"

    def query(self, limits: Mapping[str, float]) -> str:
        """All of it, with the thresholds' values."""
        text = f"({self.expr}) {self.test}" + (f"\n{self.guard}" if self.guard else "")
        return with_limits(text, limits)


def with_limits(text: str, limits: Mapping[str, float]) -> str:
    """PromQL with the values of thresholds for their names."""
    return re.sub(r"\$(\w+)", lambda name: f"{limits[name[1]]:g}", text)


Dashboard = Literal["fleet", "classes", "engine", "ranks", "pd"]


@dataclass(frozen=True)
class Panel:
    """How a number looks over time on a dashboard: on which one, its unit as Grafana calls it, a line's name by its labels,
    and a sentence on what to see in it. An alert's shows what its signals compute and where their threshold lies;
    `expr` is for a rule that has more to show.
    """

    dashboard: Dashboard
    title: str
    unit: str
    legend: str
    shows: str
    expr: str = ""


@dataclass(frozen=True)
class Alert:
    """What is to be told while a trace is not yet looked at. A series of its signal is one place where it is so.

    Of `signals` the first of each source counts whose metrics exist. `thresholds` are those that its rule does not have,
    because metrics show something else than a trace. `summary`, `description` and `run` are Prometheus templates; without
    a description the rule's `why` stands there. What to run is a diagnosis of the `last` part of a trace, unless `run` says.
    Of an open finding there is no `panel`: dashboards show them all.
    """

    name: str
    severity: Literal["critical", "warning"]
    hold: str
    summary: str
    signals: tuple[Signal, ...]
    description: str = ""
    thresholds: tuple[Threshold, ...] = ()
    last: str = "15m"
    run: str = ""
    panel: Panel | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Z][A-Za-z0-9]*", self.name):
            raise ValueError(f"alert name {self.name!r} is not CamelCase")

    @property
    def limits(self) -> dict[str, float]:
        return {threshold.name: threshold.value for threshold in self.thresholds}


@dataclass(frozen=True)
class Rule:
    """One pattern. A value beside a query of the same stem; `decide` turns its rows into a decision.

    `needs` names views the query reads that must have rows, else the rule's status is `no-data`
    with `missing` as the reason. The query gets each threshold as a named parameter it may use, and so do `alerts`.
    """

    name: str
    summary: str
    why: str
    needs: tuple[str, ...]
    missing: str
    thresholds: tuple[Threshold, ...]
    remedies: tuple[Remedy, ...]
    confirm_by: tuple[str, ...]
    decide: Callable[[Rows, Mapping[str, float]], Decision]
    alerts: tuple[Alert, ...] = ()
    #: What there is to see besides what alerts watch.
    panels: tuple[Panel, ...] = ()
    #: Where its findings are shown, besides the fleet's dashboard.
    dashboard: Dashboard = "fleet"

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", self.name):
            raise ValueError(f"rule name {self.name!r} is not kebab-case")

    @property
    def limits(self) -> dict[str, float]:
        return {threshold.name: threshold.value for threshold in self.thresholds}

    def limits_of(self, alert: Alert) -> dict[str, float]:
        """By what an alert of it decides."""
        return self.limits | alert.limits


def severity_of(share: float | None, slo_broken: bool = False) -> Severity:
    """high from 0.3 of a class's excess or where an SLO breaks by it, medium from 0.1, else low."""
    if slo_broken or (share is not None and share >= HIGH_SHARE):
        return "high"
    return "medium" if share is not None and share >= MEDIUM_SHARE else "low"


# -- diagnosis ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Objective:
    """An SLO held against the samples: how many of `n` lie above the limit, None where only buckets are known.

    `undecided` where too few effective samples lie about the quantile to tell.
    """

    quantile: str
    limit_s: float
    above: int | None
    n: int
    status: Literal["kept", "broken", "undecided"]


@dataclass(frozen=True)
class ClassRow:
    """Latency of one class by one metric, and where its tail's excess went.

    Seconds throughout. A withheld value is None and `reason` says why. `range99_s` brackets a p99 known
    only from histogram buckets: [low, high], high None where it lies above the last finite bucket.
    """

    klass: str
    metric: str
    observer: str
    basis: Literal["requests", "histogram"]
    n: int
    n_eff: float | None = None
    p50_s: float | None = None
    p95_s: float | None = None
    p99_s: float | None = None
    ci95_s: tuple[float, float] | None = None
    ci99_s: tuple[float, float] | None = None
    range99_s: tuple[float, float | None] | None = None
    reason: str | None = None
    tail_rule: str | None = None
    tail_n: int = 0
    excess_s: float | None = None
    excess: Mapping[str, float] = field(default_factory=dict)
    #: The least and the most of the excess that others' prefill can be, by the cost model's errors.
    others_prefill_s: tuple[float, float] | None = None
    objectives: tuple[Objective, ...] = ()

    @property
    def slo_broken(self) -> bool:
        return any(objective.status == "broken" for objective in self.objectives)


@dataclass(frozen=True)
class Check:
    rule: str
    status: CheckStatus
    reason: str


@dataclass(frozen=True)
class Trust:
    check: str
    status: TrustStatus
    detail: str


@dataclass(frozen=True)
class Verdict:
    text: str
    status: VerdictStatus
    explained: float | None


@dataclass(frozen=True)
class Diagnosis:
    trace: Mapping[str, Any]
    verdict: Verdict
    classes: tuple[ClassRow, ...]
    checks: tuple[Check, ...]
    findings: tuple[Finding, ...]
    trust: tuple[Trust, ...]
    missing: tuple[str, ...]
