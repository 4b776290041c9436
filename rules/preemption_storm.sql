-- One row per class and metric with the part of its excess spent preempted, in steps that computed again what a preemption
-- threw away, or queued for KV cache meanwhile; beside it what happened to all requests.
WITH victims AS (
    SELECT
        count(*) FILTER (WHERE preemptions > 0) AS preempted_requests,
        count(*) FILTER (WHERE preemptions IS NOT NULL) AS known_requests,
        sum(preemptions) AS preemptions,
        max(preemptions) AS most,
        min(arrival_ns) FILTER (WHERE preemptions > 0) AS first_ns,
        max(arrival_ns + e2e_ns) FILTER (WHERE preemptions > 0) AS last_ns
    FROM joined WHERE billed
),
stalls AS (
    SELECT sum(ns) / 1e9 AS stalled_s, count(DISTINCT id) AS stalled_requests, max(ns) / 1e9 AS longest_s
    FROM (SELECT id, sum(ns) AS ns FROM bill_lines WHERE component = 'preempted' GROUP BY id)
),
squeeze AS (
    SELECT max(s.kv_usage) AS kv_usage, max(s.waiting) AS waiting, median(s.running) FILTER (WHERE s.kv_usage >= 0.9) AS running_when_full,
           min(s.start_ns) FILTER (WHERE s.kv_usage >= 0.9 AND s.waiting > 0) AS squeeze_first_ns,
           max(s.end_ns) FILTER (WHERE s.kv_usage >= 0.9 AND s.waiting > 0) AS squeeze_last_ns
    FROM steps s, victims v WHERE s.end_ns BETWEEN v.first_ns AND v.last_ns
),
counted AS (
    SELECT sum(increase) AS counter_increase, max(last_ns - first_ns) / 1e9 AS counter_seconds
    FROM counters WHERE concept = 'preemptions'
),
reported AS (SELECT sum(preempted) AS step_preemptions FROM steps),
limits AS (SELECT max(max_num_seqs) AS max_num_seqs FROM configured),
holders AS (
    SELECT culprit AS holder, sum(ns) / 1e9 AS held_s FROM bill_lines
    WHERE component = 'preempted' AND culprit IS NOT NULL GROUP BY culprit ORDER BY held_s DESC, culprit LIMIT 1
),
-- Requests that the cache cost more than a noticeable part of their class's median, by metric. Token gaps are not requests.
kv_time AS (
    SELECT l.id, sum(ns) / 1e9 AS whole_s, coalesce(sum(ns) FILTER (WHERE place <> 'decode'), 0) / 1e9 AS before_s
    FROM bill_lines l WHERE component IN ('preempted', 'recompute', 'queue_kv') GROUP BY l.id
),
hits AS (
    SELECT k.klass, k.metric, count(*) AS hit
    FROM class_rows k JOIN joined j ON j.klass = k.klass JOIN kv_time t ON t.id = j.rid
    WHERE CASE k.metric WHEN 'TTFT' THEN t.before_s WHEN 'E2E' THEN t.whole_s
                        WHEN 'TPOT' THEN (t.whole_s - t.before_s) / greatest(j.output_tokens - 1, 1) END >= $slowdown * k.p50_s
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
       coalesce(s.queued_s, 0) AS queued_s, CASE WHEN k.metric <> 'ITL' THEN coalesce(i.hit, 0) END AS hit,
       v.*, t.*, q.*, c.*, r.*, f.*, h.holder
FROM class_rows k
LEFT JOIN spent s ON s.klass = k.klass AND s.metric = k.metric
LEFT JOIN hits i ON i.klass = k.klass AND i.metric = k.metric
CROSS JOIN victims v CROSS JOIN stalls t CROSS JOIN squeeze q CROSS JOIN counted c CROSS JOIN reported r CROSS JOIN limits f
LEFT JOIN holders h ON true
ORDER BY k.klass, k.metric
