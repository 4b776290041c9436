"""What each step of an engine took, and why, as a table; and the time of the requests that are compared with each other.

`step_costs` has a row for each engine and step of it, or of the engines it steps together with (`lane`, `round`; `k` is
NULL where it only ran along): what the batch accounts for, and what is beyond it. `member_spans` has the stays of the
requests and token gaps whose bills make the excess of a class, with their weight in it: what a step costs a tail is the
sum over the stays that overlap it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from tailscope.ledger.bills import Ledger, times_without_requests
from tailscope.ledger.engine_time import EngineTime, Limits
from tailscope.store import Trace


def write_step_costs(trace: Trace, ledger: Ledger, limits: Mapping[str, Limits]) -> None:
    """Fill `step_costs` and `member_spans`; both are empty where there are no steps. After bills and contrast."""
    con = trace.connection
    known = {instance for instance, _ in ledger.times}
    for row in trace.rows("SELECT DISTINCT instance FROM steps ORDER BY instance"):
        if row["instance"] not in known:
            times_without_requests(trace, ledger, row["instance"], limits.get(row["instance"], Limits()))
    con.execute(_COSTS)
    for (instance, engine), time in ledger.times.items():
        con.register("new_costs", _rows(trace, instance, engine, ledger.lanes[instance, engine], time))
        con.execute(
            "INSERT INTO step_costs BY NAME SELECT c.*, s.iteration, s.decode_tokens, s.is_dummy, s.time_error_ns / 1e9 AS error_s, p.reason "
            "FROM new_costs c LEFT JOIN steps s USING (k) LEFT JOIN pauses p USING (k)"
        )
        con.unregister("new_costs")
    gaps = trace.rows("SELECT 1 FROM duckdb_tables() WHERE table_name = 'gaps'")
    con.execute(_SPANS.format(gaps=_GAPS if gaps else ""))


_COSTS = """
CREATE OR REPLACE TEMP TABLE step_costs (
    lane BIGINT, round BIGINT, k BIGINT, instance VARCHAR, engine BIGINT, iteration BIGINT,
    start_ns BIGINT, end_ns BIGINT,
    prefill_tokens DOUBLE, decode_requests DOUBLE, decode_tokens DOUBLE, running DOUBLE, is_dummy BOOLEAN,
    -- Seconds: all of the step; what its batch accounts for; of that, others' prefill; what is beyond it.
    tile_s DOUBLE, batch_s DOUBLE, by_others_s DOUBLE, ranks_s DOUBLE, beyond_s DOUBLE,
    -- How exactly its time is known; 0: to the instant.
    error_s DOUBLE,
    -- Whether the cost model knows what batches take here; NULL for too few steps. What stood beside the step.
    usable BOOLEAN, reason VARCHAR
)
"""


def _rows(trace: Trace, instance: str, engine: int | None, lane: int, time: EngineTime) -> pa.Table:
    steps = time.steps
    columns = trace.connection.execute(
        "SELECT k, end_ns FROM steps WHERE instance = $instance AND engine IS NOT DISTINCT FROM $engine ORDER BY k",
        {"instance": instance, "engine": engine},
    ).fetchnumpy()
    k, end_ns = np.asarray(columns["k"], np.int64), np.asarray(columns["end_ns"], np.int64)
    if len(k) == len(steps.end_ns):
        place = np.arange(len(k))
    else:
        # Of two steps at one place of the common time line the last one's end counts.
        place = np.maximum(np.searchsorted(end_ns, steps.end_ns, side="right") - 1, 0)
    own = (steps.own > 0) & (end_ns[place] == steps.end_ns)
    late_and_slow = np.diff(time.straggler_wait) + np.diff(time.slow_transfer)
    beyond = np.diff(time.unexplained) + np.diff(time.pause)
    tile = np.diff(time.busy)
    return pa.table(
        {
            "lane": pa.repeat(pa.scalar(lane), len(tile)),
            "round": pa.array(np.arange(len(tile))),
            "k": pa.array(k[place], mask=~own),
            "instance": pa.repeat(pa.scalar(instance), len(tile)),
            "engine": pa.repeat(pa.scalar(engine, pa.int64()), len(tile)),
            "start_ns": pa.array(steps.start_ns),
            "end_ns": pa.array(steps.end_ns),
            "prefill_tokens": pa.array(steps.prefill_tokens + steps.recompute_tokens),
            "decode_requests": pa.array(steps.decode_requests),
            "running": pa.array(np.nan_to_num(steps.running)),
            "tile_s": pa.array(tile),
            "batch_s": pa.array(np.maximum(tile - late_and_slow - beyond, 0.0)),
            "by_others_s": pa.array(time.by_others),
            "ranks_s": pa.array(late_and_slow),
            "beyond_s": pa.array(np.maximum(beyond, 0.0)),
            "usable": pa.repeat(
                pa.scalar(None if time.cost is None else time.cost.usable, pa.bool_()), len(tile)
            ),
        }
    )


#: Those who may have run on any of several engines were on each of them for a part.
_SPANS = """
CREATE OR REPLACE TEMP TABLE member_spans AS
WITH engines AS (SELECT DISTINCT instance, engine FROM step_costs),
several AS (SELECT *, count(*) OVER (PARTITION BY instance) AS n FROM engines),
stays AS (
    SELECT m.klass, m.metric, m.tail, j.instance, j.engine, j.arrival_ns AS start_ns, j.arrival_ns + j.ttft_ns AS end_ns,
           m.before_weight AS weight
    FROM members m JOIN joined j ON j.rid = m.id WHERE m.metric <> 'ITL' AND m.before_weight <> 0
    UNION ALL
    SELECT m.klass, m.metric, m.tail, j.instance, j.engine, j.arrival_ns + j.ttft_ns, j.arrival_ns + j.e2e_ns, m.decode_weight
    FROM members m JOIN joined j ON j.rid = m.id WHERE m.metric <> 'ITL' AND m.decode_weight <> 0
    {gaps}
)
SELECT s.klass, s.metric, s.tail, e.instance, e.engine, s.start_ns, s.end_ns,
       CASE WHEN s.engine IS NULL THEN s.weight / e.n ELSE s.weight END AS weight
FROM stays s JOIN several e ON e.instance = s.instance AND (s.engine IS NULL OR s.engine = e.engine)
WHERE s.end_ns > s.start_ns
"""
_GAPS = """
    UNION ALL
    SELECT m.klass, m.metric, m.tail, g.instance, g.engine, g.start_ns, g.end_ns, m.decode_weight
    FROM members m JOIN gaps g ON g.id = m.id WHERE m.metric = 'ITL'
"""
