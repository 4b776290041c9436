"""What rules about long steps ask `step_costs` for: steps of engines that step together once each, and shapes of batches."""

from __future__ import annotations

from tailscope.store import Trace


def write_long_steps(trace: Trace) -> None:
    """Make the views `lead_steps`, `lanes`, `longest_steps`, `step_shapes` and `in_flight`. After `step_costs`."""
    for sql in (_LEADS, _LEAD_STEPS, _LANES, _LONGEST, _SHAPES, _TURNS):
        trace.connection.execute(sql)


#: Of engines in step one has most steps of its own: its time is everybody's.
_LEADS = """
CREATE OR REPLACE TEMP VIEW leads AS
WITH sizes AS (SELECT lane, instance, engine, count(k) AS own FROM step_costs GROUP BY lane, instance, engine)
SELECT lane, instance, engine, list(engine) OVER (PARTITION BY lane) AS engines
FROM sizes QUALIFY row_number() OVER (PARTITION BY lane ORDER BY own DESC, engine) = 1
"""
_LEAD_STEPS = """
CREATE OR REPLACE TEMP VIEW lead_steps AS
SELECT c.* FROM step_costs c JOIN leads l ON l.lane = c.lane AND l.engine IS NOT DISTINCT FROM c.engine
"""
_LANES = """
CREATE OR REPLACE TEMP VIEW lanes AS
SELECT lane, any_value(usable) AS usable, count(*) AS steps, sum(tile_s) AS busy_s, median(tile_s) AS usual_s,
       max(error_s) AS error_s, min(start_ns) AS first_ns, max(end_ns) AS last_ns,
       sum(batch_s) FILTER (WHERE prefill_tokens > 0) / nullif(sum(batch_s), 0) AS prefill_share
FROM lead_steps GROUP BY lane
"""
#: So many of the longest steps show how the tail of a lane's ordinary ones goes on, those that are as long as their batch
#: allows for among them.
TAIL = 400
_LONGEST = f"""
CREATE OR REPLACE TEMP VIEW longest_steps AS
WITH ranked AS (
    SELECT lane, round, tile_s / (batch_s + ranks_s) AS times, reason
    FROM lead_steps WHERE usable AND tile_s > 0 AND batch_s + ranks_s > 0
    QUALIFY row_number() OVER (PARTITION BY lane ORDER BY times DESC, round) <= {TAIL}
)
SELECT lane, list({{round: round, times: times, reason: reason}} ORDER BY times DESC, round) AS tops FROM ranked GROUP BY lane
"""
#: Batches of one shape run one compiled kernel or graph: vLLM pads to the sizes of its graphs, 1, 2, 4, by 8, from 256 on by
#: 16; beyond them kernels are tuned by about powers of two.
_SHAPES = """
CREATE OR REPLACE TEMP VIEW step_shapes AS
WITH padded AS (
    SELECT *, prefill_tokens + coalesce(decode_tokens, decode_requests) AS tokens,
           CASE WHEN tokens <= 2 THEN ceil(tokens) WHEN tokens <= 4 THEN 4 WHEN tokens <= 256 THEN 8 * ceil(tokens / 8)
                WHEN tokens <= 512 THEN 16 * ceil(tokens / 16) ELSE power(2, ceil(log2(tokens))) END AS size
    FROM step_costs WHERE k IS NOT NULL AND (prefill_tokens > 0 OR decode_requests > 0)
),
shaped AS (
    SELECT *, CASE WHEN prefill_tokens > 0 THEN 'prefill, up to ' ELSE 'decode, up to ' END || size::BIGINT || ' tokens' AS shape
    FROM padded
)
SELECT *, row_number() OVER (PARTITION BY instance, engine, shape ORDER BY round) AS nth FROM shaped
"""
#: in_flight: at each arrival or end of a request of an engine, how many had come and gone by then. What names no engine
#: counts for all of its instance; `engine_key` is -1 for an engine without a number, since ASOF joins need equality.
_TURNS = """
CREATE OR REPLACE TEMP VIEW in_flight AS
WITH engines AS (SELECT DISTINCT instance, engine FROM step_costs),
stays AS (
    SELECT e.instance, e.engine, j.arrival_ns AS start_ns, coalesce(j.arrival_ns + j.e2e_ns, j.finished_ns) AS end_ns
    FROM joined j JOIN engines e ON e.instance = j.instance AND (j.engine IS NULL OR j.engine IS NOT DISTINCT FROM e.engine)
),
turns AS (
    SELECT instance, engine, start_ns AS time_ns, 1 AS came, 0 AS went FROM stays WHERE end_ns >= start_ns
    UNION ALL SELECT instance, engine, end_ns, 0, 1 FROM stays WHERE end_ns >= start_ns
)
SELECT instance, coalesce(engine, -1) AS engine_key, time_ns, sum(came) OVER t AS came, sum(went) OVER t AS went
FROM turns WINDOW t AS (PARTITION BY instance, engine ORDER BY time_ns RANGE UNBOUNDED PRECEDING)
"""
