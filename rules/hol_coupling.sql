-- One row per class and metric that has a tail and, where there is one, culprit class of much longer prompts: the part of the victim's excess that the culprit's prefill
-- caused in the steps the victim shared with it or waited behind (compute), by taking the budget it queued for (admission), and in the
-- steps of its own prefill (shared).
WITH blamed AS (
    SELECT klass AS victim, culprit, metric, sum(excess_s) AS blamed_s, sum(tail_s) AS tail_s,
           coalesce(sum(excess_s) FILTER (WHERE component IN ('others_prefill_before', 'others_prefill_in_decode')), 0) AS compute_s,
           coalesce(sum(excess_s) FILTER (WHERE component = 'queue_budget'), 0) AS admission_s,
           coalesce(sum(excess_s) FILTER (WHERE component = 'others_prefill_in_prefill'), 0) AS shared_s
    FROM excess
    WHERE component IN ('others_prefill_before', 'queue_budget', 'others_prefill_in_prefill', 'others_prefill_in_decode')
      AND culprit IS NOT NULL
    GROUP BY ALL
),
-- The step of all engines that prefill made longest, as the cost model has it.
chunk AS (
    SELECT tokens AS chunk_tokens, base_s AS chunk_base_s, prefill_s AS chunk_prefill_s FROM chunks
    ORDER BY prefill_s DESC, instance, engine LIMIT 1
)
SELECT
    c.*,
    k.metric, k.observer, k.p50_s, k.excess_s, k.tail_rule, k.slo_broken,
    coalesce(b.blamed_s, 0) AS blamed_s, b.tail_s, b.compute_s, b.admission_s, b.shared_s,
    d.window_s, d.n_eff AS dose_n_eff, d.dosed, d.rho, d.rho_low, d.rho_high, d.median_tokens, d.none_s, d.little_s, d.much_s,
    d.during, d.during_s, d.after, d.after_s, d.other_s,
    h.chunk_tokens, h.chunk_base_s, h.chunk_prefill_s,
    (SELECT median(prompt_tokens) FROM joined WHERE klass = c.culprit AND billed) AS culprit_tokens,
    (SELECT median(ttft_ns) / 1e9 FROM joined WHERE klass = c.culprit AND billed) AS culprit_ttft_s,
    (SELECT max(max_num_batched_tokens) FROM configured) AS budget,
    -- Which instances, where there are several.
    (SELECT string_agg(DISTINCT instance, ', ' ORDER BY instance) FROM joined WHERE klass = c.culprit AND billed
     HAVING (SELECT count(DISTINCT instance) FROM joined WHERE billed) > 1) AS culprit_instances,
    (SELECT max(prompt_tokens) FROM joined WHERE klass = c.culprit AND billed) AS culprit_longest,
    (SELECT max(tile_ns) / 1e9 FROM steps s WHERE prefill_tokens > 0 AND s.end_ns BETWEEN c.first_ns AND c.last_ns) AS longest_step_s,
    (SELECT median(tile_ns) / 1e9 FROM steps WHERE prefill_tokens = 0) AS usual_step_s,
    (SELECT count(*) > 0 AND count(prompt_tokens) = 0 FROM joined WHERE billed) AS unsized,
    coalesce(c.timed, true) AND steps_cover_requests() AS has_steps
FROM class_rows k
LEFT JOIN coupling c ON c.victim = k.klass AND c.prompt_ratio >= $size_ratio
LEFT JOIN blamed b ON b.victim = c.victim AND b.culprit = c.culprit AND b.metric = k.metric
LEFT JOIN doses d ON d.victim = c.victim AND d.culprit = c.culprit
LEFT JOIN chunk h ON true
WHERE k.tail_rule IS NOT NULL
ORDER BY c.victim, c.culprit, k.metric
