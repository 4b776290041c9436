"""What sets a class's tail apart: mean bill of the tail minus mean bill of matched typical requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tailscope import stats
from tailscope.config import Slo
from tailscope.ledger.bills import Ledger, write_gap_bills
from tailscope.ledger.histogram import ALL
from tailscope.ledger.lines import MODELLED
from tailscope.model import ClassRow, Objective
from tailscope.stats import Floats
from tailscope.store import Trace

#: Below this many requests a class gets counts only.
MIN_REQUESTS = 20
#: Slowest share, and least number, that stand for a tail where no quantile is allowed.
SLOWEST_SHARE, SLOWEST_LEAST = 0.1, 5
#: Typical is what lies between these quantiles: of TTFT among requests with about as many prompt tokens to compute,
#: of decode per token in the class.
TYPICAL = (0.4, 0.6)
#: Typical gaps between tokens are sampled; their mean bill needs no more.
TYPICAL_GAPS = 20_000
#: So are those of a tail of very many.
TAIL_GAPS = 100_000
#: Latencies kept for the effective sample size, which needs their order in time.
MAX_VALUES = 1_000_000

OBJECTIVE_STATUS: dict[bool | None, Literal["kept", "broken", "undecided"]] = {
    True: "broken",
    False: "kept",
    None: "undecided",
}
METRICS = ("TTFT", "TPOT", "E2E", "ITL", "queue")


def write_contrast(trace: Trace, ledger: Ledger, slos: tuple[Slo, ...], klass: str | None) -> list[ClassRow]:
    """Fill `excess` and return the classes' rows.

    `excess`: klass, metric, component, culprit, tail_s, excess_s; the excess of a class and metric
    sums to the measured one.
    """
    con = trace.connection
    con.execute(
        "CREATE OR REPLACE TEMP TABLE members"
        "(klass VARCHAR, metric VARCHAR, id BIGINT, before_weight DOUBLE, decode_weight DOUBLE, tail BOOLEAN)"
    )
    rows: list[ClassRow] = []
    wanted = trace.rows(
        "SELECT klass FROM joined WHERE billed AND ($klass IS NULL OR klass = $klass) "
        "GROUP BY klass ORDER BY min(prompt_tokens), klass",
        {"klass": klass},
    )
    for row in wanted:
        rows += _request_metrics(trace, row["klass"], slos)
    rows += _token_gaps(trace, ledger, slos, klass)
    con.execute(_EXCESS)
    excess: dict[tuple[str, str], dict[str, float]] = {}
    for row in trace.rows(
        "SELECT klass, metric, component, sum(excess_s) AS s FROM excess GROUP BY ALL ORDER BY ALL"
    ):
        excess.setdefault((row["klass"], row["metric"]), {})[row["component"]] = row["s"]
    bounds = {
        (row["klass"], row["metric"]): (min(row["low"], row["high"]), max(row["low"], row["high"]))
        for row in trace.rows(_BOUNDS)
    }
    order = {metric: i for i, metric in enumerate(METRICS)}
    classes = list(dict.fromkeys(r.klass for r in rows))
    rows.sort(key=lambda r: (classes.index(r.klass), order[r.metric]))
    rows = [
        replace(
            r,
            excess=excess.get((r.klass, r.metric), {}),
            others_prefill_s=bounds.get((r.klass, r.metric)),
        )
        for r in rows
    ]
    return rows + (_pooled(trace, slos) if klass is None and ALL not in classes and rows else [])


def _pooled(trace: Trace, slos: tuple[Slo, ...]) -> list[ClassRow]:
    """Rows of all classes together, for objectives that are meant for everybody. They have no tail: a class's excess is
    against its own kind."""
    rows = []
    for metric in _POOLED:
        if not any((slo.klass, slo.metric) == (ALL, metric) for slo in slos):
            continue
        value, table = _POOLED[metric]
        [(n,)] = trace.connection.execute(f"SELECT count(*) FROM ({table})").fetchall()
        columns = trace.connection.execute(
            f"SELECT {value} / 1e9 AS value, time_ns, observer FROM ({table}) WHERE value >= 0 AND hash(id) % $stride = 0 "
            "ORDER BY time_ns",
            {"stride": max(1, -(-n // MAX_VALUES))},
        ).fetchnumpy()
        values, times = np.asarray(columns["value"], np.float64), np.asarray(columns["time_ns"], np.int64)
        observer = " + ".join(sorted({str(o) for o in columns["observer"]}))
        row, _tail = _describe(ALL, metric, observer, values, times)
        objectives = _objectives(slos, ALL, metric, values, times)
        rows.append(replace(row, n=n, tail_rule=None, tail_n=0, objectives=objectives))
    return rows


_REQUESTS = "SELECT *, rid AS id, arrival_ns AS time_ns FROM joined WHERE billed AND ttft_ns >= 0 AND e2e_ns >= ttft_ns"
#: Metric -> its value in ns, and of which rows.
_POOLED = {
    "TTFT": ("ttft_ns", _REQUESTS),
    "TPOT": ("(e2e_ns - ttft_ns) / (output_tokens - 1)", _REQUESTS + " AND output_tokens > 1"),
    "E2E": ("e2e_ns", _REQUESTS),
    "ITL": ("(end_ns - start_ns)", "SELECT *, end_ns AS time_ns FROM gaps"),
}


#: A member's lines count with one weight up to the first token and with another for decode: TPOT is decode per
#: token, and what is typical of an answer's length is a typical decode per token times its tokens.
_EXCESS = """
CREATE OR REPLACE TEMP TABLE excess AS
WITH lines AS (
    SELECT m.klass, m.metric, CASE WHEN l.place = 'decode' THEN m.decode_weight ELSE m.before_weight END AS weight,
           m.tail, l.component, l.culprit, l.ns
    FROM members m JOIN bill_lines l ON l.id = m.id WHERE m.metric <> 'ITL'
    UNION ALL
    SELECT m.klass, m.metric, m.decode_weight, m.tail, l.component, l.culprit, l.ns
    FROM members m JOIN gap_lines l ON l.id = m.id WHERE m.metric = 'ITL'
)
SELECT klass, metric, component, culprit,
       sum(weight * ns) FILTER (WHERE tail) / 1e9 AS tail_s,
       sum(weight * ns) / 1e9 AS excess_s
