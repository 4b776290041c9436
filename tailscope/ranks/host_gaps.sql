-- host_gaps: per step of the engine (k) the time before it in which its host had not begun it, though the engine had work. It is
-- known where the start of a step and the end of the one before are measured on one clock: by ranks whose profiles hold both
-- (of several the one that waited least, since all must wait), or by an emitter that tells starts. `inside_ns` lies at the
-- beginning of the step's tile, `before_ns` just before it.
CREATE OR REPLACE TEMP TABLE host_gaps AS
WITH own AS (
    SELECT r."window", r.rank, r.k, r.step, r.start_ns - lag(r.end_ns) OVER w AS between_ns,
           lag(r.k) OVER w AS before_k, lag(r.step) OVER w AS before_step
    FROM rank_steps r WINDOW w AS (PARTITION BY r."window", r.rank ORDER BY r.step)
),
-- What runs on a GPU runs on after the call that launched it: there only a kernel that was not launched shows that the host is late.
told AS (
    SELECT o.k, CASE WHEN n.rank IS NULL THEN greatest(o.between_ns, 0) ELSE i.gap_launch_wait_ns END AS gap_ns
    FROM own o
    LEFT JOIN rank_kernels n ON n."window" = o."window" AND n.rank = o.rank
    LEFT JOIN rank_idle i ON i."window" = o."window" AND i.rank = o.rank AND i.step = o.step
    WHERE o.before_k = o.k - 1 AND o.before_step = o.step - 1
),
ranks AS (SELECT k, min(gap_ns) AS gap_ns, count(gap_ns) = count(*) AS all_told FROM told GROUP BY k),
pairs AS (
    SELECT s.k, b.end_ns AS before_end_ns, s.start_ns, s.tile_ns, r.gap_ns, coalesce(r.all_told, true) AS all_told,
           -- Nobody that could run: what it waits for is not the host.
           coalesce(b.running, 1) + coalesce(b.waiting, 0) > 0 AS had_work,
           -- A start that is not measured lies at the end before where there was work.
           s.source IS NOT DISTINCT FROM b.source AND s.iteration IS NOT DISTINCT FROM b.iteration + 1 AS follows
    FROM steps s JOIN steps b ON b.k = s.k - 1 AND b.instance = s.instance AND b.engine IS NOT DISTINCT FROM s.engine
    LEFT JOIN ranks r ON r.k = s.k
)
SELECT p.k, CASE WHEN start_ns = before_end_ns THEN least(gap_ns, tile_ns) END AS inside_ns,
       CASE WHEN start_ns > before_end_ns AND follows THEN least(coalesce(gap_ns, start_ns - before_end_ns), start_ns - before_end_ns) END AS before_ns
FROM pairs p
WHERE had_work AND all_told
  AND CASE WHEN start_ns = before_end_ns THEN gap_ns > 0
           -- A pause of its own.
           ELSE start_ns > before_end_ns AND follows AND p.k NOT IN (SELECT k FROM pauses) END;
