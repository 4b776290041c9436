"""Latency by more than its class: over time, by the requests' shape, by tenant and priority; and how many meet their
objectives. Plain values for a report; everything that could be many is cut to a few."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

from tailscope import stats
from tailscope.config import Slo
from tailscope.ledger.half_timed import COLUMNS, KNOWN, known
from tailscope.ledger.histogram import ALL
from tailscope.ledger.tails import MIN_REQUESTS
from tailscope.model import ClassRow
from tailscope.stats import Floats, Ints
from tailscope.store import Trace, floats

Entry = dict[str, Any]
#: Metric -> (quantile, limit in s).
Limits = dict[str, tuple[str, float]]

#: Rows of tenants and of priorities that are told apart, those with most tokens; the rest is `other`.
MOST_GROUPS = 8
#: Classes that are followed over time, the largest.
MOST_CLASSES = 20
#: Cells of prompt length x output length, those with most requests.
MOST_CELLS = 200
#: Bins of time of a class, and how many requests a bin has on average at least.
MOST_BINS, BIN_REQUESTS = 48, 20
#: Latencies of a cell or group whose order in time says what they are worth.
MOST_ORDERED = 100_000
#: Widths of bins that a person can read, in seconds; beyond them whole days.
WIDTHS_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400)
#: How unlikely by chance the slow ones of a bin must be, over all bins of a class, to be worth a line.
UNUSUAL = 1e-3
#: A cell stands out that has so many times its share of what is slow, this share of all of it, and so many requests.
CELL_LIFT, CELL_SHARE, CELL_SLOW = 3.0, 0.2, 5
#: Longest over median prompt from which pools are better split, and from which they are two services.
SPLIT, TWO_SERVICES = 10, 50

_FAILED = "status IN ('error', 'timeout', 'rejected', 'aborted')"


def class_tables(
    trace: Trace, classes: Sequence[ClassRow], slos: Sequence[Slo], klass: str | None
) -> dict[str, Any]:
    """What `trace` of a diagnosis says of classes beyond their quantiles: class_times, shapes, tenants, priorities, sizes,
    attainment. Reads `joined` and `gaps`; linear in requests, but for sorting them."""
    names = list(dict.fromkeys(row.klass for row in classes if row.basis == "requests"))
    if ALL in names and not trace.rows("SELECT 1 FROM joined WHERE klass = $all LIMIT 1", {"all": ALL}):
        names.remove(ALL)  # everybody's objectives, no class of that name
    return {
        "class_times": class_times(trace, names, slos),
        "shapes": shapes(trace, klass),
        "tenants": _groups(trace, "tenant", klass),
        "priorities": _groups(trace, "priority::VARCHAR", klass),
        "sizes": sizes(trace),
        "attainment": attainment(trace, names, slos, klass),
    }


# -- over time ---------------------------------------------------------------------------------------


def class_times(trace: Trace, names: Sequence[str], slos: Sequence[Slo]) -> list[Entry]:
    """Of each class and metric (TTFT, E2E): requests by time of arrival, their median, and how many lie above a limit.

    The limit is the strictest that an objective has, else the class's p95 (p90 below 200 requests): counts above it say when
    the tail was, where a p99 of a few requests would say nothing.
    """
    result = []
    for name in list(names)[:MOST_CLASSES]:
        for metric, column in COLUMNS.items():
            of = {"klass": name}
            [about] = trace.rows(
                f"SELECT count(*) AS n, min(arrival_ns) AS first_ns, max(arrival_ns) AS last_ns, "
                f"quantile_cont({column}, 0.95) AS p95, quantile_cont({column}, 0.9) AS p90 "
                f"FROM joined WHERE {known(metric)} AND klass = $klass",
                of,
            )
            if about["n"] < 2 * MIN_REQUESTS:
                continue
            limits = [s.limit_s for s in slos if (s.klass, s.metric) == (name, metric)]
            q = 95 if about["n"] >= 200 else 90
            limit_ns = min(limits) * 1e9 if limits else about[f"p{q}"]
            width_s = bin_width((about["last_ns"] - about["first_ns"]) / 1e9, about["n"], MOST_BINS)
            width_ns = round(width_s * 1e9)
            bins = trace.rows(
                f"SELECT (arrival_ns // $width) * $width AS start_ns, count(*) AS n, median({column}) / 1e9 AS p50_s, "
                f"count(*) FILTER (WHERE {column} > $limit) AS above "
                f"FROM joined WHERE {known(metric)} AND klass = $klass GROUP BY ALL ORDER BY 1",
                {**of, "width": width_ns, "limit": limit_ns},
            )
            if len(bins) < 3:
                continue
            _mark_unusual(bins)
            result.append(
                {
                    "class": name,
                    "metric": metric,
                    "limit_s": limit_ns / 1e9,
                    "limit": "objective" if limits else f"p{q} of the class",
                    "bin_s": width_s,
                    "bins": bins,
                }
            )
    return result


def bin_width(span_s: float, n: int, most: int) -> float:
    """The narrowest width, in seconds, in which a bin has enough of n requests, and that makes at most so many bins."""
    least = max(span_s / most, span_s * BIN_REQUESTS / n)
    days = WIDTHS_S[-1] * -(-least // WIDTHS_S[-1])
    return next((width for width in WIDTHS_S if width >= least), days)


def _mark_unusual(bins: list[Entry]) -> None:
    """`unusual`: more above the limit than the other bins' share would give by chance."""
    n, above = (np.array([row[key] for row in bins]) for key in ("n", "above"))
    others = (above.sum() - above + 1) / (n.sum() - n + 1)
    chance = np.asarray(binom.sf(above - 1, n, np.minimum(others, 1.0)))
    for row, p, share in zip(bins, chance, others, strict=True):
        row["unusual"] = bool(p < UNUSUAL / len(bins) and row["above"] > 2 * share * row["n"])