FROM lines WHERE weight <> 0 GROUP BY ALL
"""


#: The least and the most of each excess that others' prefill can be, whatever the cost model is off by.
_BOUNDS = f"""
WITH modelled AS (
    SELECT m.klass, m.metric, CASE WHEN l.place = 'decode' THEN m.decode_weight ELSE m.before_weight END * l.ns AS ns, b.low, b.high
    FROM members m JOIN bill_lines l ON l.id = m.id LEFT JOIN bill_lines_bounds b ON b.id = l.id AND b.place = l.place
    WHERE m.metric <> 'ITL' AND l.component IN {MODELLED}
    UNION ALL
    SELECT m.klass, m.metric, m.decode_weight * l.ns, b.low, b.high
    FROM members m JOIN gap_lines l ON l.id = m.id LEFT JOIN gap_lines_bounds b ON b.id = l.id AND b.place = l.place
    WHERE m.metric = 'ITL' AND l.component IN {MODELLED}
)
SELECT klass, metric, sum(ns * coalesce(low, 1)) / 1e9 AS low, sum(ns * coalesce(high, 1)) / 1e9 AS high FROM modelled GROUP BY ALL
"""


def _request_metrics(trace: Trace, klass: str, slos: tuple[Slo, ...]) -> list[ClassRow]:
    """TTFT, TPOT and E2E of a class: its rows, and the members of each tail and its typical counterpart."""
    columns = trace.connection.execute(
        "SELECT rid, observer, arrival_ns, ttft_ns, e2e_ns, queue_ns, coalesce(prompt_tokens - coalesce(cached_tokens, 0), 0) AS computed, "
        "coalesce(output_tokens, 0) AS output FROM joined "
        "WHERE billed AND klass = $klass AND ttft_ns >= 0 AND e2e_ns >= ttft_ns ORDER BY rid",
        {"klass": klass},
    ).fetchnumpy()
    rid, arrivals = np.asarray(columns["rid"], np.int64), np.asarray(columns["arrival_ns"], np.int64)
    ttft, e2e = np.asarray(columns["ttft_ns"]) / 1e9, np.asarray(columns["e2e_ns"]) / 1e9
    computed, output = np.asarray(columns["computed"], np.float64), np.asarray(columns["output"], np.float64)
    observer = " + ".join(sorted({str(o) for o in columns["observer"]}))
    rows = []
    for row, among, members in compared(klass, observer, arrivals, ttft, e2e, computed, output):
        values = {"TTFT": ttft, "TPOT": per_token(ttft, e2e, output), "E2E": e2e}[row.metric][among]
        rows.append(replace(row, objectives=_objectives(slos, klass, row.metric, values, arrivals[among])))
        if members is not None:
            add_members(
                trace, "members", klass, row.metric, rid, members.before, members.decode, members.tail
            )
    queued = np.ma.getmaskarray(np.ma.asarray(columns["queue_ns"]))
    if not queued.all():
        queue = np.ma.asarray(columns["queue_ns"])[~queued].astype(np.float64) / 1e9
        row, _tail = _describe(klass, "queue", observer, np.asarray(queue), arrivals[~queued])
        # A part of TTFT, whose bill says why; it has no tail of its own.
        rows.append(replace(row, tail_rule=None, tail_n=0))
    return rows


@dataclass(frozen=True)
class Members:
    """Which of a population's requests are its tail, and each one's weight in the excess: tail less typical, for its time
    up to the first token and for its decode."""

    before: Floats
    decode: Floats
    tail: NDArray[np.bool_]


def per_token(ttft: Floats, e2e: Floats, output: Floats) -> Floats:
    """TPOT of each request; 0 where there is no second token."""
    return (e2e - ttft) * np.where(output > 1, 1 / np.maximum(output - 1, 1), 0.0)


def compared(
    klass: str,
    observer: str,
    arrivals: NDArray[np.int64],
    ttft: Floats,
    e2e: Floats,
    computed: Floats,
    output: Floats,
) -> Iterator[tuple[ClassRow, NDArray[np.bool_], Members | None]]:
    """TTFT, TPOT and E2E of a population of requests (s; tokens): its row, whom it is of, and the members of the tail and
    its typical counterpart, None below MIN_REQUESTS."""
    decodes = output > 1
    shares = np.where(decodes, 1 / np.maximum(output - 1, 1), 0.0)
    tpot = per_token(ttft, e2e, output)
    typical_ttft, typical_tpot = _typical(ttft, _bucket(computed)), _typical_of(tpot, decodes)
    # Where it is not known how many tokens an answer had there is no decode per token.
    typical_rest = _typical_of(e2e - ttft, ~decodes)
    for metric, values, inside in (("TTFT", ttft, None), ("TPOT", tpot, decodes), ("E2E", e2e, None)):
        among = np.ones(len(values), bool) if inside is None else inside
        row, tail = _describe(klass, metric, observer, values[among], arrivals[among])
        if tail is None:
            yield row, among, None
            continue
        everyone = np.zeros(len(values), bool)
        everyone[np.flatnonzero(among)[tail]] = True
        share = everyone / everyone.sum()
        before = share - typical_ttft(share) if metric != "TPOT" else np.zeros(len(values))
        if metric == "TTFT":
            decode = np.zeros(len(values))
        elif metric == "TPOT":
            decode = (share - typical_tpot * share.sum()) * shares
        else:
            tokens = float((share * np.maximum(output - 1, 0)).sum())
            decode = share - typical_tpot * shares * tokens - typical_rest * share[~decodes].sum()
        excess = float(before @ ttft + decode @ (e2e - ttft))
        yield replace(row, excess_s=excess), among, Members(before, decode, everyone)


def _typical(values: Floats, alike: NDArray[np.int64]) -> Callable[[Floats], Floats]:
    """A function from weights of a tail to weights, of the same sum, of the typical requests alike to it."""
    _, index, size = np.unique(alike, return_inverse=True, return_counts=True)
    cell = np.where(size[index] >= MIN_REQUESTS, alike, -1)
    rank, everywhere = _rank_within(cell, values), _rank_within(np.zeros_like(cell), values)

    def weights(tail: Floats) -> Floats:
        result = np.zeros(len(values))
        for wanted in np.unique(cell[tail > 0]):
            # Requests of rare length are compared with the whole class.
            inside, ranks = (
                (cell == wanted, rank) if wanted >= 0 else (np.ones(len(values), bool), everywhere)
            )
            typical = inside & (ranks > TYPICAL[0]) & (ranks <= TYPICAL[1])
            result[typical] += tail[cell == wanted].sum() / typical.sum()
        return result

    return weights


def _typical_of(values: Floats, among: NDArray[np.bool_]) -> Floats:
    """Weights, summing to 1, of the typical ones of `among`."""
    rank = np.zeros(len(values))
    rank[among] = _rank_within(np.zeros(int(among.sum()), np.int64), values[among])
    typical = (rank > TYPICAL[0]) & (rank <= TYPICAL[1])
    return np.asarray(typical / max(typical.sum(), 1))


def _objectives(
    slos: tuple[Slo, ...], klass: str, metric: str, values: Floats, times_ns: NDArray[np.int64]
) -> tuple[Objective, ...]:
    results = []
    for slo in slos:
        if (slo.klass, slo.metric) == (klass, metric) and len(values):
            above = values > slo.limit_s
            broken = stats.exceeds(above, times_ns, float(slo.quantile[1:]) / 100)
            status = OBJECTIVE_STATUS[broken]
            results.append(Objective(slo.quantile, slo.limit_s, int(above.sum()), len(values), status))
    return tuple(results)


def _describe(
    klass: str, metric: str, observer: str, values: Floats, times_ns: NDArray[np.int64]
) -> tuple[ClassRow, NDArray[np.bool_] | None]:
    """The class's quantiles as far as the samples allow, and which values are its tail (None below MIN_REQUESTS)."""
    n = len(values)
    row = ClassRow(klass, metric, observer, "requests", n, reason="too-few-samples")
    if n < MIN_REQUESTS:
        return row, None
    p50, p95, p99 = (float(v) for v in np.quantile(values, [0.5, 0.95, 0.99]))
    # What a quantile is worth depends on how the values beyond it cluster in time.
    exceeding95, exceeding99 = (
        stats.effective_samples((values > p).astype(np.float64), times_ns) for p in (p95, p99)
    )
    if stats.allows_quantile(0.99, exceeding99):
        rule, tail = "above p99", values > p99
    elif stats.allows_quantile(0.95, exceeding95):
        rule, tail = "above p95", values > p95
    else:
        rule, tail = _slowest(values)
    if not tail.any():
        # Nothing lies above a quantile that so many share.
        rule, tail = rule.replace("above", "at"), values >= values.max()
        if tail.sum() > SLOWEST_SHARE * n:
            rule, tail = _slowest(values)
    # A number that is told must be right though all ranks come in bursts; means of a tail are not that sensitive.
    lags = stats.rank_autocorrelation(values, times_ns)
    n_eff95 = min(exceeding95, stats.samples_by_ranks(n, 0.95, lags))
    n_eff = min(exceeding99, stats.samples_by_ranks(n, 0.99, lags))
    allowed95, allowed99 = stats.allows_quantile(0.95, n_eff95), stats.allows_quantile(0.99, n_eff)
    interval = stats.quantile_interval(values, 0.99, n_eff) if allowed99 else None
    row = replace(
        row,
        n_eff=n_eff,
        p50_s=p50,
        p95_s=p95 if allowed95 else None,
        p99_s=p99 if allowed99 else None,
        ci95_s=stats.quantile_interval(values, 0.95, n_eff95) if allowed95 else None,
        ci99_s=interval,
        reason=None if allowed99 else "too-few-samples",
        tail_rule=rule,
        tail_n=int(tail.sum()),
    )
    return row, tail


