-- One row per class and metric that has a tail: the part of its excess that it queued for slots or KV cache, the part of that
-- which long answers held meanwhile, and beside it who they were and what they held of all slots while somebody queued.
WITH waited AS (
    SELECT id, component, sum(ns) AS long_ns FROM held_up WHERE holder = 'long answers' GROUP BY ALL
),
spent AS (
    SELECT m.klass, m.metric,
           sum(m.before_weight * w.long_ns) / 1e9 AS long_s,
           coalesce(sum(m.before_weight * w.long_ns) FILTER (WHERE w.component = 'queue_slots'), 0) / 1e9 AS long_slots_s
    FROM members m JOIN waited w ON w.id = m.id WHERE m.metric <> 'ITL' GROUP BY ALL
),
queued AS (
    SELECT klass, metric, sum(excess_s) AS queued_s FROM excess WHERE component IN ('queue_slots', 'queue_kv') GROUP BY ALL
),
hits AS (
    SELECT j.klass, count(*) AS hit
    FROM joined j JOIN (SELECT id, sum(long_ns) / 1e9 AS long_s FROM waited GROUP BY id) w ON w.id = j.rid
    JOIN class_rows k ON k.klass = j.klass AND k.metric = 'TTFT' WHERE w.long_s >= $slowdown * k.p50_s GROUP BY j.klass
),
totals AS (
    SELECT sum(long.ns) / 1e9 AS long_wait_s, sum(long.waited_ns) / 1e9 AS wait_s, count(DISTINCT long.id) AS waiters,
           min(j.arrival_ns) AS first_ns, max(j.arrival_ns + j.ttft_ns) AS last_ns
    FROM held_up long JOIN joined j ON j.rid = long.id WHERE long.holder = 'long answers'
),
writers AS (
    SELECT j.klass AS holder, count(*) AS answers, sum(j.output_tokens) AS tokens, any_value(j.tenant) AS tenant,
           count(DISTINCT coalesce(j.tenant, '')) AS tenants
    FROM joined j CROSS JOIN answers a WHERE j.billed AND j.output_tokens >= a.long_from GROUP BY j.klass
),
chief AS (SELECT * FROM writers ORDER BY tokens DESC, holder LIMIT 1),
everyone AS (
    SELECT count(*) FILTER (WHERE output_tokens >= a.long_from) AS long_answers,
           median(output_tokens) FILTER (WHERE output_tokens >= a.long_from) AS long_tokens,
           sum(e2e_ns - ttft_ns) FILTER (WHERE output_tokens >= a.long_from) / nullif(sum(e2e_ns - ttft_ns), 0) AS long_share,
           (quantile_cont(arrival_ns, 0.9) FILTER (WHERE output_tokens >= a.long_from)
            - quantile_cont(arrival_ns, 0.1) FILTER (WHERE output_tokens >= a.long_from)) / 1e9 AS long_within_s,
           median(e2e_ns) FILTER (WHERE output_tokens >= a.long_from) / 1e9 AS long_e2e_s,
           count(*) AS requests
    FROM joined CROSS JOIN answers a WHERE billed
),
busy AS (
    SELECT median(s.kv_usage) AS kv_usage, max(s.running) AS running, max(s.waiting) AS waiting,
           count(*) FILTER (WHERE s.waiting > 0) AS steps
    FROM steps s CROSS JOIN totals t WHERE s.waiting > 0 AND s.end_ns BETWEEN t.first_ns AND t.last_ns
),
limits AS (SELECT max(max_num_seqs) AS max_num_seqs FROM configured)
SELECT k.klass, k.metric, k.n, k.p50_s, k.excess_s, k.tail_rule, k.slo_broken,
       coalesce(s.long_s, 0) AS long_s, coalesce(s.long_slots_s, 0) AS long_slots_s, coalesce(q.queued_s, 0) AS queued_s,
       coalesce(h.hit, 0) AS hit, a.median_tokens, a.long_from, a.n AS known_answers, c.holder, c.tenant, c.tenants,
       c.answers AS holder_answers, t.*, e.*, b.*, l.*,
       steps_cover_requests() AS has_steps
FROM class_rows k
LEFT JOIN spent s ON s.klass = k.klass AND s.metric = k.metric
LEFT JOIN queued q ON q.klass = k.klass AND q.metric = k.metric
LEFT JOIN hits h ON h.klass = k.klass
CROSS JOIN totals t CROSS JOIN everyone e CROSS JOIN busy b CROSS JOIN limits l
LEFT JOIN answers a ON true
LEFT JOIN chief c ON true
WHERE k.tail_rule IS NOT NULL AND k.metric IN ('TTFT', 'E2E')
ORDER BY k.klass, k.metric
