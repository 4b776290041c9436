-- One row per long step of engines that step together (a lane), with what it costs each class's tail; one for a lane without any.
WITH long_steps AS (
    SELECT lane, round, coalesce(iteration, round) AS step, iteration IS NOT NULL AS numbered, end_ns, start_ns, beyond_s,
           prefill_tokens, reason
    FROM lead_steps
    WHERE usable AND tile_s > 0 AND beyond_s >= $times * (batch_s + ranks_s)
    QUALIFY row_number() OVER (PARTITION BY lane ORDER BY beyond_s DESC, round) <= $most
),
hurt AS (FROM hurt_by('long_steps'))
SELECT
    l.*, e.instance, e.engine, e.engines, o.* EXCLUDE (lane), h.hurt,
    (SELECT count(DISTINCT instance) FROM step_costs) AS instances,
    (SELECT list({klass: klass, metric: metric, excess_s: excess_s, p50_s: p50_s, slo_broken: slo_broken} ORDER BY klass, metric)
     FROM class_rows WHERE excess_s > 0) AS classes
FROM lanes l JOIN leads e USING (lane)
LEFT JOIN long_steps o USING (lane)
LEFT JOIN hurt h ON h.lane = o.lane AND h.round = o.round
ORDER BY l.lane, o.round
