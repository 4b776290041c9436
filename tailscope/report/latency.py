"""What the page shows of requests: exact distributions and quantiles over time, and a sample that can be filtered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tailscope import stats
from tailscope.align import Scope
from tailscope.classes import bin_width
from tailscope.report.columns import Columns, columns, few_digits, numbered, short
from tailscope.store import Trace

#: Requests on the page, at most about so many; with no more all are there.
MOST_SAMPLED = 20_000
#: Of them the slowest of each class, by TTFT and by E2E, about so many each.
MOST_TAIL = 4_000
#: Requests of a class's rest that are kept at least.
LEAST_REST = 300
#: Values whose distribution is told exactly; of more, one of every so many.
MOST_EXACT = 8_000_000
#: Bins of time.
MOST_BINS = 96
#: Classes in the charts, those with most requests.
MOST_CLASSES = 24
#: Names that a filter offers, those with most requests; the others are counted as one.
MOST_NAMES = 40
#: Quantiles of a class over time; the highest that the bins' requests allow is drawn.
OVER_TIME = (0.5, 0.9, 0.95, 0.99)
METRICS = {"TTFT": "ttft_ns", "E2E": "e2e_ns", "TPOT": "tpot_ns", "queue": "queue_ns"}
OTHERS = "other"

#: Where a distribution is told: evenly up to 90 %, then so many points each time the rest shrinks to a tenth.
EVEN, A_DECADE, DECADES = 30, 12, 5


@dataclass
class Latency:
    """`n`: requests with a latency; `left_out`: without one, by status; `sampled`: how many are on the page."""

    n: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    #: Classes too small to be shown, and their requests.
    smaller: tuple[int, int] = (0, 0)
    sampled: int = 0
    tail_from: float = 0.0
    first_ns: int = 0
    last_ns: int = 0
    bin_s: float = 1.0
    classes: list[str] = field(default_factory=list)
    tenants: list[str] = field(default_factory=list)
    instances: list[str] = field(default_factory=list)
    #: metric -> class -> {"n", "q": [...], "s": [...]}.
    curves: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    #: class, start (s from the first arrival), n and quantiles of each bin, by metric.
    times: dict[str, Columns] = field(default_factory=dict)
    sample: Columns = field(default_factory=dict)

    @property
    def is_sample(self) -> bool:
        return self.sampled < self.n


def gather(trace: Trace, scope: Scope, order: Sequence[str]) -> Latency:
    """`order`: classes as the diagnosis has them."""
    con = trace.connection
    wanted = {"klass": scope.klass}
    sizes = trace.rows(
        f"SELECT klass, count(*) AS n FROM joined WHERE {_SHOWN} GROUP BY klass ORDER BY n DESC, klass",
        wanted,
    )
    con.execute(_POOL, {**wanted, "classes": [row["klass"] for row in sizes[:MOST_CLASSES]]})
    [about] = trace.rows(
        "SELECT count(*) AS n, min(arrival_ns) AS first_ns, max(arrival_ns) AS last_ns, "
        "max(arrival_ns + coalesce(e2e_ns, ttft_ns)) AS end_ns FROM report_pool"
    )
    left_out = trace.rows(
        "SELECT coalesce(status, 'no latency') AS status, count(*) AS n FROM joined "
        f"WHERE NOT coalesce({_SHOWN}, false) AND ($klass IS NULL OR klass = $klass) GROUP BY ALL ORDER BY n DESC, status",
        wanted,
    )
    latency = Latency(n=about["n"], left_out={r["status"]: r["n"] for r in left_out})
    latency.smaller = len(sizes[MOST_CLASSES:]), sum(row["n"] for row in sizes[MOST_CLASSES:])
    if not latency.n:
        return latency
    latency.first_ns, latency.last_ns = about["first_ns"], about["end_ns"]
    span_s = max((about["last_ns"] - about["first_ns"]) / 1e9, 1e-3)
    latency.bin_s = bin_width(span_s, latency.n, MOST_BINS)
    present = [r["klass"] for r in trace.rows("SELECT klass FROM report_pool GROUP BY klass ORDER BY klass")]
    latency.classes = [k for k in order if k in present] + [k for k in present if k not in order]
    latency.curves = _curves(trace)
    latency.times = _times(trace, latency)
    _sample(trace, latency)
    return latency


_SHOWN = "(billed AND (ttft_ns >= 0 OR e2e_ns >= 0) AND ($klass IS NULL OR klass = $klass))"
_POOL = f"""
CREATE OR REPLACE TEMP TABLE report_pool AS
SELECT rid, klass, tenant, instance, arrival_ns, ttft_ns, e2e_ns, queue_ns, prompt_tokens, output_tokens, preemptions,
       CASE WHEN ttft_ns >= 0 AND e2e_ns >= ttft_ns AND output_tokens > 1 THEN (e2e_ns - ttft_ns) / (output_tokens - 1) END AS tpot_ns
