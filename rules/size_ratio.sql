-- One row per class and metric that has a tail, with the pool (instance) whose prompts differ most in size: what of the class's
-- excess is the prefill of classes whose prompts are $split times as long as the pool's median, where it is none of them.
WITH pools AS (
    SELECT instance, median(prompt_tokens) AS median_tokens, max(prompt_tokens) AS largest_tokens,
           max(prompt_tokens) / median(prompt_tokens) AS ratio
    FROM joined WHERE billed AND prompt_tokens > 0 GROUP BY instance
    QUALIFY row_number() OVER (ORDER BY ratio DESC, instance) = 1
),
classes AS (
    SELECT j.klass, median(prompt_tokens) AS size, count(*) AS requests, sum(prompt_tokens - coalesce(cached_tokens, 0)) AS computed_tokens,
           sum(output_tokens) AS output_tokens, min(prompt_tokens) AS shortest, max(prompt_tokens) AS longest
    FROM joined j WHERE billed AND prompt_tokens > 0 GROUP BY j.klass
),
long AS (SELECT c.* FROM classes c, pools p WHERE c.size >= $split * p.median_tokens),
work AS (
    SELECT sum(prefill_s) AS prefill_s, sum(prefill_s) FILTER (WHERE klass IN (SELECT klass FROM long)) AS long_prefill_s
    FROM class_work
),
busy AS (
    SELECT sum(busy_s) AS busy_s, max(span_s) AS span_s, sum(engines) AS engines
    FROM (SELECT any_value(busy_s) AS busy_s, any_value(span_s) AS span_s, any_value(engines) AS engines FROM class_work GROUP BY instance)
),
totals AS (
    SELECT sum(requests) AS requests, sum(computed_tokens) AS computed_tokens, sum(output_tokens) AS output_tokens,
           sum(requests) FILTER (WHERE klass IN (SELECT klass FROM long)) AS long_requests,
           sum(computed_tokens) FILTER (WHERE klass IN (SELECT klass FROM long)) AS long_computed_tokens,
           sum(output_tokens) FILTER (WHERE klass IN (SELECT klass FROM long)) AS long_output_tokens,
           min(shortest) FILTER (WHERE klass IN (SELECT klass FROM long)) AS long_from,
           string_agg(klass, ', ' ORDER BY size) FILTER (WHERE klass IN (SELECT klass FROM long)) AS long_classes
    FROM classes
),
tails AS (
    SELECT klass, metric, sum(tail_s) AS tail_s,
           sum(tail_s) FILTER (WHERE by_long) AS long_tail_s, sum(excess_s) FILTER (WHERE by_long) AS blamed_s
    FROM (
        SELECT *, culprit IN (SELECT klass FROM long) AND component IN
               ('others_prefill_before', 'queue_budget', 'others_prefill_in_prefill', 'others_prefill_in_decode') AS by_long
        FROM excess)
    GROUP BY klass, metric
)
SELECT
    k.klass, k.metric, k.p50_s, k.excess_s, k.tail_rule, k.slo_broken,
    p.instance, p.median_tokens, p.largest_tokens, p.ratio,
    -- Of ITL n counts gaps: how many requests they are of say the other metrics.
    (SELECT max(r.n) FROM class_rows r WHERE r.klass = k.klass AND r.metric <> 'ITL') AS class_requests,
    coalesce(t.blamed_s, 0) AS blamed_s, t.tail_s, coalesce(t.long_tail_s, 0) AS long_tail_s,
    o.*, w.*, b.*,
    steps_cover_requests() AS has_steps
FROM class_rows k
LEFT JOIN pools p ON true
LEFT JOIN tails t ON t.klass = k.klass AND t.metric = k.metric
CROSS JOIN totals o CROSS JOIN work w CROSS JOIN busy b
WHERE k.tail_rule IS NOT NULL AND k.klass NOT IN (SELECT klass FROM long)
ORDER BY k.klass, k.metric
