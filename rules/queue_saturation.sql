-- One row per class and metric with the part of its excess that is queueing, beside the longest time that an engine had a
-- queue without a break, what came and was served in it, and what was offered to that engine at other times.
WITH spans AS (
    SELECT instance, engine, min(end_ns - tile_ns) AS first_ns, max(end_ns) AS last_ns,
           -- Windows of some seconds; in a trace of hours longer ones.
           greatest($window * 1e9, (max(end_ns) - min(end_ns - tile_ns)) / 2000)::BIGINT AS width_ns,
           count(*) OVER (PARTITION BY instance) AS engines
    FROM steps GROUP BY instance, engine
),
placed AS (
    SELECT s.*, p.first_ns AS begin_ns, p.width_ns, (s.end_ns - p.first_ns - 1) // p.width_ns AS win
    FROM steps s JOIN spans p ON p.instance = s.instance AND p.engine IS NOT DISTINCT FROM s.engine
),
told AS (
    SELECT instance, engine, win, any_value(begin_ns) + win * any_value(width_ns) AS from_ns, any_value(width_ns) AS width_ns,
           sum(tile_ns) AS busy_ns, coalesce(sum(tile_ns) FILTER (WHERE waiting > 0), 0) AS queued_ns, max(tile_ns) AS longest_ns,
           max(waiting) AS waiting, avg(waiting) AS mean_waiting, quantile_cont(kv_usage, 0.5) AS kv_usage, max(running) AS running,
           count(blocked) AS blocked_told, count(*) FILTER (WHERE blocked = 'budget') AS by_budget,
           count(*) FILTER (WHERE blocked = 'slots') AS by_slots, count(*) FILTER (WHERE blocked = 'kv') AS by_kv
    FROM placed GROUP BY instance, engine, win
),
-- A request that names no engine of several counts for each by its part.
moments AS (
    SELECT p.instance, p.engine, (j.at_ns - p.first_ns) // p.width_ns AS win,
           sum(j.arrived / CASE WHEN j.engine IS NULL THEN p.engines ELSE 1 END) AS arrived,
           sum(j.served / CASE WHEN j.engine IS NULL THEN p.engines ELSE 1 END) AS served
    FROM (
        SELECT instance, engine, arrival_ns AS at_ns, 1 AS arrived, 0 AS served FROM joined WHERE engine_saw
        UNION ALL
        SELECT instance, engine, arrival_ns + e2e_ns, 0, 1 FROM joined WHERE engine_saw AND e2e_ns IS NOT NULL
    ) j JOIN spans p ON p.instance = j.instance AND (j.engine IS NULL OR p.engine IS NOT DISTINCT FROM j.engine)
    WHERE j.at_ns BETWEEN p.first_ns AND p.last_ns
    GROUP BY ALL
),
windows AS (
    SELECT t.*, coalesce(m.arrived, 0) AS arrived, coalesce(m.served, 0) AS served,
           t.queued_ns >= 0.9 * t.busy_ns AND t.busy_ns >= 0.5 * t.width_ns AS backlogged,
           row_number() OVER w AS nth, max(t.longest_ns) OVER (w ROWS BETWEEN 3 PRECEDING AND CURRENT ROW) AS longest_lately_ns
    FROM told t LEFT JOIN moments m ON m.instance = t.instance AND m.engine IS NOT DISTINCT FROM t.engine AND m.win = t.win
    WINDOW w AS (PARTITION BY t.instance, t.engine ORDER BY t.win)
),
-- Windows in which no step ends lie in one long step, and do not end a queue.
runs AS (
    SELECT *, nth - row_number() OVER (PARTITION BY instance, engine, backlogged ORDER BY win) AS run FROM windows
),
episodes AS (
    SELECT instance, engine, run, min(from_ns) AS first_ns, max(from_ns + width_ns) AS last_ns,
           max(longest_lately_ns) / 1e9 AS longest_step_s, max(waiting) AS peak, arg_max(from_ns + width_ns, waiting) AS peak_ns,
           max(nth) AS last_nth, count(*) AS many, sum(arrived) AS arrived, sum(served) AS served,
           max(kv_usage) AS kv_usage, max(running) AS running, least(1.0, sum(busy_ns) / sum(width_ns)) AS busy,
           sum(blocked_told) AS blocked_told, sum(by_budget) AS by_budget, sum(by_slots) AS by_slots, sum(by_kv) AS by_kv
    FROM runs WHERE backlogged GROUP BY instance, engine, run
),
longest AS (
    SELECT *, (last_ns - first_ns) / 1e9 AS seconds, count(*) OVER () AS episodes,
           count(*) FILTER (WHERE last_ns - first_ns >= $lasting * 1e9) OVER () AS lasting_episodes
    FROM episodes ORDER BY seconds DESC, peak DESC, instance, engine LIMIT 1
),
inside AS (
    -- The first and last window of a queue are not all of it; where nothing else is there, they must do.
    SELECT count(*) AS windows, avg(r.served * 1e9 / r.width_ns) AS capacity, stddev_samp(r.served * 1e9 / r.width_ns) AS capacity_sd
    FROM runs r JOIN longest l ON l.instance = r.instance AND l.engine IS NOT DISTINCT FROM r.engine AND l.run = r.run
    WHERE r.backlogged AND (l.many < 4 OR r.from_ns > l.first_ns AND r.from_ns + r.width_ns < l.last_ns)
),
growth AS (
    SELECT sum(r.arrived) * 1e9 / sum(r.width_ns) AS offered, sum(r.served) * 1e9 / sum(r.width_ns) AS given,
           sum(r.width_ns) / 1e9 AS growth_s
    FROM runs r JOIN longest l ON l.instance = r.instance AND l.engine IS NOT DISTINCT FROM r.engine AND l.run = r.run
    WHERE r.backlogged AND r.from_ns < l.peak_ns
),
others AS (
    SELECT count(*) AS quiet_windows, quantile_cont(r.arrived * 1e9 / r.width_ns, 0.9) AS carried,
           quantile_cont(least(1.0, r.busy_ns / r.width_ns), 0.9) AS carried_busy
    FROM runs r JOIN longest l ON l.instance = r.instance AND l.engine IS NOT DISTINCT FROM r.engine
    WHERE r.mean_waiting < 1
),
system AS (
    -- How many requests the engine had at each step's end: constant where clients wait for answers before they send.
    SELECT quantile_cont(p.running + p.waiting, 0.1) AS in_system_low, quantile_cont(p.running + p.waiting, 0.5) AS in_system,
           quantile_cont(p.running + p.waiting, 0.9) AS in_system_high
    FROM placed p JOIN longest l ON l.instance = p.instance AND l.engine IS NOT DISTINCT FROM p.engine
    WHERE p.end_ns BETWEEN l.first_ns AND l.last_ns
),
-- How much of what it can an engine was asked for: tokens a second over all its time, against those while somebody waited.
-- Steps that stand out are no part of what it can.
usual AS (SELECT instance, engine, quantile_cont(tile_ns, 0.5) AS tile_ns FROM steps GROUP BY ALL),
used AS (
    SELECT s.instance AS busiest_instance, s.engine AS busiest_engine, sum(s.prefill_tokens + s.decode_tokens) AS tokens,
           sum(s.prefill_tokens + s.decode_tokens) FILTER (WHERE s.waiting > 0 AND s.tile_ns <= 20 * u.tile_ns) AS queued_tokens,
           coalesce(sum(s.tile_ns) FILTER (WHERE s.waiting > 0 AND s.tile_ns <= 20 * u.tile_ns), 0) AS time_queued_ns,
           max(s.end_ns) - min(s.end_ns - s.tile_ns) AS time_ns, min(s.end_ns - s.tile_ns) AS busiest_first_ns, max(s.end_ns) AS busiest_last_ns,
           max(s.waiting) AS most_waiting, quantile_cont(s.kv_usage, 0.5) FILTER (WHERE s.waiting > 0) AS queued_kv_usage,
           max(s.running) AS most_running, count(*) FILTER (WHERE s.begins) AS queues,
           quantile_cont(s.running + s.waiting, 0.1) AS all_low, quantile_cont(s.running + s.waiting, 0.5) AS all_mid,
           quantile_cont(s.running + s.waiting, 0.9) AS all_high
    FROM (SELECT *, waiting > 0 AND lag(waiting) OVER (PARTITION BY instance, engine ORDER BY end_ns, k) = 0 AS begins FROM steps) s
    JOIN usual u ON u.instance = s.instance AND u.engine IS NOT DISTINCT FROM s.engine
    GROUP BY s.instance, s.engine
    ORDER BY time_queued_ns DESC, s.instance, s.engine LIMIT 1
),
busiest AS (
    SELECT busiest_instance, busiest_engine, busiest_first_ns, busiest_last_ns, most_waiting, most_running, queues, queued_kv_usage,
           all_low, all_mid, all_high, time_queued_ns / time_ns AS time_queued,
           (tokens / time_ns) / (queued_tokens / nullif(time_queued_ns, 0)) AS utilisation,
           (SELECT sum(arrived) * 1e9 FROM moments m WHERE m.instance = busiest_instance AND m.engine IS NOT DISTINCT FROM busiest_engine)
               / time_ns AS arriving
    FROM used
),
stays AS (
    SELECT quantile_cont((e2e_ns - coalesce(queue_ns, 0)) / 1e9, 0.5) AS service_s FROM joined WHERE billed AND e2e_ns IS NOT NULL
),
refused AS (
    SELECT (SELECT count(*) FROM joined WHERE status = 'rejected') + (SELECT count(*) FROM events WHERE kind = 'rejection') AS rejected
),
-- Queueing of each class, and what of it is of requests that came in a lasting queue.
lasting AS (
    SELECT * FROM episodes WHERE last_ns - first_ns >= $lasting * 1e9
),
queued AS (
    SELECT l.id, sum(l.ns) AS ns, any_value(j.klass) AS klass, any_value(j.ttft_ns) AS ttft_ns,
           bool_or(e.run IS NOT NULL) AS lasting,
           coalesce(sum(l.ns) FILTER (WHERE l.component = 'queue_budget'), 0) AS budget_ns,
           coalesce(sum(l.ns) FILTER (WHERE l.component = 'queue_slots'), 0) AS slots_ns,
           coalesce(sum(l.ns) FILTER (WHERE l.component = 'queue_kv'), 0) AS kv_ns
    FROM bill_lines l JOIN joined j ON j.rid = l.id
    LEFT JOIN spans p ON p.instance = j.instance AND p.engine IS NOT DISTINCT FROM j.engine
    LEFT JOIN runs w ON w.instance = p.instance AND w.engine IS NOT DISTINCT FROM p.engine AND w.win = (j.arrival_ns - p.first_ns) // p.width_ns
    LEFT JOIN lasting e ON e.instance = w.instance AND e.engine IS NOT DISTINCT FROM w.engine AND e.run = w.run AND w.backlogged
    WHERE l.component IN ('queue_budget', 'queue_slots', 'queue_kv', 'queue')
    GROUP BY l.id
),
by_class AS (
    SELECT klass, sum(ns) / 1e9 AS all_queued_s, coalesce(sum(ns) FILTER (WHERE lasting), 0) / 1e9 AS lasting_queued_s,
           quantile_cont(ns / ttft_ns, 0.5) FILTER (WHERE lasting AND ttft_ns > 0) AS queued_share,
           count(*) FILTER (WHERE lasting) AS queued_requests
    FROM queued GROUP BY klass
),
reasons AS (
    SELECT coalesce(sum(budget_ns) FILTER (WHERE lasting), 0) / 1e9 AS budget_s, coalesce(sum(slots_ns) FILTER (WHERE lasting), 0) / 1e9 AS slots_s,
           coalesce(sum(kv_ns) FILTER (WHERE lasting), 0) / 1e9 AS kv_s,
           coalesce(sum(budget_ns), 0) / 1e9 AS all_budget_s, coalesce(sum(slots_ns), 0) / 1e9 AS all_slots_s, coalesce(sum(kv_ns), 0) / 1e9 AS all_kv_s
    FROM queued
),
spent AS (
    SELECT klass, metric, sum(excess_s) AS queue_s FROM excess
    WHERE component IN ('queue_budget', 'queue_slots', 'queue_kv', 'queue') GROUP BY ALL
),
limits AS (SELECT max(max_num_seqs) AS max_num_seqs, max(max_num_batched_tokens) AS max_num_batched_tokens FROM configured)
SELECT k.klass, k.metric, k.n, k.p50_s, k.excess_s, k.tail_rule, k.slo_broken,
       coalesce(s.queue_s, 0) AS queue_s, coalesce(b.all_queued_s, 0) AS all_queued_s, coalesce(b.lasting_queued_s, 0) AS lasting_queued_s,
       b.queued_share, coalesce(b.queued_requests, 0) AS queued_requests,
       u.*, e.*, i.*, g.*, o.*, y.*, t.*, r.*, c.*, f.*,
       (SELECT max(last_ns) FROM spans) > e.last_ns + $window * 1e9 AS drained,
       (SELECT max(last_ns) - min(first_ns) FROM spans) / 1e9 AS traced_s,
       (SELECT count(*) FROM spans) AS instances, (SELECT count(waiting) FROM steps) AS told_waiting
FROM class_rows k
LEFT JOIN spent s ON s.klass = k.klass AND s.metric = k.metric
LEFT JOIN by_class b ON b.klass = k.klass
LEFT JOIN longest e ON true
CROSS JOIN inside i CROSS JOIN growth g CROSS JOIN others o CROSS JOIN system y CROSS JOIN stays t CROSS JOIN refused r CROSS JOIN reasons c
CROSS JOIN limits f LEFT JOIN busiest u ON true
ORDER BY k.klass, k.metric