FROM joined WHERE {_SHOWN} AND list_contains($classes::VARCHAR[], klass)
"""


def _shares(n: int) -> list[float]:
    """Where a distribution of n values is told."""
    even = [i / EVEN * 0.9 for i in range(EVEN)]
    tail = [1 - 10 ** -(1 + i / A_DECADE) for i in range(A_DECADE * (DECADES - 1))]
    return [q for q in even + tail if q <= 1 - 1 / max(n, 1)] or [0.0]


def _curves(trace: Trace) -> dict[str, dict[str, dict[str, Any]]]:
    """The distribution of each metric and class, from all of its requests; of token gaps from all gaps."""
    [most] = trace.rows("SELECT max(n) AS n FROM (SELECT count(*) AS n FROM report_pool GROUP BY klass)")
    found = {}
    for metric, column in METRICS.items():
        relation = f"(SELECT rid AS id, klass, {column} / 1e9 AS s FROM report_pool WHERE {column} >= 0)"
        found[metric] = _curve(trace, relation, most["n"])
    [gaps] = trace.rows("SELECT count(*) AS n FROM gap_times")
    if gaps["n"]:
        found["ITL"] = _curve(
            trace, "(SELECT id, klass, (end_ns - start_ns) / 1e9 AS s FROM gaps)", gaps["n"]
        )
    return {metric: curves for metric, curves in found.items() if curves}


def _curve(trace: Trace, relation: str, n: int) -> dict[str, dict[str, Any]]:
    """Of `relation` (id, klass, s). Of tens of millions of token gaps so many as memory holds, chosen by a hash."""
    every = max(1, -(-n // MOST_EXACT))
    shares = _shares(n // every)
    rows = trace.rows(
        f"SELECT klass, count(*) AS n, max(s) AS most, count(*) FILTER (WHERE hash(id) % $every = 0) AS some, "
        f"quantile_cont(s, {shares}) FILTER (WHERE hash(id) % $every = 0) AS s FROM {relation} GROUP BY klass ORDER BY klass",
        {"every": every},
    )
    curves = {}
    for row in rows:
        if not row["some"]:
            continue
        # Beyond the largest of the values nothing is known but the largest.
        told = [(q, s) for q, s in zip(shares, row["s"], strict=True) if q <= 1 - 1 / row["some"]]
        told.append((1.0, row["most"]))
        curves[row["klass"]] = {
            "n": row["n"],
            "every": every,
            "q": [few_digits(q, 6) for q, _ in told],
            "s": short(float(s) for _, s in told),
        }
    return curves


def _times(trace: Trace, latency: Latency) -> dict[str, Columns]:
    found = {}
    for metric, column in METRICS.items():
        if metric not in latency.curves or metric == "queue":
            continue
        rows = columns(
            trace,
            f"SELECT klass, (arrival_ns - $first) // $width AS bin, count(*) AS n, "
            f"quantile_cont({column} / 1e9, {list(OVER_TIME)}) AS q FROM report_pool WHERE {column} >= 0 "
            "GROUP BY ALL ORDER BY klass, bin",
            {"first": latency.first_ns, "width": round(latency.bin_s * 1e9)},
        )
        quantiles = rows.pop("q")
        rows["klass"] = [latency.classes.index(k) for k in rows["klass"]]
        for i, q in enumerate(OVER_TIME):
            rows[name_of(q)] = [
                few_digits(values[i]) if stats.allows_quantile(q, n) else None
                for values, n in zip(quantiles, rows["n"], strict=True)
            ]
        found[metric] = rows
    return found


def name_of(q: float) -> str:
    return f"p{q * 100:.0f}"


def _sample(trace: Trace, latency: Latency) -> None:
    """The slowest of each class whole, and of the rest so many as there is room for, chosen by a hash of their numbers; each
    of these stands for so many as its class has for one."""
    everything = latency.n <= MOST_SAMPLED
    latency.tail_from = 0.0 if everything else 1 - min(0.01, MOST_TAIL / latency.n)
    con = trace.connection
    con.execute(_MARKED, {"q": latency.tail_from, "all": everything})
    sizes = trace.rows(
        "SELECT klass, count(*) FILTER (WHERE tail) AS tail, count(*) FILTER (WHERE NOT tail) AS rest "
        "FROM report_marked GROUP BY klass ORDER BY klass"
    )
    rest = sum(r["rest"] for r in sizes)
    room = max(MOST_SAMPLED - sum(r["tail"] for r in sizes) - LEAST_REST * len(sizes), 0)
    share = {
        r["klass"]: min(1.0, (LEAST_REST + room * r["rest"] / rest) / r["rest"]) if r["rest"] else 1.0
        for r in sizes
    }
    found = columns(
        trace,
        _SAMPLED,
        {"first": latency.first_ns, "classes": list(share), "shares": list(share.values())},
    )
    latency.sampled = len(found["klass"])
    latency.tenants, found["tenant"] = _names(found["tenant"])
    latency.instances, found["instance"] = _names(found["instance"])
    found["klass"] = [latency.classes.index(k) for k in found["klass"]]
    found["weight"] = _weights(found, sizes, latency.classes)
    latency.sample = found


_MARKED = """
CREATE OR REPLACE TEMP TABLE report_marked AS
WITH limits AS (
    SELECT klass, quantile_cont(ttft_ns, $q) AS ttft_from, quantile_cont(e2e_ns, $q) AS e2e_from FROM report_pool GROUP BY klass
)
SELECT p.*, $all OR coalesce(ttft_ns > ttft_from, false) OR coalesce(e2e_ns > e2e_from, false) AS tail
FROM report_pool p JOIN limits USING (klass)
"""
_SAMPLED = """
SELECT m.klass, tenant, instance, tail, round((arrival_ns - $first) / 1e9, 3) AS at, ttft_ns / 1e9 AS ttft, e2e_ns / 1e9 AS e2e,
       queue_ns / 1e9 AS queue, tpot_ns / 1e9 AS tpot, prompt_tokens AS prompt, output_tokens AS output
