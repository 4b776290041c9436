-- One row per window and rank: how often and how much it made others wait by its own work, where, and how sure that is.
-- Steps are what counts: rounds of one step have one cause. Passes outside of annotated steps (dummy batches) count only
-- where no step is annotated at all; then every eight rounds stand for a step. What a rank costs in a step is what the step
-- would be shorter without its lateness, by the replay and no more than clocks say too.
WITH stepped AS (SELECT "window", bool_or(step IS NOT NULL) AS has_steps FROM rank_rounds GROUP BY "window"),
rounds AS (
    SELECT *, is_last AND caused_ns > $errors * error_ns AS decided
    FROM rank_rounds WHERE complete AND at_step IS NOT NULL
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
decided_steps AS (
    SELECT "window", at_step, rank, sum(caused_ns) AS caused_ns, sum(own_ns) AS direct_ns, arg_max(late_phase, own_ns) AS phase, arg_max(layer, own_ns) AS layer,
           arg_max(phase_work_ns, own_ns) AS top_work_ns, arg_max(phase_others_ns, own_ns) AS top_others_ns
    FROM rounds WHERE decided GROUP BY "window", at_step, rank
),
-- The replay takes away the lateness of the ranks that have most; of others what they cost is what they caused by their own work.
by_step AS (
    SELECT d.* EXCLUDE (direct_ns), least(coalesce(c.saved_ns, d.direct_ns), d.caused_ns, p.replayed_ns - p.no_skew_ns) AS own_ns
    FROM decided_steps d
    JOIN step_replays p ON p."window" = d."window" AND p.at_step = d.at_step
    LEFT JOIN rank_costs c ON c."window" = d."window" AND c.at_step = d.at_step AND c.rank = d.rank
),
own AS (SELECT "window", rank, sum(own_ns) AS own_ns FROM by_step GROUP BY "window", rank),
worst AS (SELECT "window", arg_max(rank, own_ns) AS rank FROM own GROUP BY "window"),
-- Of the worst rank, what it cost in each step in order.
series AS (
    SELECT w."window", w.rank, list(coalesce(b.own_ns, 0) ORDER BY s.at_step) AS own_by_step
    FROM worst w JOIN spans s ON s."window" = w."window"
    LEFT JOIN by_step b ON b."window" = w."window" AND b.rank = w.rank AND b.at_step = s.at_step
    GROUP BY w."window", w.rank
),
replayed AS (
    SELECT "window", sum(replayed_ns) AS replayed_ns, sum(no_skew_ns) AS no_skew_ns FROM step_replays GROUP BY "window"
),
leads AS (
    SELECT "window", rank, count(*) AS lead_steps
    FROM (FROM by_step WHERE own_ns > 0 QUALIFY row_number() OVER (PARTITION BY "window", at_step ORDER BY own_ns DESC, rank) = 1)
    GROUP BY "window", rank
),
-- Tokens of a rank's own batches and of the others', and whether its engine has more to prefill than they have. Of the ranks whose
-- batches are told at other times those that tell of none now have none: their engine takes an empty one so that all can go on.
batches AS (
    SELECT *, (sum(tokens) OVER together - tokens) / nullif(count(*) OVER together - 1, 0) AS others_tokens,
           coalesce(prefill_tokens * (max(nth) OVER (PARTITION BY "window") - 1) > sum(prefill_tokens) OVER together - prefill_tokens, false) AS is_loaded
    FROM (SELECT *, dense_rank() OVER (PARTITION BY "window" ORDER BY rank) AS nth FROM (
        SELECT r."window", r.at_step, r.rank, any_value(i.tokens) AS tokens, any_value(i.prefill_tokens) AS prefill_tokens
        FROM (SELECT DISTINCT "window", at_step, rank, step FROM rounds WHERE step IS NOT NULL) r
        JOIN rank_windows w ON w."window" = r."window" AND w.rank = r.rank AND w.used
        JOIN (SELECT source, rank, iteration, prefill_tokens, coalesce(prefill_tokens, 0) + coalesce(decode_tokens, 0) AS tokens FROM iterations
              WHERE rank IS NOT NULL AND prefill_tokens IS NOT NULL) i
          ON i.source = w.source AND i.rank = r.rank AND i.iteration = r.step
        GROUP BY r."window", r.at_step, r.rank
    )) WINDOW together AS (PARTITION BY "window", at_step)
),
-- Steps in which a rank loses much, in one place where the others do not, and not for its engine's prefill.
lost AS (
    SELECT s.*, CASE WHEN s.phase NOT IN ('other', 'idle') THEN s.layer END AS place
    FROM by_step s JOIN lengths USING ("window") LEFT JOIN batches b ON b."window" = s."window" AND b.at_step = s.at_step AND b.rank = s.rank
    WHERE s.own_ns >= $outlier * usual_ns AND s.top_work_ns >= $slower * s.top_others_ns
      AND (s.phase = 'expert' OR b.is_loaded IS NOT TRUE)
),
places AS (
    SELECT "window", rank, phase, place AS layer, count(*) AS outlier_steps, list(at_step ORDER BY at_step)[:20] AS steps_out,
           sum(own_ns) AS outlier_ns, sum(top_work_ns) AS outlier_work_ns, sum(top_others_ns) AS outlier_others_ns
    FROM lost GROUP BY "window", rank, phase, place
),
-- Of the worst rank's places the worst; and all of them together: a host stands still anywhere.
outliers AS (FROM places QUALIFY row_number() OVER (PARTITION BY "window", rank ORDER BY outlier_ns DESC) = 1),
anywhere AS (
    SELECT "window", rank, count(*) AS lost_steps, list(at_step ORDER BY at_step)[:20] AS steps_lost, sum(own_ns) AS lost_ns,
           sum(top_work_ns) AS lost_work_ns, sum(top_others_ns) AS lost_others_ns
    FROM lost GROUP BY "window", rank
),
late AS (
    SELECT "window", rank, count(*) AS rounds, count(*) FILTER (WHERE is_last) AS last_rounds,
           count(*) FILTER (WHERE decided) AS decided_rounds,
           sum(caused_ns) AS caused_ns,
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
loads AS (
    SELECT "window", at_step, layer, rank, sum(tokens) AS tokens,
           (sum(sum(tokens)) OVER together - sum(tokens)) / nullif(count(*) OVER together - 1, 0) AS others_tokens
    FROM rounds WHERE phase = 'dispatch' AND tokens IS NOT NULL
    GROUP BY "window", at_step, layer, rank
    WINDOW together AS (PARTITION BY "window", at_step, layer)
),
late_loads AS (
    SELECT d."window", d.rank, sum(l.tokens) AS tokens, sum(l.others_tokens) AS others_tokens
    FROM (SELECT DISTINCT "window", at_step, layer, rank FROM rounds WHERE decided AND own_ns > 0 AND late_phase = 'expert') d
    JOIN loads l ON l."window" = d."window" AND l.at_step = d.at_step AND l.rank = d.rank AND l.layer IS NOT DISTINCT FROM d.layer
    WHERE l.others_tokens IS NOT NULL
    GROUP BY d."window", d.rank
),
late_batches AS (
    SELECT b."window", b.rank, sum(m.tokens) AS batch_tokens, sum(m.others_tokens) AS others_batch_tokens
    FROM by_step b JOIN worst USING ("window", rank) JOIN batches m USING ("window", at_step, rank)
    WHERE b.own_ns > 0 AND m.others_tokens IS NOT NULL GROUP BY b."window", b.rank
),
-- What the worst rank's lateness costs in the steps in which its engine had no more to prefill than the others.
unloaded AS (
    SELECT m."window", m.rank, count(*) AS unloaded_steps, sum(s.step_ns) AS unloaded_step_ns, coalesce(sum(b.own_ns), 0) AS unloaded_ns
    FROM batches m JOIN worst USING ("window", rank) JOIN spans s USING ("window", at_step) LEFT JOIN by_step b USING ("window", at_step, rank)
    WHERE NOT m.is_loaded GROUP BY m."window", m.rank
),
-- Token gaps in the profiled steps, and what they would be without the rank's lateness.
gaps_without AS (
    SELECT "window", rank, arg_max({klass: klass, gaps: gaps, p50_s: p50_s, p50_without_s: p50_without_s, p99_s: p99_s,
                                    p99_without_s: p99_without_s}, gaps) AS gaps
    FROM what_if WHERE scenario = 'without rank' GROUP BY "window", rank
),
tail AS (SELECT * EXCLUDE (component) FROM component_tails WHERE component = 'straggler_wait')
SELECT w.*, l.rank, l.* EXCLUDE ("window", rank), coalesce(c.own_ns, 0) AS own_ns, y.own_by_step, a.replayed_ns, a.no_skew_ns,
       e.batch_tokens, e.others_batch_tokens, u.unloaded_steps, u.unloaded_step_ns, u.unloaded_ns, h.gaps, coalesce(x.lost_steps, 0) AS lost_steps, x.steps_lost, x.lost_ns, x.lost_work_ns, x.lost_others_ns, CASE WHEN g.has_steps THEN 'steps' ELSE 'blocks of eight collectives' END AS unit, n.steps, n.step_ns, n.usual_ns, coalesce(d.lead_steps, 0) AS lead_steps,
       o.outlier_steps, o.steps_out, o.phase AS outlier_phase, o.layer AS outlier_layer, o.outlier_ns, o.outlier_work_ns, o.outlier_others_ns,
       p.phases, v.waits, t.tokens, t.others_tokens,
       f.*
FROM windows w
LEFT JOIN late l USING ("window")
LEFT JOIN lengths n USING ("window")
LEFT JOIN stepped g USING ("window")
LEFT JOIN leads d ON d."window" = w."window" AND d.rank = l.rank
LEFT JOIN outliers o ON o."window" = w."window" AND o.rank = l.rank
LEFT JOIN anywhere x ON x."window" = w."window" AND x.rank = l.rank
LEFT JOIN phases p ON p."window" = w."window" AND p.rank = l.rank
LEFT JOIN waits v ON v."window" = w."window" AND v.late = l.rank
LEFT JOIN late_loads t ON t."window" = w."window" AND t.rank = l.rank
LEFT JOIN own c ON c."window" = w."window" AND c.rank = l.rank
LEFT JOIN series y ON y."window" = w."window" AND y.rank = l.rank
LEFT JOIN replayed a ON a."window" = w."window"
LEFT JOIN late_batches e ON e."window" = w."window" AND e.rank = l.rank
LEFT JOIN unloaded u ON u."window" = w."window" AND u.rank = l.rank
LEFT JOIN gaps_without h ON h."window" = w."window" AND h.rank = l.rank
LEFT JOIN tail f ON true
ORDER BY w."window", l.rank
