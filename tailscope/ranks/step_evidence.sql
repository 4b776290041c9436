-- step_evidence: per step of the engine, how long its ranks stood in collectives because one rank's own work made it late,
-- and how much longer than usual transfers of their size took. Of the engine's ranks the one that lost most counts.
-- caused_ns: of the time lost to a late rank what the engine's own ranks made all of them lose.
--
-- By chance each of an engine's ranks is the last one now and then: where none makes the others wait $more times as long as most do, none
-- is late. Engines that step together have work of their own, so that the ledger judges them.
CREATE OR REPLACE TEMP TABLE step_evidence AS
WITH told AS (
    SELECT "window", "group", round, max(own_ns) AS late_ns, arg_max(rank, own_ns) AS late_rank, max(slow_ns) AS slow_ns
    FROM rank_rounds
    WHERE complete
    GROUP BY "window", "group", round
    -- Below three times the clocks' error nothing is known of arrivals.
    HAVING max(own_ns) = 0 OR max(caused_ns) > 3 * max(error_ns) OR max(slow_ns) > 0
),
caused AS (SELECT "window", "group", late_rank AS rank, sum(late_ns) AS late_ns FROM told GROUP BY ALL),
members AS (
    SELECT r."window", r."group", r.rank, w.engine, coalesce(c.late_ns, 0) AS late_ns
    FROM (SELECT DISTINCT "window", "group", rank FROM rank_rounds) r
    JOIN rank_windows w ON w."window" = r."window" AND w.rank = r.rank AND w.used
    LEFT JOIN caused c ON c."window" = r."window" AND c."group" = r."group" AND c.rank = r.rank
),
by_chance AS (
    SELECT "window", "group" FROM members GROUP BY ALL
    HAVING count(DISTINCT engine) <= 1 AND max(late_ns) < $more * quantile_disc(late_ns, 0.5)
),
rounds AS (
    SELECT t.* REPLACE (CASE WHEN c."window" IS NULL THEN t.late_ns ELSE 0 END AS late_ns)
    FROM told t LEFT JOIN by_chance c USING ("window", "group")
),
lost AS (
    SELECT s.instance, s.engine, s.k, r.rank, sum(o.late_ns) AS late_ns, sum(o.slow_ns) AS slow_ns,
           sum(o.late_ns) FILTER (WHERE o.late_rank = r.rank) AS caused_ns
    FROM rank_rounds r
    JOIN rounds o USING ("window", "group", round)
    JOIN rank_steps s USING ("window", rank, step)
    GROUP BY s.instance, s.engine, s.k, r.rank
)
SELECT instance, engine, k, max(late_ns)::BIGINT AS late_ns, coalesce(sum(caused_ns), 0)::BIGINT AS caused_ns, max(slow_ns)::BIGINT AS slow_ns
FROM lost GROUP BY instance, engine, k;
