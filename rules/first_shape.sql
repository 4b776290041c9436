-- One row per engine, or engines that step together (a lane): its long steps that are the first of their shape, how many would be so by chance, and what they cost each class's tail.
WITH shaped AS (
    SELECT *,
           coalesce(usable AND tile_s > 0 AND beyond_s >= $times * (batch_s + ranks_s), false)
           -- That the profiler stops the engine is known, and no shape's doing.
           AND coalesce(reason NOT ILIKE '%profil%', true) AS is_long
    FROM step_shapes
),
counted AS (
    SELECT *, count(*) OVER (PARTITION BY instance, engine, shape) AS alike,
           avg(is_long::INT) OVER (PARTITION BY instance, engine, shape ORDER BY round ROWS BETWEEN 1 FOLLOWING AND UNBOUNDED FOLLOWING) AS later_long,
           median(tile_s) OVER (PARTITION BY instance, engine, shape) AS usual_s
    FROM shaped
),
told AS (
    SELECT coalesce(instance, '') AS instance, engine, instant(time_ns) AS time_ns, coalesce(time_error_ns, 0) AS error_ns, left(detail, 60) AS detail
    FROM events WHERE kind IN ('jit', 'graph_fallback') AND instant(time_ns) IS NOT NULL
),
named AS (
    SELECT c.k, string_agg(DISTINCT t.detail, ', ' ORDER BY t.detail) AS told
    FROM counted c JOIN told t
      ON t.instance = c.instance AND (t.engine IS NULL OR c.engine IS NULL OR t.engine = c.engine)
     AND t.time_ns + t.error_ns >= c.start_ns AND t.time_ns - t.error_ns <= c.end_ns
    WHERE c.is_long GROUP BY c.k
),
-- Engines in step are as slow as the one of them that has to compile.
rounds AS (
    SELECT c.lane, c.round, bool_or(nth = 1) AS is_first, bool_or(is_long) AS is_long,
           bool_or(nth = 1 AND is_long AND coalesce(later_long, 0) < 0.5) AS is_new, bool_or(n.told IS NOT NULL) AS is_told,
           bool_or(iteration <= 1) AS is_start, any_value(n.told) AS told,
           arg_max(shape, (nth = 1)::INT) AS shape, arg_max(alike, (nth = 1)::INT) AS alike, arg_max(usual_s, (nth = 1)::INT) AS usual_s,
           min(start_ns) AS start_ns, max(end_ns) AS end_ns, max(tile_s) AS tile_s, max(beyond_s) AS beyond_s
    FROM counted c LEFT JOIN named n USING (k)
    GROUP BY c.lane, c.round
),
-- Shapes are new mostly early on, and so may be what is slow there: chance is reckoned between steps about as early.
ordered AS (SELECT *, floor(log2(row_number() OVER (PARTITION BY lane ORDER BY round)))::BIGINT AS era FROM rounds),
eras AS (
    SELECT lane, list({steps: steps, firsts: firsts, longs: longs, both_n: both_n} ORDER BY era) AS eras
    FROM (SELECT lane, era, count(*) AS steps, count(*) FILTER (WHERE is_first) AS firsts, count(*) FILTER (WHERE is_long) AS longs,
                 count(*) FILTER (WHERE is_first AND is_long) AS both_n
          FROM ordered GROUP BY lane, era)
    GROUP BY lane
),
chosen AS (
    FROM ordered WHERE is_new OR (is_long AND is_told) OR (is_long AND is_start)
    QUALIFY row_number() OVER (PARTITION BY lane ORDER BY beyond_s DESC, round) <= $most
),
hurt AS (FROM hurt_by('chosen')),
found AS (
    SELECT lane, list({start_ns: start_ns, end_ns: end_ns, shape: shape, alike: alike, usual_s: usual_s, is_first: is_first, tile_s: tile_s,
                       beyond_s: beyond_s, is_new: is_new, is_start: is_start, told: told, hurt: hurt} ORDER BY round) AS found
    FROM chosen LEFT JOIN hurt USING (lane, round) GROUP BY lane
)
SELECT
    l.*, e.eras, f.found,
    (SELECT count(DISTINCT instance) FROM step_costs) AS instances,
    (SELECT list({klass: klass, metric: metric, excess_s: excess_s, p50_s: p50_s, slo_broken: slo_broken} ORDER BY klass, metric)
     FROM class_rows WHERE excess_s > 0) AS classes
FROM (
    SELECT lane, any_value(instance) AS instance, min(engine) AS engine, any_value(usable) AS usable, max(round) + 1 AS steps
    FROM step_costs GROUP BY lane
) l
LEFT JOIN eras e USING (lane) LEFT JOIN found f USING (lane)
ORDER BY l.lane
