"""What sets a class's tail apart: mean bill of the tail minus mean bill of matched typical requests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tailscope import stats
from tailscope.config import Slo
from tailscope.ledger.bills import Ledger, write_gap_bills
from tailscope.model import ClassRow
from tailscope.store import Trace

Floats = NDArray[np.float64]

#: Below this many requests a class gets counts only.
MIN_REQUESTS = 20
#: Slowest share, and least number, that stand for a tail where no quantile is allowed.
SLOWEST_SHARE, SLOWEST_LEAST = 0.1, 5
#: Typical is what lies between these quantiles of requests alike in length and cache.
TYPICAL = (0.4, 0.6)
#: A cell of alike requests with fewer than this many is merged into the class.
MIN_CELL = 5
#: Typical gaps between tokens are sampled; their mean bill needs no more.
TYPICAL_GAPS = 20_000
#: Latencies kept for the effective sample size, which needs their order in time.
MAX_VALUES = 1_000_000

METRICS = ("TTFT", "TPOT", "E2E", "ITL")


def write_contrast(trace: Trace, ledger: Ledger, slos: tuple[Slo, ...], klass: str | None) -> list[ClassRow]:
    """Fill `excess` and return the classes' rows.

    `excess`: klass, metric, component, culprit, tail_s, excess_s; the excess of a class and metric
    sums to the measured one. `tail_members`: klass, metric, id, weight (positive in the tail, negative
    in the typical set), the request's arrival and end.
    """
    con = trace.connection
    con.execute(
        "CREATE OR REPLACE TEMP TABLE members(klass VARCHAR, metric VARCHAR, id BIGINT, weight DOUBLE, tail BOOLEAN)"
    )
    rows: list[ClassRow] = []
    wanted = trace.rows(
        "SELECT klass, count(*) AS n FROM joined WHERE billed AND ($klass IS NULL OR klass = $klass) "
        "GROUP BY klass ORDER BY min(prompt_tokens), klass",
        {"klass": klass},
    )
    for row in wanted:
        for metric in ("TTFT", "TPOT", "E2E"):
            rows.append(_request_metric(trace, row["klass"], metric))
    rows += _token_gaps(trace, ledger, klass)
    con.execute(_EXCESS)
    excess: dict[tuple[str, str], dict[str, float]] = {}
    for row in trace.rows("SELECT klass, metric, component, sum(excess_s) AS s FROM excess GROUP BY ALL ORDER BY ALL"):
        excess.setdefault((row["klass"], row["metric"]), {})[row["component"]] = row["s"]
    order = {metric: i for i, metric in enumerate(METRICS)}
    classes = list(dict.fromkeys(r.klass for r in rows))
    rows.sort(key=lambda r: (classes.index(r.klass), order[r.metric]))
    return [_with_excess(r, excess.get((r.klass, r.metric), {}), slos) for r in rows]


#: TPOT is decode per token after the first; the weight of a request's lines holds the division.
_EXCESS = """
CREATE OR REPLACE TEMP TABLE excess AS
WITH lines AS (
    SELECT m.klass, m.metric, m.weight, m.tail, l.component, l.culprit, l.ns
    FROM members m JOIN bill_lines l ON l.id = m.id
    WHERE m.metric = 'E2E' OR m.metric = 'TTFT' AND l.place <> 'decode' OR m.metric = 'TPOT' AND l.place = 'decode'
    UNION ALL
    SELECT m.klass, m.metric, m.weight, m.tail, l.component, l.culprit, l.ns
    FROM members m JOIN gap_lines l ON l.id = m.id WHERE m.metric = 'ITL'
)
SELECT klass, metric, component, culprit,
       sum(weight * ns) FILTER (WHERE tail) / 1e9 AS tail_s,
       sum(weight * ns) / 1e9 AS excess_s
