-- One row per priority that has lower ones, and metric: how long its slow requests waited behind lower ones, beside how slow
-- they were; and who the lower ones are. Lower numbers are served first.
WITH held AS (
    SELECT id, coalesce(sum(ns) FILTER (WHERE component <> 'preempted'), 0) AS held_ns,
           coalesce(sum(ns) FILTER (WHERE component = 'queue_budget'), 0) AS budget_ns,
           coalesce(sum(ns) FILTER (WHERE component = 'preempted'), 0) AS preempted_ns
    FROM held_up WHERE holder = 'lower priority' GROUP BY id
),
waits AS (
    SELECT w.id, w.level, w.queue_ns, w.behind_ns, w.overtaken, coalesce(h.held_ns, 0) AS held_ns,
           coalesce(h.budget_ns, 0) AS budget_ns, coalesce(h.preempted_ns, 0) AS preempted_ns,
           least(w.queue_ns, greatest(w.behind_ns, coalesce(h.held_ns, 0))) AS before_ns,
           j.klass, j.arrival_ns, j.ttft_ns, j.e2e_ns
    FROM waits_behind w JOIN joined j ON j.rid = w.id LEFT JOIN held h ON h.id = w.id
),
valued AS (
    SELECT *, 'TTFT' AS metric, ttft_ns AS value_ns, before_ns AS inverted_ns FROM waits
    UNION ALL
    SELECT *, 'E2E', e2e_ns, least(before_ns + preempted_ns, e2e_ns) FROM waits
),
ranked AS (
    SELECT *, row_number() OVER w AS place, count(*) OVER (PARTITION BY level, metric) AS n
    FROM valued WINDOW w AS (PARTITION BY level, metric ORDER BY value_ns, id)
),
placed AS (
    SELECT *, n - place < CASE WHEN n >= 1000 THEN n * 0.01 WHEN n >= 200 THEN n * 0.05 ELSE greatest(5, n * 0.1) END AS slow,
           place > 0.4 * n AND place <= 0.6 * n AS typical
    FROM ranked
),
levels AS (
    SELECT level, metric, any_value(n) AS n, median(value_ns) / 1e9 AS p50_s, count(*) FILTER (WHERE slow) AS slow_n,
           CASE WHEN any_value(n) >= 1000 THEN 'above p99' WHEN any_value(n) >= 200 THEN 'above p95'
                ELSE 'slowest ' || count(*) FILTER (WHERE slow) END AS tail_rule,
           (avg(value_ns) FILTER (WHERE slow) - median(value_ns)) / 1e9 AS excess_s,
           (avg(inverted_ns) FILTER (WHERE slow) - coalesce(avg(inverted_ns) FILTER (WHERE typical), 0)) / 1e9 AS inverted_s,
           avg(behind_ns) FILTER (WHERE slow) / 1e9 AS behind_s, avg(held_ns) FILTER (WHERE slow) / 1e9 AS held_s,
           avg(budget_ns) FILTER (WHERE slow) / 1e9 AS budget_s, avg(preempted_ns) FILTER (WHERE slow) / 1e9 AS preempted_s,
           count(*) FILTER (WHERE overtaken > 0) AS overtaken_requests, max(overtaken) AS most_overtaken,
           count(*) FILTER (WHERE preempted_ns > 0) AS preempted_requests,
           count(*) FILTER (WHERE queue_ns > 0) AS queued_requests,
           min(arrival_ns) FILTER (WHERE slow) AS first_ns, max(arrival_ns + e2e_ns) FILTER (WHERE slow) AS last_ns
    FROM placed GROUP BY level, metric
),
hits AS (
    SELECT v.level, v.metric, count(*) AS hit FROM valued v JOIN levels l ON l.level = v.level AND l.metric = v.metric
    WHERE v.inverted_ns / 1e9 >= $slowdown * l.p50_s GROUP BY ALL
),
-- What the same waits are in the excess of the classes that the requests are of.
spent AS (
    SELECT v.level, v.metric, m.klass, sum(m.before_weight * v.inverted_ns) / 1e9 AS class_s
    FROM members m JOIN valued v ON v.id = m.id AND v.metric = m.metric GROUP BY ALL
),
classes AS (
    SELECT s.level, s.metric, list({klass: s.klass, seconds: least(s.class_s, k.excess_s), slo_broken: k.slo_broken} ORDER BY s.klass) AS classes
    FROM spent s JOIN class_rows k ON k.klass = s.klass AND k.metric = s.metric WHERE s.class_s > 0 AND k.excess_s > 0 GROUP BY ALL
),
known AS (
    SELECT l.level, l.priority, j.klass, j.tenant, j.e2e_ns, j.prompt_tokens, j.output_tokens
    FROM joined j JOIN priority_levels l ON l.priority = coalesce(j.priority, 0) WHERE j.billed
),
own AS (
    SELECT level, min(priority) AS priority, max(priority) AS last_priority, mode(klass) AS klass,
           any_value(tenant) AS tenant, count(DISTINCT coalesce(tenant, '')) AS tenants FROM known GROUP BY level
),
lower_ones AS (
    SELECT o.level, count(*) AS lower_n, min(k.priority) AS lower_first, max(k.priority) AS lower_last,
           arg_max(k.klass, k.e2e_ns) AS lower_klass, any_value(k.tenant) AS lower_tenant,
           count(DISTINCT coalesce(k.tenant, '')) AS lower_tenants, median(k.output_tokens) AS lower_output,
           median(k.prompt_tokens) AS lower_prompt
    FROM own o JOIN known k ON k.level > o.level GROUP BY o.level
)
SELECT l.*, coalesce(h.hit, 0) AS hit, c.classes, o.priority, o.last_priority, o.klass, o.tenant, o.tenants, w.* EXCLUDE (level),
       (SELECT max(nullif(regexp_extract(detail, 'scheduling_policy=([a-z]+)', 1), '')) FROM events WHERE kind = 'config') AS policy,
       (SELECT max(max_num_seqs) FROM configured) AS max_num_seqs
FROM levels l
JOIN own o ON o.level = l.level
JOIN lower_ones w ON w.level = l.level
LEFT JOIN hits h ON h.level = l.level AND h.metric = l.metric
LEFT JOIN classes c ON c.level = l.level AND c.metric = l.metric
ORDER BY l.level, l.metric
