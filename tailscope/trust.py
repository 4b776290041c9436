"""Whether the data can carry a diagnosis at all: run first, printed with it."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

from tailscope.ledger.bills import Ledger
from tailscope.ledger.half_timed import TIMED
from tailscope.ledger.histogram import CONCEPTS, quantile_ranges
from tailscope.model import ClassRow, Trust, TrustStatus
from tailscope.store import Trace
from tailscope.trust_load import load_checks
from tailscope.units import amount

#: A p99 bucket whose ends are further apart than this says little.
BUCKET_RATIO = 1.5
COVERAGE_WARN, COVERAGE_FAIL = 0.95, 0.5
UNEXPLAINED_WARN, UNEXPLAINED_FAIL = 0.1, 0.4
#: Share of requests missing from the engine's view from which the tail is biased.
SURVIVOR_WARN, SURVIVOR_FAIL = 0.0, 0.1


def checks(trace: Trace, ledger: Ledger, classes: Sequence[ClassRow]) -> tuple[Trust, ...]:
    found = [
        _sample_size(classes),
        _classes(trace),
        *_join_coverage(trace),
        _unknown_engine(ledger),
        _buckets(trace),
    ]
    found += [
        _survivorship(trace),
        *load_checks(trace),
        _clocks(trace),
        *_ranks(trace),
        _ledger(ledger),
        _rejects(trace),
    ]
    return tuple(check for check in found if check is not None)


def _graded(share: float, warn: float, fail: float) -> TrustStatus:
    return "fail" if share > fail else "warn" if share > warn else "pass"


def _sample_size(classes: Sequence[ClassRow]) -> Trust | None:
    requests = [row for row in classes if row.basis == "requests" and row.metric != "queue"]
    if not requests:
        return None
    withheld = [row for row in requests if row.p99_s is None]
    if not withheld:
        return Trust("sample-size", "pass", "every class has the effective samples its p99 needs")
    worst = sorted({f"{row.klass} {row.metric} (n = {row.n:,})" for row in withheld})
    text = f"too few effective samples for the p99 of {', '.join(worst[:4])}{' and more' if len(worst) > 4 else ''}"
    some = any(row.tail_n for row in requests)
    return Trust("sample-size", "warn" if some else "fail", text)


#: From this share of requests without a class on, the classes say little of the load.
NO_CLASS_WARN, NO_CLASS_FAIL = 0.1, 0.5


def _classes(trace: Trace) -> Trust | None:
    [row] = trace.rows(
        "SELECT count(*) AS n, count(*) FILTER (WHERE klass = 'unknown') AS nowhere FROM joined WHERE billed"
    )
    if not row["n"] or row["nowhere"] <= NO_CLASS_WARN * row["n"]:
        return None
    text = f"{row['nowhere']:,} of {row['n']:,} requests are of no class: no [[class]] matches, or their length is not known"
    return Trust("classes", _graded(row["nowhere"] / row["n"], NO_CLASS_WARN, NO_CLASS_FAIL), text)


def _join_coverage(trace: Trace) -> list[Trust]:
    result = []
    instances = [
        row["instance"]
        for row in trace.rows(
            "SELECT instance FROM observed UNION SELECT instance FROM steps ORDER BY instance LIMIT 5"
        )
    ]
    for row in trace.rows('SELECT * FROM coverage WHERE total > 0 ORDER BY "join"'):
        missed = 1 - row["matched"] / row["total"]
        text = f"{row['join']}: {row['matched']:,} of {row['total']:,}"
        if row["ambiguous"]:
            text += f", {row['ambiguous']:,} ambiguous"
        status = _graded(missed, 1 - COVERAGE_WARN, 1 - COVERAGE_FAIL)
        if status != "pass":
            text += ". Ids, times or instances do not match: see docs/joining.md"
            if len(instances) > 1:
                text += f"; the trace has instances {', '.join(instances[:4])}"
        result.append(Trust("join-coverage", status, text))
    return result


def _unknown_engine(ledger: Ledger) -> Trust | None:
    if not ledger.spread:
        return None
    low, high = ledger.spread_s
    return Trust(
        "join-coverage",
        "warn",
        f"{ledger.spread:,} requests name no engine of several: their bills are means over the engines, with {amount(low)} to "
        f"{amount(high)} request-seconds of others' prefill. The stat logger names engines",
    )


def _buckets(trace: Trace) -> Trust | None:
    """Whether the server's own histograms could have shown this p99."""
    coarse, lifetime = [], False
    ranges = quantile_ranges(trace, 0.99)
    for concept, (_n, (low, high), since_start) in ranges.items():
        lifetime |= since_start
        if concept in CONCEPTS and (high is None or low == 0 or high / low > BUCKET_RATIO):
            coarse.append(
                f"{CONCEPTS[concept]} {f'> {low:g} s' if high is None else f'in {low:g}-{high:g} s'}"
            )
    if not ranges:
        return None
    note = "; one scrape only, so since the server's start" if lifetime else ""
    if coarse:
        return Trust("bucket-adequacy", "warn", f"/metrics knows p99 only as {', '.join(coarse)}{note}")
    return Trust("bucket-adequacy", "pass", f"/metrics buckets hold each p99 within {BUCKET_RATIO:g}x{note}")


