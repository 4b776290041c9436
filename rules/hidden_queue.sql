-- One row per class and metric up to the first token or the end, with the part of its excess between the API server's having a request
-- and the engine's queueing it; beside it what conservation says was hidden.
WITH parts AS (
    SELECT klass, metric, sum(excess_s) AS frontend_s FROM excess WHERE component = 'frontend' GROUP BY ALL
),
waits AS (
    SELECT j.instance, l.id, sum(l.ns) / 1e9 AS s, any_value(j.prompt_tokens) AS prompt_tokens
    FROM bill_lines l JOIN joined j ON j.rid = l.id WHERE l.component = 'frontend' GROUP BY ALL
),
usual AS (SELECT median(s) AS usual_wait_s FROM waits),
judged AS (
    SELECT *, s >= (SELECT CASE WHEN count(*) > 0 THEN $counted_long ELSE $long END FROM hidden) AS is_long FROM waits
),
long AS (
    SELECT count(*) FILTER (WHERE is_long) AS long_waits, sum(s) FILTER (WHERE is_long) AS long_s, max(s) AS longest_s,
           corr(s, prompt_tokens) AS by_prompt, mode(instance) FILTER (WHERE is_long) AS instance,
           count(DISTINCT instance) FILTER (WHERE is_long) AS instances, count(*) AS waits
    FROM judged
),
counted AS (
    SELECT sum(hidden_s) AS hidden_s, max(most_hidden) AS most_hidden, max(most_known) AS most_known, max(known_then) AS known_then,
           min(first_ns) AS first_ns, max(last_ns) AS last_ns, count(*) AS counted_on
    FROM hidden
),
phases AS (
    SELECT count(*) FILTER (WHERE queue_ns IS NOT NULL AND prefill_ns IS NOT NULL) AS with_phases FROM joined WHERE billed
)
SELECT k.klass, k.metric, k.n, k.p50_s, k.excess_s, k.tail_rule, k.slo_broken, coalesce(p.frontend_s, 0) AS frontend_s,
       u.*, l.*, c.*, f.*
FROM class_rows k LEFT JOIN parts p USING (klass, metric)
CROSS JOIN usual u CROSS JOIN long l CROSS JOIN counted c CROSS JOIN phases f
WHERE k.metric IN ('TTFT', 'E2E') AND k.tail_rule IS NOT NULL
ORDER BY k.klass, k.metric
