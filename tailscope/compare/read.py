"""What a comparison needs of a diagnosed trace, as arrays and sums by slice of its time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tailscope.align import Scope
from tailscope.classes import met_by_request, objectives_of
from tailscope.compare.blocks import SLICES, Key, Values
from tailscope.config import Config
from tailscope.engine import diagnose
from tailscope.ledger.half_timed import KNOWN, known
from tailscope.ledger.histogram import CONCEPTS, quantile_ranges
from tailscope.load_shape import Loop, loop_of
from tailscope.model import Diagnosis
from tailscope.stats import Floats, Ints
from tailscope.store import Trace, floats

#: Requests, and token gaps, of a class that are looked at; they are thinned evenly beyond it.
MOST_VALUES = 200_000
#: Tenants that are told apart.
MOST_TENANTS = 8
METRICS = ("queue", "TTFT", "TPOT", "ITL", "E2E")
#: Ends of requests that did not succeed.
FAILURES = ("error", "timeout", "rejected", "aborted")


@dataclass(frozen=True)
class Requests:
    """Requests of a trace by arrival, arrays of one length; unknown is NaN. `counts`: how many each stands for; `timed`: whether
    its latencies are among those of its class, as in a diagnosis."""

    rid: Ints
    arrival_ns: Ints
    klass: NDArray[np.str_]
    tenant: NDArray[np.str_]
    status: NDArray[np.str_]
    billed: NDArray[np.bool_]
    timed: NDArray[np.bool_]
    queue_s: Floats
    ttft_s: Floats
    e2e_s: Floats
    prompt: Floats
    cached: Floats
    output: Floats
    counts: Floats

    def __len__(self) -> int:
        return len(self.rid)

    def metric(self, name: str) -> Floats:
        """Seconds of each, NaN where it has none."""
        if name == "queue":
            values = self.queue_s
        elif name == "TTFT":
            values = self.ttft_s
        elif name == "E2E":
            values = self.e2e_s
        else:
            decodes = self.output > 1
            values = np.where(
                decodes, (self.e2e_s - self.ttft_s) / np.where(decodes, self.output - 1, 1), np.nan
            )
        return np.where(self.timed & (values >= 0), values, np.nan)


@dataclass(frozen=True)
class Gaps:
    """Gaps between tokens of a class: seconds, their ends, and whose they are. `n`: how many there are in all."""

    values_s: Floats
    times_ns: Ints
    rid: Ints
    n: int


@dataclass(frozen=True)
class Steps:
    """What an engine's steps say of its limits, shares of the time or of the steps; None where nothing is known."""

    busy: float | None = None
    kv_p95: float | None = None
    slots_p95: float | None = None
    budget: float | None = None
    waiting: float | None = None


@dataclass(frozen=True)
class Side:
    """One trace. `bills`: (class, component) -> [seconds, number of requests] by slice for E2E; `tails`: (class, metric,
    component) -> mean seconds of the tail's requests."""

    diagnosis: Diagnosis
    span_ns: tuple[int, int]
    requests: Requests
    gaps: Mapping[str, Gaps]
    loop: Loop
    bills: Mapping[tuple[str, str], Floats] = field(default_factory=dict)
    tails: Mapping[tuple[str, str, str], float] = field(default_factory=dict)
    coupling: tuple[Mapping[str, Any], ...] = ()
    ranges: Mapping[str, tuple[int, tuple[float, float | None], tuple[float, float | None]]] = field(
        default_factory=dict
    )
    steps: Steps = field(default_factory=Steps)
    #: Class with objectives -> of each of `requests` whether it met all of them: 1, 0, or -1 where that is not known.
    met: Mapping[str, Ints] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return str(self.diagnosis.trace["path"])

    @property
    def span_s(self) -> float:
        return max(self.span_ns[1] - self.span_ns[0], 1) / 1e9

    @property
    def classes(self) -> list[str]:
        """Classes in the order of their lengths, as in a diagnosis."""
        names = [row.klass for row in self.diagnosis.classes if row.basis == "requests"]
        return list(dict.fromkeys([*names, *sorted(set(self.requests.klass.tolist()))]))


def read(trace: Trace, config: Config, scope: Scope) -> Side:
    """Diagnose a trace and take what a comparison needs. Raises as `engine.prepare` does."""
    diagnosis = diagnose(trace, config, scope)
    trace.connection.execute(_THINNED, {"most": MOST_VALUES, "klass": scope.klass})
    requests = _requests(trace)
    times = requests.arrival_ns
    span = (int(times.min()), int(times.max())) if len(times) else (0, 0)
    return Side(
        diagnosis,
        span,
        requests,
        _gaps(trace),
        _loop(trace),
        _bills(trace, span),
        {
            (r["klass"], r["metric"], r["component"]): r["tail_s"]
            for r in trace.rows(
                "SELECT klass, metric, component, coalesce(sum(tail_s), 0)::DOUBLE AS tail_s FROM excess GROUP BY ALL"
            )
        },
        tuple(trace.rows(_COUPLED)),
        _ranges(trace),
        _steps(trace),
        {slo.klass: _met(trace, config, slo.klass, requests.rid) for slo in config.slos},
    )


