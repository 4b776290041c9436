"""A trace in, a diagnosis out: align, bill, contrast, then every rule. The only place that catches a rule's failure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from tailscope import felt, registry, trust
from tailscope.align import Scope, align
from tailscope.classes import class_tables
from tailscope.config import Config
from tailscope.errors import UsageError
from tailscope.ledger import half_timed
from tailscope.ledger.bills import Ledger
from tailscope.ledger.class_work import write_class_work
from tailscope.ledger.contrast import write_ledger
from tailscope.ledger.coupling import write_coupling
from tailscope.ledger.doses import write_doses
from tailscope.ledger.hidden import write_hidden
from tailscope.ledger.histogram import ALL, histogram_rows
from tailscope.ledger.holders import write_holders
from tailscope.ledger.kv import write_kv
from tailscope.ledger.long_steps import write_long_steps
from tailscope.ledger.prompt_cache import write_cache_losses
from tailscope.ledger.replicas import write_replicas
from tailscope.ledger.step_costs import write_step_costs
from tailscope.ledger.steps import Limits
from tailscope.ledger.tails import MIN_REQUESTS
from tailscope.ledger.tenants import write_tenants
from tailscope.ledger.upstream import write_upstream
from tailscope.ledger.what_if import write_what_if
from tailscope.model import (
    SEVERITIES,
    Check,
    ClassRow,
    Decision,
    Diagnosis,
    Finding,
    Rule,
    Verdict,
    VerdictStatus,
)
from tailscope.ranks.compared import write_ranks
from tailscope.ranks.experts import write_expert_loads
from tailscope.ranks.transfers import VERDICTS
from tailscope.schema import TABLES
from tailscope.store import Trace, schema_of
from tailscope.units import amount, clock

#: From this share of failed requests on, the latency of the rest says little about the service.
FAILED_SHARE = 0.5
#: How far from a long step an event may lie and still be named beside it.
EVENT_NEAR_NS = 5_000_000_000
#: Rules that a verdict names as undecided; the checks have all.
MOST_NAMED = 3
#: An excess below this share of the median is no tail to speak of.
NOTICEABLE = 0.01


def prepare(trace: Trace, config: Config, scope: Scope) -> tuple[Ledger, list[ClassRow]]:
    """Fill the tables that rules and reports read: aligned, ranks compared, billed, contrasted. Raises TailscopeError only for
    a trace that cannot be read, or a scope or objective that names what is not there."""
    align(trace, config, scope)
    if scope.klass is not None:
        known = [r["klass"] for r in trace.rows("SELECT DISTINCT klass FROM joined ORDER BY klass")]
        if scope.klass not in known:
            raise UsageError(
                f"--class {scope.klass!r}: no request is of it; there are {', '.join(known) or 'none'}"
            )
    for slo in config.slos:
        if slo.klass not in {c.name for c in config.classes} | {ALL, "unknown"}:
            names = ", ".join(c.name for c in config.classes)
            raise UsageError(f"objective for class {slo.klass!r}: no such class; there are {names} and {ALL}")
    write_ranks(trace, scope)
    write_expert_loads(trace, scope)
    limits = _limits(trace)
    ledger, classes = write_ledger(trace, limits, config.slos, scope.klass)
    write_holders(trace, ledger)
    write_cache_losses(trace, ledger)
    write_step_costs(trace, ledger, limits)
    write_long_steps(trace)
    if not any(row.n for row in classes):
        classes += histogram_rows(trace, config.slos)
    _register_class_rows(trace, classes)
    write_kv(trace)
    ledger.clients = write_upstream(trace, config.slos, scope.klass)
    write_coupling(trace)
    write_replicas(trace)
    write_hidden(trace)
    write_doses(trace, ledger)
    write_tenants(trace, ledger)
    write_class_work(trace, ledger)
    write_what_if(trace)
    return ledger, classes


def diagnose(trace: Trace, config: Config, scope: Scope | None = None) -> Diagnosis:
    """Judge a trace. Raises as `prepare` does."""
    ledger, classes = prepare(trace, config, scope or Scope())
    checks: list[Check] = []
    findings: list[Finding] = []
    for rule, sql in registry.rules():
        decision = judge(trace, rule, sql)
        checks.append(Check(rule.name, decision.status, decision.reason))
        findings += decision.findings
    findings.sort(key=_worst_first)
    # Among those made low by that, what causes a tail stays before what only adds to it.
    findings = sorted(felt.weigh(trace, findings, (*classes, *ledger.clients)), key=_severity)
    explained = _explained(trace, findings, classes, ledger.clients)
    return Diagnosis(
        trace=_about(trace) | class_tables(trace, classes, config.slos, (scope or Scope()).klass),
        verdict=_verdict(trace, ledger, classes, checks, findings, explained),
        classes=(*classes, *ledger.clients),
        checks=tuple(checks),
        findings=tuple(findings),
        trust=trust.checks(trace, ledger, classes),
        missing=tuple(_missing(trace)),
    )


def judge(trace: Trace, rule: Rule, sql: str) -> Decision:
    """Run a rule's query and let it decide. What goes wrong inside a rule is that rule's result, not a crash."""
    try:
        if any(trace.count(need) == 0 for need in rule.needs):
            return Decision("no-data", rule.missing)
        parameters = {name: value for name, value in rule.limits.items() if re.search(rf"\${name}\b", sql)}
        return rule.decide(trace.rows(sql, parameters), rule.limits)
    except Exception as error:
        return Decision("failed", f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}")


def _worst_first(finding: Finding) -> tuple[bool, int, float, str]:
    return *_severity(finding), -(finding.share_of_tail or 0.0), finding.rule


def _severity(finding: Finding) -> tuple[bool, int]:
    return finding.status != "found", SEVERITIES.index(finding.severity)


def _register_class_rows(trace: Trace, classes: Sequence[ClassRow]) -> None:
    columns: Mapping[str, pa.DataType] = {
        "klass": pa.string(),
        "metric": pa.string(),
        "observer": pa.string(),
        "basis": pa.string(),
        "n": pa.int64(),
        "n_eff": pa.float64(),
        "p50_s": pa.float64(),
        "excess_s": pa.float64(),
        "tail_rule": pa.string(),
        "slo_broken": pa.bool_(),
    }
    rows = pa.Table.from_pylist(
        # Rules ask whose tail is long; queue is a part of the others' and has none, and neither has all of a trace.
        [
            {name: getattr(row, name) for name in columns}
            for row in classes
            if row.metric != "queue" and (row.klass != ALL or row.basis == "histogram" or row.tail_n)
        ],
        schema=schema_of(columns),
    )
    trace.create("class_rows", rows)
    # component_tails: of each component of an excess the class and metric of whose excess it is the largest part.
    trace.connection.execute(
        "CREATE OR REPLACE TEMP VIEW component_tails AS "
        "SELECT e.component, e.klass AS tail_class, e.metric AS tail_metric, sum(e.excess_s) AS component_s, any_value(k.excess_s) AS excess_s, "
        "any_value(k.slo_broken) AS slo_broken, any_value(k.tail_rule) AS tail_rule "
        "FROM excess e JOIN class_rows k ON k.klass = e.klass AND k.metric = e.metric WHERE k.excess_s > 0 "
        "GROUP BY e.component, e.klass, e.metric HAVING sum(e.excess_s) > 0 "
        "QUALIFY row_number() OVER (PARTITION BY e.component ORDER BY sum(e.excess_s) / any_value(k.excess_s) DESC, e.klass, e.metric) = 1"
    )


def _limits(trace: Trace) -> dict[str, Limits]:
    """Limits of the scheduler by instance, where the server's log said so."""
    rows = trace.rows(
        "SELECT instance, max_num_batched_tokens AS tokens, max_num_seqs AS requests FROM configured"
    )
    return {row["instance"]: Limits(row["tokens"] or None, row["requests"] or None) for row in rows}


