-- One row per window of profiles in which ranks work between dispatch and combine (`work`), per recording of experts' tokens
-- (`load`), and per series of balancedness that a log or `/metrics` gives (`balance`). Work is told by each rank's own
-- clock, so clocks do not matter here. A slow device looks like a loaded one, so how time follows tokens is told by each rank
-- against itself, as its part of the tokens changes from round to round (the within, or fixed-effects, estimator; Mundlak
-- 1978), or by ranks that are not the busiest, which are taken to be alike. Both are parts of a round's mean: what a rank gets is
-- compared at one size of batch, since the same part of a larger batch is more tokens but need not take longer.
WITH work AS (SELECT *, coalesce(layer, -1) AS place FROM expert_work),
stepped AS (SELECT "window", bool_or(step IS NOT NULL) AS has_steps FROM work GROUP BY "window"),
-- Passes outside of annotated steps (dummy batches) count only where no step is annotated at all.
rounds AS (
    SELECT "window", "group", round, any_value(place) AS place, count(*) AS ranks, count(tokens) AS told,
           max(work_ns) AS longest_ns, avg(work_ns) AS mean_ns, max(tokens) AS most, avg(tokens) AS mean_tokens,
           -- Few tokens may take as long as the weights do, many as long as they are: batches of a size, within a factor of two, are alike.
           floor(log2(greatest(avg(tokens), 1e-9))) AS size
    FROM work JOIN stepped USING ("window") GROUP BY "window", "group", round
    HAVING count(*) >= 2 AND (bool_or(step IS NOT NULL) OR NOT any_value(has_steps))
),
busiest AS (
    SELECT "window", place, arg_max(rank, work_ns) AS busy
    FROM (SELECT "window", place, rank, sum(work_ns) AS work_ns FROM work GROUP BY "window", place, rank) GROUP BY "window", place
),
apart AS (
    SELECT w."window", w."group", w.round, w.place, w.rank, w.rank = b.busy AS is_busy, w.work_ns::DOUBLE AS work_ns, w.tokens,
           r.ranks, r.size, r.mean_tokens, r.mean_ns, r.longest_ns, w.tokens / r.mean_tokens AS load, w.work_ns / r.mean_ns AS slower
    FROM work w JOIN rounds r USING ("window", "group", round) JOIN busiest b ON b."window" = w."window" AND b.place = w.place
    WHERE r.told = r.ranks AND r.mean_tokens > 0 AND r.mean_ns > 0
    -- Without a rank the mean is another.
    QUALIFY r.ranks = max(r.ranks) OVER (PARTITION BY w."window", w."group")
),
within AS (
    SELECT "window", size, "group", round, place, is_busy,
           load - avg(load) OVER cell AS more_load, slower - avg(slower) OVER cell AS more_slower
    FROM apart WINDOW cell AS (PARTITION BY "window", size, place, rank)
),
parts AS (
    SELECT *, CASE WHEN is_busy THEN 'busy' ELSE 'others' END AS part FROM within
    UNION ALL
    SELECT *, 'all' FROM within
),
fits AS (
    SELECT "window", size, part, sum(more_load * more_load) AS sxx, sum(more_load * more_slower) / sum(more_load * more_load) AS slope,
           count(DISTINCT place) + 1 AS lost
    -- What is left of equal numbers by rounding is no difference.
    FROM parts GROUP BY "window", size, part HAVING sum(more_load * more_load) > 1e-12 * count(*)
),
-- Two standard errors, from the rounds' own scatter (clustered, White 1980): work that is longer varies more.
errors AS (
    SELECT "window", size, part, any_value(slope) AS slope,
           2 * sqrt(sum(score * score) * count(*) / (count(*) - any_value(lost))) / any_value(sxx) AS margin
    FROM (
        SELECT "window", size, part, any_value(slope) AS slope, any_value(sxx) AS sxx, any_value(lost) AS lost,
               sum(more_load * (more_slower - slope * more_load)) AS score
        FROM parts JOIN fits USING ("window", size, part) GROUP BY "window", size, part, "group", round
    )
    GROUP BY "window", size, part HAVING count(*) - any_value(lost) >= $rounds / 2
),
-- What does not change over time, as a recording's tokens do not: how ranks differ from layer to layer (`layers`), and how those
-- that are not the busiest differ from each other (`others`). A layer, or a rank, counts once, however many rounds it has.
cells AS (
    SELECT "window", size, place, rank, is_busy, avg(load) AS load, avg(slower) AS slower FROM apart
    GROUP BY "window", size, place, rank, is_busy
),
lasting_parts AS (
    SELECT "window", size, 'layers' AS part, place AS counted, load - avg(load) OVER same AS more_load, slower - avg(slower) OVER same AS more_slower
    -- Loads of a round average to one, so that of these only the rank's mean is to be taken off.
    FROM cells WINDOW same AS (PARTITION BY "window", size, rank)
    UNION ALL
    SELECT "window", size, 'others', rank, load - avg(load) OVER same, slower - avg(slower) OVER same
    FROM cells WHERE NOT is_busy WINDOW same AS (PARTITION BY "window", size, place)
),
lasting_fits AS (
    SELECT "window", size, part, sum(more_load * more_load) AS sxx, sum(more_load * more_slower) / sum(more_load * more_load) AS slope
    FROM lasting_parts GROUP BY "window", size, part HAVING sum(more_load * more_load) > 1e-12 * count(*) AND count(DISTINCT counted) >= 3
),
lasting_errors AS (
    SELECT "window", size, part, any_value(slope) AS slope,
           -- Student's t at 97.5 %, two degrees of freedom lost.
           coalesce([12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23][count(*) - 2], 2)
           * sqrt(sum(score * score) * count(*) / (count(*) - 2)) / any_value(sxx) AS margin
    FROM (SELECT "window", size, part, any_value(slope) AS slope, any_value(sxx) AS sxx, sum(more_load * (more_slower - slope * more_load)) AS score
          FROM lasting_parts JOIN lasting_fits USING ("window", size, part) GROUP BY "window", size, part, counted)
    GROUP BY "window", size, part
),
-- How the busiest rank's time over the others' grows with the size of the batch. A slow device takes longer by one factor at
-- any size; more tokens do so the more, the further a batch is beyond what takes as long as the weights.
beside AS (
    SELECT "window", "group", round, place, busy_ns / others_ns AS slower, busy_tokens / others_tokens - 1 AS more_load, ln(mean_tokens) AS size,
           others_ns / mean_ns / (others_tokens / mean_tokens) AS scale
    FROM (SELECT "window", "group", round, place, any_value(mean_ns) AS mean_ns, any_value(mean_tokens) AS mean_tokens,
                 max(work_ns) FILTER (WHERE is_busy) AS busy_ns, avg(work_ns) FILTER (WHERE NOT is_busy) AS others_ns,
                 max(tokens) FILTER (WHERE is_busy) AS busy_tokens, avg(tokens) FILTER (WHERE NOT is_busy) AS others_tokens
          FROM apart GROUP BY "window", "group", round, place)
    WHERE others_ns > 0 AND others_tokens > 0
),
grown AS (
    SELECT *, slower - avg(slower) OVER same AS more_slower, size - avg(size) OVER same AS more_size
    FROM beside WINDOW same AS (PARTITION BY "window", place)
),
growth_fits AS (
    SELECT "window", sum(more_size * more_slower) / sum(more_size * more_size) AS slope, sum(more_size * more_size) AS sxx,
           avg(scale) / avg(more_load) AS by_load, count(DISTINCT place) + 1 AS lost
    FROM grown GROUP BY "window" HAVING sum(more_size * more_size) > 1e-12 * count(*) AND avg(more_load) > 0
),
growth AS (
    SELECT "window", any_value(slope * by_load) AS slope,
           2 * sqrt(sum(score * score) * count(*) / (count(*) - any_value(lost))) / any_value(sxx) * any_value(by_load) AS margin
    FROM (SELECT "window", slope, by_load, lost, sxx, more_size * (more_slower - slope * more_size) AS score FROM grown JOIN growth_fits USING ("window"))
    GROUP BY "window" HAVING count(*) - any_value(lost) >= $rounds / 2
),
-- The narrowest of what tells of all ranks, and of those that are not the busiest. Where time bends, because few tokens take as
-- long as the weights do, the busiest rank's own slope holds for what is beyond the mean, and the others' for what they would get.
told AS (
    SELECT "window", size, part, slope, margin, true AS by_itself FROM errors
    UNION ALL
    SELECT "window", size, part, slope, margin, false FROM lasting_errors
    UNION ALL
    SELECT "window", size, 'busy', slope, margin, true FROM growth JOIN (SELECT DISTINCT "window", size FROM apart) USING ("window")
),
slopes AS (
    SELECT "window", size, bent, below, CASE WHEN bent THEN busy ELSE every END AS slope,
           CASE WHEN bent THEN busy_margin ELSE every_margin END AS margin, bent OR by_itself AS by_itself
    FROM (
        SELECT *, coalesce(busy - below > $bends / 2 * sqrt(busy_margin * busy_margin + below_margin * below_margin), false) AS bent
        FROM (SELECT "window", size, arg_min(slope, margin) FILTER (WHERE part <> 'busy') AS every, min(margin) FILTER (WHERE part <> 'busy') AS every_margin,
                     arg_min(by_itself, margin) FILTER (WHERE part <> 'busy') AS by_itself,
                     arg_max(slope, slope - margin) FILTER (WHERE part = 'busy') AS busy, arg_max(margin, slope - margin) FILTER (WHERE part = 'busy') AS busy_margin,
                     arg_min(slope, margin) FILTER (WHERE part = 'others') AS below, min(margin) FILTER (WHERE part = 'others') AS below_margin
              FROM told GROUP BY "window", size)
    )
    WHERE every IS NOT NULL
),
-- What each rank would take with even tokens, at the slope and at both ends of its interval; and what of that is always its own,
-- as a slow device's. Twice the tokens take twice as long at most.
bounds AS (FROM (VALUES ('low', -1), ('middle', 0), ('high', 1)) AS b(bound, sign)),
evened AS (
    SELECT a."window", b.bound, a."group", a.round, a.place, a.rank, a.longest_ns, a.mean_ns,
           a.work_ns - least(greatest(CASE WHEN a.load < 1 AND s.bent THEN s.below ELSE s.slope + b.sign * s.margin END, 0), 1) * (a.load - 1) * a.mean_ns AS even_ns
    FROM apart a JOIN slopes s USING ("window", size) CROSS JOIN bounds b
),
alike AS (
    SELECT *, even_ns - (avg(even_ns / mean_ns) OVER (PARTITION BY "window", bound, place, rank) - 1) * mean_ns AS alike_ns FROM evened
),
saved AS (
    SELECT "window", bound, sum(longest_ns - even_ns) AS saved_ns, greatest(sum(longest_ns - alike_ns), sum(longest_ns - even_ns)) AS unlike_ns
    FROM (SELECT "window", bound, any_value(longest_ns) AS longest_ns, max(even_ns) AS even_ns, max(alike_ns) AS alike_ns
          FROM alike GROUP BY "window", bound, "group", round)
    GROUP BY "window", bound
),
explained AS (
    SELECT "window", max(saved_ns) FILTER (WHERE bound = 'middle') AS saved_ns, max(saved_ns) AS most_saved_ns, max(unlike_ns) AS unlike_ns,
           min(saved_ns / nullif(unlike_ns, 0)) AS explained_low, max(saved_ns / nullif(unlike_ns, 0)) FILTER (WHERE bound = 'middle') AS explained,
           max(saved_ns / nullif(unlike_ns, 0)) AS explained_high
    FROM saved GROUP BY "window"
),
-- What ranks differ by that stays, tokens told or not; and of what moves the part that is still there in the next round of the
-- layer (the autocorrelation at lag 1): the rest is chance, of which no placement can be made.
lasting AS (
    SELECT "window", sum(longest_ns - alike_ns) AS lasting_ns, greatest(coalesce(sum(product) / nullif(sum(square), 0), 0), 0) AS follows
    FROM (
        SELECT "window", max(work_ns) AS longest_ns, max(work_ns - (usual - 1) * mean_ns) AS alike_ns,
               sum((slower - usual) * (before - usual)) AS product, sum(pow(slower - usual, 2)) AS square
        FROM (SELECT *, avg(slower) OVER (PARTITION BY "window", place, rank) AS usual,
                     lag(slower) OVER (PARTITION BY "window", "group", place, rank ORDER BY step, round) AS before
              FROM (SELECT w."window", w."group", w.round, w.place, w.rank, w.step, w.work_ns, r.mean_ns, w.work_ns / nullif(r.mean_ns, 0) AS slower
                    FROM work w JOIN rounds r USING ("window", "group", round)))
        GROUP BY "window", "group", round
    ) GROUP BY "window"
),
totals AS (
    SELECT "window", count(*) AS rounds, count(*) FILTER (WHERE told = ranks) AS told_rounds, max(ranks) AS ranks,
           sum(longest_ns - mean_ns) AS lost_ns, sum(longest_ns) AS longest_ns,
           sum(most) FILTER (WHERE told = ranks) AS most, sum(mean_tokens) FILTER (WHERE told = ranks) AS mean_tokens
    FROM rounds GROUP BY "window"
),
-- A slope in ns of work for each token, of the sizes of batch by what work they are.
per_token AS (
    SELECT "window", sum(slope * mean_ns) / sum(mean_tokens) AS ns_per_token, sum(margin * mean_ns) / sum(mean_tokens) AS ns_per_token_margin,
           arg_max(bent, mean_ns) AS bent, arg_max(below * mean_ns / mean_tokens, mean_ns) AS others_ns_per_token, bool_and(by_itself) AS by_itself
    FROM (SELECT "window", size, sum(mean_ns) AS mean_ns, sum(mean_tokens) AS mean_tokens FROM rounds WHERE told = ranks AND mean_tokens > 0
          GROUP BY "window", size)
    JOIN slopes USING ("window", size) GROUP BY "window"
),
by_place AS (
    SELECT a."window", a.place, any_value(b.busy) AS rank, sum(a.tokens) FILTER (WHERE a.is_busy) / nullif(sum(a.mean_tokens) FILTER (WHERE a.is_busy), 0) AS ratio,
           sum(a.longest_ns) FILTER (WHERE a.is_busy) AS longest_ns, sum(a.work_ns) FILTER (WHERE a.is_busy) AS busy_ns,
           avg(a.work_ns) FILTER (WHERE NOT a.is_busy) AS others_ns, avg(a.work_ns) FILTER (WHERE a.is_busy) AS own_ns
    FROM apart a JOIN busiest b ON b."window" = a."window" AND b.place = a.place GROUP BY a."window", a.place
),
places AS (
    SELECT "window", list({layer: nullif(place, -1), rank: rank, ratio: ratio, own_ns: own_ns, others_ns: others_ns}
                          ORDER BY own_ns - others_ns DESC, place)[:600] AS places
    FROM by_place GROUP BY "window"
),
-- How much of the unevenness is always on the same rank of a layer: the rest changes from round to round.
fixed AS (
    SELECT "window", sum(most - mean) AS fixed_tokens
    FROM (SELECT "window", place, max(tokens) AS most, avg(tokens) AS mean
          FROM (SELECT "window", place, rank, sum(tokens) AS tokens FROM apart GROUP BY "window", place, rank) GROUP BY "window", place)
    GROUP BY "window"
),
idle AS (
    SELECT "window", list({rank: rank, idle_ns: idle_ns} ORDER BY idle_ns DESC, rank)[:64] AS idle
    FROM (SELECT w."window", w.rank, sum(r.longest_ns - w.work_ns) AS idle_ns
          FROM work w JOIN rounds r USING ("window", "group", round) GROUP BY w."window", w.rank)
    GROUP BY "window"
),
spans AS (
    SELECT "window", sum(step_ns) AS step_ns, count(*) FILTER (WHERE step IS NOT NULL) AS steps
    FROM (
        SELECT "window", step, median(rank_ns) AS step_ns
        FROM (SELECT "window", step, rank, max(end_ns) - min(start_ns - coalesce(work_ns, 0)) AS rank_ns
              FROM rank_rounds WHERE "window" IN (SELECT "window" FROM totals) GROUP BY "window", step, rank)
        GROUP BY "window", step
        QUALIFY step IS NOT NULL OR bool_and(step IS NULL) OVER (PARTITION BY "window")
    ) GROUP BY "window"
),
tail AS (SELECT * EXCLUDE (component) FROM component_tails WHERE component = 'straggler_wait'),
balance AS (
    SELECT coalesce(m.instance, '') AS instance, s.name, count(*) AS samples, median(m.value) AS usual, min(m.value) AS worst
    FROM metrics m JOIN (SELECT DISTINCT series, name FROM series WHERE name IN ('log:eplb_balancedness', 'log:sglang_expert_balancedness')) s USING (series)
    WHERE m.value > 0 AND m.value <= 1 GROUP BY ALL
)
SELECT 'work' AS told_by, w.*, t.* EXCLUDE ("window"), p.steps, p.step_ns, s.* EXCLUDE ("window"), v.* EXCLUDE ("window"), g.lasting_ns, g.follows, f.fixed_tokens, l.places, i.idle,
       (SELECT bool_or(k.recorded) FROM expert_work k WHERE k."window" = w."window") AS recorded,
       (SELECT sum(own_ns) FROM rank_rounds) AS all_own_ns,
       c.*
