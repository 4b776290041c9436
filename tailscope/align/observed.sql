-- observed: one row per request and observer, inside the chosen window, with the id all observers share.
-- `view` is front (an engine's API server: has TTFT), core (an engine's scheduler), client or gateway.
CREATE OR REPLACE TEMP TABLE observed AS
WITH rows AS (
    SELECT
        * REPLACE (
            coalesce(instance, '') AS instance,
            instant(arrival_ns) AS arrival_ns, instant(intended_ns) AS intended_ns, instant(queued_ns) AS queued_ns, instant(scheduled_ns) AS scheduled_ns,
            instant(first_token_ns) AS first_token_ns, instant(last_token_ns) AS last_token_ns,
            instant(finished_ns) AS finished_ns,
            duration(queue_ns) AS queue_ns, duration(prefill_ns) AS prefill_ns, duration(decode_ns) AS decode_ns,
            duration(kv_transfer_ns) AS kv_transfer_ns, duration(ttft_ns) AS ttft_ns, duration(e2e_ns) AS e2e_ns,
            number(prompt_tokens) AS prompt_tokens, number(cached_tokens) AS cached_tokens,
            number(output_tokens) AS output_tokens, number(max_tokens) AS max_tokens,
            number(preemptions) AS preemptions
        ),
        -- Of an unfinished request only the limit tells how long it was going to be.
        number(CASE WHEN status IN ('unfinished', 'aborted') THEN coalesce(max_tokens, output_tokens)
                    ELSE output_tokens END) AS expected_tokens
    FROM requests
    WHERE instant(arrival_ns) IS NOT NULL
      AND ($from_ns IS NULL OR arrival_ns >= $from_ns)
      AND ($to_ns IS NULL OR arrival_ns < $to_ns)
      AND ($instance IS NULL OR instance = $instance)
)
SELECT
    row_number() OVER (ORDER BY instance, arrival_ns, request_key) AS oid,
    instance, engine, source, request_key, request_id, observer, role, model, adapter, tenant, priority, klass,
    arrival_ns, queued_ns, scheduled_ns, first_token_ns, last_token_ns, finished_ns,
    queue_ns, prefill_ns, decode_ns, ttft_ns, e2e_ns, kv_transfer_ns, intended_ns,
    prompt_tokens, cached_tokens, output_tokens, expected_tokens, max_tokens, preemptions, status,
    CASE WHEN observer = 'engine' AND ttft_ns IS NULL THEN 'core'
         WHEN observer = 'engine' THEN 'front'
         ELSE coalesce(observer, 'front') END AS view,
    -- vLLM appends the prompt's index to the id of a completion; the client never sees it.
    CASE WHEN observer = 'engine' THEN regexp_replace(request_id, '^(cmpl-.*)-[0-9]+$', '\1')
         ELSE request_id END AS shared_id
FROM rows;
