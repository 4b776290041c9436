-- One row per replica, and class and metric that has a tail: what of its excess the replica's requests make by being slower than on
-- its peers; NULL where its peers served none of the class.
SELECT r.*, t.klass, t.metric, t.lost_s, t.tail_share, t.p99_s, t.peers_p99_s,
       k.p50_s, k.excess_s, k.tail_rule, k.slo_broken
FROM replicas r
LEFT JOIN replica_tails t ON t.instance = r.instance AND t.engine IS NOT DISTINCT FROM r.engine
LEFT JOIN class_rows k ON k.klass = t.klass AND k.metric = t.metric
ORDER BY r.instance, r.engine, t.klass, t.metric
