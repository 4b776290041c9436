"""Requests of which one of TTFT and E2E is known: logs of answers that were not streamed, and of first tokens alone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tailscope.ledger.tails import MIN_REQUESTS, Members, alike, compared_alike
from tailscope.model import ClassRow
from tailscope.stats import Floats
from tailscope.store import Trace, floats

#: Requests with all that a bill needs.
TIMED = "billed AND ttft_ns >= 0 AND e2e_ns >= ttft_ns"
#: Of classes that have too few of those: requests with one of the two, and nothing that cannot be.
_HALF = "billed AND ((ttft_ns IS NULL AND e2e_ns >= 0) OR (e2e_ns IS NULL AND ttft_ns >= 0))"
#: Those that count for their class, by both or by one.
KNOWN = f"(({TIMED}) OR rid IN (SELECT rid FROM half_timed))"
COLUMNS = {"TTFT": "ttft_ns", "E2E": "e2e_ns"}


def known(metric: str) -> str:
    """SQL: whether the TTFT or E2E of a row of `joined` counts for its class."""
    return f"(({TIMED}) OR (rid IN (SELECT rid FROM half_timed) AND {COLUMNS[metric]} >= 0))"


#: What gives both.
WHERE_FROM = (
    "a log with both (in a mapping: ttft or first_token, and e2e or finished; TTFT needs streamed answers) would say whether "
    "requests wait before their first token or after it"
)


def what_is_missing(trace: Trace) -> tuple[bool, str]:
    """Whether there are requests and any has a latency, and what none or few of a trace's requests have: '' where most have both."""
    [row] = trace.rows(
        "SELECT count(*) AS n, count(ttft_ns) AS ttft, count(e2e_ns) AS e2e FROM joined WHERE billed"
    )
    n, has = row["n"], {"a TTFT": row["ttft"], "an E2E": row["e2e"]}
    if n and not any(has.values()):
        return False, "No request has a TTFT or an E2E"
    lacking = [
        f"{f'only {count:,} of {n:,} requests have' if count else 'no request has'} {what}"
        for what, count in has.items()
        if count < n / 2
    ]
    text = " and ".join(lacking)
    return bool(n), text[:1].upper() + text[1:]


def write_half_timed(trace: Trace) -> None:
    """Fill `half_timed` (rid) and book those requests: queue and prefill where they were measured, the rest to nobody.

    A class that has enough requests with both is judged by them, as before: a bill needs both.
    """
    con = trace.connection
    con.execute(
        f"CREATE OR REPLACE TEMP TABLE half_timed AS WITH of AS (SELECT klass FROM joined WHERE billed GROUP BY klass "
        f"HAVING count(*) FILTER (WHERE {TIMED}) < {MIN_REQUESTS}) SELECT rid FROM joined SEMI JOIN of USING (klass) WHERE {_HALF}"
    )
    con.execute(
        """
        INSERT INTO bill_lines
        WITH told AS (
            SELECT rid, coalesce(e2e_ns, ttft_ns) AS ns, greatest(coalesce(queue_ns, 0), 0) AS queue, greatest(coalesce(prefill_ns, 0), 0) AS prefill
            FROM joined SEMI JOIN half_timed USING (rid)
        ),
        placed AS (SELECT rid, ns, least(queue, ns) AS queue, least(prefill, ns - least(queue, ns)) AS prefill FROM told)
        SELECT rid, place, component, NULL, part FROM (
            SELECT rid, 'queue' AS place, 'queue' AS component, queue AS part FROM placed
            UNION ALL SELECT rid, 'prefill', 'prefill_phase', prefill FROM placed
            UNION ALL SELECT rid, 'whole', 'unexplained', ns - queue - prefill FROM placed
        ) WHERE part > 0
        """
    )


def half_compared(
    trace: Trace, klass: str
) -> Iterator[tuple[ClassRow, NDArray[np.int64], Floats, NDArray[np.int64], Members | None]]:
    """TTFT and E2E of a class with requests in `half_timed`: the row, the requests, their values (s) and arrivals, and the
    members of the tail. What is typical is so for requests alike: by prompt for TTFT, by answer, where its length is known,
    for E2E."""
    if not trace.rows(
        "SELECT 1 FROM half_timed SEMI JOIN (SELECT rid FROM joined WHERE klass = $klass) USING (rid) LIMIT 1",
        {"klass": klass},
    ):
        return
    for metric, column in COLUMNS.items():
        columns = trace.connection.execute(
            f"SELECT rid, observer, arrival_ns, {column} / 1e9 AS value, (prompt_tokens - coalesce(cached_tokens, 0))::DOUBLE AS computed, "
            f"output_tokens::DOUBLE AS output FROM joined WHERE klass = $klass AND {known(metric)} ORDER BY rid",
            {"klass": klass},
        ).fetchnumpy()
        rid, arrivals = (np.asarray(columns[name], np.int64) for name in ("rid", "arrival_ns"))
        if not len(rid):
            continue
        values = floats(columns["value"])
        output, computed = floats(columns["output"]), np.nan_to_num(floats(columns["computed"]))
        size = np.where(np.isfinite(output), output, computed) if metric == "E2E" else computed
        observer = " + ".join(sorted({str(o) for o in columns["observer"]}))
        row, members = compared_alike(klass, metric, observer, arrivals, values, alike(size))
        yield row, rid, values, arrivals, members
