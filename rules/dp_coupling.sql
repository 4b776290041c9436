-- One row per set of engines that step together (a lane), with what the prefill of each costs the others and every class's tail; one row without a lane where no engines do.
WITH engines AS (
    SELECT lane, instance, engine, count(k) AS own, any_value(usable) AS usable, sum(batch_s + ranks_s) AS work_s,
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
-- By the ranks' profiles: who waits in collectives that span engines, whether the one that all wait for has more to prefill.
batches AS (
    SELECT source, rank, iteration, any_value(prefill_tokens) AS prefill_tokens FROM iterations WHERE rank IS NOT NULL GROUP BY ALL
),
arrivals AS (
    SELECT r."window", r."group", r.round, r.rank, r.step, r.is_last, r.wait_ns, r.error_ns, r.start_ns, r.start_ns - coalesce(r.work_ns, 0) AS from_ns, r.end_ns,
           w.instance, w.engine, coalesce(b.prefill_tokens, 0) AS prefill_tokens
    FROM rank_rounds r
    JOIN rank_windows w ON w."window" = r."window" AND w.rank = r.rank AND w.used AND w.engine IS NOT NULL
    LEFT JOIN batches b ON b.source = w.source AND b.rank = r.rank AND b.iteration = r.step
    WHERE r.complete
),
-- Of collectives that span engines: how long a rank needs from one to the next, by its own clock. Who is late for want of
-- what was sent to it needs no longer than the others.
spanning AS (
    SELECT a.*, a.start_ns - lag(a.end_ns) OVER (PARTITION BY a."window", a.rank ORDER BY a.start_ns, a.round) AS needs_ns
    FROM arrivals a
    SEMI JOIN (SELECT "window", "group", round FROM arrivals GROUP BY ALL HAVING count(DISTINCT engine) > 1) s
      ON s."window" = a."window" AND s."group" = a."group" AND s.round = a.round
),
lasts AS (
    SELECT "window", "group", round, engine AS last_engine, prefill_tokens AS last_prefill, needs_ns AS last_needs_ns FROM spanning WHERE is_last
),
waits AS (
    SELECT a."window", a.instance, a.engine, a.rank, a.step, l.last_engine, l.last_prefill > a.prefill_tokens AS is_behind,
           least(a.wait_ns, l.last_needs_ns - a.needs_ns) AS ns
    FROM spanning a JOIN lasts l USING ("window", "group", round)
    WHERE l.last_engine <> a.engine AND a.step IS NOT NULL
      -- A wait that clocks cannot tell counts for nothing.
      AND a.wait_ns > $errors * a.error_ns AND l.last_needs_ns > a.needs_ns
),
waited AS (
    SELECT "window", instance, engine, rank, step, last_engine, sum(ns) FILTER (WHERE is_behind) AS behind_ns, sum(ns) FILTER (WHERE NOT is_behind) AS beside_ns
    FROM waits GROUP BY ALL
),
in_steps AS (
    SELECT s.*, coalesce(w.behind_ns, 0) AS behind_ns, w.beside_ns
    FROM (SELECT "window", engine, rank, step, max(end_ns) - min(from_ns) AS step_ns FROM arrivals WHERE step IS NOT NULL GROUP BY ALL) s
    LEFT JOIN (SELECT "window", rank, step, sum(behind_ns) AS behind_ns, sum(beside_ns) AS beside_ns FROM waited GROUP BY ALL) w USING ("window", rank, step)
),
-- Where every step holds somebody's prefill, a usual one has the wait in it that it is to be held against.
usual_steps AS (SELECT "window", engine, median(step_ns - behind_ns) AS usual_ns FROM in_steps GROUP BY "window", engine),
stalls AS (
    SELECT s.*, u.usual_ns, s.behind_ns >= greatest($gap * u.usual_ns, 1) AS is_stall FROM in_steps s JOIN usual_steps u USING ("window", engine)
),
-- Each engine's waiting, and for whom it waits in stalls.
held_up AS (
    SELECT "window", engine, sum(step_ns) AS step_ns, any_value(usual_ns) AS usual_ns, count(*) FILTER (WHERE is_stall) AS stalls, count(DISTINCT step) FILTER (WHERE is_stall) AS steps, coalesce(sum(behind_ns) FILTER (WHERE is_stall), 0) AS stalled_ns,
           avg(behind_ns) FILTER (WHERE behind_ns > 0) AS behind_ns, coalesce(avg(beside_ns), 0) AS beside_ns
    FROM stalls GROUP BY "window", engine
),
by_ranks AS (
    SELECT list({win: "window", instance: instance, engine: engine, step_ns: step_ns, usual_ns: usual_ns, stalls: stalls, steps: steps, stalled_ns: stalled_ns, behind_ns: behind_ns, beside_ns: beside_ns,
                 caused: caused} ORDER BY "window", engine) AS by_ranks
    FROM held_up h JOIN (
        SELECT "window", engine, any_value(instance) AS instance, list({engine: last_engine, ns: ns} ORDER BY last_engine) FILTER (WHERE ns > 0) AS caused
        FROM (SELECT w."window", w.engine, w.instance, w.last_engine, sum(w.behind_ns) FILTER (WHERE s.is_stall) AS ns
              FROM waited w JOIN stalls s USING ("window", rank, step) GROUP BY w."window", w.engine, w.instance, w.last_engine)
        GROUP BY "window", engine
    ) USING ("window", engine)
),
together AS (
    SELECT lane, any_value(instance) AS instance, bool_and(usable) AS usable, min(first_ns) AS first_ns, max(last_ns) AS last_ns,
           list({engine: engine, own: own, work_s: work_s, dragged_s: dragged_s, dragged_idle_s: dragged_idle_s,
                 waited_s: waited_s, caused_s: caused_s, longest_s: longest_s, along_s: along_s} ORDER BY engine) AS engines
    FROM lanes JOIN caused USING (lane, engine) GROUP BY lane
)
SELECT
    t.*, h.hurt, u.usual_s, (SELECT by_ranks FROM by_ranks) AS by_ranks,
    (SELECT max(n) FROM (SELECT count(*) AS n FROM engines GROUP BY instance)) AS most_engines,
    (SELECT min(own) FROM engines) AS fewest_steps,
    (SELECT count(DISTINCT instance) FROM step_costs) AS instances,
    (SELECT list({klass: klass, metric: metric, p50_s: p50_s, excess_s: excess_s, slo_broken: slo_broken} ORDER BY klass, metric)
     FROM class_rows WHERE excess_s > 0) AS classes,
    (SELECT max(max_num_batched_tokens) FROM configured) AS budget
FROM (SELECT 1) LEFT JOIN together t ON true LEFT JOIN hurt h USING (lane) LEFT JOIN usual u USING (lane)
ORDER BY t.lane