def _explained(
    trace: Trace, findings: Sequence[Finding], classes: Sequence[ClassRow], clients: Sequence[ClassRow]
) -> float | None:
    """Share of the excess of the metrics that findings name which they explain together.

    Of each class and metric at most all of its excess. Findings of one class and metric claim different components; of
    rules that claim the same one the most counts. What a finding explains of a client's view is keyed by class, metric
    and observer, so that the engine's view of the same requests stays apart.
    """
    claimed: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    for finding in findings:
        if finding.status == "found":
            for key, seconds in finding.explains.items():
                klass, _, metric = key.partition("\t")
                by_rule = claimed.setdefault((klass, metric), {}).setdefault(
                    finding.claims or finding.rule, {}
                )
                by_rule[finding.rule] = by_rule.get(finding.rule, 0.0) + seconds
    rows = [((row.klass, row.metric), row) for row in classes]
    rows += [((row.klass, f"{row.metric}\t{row.observer}"), row) for row in clients]
    shares = [
        min(
            1.0,
            sum(max(by_rule.values()) for by_rule in claimed[key].values()) / row.excess_s,
        )
        for key, row in rows
        if key in claimed and row.excess_s
    ]
    return sum(shares) / len(shares) if shares else None


def _verdict(
    trace: Trace,
    ledger: Ledger,
    classes: Sequence[ClassRow],
    checks: Sequence[Check],
    findings: Sequence[Finding],
    explained: float | None,
) -> Verdict:
    outcome = trace.rows(
        "SELECT count(*) AS n, count(*) FILTER (WHERE status IN ('error', 'timeout', 'rejected')) AS failed FROM joined"
    )[0]
    n, failed = outcome["n"], outcome["failed"]
    if n and failed / n >= FAILED_SHARE:
        return Verdict(
            f"No latency verdict: {failed} of {n} requests failed.{_deaths(trace)} "
            "Find out why before looking at latency.",
            "inconclusive",
            None,
        )
    timed, lacking = half_timed.what_is_missing(trace)
    with_tail = [row for row in classes if row.tail_n]
    found = [f for f in findings if f.status == "found"]
    if found:
        text = found[0].title
        if found[0].share_of_tail is not None:
            metric = next((v.detail["metric"] for v in found[0].victims if "metric" in v.detail), "")
            text += f": {found[0].share_of_tail:.0%} of the {metric} excess".replace("  ", " ")
        if len(found) > 1:
            text += f". Also: {found[1].title}"
        if len(found) > 2:
            text += f", and {len(found) - 2} more"
        largest, in_the_dark = _largest_component(with_tail) if with_tail else ("", False)
        if in_the_dark:
            # What no rule claims is most of the tail, and must not hide behind a finding.
            return Verdict(f"{text}.{largest}{_longest_steps(trace, ledger, found)}", "found", explained)
        return Verdict(text + ".", "found", explained)
    if with_tail:
        if any(f.status == "inconclusive" for f in findings):
            return Verdict(findings[0].title + ", but the data cannot decide why.", "inconclusive", None)
        undecided = [check.rule for check in checks if check.status != "clear"]
        size = max((row.n for row in classes if row.metric != "ITL"), default=0)
        largest, in_the_dark = _largest_component(with_tail)
        if in_the_dark:
            text = f"No rule found a cause in {size:,} requests.{largest}{_longest_steps(trace, ledger)}"
            if timed and lacking:
                text += f" {lacking}: that would say more."
            return Verdict(text, "inconclusive", None)
        if len(undecided) == len(checks):
            return Verdict(f"No rule could decide on {size:,} requests.{largest}", "inconclusive", None)
        named = ", ".join(undecided[:MOST_NAMED])
        more = f" and {len(undecided) - MOST_NAMED} more" if len(undecided) > MOST_NAMED else ""
        but = f", but {named}{more} could not decide" if undecided else ""
        return Verdict(f"No rule found a cause in {size:,} requests{but}.{largest}", "nothing", None)
    histograms = [row for row in classes if row.basis == "histogram" and row.range99_s]
    if histograms:
        row = histograms[0]
        assert row.range99_s is not None
        low, high = row.range99_s
        bracket = f"> {low:g} s" if high is None else f"between {low:g} and {high:g} s"
        return Verdict(
            f"p99 {row.metric} is {bracket} by the server's histogram ({row.n:,} samples); without request-level data "
            "nothing says why.",
            "inconclusive",
            None,
        )
    if n:
        text = (
            f"too few of any class to say what its tail is ({MIN_REQUESTS} are needed)"
            if timed or not lacking
            else f"{lacking[0].lower()}{lacking[1:]}, so nothing can be said of latency"
        )
        return Verdict(f"{n:,} request{'s' * (n != 1)}, {failed:,} failed: {text}.", "inconclusive", None)
    if trace.has("requests"):
        if not trace.rows("SELECT 1 FROM requests WHERE instant(arrival_ns) IS NOT NULL LIMIT 1"):
            text = (
                "No request of the trace has an arrival: their latencies can be queried, not placed in time."
            )
            return Verdict(text, "no-data", None)
        return Verdict("No request of the trace arrived in the window that was asked for.", "no-data", None)
    judged = [check for check in checks if check.status in ("inconclusive", "clear")]
    if judged:
        open_ones = [check for check in judged if check.status == "inconclusive"]
        reasons = "; ".join(f"{check.rule}: {check.reason}" for check in open_ones or judged)
        status: VerdictStatus = "inconclusive" if open_ones else "nothing"
        return Verdict(f"The trace holds no requests. {reasons}.", status, None)
    return Verdict("The trace holds no requests and no latency histograms.", "no-data", None)


