"""What each step of an engine took, and why, as a table; and the time of the requests that are compared with each other.

`step_costs` has a row for each engine and step of it, or of the engines it steps together with (`lane`, `round`; `k` is
NULL where it only ran along): what the batch accounts for, and what is beyond it. `member_spans` has the stays of the
requests and token gaps whose bills make the excess of a class, with their weight in it: what a step costs a tail is the
sum over the stays that overlap it, each by the part of the step that it covers. `member_sums` has the same as prefix sums
over time, of which `hurt_by('steps')` looks up two a step: so the cost is that of sorting, however many stays a step is in.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from tailscope.ledger.bills import Ledger, times_without_requests
from tailscope.ledger.engine_time import EngineTime
from tailscope.ledger.steps import Limits
from tailscope.store import Trace


def write_step_costs(trace: Trace, ledger: Ledger, limits: Mapping[str, Limits]) -> None:
    """Fill `step_costs` and `member_spans`; both are empty where there are no steps. After bills and contrast, which makes
    `members` and `gaps`."""
    con = trace.connection
    known = {instance for instance, _ in ledger.times}
    for row in trace.rows("SELECT DISTINCT instance FROM steps ORDER BY instance"):
        if row["instance"] not in known:
            times_without_requests(trace, ledger, row["instance"], limits.get(row["instance"], Limits()))
    con.execute(_COSTS)
    for (instance, engine), time in ledger.times.items():
        trace.insert("step_costs", _rows(trace, instance, engine, ledger.lanes[instance, engine], time))
    con.execute(_SAID)
    con.execute(_SPANS)
    write_member_sums(trace)


def write_member_sums(trace: Trace) -> None:
    """Fill `member_sums` from `member_spans`, and make `hurt_by`, which asks it."""
    for sql in (_KINDS, _SUMS, _HURT):
        trace.connection.execute(sql)


_COSTS = """
CREATE OR REPLACE TEMP TABLE step_costs (
    lane BIGINT, round BIGINT, k BIGINT, instance VARCHAR, engine BIGINT, iteration BIGINT,
    start_ns BIGINT, end_ns BIGINT,
    -- What preemptions made computed again is among those of prefill.
    prefill_tokens DOUBLE, recompute_tokens DOUBLE, decode_requests DOUBLE, decode_tokens DOUBLE, running DOUBLE, is_dummy BOOLEAN,
    -- Seconds: all of the step; what its batch accounts for; of that, others' prefill; what is beyond it.
    tile_s DOUBLE, batch_s DOUBLE, by_others_s DOUBLE, ranks_s DOUBLE, beyond_s DOUBLE,
    -- How exactly its time is known; 0: to the instant.
    error_s DOUBLE,
    -- Whether the cost model knows what batches take here; NULL for too few steps. What stood beside the step.
    usable BOOLEAN, reason VARCHAR
)
"""
_SAID = """
CREATE OR REPLACE TEMP TABLE step_costs AS
SELECT c.* REPLACE (s.iteration AS iteration, s.decode_tokens AS decode_tokens, s.is_dummy AS is_dummy, s.time_error_ns / 1e9 AS error_s,
                    p.reason AS reason)
FROM step_costs c LEFT JOIN steps s USING (k) LEFT JOIN pauses p USING (k)
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
    beyond = np.diff(time.unexplained) + np.diff(time.pause) + time.host_beyond
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
            "recompute_tokens": pa.array(steps.recompute_tokens),
            "decode_requests": pa.array(steps.decode_requests),
            "running": pa.array(np.nan_to_num(steps.running)),
            "tile_s": pa.array(tile),
            "batch_s": pa.array(np.maximum(tile - late_and_slow - beyond, 0.0)),
            "by_others_s": pa.array(time.by_others),
            "ranks_s": pa.array(late_and_slow),
            "beyond_s": pa.array(np.maximum(beyond, 0.0)),
            "usable": pa.nulls(len(tile), pa.bool_())
            if time.cost is None
            else pa.array(time.cost.usable_steps),
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
    UNION ALL
    SELECT m.klass, m.metric, m.tail, g.instance, g.engine, g.start_ns, g.end_ns, m.decode_weight
    FROM members m JOIN gaps g ON g.id = m.id WHERE m.metric = 'ITL'
)
SELECT s.klass, s.metric, s.tail, e.instance, e.engine, s.start_ns, s.end_ns,
       CASE WHEN s.engine IS NULL THEN s.weight / e.n ELSE s.weight END AS weight
FROM stays s JOIN several e ON e.instance = s.instance AND (s.engine IS NULL OR s.engine = e.engine)
WHERE s.end_ns > s.start_ns
"""
#: The stays of a class, metric and engine have a number, which sorts and joins faster than its names.
_KINDS = """
CREATE OR REPLACE TEMP TABLE member_kinds AS
SELECT row_number() OVER () AS kind, klass, metric, instance, engine, min(start_ns) AS first_ns
FROM member_spans GROUP BY klass, metric, instance, engine
"""
#: At each start or end of a stay: the weight of those that are there from then on, and that weight times when they came,
#: less that of those who left, in ns since the first. Until t after it they were there for weight * t - weight_ns.
_SUMS = """
CREATE OR REPLACE TEMP TABLE member_sums AS
WITH stays AS (
    SELECT k.kind, m.start_ns - k.first_ns AS start_ns, m.end_ns - k.first_ns AS end_ns, m.weight
    FROM member_spans m JOIN member_kinds k
      ON k.klass = m.klass AND k.metric = m.metric AND k.instance = m.instance AND k.engine IS NOT DISTINCT FROM m.engine
),
edges AS (
    SELECT kind, start_ns AS after_ns, weight AS change FROM stays
    UNION ALL SELECT kind, end_ns, -weight FROM stays
)
SELECT kind, after_ns, sum(change) OVER e AS weight, sum(change * after_ns) OVER e AS weight_ns
-- The frame takes in all edges at one instant.
FROM edges WINDOW e AS (PARTITION BY kind ORDER BY after_ns RANGE UNBOUNDED PRECEDING)
"""
#: Of each step (lane, round) of a table or CTE: {klass, metric, seconds} of the tails that what was beyond its batch makes.
_HURT = """
CREATE OR REPLACE TEMP MACRO hurt_by(chosen) AS TABLE
WITH wanted AS (
    SELECT c.* EXCLUDE (beyond_s), c.beyond_s / (c.end_ns - c.start_ns) AS beyond
    FROM query_table(chosen) o JOIN step_costs c USING (lane, round) WHERE c.end_ns > c.start_ns
),
ends AS (
    SELECT lane, round, instance, engine, start_ns AS time_ns, -beyond AS beyond FROM wanted
    UNION ALL SELECT lane, round, instance, engine, end_ns, beyond FROM wanted
),
asked AS (
    SELECT e.lane, e.round, e.beyond, e.time_ns - k.first_ns AS after_ns, k.kind, k.klass, k.metric
    FROM ends e JOIN member_kinds k ON k.instance = e.instance AND k.engine IS NOT DISTINCT FROM e.engine
),
hurt AS (
    SELECT a.lane, a.round, a.klass, a.metric, sum(a.beyond * (s.weight * a.after_ns - s.weight_ns)) AS seconds
    FROM asked a ASOF JOIN member_sums s ON s.kind = a.kind AND s.after_ns <= a.after_ns
    GROUP BY a.lane, a.round, a.klass, a.metric
)
SELECT lane, round, list({klass: klass, metric: metric, seconds: seconds} ORDER BY klass, metric) AS hurt
FROM hurt GROUP BY lane, round
"""
