-- One row per set of engines that step together (a lane), with what the prefill of each costs the others and every class's tail; one row without a lane where no engines do.
WITH engines AS (
    SELECT lane, instance, engine, count(k) AS own, any_value(usable) AS usable, sum(tile_s) AS busy_s, sum(batch_s + ranks_s) AS work_s,
           sum(by_others_s) AS dragged_s, sum(by_others_s) FILTER (WHERE prefill_tokens = 0) AS dragged_idle_s,
           sum(by_others_s * running) AS waited_s, max(by_others_s) AS longest_s,
           coalesce(sum(tile_s) FILTER (WHERE k IS NULL OR is_dummy), 0) AS along_s,
           min(start_ns) AS first_ns, max(end_ns) AS last_ns
    FROM step_costs GROUP BY lane, instance, engine
),
lanes AS (FROM engines SEMI JOIN (SELECT lane FROM engines GROUP BY lane HAVING count(*) > 1) USING (lane)),
steps_of AS (SELECT c.* FROM step_costs c SEMI JOIN lanes USING (lane)),
-- What each engine's prefill makes the requests of the others wait in a round: their wait is divided among the rest by tokens.
rounds AS (
    SELECT *, CASE WHEN by_others_s > 0 THEN by_others_s * running / nullif(sum(prefill_tokens) OVER r - prefill_tokens, 0) ELSE 0 END AS rate
    FROM steps_of WINDOW r AS (PARTITION BY lane, round)
),
caused AS (
    SELECT lane, engine, sum(caused_s) AS caused_s
    FROM (SELECT lane, engine, prefill_tokens * (sum(rate) OVER (PARTITION BY lane, round) - rate) AS caused_s FROM rounds)
    GROUP BY lane, engine
),
sums AS (
    SELECT lane, instance, engine, start_ns, end_ns, by_others_s,
           sum(by_others_s) OVER (PARTITION BY lane, engine ORDER BY round ROWS UNBOUNDED PRECEDING) - by_others_s AS before_s
    FROM steps_of
),
spans AS (SELECT row_number() OVER () AS id, m.* FROM member_spans m SEMI JOIN lanes USING (instance, engine)),
instants AS (
    SELECT id, instance, engine, -weight AS weight, start_ns AS time_ns FROM spans
    UNION ALL SELECT id, instance, engine, weight, end_ns FROM spans
),
hurt AS (
    SELECT lane, list({klass: klass, metric: metric, engine: engine, seconds: seconds}) AS hurt
    FROM (
        SELECT u.lane, s.klass, s.metric, s.engine,
               sum(i.weight * (u.before_s + u.by_others_s * least(1.0, (i.time_ns - u.start_ns) / greatest(u.end_ns - u.start_ns, 1)))) AS seconds
        FROM instants i ASOF JOIN sums u ON u.instance = i.instance AND u.engine = i.engine AND u.start_ns <= i.time_ns
        JOIN spans s USING (id)
        GROUP BY ALL
    ) GROUP BY lane
),
usual AS (
    SELECT lane, median(tile_s) AS usual_s
    FROM (SELECT lane, round, max(tile_s) AS tile_s, sum(prefill_tokens) AS prefill FROM steps_of GROUP BY lane, round)
    WHERE prefill = 0 GROUP BY lane
),
together AS (
    SELECT lane, any_value(instance) AS instance, bool_and(usable) AS usable, min(first_ns) AS first_ns, max(last_ns) AS last_ns,
           list({engine: engine, own: own, busy_s: busy_s, work_s: work_s, dragged_s: dragged_s, dragged_idle_s: dragged_idle_s,
                 waited_s: waited_s, caused_s: caused_s, longest_s: longest_s, along_s: along_s} ORDER BY engine) AS engines
    FROM lanes JOIN caused USING (lane, engine) GROUP BY lane
)
SELECT
    t.*, h.hurt, u.usual_s,
    (SELECT max(n) FROM (SELECT count(*) AS n FROM engines GROUP BY instance)) AS most_engines,
    (SELECT min(own) FROM engines) AS fewest_steps,
    (SELECT count(DISTINCT instance) FROM step_costs) AS instances,
    (SELECT list({klass: klass, metric: metric, p50_s: p50_s, excess_s: excess_s, slo_broken: slo_broken} ORDER BY klass, metric)
     FROM class_rows WHERE excess_s > 0) AS classes,
    (SELECT max(max_num_batched_tokens) FROM configured) AS budget
FROM (SELECT 1) LEFT JOIN together t ON true LEFT JOIN hurt h USING (lane) LEFT JOIN usual u USING (lane)
ORDER BY t.lane
