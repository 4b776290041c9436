-- pauses: steps of the engine beside which something stood that stops it: the profiler beginning or writing its files,
-- EPLB, JIT, the first batch. What of such a step its batch does not account for is a pause, nobody's fault.
CREATE OR REPLACE TEMP TABLE pauses AS
WITH spans AS (
    SELECT coalesce(instance, '') AS instance, engine, 'profiler writes its files' AS reason, last_ns AS first_ns,
           coalesce(exported_ns, last_ns) AS last_ns
    FROM profiles
    UNION ALL
    SELECT coalesce(instance, ''), engine, 'profiler starts', first_ns, first_ns FROM profiles
    UNION ALL
    SELECT coalesce(instance, ''), engine, left(detail, 60), time_ns - coalesce(time_error_ns, 0), time_ns + coalesce(time_error_ns, 0)
    FROM events
    WHERE instant(time_ns) IS NOT NULL
      AND (kind IN ('eplb', 'jit', 'restart') OR (kind = 'config' AND detail ILIKE '%profil%'))
),
found AS (
    SELECT s.k, p.reason
    FROM steps s JOIN spans p
      ON p.instance = s.instance AND (p.engine IS NULL OR s.engine IS NULL OR p.engine = s.engine)
     AND p.first_ns <= s.end_ns AND p.last_ns >= s.start_ns
    UNION ALL
    SELECT k, 'first batch' FROM steps WHERE iteration <= 1
)
SELECT k, string_agg(DISTINCT reason, ', ' ORDER BY reason) AS reason FROM found GROUP BY k;
