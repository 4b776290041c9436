-- One row per class and metric as its clients saw it, with the part of its excess that lies before the engine, by where; beside it
-- what never came to an engine, and how busy the engines were.
WITH parts AS (
    SELECT klass, metric, sum(excess_s) FILTER (WHERE component = 'gateway') AS gateway_s,
           sum(excess_s) FILTER (WHERE component = 'network') AS network_s,
           sum(excess_s) FILTER (WHERE component = 'upstream') AS upstream_s
    FROM client_excess WHERE component IN ('gateway', 'network', 'upstream') GROUP BY ALL
),
lost AS (
    SELECT count(*) FILTER (WHERE status = 'rejected') AS refused, count(*) FILTER (WHERE status IN ('timeout', 'aborted')) AS left_early
    FROM joined WHERE NOT engine_saw
),
busy AS (
    SELECT max(running) AS most_running, max(waiting) AS most_waiting, max(kv_usage) AS most_kv FROM steps
),
limits AS (SELECT max(max_num_seqs) AS max_num_seqs FROM configured),
span AS (SELECT min(arrival_ns) AS first_ns, max(arrival_ns + e2e_ns) AS last_ns FROM joined WHERE billed)
SELECT k.*, coalesce(p.gateway_s, 0) AS gateway_s, coalesce(p.network_s, 0) AS network_s, coalesce(p.upstream_s, 0) AS upstream_s,
       l.*, b.*, m.*, s.*
FROM client_rows k LEFT JOIN parts p USING (klass, metric)
CROSS JOIN lost l CROSS JOIN busy b CROSS JOIN limits m CROSS JOIN span s
ORDER BY k.klass, k.metric
