"""What sets a class's tail apart: mean bill of the tail minus mean bill of matched typical requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from tailscope.config import Slo
from tailscope.ledger.bills import Ledger, write_bills
from tailscope.ledger.half_timed import KNOWN, TIMED, half_compared, known
from tailscope.ledger.histogram import ALL
from tailscope.ledger.left_out import write_left_out
from tailscope.ledger.lines import MODELLED
from tailscope.ledger.steps import Limits
from tailscope.ledger.tails import (
    MAX_VALUES,
    add_members,
    compared,
    describe,
    objectives,
    parts_of_excess,
    per_token,
)
from tailscope.ledger.token_gaps import write_gaps, write_token_gaps
from tailscope.model import ClassRow
from tailscope.store import Trace

METRICS = ("TTFT", "TPOT", "E2E", "ITL", "queue")


def write_ledger(
    trace: Trace, limits: Mapping[str, Limits], slos: tuple[Slo, ...], klass: str | None
) -> tuple[Ledger, list[ClassRow]]:
    """Bill all requests, tell who of them ran without tokens, and hold each class's tail against what is typical of it, token
    gaps too. `limits`: of each instance's scheduler, where they are known."""
    ledger = write_bills(trace, limits)
    write_gaps(trace, klass)
    write_left_out(trace, ledger)
    return ledger, _contrasted(trace, ledger, slos, klass)


def _contrasted(trace: Trace, ledger: Ledger, slos: tuple[Slo, ...], klass: str | None) -> list[ClassRow]:
    """Fill `excess` and return the classes' rows.

    `excess`: klass, metric, component, culprit, tail_s, excess_s; the excess of a class and metric
    sums to the measured one.
    """
    con = trace.connection
    con.execute(
        "CREATE OR REPLACE TEMP TABLE members"
        "(klass VARCHAR, metric VARCHAR, id BIGINT, before_weight DOUBLE, decode_weight DOUBLE, tail BOOLEAN)"
    )
    rows: list[ClassRow] = []
    wanted = trace.rows(
        "SELECT klass FROM joined WHERE billed AND ($klass IS NULL OR klass = $klass) "
        "GROUP BY klass ORDER BY min(prompt_tokens), klass",
        {"klass": klass},
    )
    for row in wanted:
        rows += _request_metrics(trace, row["klass"], slos)
    rows += write_token_gaps(trace, ledger, slos)
    con.execute(_EXCESS)
    excess = parts_of_excess(trace, "excess")
    bounds = {
        (row["klass"], row["metric"]): (min(row["low"], row["high"]), max(row["low"], row["high"]))
        for row in trace.rows(_BOUNDS)
    }
    order = {metric: i for i, metric in enumerate(METRICS)}
    classes = list(dict.fromkeys(r.klass for r in rows))
    rows.sort(key=lambda r: (classes.index(r.klass), order[r.metric]))
    rows = [
        replace(
            r,
            excess=excess.get((r.klass, r.metric), {}),
            others_prefill_s=bounds.get((r.klass, r.metric)),
        )
        for r in rows
    ]
    return rows + (_pooled(trace, slos) if klass is None and ALL not in classes and rows else [])