def _met(trace: Trace, config: Config, klass: str, rid: Ints) -> Ints:
    columns = met_by_request(trace, objectives_of(trace, config.slos, klass), klass)
    result = np.full(len(rid), -1)
    place = np.searchsorted(rid, np.asarray(columns["rid"], np.int64), sorter=(order := np.argsort(rid)))
    place = order[np.minimum(place, max(len(rid) - 1, 0))] if len(rid) else place
    mine = rid[place] == columns["rid"] if len(rid) else np.zeros(len(place), bool)
    result[place[mine]] = np.asarray(columns["met"], np.int64)[mine]
    return result


_THINNED = """
CREATE OR REPLACE TEMP TABLE thinned AS
SELECT j.*, s.stride
FROM joined j JOIN (SELECT klass, greatest(1, ceil(count(*) / $most))::BIGINT AS stride FROM joined GROUP BY klass) s USING (klass)
WHERE j.rid % s.stride = 0 AND ($klass IS NULL OR j.klass = $klass)
"""
#: Of each victim class what it waits for others' prefill, by culprit, and how many were coupled to it.
_COUPLED = """
WITH waited AS (
    SELECT j.klass AS victim, l.culprit, sum(l.ns) / 1e9 AS blamed_s
    FROM bill_lines l JOIN joined j ON j.rid = l.id
    WHERE l.component LIKE 'others_prefill%' OR l.component = 'queue_budget' GROUP BY ALL
),
sizes AS (SELECT klass AS victim, count(*) AS n FROM joined WHERE billed GROUP BY klass)
SELECT c.victim, c.culprit, c.n, c.coupled, coalesce(w.blamed_s, 0)::DOUBLE / s.n AS blamed_s
FROM coupling c JOIN sizes s USING (victim) LEFT JOIN waited w ON w.victim = c.victim AND w.culprit = c.culprit
WHERE c.coupled IS NOT NULL ORDER BY blamed_s DESC
"""


def _requests(trace: Trace) -> Requests:
    columns = trace.connection.execute(
        "SELECT rid, arrival_ns, klass, "
        f"coalesce(tenant, '') AS tenant, coalesce(status, 'ok') AS status, billed, {KNOWN} AS timed, (queue_ns / 1e9)::DOUBLE AS queue_s, "
        "(ttft_ns / 1e9)::DOUBLE AS ttft_s, (e2e_ns / 1e9)::DOUBLE AS e2e_s, prompt_tokens::DOUBLE AS prompt, "
        "cached_tokens::DOUBLE AS cached, output_tokens::DOUBLE AS output, stride::DOUBLE AS counts "
        "FROM thinned ORDER BY arrival_ns, rid"
    ).fetchnumpy()
    arrays: dict[str, Any] = {}
    for name, values in columns.items():
        if name in ("klass", "tenant", "status"):
            arrays[name] = np.asarray(values).astype(str)
        elif name in ("rid", "arrival_ns"):
            arrays[name] = np.asarray(values, np.int64)
        elif name in ("billed", "timed"):
            arrays[name] = np.asarray(values, bool)
        else:
            arrays[name] = floats(values)
    return Requests(**arrays)


def _loop(trace: Trace) -> Loop:
    columns = trace.connection.execute(
        "SELECT arrival_ns, CASE WHEN e2e_ns >= 0 THEN arrival_ns + e2e_ns ELSE finished_ns END::DOUBLE AS end_ns "
        "FROM joined ORDER BY arrival_ns, rid"
    ).fetchnumpy()
    ends = floats(columns["end_ns"])
    return loop_of(np.asarray(columns["arrival_ns"], np.int64), ends)