def _largest_component(rows: Sequence[ClassRow]) -> tuple[str, bool]:
    """A sentence on the class and metric whose tail is the most out of proportion, and whether it is unexplained."""
    row = max(rows, key=lambda r: (r.excess_s or 0.0) / (r.p50_s or 1.0))
    if not row.excess or not row.excess_s or row.excess_s < NOTICEABLE * (row.p50_s or 0.0):
        return " No class's tail is far from typical.", False
    component, seconds = max(row.excess.items(), key=lambda item: item[1])
    mostly = "mostly" if seconds > row.excess_s / 2 else "the largest part of it"
    text = (
        f" The {row.metric} tail of class {row.klass} is {amount(row.excess_s)} s above typical, {mostly} {component}"
        f" ({amount(seconds)} s)."
    )
    return text, component in ("unexplained", "pause")


def _longest_steps(trace: Trace, ledger: Ledger, found: Sequence[Finding] = ()) -> str:
    """When the step was that the cost model explains least, and what the events say of that time; nothing where a finding is
    of that time."""
    longest = sorted((s for e in ledger.engines for s in e["longest"]), key=lambda s: -s["seconds"])[:1]
    longest = [
        step
        for step in longest
        if not any(f.window_ns and f.window_ns[0] <= step["time_ns"] <= f.window_ns[1] for f in found)
    ]
    if not longest:
        return ""
    step = longest[0]
    end_ns = step["time_ns"] + int(step["seconds"] * 1e9)
    near = trace.rows(
        "SELECT DISTINCT detail FROM events WHERE kind IN ('config', 'eplb', 'jit', 'restart') AND length(detail) < 80 "
        "AND time_ns BETWEEN $low AND $high ORDER BY detail LIMIT 3",
        {"low": step["time_ns"] - EVENT_NEAR_NS, "high": end_ns + EVENT_NEAR_NS},
    )
    text = f" One step took {amount(step['seconds'])} s longer than its batch accounts for, from {_clock(step['time_ns'])}"
    return text + (f"; beside it in the log: {', '.join(r['detail'] for r in near)}." if near else ".")