def _survivorship(trace: Trace) -> Trust | None:
    row = trace.rows(
        """
        SELECT count(*) AS n, count(*) FILTER (WHERE status = 'aborted') AS aborted,
               count(*) FILTER (WHERE status = 'timeout') AS timeout, count(*) FILTER (WHERE status = 'rejected') AS rejected,
               count(*) FILTER (WHERE status = 'error') AS error, count(*) FILTER (WHERE status = 'unfinished') AS unfinished,
               count(*) FILTER (WHERE NOT engine_saw AND status <> 'ok') AS unseen,
               count(*) FILTER (WHERE client_key IS NOT NULL) AS with_client
        FROM joined
        """
    )[0]
    counted = trace.rows(
        "SELECT sum(count) FILTER (WHERE concept = 'ttft') - sum(count) FILTER (WHERE concept = 'e2e') AS vanished "
        "FROM histograms WHERE isinf(upper)"
    )[0]["vanished"]
    if not row["n"] and not counted:
        return None
    lost = {k: row[k] for k in ("aborted", "timeout", "rejected", "error", "unfinished") if row[k]}
    if lost:
        what = ", ".join(f"{v:,} {k}" for k, v in lost.items())
        share = sum(lost.values()) / max(row["n"], 1)
        text = (
            f"{what} of {row['n']:,} requests; {row['unseen']:,} of them in no span, so missing from the tail"
        )
        return Trust("survivorship", _graded(share, SURVIVOR_WARN, SURVIVOR_FAIL), text)
    if counted and counted > 0:
        text = f"{counted:,.0f} requests gave a first token and no end: aborts leave no span"
        return Trust("survivorship", "warn", text)
    if not row["with_client"] and counted is None:
        return Trust(
            "survivorship",
            "warn",
            "no client log and no /metrics: aborted and refused requests would not be seen",
        )
    return Trust("survivorship", "pass", "no request is known to be missing")


def _clocks(trace: Trace) -> Trust | None:
    rows = trace.rows("SELECT * FROM client_clock")
    if not rows:
        return None
    crossed = [r for r in rows if r["crossed"]]
    if crossed:
        return Trust(
            "clock-quality",
            "warn",
            f"client and engine clocks of {len(crossed)} instance(s) drift or step against each other",
        )
    shifted = [r for r in rows if r["offset_ns"]]
    if shifted:
        worst = max(shifted, key=lambda r: abs(r["offset_ns"]))
        seconds = -worst["offset_ns"] / 1e9
        text = (
            f"client clock is {abs(seconds):.3g} s {'ahead of' if seconds > 0 else 'behind'} the engine's, known to "
            f"{worst['error_ns'] / 1e6:.3g} ms; taken off"
        )
        return Trust("clock-quality", "pass", text)
    worst = max(rows, key=lambda r: r["error_ns"])
    return Trust(
        "clock-quality", "pass", f"client and engine clocks agree to {worst['error_ns'] / 1e6:.3g} ms"
    )