def _slowest(values: Floats) -> tuple[str, NDArray[np.bool_]]:
    count = max(SLOWEST_LEAST, round(SLOWEST_SHARE * len(values)))
    tail = np.zeros(len(values), dtype=bool)
    tail[np.argsort(-values, kind="stable")[:count]] = True
    return f"slowest {count}", tail


def _bucket(tokens: Floats) -> NDArray[np.int64]:
    """Lengths alike: within a factor of two."""
    return np.asarray(np.floor(np.log2(np.maximum(tokens, 1))), dtype=np.int64)


def _rank_within(cell: NDArray[np.int64], values: Floats) -> Floats:
    """Rank of each value in its cell, as a share of the cell's size in (0, 1]."""
    order = np.lexsort((values, cell))
    _, first, size = np.unique(cell[order], return_index=True, return_counts=True)
    rank = np.empty(len(values))
    rank[order] = (np.arange(len(values)) - np.repeat(first, size) + 1) / np.repeat(size, size)
    return rank


def _token_gaps(trace: Trace, ledger: Ledger, slos: tuple[Slo, ...], klass: str | None) -> list[ClassRow]:
    """ITL from chunk times: each gap between a request's chunks, billed on the engine's clock. Fills `gaps`, which is empty
    where no chunk's time is known."""
    con = trace.connection
    streams, times, view = _GAPS
    con.execute(streams, {"klass": klass})
    con.execute(times)
    con.execute(view)
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
        row, tail = _describe(name, "ITL", entry["observer"], values, ends)
        row = replace(row, n=n, objectives=_objectives(slos, name, "ITL", values, ends))
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


def add_members(
    trace: Trace,
    table: str,
    klass: str,
    metric: str,
    ids: NDArray[np.int64],
    before: Floats,
    decode: Floats,
    tail: NDArray[np.bool_],
) -> None:
    """Write the requests or gaps of a weight other than 0 as rows of `members`, or another table of its shape."""
    chosen = (before != 0) | (decode != 0)
    count = int(chosen.sum())
    trace.insert(
        table,
        pa.table(
            {
                "klass": pa.repeat(pa.scalar(klass, pa.string()), count),
                "metric": pa.repeat(pa.scalar(metric, pa.string()), count),
                "id": ids[chosen],
                "before_weight": before[chosen],
                "decode_weight": decode[chosen],
                "tail": tail[chosen],
            }
        ),
    )


#: The same comparison serves other observers of the same requests.
describe, objectives, typical, typical_of, alike = _describe, _objectives, _typical, _typical_of, _bucket
