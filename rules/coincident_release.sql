-- One row per group of requests that had waited for different times and were let go together, with what they waited for; one without a group where there is none.
WITH seen AS (
    SELECT j.rid, j.klass, j.instance, coalesce(j.engine, -1) AS engine_key, j.arrival_ns, j.arrival_ns + j.ttft_ns AS first_ns, j.prompt_tokens,
           j.engine_saw,
           CASE WHEN j.engine_saw AND NOT coalesce(c.crossed, false) THEN j.client_arrival_ns + coalesce(c.offset_ns, 0) END AS sent_ns,
           coalesce(c.error_ns, 0) AS error_ns
    FROM joined j LEFT JOIN client_clock c ON c.instance = j.instance WHERE j.billed AND j.ttft_ns >= 0
),
-- To their first tokens, from their arrival; and to their arrival at the engine, from when their clients sent them.
points AS (
    SELECT 'first token' AS kind, rid, instance, engine_key, arrival_ns AS begun_ns, first_ns AS time_ns, 0 AS error_ns FROM seen
    UNION ALL
    SELECT 'arrival', rid, instance, -1, sent_ns, arrival_ns, error_ns FROM seen WHERE sent_ns IS NOT NULL
),
placed AS (
    SELECT *, time_ns - lag(time_ns) OVER w AS idle_ns FROM points WINDOW w AS (PARTITION BY kind, instance, engine_key ORDER BY time_ns, rid)
),
heads AS (
    SELECT kind, instance, engine_key, time_ns AS head_ns, idle_ns, least(idle_ns * $together, 500_000_000) AS reach_ns,
           count(*) OVER (PARTITION BY kind, instance, engine_key) AS tried
    FROM placed WHERE idle_ns >= $idle * 1e9
),
waiting AS (
    SELECT p.kind, p.instance, p.engine_key, h.head_ns, h.idle_ns, h.tried, p.rid, p.begun_ns, p.time_ns, p.error_ns
    FROM points p ASOF JOIN heads h ON h.kind = p.kind AND h.instance = p.instance AND h.engine_key = p.engine_key AND h.head_ns <= p.time_ns
    -- Who came no longer before the release than it took waited for nothing.
    WHERE p.time_ns <= h.head_ns + h.reach_ns AND p.begun_ns < h.head_ns - h.reach_ns - p.error_ns
),
found AS (
    -- Answers to one call came together, and are one.
    SELECT kind, instance, engine_key, head_ns, any_value(idle_ns) AS idle_ns, any_value(tried) AS tried, count(DISTINCT begun_ns) AS n, count(*) AS answers,
           max(time_ns) - min(time_ns) AS release_ns, max(begun_ns) - min(begun_ns) AS arrivals_ns, min(begun_ns) AS first_begun_ns,
           sum(time_ns - begun_ns) / 1e9 AS waited_s, max(error_ns) AS error_ns
    FROM waiting GROUP BY kind, instance, engine_key, head_ns HAVING count(DISTINCT begun_ns) >= $least
    QUALIFY row_number() OVER (ORDER BY n DESC, head_ns) <= $most
),
-- What members' waits were booked to. What has no owner is what a release may explain.
booked AS (
    SELECT m.kind, m.instance, m.engine_key, m.head_ns, m.rid, l.component, l.ns,
           l.component IN ('pause', 'unexplained', 'frontend', 'queue') AS is_unowned
    FROM waiting m JOIN found USING (kind, instance, engine_key, head_ns) JOIN bill_lines l ON l.id = m.rid
    WHERE m.kind = 'first token' AND l.place <> 'decode'
),
owned AS (
    SELECT kind, instance, engine_key, head_ns, coalesce(sum(ns) FILTER (WHERE is_unowned), 0) / 1e9 AS unowned_s, sum(ns) / 1e9 AS booked_s,
           coalesce(sum(ns) FILTER (WHERE component = 'frontend'), 0) / 1e9 AS frontend_s,
           arg_max(component, total_ns) FILTER (WHERE NOT is_unowned) AS owner
    FROM (SELECT *, sum(ns) OVER (PARTITION BY kind, instance, engine_key, head_ns, component) AS total_ns FROM booked)
    GROUP BY ALL
),
-- What of a class's excess that is: members' unowned waits by their weight in it.
parts AS (
    SELECT kind, instance, engine_key, head_ns, list({klass: klass, metric: metric, seconds: seconds} ORDER BY klass, metric) AS hurt
    FROM (SELECT b.kind, b.instance, b.engine_key, b.head_ns, m.klass, m.metric, sum(m.before_weight * b.ns) / 1e9 AS seconds
          FROM booked b JOIN (FROM members WHERE metric <> 'ITL' AND before_weight <> 0) m ON m.id = b.rid WHERE b.is_unowned GROUP BY ALL)
    GROUP BY ALL
),
-- What the engine's client had of it: above the class's own p95.
clients AS (
    SELECT j.rid, j.klass, j.client_ttft_ns / 1e9 AS ttft_s,
           quantile_cont(j.client_ttft_ns / 1e9, 0.5) OVER (PARTITION BY j.klass) AS p50_s,
           quantile_cont(j.client_ttft_ns / 1e9, 0.95) OVER (PARTITION BY j.klass) AS p95_s, count(*) OVER (PARTITION BY j.klass) AS n
    FROM joined j WHERE j.billed AND j.client_ttft_ns >= 0
),
client_tails AS (SELECT klass, sum(ttft_s - p50_s) AS excess_s, any_value(p50_s) AS p50_s, count(*) AS tail_n, any_value(n) AS n FROM clients WHERE ttft_s > p95_s GROUP BY klass),
upstream AS (
    SELECT m.kind, m.instance, m.engine_key, m.head_ns,
           list({klass: klass, metric: 'client TTFT', seconds: seconds, excess_s: excess_s, p50_s: p50_s, n: n, tail_n: tail_n} ORDER BY klass) AS client_hurt
    FROM (SELECT m.kind, m.instance, m.engine_key, m.head_ns, c.klass, sum(least((m.time_ns - m.begun_ns) / 1e9, c.ttft_s - c.p50_s)) AS seconds
          FROM waiting m JOIN clients c ON c.rid = m.rid WHERE m.kind = 'arrival' AND c.ttft_s > c.p95_s GROUP BY ALL) m
    JOIN client_tails USING (klass) GROUP BY ALL
),
-- Who they were. The longest prompt's step would have let the others go.
prompts AS (
    SELECT f.kind, f.instance, f.engine_key, f.head_ns, max(s.prompt_tokens) AS longest_prompt, list(DISTINCT s.klass ORDER BY s.klass) AS klasses
    FROM waiting m JOIN found f USING (kind, instance, engine_key, head_ns) JOIN seen s ON s.rid = m.rid GROUP BY ALL
),
-- The step that lasted longest beyond its batch while they waited.
waits AS (
    SELECT f.kind, f.instance, f.engine_key, f.head_ns, c.lane, c.round, c.start_ns, c.end_ns, c.beyond_s, c.reason
    -- There are no more such steps than fit into the time, and few groups: no interval join of much.
    FROM found f JOIN (SELECT lane, round, instance, coalesce(engine, -1) AS engine_key, start_ns, end_ns, beyond_s, reason FROM step_costs
                       WHERE usable AND beyond_s >= $times * (batch_s + ranks_s) AND beyond_s >= $idle / 2) c
      ON c.instance = f.instance AND c.engine_key = f.engine_key AND c.start_ns <= f.head_ns AND c.end_ns >= f.first_begun_ns
    WHERE f.kind = 'first token'
    QUALIFY row_number() OVER (PARTITION BY f.kind, f.instance, f.engine_key, f.head_ns ORDER BY c.beyond_s DESC, c.start_ns) = 1
)
SELECT f.*, o.unowned_s, o.booked_s, o.frontend_s, o.owner, p.hurt, u.client_hurt, r.longest_prompt, r.klasses, w.start_ns AS step_ns, w.beyond_s, w.reason,
       w.lane, w.round, t.tops, (SELECT count(*) FROM lanes) AS lanes,
       (SELECT median(prompt_tokens) FROM seen) AS usual_prompt, -- Without steps at the requests' time a bill does not say what a wait was for.
       steps_cover_requests() AS has_steps,
       (SELECT count(*) FROM seen) AS requests,
       (SELECT count(DISTINCT instance) FROM seen) AS instances, coalesce(h.largest_tried, 0) AS largest_tried,
       (SELECT list({klass: klass, metric: metric, excess_s: excess_s, p50_s: p50_s, slo_broken: slo_broken} ORDER BY klass, metric)
        FROM class_rows WHERE excess_s > 0) AS classes
FROM (SELECT sum(tried) AS largest_tried FROM (SELECT DISTINCT kind, instance, engine_key, tried FROM heads)) h
LEFT JOIN found f ON true
LEFT JOIN owned o USING (kind, instance, engine_key, head_ns)
LEFT JOIN parts p USING (kind, instance, engine_key, head_ns)
LEFT JOIN upstream u USING (kind, instance, engine_key, head_ns)
LEFT JOIN prompts r USING (kind, instance, engine_key, head_ns)
LEFT JOIN waits w USING (kind, instance, engine_key, head_ns)
LEFT JOIN longest_steps t USING (lane)
ORDER BY kind, instance, engine_key, head_ns
