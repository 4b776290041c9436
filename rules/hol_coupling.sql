-- One row per class and metric that has a tail and, where there is one, culprit class of much longer prompts: the part of the victim's excess that the culprit's prefill
-- caused in the steps the victim shared with it or waited behind.
WITH blamed AS (
    SELECT klass AS victim, culprit, metric, sum(excess_s) AS blamed_s, sum(tail_s) AS tail_s
    FROM excess
    WHERE component IN ('others_prefill_before', 'queue_budget', 'others_prefill_in_prefill', 'others_prefill_in_decode')
      AND culprit IS NOT NULL
    GROUP BY ALL
)
SELECT
    c.*,
    k.metric, k.observer, k.p50_s, k.excess_s, k.tail_rule, k.slo_broken,
    coalesce(b.blamed_s, 0) AS blamed_s, b.tail_s,
    (SELECT max(max_num_batched_tokens) FROM configured) AS budget,
    -- Which instances, where there are several.
    (SELECT string_agg(DISTINCT instance, ', ' ORDER BY instance) FROM joined WHERE klass = c.culprit AND billed
     HAVING (SELECT count(DISTINCT instance) FROM joined WHERE billed) > 1) AS culprit_instances,
    (SELECT max(prompt_tokens) FROM joined WHERE klass = c.culprit AND billed) AS culprit_longest,
    (SELECT max(tile_ns) / 1e9 FROM steps s WHERE prefill_tokens > 0 AND s.end_ns BETWEEN c.first_ns AND c.last_ns) AS longest_step_s,
    (SELECT median(tile_ns) / 1e9 FROM steps WHERE prefill_tokens = 0) AS usual_step_s,
    -- Steps that do not cover the requests (another zone, another time) say nothing of them.
    coalesce((SELECT any_value(matched >= 0.5 * total) FROM coverage WHERE "join" = 'request → iterations' AND total > 0), false) AS has_steps
FROM class_rows k
LEFT JOIN coupling c ON c.victim = k.klass AND c.prompt_ratio >= $size_ratio
LEFT JOIN blamed b ON b.victim = c.victim AND b.culprit = c.culprit AND b.metric = k.metric
WHERE k.tail_rule IS NOT NULL
ORDER BY c.victim, c.culprit, k.metric
