-- One row per window and what may be slow in it: a rank's link (`rank`), or a group's collectives as a whole (`group`). A rank
-- that always leaves an exchange after the others receives slowly; one that leaves before all others sends slowly, since
-- all but itself wait for what it sends.
WITH links AS (
    -- Gloo moves bytes between processes of one host by their own threads: no link is in it.
    SELECT "window", coalesce(count(DISTINCT host) = 1 AND bool_and(backend LIKE '%gloo%' AND backend NOT LIKE '%nccl%'), false) AS no_link
    FROM rank_windows w LEFT JOIN (SELECT source, any_value(host) AS host, any_value(backend) AS backend FROM profiles GROUP BY source) USING (source)
    GROUP BY "window"
),
lengths AS (
    SELECT "window", count(*) AS steps, sum(replayed_ns) AS replayed_ns, sum(coalesce(as_left_ns, replayed_ns)) AS as_left_ns FROM step_replays GROUP BY "window"
),
rounds AS (FROM rank_rounds WHERE complete AND at_step IS NOT NULL),
-- The shortest stay of some ranks is a wait where the one that came last was lost.
whole AS (SELECT "window", "group", max(ranks) AS ranks FROM rounds GROUP BY "window", "group"),
seen_by_all AS (
    SELECT r.* FROM rounds r
    SEMI JOIN whole w ON w."window" = r."window" AND w."group" = r."group" AND w.ranks IS NOT DISTINCT FROM r.ranks
),
clocks AS (
    SELECT "window", bool_and(basis <> 'one host') AS by_ends, bool_or(NOT together) AS exchanges_only
    FROM rank_clocks GROUP BY "window"
),
-- Where a kind of collective sets the clocks, a rank that always leaves late has a clock that is ahead.
telling AS (
    SELECT r."window", r.kind FROM rounds r JOIN clocks USING ("window")
    GROUP BY r."window", r.kind
    HAVING NOT any_value(exchanges_only) AND (NOT any_value(by_ends) OR r.kind = 'all_to_all')
),
exits AS (
    SELECT r."window", r."group", r.rank, r.at_step, r.kind, sum(r.exit_ns) AS exit_ns, count(*) AS rounds, max(r.error_ns) AS error_ns
    FROM rounds r SEMI JOIN telling t ON t."window" = r."window" AND t.kind = r.kind
    GROUP BY r."window", r."group", r.rank, r.at_step, r.kind
),
by_rank AS (
    SELECT "window", "group", rank, kind, count(*) AS steps_told, count(*) FILTER (WHERE exit_ns > 0) AS steps_late,
           median(exit_ns / rounds) AS exit_ns, max(error_ns) AS error_ns
    FROM exits GROUP BY "window", "group", rank, kind
),
-- What the steps would be shorter by if the rank left with the others, or they with it.
saved AS (SELECT "window", rank, late, sum(saved_ns) AS saved_ns FROM link_costs GROUP BY "window", rank, late),
ranks AS (
    SELECT b.*, c.saved_ns
    FROM by_rank b LEFT JOIN saved c ON c."window" = b."window" AND c.rank = b.rank AND c.late = (b.exit_ns > 0)
),
transfers AS (
    SELECT "window", "group", kind, size, count(*) AS rounds, median(transfer_ns) AS transfer_ns
    FROM seen_by_all WHERE is_last AND size >= 0 GROUP BY "window", "group", kind, size HAVING count(*) >= $steps
),
-- In an exchange the shortest stay is that of who got least, which differs from time to time.
at_times AS (
    SELECT "window", "group", count(*) AS rounds, count(*) FILTER (WHERE slow_ns > 0) AS slow_rounds,
           count(DISTINCT at_step) FILTER (WHERE slow_ns > 0) AS slow_steps, sum(slow_ns) AS slow_ns, arg_max(kind, slow_ns) AS kind,
           median(usual_transfer_ns) FILTER (WHERE slow_ns > 0) AS usual_ns, median(transfer_ns) FILTER (WHERE slow_ns > 0) AS slow_transfer_ns
    -- What no size is known of may be long because it is large.
    FROM seen_by_all WHERE is_last AND kind <> 'all_to_all' AND size >= 0 GROUP BY "window", "group"
),
-- What hits several groups at once may cost little in each. Groups beside each other are slow at one time, not one after the other.
together AS (
    SELECT "window", sum(slow_ns) AS together_ns, count(*) AS together_steps
    FROM (
        SELECT "window", at_step, max(slow_ns) AS slow_ns
        FROM (
            SELECT "window", at_step, rank, sum(slow_ns) AS slow_ns FROM seen_by_all
            WHERE kind <> 'all_to_all' AND size >= 0 GROUP BY "window", at_step, rank
        ) GROUP BY "window", at_step
    ) WHERE slow_ns > 0 GROUP BY "window"
),
-- Groups beside it whose collectives are of the same kind and size, with as many ranks.
members AS (SELECT "window", "group", list(DISTINCT rank ORDER BY rank) AS members FROM rounds GROUP BY "window", "group"),
siblings AS (
    SELECT t."window", t."group", t.kind, t.size, count(*) AS siblings, median(o.transfer_ns) AS sibling_ns, max(o.transfer_ns) AS slowest_sibling_ns
    FROM transfers t JOIN transfers o ON o."window" = t."window" AND o.kind = t.kind AND o.size = t.size AND o."group" <> t."group"
    JOIN members m ON m."window" = t."window" AND m."group" = t."group"
    JOIN members n ON n."window" = o."window" AND n."group" = o."group" AND len(n.members) = len(m.members)
    GROUP BY t."window", t."group", t.kind, t.size
),
beside AS (
    SELECT t."window", t."group", sum(greatest(t.transfer_ns - s.sibling_ns, 0) * t.rounds) FILTER (WHERE t.transfer_ns > s.slowest_sibling_ns) AS over_siblings_ns,
           arg_max(t.transfer_ns, t.transfer_ns / s.sibling_ns) AS own_ns, arg_max(s.sibling_ns, t.transfer_ns / s.sibling_ns) AS sibling_ns,
           max(s.siblings) AS siblings
    FROM transfers t JOIN siblings s ON s."window" = t."window" AND s."group" = t."group" AND s.kind = t.kind AND s.size = t.size
    GROUP BY t."window", t."group"
),
groups AS (
    SELECT m.*, a.* EXCLUDE ("window", "group"), t.* EXCLUDE ("window"), max(a.slow_ns) OVER (PARTITION BY m."window") AS slowest_ns, b.* EXCLUDE ("window", "group")
    FROM members m
    JOIN at_times a ON a."window" = m."window" AND a."group" = m."group"
    LEFT JOIN together t ON t."window" = m."window"
    LEFT JOIN beside b ON b."window" = m."window" AND b."group" = m."group"
),
-- What all slow transfers of the trace took beyond the usual: a finding's part of a class's tail is its part of that.
beyond AS (SELECT sum(slow_ns) AS all_slow_ns FROM rounds WHERE is_last),
tail AS (SELECT * EXCLUDE (component) FROM component_tails WHERE component = 'slow_transfer'),
about AS (
    SELECT w.*, k.no_link, n.steps, n.replayed_ns, n.as_left_ns, c.by_ends, f.*, d.all_slow_ns
    FROM windows w JOIN links k USING ("window") LEFT JOIN lengths n USING ("window") LEFT JOIN clocks c USING ("window") LEFT JOIN tail f ON true CROSS JOIN beyond d
)
SELECT a.*, r."group" AS rank_group, r.kind AS rank_kind, r.* EXCLUDE ("window", "group", kind)
FROM about a LEFT JOIN ranks r ON r."window" = a."window"
UNION ALL BY NAME
SELECT a.*, g.* EXCLUDE ("window") FROM about a JOIN groups g ON g."window" = a."window"
ORDER BY "window", "group" NULLS FIRST, rank_group, rank_kind, rank
