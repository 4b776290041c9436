-- steps: the engine's steps in order, each tiled [end of the one before, end]. Where precise and imprecise
-- sources tell of the same time of an engine, the precise one wins; what the scheduler itself measured before all.
-- A step after an idle engine starts when it is known to have started, else as long before its end as the
-- engine says it took: the idle time between is nobody's.
-- Of two steps that end together the one listed first takes the time.
CREATE OR REPLACE TEMP TABLE steps AS
WITH named AS (
    SELECT coalesce(instance, '') AS instance, engine FROM iterations WHERE engine IS NOT NULL
    UNION
    SELECT coalesce(instance, ''), engine FROM requests WHERE engine IS NOT NULL
),
sole AS (SELECT instance, any_value(engine) AS engine FROM named GROUP BY instance HAVING count(*) = 1),
teller AS (
    -- Profiles show the steps once a rank; they count where the engine itself told nothing.
    SELECT
        coalesce(instance, '') AS instance, engine,
        CASE WHEN NOT bool_or(bool_or(rank IS NULL)) OVER (PARTITION BY coalesce(instance, '')) THEN min(rank) END AS rank
    FROM iterations WHERE instant(end_ns) IS NOT NULL
    GROUP BY coalesce(instance, ''), engine
),
told AS (
    -- A source that names no engine tells of the only one that others name.
    SELECT i.* REPLACE (
        coalesce(i.instance, '') AS instance, coalesce(i.engine, sole.engine) AS engine,
        instant(i.start_ns) AS start_ns, instant(i.end_ns) AS end_ns, duration(i.elapsed_ns) AS elapsed_ns,
        number(prefill_requests) AS prefill_requests, number(prefill_tokens) AS prefill_tokens,
        number(decode_requests) AS decode_requests, number(decode_tokens) AS decode_tokens,
        number(running) AS running, number(waiting) AS waiting, number(deferred) AS deferred,
        CASE WHEN kv_usage BETWEEN 0 AND 1 THEN kv_usage END AS kv_usage
    )
    FROM iterations i
    JOIN teller t ON t.instance = coalesce(i.instance, '')
     AND t.engine IS NOT DISTINCT FROM i.engine AND t.rank IS NOT DISTINCT FROM i.rank
    LEFT JOIN sole ON sole.instance = coalesce(i.instance, '')
    WHERE instant(i.end_ns) IS NOT NULL AND ($instance IS NULL OR coalesce(i.instance, '') = $instance)
),
precise AS (
    SELECT instance, engine, min(end_ns) AS first_ns, max(end_ns) AS last_ns
    FROM told WHERE time_error_ns IS NULL GROUP BY ALL
),
measured AS (
    -- A rank's profile measures too, but counts only where the engine told nothing.
    SELECT instance, engine, min(end_ns) AS first_ns, max(end_ns) AS last_ns
    FROM told WHERE end_basis = 'measured' AND rank IS NULL GROUP BY ALL
),
chosen AS (
    SELECT t.*
    FROM told t LEFT JOIN precise p ON t.instance = p.instance AND t.engine IS NOT DISTINCT FROM p.engine
    LEFT JOIN measured m ON t.instance = m.instance AND t.engine IS NOT DISTINCT FROM m.engine
    WHERE (t.time_error_ns IS NULL OR p.first_ns IS NULL
           -- Log lines have 1 s resolution.
           OR t.end_ns < p.first_ns - 1000000000 OR t.end_ns > p.last_ns + 1000000000)
      -- A front end hears of the last step a little later.
      AND (t.end_basis = 'measured' OR m.first_ns IS NULL
           OR t.end_ns < m.first_ns OR t.end_ns > m.last_ns + 1000000000)
),
ordered AS (
    SELECT
        *,
        lag(end_ns) OVER w AS previous_end_ns,
        -- An engine that counts from the start again has nothing left over.
        CASE WHEN iteration < lag(iteration) OVER w THEN 0
             -- Nor is a step to be blamed for those before it that a scheduler's log lost.
             WHEN end_basis = 'measured' AND iteration > lag(iteration) OVER w + 1 THEN 0
             ELSE lag(running) OVER w + coalesce(lag(waiting) OVER w, 0) + coalesce(lag(deferred) OVER w, 0)
             END AS left_over
    FROM chosen
    WINDOW w AS (PARTITION BY instance, engine ORDER BY end_ns, iteration, prefill_tokens, decode_requests, elapsed_ns)
),
placed AS (
    SELECT
        *,
        CASE
            WHEN start_ns IS NOT NULL THEN greatest(start_ns, coalesce(previous_end_ns, start_ns))
            WHEN previous_end_ns IS NULL THEN end_ns - coalesce(elapsed_ns, 0)
            WHEN left_over > 0 THEN previous_end_ns
            ELSE greatest(previous_end_ns, end_ns - coalesce(elapsed_ns, end_ns - previous_end_ns))
        END AS tile_start_ns
    FROM ordered
)
SELECT
    row_number() OVER (
        ORDER BY instance, engine, end_ns, least(tile_start_ns, end_ns), iteration, prefill_tokens) - 1 AS k,
    instance, engine, iteration, source,
    least(tile_start_ns, end_ns) AS start_ns, end_ns, greatest(end_ns - tile_start_ns, 0) AS tile_ns,
    elapsed_ns, coalesce(time_error_ns, 0) AS time_error_ns,
    coalesce(prefill_requests, 0) AS prefill_requests, coalesce(prefill_tokens, 0) AS prefill_tokens,
    coalesce(decode_requests, 0) AS decode_requests,
    coalesce(decode_tokens, decode_requests, 0) AS decode_tokens,
    running, waiting, deferred, kv_usage, preempted, coalesce(is_dummy, false) AS is_dummy, blocked
FROM placed;