def _pooled(trace: Trace, slos: tuple[Slo, ...]) -> list[ClassRow]:
    """Rows of all classes together, for objectives that are meant for everybody. They have no tail: a class's excess is
    against its own kind."""
    rows = []
    for metric in _POOLED:
        if not any((slo.klass, slo.metric) == (ALL, metric) for slo in slos):
            continue
        value, table = _POOLED[metric]
        [(n,)] = trace.connection.execute(f"SELECT count(*) FROM ({table})").fetchall()
        columns = trace.connection.execute(
            f"SELECT {value} / 1e9 AS value, time_ns, observer FROM ({table}) WHERE value >= 0 AND hash(id) % $stride = 0 "
            "ORDER BY time_ns",
            {"stride": max(1, -(-n // MAX_VALUES))},
        ).fetchnumpy()
        values, times = np.asarray(columns["value"], np.float64), np.asarray(columns["time_ns"], np.int64)
        observer = " + ".join(sorted({str(o) for o in columns["observer"]}))
        row, _tail = describe(ALL, metric, observer, values, times)
        kept = objectives(slos, ALL, metric, values, times)
        rows.append(replace(row, n=n, tail_rule=None, tail_n=0, objectives=kept))
    return rows


_REQUESTS = "SELECT *, rid AS id, arrival_ns AS time_ns FROM joined WHERE "
#: Metric -> its value in ns, and of which rows.
_POOLED = {
    "TTFT": ("ttft_ns", _REQUESTS + known("TTFT")),
    "TPOT": ("(e2e_ns - ttft_ns) / (output_tokens - 1)", f"{_REQUESTS} {TIMED} AND output_tokens > 1"),
    "E2E": ("e2e_ns", _REQUESTS + known("E2E")),
    "ITL": ("(end_ns - start_ns)", "SELECT *, end_ns AS time_ns FROM gaps"),
}


#: A member's lines count with one weight up to the first token and with another for decode: TPOT is decode per
#: token, and what is typical of an answer's length is a typical decode per token times its tokens.
_EXCESS = """
CREATE OR REPLACE TEMP TABLE excess AS
WITH lines AS (
    SELECT m.klass, m.metric, CASE WHEN l.place = 'decode' THEN m.decode_weight ELSE m.before_weight END AS weight,
           m.tail, l.component, l.culprit, l.ns
    FROM members m JOIN bill_lines l ON l.id = m.id WHERE m.metric <> 'ITL'
    UNION ALL
    SELECT m.klass, m.metric, m.decode_weight, m.tail, l.component, l.culprit, l.ns
    FROM members m JOIN gap_lines l ON l.id = m.id WHERE m.metric = 'ITL'
)
SELECT klass, metric, component, culprit,
       sum(weight * ns) FILTER (WHERE tail) / 1e9 AS tail_s,
       sum(weight * ns) / 1e9 AS excess_s
FROM lines WHERE weight <> 0 GROUP BY ALL
"""


#: The least and the most of each excess that others' prefill can be, whatever the cost model is off by.
_BOUNDS = f"""
WITH modelled AS (
    SELECT m.klass, m.metric, CASE WHEN l.place = 'decode' THEN m.decode_weight ELSE m.before_weight END * l.ns AS ns, b.low, b.high
    FROM members m JOIN bill_lines l ON l.id = m.id LEFT JOIN bill_lines_bounds b ON b.id = l.id AND b.place = l.place
    WHERE m.metric <> 'ITL' AND l.component IN {MODELLED}
    UNION ALL
    SELECT m.klass, m.metric, m.decode_weight * l.ns, b.low, b.high
    FROM members m JOIN gap_lines l ON l.id = m.id LEFT JOIN gap_lines_bounds b ON b.id = l.id AND b.place = l.place
    WHERE m.metric = 'ITL' AND l.component IN {MODELLED}
)
SELECT klass, metric, sum(ns * coalesce(low, 1)) / 1e9 AS low, sum(ns * coalesce(high, 1)) / 1e9 AS high FROM modelled GROUP BY ALL
"""


def _request_metrics(trace: Trace, klass: str, slos: tuple[Slo, ...]) -> list[ClassRow]:
    """TTFT, TPOT, E2E and queue of a class: its rows, and the members of each tail and its typical counterpart."""
    rows = _half_metrics(trace, klass, slos) or _timed_metrics(trace, klass, slos)
    columns = trace.connection.execute(
        f"SELECT observer, arrival_ns, queue_ns / 1e9 AS queue FROM joined WHERE {KNOWN} "
        "AND klass = $klass AND queue_ns IS NOT NULL ORDER BY rid",
        {"klass": klass},
    ).fetchnumpy()
    if len(columns["queue"]):
        observer = " + ".join(sorted({str(o) for o in columns["observer"]}))
        queue, arrivals = (
            np.asarray(columns["queue"], np.float64),
            np.asarray(columns["arrival_ns"], np.int64),
        )
        row, _tail = describe(klass, "queue", observer, queue, arrivals)
        # A part of TTFT, whose bill says why; it has no tail of its own.
        rows.append(replace(row, tail_rule=None, tail_n=0))
    return rows


def _half_metrics(trace: Trace, klass: str, slos: tuple[Slo, ...]) -> list[ClassRow]:
    """Of a class of which one of TTFT and E2E is known; none where both are."""
    rows = []
    for row, rid, values, arrivals, members in half_compared(trace, klass):
        rows.append(replace(row, objectives=objectives(slos, klass, row.metric, values, arrivals)))
        if members is not None:
            add_members(
                trace, "members", klass, row.metric, rid, members.before, members.decode, members.tail
            )
    return rows


def _timed_metrics(trace: Trace, klass: str, slos: tuple[Slo, ...]) -> list[ClassRow]:
    columns = trace.connection.execute(
        "SELECT rid, observer, arrival_ns, ttft_ns, e2e_ns, coalesce(prompt_tokens - coalesce(cached_tokens, 0), 0) AS computed, "
        f"coalesce(output_tokens, 0) AS output FROM joined WHERE {TIMED} AND klass = $klass ORDER BY rid",
        {"klass": klass},
    ).fetchnumpy()
    rid, arrivals = np.asarray(columns["rid"], np.int64), np.asarray(columns["arrival_ns"], np.int64)
    ttft, e2e = np.asarray(columns["ttft_ns"]) / 1e9, np.asarray(columns["e2e_ns"]) / 1e9
    computed, output = np.asarray(columns["computed"], np.float64), np.asarray(columns["output"], np.float64)
    observer = " + ".join(sorted({str(o) for o in columns["observer"]}))
    rows = []
    for row, among, members in compared(klass, observer, arrivals, ttft, e2e, computed, output):
        values = {"TTFT": ttft, "TPOT": per_token(ttft, e2e, output), "E2E": e2e}[row.metric][among]
        rows.append(replace(row, objectives=objectives(slos, klass, row.metric, values, arrivals[among])))
        if members is not None:
            add_members(
                trace, "members", klass, row.metric, rid, members.before, members.decode, members.tail
            )
    return rows
