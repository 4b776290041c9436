-- One row per long step of engines that step together (a lane), with what stood beside it, who was there, and what it costs each class's tail; one for a lane without any.
WITH long_steps AS (
    SELECT lane, round, coalesce(iteration, round) AS step, iteration IS NOT NULL AS numbered, end_ns, start_ns, beyond_s,
           tile_s / (batch_s + ranks_s) AS times, prefill_tokens, coalesce(iteration <= 1, false) AS is_start, reason
    FROM lead_steps
    WHERE usable AND tile_s > 0 AND beyond_s >= $times * (batch_s + ranks_s)
    QUALIFY row_number() OVER (PARTITION BY lane ORDER BY beyond_s DESC, round) <= $most
),
firsts AS (
    SELECT lane, round, bool_or(nth = 1) AS is_first FROM step_shapes GROUP BY lane, round
),
first_counts AS (SELECT lane, count(*) FILTER (WHERE is_first) AS firsts FROM firsts GROUP BY lane),
-- What the log says of compiling: the rule on first shapes judges that.
compiled AS (
    SELECT coalesce(instance, '') AS instance, engine, instant(time_ns) - coalesce(time_error_ns, 0) AS first_ns,
           instant(time_ns) + coalesce(time_error_ns, 0) AS last_ns
    FROM events WHERE kind IN ('jit', 'graph_fallback') AND instant(time_ns) IS NOT NULL
),
-- What /metrics says of stops that somebody asked for, between two scrapes or at one.
asked AS (
    SELECT coalesce(m.instance, '') AS instance, m.engine, n.name, instant(m.time_ns) AS time_ns, coalesce(m.value, 0) AS value,
           lag(instant(m.time_ns)) OVER s AS before_ns, list_last(m.counts) AS count, lag(list_last(m.counts)) OVER s AS count_before
    FROM metrics m JOIN (SELECT DISTINCT series, name, labels FROM series
                         WHERE name LIKE 'vllm:sleep\_mode\_%' ESCAPE '\' OR name LIKE 'vllm:rl\_weight\_update\_%' ESCAPE '\'
                            OR (name = 'vllm:engine_sleep_state' AND labels['sleep_state'] <> 'awake')) n USING (series)
    WHERE instant(m.time_ns) IS NOT NULL
    WINDOW s AS (PARTITION BY coalesce(m.instance, ''), m.engine, m.series ORDER BY m.time_ns)
),
deliberate AS (
    SELECT instance, engine, CASE WHEN name LIKE '%weight%' THEN 'weight update' ELSE 'sleep mode' END || ' by /metrics' AS what,
           CASE WHEN count > count_before THEN before_ns ELSE time_ns END AS first_ns, time_ns AS last_ns
    FROM asked WHERE CASE WHEN count IS NULL THEN value > 0 ELSE count > count_before END
),
beside AS (
    SELECT o.lane, o.round, bool_or(c.first_ns IS NOT NULL) AS is_compiled, min(d.what) AS deliberate
    FROM long_steps o JOIN leads e USING (lane)
    LEFT JOIN compiled c ON c.instance = e.instance AND (c.engine IS NULL OR e.engine IS NULL OR list_contains(e.engines, c.engine))
     AND c.last_ns >= o.start_ns AND c.first_ns <= o.end_ns
    LEFT JOIN deliberate d ON d.instance = e.instance AND (d.engine IS NULL OR e.engine IS NULL OR list_contains(e.engines, d.engine))
     AND d.last_ns >= o.start_ns AND d.first_ns <= o.end_ns
    GROUP BY o.lane, o.round
),
-- Who came before the end of a step and did not go before its start was in it.
ends AS (
    SELECT o.lane, o.round, l.instance, unnest(l.engines) AS engine, o.start_ns, o.end_ns FROM long_steps o JOIN leads l USING (lane)
),
present AS (
    SELECT e.lane, e.round, sum(coalesce(c.came, 0) - coalesce(g.went, 0)) AS requests
    FROM ends e
    ASOF LEFT JOIN in_flight c ON c.instance = e.instance AND c.engine_key = coalesce(e.engine, -1) AND c.time_ns < e.end_ns
    ASOF LEFT JOIN in_flight g ON g.instance = e.instance AND g.engine_key = coalesce(e.engine, -1) AND g.time_ns <= e.start_ns
    GROUP BY e.lane, e.round
),
hurt AS (FROM hurt_by('long_steps'))
SELECT
    l.*, e.instance, e.engine, e.engines, o.* EXCLUDE (lane), h.hurt, t.tops, c.firsts, p.requests,
    coalesce(f.is_first, false) AS is_first, coalesce(b.is_compiled, false) AS is_compiled, b.deliberate,
    (SELECT count(DISTINCT instance) FROM step_costs) AS instances, (SELECT count(*) FROM lanes) AS lanes,
    (SELECT count(*) FROM profiles) AS profiles,
    (SELECT list({klass: klass, metric: metric, excess_s: excess_s, p50_s: p50_s, slo_broken: slo_broken} ORDER BY klass, metric)
     FROM class_rows WHERE excess_s > 0) AS classes
FROM lanes l JOIN leads e USING (lane)
LEFT JOIN long_steps o USING (lane)
LEFT JOIN longest_steps t USING (lane)
LEFT JOIN first_counts c USING (lane)
LEFT JOIN firsts f ON f.lane = o.lane AND f.round = o.round
LEFT JOIN beside b ON b.lane = o.lane AND b.round = o.round
LEFT JOIN present p ON p.lane = o.lane AND p.round = o.round
LEFT JOIN hurt h ON h.lane = o.lane AND h.round = o.round
ORDER BY l.lane, o.round
