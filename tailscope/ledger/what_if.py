"""Token gaps as they would be if the profiled steps had been shorter: the replay's savings, carried to the requests.

A gap between two tokens is shorter by what the steps in it would be shorter. That ignores that other batches would have
been scheduled, so a saving is an upper bound. Only gaps that end in profiled steps count.
"""

from __future__ import annotations

from tailscope.store import Trace

_STEPS = """
-- A step of the engine is one of each of its ranks' profiles; of those labels the one most of its rounds have.
CREATE OR REPLACE TEMP TABLE engine_steps AS
SELECT r."window", r.at_step, s.instance, s.engine, s.k
FROM (SELECT DISTINCT "window", rank, step, at_step FROM rank_rounds WHERE at_step IS NOT NULL AND step IS NOT NULL) r
JOIN rank_steps s USING ("window", rank, step)
GROUP BY r."window", r.at_step, s.instance, s.engine, s.k
QUALIFY row_number() OVER (PARTITION BY s.instance, s.engine, s.k ORDER BY count(*) DESC, r.at_step) = 1
"""
_SAVED = """
CREATE OR REPLACE TEMP TABLE saved_steps AS
WITH costs AS (
    SELECT "window", at_step, 'no skew' AS scenario, CAST(NULL AS BIGINT) AS rank, replayed_ns - no_skew_ns AS saved_ns FROM step_replays
    UNION ALL SELECT "window", at_step, 'usual transfers', NULL, replayed_ns - usual_transfers_ns FROM step_replays
    UNION ALL SELECT "window", at_step, 'balanced experts', NULL, replayed_ns - balanced_ns FROM step_replays
    UNION ALL SELECT "window", at_step, 'without rank', rank, saved_ns FROM rank_costs
)
SELECT e."window", c.scenario, c.rank, e.instance, e.engine, e.k, t.start_ns, t.end_ns, sum(c.saved_ns) AS saved_ns
FROM engine_steps e JOIN costs c USING ("window", at_step) JOIN steps t ON t.k = e.k
WHERE c.saved_ns > 0
GROUP BY ALL
"""
#: Of each class, window and scenario: p50 and p99 of the gaps that end in profiled steps, and what they would be.
_GAPS = """
CREATE OR REPLACE TEMP TABLE what_if AS
WITH spans AS (
    SELECT s."window", s.instance, s.engine, min(t.start_ns) AS low, max(t.end_ns) AS high
    FROM engine_steps s JOIN steps t ON t.k = s.k GROUP BY ALL
),
sums AS (
    SELECT *, sum(saved_ns) OVER (PARTITION BY "window", scenario, rank, instance, engine ORDER BY end_ns, k) AS so_far
    FROM saved_steps
),
here AS (
    SELECT p."window", g.id, g.klass, g.instance, g.engine, g.start_ns, g.end_ns
    FROM gaps g JOIN spans p ON p.instance = g.instance AND p.engine IS NOT DISTINCT FROM g.engine
     AND g.end_ns BETWEEN p.low AND p.high
),
scenarios AS (SELECT DISTINCT "window", scenario, rank, instance, engine FROM saved_steps),
asked AS (
    SELECT h.*, s.scenario, s.rank FROM here h
    JOIN scenarios s ON s."window" = h."window" AND s.instance = h.instance AND s.engine IS NOT DISTINCT FROM h.engine
),
at_end AS (
    SELECT a.*, coalesce(s.so_far, 0) AS until_end
    FROM asked a ASOF LEFT JOIN sums s
      ON s."window" = a."window" AND s.scenario = a.scenario AND coalesce(s.rank, -1) = coalesce(a.rank, -1)
     AND s.instance = a.instance AND coalesce(s.engine, -1) = coalesce(a.engine, -1) AND s.end_ns <= a.end_ns
),
both_ends AS (
    SELECT e.*, coalesce(s.so_far, 0) AS until_start
    FROM at_end e ASOF LEFT JOIN sums s
      ON s."window" = e."window" AND s.scenario = e.scenario AND coalesce(s.rank, -1) = coalesce(e.rank, -1)
     AND s.instance = e.instance AND coalesce(s.engine, -1) = coalesce(e.engine, -1) AND s.end_ns <= e.start_ns
)
SELECT "window", scenario, rank, klass, count(*) AS gaps, quantile_cont(end_ns - start_ns, 0.5) / 1e9 AS p50_s,
       quantile_cont(end_ns - start_ns, 0.99) / 1e9 AS p99_s,
       quantile_cont(greatest(end_ns - start_ns - (until_end - until_start), 0), 0.5) / 1e9 AS p50_without_s,
       quantile_cont(greatest(end_ns - start_ns - (until_end - until_start), 0), 0.99) / 1e9 AS p99_without_s
FROM both_ends GROUP BY ALL
"""


def write_what_if(trace: Trace) -> None:
    """Fill `what_if`: class x scenario, seconds. Empty where no profile or no token time is known. After contrast."""
    for sql in (_STEPS, _SAVED, _GAPS):
        trace.connection.execute(sql)