# -- by shape ----------------------------------------------------------------------------------------


def shapes(trace: Trace, klass: str | None) -> list[Entry]:
    """Cells of prompt length x output length, each within a factor of two: latencies and how many of them are slow.

    Slow: a TTFT above the p95 of its own class, so that a cell is not slow for being long. `stands_out`: it has far more of
    those than its share.
    """
    columns = trace.connection.execute(
        f"""
        WITH limits AS (SELECT klass, quantile_cont(ttft_ns, 0.95) AS ttft FROM joined WHERE {KNOWN} GROUP BY klass)
        SELECT floor(log2(greatest(prompt_tokens, 1)))::INT * 64 + floor(log2(greatest(output_tokens, 1)))::INT AS slot,
               arrival_ns, ttft_ns, e2e_ns, coalesce(ttft_ns > limits.ttft, false) AS slow
        FROM joined JOIN limits USING (klass)
        WHERE {KNOWN} AND prompt_tokens IS NOT NULL AND output_tokens IS NOT NULL AND ($klass IS NULL OR klass = $klass)
        """,
        {"klass": klass},
    ).fetchnumpy()
    slot, slow = np.asarray(columns["slot"], np.int64), np.asarray(columns["slow"], bool)
    cells, index, n = np.unique(slot, return_inverse=True, return_counts=True)
    slow_of = np.bincount(index, weights=slow, minlength=len(cells))
    kept = np.sort(np.argsort(-n, kind="stable")[:MOST_CELLS])
    result = []
    for cell in kept.tolist():
        prompt, output = divmod(int(cells[cell]), 64)
        own = int(slow_of[cell])
        stands_out = (
            n[cell] >= MIN_REQUESTS
            and own >= max(CELL_SLOW, CELL_SHARE * slow.sum())
            and own / n[cell] >= CELL_LIFT * slow.mean()
        )
        result.append(
            {
                "prompt_tokens": [1 << prompt if prompt else 0, 2 << prompt],
                "output_tokens": [1 << output if output else 0, 2 << output],
                "n": int(n[cell]),
                "slow": own,
                "share_of_slow": own / max(int(slow.sum()), 1),
                "stands_out": bool(stands_out),
                **_latencies(columns, np.flatnonzero(index == cell)),
            }
        )
    return result


def _latencies(columns: dict[str, Any], chosen: NDArray[np.intp]) -> Entry:
    times = np.asarray(columns["arrival_ns"], np.int64)[chosen]
    found = {}
    for metric, column in COLUMNS.items():
        values = floats(columns[column])[chosen] / 1e9
        there = np.isfinite(values)
        found[metric.lower()] = quantiles(values[there], times[there])
    return found