FROM lines GROUP BY ALL
"""

_VALUES = {
    "TTFT": "ttft_ns / 1e9",
    "E2E": "e2e_ns / 1e9",
    "TPOT": "CASE WHEN output_tokens > 1 THEN (e2e_ns - ttft_ns) / 1e9 / (output_tokens - 1) END",
}


def _request_metric(trace: Trace, klass: str, metric: str) -> ClassRow:
    columns = trace.connection.execute(
        f"SELECT rid, {_VALUES[metric]} AS value, coalesce(observer, 'engine') AS observer, arrival_ns, "
        "coalesce(prompt_tokens, 0) AS prompt_tokens, coalesce(cached_tokens, 0) AS cached_tokens, "
        "coalesce(output_tokens, 0) AS output_tokens FROM joined "
        "WHERE billed AND klass = $klass AND ttft_ns >= 0 AND e2e_ns >= ttft_ns "
        "AND value IS NOT NULL AND isfinite(value) ORDER BY rid",
        {"klass": klass},
    ).fetchnumpy()
    values = np.asarray(columns["value"], np.float64)
    arrivals = np.asarray(columns["arrival_ns"], np.int64)
    observers = sorted(set(columns["observer"]))
    row, tail = _describe(klass, metric, " + ".join(observers), values, arrivals)
    if tail is None:
        return row
    prompt, cached, output = (np.asarray(columns[f"{name}_tokens"], np.float64) for name in ("prompt", "cached", "output"))
    alike = _bucket(prompt - cached) * 64 + (_bucket(output) if metric == "E2E" else 0)
    weights = _matched_weights(values, tail, alike)
    per_request = np.maximum(output - 1, 1) if metric == "TPOT" else np.ones(len(values))
    members = np.flatnonzero(weights)
    _add_members(trace, klass, metric, np.asarray(columns["rid"], np.int64)[members], (weights / per_request)[members])
    return replace(row, excess_s=float(weights @ values))


def _with_excess(row: ClassRow, excess: dict[str, float], slos: tuple[Slo, ...]) -> ClassRow:
    limits = {(s.klass, s.metric, s.quantile): s.limit_s for s in slos}
    measured = {"p50": row.p50_s, "p95": row.p95_s, "p99": row.p99_s}
    broken = any(
        value is not None and value > limits.get((row.klass, row.metric, quantile), np.inf)
        for quantile, value in measured.items()
    )
    return replace(row, excess=excess, slo_broken=broken)


def _describe(
    klass: str, metric: str, observer: str, values: Floats, times_ns: NDArray[np.int64], n: int | None = None
) -> tuple[ClassRow, NDArray[np.bool_] | None]:
    """The class's quantiles as far as the samples allow, and which values are its tail (None below MIN_REQUESTS)."""
    n = len(values) if n is None else n
    empty = dict(p50_s=None, p95_s=None, p99_s=None, ci99_s=None, range99_s=None, excess_s=None, excess={})
    if n < MIN_REQUESTS:
        row = ClassRow(
            klass=klass, metric=metric, observer=observer, basis="requests", n=n, n_eff=None,
            reason="too-few-samples", tail_rule=None, tail_n=0, **empty,  # type: ignore[arg-type]
        )  # fmt: skip
        return row, None
    p50, p95, p99 = (float(v) for v in np.quantile(values, [0.5, 0.95, 0.99]))
    # What a quantile is worth depends on how the values beyond it cluster in time.
    n_eff95, n_eff = (stats.effective_samples((values > p).astype(np.float64), times_ns) for p in (p95, p99))
    allowed95, allowed99 = stats.allows_quantile(0.95, n_eff95), stats.allows_quantile(0.99, n_eff)
    if allowed99:
        rule, tail = "above p99", values > p99
    elif allowed95:
        rule, tail = "above p95", values > p95
    else:
        count = max(SLOWEST_LEAST, round(SLOWEST_SHARE * n))
        tail = np.zeros(n, dtype=bool)
        tail[np.argsort(-values, kind="stable")[:count]] = True
        rule = f"slowest {count}"
    if not tail.any():
        tail = values >= values.max()
    interval = stats.quantile_interval(values, 0.99, n_eff) if allowed99 else None
    row = ClassRow(
        klass=klass,
        metric=metric,
        observer=observer,
        basis="requests",
        n=n,
        n_eff=n_eff,
        p50_s=p50,
        p95_s=p95 if allowed95 else None,
        p99_s=p99 if allowed99 else None,
        ci99_s=interval,
        range99_s=None,
        reason=None if allowed99 else "too-few-samples",
        tail_rule=rule,
        tail_n=int(tail.sum()),
        excess_s=None,
        excess={},
    )
    return row, tail


def _bucket(tokens: Floats) -> NDArray[np.int64]:
    """Lengths alike: within a factor of two."""
    return np.asarray(np.floor(np.log2(np.maximum(tokens, 1))), dtype=np.int64)


def _matched_weights(values: Floats, tail: NDArray[np.bool_], alike: NDArray[np.int64]) -> Floats:
    """+1/n for each tail request; for each tail request's cell of alike requests, -1/n spread over its typical ones.

    A cell of few requests takes the class's typical ones, so that weights sum to 0.
    """
    _, index, size = np.unique(alike, return_inverse=True, return_counts=True)
    cell = np.where(size[index] >= MIN_CELL, alike, -1)
    rank, everywhere = _rank_within(cell, values), _rank_within(np.zeros_like(cell), values)
    weights = np.zeros(len(values))
    n = tail.sum()
    weights[tail] += 1 / n
    for wanted, count in zip(*np.unique(cell[tail], return_counts=True), strict=True):
        inside, ranks = (cell == wanted, rank) if wanted >= 0 else (np.ones(len(values), dtype=bool), everywhere)
        typical = inside & (ranks > TYPICAL[0]) & (ranks <= TYPICAL[1])
        if not typical.any():
            typical = inside & (np.abs(ranks - 0.5) == np.abs(ranks[inside] - 0.5).min())
        weights[typical] -= count / n / typical.sum()
    return weights


