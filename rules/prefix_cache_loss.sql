-- One row per class that has a TTFT tail, and group of requests (instance, tenant, class) whose prompts stopped being found in
-- the prefix cache: what computing them again cost the class, beside how its slow requests compare with good times.
WITH valued AS (
    SELECT j.rid, j.klass, j.ttft_ns / 1e9 AS ttft_s, c.before_s, c.good
    FROM joined j JOIN cache_cost c ON c.id = j.rid WHERE j.billed AND j.ttft_ns >= 0
),
tails AS (
    SELECT v.klass, count(*) AS tail_n, avg(v.ttft_s) AS tail_s, avg(v.before_s) AS lost_s
    FROM members m JOIN valued v ON v.rid = m.id WHERE m.metric = 'TTFT' AND m.tail GROUP BY v.klass
),
usual AS (
    SELECT klass, count(*) AS known, median(ttft_s) FILTER (WHERE good) AS good_p50_s, median(ttft_s) FILTER (WHERE NOT good) AS bad_p50_s,
           count(*) FILTER (WHERE NOT good) AS bad_n, median(ttft_s) AS p50_s
    FROM valued GROUP BY klass
),
hits AS (
    SELECT v.klass, count(*) AS hit FROM valued v JOIN usual u USING (klass) WHERE v.before_s >= $slowdown * u.good_p50_s GROUP BY v.klass
),
worst AS (
    SELECT *, count(*) OVER () AS groups, sum(lost_tokens) OVER () AS all_lost, count(*) FILTER (WHERE bad_requests > 0 AND NOT others_came) OVER () AS bad_groups,
           count(*) FILTER (WHERE others_came) OVER () AS came_groups,
           count(DISTINCT instance) OVER () AS instances,
           (SELECT count(DISTINCT g.instance) FROM cache_groups g WHERE g.lost_tokens > 0) AS bad_instances
    FROM cache_groups ORDER BY lost_tokens DESC, instance, tenant, klass LIMIT 1
),
told AS (SELECT count(*) AS known_requests, count(*) FILTER (WHERE cached > 0) AS hit_requests FROM cache_known),
-- /metrics: what was found of what was asked for, between scrapes.
scrapes AS (
    SELECT m.instance, m.engine, s.name, m.time_ns, m.value - lag(m.value) OVER (PARTITION BY m.instance, m.series ORDER BY m.time_ns) AS grown
    FROM metrics m JOIN (SELECT DISTINCT series, name FROM series
                         WHERE name IN ('vllm:prefix_cache_hits_total', 'vllm:prefix_cache_queries_total')) s USING (series)
),
middle AS (SELECT (min(time_ns) + max(time_ns)) / 2 AS at_ns FROM scrapes),
counted AS (
    SELECT sum(grown) FILTER (WHERE name LIKE '%hits%' AND time_ns <= at_ns) / nullif(sum(grown) FILTER (WHERE name LIKE '%queries%' AND time_ns <= at_ns), 0) AS rate_before,
           sum(grown) FILTER (WHERE name LIKE '%hits%' AND time_ns > at_ns) / nullif(sum(grown) FILTER (WHERE name LIKE '%queries%' AND time_ns > at_ns), 0) AS rate_after
    FROM scrapes CROSS JOIN middle WHERE grown >= 0
),
restarts AS (
    SELECT count(*) AS restarts FROM events e JOIN worst w ON e.kind = 'restart' AND e.time_ns BETWEEN w.first_ns - 60000000000 AND w.first_ns + 5000000000
)
SELECT k.klass, k.metric, k.excess_s, k.tail_rule, k.slo_broken, t.tail_n, t.tail_s, coalesce(t.lost_s, 0) AS lost_s,
       u.known, u.good_p50_s, u.bad_p50_s, u.bad_n, coalesce(h.hit, 0) AS hit,
       w.* EXCLUDE (klass), w.klass AS group_klass, d.known_requests, d.hit_requests, c.rate_before, c.rate_after, r.restarts,
       (SELECT bool_or(regexp_extract(detail, 'enable_prefix_caching=(\w+)', 1) = 'False') FROM events WHERE kind = 'config') AS disabled,
       (SELECT max(max_num_seqs) FROM configured) AS max_num_seqs
FROM class_rows k
LEFT JOIN tails t ON t.klass = k.klass
LEFT JOIN usual u ON u.klass = k.klass
LEFT JOIN hits h ON h.klass = k.klass
LEFT JOIN worst w ON true
CROSS JOIN told d CROSS JOIN counted c CROSS JOIN restarts r
WHERE k.tail_rule IS NOT NULL AND k.metric = 'TTFT'
ORDER BY k.klass