def quantiles(values: Floats, times_ns: Ints) -> Entry:
    """p50_s, p95_s and p99_s of values in seconds, None where too few effective samples allow them, and `reason`."""
    found: dict[str, Any] = {"p50_s": None, "p95_s": None, "p99_s": None, "reason": "too-few-samples"}
    if len(values) < MIN_REQUESTS:
        return found
    p50, p95, p99 = (float(v) for v in np.quantile(values, [0.5, 0.95, 0.99]))
    found["p50_s"] = p50
    # Fewer, evenly taken, are worth no more than all.
    order = np.argsort(times_ns, kind="stable")[:: -(-len(values) // MOST_ORDERED)]
    some, times = values[order], times_ns[order]
    lags = None
    for q, name, value in ((0.95, "p95_s", p95), (0.99, "p99_s", p99)):
        if not stats.allows_quantile(q, len(some)):
            break
        lags = stats.rank_autocorrelation(some, times) if lags is None else lags
        n_eff = min(
            stats.effective_samples((some > value).astype(np.float64), times),
            stats.samples_by_ranks(len(some), q, lags),
        )
        if stats.allows_quantile(q, n_eff):
            found[name] = value
    if found["p99_s"] is not None:
        found["reason"] = None
    return found


# -- by tenant and priority --------------------------------------------------------------------------


def _groups(trace: Trace, column: str, klass: str | None) -> list[Entry]:
    """The tenants (or priorities) with most tokens and all `other`, if any request has one; `id` None: it has none.

    `column` is ours, never a user's text.
    """
    told = trace.rows(
        f"""
        WITH groups AS (
            SELECT {column} AS id, count(*) AS n, count(*) FILTER (WHERE {_FAILED}) AS failed,
                   sum(coalesce(prompt_tokens, 0)) AS prompts, sum(coalesce(output_tokens, 0)) AS outputs
            FROM joined WHERE ($klass IS NULL OR klass = $klass) GROUP BY id
        ),
        placed AS (
            SELECT *, least(row_number() OVER (ORDER BY prompts + outputs DESC, n DESC, id) - 1, $most) AS place FROM groups
        )
        SELECT CASE WHEN place = $most THEN 'other' ELSE any_value(id) END AS id, count(*) AS members, sum(n)::BIGINT AS n,
               sum(failed)::BIGINT AS failed, sum(prompts)::BIGINT AS prompt_tokens, sum(outputs)::BIGINT AS output_tokens
        FROM placed GROUP BY place ORDER BY place
        """,
        {"klass": klass, "most": MOST_GROUPS},
    )
    if not any(row["id"] is not None for row in told):
        return []
    columns = trace.connection.execute(
        f"""
        WITH places AS (SELECT unnest($ids::VARCHAR[]) AS id, unnest(range(len($ids::VARCHAR[]))) AS place)
        SELECT coalesce(p.place, $most) AS slot, arrival_ns, ttft_ns, e2e_ns
        FROM joined j LEFT JOIN places p ON p.id IS NOT DISTINCT FROM j.{column}
        WHERE {KNOWN} AND ($klass IS NULL OR klass = $klass)
        """,
        {"ids": [row["id"] for row in told[:MOST_GROUPS]], "most": MOST_GROUPS, "klass": klass},
    ).fetchnumpy()
    slot = np.asarray(columns["slot"], np.int64)
    tokens = sum(row["prompt_tokens"] + row["output_tokens"] for row in told)
    return [
        {
            **row,
            "share_of_tokens": (row["prompt_tokens"] + row["output_tokens"]) / tokens if tokens else None,
            **_latencies(columns, np.flatnonzero(slot == place)),
        }
        for place, row in enumerate(told)
    ]


def sizes(trace: Trace) -> list[Entry]:
    """Prompt lengths of each instance: how much longer the longest and the p99 are than the median, and the mark of 10 or
    50 times that the longest passes."""
    rows = trace.rows(
        "SELECT instance, count(*) AS n, median(prompt_tokens) AS median, quantile_disc(prompt_tokens, 0.99) AS p99, "
        "max(prompt_tokens) AS longest FROM joined WHERE prompt_tokens > 0 GROUP BY instance ORDER BY instance LIMIT 100"
    )
    for row in rows:
        row["longest_to_median"] = row["longest"] / row["median"]
        row["p99_to_median"] = row["p99"] / row["median"]
        row["mark"] = max((m for m in (SPLIT, TWO_SERVICES) if row["longest_to_median"] >= m), default=None)
    return rows


# -- objectives --------------------------------------------------------------------------------------


def attainment(trace: Trace, names: Iterable[str], slos: Sequence[Slo], klass: str | None) -> list[Entry]:
    """Of each class with objectives (and of `all`): requests that meet every one of them, their share and rate.

    A request meets an objective of TTFT, TPOT or E2E whose limit it stays below, of a metric with several the one of the
    highest quantile; one of ITL when no more of its own gaps are longer than the quantile allows. What failed, was refused
    or given up meets none. Of what is not known either way (no latency, unfinished) nothing is said: `unknown`. Below 20
    decided requests the share is withheld. `ci95` (Wilson 1927) counts effective samples.
    """
    [window] = trace.rows(
        "SELECT (max(coalesce(finished_ns, arrival_ns)) - min(arrival_ns)) / 1e9 AS s FROM joined"
    )
    result = []
    for name in [*names, *([ALL] if klass is None and ALL not in names else [])]:
        asked = _limits(slos, name)
        if not asked:
            continue
        limits = _measured(trace, asked, name)
        columns = met_by_request(trace, limits, name)
        met, failed = np.asarray(columns["met"], np.int64), np.asarray(columns["failed"], bool)
        decided = met >= 0
        n, good = int(decided.sum()), int((met == 1).sum())
        entry: Entry = {
            "class": name,
            "objectives": [{"metric": m, "quantile": q, "limit_s": s} for m, (q, s) in limits.items()],
            "not_measured": [metric for metric in asked if metric not in limits],
            "n": n,
            "met": good,
            "failed": int(failed.sum()),
            "unknown": int((~decided).sum()),
            "share": None,
            "ci95": None,
            "goodput_rps": good / window["s"] if window["s"] else None,
            "rate_rps": len(met) / window["s"] if window["s"] else None,
            "reason": "too-few-samples",
        }
        if not limits:
            entry["reason"] = "not-measured"
        elif n >= MIN_REQUESTS:
            times = np.asarray(columns["arrival_ns"], np.int64)[decided]
            n_eff = stats.effective_samples((met[decided] == 1).astype(np.float64), times)
            entry |= {"share": good / n, "ci95": stats.share_interval(good / n, n_eff), "reason": None}
        result.append(entry)
    return result


def objectives_of(trace: Trace, slos: Sequence[Slo], klass: str) -> Limits:
    """The objectives of a class that its requests can be held against: those of metrics that were measured."""
    return _measured(trace, _limits(slos, klass), klass)


def met_by_request(trace: Trace, limits: Limits, klass: str) -> Mapping[str, Any]:
    """rid, arrival_ns, failed and met (1, 0, -1 for unknown) of each request of a class, or of `all`."""
    quantile, itl_s = limits.get("ITL", ("p99", 0.0))
    result: Mapping[str, Any] = trace.connection.execute(
        _MET,
        {
            "klass": None if klass == ALL else klass,
            "itl_ns": itl_s * 1e9,
            "allowed": 1 - float(quantile[1:]) / 100,
            **{
                f"{metric.lower()}_ns": limits[metric][1] * 1e9 if metric in limits else None
                for metric in ("TTFT", "TPOT", "E2E")
            },
            "with_itl": "ITL" in limits,
        },
    ).fetchnumpy()
    return result


def _measured(trace: Trace, limits: Limits, klass: str) -> Limits:
    """Those of metrics that any request of the class has: what is measured of nobody, nobody met or missed."""
    [has] = trace.rows(
        "SELECT coalesce(bool_or(ttft_ns >= 0), false) AS TTFT, coalesce(bool_or(e2e_ns >= 0), false) AS E2E, "
        "coalesce(bool_or(ttft_ns >= 0 AND e2e_ns >= ttft_ns AND output_tokens > 1), false) AS TPOT, "
        "EXISTS (FROM gap_streams s SEMI JOIN gap_times USING (klass_number) WHERE $klass IS NULL OR s.klass = $klass) AS ITL "
        "FROM joined WHERE $klass IS NULL OR klass = $klass",
        {"klass": None if klass == ALL else klass},
    )
    return {metric: limit for metric, limit in limits.items() if has[metric]}


def _limits(slos: Sequence[Slo], klass: str) -> Limits:
    """The objectives of a class, of several of a metric the one of the highest quantile."""
    found: Limits = {}
    for slo in sorted((s for s in slos if s.klass == klass), key=lambda s: float(s.quantile[1:])):
        found[slo.metric] = slo.quantile, slo.limit_s
    return found


#: met: 1, 0, or -1 where it is not known. What is asked of no metric (its limit NULL) is met.
_MET = f"""
WITH long_gaps AS (
    SELECT rid, count(*) FILTER (WHERE end_ns - start_ns > $itl_ns) / count(*) AS share FROM gaps WHERE $with_itl GROUP BY rid
),
judged AS (
    SELECT j.rid, j.arrival_ns, coalesce({_FAILED}, false) AS failed, coalesce(status, 'ok') = 'ok' AS ended,
           [CASE WHEN $ttft_ns IS NULL THEN true WHEN ttft_ns >= 0 THEN ttft_ns <= $ttft_ns END,
            CASE WHEN $e2e_ns IS NULL THEN true WHEN e2e_ns >= 0 THEN e2e_ns <= $e2e_ns END,
            CASE WHEN $tpot_ns IS NULL OR output_tokens = 1 THEN true
                 WHEN e2e_ns >= ttft_ns AND ttft_ns >= 0 AND output_tokens > 1
                 THEN (e2e_ns - ttft_ns) / (output_tokens - 1) <= $tpot_ns END,
            CASE WHEN NOT $with_itl OR output_tokens = 1 THEN true ELSE g.share <= $allowed END] AS tests
    FROM joined j LEFT JOIN long_gaps g USING (rid) WHERE $klass IS NULL OR klass = $klass
)
SELECT rid, arrival_ns, failed,
       CASE WHEN failed OR list_contains(tests, false) THEN 0
            WHEN ended AND len(list_filter(tests, lambda t: t)) = len(tests) THEN 1 ELSE -1 END AS met
FROM judged ORDER BY rid
"""
