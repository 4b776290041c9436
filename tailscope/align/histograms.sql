-- histograms: observations of each latency concept in the window, cumulative by upper bound, over all series
-- with the same bounds. `lifetime` says that there was one scrape only: all since the server started.
CREATE OR REPLACE TEMP TABLE histograms AS
WITH named AS (SELECT DISTINCT series, name, labels['__concept__'] AS concept FROM series WHERE type = 'histogram'),
samples AS (
    SELECT m.instance, m.series, n.concept, m.time_ns, m.le, m.counts,
           min(m.time_ns) OVER (PARTITION BY m.instance) AS first_scrape_ns,
           count(*) OVER (PARTITION BY m.instance, m.series) AS samples,
           list_last(m.counts) < lag(list_last(m.counts)) OVER w AS restarted
    FROM metrics m JOIN named n USING (series)
    WHERE n.concept IS NOT NULL AND m.counts IS NOT NULL
      AND ($from_ns IS NULL OR m.time_ns >= $from_ns) AND ($to_ns IS NULL OR m.time_ns < $to_ns)
      AND ($instance IS NULL OR m.instance = $instance)
    WINDOW w AS (PARTITION BY m.instance, m.series ORDER BY m.time_ns)
),
runs AS (
    SELECT *, count(*) FILTER (WHERE restarted) OVER (PARTITION BY instance, series ORDER BY time_ns) AS run FROM samples
),
ends AS (
    SELECT instance, series, concept, le, run, any_value(samples) AS samples,
           min(time_ns) AS first_ns, max(time_ns) AS last_ns,
           arg_max(counts, time_ns) AS last_counts,
           CASE WHEN run = 0 AND min(time_ns) = any_value(first_scrape_ns) AND any_value(samples) > 1
                THEN arg_min(counts, time_ns) END AS first_counts
    FROM runs GROUP BY instance, series, concept, le, run
),
buckets AS (
    SELECT concept, instance, le AS bounds, samples, first_ns, last_ns,
           unnest(le) AS upper, unnest(last_counts) AS last_count,
           unnest(coalesce(first_counts, list_transform(le, lambda x: 0.0::DOUBLE))) AS first_count
    FROM ends
)
SELECT concept, instance, bounds, upper, sum(last_count - first_count) AS count,
       max(samples) = 1 AS lifetime, min(first_ns) AS first_ns, max(last_ns) AS last_ns
FROM buckets GROUP BY ALL;
