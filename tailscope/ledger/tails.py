"""A population's tail and what is typical of it: its row, and each one's weight in the excess of the one over the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tailscope import stats
from tailscope.config import Slo
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
#: Latencies kept for the effective sample size, which needs their order in time.
MAX_VALUES = 1_000_000

OBJECTIVE_STATUS: dict[bool | None, Literal["kept", "broken", "undecided"]] = {
    True: "broken",
    False: "kept",
    None: "undecided",
}


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
    typical_ttft, typical_tpot = _typical(ttft, alike(computed)), _typical_of(tpot, decodes)
    # Where it is not known how many tokens an answer had there is no decode per token.
    typical_rest = _typical_of(e2e - ttft, ~decodes)
    for metric, values, inside in (("TTFT", ttft, None), ("TPOT", tpot, decodes), ("E2E", e2e, None)):
        among = np.ones(len(values), bool) if inside is None else inside
        row, tail = describe(klass, metric, observer, values[among], arrivals[among])
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


def compared_alike(
    klass: str,
    metric: str,
    observer: str,
    arrivals: NDArray[np.int64],
    values: Floats,
    like: NDArray[np.int64],
) -> tuple[ClassRow, Members | None]:
    """A population's row by one latency alone, all of it one time, and its tail against the typical ones alike to it."""
    row, tail = describe(klass, metric, observer, values, arrivals)
    if tail is None:
        return row, None
    share = tail / tail.sum()
    weights = share - _typical(values, like)(share)
    return replace(row, excess_s=float(weights @ values)), Members(weights, weights, tail)


def _typical(values: Floats, like: NDArray[np.int64]) -> Callable[[Floats], Floats]:
    """A function from weights of a tail to weights, of the same sum, of the typical requests alike to it."""
    _, index, size = np.unique(like, return_inverse=True, return_counts=True)
    cell = np.where(size[index] >= MIN_REQUESTS, like, -1)
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


def objectives(
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


def describe(
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


def alike(tokens: Floats) -> NDArray[np.int64]:
    """Lengths alike: within a factor of two."""
    return np.asarray(np.floor(np.log2(np.maximum(tokens, 1))), dtype=np.int64)


def _rank_within(cell: NDArray[np.int64], values: Floats) -> Floats:
    """Rank of each value in its cell, as a share of the cell's size in (0, 1]."""
    order = np.lexsort((values, cell))
    _, first, size = np.unique(cell[order], return_index=True, return_counts=True)
    rank = np.empty(len(values))
    rank[order] = (np.arange(len(values)) - np.repeat(first, size) + 1) / np.repeat(size, size)
    return rank


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


def parts_of_excess(trace: Trace, table: str) -> dict[tuple[str, str], dict[str, float]]:
    """(class, metric) -> component -> seconds of `excess`, or another table of its shape."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in trace.rows(
        f"SELECT klass, metric, component, sum(excess_s) AS s FROM {table} GROUP BY ALL ORDER BY ALL"
    ):
        found.setdefault((row["klass"], row["metric"]), {})[row["component"]] = row["s"]
    return found
