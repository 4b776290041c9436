-- One row per window and rank: how often and how much it made others wait by its own work, where, and how sure that is.
-- Steps are what counts: rounds of one step have one cause. Passes outside of annotated steps (dummy batches) count only
-- where no step is annotated at all; then every eight rounds stand for a step.
WITH windows AS (
    SELECT "window", any_value(world) AS world, any_value(world_size) AS world_size, any_value(missing) AS missing,
           count(DISTINCT rank) FILTER (WHERE used) AS present, count(*) FILTER (WHERE NOT used) AS doubled,
           any_value(collectives) AS collectives, any_value(unmatched) AS unmatched,
           min(first_ns) AS first_ns, max(last_ns) AS last_ns
    FROM rank_windows GROUP BY "window"
),
stepped AS (SELECT "window", bool_or(step IS NOT NULL) AS has_steps FROM rank_rounds GROUP BY "window"),
labelled AS (
    SELECT "window", "group", round, any_value(complete) AS complete,
           coalesce(arg_min(step, rank) FILTER (WHERE step IS NOT NULL),
                    CASE WHEN NOT any_value(has_steps) THEN round // 8 END) AS at_step
    FROM rank_rounds JOIN stepped USING ("window") GROUP BY "window", "group", round
),
rounds AS (
    SELECT r.*, l.at_step, r.is_last AND r.caused_ns > $errors * r.error_ns AS decided
    FROM rank_rounds r JOIN labelled l USING ("window", "group", round)
    WHERE l.complete AND l.at_step IS NOT NULL
),
-- A step of a rank is from where its collectives before had ended; ranks are not in the same step at the same time.
spans AS (
    SELECT "window", at_step, median(rank_ns) AS step_ns
    FROM (
        SELECT "window", at_step, rank, max(end_ns) - min(start_ns - coalesce(work_ns, 0)) AS rank_ns
        FROM rounds GROUP BY "window", at_step, rank
    ) GROUP BY "window", at_step
),
lengths AS (
    SELECT "window", count(*) AS steps, sum(step_ns) AS step_ns, median(step_ns) AS usual_ns FROM spans GROUP BY "window"
),
by_step AS (
    SELECT "window", at_step, rank, sum(own_ns) AS own_ns, arg_max(late_phase, own_ns) AS phase, arg_max(layer, own_ns) AS layer,
           sum(phase_work_ns) AS phase_work_ns, sum(phase_others_ns) AS phase_others_ns, arg_max(phase_work_ns, own_ns) AS top_work_ns,
           arg_max(phase_others_ns, own_ns) AS top_others_ns
    FROM rounds WHERE decided GROUP BY "window", at_step, rank
),
leads AS (
    SELECT "window", rank, count(*) AS lead_steps
    FROM (FROM by_step WHERE own_ns > 0 QUALIFY row_number() OVER (PARTITION BY "window", at_step ORDER BY own_ns DESC, rank) = 1)
    GROUP BY "window", rank
),
outliers AS (
    SELECT s."window", s.rank, s.phase, s.layer, count(*) AS outlier_steps, list(s.at_step ORDER BY s.at_step)[:20] AS steps_out,
           sum(s.own_ns) AS outlier_ns, sum(s.top_work_ns) AS outlier_work_ns, sum(s.top_others_ns) AS outlier_others_ns
    FROM by_step s JOIN lengths USING ("window")
    WHERE s.own_ns >= $outlier * usual_ns AND s.top_work_ns >= $slower * s.top_others_ns
    GROUP BY s."window", s.rank, s.phase, s.layer
    QUALIFY row_number() OVER (PARTITION BY s."window", s.rank ORDER BY outlier_ns DESC) = 1
),
late AS (
    SELECT "window", rank, count(*) AS rounds, count(*) FILTER (WHERE is_last) AS last_rounds,
           count(*) FILTER (WHERE decided) AS decided_rounds,
           sum(caused_ns) AS caused_ns, coalesce(sum(own_ns) FILTER (WHERE decided), 0) AS own_ns,
           coalesce(sum(caused_ns) FILTER (WHERE decided), 0) AS decided_ns,
           coalesce(sum(caused_ns) FILTER (WHERE decided AND is_shortest), 0) AS agreed_ns,
           sum(wait_ns) AS wait_ns, max(error_ns) AS error_ns, sum(transfer_ns) AS transfer_ns, sum(slow_ns) AS slow_ns,
           sum(work_ns) AS work_ns
    FROM rounds GROUP BY "window", rank
),
-- A layer with less than half of an even share of a phase's lateness has it by the way.
by_layer AS (
    SELECT "window", rank, late_phase, layer, sum(own_ns) AS own_ns, sum(phase_work_ns) AS work_ns, sum(phase_others_ns) AS others_ns,
           sum(own_ns) >= 0.5 * avg(sum(own_ns)) OVER (PARTITION BY "window", rank, late_phase) AS counts
    FROM rounds WHERE decided AND own_ns > 0 GROUP BY "window", rank, late_phase, layer
),
phases AS (
    SELECT "window", rank, list({phase: late_phase, own_ns: own_ns, work_ns: work_ns, others_ns: others_ns, layers: layers}
                                ORDER BY own_ns DESC, late_phase)[:4] AS phases
    FROM (SELECT "window", rank, late_phase, sum(own_ns) AS own_ns, sum(work_ns) AS work_ns, sum(others_ns) AS others_ns,
                 list(layer ORDER BY layer) FILTER (WHERE layer IS NOT NULL AND counts) AS layers
          FROM by_layer GROUP BY "window", rank, late_phase)
    GROUP BY "window", rank
),
-- Who waited for each late rank, how long, and mostly in what.
waits AS (
    SELECT "window", late, list({rank: rank, wait_ns: wait_ns, waits_in: waits_in} ORDER BY wait_ns DESC, rank) AS waits
    FROM (
        SELECT "window", late, rank, sum(wait_ns) AS wait_ns, arg_max(waits_in, wait_ns) AS waits_in
        FROM (
            SELECT r."window", l.rank AS late, r.rank, coalesce(r.phase, r.kind) AS waits_in, sum(r.wait_ns) AS wait_ns
            FROM rounds r JOIN rounds l ON l."window" = r."window" AND l."group" = r."group" AND l.round = r.round AND l.decided
            WHERE r.rank <> l.rank GROUP BY r."window", l.rank, r.rank, coalesce(r.phase, r.kind)
        ) GROUP BY "window", late, rank
    ) GROUP BY "window", late
),
-- Tokens a rank's experts got, and how many the others got where it was late in expert compute.
loads AS (SELECT "window", at_step, layer, rank, sum(tokens) AS tokens FROM rounds WHERE phase = 'dispatch' AND tokens IS NOT NULL
          GROUP BY "window", at_step, layer, rank),
late_loads AS (
    SELECT d."window", d.rank, sum(own.tokens) AS tokens, sum(others.tokens) AS others_tokens
    FROM (SELECT DISTINCT "window", at_step, layer, rank FROM rounds WHERE decided AND own_ns > 0 AND late_phase = 'expert') d
    JOIN loads own ON own."window" = d."window" AND own.at_step = d.at_step AND own.rank = d.rank AND own.layer IS NOT DISTINCT FROM d.layer
    JOIN (SELECT a."window", a.at_step, a.layer, a.rank, avg(b.tokens) AS tokens
          FROM loads a JOIN loads b ON b."window" = a."window" AND b.at_step = a.at_step AND b.layer IS NOT DISTINCT FROM a.layer AND b.rank <> a.rank
          GROUP BY a."window", a.at_step, a.layer, a.rank) others
      ON others."window" = d."window" AND others.at_step = d.at_step AND others.rank = d.rank AND others.layer IS NOT DISTINCT FROM d.layer
    GROUP BY d."window", d.rank
),
tail AS (
    SELECT e.klass, e.metric, sum(e.excess_s) AS straggler_s, any_value(k.excess_s) AS excess_s, any_value(k.slo_broken) AS slo_broken, any_value(k.tail_rule) AS tail_rule
    FROM excess e JOIN class_rows k ON k.klass = e.klass AND k.metric = e.metric
    WHERE e.component = 'straggler_wait' AND k.excess_s > 0 GROUP BY e.klass, e.metric HAVING straggler_s > 0
    ORDER BY straggler_s / any_value(k.excess_s) DESC, e.klass LIMIT 1
)
SELECT w.*, l.rank, l.* EXCLUDE ("window", rank), CASE WHEN g.has_steps THEN 'steps' ELSE 'blocks of eight collectives' END AS unit, n.steps, n.step_ns, n.usual_ns, coalesce(d.lead_steps, 0) AS lead_steps,
       o.outlier_steps, o.steps_out, o.phase AS outlier_phase, o.layer AS outlier_layer, o.outlier_ns, o.outlier_work_ns, o.outlier_others_ns,
       p.phases, v.waits, t.tokens, t.others_tokens,
       f.klass AS tail_class, f.metric AS tail_metric, f.straggler_s, f.excess_s, f.slo_broken, f.tail_rule
FROM windows w
LEFT JOIN late l USING ("window")
LEFT JOIN lengths n USING ("window")
LEFT JOIN stepped g USING ("window")
LEFT JOIN leads d ON d."window" = w."window" AND d.rank = l.rank
LEFT JOIN outliers o ON o."window" = w."window" AND o.rank = l.rank
LEFT JOIN phases p ON p."window" = w."window" AND p.rank = l.rank
LEFT JOIN waits v ON v."window" = w."window" AND v.late = l.rank
LEFT JOIN late_loads t ON t."window" = w."window" AND t.rank = l.rank
LEFT JOIN tail f ON true
ORDER BY w."window", l.rank
