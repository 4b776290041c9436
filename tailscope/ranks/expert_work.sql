-- expert_work: per rank and combine, how long the rank worked since the dispatch, by its own clock, and how many tokens it
-- got in that dispatch. Where no dispatch of the window says so, the load that a recording of experts' tokens gives
-- the rank in this layer, over an even share, is taken in its place (`recorded`).
CREATE OR REPLACE TEMP TABLE expert_work AS
WITH with_experts AS (SELECT DISTINCT "window" FROM rank_rounds WHERE phase = 'combine' AND work_ns IS NOT NULL),
ordered AS (
    SELECT r."window", r."group", r.round, r.rank, r.phase, r.step, r.layer, r.work_ns, r.complete,
           lag(r.phase) OVER w AS before, lag(r.tokens) OVER w AS tokens
    FROM rank_rounds r JOIN with_experts USING ("window")
    WINDOW w AS (PARTITION BY r."window", r.rank ORDER BY r.start_ns, r.end_ns)
),
work AS (
    SELECT "window", "group", round, rank, step, layer, work_ns, tokens, bool_or(tokens IS NOT NULL) OVER (PARTITION BY "window") AS told
    FROM ordered WHERE phase = 'combine' AND before = 'dispatch' AND work_ns IS NOT NULL AND complete
),
places AS (
    SELECT w."window", w.rank, w.instance, coalesce(p.ep, w.rank) AS ep
    FROM rank_windows w LEFT JOIN (SELECT source, any_value(ep) AS ep FROM profiles GROUP BY source) p USING (source) WHERE w.used
)
SELECT k."window", k."group", k.round, k.rank, k.step, k.layer, k.work_ns,
       CASE WHEN k.told THEN k.tokens::DOUBLE ELSE l.load END AS tokens, NOT k.told AS recorded
FROM work k
LEFT JOIN places p ON p."window" = k."window" AND p.rank = k.rank
LEFT JOIN expert_rank_loads l ON NOT k.told AND l.instance = p.instance AND l.layer = k.layer AND l.rank = p.ep;
