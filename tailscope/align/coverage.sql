-- coverage: how much of each join succeeded. matched of total; ambiguous rows had an id that too many rows share.
CREATE OR REPLACE TEMP TABLE coverage AS
WITH span AS (SELECT instance, engine, min(start_ns) AS first_ns, max(end_ns) AS last_ns FROM steps GROUP BY ALL),
whole AS (SELECT instance, min(first_ns) AS first_ns, max(last_ns) AS last_ns FROM span GROUP BY instance)
SELECT 'client request → engine request' AS "join",
       count(*) FILTER (WHERE oid IN (SELECT a FROM client_pairs UNION ALL SELECT a FROM gateway_pairs)) AS matched,
       count(*) AS total,
       count(*) FILTER (WHERE (instance, shared_id) IN (SELECT (instance, id) FROM client_pairs_crowded UNION ALL SELECT (instance, id) FROM gateway_pairs_crowded)) AS ambiguous
FROM observed
-- The engine cannot have seen what was refused or never arrived; what the client gave up is survivorship's.
WHERE view IN ('client', 'gateway') AND (status = 'ok' OR status IS NULL) AND request_id IS NOT NULL
  AND instance IN (SELECT instance FROM observed WHERE view IN ('front', 'core'))
UNION ALL
SELECT 'engine span → stat logger', count(*) FILTER (WHERE oid IN (SELECT a FROM core_pairs)), count(*),
       count(*) FILTER (WHERE (instance, request_id) IN (SELECT (instance, id) FROM core_pairs_crowded))
FROM observed
WHERE view = 'front' AND EXISTS (FROM observed WHERE view = 'core')
UNION ALL
-- A request that names no engine of several is joined to all of them.
SELECT 'request → iterations',
       count(*) FILTER (WHERE coalesce(s.first_ns, w.first_ns) <= j.arrival_ns + j.ttft_ns
                          AND coalesce(s.last_ns, w.last_ns) >= j.arrival_ns + j.ttft_ns),
       count(*), count(*) FILTER (WHERE NOT j.engine_known)
FROM joined j
LEFT JOIN span s ON s.instance = j.instance AND s.engine IS NOT DISTINCT FROM j.engine
LEFT JOIN whole w ON w.instance = j.instance AND NOT j.engine_known
WHERE j.billed AND EXISTS (FROM steps);

-- Steps that do not cover the requests (another zone, another time) say nothing of them.
CREATE OR REPLACE TEMP MACRO steps_cover_requests() AS
    coalesce((SELECT any_value(matched >= 0.5 * total) FROM coverage WHERE "join" = 'request → iterations' AND total > 0), false);