FROM windows w JOIN totals t USING ("window")
LEFT JOIN spans p USING ("window") LEFT JOIN per_token s USING ("window") LEFT JOIN explained v USING ("window") LEFT JOIN lasting g USING ("window")
LEFT JOIN fixed f USING ("window") LEFT JOIN places l USING ("window") LEFT JOIN idle i USING ("window") LEFT JOIN tail c ON true
UNION ALL BY NAME
SELECT 'load' AS told_by, * FROM (SELECT "set", instance, {kind: kind, placement: placement, experts: experts, spare: spare, layers: layers, ranks: ranks, steps: steps,
           windows: windows, tokens: tokens, expert_ratio_median: expert_ratio_median, expert_ratio: expert_ratio, expert_by_chance: expert_by_chance,
           expert_layer: expert_layer, expert: expert, rank_ratio: rank_ratio, rank_ratio_worst: rank_ratio_worst, rank_by_chance: rank_by_chance,
           rank_layer: rank_layer, "rank": "rank", pass_ratio: pass_ratio, pass_by_chance: pass_by_chance, correlation: correlation,
           overlap: overlap, gains: gains} AS load FROM expert_sets)
UNION ALL BY NAME
SELECT 'balance' AS told_by, instance, {name: name, samples: samples, usual: usual, worst: worst} AS balance FROM balance
ORDER BY told_by DESC, "window", "set", instance
