-- One row per window of profiles in which ranks work between dispatch and combine (`work`), per recording of experts' tokens
-- (`load`), and per series of balancedness that a log or `/metrics` gives (`balance`). Work is told by each rank's own
-- clock, so clocks do not matter here. The slope, time per token, is what work does when tokens differ between the other
-- ranks of a round, and when those of the busiest rank change over time: not how the busiest rank differs from the
-- others, which a slow device would explain as well.
WITH work AS (SELECT *, coalesce(layer, -1) AS place FROM expert_work),
stepped AS (SELECT "window", bool_or(step IS NOT NULL) AS has_steps FROM work GROUP BY "window"),
-- Passes outside of annotated steps (dummy batches) count only where no step is annotated at all.
rounds AS (
    SELECT "window", "group", round, any_value(place) AS place, count(*) AS ranks, count(tokens) AS told,
           max(work_ns) AS longest_ns, avg(work_ns) AS mean_ns, max(tokens) AS most, avg(tokens) AS mean_tokens,
           -- Few tokens may take as long as the weights do, many as long as they are: batches of a size, within a factor of two, are alike.
           floor(log2(greatest(avg(tokens), 1e-9))) AS size,
           arg_max(tokens, work_ns) AS slowest_tokens
    FROM work JOIN stepped USING ("window") GROUP BY "window", "group", round
    HAVING count(*) >= 2 AND (bool_or(step IS NOT NULL) OR NOT any_value(has_steps))
),
busiest AS (
    SELECT "window", place, arg_max(rank, work_ns) AS busy
    FROM (SELECT "window", place, rank, sum(work_ns) AS work_ns FROM work GROUP BY "window", place, rank) GROUP BY "window", place
),
apart AS (
    SELECT w."window", w."group", w.round, w.place, w.rank, w.rank = b.busy AS is_busy, w.work_ns::DOUBLE AS work_ns, w.tokens,
           r.ranks, r.size, r.mean_tokens, r.longest_ns
    FROM work w JOIN rounds r USING ("window", "group", round) JOIN busiest b ON b."window" = w."window" AND b.place = w.place
    WHERE r.told = r.ranks
),
others AS (
    SELECT "window", "group", round, avg(work_ns) AS work_ns, avg(tokens) AS tokens FROM apart WHERE NOT is_busy
    GROUP BY "window", "group", round
),
-- The busiest rank is held against itself over time, so its mean is taken off.
beside AS (
    SELECT a."window", a.size, a."group", a.round, a.place, a.is_busy, a.tokens,
           a.work_ns - o.work_ns - CASE WHEN a.is_busy THEN avg(a.work_ns - o.work_ns) OVER busy ELSE 0 END AS more_ns,
           a.tokens - o.tokens - CASE WHEN a.is_busy THEN avg(a.tokens - o.tokens) OVER busy ELSE 0 END AS more_tokens
    FROM apart a JOIN others o USING ("window", "group", round)
    WINDOW busy AS (PARTITION BY a."window", a.size, a.place, a.is_busy)
),
parts AS (
    SELECT *, CASE WHEN is_busy THEN 'busy' ELSE 'others' END AS part FROM beside
    UNION ALL
    SELECT *, 'all' FROM beside
),
fits AS (
    SELECT "window", size, part, sum(more_tokens * more_tokens) AS sxx, sum(more_tokens * more_ns) / sum(more_tokens * more_tokens) AS slope,
           count(DISTINCT place) + 1 AS lost
    -- What is left of equal numbers by rounding is no difference.
    FROM parts GROUP BY "window", size, part HAVING sum(more_tokens * more_tokens) > 1e-12 * sum(tokens * tokens)
),
-- Its error from the rounds' own scatter (clustered, White 1980): work that is longer varies more.
errors AS (
    SELECT "window", size, part, any_value(slope) AS slope,
           sqrt(sum(score * score) * count(*) / (count(*) - any_value(lost))) / any_value(sxx) AS error
    FROM (
        SELECT "window", size, part, any_value(slope) AS slope, any_value(sxx) AS sxx, any_value(lost) AS lost,
               sum(more_tokens * (more_ns - slope * more_tokens)) AS score
        FROM parts JOIN fits USING ("window", size, part) GROUP BY "window", size, part, "group", round
    )
    GROUP BY "window", size, part HAVING count(*) - any_value(lost) >= $rounds / 2
),
-- Where time bends, because few tokens take as long as the weights do, the busiest rank's own slope holds for what is
-- beyond the mean, and the others' for what they would get.
slopes AS (
    SELECT "window", size, bent, others AS others_ns_per_token, CASE WHEN bent THEN busy ELSE every END AS ns_per_token,
           CASE WHEN bent THEN busy_error ELSE every_error END AS ns_per_token_error, CASE WHEN bent THEN others ELSE every END AS below
    FROM (
        SELECT *, coalesce(abs(busy - others) > $bends * sqrt(busy_error * busy_error + others_error * others_error), false) AS bent
        FROM (SELECT "window", size, max(slope) FILTER (WHERE part = 'all') AS every, max(error) FILTER (WHERE part = 'all') AS every_error,
                     max(slope) FILTER (WHERE part = 'busy') AS busy, max(error) FILTER (WHERE part = 'busy') AS busy_error,
                     max(slope) FILTER (WHERE part = 'others') AS others, max(error) FILTER (WHERE part = 'others') AS others_error
              FROM errors GROUP BY "window", size)
    )
    WHERE every IS NOT NULL
),
-- What the slowest rank of each round would take if all got the same number of tokens.
evened AS (
    SELECT "window", sum(longest_ns - even_ns) AS saved_ns
    FROM (SELECT a."window", any_value(a.longest_ns) AS longest_ns,
                 max(a.work_ns - greatest(CASE WHEN a.tokens > a.mean_tokens THEN s.ns_per_token ELSE s.below END, 0)
                     * (a.tokens - a.mean_tokens)) AS even_ns
          FROM apart a JOIN slopes s USING ("window", size) GROUP BY a."window", a."group", a.round)
    GROUP BY "window"
),
totals AS (
    SELECT "window", count(*) AS rounds, count(*) FILTER (WHERE told = ranks) AS told_rounds, max(ranks) AS ranks,
           sum(longest_ns - mean_ns) AS lost_ns, sum(longest_ns) AS longest_ns,
           sum(most) FILTER (WHERE told = ranks) AS most, sum(mean_tokens) FILTER (WHERE told = ranks) AS mean_tokens
    FROM rounds GROUP BY "window"
),
-- By size, what the slowest rank of each round takes more than the mean, and gets more; a slope for all sizes as far as these go.
more AS (
    SELECT "window", size, sum(longest_ns - mean_ns) AS more_ns, sum(slowest_tokens - mean_tokens) AS more_tokens
    FROM rounds WHERE told = ranks GROUP BY "window", size
),
per_token AS (
    SELECT "window", sum(more_ns) AS more_ns, sum(more_tokens) AS more_tokens, sum(ns_per_token * more_tokens) / nullif(sum(more_tokens), 0) AS ns_per_token,
           sqrt(sum(ns_per_token_error * ns_per_token_error * more_tokens * more_tokens)) / nullif(abs(sum(more_tokens)), 0) AS ns_per_token_error,
           arg_max(bent, more_ns) AS bent, arg_max(others_ns_per_token, more_ns) AS others_ns_per_token
    FROM more JOIN slopes USING ("window", size) GROUP BY "window"
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
SELECT 'work' AS told_by, w.*, t.* EXCLUDE ("window"), p.steps, p.step_ns, s.* EXCLUDE ("window"), v.saved_ns, f.fixed_tokens, l.places, i.idle,
       (SELECT bool_or(k.recorded) FROM expert_work k WHERE k."window" = w."window") AS recorded,
       (SELECT sum(own_ns) FROM rank_rounds) AS all_own_ns,
       c.*
FROM windows w JOIN totals t USING ("window")
LEFT JOIN spans p USING ("window") LEFT JOIN per_token s USING ("window") LEFT JOIN evened v USING ("window")
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
