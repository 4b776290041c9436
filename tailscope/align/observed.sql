-- observed: one row per request and observer, inside the chosen window, with the id all observers share.
-- `view` is front (an engine's API server: has TTFT), core (an engine's scheduler), client or gateway.
CREATE OR REPLACE TEMP TABLE observed AS
WITH rows AS (
    SELECT
        * REPLACE (coalesce(instance, '') AS instance),
        -- Of an unfinished request only the limit tells how long it was going to be.
        CASE WHEN status IN ('unfinished', 'aborted') THEN coalesce(max_tokens, output_tokens)
             ELSE output_tokens END AS expected_tokens
    FROM requests
    WHERE arrival_ns IS NOT NULL
      AND ($from_ns IS NULL OR arrival_ns >= $from_ns)
      AND ($to_ns IS NULL OR arrival_ns < $to_ns)
      AND ($instance IS NULL OR instance = $instance)
)
SELECT
    row_number() OVER (ORDER BY instance, arrival_ns, request_key) AS oid,
    instance, engine, source, request_key, request_id, observer, role, model, adapter, tenant, priority, klass,
    arrival_ns, queued_ns, scheduled_ns, first_token_ns, last_token_ns, finished_ns,
    queue_ns, prefill_ns, decode_ns, ttft_ns, e2e_ns,
    prompt_tokens, cached_tokens, output_tokens, expected_tokens, max_tokens, preemptions, status,
    CASE WHEN observer = 'engine' AND ttft_ns IS NULL THEN 'core'
         WHEN observer = 'engine' THEN 'front'
         ELSE coalesce(observer, 'front') END AS view,
    -- vLLM appends the prompt's index to the id of a completion; the client never sees it.
    CASE WHEN observer = 'engine' THEN regexp_replace(request_id, '^(cmpl-.*)-[0-9]+$', '\1')
         ELSE request_id END AS shared_id
FROM rows;