def _deaths(trace: Trace) -> str:
    """When an engine died, where the log says so."""
    rows = trace.rows(
        "SELECT min(time_ns) AS time_ns FROM events WHERE detail LIKE '%engine died%' HAVING count(*) > 0"
    )
    return f" An engine died at {_clock(rows[0]['time_ns'])} by its log." if rows else ""


def _clock(ns: int) -> str:
    return f"{clock(ns)} UTC"


def _about(trace: Trace) -> dict[str, Any]:
    span = trace.rows(
        "SELECT min(arrival_ns) AS first_ns, max(coalesce(finished_ns, arrival_ns)) AS last_ns FROM observed"
    )[0]
    return {
        "path": trace.path,
        "first_ns": span["first_ns"],
        "last_ns": span["last_ns"],
        "instances": [
            r["instance"] for r in trace.rows("SELECT DISTINCT instance FROM observed ORDER BY 1 LIMIT 100")
        ],
        "requests": trace.count("joined"),
        "steps": trace.count("steps"),
        "rows": {table.name: trace.count(table.name) for table in TABLES if trace.has(table.name)},
        "sources": trace.rows(
            "SELECT kind, count(*) AS files, sum(rows) AS rows, sum(rows_rejected) AS rows_rejected, "
            "sum(rows_duplicate) AS rows_duplicate FROM sources GROUP BY kind ORDER BY kind"
        ),
        "blame": trace.rows(
            "SELECT j.klass AS victim, coalesce(l.culprit, 'unknown') AS culprit, sum(l.ns) / 1e9 AS request_seconds "
            "FROM bill_lines l JOIN joined j ON j.rid = l.id WHERE l.component LIKE 'others%' OR l.component = 'queue_budget' "
            "OR l.component = 'queue_kv' OR l.component = 'queue_slots' OR l.component = 'preempted' "
            "GROUP BY ALL ORDER BY victim, request_seconds DESC"
        ),
        "rank_windows": _rank_windows(trace),
        "warnings": trace.warnings,
    }