def _rank_within(cell: NDArray[np.int64], values: Floats) -> Floats:
    """Rank of each value in its cell, as a share of the cell's size in (0, 1]."""
    order = np.lexsort((values, cell))
    _, first, size = np.unique(cell[order], return_index=True, return_counts=True)
    rank = np.empty(len(values))
    rank[order] = (np.arange(len(values)) - np.repeat(first, size) + 1) / np.repeat(size, size)
    return rank


def _token_gaps(trace: Trace, ledger: Ledger, klass: str | None) -> list[ClassRow]:
    """ITL from chunk times: each gap between a request's chunks, billed on the engine's clock."""
    con = trace.connection
    if not trace.has("tokens"):
        return []
    con.execute(_GAPS, {"klass": klass})
    rows: list[ClassRow] = []
    asked: list[pa.Table] = []
    for entry in trace.rows("SELECT klass, count(*) AS n, any_value(observer) AS observer FROM gaps GROUP BY klass ORDER BY klass"):
        name, n = entry["klass"], entry["n"]
        stride = -(-n // MAX_VALUES)
        sample = con.execute(
            "SELECT (end_ns - start_ns) / 1e9 AS value, end_ns FROM gaps WHERE klass = $klass AND id % $stride = 0 ORDER BY id",
            {"klass": name, "stride": stride},
        ).fetchnumpy()
        values = np.asarray(sample["value"], np.float64)
        row, tail = _describe(name, "ITL", entry["observer"], values, np.asarray(sample["end_ns"], np.int64))
        row = replace(row, n=n)
        if tail is None:
            rows.append(row)
            continue
        threshold = float(values[tail].min())
        low, high = (float(v) for v in np.quantile(values, TYPICAL))
        members = con.execute(
            """
            SELECT id, (end_ns - start_ns) / 1e9 >= $threshold AS tail, (end_ns - start_ns) / 1e9 AS value
            FROM gaps WHERE klass = $klass AND ((end_ns - start_ns) / 1e9 >= $threshold
                OR (end_ns - start_ns) / 1e9 BETWEEN $low AND $high AND hash(id) % greatest(1, $n // $most) = 0)
            ORDER BY id
            """,
            {"klass": name, "threshold": threshold, "low": low, "high": high, "n": n // 5, "most": TYPICAL_GAPS},
        ).fetchnumpy()
        is_tail = np.asarray(members["tail"], bool)
        ids, member_values = np.asarray(members["id"], np.int64), np.asarray(members["value"], np.float64)
        weights = np.where(is_tail, 1 / max(is_tail.sum(), 1), -1 / max((~is_tail).sum(), 1))
        _add_members(trace, name, "ITL", ids, weights)
        rows.append(replace(row, tail_n=int(is_tail.sum()), excess_s=float(weights @ member_values)))
        con.register("asked_ids", pa.table({"id": ids}))
        asked.append(con.sql("SELECT g.* FROM gaps g SEMI JOIN asked_ids USING (id)").to_arrow_table())
        con.unregister("asked_ids")
    if asked:
        write_gap_bills(trace, ledger, pa.concat_tables(asked))
    return rows


_GAPS = """
CREATE OR REPLACE TEMP TABLE gaps AS
WITH streams AS (
    SELECT coalesce(client_key, request_key) AS key, klass, instance, engine, rid, coalesce(preemptions, 0) > 0 AS preempted,
           coalesce(client_arrival_ns + client_ttft_ns - (arrival_ns + ttft_ns), 0) AS delay_ns,
           CASE WHEN client_key IS NULL THEN 'engine' ELSE 'client' END AS observer
    FROM joined WHERE billed AND ($klass IS NULL OR klass = $klass)
),
chunks AS (
    SELECT s.*, lag(t.time_ns) OVER (PARTITION BY t.request_key ORDER BY t.seq) AS before_ns, t.time_ns
    FROM tokens t JOIN streams s ON s.key = t.request_key
)
SELECT row_number() OVER (ORDER BY time_ns, rid) AS id, klass, instance, engine, rid, preempted, observer,
       before_ns - delay_ns AS start_ns, time_ns - delay_ns AS end_ns
FROM chunks WHERE before_ns IS NOT NULL AND time_ns >= before_ns
"""


def _add_members(trace: Trace, klass: str, metric: str, ids: NDArray[np.int64], weights: Floats) -> None:
    rows: Any = pa.table({"id": ids, "weight": weights})
    trace.connection.register("new_members", rows)
    trace.connection.execute(
        "INSERT INTO members SELECT $klass, $metric, id, weight, weight > 0 FROM new_members",
        {"klass": klass, "metric": metric},
    )
    trace.connection.unregister("new_members")
