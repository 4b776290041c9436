-- scheduled: which request was in which steps and what it was given there, where a scheduler told: runs of steps
-- k_first to k_last of `steps` in which phase and tokens per step stay the same. rid is the request's in `joined`, NULL
-- where nobody else told of it (aborted, outside the window); `stay` tells such requests apart all the same.
-- Before a run the request may have waited for KV cache from elsewhere, fetch_ns to fetched_ns.
-- A step j of a run starts with computed_before + tokens * (j - k_first) of the request's tokens computed.
CREATE OR REPLACE TEMP TABLE stays AS
SELECT row_number() OVER (ORDER BY instance, engine, min(first_end_ns), source, stay, any_value(request_id)) - 1 AS sid,
       instance, engine, source, stay, unnamed_by, any_value(request_id) AS request_id,
       min(first_end_ns) AS first_ns, max(last_end_ns) AS last_ns, arg_min(number(computed_before), first_end_ns) AS found_tokens
FROM (
    -- Of a source that does not number its requests each id is one.
    SELECT * REPLACE (coalesce(instance, '') AS instance, instant(first_end_ns) AS first_end_ns, instant(last_end_ns) AS last_end_ns),
           CASE WHEN stay IS NULL THEN request_id END AS unnamed_by
    FROM schedule
)
GROUP BY instance, engine, source, stay, unnamed_by;

-- Requests and stays that share an id and overlap in time: those closest to each other at their ends, both ways; where
-- as many of an id are on both sides, in the order of their ends, as answers to one call may all end in one step; then of
-- what they found in the prefix cache.
CREATE OR REPLACE TEMP TABLE stay_pairs AS
WITH crowded AS (
    SELECT instance, request_id FROM stays GROUP BY ALL HAVING count(*) > 64
    INTERSECT
    SELECT instance, request_id FROM joined WHERE engine_saw GROUP BY ALL HAVING count(*) > 64
),
lefts AS (
    SELECT sid, instance, engine, request_id, first_ns, last_ns,
           row_number() OVER (same ORDER BY last_ns, found_tokens, sid) AS nth, count(*) OVER same AS many
    FROM stays WHERE request_id IS NOT NULL WINDOW same AS (PARTITION BY instance, request_id)
),
rights AS (
    SELECT rid, instance, engine, request_id, arrival_ns, arrival_ns + e2e_ns AS end_ns,
           row_number() OVER (same ORDER BY arrival_ns + e2e_ns, cached_tokens, rid) AS nth, count(*) OVER same AS many
    FROM joined WHERE engine_saw AND request_id IS NOT NULL WINDOW same AS (PARTITION BY instance, request_id)
),
candidates AS (
    SELECT s.sid, j.rid, CASE WHEN s.many = j.many AND s.nth = j.nth THEN -1 ELSE abs(j.end_ns - s.last_ns) END AS distance
    FROM lefts s JOIN rights j ON s.instance = j.instance AND s.request_id = j.request_id
    WHERE (s.engine IS NULL OR j.engine IS NULL OR s.engine = j.engine)
      AND (s.instance, s.request_id) NOT IN (SELECT (instance, request_id) FROM crowded)
      -- Clocks of one host, give or take a second.
      AND coalesce(s.last_ns >= j.arrival_ns - 1_000_000_000 AND s.first_ns <= j.end_ns + 1_000_000_000, true)
)
SELECT sid, rid
FROM (SELECT sid, arg_min(rid, (distance, rid)) AS rid FROM candidates GROUP BY sid)
JOIN (SELECT rid, arg_min(sid, (distance, sid)) AS sid FROM candidates GROUP BY rid) USING (sid, rid);

CREATE OR REPLACE TEMP TABLE scheduled AS
SELECT f.k AS k_first, coalesce(l.k, f.k + r.iteration_last - r.iteration_first) AS k_last, p.rid, s.sid AS stay, r.phase,
       number(r.tokens) AS tokens, number(r.computed_before) AS computed_before,
       instant(r.fetch_ns) AS fetch_ns, instant(r.fetched_ns) AS fetched_ns
FROM (SELECT *, coalesce(instance, '') AS place FROM schedule) r
-- Steps count from 0 again when an engine is started again: the ends of a step are close in all sources, restarts are not.
JOIN steps f ON f.instance = r.place AND f.engine IS NOT DISTINCT FROM r.engine AND f.iteration = r.iteration_first
 AND coalesce(abs(f.end_ns - instant(r.first_end_ns)) <= 10_000_000_000, true)
LEFT JOIN steps l ON l.instance = r.place AND l.engine IS NOT DISTINCT FROM r.engine AND l.iteration = r.iteration_last
 AND coalesce(abs(l.end_ns - instant(r.last_end_ns)) <= 10_000_000_000, true) AND l.k >= f.k
JOIN stays s ON s.instance = r.place AND s.engine IS NOT DISTINCT FROM r.engine AND s.source IS NOT DISTINCT FROM r.source
 AND s.stay IS NOT DISTINCT FROM r.stay
 AND s.unnamed_by IS NOT DISTINCT FROM CASE WHEN r.stay IS NULL THEN r.request_id END
LEFT JOIN stay_pairs p ON p.sid = s.sid;

INSERT INTO coverage
SELECT 'schedule → steps', (SELECT count(*) FROM scheduled), count(*), 0
FROM schedule WHERE coalesce(instance, '') IN (SELECT instance FROM steps) HAVING count(*) > 0
UNION ALL
-- Requests that ran wholly in the time told of.
SELECT 'schedule → requests', count(*) FILTER (WHERE j.rid IN (SELECT rid FROM stay_pairs)), count(*), 0
FROM joined j
JOIN (SELECT instance, min(first_ns) AS first_ns, max(last_ns) AS last_ns FROM stays GROUP BY instance) t USING (instance)
WHERE j.engine_saw AND j.billed AND j.arrival_ns >= t.first_ns AND j.arrival_ns + j.e2e_ns <= t.last_ns
HAVING count(*) > 0;
DROP TABLE stays;
