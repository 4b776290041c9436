"""The client's latency of each class, and its bill: the engine's, and what lies between the client and the engine.

Three observers of one request nest in each other: the client sees what the gateway sees and the way to it, the gateway
what the engine sees and its own queue. Only durations are compared, so no clock matters. `client_lines` is a client's
bill, which sums to its latency to the nanosecond; `client_excess` is what sets its tail apart, as `excess` is for engines.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tailscope.config import Slo
from tailscope.ledger import tails
from tailscope.ledger.tails import MIN_REQUESTS
from tailscope.model import ClassRow
from tailscope.stats import Floats, Ints
from tailscope.store import Trace, floats, schema_of

#: What lies between client and engine; the first where no gateway's view says which of the others it is.
UPSTREAM = ("upstream", "network", "gateway")
#: An engine's view that exceeds the client's by less is rounding.
ROUNDING_NS = 1_000_000
#: A request is delayed before the engine by so many typical TTFTs.
DELAYED = 0.25
#: There are as many as ever where there is this share of the most.
AT_MOST = 0.9
#: What two clocks tell must be so many times what they may be off.
CLOCK_ERRORS = 3.0

#: before: to the first token; after: from there on. The engine's part of each, what the gateway adds, and what is left.
_BILLS = """
CREATE OR REPLACE TEMP TABLE client_bills AS
WITH seen AS (
    SELECT rid, klass, instance, outer_view AS observer, arrival_ns, client_arrival_ns, ttft_ns, e2e_ns - ttft_ns AS decode_ns,
           client_ttft_ns AS before_ns, client_e2e_ns - client_ttft_ns AS after_ns,
           CASE WHEN outer_view = 'gateway' THEN client_ttft_ns ELSE gateway_ttft_ns END AS gateway_before_ns,
           CASE WHEN outer_view = 'gateway' THEN client_e2e_ns - client_ttft_ns ELSE gateway_e2e_ns - gateway_ttft_ns END AS gateway_after_ns,
           CASE WHEN outer_view = 'client' AND gateway_ttft_ns IS NULL THEN gateway_e2e_ns END AS gateway_whole_ns,
           coalesce(prompt_tokens - coalesce(cached_tokens, 0), 0) AS computed, coalesce(output_tokens, 0) AS output
    FROM joined
    WHERE billed AND engine_saw AND outer_view IS NOT NULL AND coalesce(status, 'ok') = 'ok'
      AND ttft_ns >= 0 AND e2e_ns >= ttft_ns AND client_ttft_ns >= 0 AND client_e2e_ns >= client_ttft_ns
),
-- A view inside another cannot be the longer one.
nested AS (
    SELECT *, least(ttft_ns, before_ns) AS engine_before_ns, least(decode_ns, after_ns) AS engine_after_ns,
           gateway_before_ns IS NOT NULL AND coalesce(gateway_after_ns >= 0, false) OR gateway_whole_ns IS NOT NULL AS has_gateway
    FROM seen
),
-- An access log knows no first token: what it adds to the whole lies before and after it as what the client saw beyond the engine.
whole AS (
    SELECT *, before_ns - engine_before_ns AS beyond_before_ns, before_ns + after_ns - engine_before_ns - engine_after_ns AS beyond_ns,
           greatest(least(gateway_whole_ns, before_ns + after_ns) - engine_before_ns - engine_after_ns, 0) AS whole_ns
    FROM nested
),
divided AS (
    SELECT *, CASE WHEN beyond_ns > 0 THEN (whole_ns::HUGEINT * beyond_before_ns // beyond_ns)::BIGINT ELSE 0 END AS whole_before_ns FROM whole
)
SELECT rid, klass, instance, observer, arrival_ns, client_arrival_ns, before_ns, after_ns, ttft_ns, decode_ns, computed, output,
       engine_before_ns, engine_after_ns, has_gateway,
       CASE WHEN gateway_whole_ns IS NOT NULL THEN whole_before_ns
            WHEN has_gateway THEN least(greatest(gateway_before_ns, engine_before_ns), before_ns) - engine_before_ns ELSE 0 END AS in_gateway_before_ns,
       CASE WHEN gateway_whole_ns IS NOT NULL THEN whole_ns - whole_before_ns
            WHEN has_gateway THEN least(greatest(gateway_after_ns, engine_after_ns), after_ns) - engine_after_ns ELSE 0 END AS in_gateway_after_ns,
       greatest(ttft_ns - before_ns, 0) + greatest(decode_ns - after_ns, 0) AS scaled_ns,
       -- Chunks that come late and the next ones at once shift time between the two parts; the whole cannot be shorter.
       greatest(ttft_ns - before_ns, ttft_ns + decode_ns - before_ns - after_ns, 0) AS longer_ns
FROM divided
"""
_LINES = """
CREATE OR REPLACE TEMP VIEW client_lines AS
WITH engine AS (
    SELECT l.id, l.place, l.component, l.culprit,
           CASE WHEN l.place = 'decode' AND b.engine_after_ns < b.decode_ns THEN (l.ns::HUGEINT * b.engine_after_ns // b.decode_ns)::BIGINT
                WHEN l.place <> 'decode' AND b.engine_before_ns < b.ttft_ns THEN (l.ns::HUGEINT * b.engine_before_ns // b.ttft_ns)::BIGINT
                ELSE l.ns END AS ns,
           b.scaled_ns, b.engine_before_ns, b.engine_after_ns
    FROM bill_lines l JOIN client_bills b ON b.rid = l.id
),
lines AS (
    SELECT id, place, component, culprit, ns FROM engine
    UNION ALL
    -- What rounding takes off lines that are scaled down.
    SELECT id, CASE WHEN place = 'decode' THEN 'decode' ELSE 'wait' END, 'unexplained', NULL,
           (CASE WHEN place = 'decode' THEN any_value(engine_after_ns) ELSE any_value(engine_before_ns) END - sum(ns))::BIGINT
    FROM engine WHERE scaled_ns > 0 GROUP BY id, place = 'decode', CASE WHEN place = 'decode' THEN 'decode' ELSE 'wait' END
    UNION ALL SELECT rid, 'before', 'gateway', NULL, in_gateway_before_ns FROM client_bills
    UNION ALL SELECT rid, 'after', 'gateway', NULL, in_gateway_after_ns FROM client_bills
    UNION ALL
    SELECT rid, 'before', CASE WHEN has_gateway THEN 'network' ELSE 'upstream' END, NULL,
           before_ns - engine_before_ns - in_gateway_before_ns FROM client_bills
    UNION ALL
    SELECT rid, 'after', CASE WHEN has_gateway THEN 'network' ELSE 'upstream' END, NULL,
           after_ns - engine_after_ns - in_gateway_after_ns FROM client_bills
)
FROM lines WHERE ns > 0
"""
_EXCESS = """
CREATE OR REPLACE TEMP TABLE client_excess AS
WITH lines AS (
    SELECT m.klass, m.metric, CASE WHEN l.place IN ('decode', 'after') THEN m.decode_weight ELSE m.before_weight END AS weight,
           m.tail, l.component, l.culprit, l.ns
    FROM client_members m JOIN client_lines l ON l.id = m.id
)
SELECT klass, metric, component, culprit,
       sum(weight * ns) FILTER (WHERE tail) / 1e9 AS tail_s, sum(weight * ns) / 1e9 AS excess_s
FROM lines WHERE weight <> 0 GROUP BY ALL
"""
_MEMBERS = """
CREATE OR REPLACE TEMP TABLE client_members
(klass VARCHAR, metric VARCHAR, id BIGINT, before_weight DOUBLE, decode_weight DOUBLE, tail BOOLEAN)
"""
#: What beside its quantiles is known of a class as its clients see it, for rules.
_FIELDS: dict[str, pa.DataType] = {
    "klass": pa.string(),
    "metric": pa.string(),
    "observer": pa.string(),
    "n": pa.int64(),
    "n_eff": pa.float64(),
    "p50_s": pa.float64(),
    "p99_s": pa.float64(),
    "excess_s": pa.float64(),
    "tail_rule": pa.string(),
    "tail_n": pa.int64(),
    "slo_broken": pa.bool_(),
    "with_gateway": pa.int64(),
    "longer": pa.int64(),
    "engine_p99_s": pa.float64(),
    "typical_gap_s": pa.float64(),
    "tail_gap_s": pa.float64(),
    "calm_p99_s": pa.float64(),
    "delayed": pa.int64(),
    "delayed_in_flight": pa.float64(),
    "most_in_flight": pa.int64(),
    "at_most_share": pa.float64(),
    "way_in_share": pa.float64(),
}
_ROWS = schema_of(_FIELDS)


@dataclass(frozen=True)
class _Class:
    """What the clients of a class saw, arrays of one length, seconds. `gap_before`, `gap`: by how much TTFT and E2E are
    longer than the engine's."""

    rid: NDArray[np.int64]
    times_ns: NDArray[np.int64]
    ttft: Floats
    e2e: Floats
    gap_before: Floats
    gap: Floats
    #: On the way to the engine, by the two clocks, and how exactly these are known; NaN where they are not.
    way_in: Floats
    clock_error: Floats
    computed: Floats
    output: Floats


def write_upstream(trace: Trace, slos: tuple[Slo, ...], klass: str | None) -> list[ClassRow]:
    """Fill `client_bills`, `client_members`, `client_excess` and `client_rows`, make `client_lines`, and return the rows.

    A class has rows where at least MIN_REQUESTS of its requests were seen by a client, else by a gateway, beside an
    engine. `calm_p99_s`: the p99 with the time between client and engine at what is typical of the class. Of the `delayed`
    requests, whose time before the engine is DELAYED typical TTFTs or more: how many were at the engines when
    one arrived (median), which share arrived when there were as many as ever (`most_in_flight`), as under a limit, and
    which share of the time lay on the way in, where the clocks tell.
    """
    con = trace.connection
    arrivals, ends = _stays(trace)
    for sql in (_BILLS, _LINES, _MEMBERS):
        con.execute(sql)
    rows: list[ClassRow] = []
    more: list[dict[str, Any]] = []
    for entry in trace.rows(
        "SELECT klass, observer, count(*) AS n, count(*) FILTER (WHERE has_gateway) AS with_gateway, "
        "count(*) FILTER (WHERE longer_ns > $rounding) AS longer "
        "FROM client_bills WHERE $klass IS NULL OR klass = $klass GROUP BY klass, observer HAVING count(*) >= $least "
        # The outermost view that there is in number.
        "QUALIFY row_number() OVER (PARTITION BY klass ORDER BY observer) = 1 ORDER BY klass",
        {"klass": klass, "least": MIN_REQUESTS, "rounding": ROUNDING_NS},
    ):
        seen = _load(trace, entry["klass"], entry["observer"])
        limited = _limited(seen, arrivals, ends)
        for row, known in _contrasted(trace, entry, seen, slos):
            rows.append(row)
            more.append({**known, **limited})
    con.execute(_EXCESS)
    excess = tails.parts_of_excess(trace, "client_excess")
    rows = [replace(row, excess=excess.get((row.klass, row.metric), {})) for row in rows]
    trace.create(
        "client_rows",
        pa.Table.from_pylist(
            [
                {**{name: getattr(row, name) for name in _ROWS.names if hasattr(row, name)}, **known}
                for row, known in zip(rows, more, strict=True)
            ],
            schema=_ROWS,
        ),
    )
    return rows


def _stays(trace: Trace) -> tuple[Ints, Ints]:
    """When requests came to the engines and when they were done there, each sorted."""
    columns = trace.connection.execute(
        "SELECT arrival_ns, arrival_ns + e2e_ns AS end_ns FROM joined WHERE engine_saw AND e2e_ns IS NOT NULL"
    ).fetchnumpy()
    return (
        np.sort(np.asarray(columns["arrival_ns"], np.int64)),
        np.sort(np.asarray(columns["end_ns"], np.int64)),
    )


def _limited(seen: _Class, arrivals: Ints, ends: Ints) -> dict[str, Any]:
    """Whether requests that come late to the engines come when these have as many as they ever have."""
    delayed = seen.gap_before > DELAYED * float(np.median(seen.ttft))
    # One that is done as another comes has made room for it.
    there = np.searchsorted(arrivals, arrivals, side="right") - np.searchsorted(ends, arrivals, side="right")
    most = int(there.max(initial=0))
    if not delayed.any():
        return {"delayed": 0, "most_in_flight": most}
    mine = there[np.searchsorted(arrivals, seen.times_ns[delayed], side="right") - 1]
    gap, error = seen.gap_before[delayed], seen.clock_error[delayed]
    told = np.isfinite(error) & (gap > CLOCK_ERRORS * error)
    share = None
    if told.sum() >= delayed.sum() / 2:
        way_in = np.clip(seen.way_in[delayed][told], 0.0, gap[told])
        share = float(way_in.sum() / gap[told].sum())
    return {
        "delayed": int(delayed.sum()),
        "delayed_in_flight": float(np.median(mine)),
        "most_in_flight": most,
        "at_most_share": float((mine >= AT_MOST * most).mean()),
        "way_in_share": share,
    }


def _load(trace: Trace, klass: str, observer: str) -> _Class:
    columns = trace.connection.execute(
        "SELECT rid, arrival_ns, before_ns, after_ns, before_ns - engine_before_ns AS gap_before, "
        "greatest(before_ns + after_ns - ttft_ns - decode_ns, 0) AS gap, computed, output, "
        "CASE WHEN NOT crossed THEN (arrival_ns - client_arrival_ns - offset_ns) / 1e9 END AS way_in, "
        "CASE WHEN NOT crossed THEN error_ns / 1e9 END AS clock_error "
        "FROM client_bills LEFT JOIN client_clock USING (instance) WHERE klass = $klass AND observer = $observer ORDER BY rid",
        {"klass": klass, "observer": observer},
    ).fetchnumpy()
    before, after = np.asarray(columns["before_ns"]) / 1e9, np.asarray(columns["after_ns"]) / 1e9
    return _Class(
        np.asarray(columns["rid"], np.int64),
        np.asarray(columns["arrival_ns"], np.int64),
        before,
        before + after,
        np.asarray(columns["gap_before"]) / 1e9,
        np.asarray(columns["gap"]) / 1e9,
        floats(columns["way_in"]),
        floats(columns["clock_error"]),
        np.asarray(columns["computed"], np.float64),
        np.asarray(columns["output"], np.float64),
    )


def _contrasted(
    trace: Trace, entry: dict[str, Any], seen: _Class, slos: tuple[Slo, ...]
) -> list[tuple[ClassRow, dict[str, Any]]]:
    """TTFT and E2E of a class as its clients saw them, with what else is known of each; members are added."""
    name = entry["klass"]
    views = {"TTFT": (seen.ttft, seen.gap_before), "E2E": (seen.e2e, seen.gap)}
    result = []
    for row, _everyone, members in tails.compared(
        name, entry["observer"], seen.times_ns, seen.ttft, seen.e2e, seen.computed, seen.output
    ):
        if row.metric not in views:
            continue
        assert members is not None  # the class has MIN_REQUESTS
        values, gap = views[row.metric]
        row = replace(row, objectives=tails.objectives(slos, name, row.metric, values, seen.times_ns))
        tails.add_members(
            trace, "client_members", name, row.metric, seen.rid, members.before, members.decode, members.tail
        )
        typical_gap = float(np.median(gap))
        calm = values - np.maximum(gap - typical_gap, 0.0)
        known = {
            "with_gateway": entry["with_gateway"],
            "longer": entry["longer"],
            "engine_p99_s": float(np.quantile(values - gap, 0.99)),
            "typical_gap_s": typical_gap,
            "tail_gap_s": float(gap[members.tail].mean()),
            "calm_p99_s": float(np.quantile(calm, 0.99)),
        }
        result.append((row, known))
    return result
