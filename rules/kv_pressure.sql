-- One row per class and metric with the part of its excess that it queued for KV cache; beside it how full the cache was, when, and who held it.
WITH span AS (SELECT min(arrival_ns) AS first_ns, max(arrival_ns + e2e_ns) AS last_ns FROM joined WHERE billed),
usage AS (
    SELECT count(kv_usage) AS usage_steps, max(kv_usage) AS most_used, max(waiting) AS most_waiting,
           count(DISTINCT coalesce(instance, '') || '/' || coalesce(engine, -1)) AS engines,
           coalesce(sum(tile_ns) FILTER (WHERE kv_usage >= $full), 0) / 1e9 AS full_s,
           coalesce(sum(tile_ns) FILTER (WHERE kv_usage >= $full AND waiting > 0), 0) / 1e9 AS full_waiting_s,
           -- Somebody waited, nobody was admitted, and the cache was not full: the first in the queue was too large for what was free.
           coalesce(sum(tile_ns) FILTER (WHERE kv_usage < $full AND waiting > 0 AND prefill_tokens = 0), 0) / 1e9 AS head_s,
           median(kv_usage) FILTER (WHERE kv_usage < $full AND waiting > 0 AND prefill_tokens = 0) AS head_usage,
           min(start_ns) FILTER (WHERE waiting > 0 AND (kv_usage >= $full OR prefill_tokens = 0)) AS first_ns,
           max(end_ns) FILTER (WHERE waiting > 0 AND (kv_usage >= $full OR prefill_tokens = 0)) AS last_ns,
           median(running) FILTER (WHERE kv_usage >= $full) AS running_when_full,
           -- What ran and what waited, were all of it as large: how much cache that would have taken.
           quantile_cont(kv_usage * (running + waiting) / running, 0.99) FILTER (WHERE waiting > 0 AND running > 0 AND kv_usage >= $full) AS wanted
    FROM steps, span WHERE end_ns BETWEEN span.first_ns AND span.last_ns
),
-- How early the cache tells: it was full, and then requests began to wait.
ordered AS (
    SELECT instance, engine, k, start_ns, kv_usage >= $full AS is_full, waiting > 0 AS waits,
           lag(kv_usage >= $full) OVER e AS was_full, lag(waiting > 0) OVER e AS waited
    FROM steps WINDOW e AS (PARTITION BY instance, engine ORDER BY k)
),
filled AS (
    SELECT *, max(start_ns) FILTER (WHERE is_full AND NOT coalesce(was_full, false)) OVER (PARTITION BY instance, engine ORDER BY k ROWS UNBOUNDED PRECEDING) AS since_ns
    FROM ordered
),
led AS (
    SELECT median(start_ns - since_ns) / 1e9 AS lead_s, count(*) AS episodes
    FROM (FROM filled WHERE is_full AND waits AND NOT coalesce(waited, false)
          QUALIFY row_number() OVER (PARTITION BY instance, engine, since_ns ORDER BY k) = 1)
),
-- Where it was heading: the mean use of each part of the time.
parts AS (
    SELECT width_bucket AS part, avg(kv_usage) AS used, avg(end_ns) AS time_ns
    FROM (SELECT kv_usage, end_ns, least(floor((end_ns - span.first_ns) * $parts / (span.last_ns - span.first_ns + 1)), $parts - 1) AS width_bucket
          FROM steps, span WHERE end_ns BETWEEN span.first_ns AND span.last_ns AND kv_usage IS NOT NULL)
    GROUP BY part
),
trend AS (SELECT list({time_ns: time_ns, used: used} ORDER BY part) AS parts FROM parts),
holders AS (
    SELECT culprit AS holder, sum(ns) / 1e9 AS held_s, sum(sum(ns)) OVER () / 1e9 AS all_held_s FROM bill_lines
    WHERE component = 'queue_kv' AND culprit IS NOT NULL GROUP BY culprit ORDER BY held_s DESC, culprit LIMIT 1
),
-- Tokens in the cache times the time they were there, while requests waited for it.
tenants AS (
    SELECT coalesce(tenant, 'unknown') AS tenant,
           sum((coalesce(prompt_tokens, 0) + coalesce(output_tokens, 0) / 2.0)
               * greatest(least(arrival_ns + e2e_ns, u.last_ns) - greatest(arrival_ns + ttft_ns - coalesce(prefill_ns, 0), u.first_ns), 0) / 1e9) AS token_seconds
    FROM joined, usage u WHERE billed AND u.first_ns IS NOT NULL GROUP BY 1
),
tenant_holder AS (
    SELECT tenant, token_seconds / nullif(sum(token_seconds) OVER (), 0) AS tenant_share, count(*) OVER () AS tenants
    FROM tenants ORDER BY token_seconds DESC, tenant LIMIT 1
),
counted AS (SELECT sum(increase) AS counter_increase FROM counters WHERE concept = 'preemptions'),
-- Without steps, gauges.
gauged AS (
    SELECT count(*) FILTER (WHERE n.name = 'vllm:kv_cache_usage_perc') AS samples,
           count(*) FILTER (WHERE n.name = 'vllm:kv_cache_usage_perc' AND m.value >= $full) AS full_samples,
           max(m.value) FILTER (WHERE n.name = 'vllm:num_requests_waiting') AS gauge_waiting
    FROM metrics m JOIN (SELECT DISTINCT series, name FROM series WHERE name IN ('vllm:kv_cache_usage_perc', 'vllm:num_requests_waiting')) n USING (series)
),
queued AS (
    SELECT k.klass, sum(l.ns) / 1e9 AS waited_s, count(DISTINCT l.id) AS waited_requests, max(j.prompt_tokens) AS longest_prompt
    FROM bill_lines l JOIN joined j ON j.rid = l.id JOIN (SELECT DISTINCT klass FROM class_rows) k ON k.klass = j.klass
    WHERE l.component = 'queue_kv' GROUP BY k.klass
)
SELECT k.*, u.* EXCLUDE (first_ns, last_ns), u.first_ns, u.last_ns, d.lead_s, d.episodes, t.parts, h.holder, h.held_s, h.all_held_s,
       x.tenant, x.tenant_share, x.tenants, c.counter_increase, g.samples, g.full_samples, g.gauge_waiting,
       q.waited_s, q.waited_requests, q.longest_prompt,
       (SELECT max(max_num_seqs) FROM configured) AS max_num_seqs
FROM kv_tails k
CROSS JOIN usage u CROSS JOIN led d CROSS JOIN trend t CROSS JOIN counted c CROSS JOIN gauged g
LEFT JOIN holders h ON true LEFT JOIN tenant_holder x ON true
LEFT JOIN queued q ON q.klass = k.klass
ORDER BY k.klass, k.metric
