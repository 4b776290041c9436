-- counters: by how much each counter grew in the window. A counter that falls has started again from 0. A single
-- sample has no growth: a lifetime total is not a rate.
-- A series that appears after an instance's first scrape started from 0 then.
CREATE OR REPLACE TEMP TABLE counters AS
WITH named AS (SELECT DISTINCT series, name, type, labels FROM series),
samples AS (
    SELECT m.instance, m.engine, m.series, n.name, n.labels, m.time_ns, m.value,
           lag(m.value) OVER (PARTITION BY m.instance, m.series ORDER BY m.time_ns) AS before,
           min(m.time_ns) OVER (PARTITION BY m.instance) AS first_scrape_ns
    FROM metrics m JOIN named n USING (series)
    -- Prometheus' query API tells no types; by convention only counters end in _total.
    WHERE (n.type = 'counter' OR n.type = 'unknown' AND n.name LIKE '%\_total' ESCAPE '\') AND m.value IS NOT NULL
      AND ($from_ns IS NULL OR m.time_ns >= $from_ns) AND ($to_ns IS NULL OR m.time_ns < $to_ns)
      AND ($instance IS NULL OR m.instance = $instance)
)
SELECT instance, engine, name, labels['__concept__'] AS concept, labels,
       CASE WHEN count(*) > 1 OR min(time_ns) > any_value(first_scrape_ns) THEN
           sum(CASE WHEN before IS NULL THEN CASE WHEN time_ns > first_scrape_ns THEN value ELSE 0 END
                    WHEN value >= before THEN value - before ELSE value END) END AS increase,
       max(value) AS largest, count(*) AS samples, min(time_ns) AS first_ns, max(time_ns) AS last_ns
FROM samples GROUP BY instance, engine, series, name, labels;
