"""ITL: the gaps between a request's chunks, tens of millions of them, and what makes the longest ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa

from tailscope.config import Slo
from tailscope.ledger.bills import Ledger, write_gap_bills
from tailscope.ledger.tails import MAX_VALUES, TYPICAL, add_members, describe, objectives
from tailscope.model import ClassRow
from tailscope.store import Trace

#: Typical gaps between tokens are sampled; their mean bill needs no more.
TYPICAL_GAPS = 20_000
#: So are those of a tail of very many.
TAIL_GAPS = 100_000


def write_gaps(trace: Trace, klass: str | None) -> None:
    """Fill `gaps` from chunk times: each gap between a request's chunks, on the engine's clock; none where no chunk's time is
    known."""
    streams, times, view = _GAPS
    trace.connection.execute(streams, {"klass": klass})
    trace.connection.execute(times)
    trace.connection.execute(view)


def write_token_gaps(trace: Trace, ledger: Ledger, slos: tuple[Slo, ...]) -> list[ClassRow]:
    """ITL of each class, and the bills of the gaps that its tail is compared by. After `write_gaps` and `write_left_out`."""
    con = trace.connection
    rows: list[ClassRow] = []
    asked: list[pa.Table] = []
    for entry in trace.rows(
        "SELECT s.klass, s.klass_number, n, s.observer FROM (SELECT klass_number, count(*) AS n FROM gap_times GROUP BY ALL) "
        "JOIN (SELECT klass_number, klass, any_value(observer) AS observer FROM gap_streams GROUP BY ALL) s USING (klass_number) "
        "ORDER BY s.klass"
    ):
        name, n, number = entry["klass"], entry["n"], entry["klass_number"]
        stride = -(-n // MAX_VALUES)
        sample = con.execute(
            "SELECT (end_ns - start_ns) / 1e9 AS value, end_ns FROM gap_times WHERE klass_number = $klass AND hash(id) % $stride = 0 ORDER BY id",
            {"klass": number, "stride": stride},
        ).fetchnumpy()
        values = np.asarray(sample["value"], np.float64)
        ends = np.asarray(sample["end_ns"], np.int64)
        row, tail = describe(name, "ITL", entry["observer"], values, ends)
        row = replace(row, n=n, objectives=objectives(slos, name, "ITL", values, ends))
        if tail is None:
            rows.append(row)
            continue
        threshold = float(values[tail].min())
        low, high = (float(v) for v in np.quantile(values, TYPICAL))
        members = con.execute(
            """
            SELECT id, (end_ns - start_ns) / 1e9 AS value, value >= $threshold AND hash(id) % $thin = 0 AS tail,
                   value BETWEEN $low AND $high AND hash(id) % greatest(1, $n // $most) = 0 AS typical
            FROM gap_times WHERE klass_number = $klass AND (tail OR typical) ORDER BY id
            """,
            {
                "klass": number,
                "threshold": threshold,
                "low": low,
                "high": high,
                "n": n // 5,
                "most": TYPICAL_GAPS,
                "thin": max(1, int(tail.sum()) * stride // TAIL_GAPS),
            },
        ).fetchnumpy()
        is_tail = np.asarray(members["tail"], bool)
        ids, member_values = np.asarray(members["id"], np.int64), np.asarray(members["value"], np.float64)
        # Where most gaps are equal the slowest of them are typical too.
        is_typical = np.asarray(members["typical"], bool)
        weights = is_tail / max(is_tail.sum(), 1) - is_typical / max(is_typical.sum(), 1)
        add_members(trace, "members", name, "ITL", ids, np.zeros(len(ids)), weights, is_tail)
        rows.append(replace(row, tail_n=int(is_tail.sum()), excess_s=float(weights @ member_values)))
        asked.append(pa.table({"id": pa.array(ids)}))
    if asked:
        con.register("asked_ids", pa.concat_tables(asked))
        gaps = con.sql("SELECT g.* FROM gaps g SEMI JOIN asked_ids USING (id)").to_arrow_table()
        con.unregister("asked_ids")
        write_gap_bills(trace, ledger, gaps)
    return rows


#: A gap's number in its stream takes so many bits of its id; the rest is the request's.
_NUMBER_BITS = 24
#: Tens of millions of gaps: numbers only, what is of the whole stream is joined.
_GAPS = (
    """
CREATE OR REPLACE TEMP TABLE gap_streams AS
SELECT coalesce(client_key, request_key) AS key, klass, dense_rank() OVER (ORDER BY klass) AS klass_number, instance, engine, rid, coalesce(preemptions, 0) > 0 AS preempted,
       coalesce(client_arrival_ns + client_ttft_ns - (arrival_ns + ttft_ns), 0) AS delay_ns,
       CASE WHEN client_key IS NULL THEN 'engine' ELSE 'client' END AS observer
FROM joined WHERE billed AND ($klass IS NULL OR klass = $klass)
""",
    f"""
CREATE OR REPLACE TEMP TABLE gap_times AS
WITH chunks AS (
    SELECT s.rid, s.klass_number, instant(t.time_ns) - s.delay_ns AS end_ns,
           lag(end_ns) OVER w AS start_ns, row_number() OVER w AS number
    FROM tokens t JOIN gap_streams s ON s.key = t.request_key
    WINDOW w AS (PARTITION BY s.rid ORDER BY t.seq)
)
SELECT (rid << {_NUMBER_BITS}) + number AS id, klass_number::USMALLINT AS klass_number, start_ns, end_ns FROM chunks WHERE start_ns IS NOT NULL AND end_ns >= start_ns
""",
    f"""
CREATE OR REPLACE TEMP VIEW gaps AS
SELECT g.id, s.klass, s.instance, s.engine, s.rid, s.preempted, s.observer, g.start_ns, g.end_ns
FROM gap_times g JOIN gap_streams s ON s.rid = g.id >> {_NUMBER_BITS}
""",
)
