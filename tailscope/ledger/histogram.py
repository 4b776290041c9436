"""Classes' rows from the server's histograms, where no single request is known. Buckets, never points."""

from __future__ import annotations

from typing import Literal

from tailscope import stats
from tailscope.config import Slo
from tailscope.model import ClassRow, Objective
from tailscope.store import Trace

CONCEPTS = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2e": "E2E"}
ALL = "all"


def quantile_ranges(trace: Trace, q: float) -> dict[str, tuple[int, tuple[float, float | None], bool]]:
    """Concept -> (observations, bucket of quantile q, whether since the server's start)."""
    rows = trace.rows(
        """
        WITH totals AS (SELECT concept, bounds, upper, sum(count) AS count, bool_or(lifetime) AS lifetime
                        FROM histograms GROUP BY ALL),
        listed AS (SELECT concept, bounds, list(upper ORDER BY upper) AS uppers, list(count ORDER BY upper) AS counts,
                          max(count) AS n, bool_or(lifetime) AS lifetime FROM totals GROUP BY ALL)
        SELECT concept, uppers, counts, n, lifetime FROM listed
        -- Series with other bounds cannot be added up; the fuller set speaks.
        QUALIFY row_number() OVER (PARTITION BY concept ORDER BY n DESC) = 1 ORDER BY concept
        """
    )
    ranges = {}
    for row in rows:
        bucket = stats.histogram_quantile(row["uppers"], row["counts"], q)
        if bucket is not None:
            ranges[row["concept"]] = (int(row["n"]), bucket, bool(row["lifetime"]))
    return ranges


def _status(low: float, high: float | None, limit_s: float) -> Literal["kept", "broken", "undecided"]:
    """An SLO is broken when the whole bucket lies above it, kept when it lies below."""
    if low >= limit_s:
        return "broken"
    return "kept" if high is not None and high <= limit_s else "undecided"


def histogram_rows(trace: Trace, slos: tuple[Slo, ...]) -> list[ClassRow]:
    """A row a latency concept: the bucket of its p99."""
    rows = []
    for concept, (n, (low, high), _lifetime) in quantile_ranges(trace, 0.99).items():
        metric = CONCEPTS.get(concept)
        if metric is None:
            continue
        objectives = tuple(
            Objective(s.quantile, s.limit_s, None, n, _status(low, high, s.limit_s))
            for s in slos
            if (s.klass, s.metric, s.quantile) == (ALL, metric, "p99")
        )
        rows.append(
            ClassRow(
                klass=ALL,
                metric=metric,
                observer="engine",
                basis="histogram",
                n=n,
                range99_s=(low, high),
                reason="histogram buckets",
                objectives=objectives,
            )
        )
    order = list(CONCEPTS.values())
    return sorted(rows, key=lambda row: order.index(row.metric))
