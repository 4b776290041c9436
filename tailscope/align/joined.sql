-- only_engine: the engine of instances that have one.
CREATE OR REPLACE TEMP VIEW only_engine AS
SELECT instance, any_value(engine) AS engine FROM steps GROUP BY instance HAVING count(DISTINCT coalesce(engine, -1)) = 1;

-- joined: one row per request, its observers side by side: client, gateway, engine. `client_*` are the outermost
-- observer's, `outer_view`, which is the gateway where no client is known. An engine's view comes first; a request that only
-- the client saw (refused, aborted, failed) is a row without engine times, and has a bill only where no engine of
-- its instance told of requests at all. A client's row without an id cannot be joined: beside an engine's rows it
-- would count its request twice.
CREATE OR REPLACE TEMP TABLE joined AS
WITH engine_rows AS (
    SELECT f.oid AS base, f.oid AS front, p.b AS core
    FROM observed f LEFT JOIN core_pairs p ON p.a = f.oid
    WHERE f.view = 'front'
    UNION ALL
    SELECT c.oid, NULL, c.oid FROM observed c
    WHERE c.view = 'core' AND c.oid NOT IN (SELECT b FROM core_pairs)
),
told AS (SELECT DISTINCT instance FROM observed WHERE view IN ('front', 'core')),
all_rows AS (
    SELECT e.*, coalesce(p.a, g.a) AS client, g.a AS gateway
    FROM engine_rows e LEFT JOIN client_pairs p ON p.b = e.base LEFT JOIN gateway_pairs g ON g.b = e.base
    UNION ALL
    SELECT c.oid, NULL, NULL, c.oid, coalesce(g.b, CASE WHEN c.view = 'gateway' THEN c.oid END)
    FROM observed c LEFT JOIN edge_pairs g ON g.a = c.oid
    WHERE c.view IN ('client', 'gateway')
      AND c.oid NOT IN (SELECT a FROM client_pairs UNION ALL SELECT a FROM gateway_pairs UNION ALL SELECT b FROM edge_pairs)
      AND (c.request_id IS NOT NULL OR c.instance NOT IN (SELECT instance FROM told))
),
wide AS (
    SELECT
        row_number() OVER (ORDER BY b.instance, b.arrival_ns, b.request_key) - 1 AS rid,
        b.instance,
        coalesce(b.engine, k.engine, o.engine) AS engine,
        coalesce(b.engine, k.engine) IS NOT NULL OR o.instance IS NOT NULL AS engine_known,
        a.front IS NOT NULL OR a.core IS NOT NULL AS engine_saw,
        (a.front IS NOT NULL OR a.core IS NOT NULL OR b.instance NOT IN (SELECT instance FROM told))
            AND coalesce(b.status, 'ok') = 'ok' AS billed,
        b.observer,
        b.request_key, b.request_id, c.request_key AS client_key,
        coalesce(b.model, c.model) AS model, coalesce(b.adapter, c.adapter) AS adapter,
        coalesce(b.tenant, c.tenant) AS tenant, coalesce(b.priority, c.priority) AS priority,
        coalesce(b.klass, c.klass) AS named_class,
        b.arrival_ns, b.finished_ns,
        -- Front end: wall clock, arrival to first output. Core: no TTFT, but its parts.
        coalesce(b.e2e_ns, b.finished_ns - b.arrival_ns, b.ttft_ns + b.decode_ns) AS e2e_ns,
        coalesce(b.ttft_ns, b.e2e_ns - b.decode_ns, b.queue_ns + b.prefill_ns) AS ttft_ns,
        coalesce(b.queue_ns, k.queue_ns) AS queue_ns,
        coalesce(b.prefill_ns, k.prefill_ns) AS prefill_ns,
        coalesce(b.kv_transfer_ns, k.kv_transfer_ns) AS kv_transfer_ns,
        coalesce(b.prompt_tokens, k.prompt_tokens, c.prompt_tokens) AS prompt_tokens,
        coalesce(b.cached_tokens, k.cached_tokens, c.cached_tokens) AS cached_tokens,
        coalesce(b.output_tokens, k.output_tokens, c.output_tokens) AS output_tokens,
        coalesce(b.expected_tokens, k.expected_tokens, c.expected_tokens) AS expected_tokens,
        coalesce(b.max_tokens, k.max_tokens, c.max_tokens) AS max_tokens,
        coalesce(b.preemptions, k.preemptions) AS preemptions,
        -- An engine does not know that its answer never reached the client.
        CASE WHEN c.status IN ('aborted', 'timeout', 'error', 'rejected') THEN c.status
             WHEN k.status IN ('aborted', 'error') THEN k.status ELSE b.status END AS status,
        c.arrival_ns AS client_arrival_ns, c.ttft_ns AS client_ttft_ns, c.e2e_ns AS client_e2e_ns,
        g.arrival_ns AS gateway_arrival_ns, g.ttft_ns AS gateway_ttft_ns, g.e2e_ns AS gateway_e2e_ns,
        c.view AS outer_view, coalesce(b.role, k.role) AS role
    FROM all_rows a
    JOIN observed b ON b.oid = a.base
    LEFT JOIN observed k ON k.oid = a.core AND a.core <> a.base
    LEFT JOIN observed c ON c.oid = a.client
    LEFT JOIN observed g ON g.oid = a.gateway
    LEFT JOIN only_engine o ON o.instance = b.instance
)
SELECT
    *,
    coalesce(named_class, class_of(prompt_tokens, expected_tokens, max_tokens, priority, tenant, model, adapter, instance),
             'unknown') AS klass
FROM wide;