#: Steps of windows with several ranks, and those of which no collective lacks a rank that its group has elsewhere.
_STEPS_EVERYWHERE = """
WITH groups AS (SELECT "window", "group", max(ranks) AS ranks FROM rank_rounds GROUP BY ALL),
steps AS (
    SELECT r."window", r.at_step, bool_and(r.ranks = g.ranks) AS everywhere
    FROM rank_rounds r JOIN groups g USING ("window", "group")
    WHERE r.at_step IS NOT NULL
    GROUP BY ALL
)
SELECT count(*), count(*) FILTER (WHERE everywhere) FROM steps
"""


def _join(text: str, missed: float) -> Trust:
    return Trust("join-coverage", _graded(missed, 1 - COVERAGE_WARN, 1 - COVERAGE_FAIL), text)


def _ranks(trace: Trace) -> list[Trust]:
    """Whether the profiles of a world are all there, their collectives and steps found again, their clocks known."""
    if not trace.has("profiles"):
        return []
    found = []
    windows = trace.rows('FROM windows ORDER BY "window"')
    lacking = [w for w in windows if w["missing"]]
    if lacking:
        worst = max(lacking, key=lambda w: w["missing"])
        text = f"{len(lacking)} of {len(windows)} profile window(s) lack ranks: {worst['missing']} of {worst['world_size']} in {worst['world']}"
        text += ". Where other folders hold them, ingest all with one --instance"
        found.append(Trust("rank-coverage", "warn", text))
    doubled = sum(w["doubled"] for w in windows)
    if doubled:
        text = f"{doubled} profile(s) claim a rank that another has at that time; the larger counts. Runs mixed in one folder?"
        found.append(Trust("rank-coverage", "warn", text))
    [(nameless, captures)] = trace.connection.execute(
        "SELECT count(*) FILTER (WHERE rank IS NULL), count(*) FILTER (WHERE captures > 0 AND coalesce(steps, 0) = 0) FROM profiles"
    ).fetchall()
    if nameless:
        text = f"{nameless} profile(s) do not say their rank and were left out; ingest each into a new trace with --rank"
        found.append(Trust("rank-coverage", "warn", text))
    if captures:
        found.append(Trust("rank-coverage", "pass", f"{captures} profile(s) show graph captures, no steps"))
    shared = [w for w in windows if w["present"] > 1]
    collectives, unmatched = (sum(w[c] for w in shared) for c in ("collectives", "unmatched"))
    if collectives:
        text = f"collective → other ranks: {collectives - unmatched:,} of {collectives:,}"
        [(steps, everywhere)] = trace.connection.execute(_STEPS_EVERYWHERE).fetchall()
        if steps:
            text += f"; all collectives of {everywhere:,} of {steps:,} step(s) on all ranks"
        found.append(_join(text, unmatched / collectives))
    [(kernels, unlaunched)] = trace.connection.execute(
        "SELECT coalesce(sum(kernels), 0), coalesce(sum(unlaunched), 0) FROM rank_kernels"
    ).fetchall()
    if kernels:
        text = f"kernel → launch: {kernels - unlaunched:,} of {kernels:,}"
        found.append(_join(text, unlaunched / kernels))
    [(steps, placed, unlike)] = trace.connection.execute(
        "SELECT (SELECT count(*) FROM iterations i JOIN rank_windows w ON w.source = i.source AND w.used AND i.rank IS NOT NULL), "
        "count(*), count(*) FILTER (WHERE NOT alike) FROM rank_steps"
    ).fetchall()
    if steps and placed and trace.rows("SELECT 1 FROM iterations WHERE rank IS NULL LIMIT 1"):
        text = f"step of a profile → engine step: {placed:,} of {steps:,}" + (
            f", {unlike:,} with another batch" if unlike else ""
        )
        found.append(_join(text, 1 - (placed - unlike) / steps))
    clocks = trace.rows(
        "SELECT basis, max(error_ns) AS error_ns, max(abs(offset_ns)) AS offset_ns FROM rank_clocks "
        "WHERE basis <> 'none' GROUP BY basis ORDER BY error_ns DESC LIMIT 1"
    )
    if clocks and collectives and not isfinite(clocks[0]["error_ns"]):
        found.append(
            Trust(
                "clock-quality",
                "warn",
                "nothing tells the clocks of all ranks: too few collectives in common",
            )
        )
    elif clocks and collectives:
        clock = clocks[0]
        text = f"clocks of the ranks are known to {clock['error_ns'] / 1e6:.3g} ms ({clock['basis']})"
        if clock["offset_ns"] > clock["error_ns"]:
            text += f"; up to {clock['offset_ns'] / 1e6:.3g} ms apart, taken off"
        found.append(Trust("clock-quality", "pass", text))
    return found


