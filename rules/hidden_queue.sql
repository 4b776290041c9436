-- One row per class and metric up to the first token or the end, with the part of its excess between the API server's having a request
-- and the engine's queueing it; beside it what conservation says was hidden.
WITH parts AS (
    SELECT klass, metric, sum(excess_s) AS frontend_s FROM excess WHERE component = 'frontend' GROUP BY ALL
),
waits AS (
    SELECT j.instance, any_value(j.engine) AS engine, l.id, sum(l.ns) / 1e9 AS told_s, any_value(j.arrival_ns) AS arrival_ns,
           any_value(j.prompt_tokens) AS prompt_tokens
    FROM bill_lines l JOIN joined j ON j.rid = l.id WHERE l.component = 'frontend' GROUP BY ALL
),
usual AS (SELECT median(told_s) AS usual_wait_s, sum(told_s) FILTER (WHERE told_s >= $long) AS told_long_s, count(*) FILTER (WHERE told_s >= $long) AS told_long FROM waits),
-- Instants at which a step of the engine had ended: it reads its input then.
ended AS (
    SELECT DISTINCT coalesce(instance, '') AS instance, coalesce(engine, -1) AS engine, at_ns
    FROM (SELECT instance, engine, unnest([arrival_ns + ttft_ns, arrival_ns + e2e_ns]) AS at_ns FROM joined WHERE engine_saw)
    WHERE at_ns IS NOT NULL
),
-- Without steps a request may have waited for the one that ran when it came: only what is left after it was handed over, which takes
-- milliseconds, and a step had ended is known to be the API server's.
waited AS (
    SELECT w.*, CASE WHEN (SELECT count(*) > 0 FROM hidden) THEN told_s
                     ELSE coalesce(greatest(0.0, told_s - (e.at_ns - w.arrival_ns) / 1e9), 0.0) END AS s
    FROM waits w ASOF LEFT JOIN ended e
      ON coalesce(w.instance, '') = e.instance AND coalesce(w.engine, -1) = e.engine AND w.arrival_ns + 10_000_000 <= e.at_ns
),
judged AS (
    SELECT *, s >= (SELECT CASE WHEN count(*) > 0 THEN $counted_long ELSE $long END FROM hidden) AS is_long FROM waited
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
SELECT k.klass, k.metric, k.n, k.p50_s, k.excess_s, k.tail_rule, k.slo_broken, coalesce(p.frontend_s, 0) AS told_s,
       coalesce(p.frontend_s, 0) * CASE WHEN c.counted_on > 0 THEN 1 ELSE least(1, coalesce(l.long_s / u.told_long_s, 0)) END AS frontend_s,
       u.*, l.*, c.*, f.*
FROM class_rows k LEFT JOIN parts p USING (klass, metric)
CROSS JOIN usual u CROSS JOIN long l CROSS JOIN counted c CROSS JOIN phases f
WHERE k.metric IN ('TTFT', 'E2E') AND k.tail_rule IS NOT NULL
ORDER BY k.klass, k.metric
