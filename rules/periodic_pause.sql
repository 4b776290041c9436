-- One row per long step of engines that step together (a lane), with what it costs each class's tail; one for a lane without any.
WITH sizes AS (SELECT lane, instance, engine, count(k) AS own FROM step_costs GROUP BY lane, instance, engine),
-- Of engines in step one has most steps of its own: its time is everybody's.
leads AS (
    SELECT lane, instance, engine, list(engine) OVER (PARTITION BY lane) AS engines
    FROM sizes QUALIFY row_number() OVER (PARTITION BY lane ORDER BY own DESC, engine) = 1
),
lead_steps AS (
    SELECT c.* FROM step_costs c JOIN leads l ON l.lane = c.lane AND l.engine IS NOT DISTINCT FROM c.engine
),
lanes AS (
    SELECT lane, any_value(usable) AS usable, count(*) AS steps, sum(tile_s) AS busy_s, median(tile_s) AS usual_s,
           max(error_s) AS error_s, min(start_ns) AS first_ns, max(end_ns) AS last_ns,
           sum(batch_s) FILTER (WHERE prefill_tokens > 0) / nullif(sum(batch_s), 0) AS prefill_share
    FROM lead_steps GROUP BY lane
),
long_steps AS (
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
