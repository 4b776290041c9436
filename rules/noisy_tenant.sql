-- One row per tenant, and of those that cost others most one per class of others' requests and metric: what of the excess
-- of these requests is due to the tenant.
SELECT
    t.*,
    b.klass, b.metric, b.n, b.p50_s, b.tail_rule, b.tail_n, b.excess_s,
    b.prefill_before + b.prefill_beside + b.prefill_in_decode AS prefill_s, b.budget AS budget_s, b.slots AS slots_s,
    b.kv + b.preempted AS kv_s, b.blamed_s, b.suspect_tail_s, b.rest_tail_s, b.suspect_mean_s, b.scarce_mean_s, b.mean_s, b.prompt_ratio,
    b.class_s, b.spells, b.victims, b.first_ns, b.last_ns,
    coalesce(k.slo_broken, false) AS slo_broken,
    (SELECT sum(prefill_tokens) FROM tenants) AS all_prefill_tokens,
    (SELECT sum(mean_tokens) FROM tenants) AS all_mean_tokens,
    (SELECT max(max_num_seqs) FROM configured) AS max_num_seqs,
    (SELECT max(max_num_batched_tokens) FROM configured) AS budget,
    steps_cover_requests() AS has_steps
FROM tenants t
LEFT JOIN tenant_blame b ON b.culprit = t.tenant
LEFT JOIN class_rows k ON k.klass = b.klass AND k.metric = b.metric
ORDER BY t.tenant, b.klass, b.metric
