"""What rules about the KV cache ask for: what it cost each class's tail, and when running requests were thrown out of it."""

from __future__ import annotations

from tailscope.store import Trace

#: Of a request that waited for the cache for a smaller part of its class's median nobody says that it was hit.
NOTICED = 0.25
#: A cache as full as this has no room for a request of ordinary size.
FULL = 0.9
#: Preemptions further apart than this belong to storms of their own: stalls are shorter.
STORM_GAP_NS = 15_000_000_000


def write_kv(trace: Trace) -> None:
    """Make the view `kv_tails`, and fill `storms`. After `step_costs` and `class_rows`."""
    trace.connection.execute(_TAILS)
    write_storms(trace)


def write_storms(trace: Trace) -> None:
    """Fill `storms` from the steps and requests, each step once."""
    for sql in (_THROWN, _STORM_STEPS, _STORMS, "DROP TABLE thrown_out", "DROP TABLE storm_steps"):
        trace.connection.execute(sql)


#: Of each class and metric that has a tail: the seconds of its excess spent preempted, in steps that computed again what was
#: thrown away, or queued for the cache; and how many requests it cost a noticeable part of the median. Gaps are no requests.
_TAILS = f"""
CREATE OR REPLACE TEMP VIEW kv_tails AS
WITH victims AS (
    SELECT count(*) FILTER (WHERE preemptions > 0) AS preempted_requests,
           count(*) FILTER (WHERE preemptions IS NOT NULL) AS known_requests
    FROM joined WHERE billed
),
kv_time AS (
    SELECT id, sum(ns) / 1e9 AS whole_s, coalesce(sum(ns) FILTER (WHERE place <> 'decode'), 0) / 1e9 AS before_s
    FROM bill_lines WHERE component IN ('preempted', 'recompute', 'queue_kv') GROUP BY id
),
hits AS (
    SELECT k.klass, k.metric, count(*) AS hit
    FROM class_rows k JOIN joined j ON j.klass = k.klass JOIN kv_time t ON t.id = j.rid
    WHERE CASE k.metric WHEN 'TTFT' THEN t.before_s WHEN 'E2E' THEN t.whole_s
                        WHEN 'TPOT' THEN (t.whole_s - t.before_s) / greatest(j.output_tokens - 1, 1) END >= {NOTICED} * k.p50_s
    GROUP BY ALL
),
spent AS (
    SELECT klass, metric, sum(excess_s) FILTER (WHERE component = 'preempted') AS preempted_s,
           sum(excess_s) FILTER (WHERE component = 'recompute') AS recompute_s,
           sum(excess_s) FILTER (WHERE component = 'queue_kv') AS queued_s
    FROM excess WHERE component IN ('preempted', 'recompute', 'queue_kv') GROUP BY ALL
)
SELECT k.klass, k.metric, k.p50_s, k.excess_s, k.tail_rule, k.slo_broken, k.n,
       coalesce(s.preempted_s, 0) AS preempted_s, coalesce(s.recompute_s, 0) AS recompute_s,
       coalesce(s.queued_s, 0) AS queued_s, CASE WHEN k.metric <> 'ITL' THEN coalesce(i.hit, 0) END AS hit, v.*
FROM class_rows k
LEFT JOIN spent s ON s.klass = k.klass AND s.metric = k.metric
LEFT JOIN hits i ON i.klass = k.klass AND i.metric = k.metric
CROSS JOIN victims v
"""
#: Of each step: how many preemptions the engine told of, which it does with the victim's next token, and how many there were
#: at least: fewer run than before, by more than have finished about then. In a full cache these were thrown out.
_THROWN = f"""
CREATE OR REPLACE TEMP TABLE thrown_out AS
-- Who came before the time that is looked at ends in it all the same. Several may tell of one.
WITH before AS (
    SELECT coalesce(instance, '') AS instance, max(engine) AS engine,
           max(coalesce(instant(arrival_ns) + duration(e2e_ns), instant(finished_ns))) AS time_ns
    FROM requests WHERE observer = 'engine' AND instant(arrival_ns) < (SELECT min(arrival_ns) FROM joined)
    GROUP BY coalesce(instance, ''), coalesce(request_id, request_key)
),
ended AS (
    SELECT instance, coalesce(engine, -1) AS engine_key, engine IS NULL AS anywhere,
           coalesce(arrival_ns + e2e_ns, finished_ns) AS time_ns
    FROM joined WHERE coalesce(arrival_ns + e2e_ns, finished_ns) IS NOT NULL
    UNION ALL
    SELECT b.instance, coalesce(b.engine, o.engine, -1), coalesce(b.engine, o.engine) IS NULL, b.time_ns
    FROM before b LEFT JOIN only_engine o USING (instance) WHERE b.time_ns IS NOT NULL
),
keyed AS (SELECT k, instance, coalesce(engine, -1) AS engine_key, end_ns FROM steps),
went AS (
    SELECT s.k, count(*) AS ended
    FROM ended e ASOF JOIN keyed s ON s.instance = e.instance AND s.engine_key = e.engine_key AND s.end_ns <= e.time_ns
    WHERE NOT e.anywhere OR s.engine_key = -1 GROUP BY s.k
),
-- Who names no engine may have gone from any of several.
nobody AS (SELECT DISTINCT instance FROM joined WHERE engine IS NULL),
near AS (
    SELECT s.k, s.instance, s.engine, s.start_ns, s.end_ns, s.tile_ns, s.running, s.kv_usage, s.preempted,
           lag(s.running) OVER w - s.running AS fewer, greatest(lag(s.kv_usage) OVER w, s.kv_usage) AS full_by,
           sum(coalesce(g.ended, 0)) OVER (PARTITION BY s.instance, s.engine ORDER BY s.k ROWS BETWEEN 2 PRECEDING AND 1 FOLLOWING) AS ended,
           n.instance IS NULL OR s.engine IS NULL AS is_known
    FROM steps s LEFT JOIN went g USING (k) LEFT JOIN nobody n ON n.instance = s.instance
    WINDOW w AS (PARTITION BY s.instance, s.engine ORDER BY s.k)
)
SELECT k, instance, engine, start_ns, end_ns, tile_ns, running, kv_usage, coalesce(preempted, 0) AS told,
       CASE WHEN is_known AND full_by >= {FULL} THEN greatest(coalesce(fewer, 0) - ended, 0) ELSE 0 END AS early
FROM near
"""
#: Steps of an engine from a storm's first preemption to its last, with the storm's number, and how many were thrown out by then
#: of whom the engine has not told.
_STORM_STEPS = f"""
CREATE OR REPLACE TEMP TABLE storm_steps AS
WITH hits AS (
    SELECT k, instance, engine, end_ns, told, early FROM thrown_out WHERE told > 0 OR early > 0
),
begun AS (
    SELECT *, coalesce(end_ns - lag(end_ns) OVER (PARTITION BY instance, engine ORDER BY k) > {STORM_GAP_NS}, true) AS is_first FROM hits
),
numbered AS (
    SELECT *, sum(is_first::INT) OVER (PARTITION BY instance, engine ORDER BY k ROWS UNBOUNDED PRECEDING) AS storm FROM begun
),
-- The storm that began last, and its last preemption: windows, since a join of steps with spans compares each with each.
within AS (
    SELECT t.*, max(n.storm) OVER (PARTITION BY t.instance, t.engine ORDER BY t.k ROWS UNBOUNDED PRECEDING) AS storm
    FROM thrown_out t LEFT JOIN (SELECT k, storm FROM numbered) n USING (k)
),
ending AS (
    SELECT *, max(CASE WHEN told > 0 OR early > 0 THEN k END) OVER (PARTITION BY instance, engine, storm) AS last_k
    FROM within WHERE storm IS NOT NULL
)
SELECT * EXCLUDE (last_k),
       greatest(sum(early - told) OVER (PARTITION BY instance, engine, storm ORDER BY k ROWS UNBOUNDED PRECEDING), 0) AS untold
FROM ending WHERE k <= last_k
"""
#: Storms: spans of time in which running requests were thrown out, with what was done meanwhile. Tokens computed again are what
#: the ledger takes for that; `finished` is how many requests ended; `untold` at most, and for so many request-
#: seconds, were thrown out before the engine told of it.
_STORMS = """
CREATE OR REPLACE TEMP TABLE storms AS
WITH usual AS (
    SELECT instance, engine, median(running) FILTER (WHERE kv_usage >= 0.9) AS running_when_full FROM storm_steps GROUP BY ALL
),
sums AS (
    SELECT s.instance, s.engine, s.storm, min(s.start_ns) AS first_ns, max(s.end_ns) AS last_ns, sum(s.told) AS told, sum(s.early) AS early,
           max(s.untold) AS untold, sum(s.untold * s.tile_ns) / 1e9 AS untold_s,
           sum(c.recompute_tokens) AS again_tokens, sum(c.prefill_tokens + c.decode_requests) AS tokens,
           sum(greatest(s.running - u.running_when_full, 0) * s.tile_ns) / 1e9 AS over_s
    FROM storm_steps s
    LEFT JOIN step_costs c ON c.k = s.k
    LEFT JOIN usual u ON u.instance = s.instance AND u.engine IS NOT DISTINCT FROM s.engine
    GROUP BY ALL
),
turns AS (
    SELECT instance, coalesce(engine, -1) AS engine_key, coalesce(arrival_ns + e2e_ns, finished_ns) AS time_ns, 1 AS finished, 0 AS came
    FROM joined WHERE coalesce(arrival_ns + e2e_ns, finished_ns) IS NOT NULL
    UNION ALL SELECT instance, coalesce(engine, -1), arrival_ns, 0, 1 FROM joined
),
met AS (
    SELECT s.instance, s.engine, s.storm, sum(t.finished) AS finished, sum(t.came) AS came
    FROM turns t ASOF JOIN sums s ON s.instance = t.instance AND coalesce(s.engine, -1) = t.engine_key AND s.first_ns <= t.time_ns
    WHERE t.time_ns <= s.last_ns GROUP BY ALL
)
SELECT s.*, coalesce(m.finished, 0) AS finished, coalesce(m.came, 0) AS came
FROM sums s LEFT JOIN met m ON m.instance = s.instance AND m.engine IS NOT DISTINCT FROM s.engine AND m.storm = s.storm
"""