def _gaps(trace: Trace) -> dict[str, Gaps]:
    found = {}
    for row in trace.rows("SELECT klass, count(*) AS n FROM gaps GROUP BY klass ORDER BY klass"):
        columns = trace.connection.execute(
            "SELECT (end_ns - start_ns) / 1e9 AS value, end_ns, rid FROM gaps WHERE klass = $klass AND hash(id) % $stride = 0 ORDER BY id",
            {"klass": row["klass"], "stride": max(1, -(-row["n"] // MOST_VALUES))},
        ).fetchnumpy()
        found[row["klass"]] = Gaps(
            np.asarray(columns["value"], np.float64),
            np.asarray(columns["end_ns"], np.int64),
            np.asarray(columns["rid"], np.int64),
            row["n"],
        )
    return found


def _bills(trace: Trace, span: tuple[int, int]) -> dict[tuple[str, str], Floats]:
    """Seconds by component of all bills to the end, and how many bills there are (component ''), by slice of arrival."""
    con = trace.connection
    con.register("span", pa.table({"first_ns": [span[0]], "last_ns": [span[1]]}))
    slices = (
        "least(greatest(((arrival_ns - first_ns) / greatest(last_ns - first_ns, 1)::DOUBLE * "
        f"{SLICES})::BIGINT, 0), {SLICES - 1})"
    )
    rows = con.execute(
        f"WITH mine AS (SELECT rid, klass, {slices} AS slice FROM joined, span WHERE {known('E2E')}) "
        "SELECT klass, slice, '' AS component, count(*)::DOUBLE AS amount FROM mine GROUP BY ALL UNION ALL "
        "SELECT klass, slice, component, sum(ns) / 1e9 FROM mine JOIN bill_lines l ON l.id = mine.rid GROUP BY ALL"
    ).fetchnumpy()
    con.unregister("span")
    klass, component = (np.asarray(rows[name]).astype(str) for name in ("klass", "component"))
    slice_, amount = np.asarray(rows["slice"], np.int64), np.asarray(rows["amount"], np.float64)
    keys = np.char.add(np.char.add(component, "\t"), klass)
    found = {}
    for key in np.unique(keys):
        chosen = keys == key
        name, _, of = str(key).partition("\t")
        found[of, name] = np.asarray(
            np.bincount(slice_[chosen], weights=amount[chosen], minlength=SLICES), np.float64
        )
    return found


def _ranges(
    trace: Trace,
) -> dict[str, tuple[int, tuple[float, float | None], tuple[float, float | None]]]:
    """Metric -> observations, and the buckets of p50 and p99, of the server's histograms."""
    middle, tail = quantile_ranges(trace, 0.5), quantile_ranges(trace, 0.99)
    return {
        CONCEPTS[concept]: (n, middle[concept][1], bucket)
        for concept, (n, bucket, _) in tail.items()
        if concept in CONCEPTS
    }


def _steps(trace: Trace) -> Steps:
    row = trace.rows(
        """
        WITH known AS (
            SELECT s.*, c.max_num_seqs AS slots, c.max_num_batched_tokens AS budget
            FROM steps s LEFT JOIN configured c ON c.instance = s.instance
        ),
        spans AS (
            SELECT sum(tile_ns) FILTER (WHERE coalesce(prefill_tokens, 0) + coalesce(decode_requests, 0) > 0)::DOUBLE AS busy,
                   (max(end_ns) - min(start_ns))::DOUBLE AS span
            FROM known GROUP BY instance, engine
        )
        SELECT (SELECT sum(busy) / nullif(sum(span), 0) FROM spans) AS busy,
               quantile_cont(kv_usage, 0.95) AS kv_p95,
               quantile_cont(running / nullif(slots, 0)::DOUBLE, 0.95) AS slots_p95,
               avg((prefill_tokens + decode_tokens >= 0.95 * budget)::INT) FILTER (WHERE budget > 0) AS budget,
               avg((waiting > 0)::INT) FILTER (WHERE waiting IS NOT NULL) AS waiting
        FROM known
        """
    )[0]
    return Steps(**{name: None if value is None else float(value) for name, value in row.items()})


def values_of(side: Side, weights: Floats) -> dict[Key, Values]:
    """The latencies of each class by each metric. `weights`: what each request counts."""
    q = side.requests
    found: dict[Key, Values] = {}
    metrics = {name: q.metric(name) for name in METRICS if name != "ITL"}
    order = np.argsort(q.rid)
    for klass in side.classes:
        own = q.klass == klass
        for name in METRICS:
            if name == "ITL":
                if klass not in side.gaps:
                    continue
                gaps = side.gaps[klass]
                place = order[np.clip(np.searchsorted(q.rid[order], gaps.rid), 0, max(len(order) - 1, 0))]
                # A gap of a request that was thinned out counts as its class's usual one.
                known = q.rid[place] == gaps.rid
                each = np.where(known, weights[place], float(np.median(weights[own])) if own.any() else 1.0)
                found[klass, name] = Values(gaps.values_s, gaps.times_ns, each, gaps.n)
                continue
            some = own & np.isfinite(metrics[name])
            if some.any():
                n = round(float(q.counts[some].sum()))
                found[klass, name] = Values(metrics[name][some], q.arrival_ns[some], weights[some], n)
    return found
