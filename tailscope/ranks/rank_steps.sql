-- rank_steps: which step of the engine (k of `steps`) each annotated step of a profile is. The annotation encloses the
-- model's run, so it lies in the tile of its step, or ends a little after it where the next was scheduled ahead; of the tiles
-- around it the one with the same batch is the one. `alike` says whether the batch was compared and is the same.
CREATE OR REPLACE TEMP TABLE rank_steps AS
WITH sole AS (SELECT instance, min(engine) AS engine FROM steps GROUP BY instance HAVING count(DISTINCT engine) = 1),
mine AS (
    SELECT w."window", w.rank, i.iteration AS step, w.instance, coalesce(w.engine, sole.engine) AS engine,
           instant(i.start_ns) AS start_ns, instant(i.end_ns) AS end_ns, i.prefill_tokens, i.decode_requests
    FROM rank_windows w
    JOIN iterations i ON i.source = w.source AND i.rank = w.rank
    LEFT JOIN sole ON sole.instance = w.instance
    WHERE w.used AND instant(i.end_ns) IS NOT NULL
),
placed AS (
    SELECT m.*, s.k AS near
    FROM mine m ASOF JOIN steps s
      ON s.instance = m.instance AND s.engine IS NOT DISTINCT FROM m.engine AND s.end_ns >= m.end_ns
),
candidates AS (
    SELECT p.*, s.k, abs(s.end_ns - p.end_ns) AS apart_ns,
           p.prefill_tokens = s.prefill_tokens AND p.decode_requests = s.decode_requests AS alike
    FROM (SELECT *, near + unnest([-1, 0, 1, 2]) AS around FROM placed) p JOIN steps s ON s.k = p.around
    WHERE s.instance = p.instance AND s.engine IS NOT DISTINCT FROM p.engine
      AND s.end_ns > p.start_ns AND s.start_ns < p.end_ns + 1000000000
),
best AS (
    FROM candidates
    QUALIFY row_number() OVER (PARTITION BY "window", rank, step ORDER BY coalesce(alike, false) DESC, apart_ns, k) = 1
)
SELECT "window", rank, step, instance, engine, k, alike, start_ns, end_ns FROM best
-- Two steps of a profile cannot be one of the engine's.
QUALIFY row_number() OVER (PARTITION BY "window", rank, k ORDER BY coalesce(alike, false) DESC, apart_ns, step) = 1;
