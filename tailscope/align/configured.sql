-- configured: what each instance's log says of its scheduler; the largest where it was started more than once.
CREATE OR REPLACE TEMP TABLE configured AS
SELECT instance,
       max(try_cast(regexp_extract(detail, 'max_num_batched_tokens=([0-9]+)', 1) AS BIGINT)) AS max_num_batched_tokens,
       max(try_cast(regexp_extract(detail, 'max_num_seqs=([0-9]+)', 1) AS BIGINT)) AS max_num_seqs
FROM events WHERE kind = 'config' GROUP BY instance;
