-- One row per window and rank of a GPU whose profile has launches, and one per engine whose steps have a measured start: how much of its steps' time nothing was launched.
WITH near AS (
    SELECT k, max(end_ns - start_ns) OVER (PARTITION BY instance, engine ORDER BY k ROWS BETWEEN 2 PRECEDING AND 2 FOLLOWING) AS longest_ns FROM steps
),
sampled AS (
    SELECT i."window", i.rank, w.instance, w.engine, i.step, true AS on_gpu,
           i.launch_wait_ns AS idle_ns, coalesce(i.gap_launch_wait_ns, 0) AS gap_ns, i.span_ns + coalesce(i.gap_before_ns, 0) AS time_ns,
           i.kernels, i.launches, i.cpu_step_ns, t.decode_requests,
           -- Whether the engine had something to do before the step; unknown where its own steps are. A gap that is longer than each
           -- of its steps thereabouts lies between them: it had nothing to do, though the profile's steps are matched one too late.
           s.k IS NOT NULL AND s.start_ns = b.end_ns AND coalesce(i.gap_before_ns, 0) <= n.longest_ns AS was_busy
    FROM rank_idle i
    JOIN rank_windows w ON w."window" = i."window" AND w.rank = i.rank AND w.used
    LEFT JOIN (SELECT source, rank, iteration, any_value(decode_requests) AS decode_requests FROM iterations GROUP BY ALL) t
      ON t.source = w.source AND t.rank = i.rank AND t.iteration = i.step
    LEFT JOIN rank_steps r ON r."window" = i."window" AND r.rank = i.rank AND r.step = i.step
    LEFT JOIN steps s ON s.k = r.k
    LEFT JOIN steps b ON b.k = r.k - 1 AND b.instance = s.instance AND b.engine IS NOT DISTINCT FROM s.engine
    LEFT JOIN near n ON n.k = s.k
    WHERE i.step IS NOT NULL AND i.launch_wait_ns IS NOT NULL AND i.span_ns > 0
    UNION ALL
    SELECT NULL, NULL, instance, engine, k, false, start_ns - before_ns, start_ns - before_ns, end_ns - before_ns, NULL, NULL, NULL,
           decode_requests, true
    FROM (
        SELECT coalesce(instance, '') AS instance, engine, row_number() OVER e AS k, instant(start_ns) AS start_ns, instant(end_ns) AS end_ns,
               lag(instant(end_ns)) OVER e AS before_ns, lag(running) OVER e + coalesce(lag(waiting) OVER e, 0) AS left_over,
               decode_requests
        FROM iterations WHERE rank IS NULL AND start_ns IS NOT NULL AND end_ns IS NOT NULL AND end_basis = 'measured'
        WINDOW e AS (PARTITION BY instance, engine, source ORDER BY end_ns)
    ) WHERE left_over > 0 AND start_ns >= before_ns AND end_ns > start_ns
),
usual AS (
    SELECT "window", rank, instance, engine, median(idle_ns) AS usual_idle_ns, median(time_ns) AS usual_ns
    FROM sampled GROUP BY ALL
),
marked AS (
    SELECT d.*, usual_ns, was_busy AND idle_ns >= usual_ns AND idle_ns >= $much * usual_idle_ns AS is_long
    FROM sampled d JOIN usual u
      ON u."window" IS NOT DISTINCT FROM d."window" AND u.rank IS NOT DISTINCT FROM d.rank AND u.instance IS NOT DISTINCT FROM d.instance
     AND u.engine IS NOT DISTINCT FROM d.engine
),
-- Profiles with Python stacks.
stacked AS (
    SELECT "window", rank FROM rank_windows w
    WHERE used AND EXISTS (FROM rank_events e WHERE e.source = w.source AND e.rank = w.rank AND e.category = 'python_function')
    GROUP BY ALL
)
SELECT "window", rank, instance, engine, on_gpu, count(*) AS steps, any_value(usual_ns) AS usual_ns,
       median(idle_ns / time_ns) AS share, median(gap_ns / time_ns) AS gap_share, median(idle_ns) AS idle_ns,
       count(*) FILTER (WHERE is_long) AS long_steps, coalesce(sum(idle_ns) FILTER (WHERE is_long), 0) AS long_ns,
       max(idle_ns) FILTER (WHERE is_long) AS longest_ns, sum(CASE WHEN is_long THEN time_ns ELSE least(time_ns, $capped * usual_ns) END) AS total_ns,
       median(kernels) AS kernels, median(launches) AS launches, median(cpu_step_ns) AS cpu_step_ns,
       list({idle_ns: idle_ns, decode_requests: decode_requests} ORDER BY hash(step), step)
           FILTER (WHERE decode_requests IS NOT NULL AND NOT coalesce(is_long, false))[:2000] AS by_batch,
       (SELECT count(DISTINCT instance) FROM sampled) AS instances,
       coalesce(bool_or(k."window" IS NOT NULL), false) AS with_stack
FROM marked LEFT JOIN stacked k USING ("window", rank)
GROUP BY "window", rank, instance, engine, on_gpu
ORDER BY on_gpu, "window", instance, engine, rank
