-- One row per class and metric with the part of its excess spent preempted, in steps that computed again what a preemption
-- threw away, or queued for KV cache meanwhile; beside it what happened to all requests, and when.
WITH victims AS (
    SELECT
        sum(preemptions) AS preemptions,
        max(preemptions) AS most,
        count(*) FILTER (WHERE preemptions = 1) AS once,
        min(arrival_ns) FILTER (WHERE preemptions > 0) AS first_ns,
        max(arrival_ns + e2e_ns) FILTER (WHERE preemptions > 0) AS last_ns,
        -- At the least a victim computes its prompt again each time, at the most also its answer.
        sum(preemptions * (coalesce(prompt_tokens, 0) + coalesce(output_tokens, 0) / 2)) FILTER (WHERE preemptions > 0) AS lost_tokens,
        sum(coalesce(prompt_tokens - coalesce(cached_tokens, 0), 0) + coalesce(output_tokens, 0)) AS useful_tokens
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
-- Storms by how many were thrown out; what is told late may be only a part, what is seen early another.
hard AS (
    SELECT *, greatest(told, early) AS preempted, (last_ns - first_ns) / 1e9 AS seconds FROM storms
    QUALIFY row_number() OVER (ORDER BY greatest(told, early) DESC, first_ns) <= $windows
),
timed AS (
    SELECT list({instance: instance, engine: engine, first_ns: first_ns, seconds: seconds, preempted: preempted, told: told, early: early,
                 untold: untold, untold_s: untold_s, finished: finished, came: came, again_tokens: again_tokens,
                 tokens: tokens, over_s: over_s} ORDER BY first_ns) AS storms,
           count(*) AS storm_count
    FROM hard
),
reported AS (SELECT sum(preempted) AS step_preemptions FROM steps),
seen AS (SELECT sum(early) AS early_preemptions, sum(over_s) AS over_s, sum(came) AS came, sum(again_tokens) AS again_tokens, sum(tokens) AS tokens FROM storms),
limits AS (SELECT max(max_num_seqs) AS max_num_seqs FROM configured),
holders AS (
    SELECT culprit AS holder, sum(ns) / 1e9 AS held_s FROM bill_lines
    WHERE component = 'preempted' AND culprit IS NOT NULL GROUP BY culprit ORDER BY held_s DESC, culprit LIMIT 1
)
SELECT k.*, v.*, t.*, q.*, c.*, r.*, f.*, w.*, e.*, h.holder, (SELECT count(DISTINCT coalesce(instance, '') || '/' || coalesce(engine, -1)) FROM steps) AS engines
FROM kv_tails k
CROSS JOIN victims v CROSS JOIN stalls t CROSS JOIN squeeze q CROSS JOIN counted c CROSS JOIN reported r CROSS JOIN limits f
CROSS JOIN timed w CROSS JOIN seen e
LEFT JOIN holders h ON true
ORDER BY k.klass, k.metric
