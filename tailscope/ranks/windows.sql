-- windows: a row per window of profiles, of what `rank_windows` says of each profile in it. `doubled`: profiles that claim a rank
-- that a larger one has at that time, which nothing else counts.
CREATE OR REPLACE TEMP VIEW windows AS
SELECT "window", any_value(world) AS world, any_value(instance) AS instance, any_value(world_size) AS world_size,
       any_value(missing) AS missing, any_value(collectives) AS collectives, any_value(unmatched) AS unmatched,
       list(DISTINCT rank ORDER BY rank) FILTER (WHERE used) AS profiled, len(profiled) AS present,
       count(*) FILTER (WHERE NOT used) AS doubled,
       min(first_ns) FILTER (WHERE used) AS first_ns, max(last_ns) FILTER (WHERE used) AS last_ns
FROM rank_windows GROUP BY "window"