FROM report_marked m JOIN (SELECT unnest($classes::VARCHAR[]) AS klass, unnest($shares::DOUBLE[]) AS share) s USING (klass)
WHERE tail OR hash(rid)::DOUBLE / 18446744073709551615.0 < share
ORDER BY arrival_ns, rid
"""


def _names(values: list[Any]) -> tuple[list[str], list[int]]:
    """The names with most requests, then `other`, and the place of each; none has a name of its own."""
    known, numbers = numbered("" if value is None else str(value) for value in values)
    counts = [0] * len(known)
    for number in numbers:
        counts[number] += 1
    kept = sorted(range(len(known)), key=lambda i: (-counts[i], known[i]))[:MOST_NAMES]
    kept.sort(key=lambda i: known[i])
    place = {old: new for new, old in enumerate(kept)}
    names = [known[i] for i in kept] + ([OTHERS] if len(kept) < len(known) else [])
    return names, [place.get(number, len(kept)) for number in numbers]


def _weights(found: Columns, sizes: Sequence[Mapping[str, Any]], classes: list[str]) -> list[Any]:
    kept = [0] * len(classes)
    for k, tail in zip(found["klass"], found["tail"], strict=True):
        kept[k] += not tail
    of = {r["klass"]: r["rest"] for r in sizes}
    weight = [of[name] / n if n else 1.0 for name, n in zip(classes, kept, strict=True)]
    return [
        1 if tail else few_digits(weight[k], 6)
        for k, tail in zip(found["klass"], found.pop("tail"), strict=True)
    ]
