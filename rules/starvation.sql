-- One row per class and metric that has a tail: the part of its excess in which its requests ran and were given no tokens.
WITH spent AS (
    SELECT m.klass, m.metric,
           sum(CASE WHEN o.place = 'decode' THEN m.decode_weight ELSE m.before_weight END * o.ns) FILTER (WHERE o.basis <> 'unsure') / 1e9 AS out_s,
           sum(CASE WHEN o.place = 'decode' THEN m.decode_weight ELSE m.before_weight END * o.ns) / 1e9 AS perhaps_s
    FROM members m JOIN left_out o ON o.id = m.id WHERE m.metric <> 'ITL' GROUP BY ALL
    UNION ALL
    SELECT m.klass, m.metric, sum(m.decode_weight * g.ns) FILTER (WHERE o.basis <> 'unsure') / 1e9, sum(m.decode_weight * g.ns) / 1e9
    FROM members m JOIN left_out_gaps g ON g.id = m.id JOIN left_out o ON o.id = g.rid AND o.place = 'decode'
    WHERE m.metric = 'ITL' GROUP BY ALL
),
hits AS (
    SELECT j.klass, count(DISTINCT o.id) AS hit FROM left_out o JOIN joined j ON j.rid = o.id GROUP BY j.klass
),
happened AS (
    SELECT count(DISTINCT id) AS requests, count(DISTINCT id) FILTER (WHERE basis = 'unsure') AS unsure, sum(missed) AS steps,
           max(missed) AS most_steps, sum(ns) / 1e9 AS seconds, max(ns) / 1e9 AS longest_s,
           count(DISTINCT id) FILTER (WHERE place = 'prefill') AS in_prefill, bool_or(basis = 'schedule') AS measured,
           avg(o.full) AS used_up, min(start_ns) AS first_ns, max(end_ns) AS last_ns
    FROM left_out o
),
culprits AS (
    -- Where the budget was used up meanwhile: the class of the most prompt tokens computed at that time.
    SELECT arg_max(klass, tokens) AS ahead FROM (
        SELECT j.klass, sum(j.prompt_tokens - coalesce(j.cached_tokens, 0)) AS tokens FROM joined j CROSS JOIN happened h
        WHERE j.billed AND j.arrival_ns <= h.last_ns AND j.arrival_ns + j.ttft_ns >= h.first_ns GROUP BY j.klass)
),
places AS (
    SELECT string_agg(DISTINCT j.instance || CASE WHEN j.engine IS NULL THEN '' ELSE '/' || j.engine END, ', ') AS engines,
           any_value(j.engine) AS engine, any_value(j.instance) AS instance,
           (SELECT count(DISTINCT instance) FROM joined WHERE billed) AS instances,
           count(DISTINCT (j.instance, j.engine)) AS engine_count
    FROM left_out o JOIN joined j ON j.rid = o.id
)
SELECT k.klass, k.metric, k.n, k.p50_s, k.excess_s, k.tail_rule, k.slo_broken,
       coalesce(s.out_s, 0) AS out_s, coalesce(s.perhaps_s, 0) AS perhaps_s, coalesce(i.hit, 0) AS hit,
       h.*, c.ahead, p.*, n.judged,
       (SELECT max(max_num_batched_tokens) FROM configured) AS budget,
       (SELECT sum(increase) FROM counters WHERE concept = 'preemptions') AS counted
FROM class_rows k
LEFT JOIN spent s ON s.klass = k.klass AND s.metric = k.metric
LEFT JOIN hits i ON i.klass = k.klass
CROSS JOIN happened h CROSS JOIN culprits c CROSS JOIN places p CROSS JOIN left_out_known n
WHERE k.tail_rule IS NOT NULL
ORDER BY k.klass, k.metric