def _rank_windows(trace: Trace) -> list[dict[str, Any]]:
    """Of each window of profiles: whose they are, the ranks' clocks, and what its collectives were mostly."""
    windows = trace.rows(
        'SELECT "window", world, profiled AS ranks, missing, first_ns, last_ns, clock_error_ns FROM windows LEFT JOIN '
        '(SELECT "window", max(error_ns) FILTER (WHERE isfinite(error_ns)) AS clock_error_ns FROM rank_clocks GROUP BY "window") '
        'USING ("window") ORDER BY "window"'
    )
    clocks = trace.rows(
        'SELECT "window", rank, offset_ns, drift_ppm, knots, CASE WHEN isfinite(error_ns) THEN error_ns END AS error_ns, residual_ns, '
        'rounds, basis FROM rank_clocks ORDER BY "window", rank'
    )
    collectives = trace.rows(
        'SELECT "window", kind, phase, count(*) FILTER (WHERE is_last) AS rounds, '
        + ", ".join(f"count(*) FILTER (WHERE is_last AND verdict = '{v}') AS {v}" for v in VERDICTS)
        + ", median(transfer_ns) AS transfer_ns, median(transfer_low_ns) AS transfer_low_ns, median(transfer_high_ns) AS transfer_high_ns, "
        'median(usual_transfer_ns) AS usual_transfer_ns, median(wait_ns) AS wait_ns FROM rank_rounds GROUP BY "window", kind, phase '
        'ORDER BY "window", rounds DESC, kind, phase'
    )
    for window in windows:
        for name, rows in (("clocks", clocks), ("collectives", collectives)):
            window[name] = [
                {key: value for key, value in row.items() if key != "window"}
                for row in rows
                if row["window"] == window["window"]
            ]
    return windows


def _missing(trace: Trace) -> list[str]:
    """What more telemetry would decide, most useful first."""
    missing = []
    _, lacking = half_timed.what_is_missing(trace)
    if lacking:
        missing.append(f"{lacking}: {half_timed.WHERE_FROM}")
    if not trace.count("joined"):
        missing.append(
            "requests: OpenTelemetry spans (vllm serve --otlp-traces-endpoint) would say who was slow, and when"
        )
    if not trace.count("steps"):
        missing.append(
            "iterations: vllm serve --enable-logging-iteration-details with its log or a stat logger would say what each "
            "step held, so who waited for whose prefill"
        )
    if trace.count("joined") and not trace.rows("SELECT 1 FROM joined WHERE preemptions IS NOT NULL LIMIT 1"):
        missing.append(
            "preemptions by request: a stat logger's finished_requests would say whom preemption hit"
        )
    if trace.count("joined") and not trace.has("tokens"):
        missing.append("token times: a client log with chunk times would give ITL and place stalls in time")
    if trace.count("joined") and not trace.rows("SELECT 1 FROM observed WHERE view = 'client' LIMIT 1"):
        missing.append(
            "the client's view: a client log would show aborted and refused requests, which leave no span"
        )
    if not trace.has("metrics"):
        missing.append("/metrics: scrapes would confirm KV pressure and count preemptions and rejections")
    if trace.count("steps") and not trace.rows("SELECT 1 FROM events WHERE kind = 'config' LIMIT 1"):
        missing.append("the server's log: would say when the profiler, EPLB or JIT stopped the engine")
    if not trace.has("rank_events"):
        missing.append("rank timelines: torch profiler traces would say whether a rank made steps slow")
    return missing