def _ledger(ledger: Ledger) -> Trust | None:
    engines: list[dict[str, Any]] = ledger.engines
    if not engines:
        return None
    busy = sum(e["busy_s"] for e in engines)
    unexplained = sum(e["unexplained_s"] for e in engines)
    share = unexplained / busy if busy else 0.0
    unfitted = [e for e in engines if e["cost_error"] is None]
    text = f"{share:.1%} of {busy:.3g} s of step time has no known cause"
    longest = sorted((step for e in engines for step in e["longest"]), key=lambda s: -s["seconds"])[:2]
    if share > UNEXPLAINED_WARN and longest:
        text += f"; the longest steps took {' and '.join(format(s['seconds'], '.3g') + ' s' for s in longest)} longer than modelled"
    if unfitted:
        text += f"; {len(unfitted)} engine(s) have too few steps for a cost model"
    errors = [e["cost_error"] for e in engines if e["cost_error"] is not None]
    if errors:
        text += f" (median error of the step cost model {max(errors):.0%})"
    return Trust("unexplained", _graded(share, UNEXPLAINED_WARN, UNEXPLAINED_FAIL), text)


def _rejects(trace: Trace) -> Trust | None:
    rows = trace.rows(
        "SELECT sum(rows_rejected) AS rejected, sum(rows_conflicting) AS conflicting, sum(rows) AS rows, "
        "count(*) FILTER (WHERE rows_rejected > 0) AS files FROM sources"
    )[0]
    if not rows["rows"]:
        return None
    [counts] = trace.rows(
        "SELECT (SELECT count(*) FROM requests WHERE instant(arrival_ns) IS NULL) AS nowhere, "
        "count(*) FILTER (WHERE ttft_ns < 0 OR e2e_ns < 0 OR ttft_ns > e2e_ns) AS untrue, "
        "count(*) FILTER (WHERE ttft_ns IS NULL) AS no_ttft, count(*) FILTER (WHERE e2e_ns IS NULL) AS no_end, "
        f"count(*) FILTER (WHERE NOT (coalesce({TIMED}, false) OR rid IN (SELECT rid FROM half_timed))) AS lost FROM joined WHERE billed"
    )
    told = {
        "no arrival that can be true": counts["nowhere"],
        "times that cannot be true": counts["untrue"],
        "no TTFT": counts["no_ttft"],
        "no end": counts["no_end"],
    }
    if rows["rejected"] or rows["conflicting"] or any(told.values()):
        parts = (
            [f"{rows['rejected']:,} records of {rows['files']} file(s) could not be used"]
            if rows["rejected"]
            else []
        )
        parts += [f"{rows['conflicting']:,} rows share a key but differ"] if rows["conflicting"] else []
        parts += [f"{count:,} requests have {what}" for what, count in told.items() if count]
        lost = (rows["rejected"] or 0) + counts["nowhere"] + counts["lost"]
        return Trust(
            "input-quality", "warn" if lost < 0.1 * (rows["rows"] + lost) else "fail", "; ".join(parts)
        )
    return Trust("input-quality", "pass", "every record that was telemetry was used")
