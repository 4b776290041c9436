"""Replicas held against each other: engines of one model and role, like with like, block by block of the time they share.

`replicas` has a row for each engine that has peers: by what factor its requests are slower than those of the same class
on its peers at the same time, whether that is more than chance, and what differs: the load it gets, what its steps take
for equal batches, its cache. `replica_tails` says what of a tail's excess there would not be if the requests of that
engine had been as slow, rank for rank, as those of their class on its peers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from scipy.special import stdtr

from tailscope import stats
from tailscope.stats import Floats, Ints
from tailscope.store import Trace, schema_of

#: A replica of fewer requests, or a class with fewer on either side, is not compared.
MIN_REQUESTS = 20
#: The time that all replicas served is cut into so many blocks, each of at least so long, and so many are needed.
BLOCKS, BLOCK_NS, LEAST_BLOCKS = 20, 2_000_000_000, 8
#: Load in one block lasts into the next; at least half of the blocks count as independent.
INDEPENDENT = 0.5
#: Steps that two replicas must have in like batches before their pace is compared.
MIN_STEPS = 200

_OF_REPLICA: dict[str, pa.DataType] = {
    "instance": pa.string(),
    "engine": pa.int64(),
    "model": pa.string(),
    "peers": pa.int64(),
    # Whether it is one of several engines of its instance.
    "of_several": pa.bool_(),
    "requests": pa.int64(),
    "blocks": pa.int64(),
    "slower": pa.float64(),
    "p_value": pa.float64(),
    "slower_blocks": pa.int64(),
    "load": pa.float64(),
    "load_p_value": pa.float64(),
    "load_of": pa.string(),
    "pace": pa.float64(),
    "pace_steps": pa.int64(),
    "cached": pa.float64(),
    "peers_cached": pa.float64(),
    "running": pa.float64(),
    "peers_running": pa.float64(),
    "waiting": pa.float64(),
    "peers_waiting": pa.float64(),
    "kv_usage": pa.float64(),
    "peers_kv_usage": pa.float64(),
    "first_ns": pa.int64(),
    "last_ns": pa.int64(),
}
_REPLICAS = schema_of(_OF_REPLICA)
_OF_TAIL: dict[str, pa.DataType] = {
    "instance": pa.string(),
    "engine": pa.int64(),
    "klass": pa.string(),
    "metric": pa.string(),
    "lost_s": pa.float64(),
    "tail_share": pa.float64(),
    "p99_s": pa.float64(),
    "peers_p99_s": pa.float64(),
}
_TAILS = schema_of(_OF_TAIL)
_LOADED = """
SELECT rid, dense_rank() OVER (ORDER BY instance, coalesce(engine, -1)) - 1 AS unit,
       dense_rank() OVER (ORDER BY klass) - 1 AS klass, arrival_ns, ttft_ns / 1e9 AS ttft, e2e_ns / 1e9 AS e2e,
       coalesce(prompt_tokens, 0) AS prompt, coalesce(cached_tokens, 0) AS cached, coalesce(output_tokens, 0) AS output
FROM joined WHERE billed AND engine_saw AND ttft_ns >= 0 AND e2e_ns >= ttft_ns ORDER BY rid
"""
#: Instances that only prefill answer with one token, whether or not their role is told.
_UNITS = """
SELECT instance, engine, mode(model) AS model, mode(role) AS role, median(output_tokens) <= 1 AS one_token, count(*) AS n,
       count(*) OVER (PARTITION BY instance) > 1 AS of_several
FROM joined WHERE billed AND engine_saw AND ttft_ns >= 0 AND e2e_ns >= ttft_ns
GROUP BY instance, engine ORDER BY instance, coalesce(engine, -1)
"""
_TOGETHER = """
SELECT DISTINCT instance, engine FROM step_costs
WHERE lane IN (SELECT lane FROM step_costs GROUP BY lane HAVING count(DISTINCT (instance, engine)) > 1)
"""
#: Steps of like batches: within a quarter of a factor of two in decodes, half a one in prefill tokens. Engines that step
#: together take as long as the slowest of them, whatever their own batch.
_PACE = """
WITH alone AS (SELECT lane FROM step_costs GROUP BY lane HAVING count(DISTINCT (instance, engine)) = 1),
batches AS (
    SELECT instance, engine, floor(4 * log2(1 + decode_requests)) AS decodes,
           CASE WHEN prefill_tokens > 0 THEN 1 + floor(2 * log2(prefill_tokens)) ELSE 0 END AS prefill,
           median(tile_s) AS tile_s, count(*) AS n
    FROM step_costs SEMI JOIN alone USING (lane)
    WHERE NOT is_dummy AND tile_s > 0 AND decode_requests + prefill_tokens > 0 GROUP BY ALL HAVING count(*) >= 5
)
SELECT * FROM batches ORDER BY ALL
"""
_STATE = """
SELECT instance, engine, sum(running * tile_ns::DOUBLE) AS running, sum(waiting * tile_ns::DOUBLE) AS waiting,
       sum(kv_usage * tile_ns::DOUBLE) AS kv_usage, max(end_ns) - min(start_ns) AS span
FROM steps GROUP BY instance, engine
"""


@dataclass(frozen=True)
class _Served:
    """Requests in arrays of one length; `values` by metric, seconds, NaN where there is none."""

    rid: Ints
    unit: Ints
    klass: Ints
    arrival_ns: Ints
    prompt: Floats
    cached: Floats
    output: Floats
    values: dict[str, Floats]


def write_replicas(trace: Trace) -> None:
    """Fill `replicas` and `replica_tails`; both are empty where no engine has peers. After contrast, which makes
    `members`, and after `step_costs`."""
    units = trace.rows(_UNITS)
    # Engines that step together are as slow as the slowest of them: what sets them apart is other rules' matter.
    together = {(row["instance"], row["engine"]) for row in trace.rows(_TOGETHER)}
    groups: dict[tuple[Any, ...], list[int]] = {}
    for number, unit in enumerate(units):
        if unit["n"] >= MIN_REQUESTS and (unit["instance"], unit["engine"]) not in together:
            key = unit["model"], unit["role"], unit["one_token"]
            groups.setdefault(key, []).append(number)
    compared = [group for group in groups.values() if len(group) > 1]
    rows, tails = list[dict[str, Any]](), list[dict[str, Any]]()
    if compared:
        served, names = _load(trace)
        batches, state = trace.rows(_PACE), {(r["instance"], r["engine"]): r for r in trace.rows(_STATE)}
        members = _tail_members(trace, names)
        for group in compared:
            for row, number in _held_against(units, served, group):
                named = {key: units[number][key] for key in ("instance", "engine", "model", "of_several")}
                rows.append(
                    {
                        **named,
                        **row,
                        **_pace(units, group, number, batches),
                        **_state(units, group, number, state),
                    }
                )
                tails += [{**named, **tail} for tail in _tails(served, group, number, members, names)]
    trace.create("replicas", pa.Table.from_pylist([_only(row, _REPLICAS) for row in rows], schema=_REPLICAS))
    trace.create("replica_tails", pa.Table.from_pylist([_only(row, _TAILS) for row in tails], schema=_TAILS))


def _only(row: dict[str, Any], schema: pa.Schema) -> dict[str, Any]:
    return {name: row.get(name) for name in schema.names}


def _load(trace: Trace) -> tuple[_Served, list[str]]:
    c = trace.connection.execute(_LOADED).fetchnumpy()
    ttft, e2e = np.asarray(c["ttft"], np.float64), np.asarray(c["e2e"], np.float64)
    output = np.asarray(c["output"], np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot = np.where(output > 1, (e2e - ttft) / (output - 1), np.nan)
    names = [
        row["klass"]
        for row in trace.rows(
            "SELECT klass FROM joined WHERE billed AND engine_saw AND ttft_ns >= 0 AND e2e_ns >= ttft_ns GROUP BY klass ORDER BY klass"
        )
    ]
    served = _Served(
        np.asarray(c["rid"], np.int64),
        np.asarray(c["unit"], np.int64),
        np.asarray(c["klass"], np.int64),
        np.asarray(c["arrival_ns"], np.int64),
        np.asarray(c["prompt"], np.float64),
        np.asarray(c["cached"], np.float64),
        output,
        {"TTFT": ttft, "TPOT": tpot, "E2E": e2e},
    )
    return served, names


def _held_against(
    units: list[dict[str, Any]], served: _Served, group: list[int]
) -> list[tuple[dict[str, Any], int]]:
    """Each engine of a group against its peers, in the blocks of the time in which all of them served."""
    inside = np.isin(served.unit, group)
    spans = [served.arrival_ns[served.unit == unit] for unit in group]
    # One that started late, or went early, is compared while it was there.
    first, last = max(int(s.min()) for s in spans), min(int(s.max()) for s in spans)
    count = min(BLOCKS, (last - first) // BLOCK_NS)
    if count < LEAST_BLOCKS:
        return []
    inside &= (served.arrival_ns >= first) & (served.arrival_ns <= last)
    block = np.clip((served.arrival_ns - first) * count // max(last - first, 1), 0, count - 1)
    scores = [_standardised(served.values[metric], served.klass, inside) for metric in ("TTFT", "TPOT")]
    amounts = {
        "requests": np.ones(len(block)),
        "prompt tokens to compute": np.maximum(served.prompt - served.cached, 0.0),
        "output tokens": served.output,
    }
    result = []
    for unit in group:
        mine, theirs = inside & (served.unit == unit), inside & (served.unit != unit)
        tested = [_tested(_difference(score, block, mine, theirs, count)) for score in scores]
        slower, p_value, blocks, above = min(tested, key=lambda t: t[1])
        loads = []
        for name, amount in amounts.items():
            own = np.bincount(block[mine], amount[mine], count)
            others = np.bincount(block[theirs], amount[theirs], count) / (len(group) - 1)
            # Half a usual request keeps an empty block finite.
            least = 0.5 * float(amount[inside].mean()) + 1e-9
            _, load_p, _, _ = _tested(np.log((own + least) / (others + least)))
            loads.append((load_p, float(own.sum() / max(others.sum(), 1e-9)), name))
        likely = [load for load in loads if load[0] <= 0.01] or loads
        load_p, load, load_of = max(likely, key=lambda entry: entry[1])
        result.append(
            (
                {
                    "peers": len(group) - 1,
                    "requests": int(mine.sum()),
                    "blocks": blocks,
                    "slower": float(np.exp(slower)),
                    # Any of the group might have been the one, by either metric.
                    "p_value": min(1.0, p_value * len(group) * len(scores)),
                    "slower_blocks": above,
                    "load": load,
                    "load_p_value": min(1.0, load_p * len(amounts)),
                    "load_of": load_of,
                    "cached": _cached(served, mine),
                    "peers_cached": _cached(served, theirs),
                    "first_ns": first,
                    "last_ns": last,
                },
                unit,
            )
        )
    return result


def _standardised(values: Floats, klass: Ints, inside: NDArray[np.bool_]) -> Floats:
    """The logarithm of each value less the median of its class, NaN outside."""
    with np.errstate(divide="ignore", invalid="ignore"):
        scores = np.where(inside & (values > 0), np.log(values), np.nan)
    for one in np.unique(klass[inside]):
        mine = (klass == one) & np.isfinite(scores)
        if mine.any():
            scores[mine] -= np.median(scores[mine])
    return scores


def _difference(
    scores: Floats, block: Ints, mine: NDArray[np.bool_], theirs: NDArray[np.bool_], count: int
) -> Floats:
    """Mean score of an engine less that of its peers, of each block in which both have some."""
    means = []
    for side in (mine, theirs):
        known = side & np.isfinite(scores)
        n = np.bincount(block[known], minlength=count)
        with np.errstate(invalid="ignore"):
            means.append(
                np.where(n >= 3, np.bincount(block[known], scores[known], count) / np.maximum(n, 1), np.nan)
            )
    difference = means[0] - means[1]
    return np.asarray(difference[np.isfinite(difference)])


def _tested(differences: Floats) -> tuple[float, float, int, int]:
    """(mean, one-sided p of Student's t for a mean of 0, blocks, those above 0). Blocks that hang together count less."""
    n = len(differences)
    if n < LEAST_BLOCKS:
        return 0.0, 1.0, n, 0
    mean, spread = float(differences.mean()), float(differences.std(ddof=1))
    n_eff = max(stats.uncorrelated(differences, np.arange(n)), INDEPENDENT * n)
    p = float(stdtr(n_eff - 1, -mean / max(spread, 1e-12) * np.sqrt(n_eff)))
    return mean, p, n, int((differences > 0).sum())


def _cached(served: _Served, chosen: NDArray[np.bool_]) -> float:
    return float(served.cached[chosen].sum() / max(served.prompt[chosen].sum(), 1.0))


def _pace(
    units: list[dict[str, Any]], group: list[int], unit: int, batches: list[dict[str, Any]]
) -> dict[str, Any]:
    """What the engine's steps take for batches that its peers had too, as a factor of what they took there."""
    names = {(units[u]["instance"], units[u]["engine"]): u for u in group}
    own: dict[tuple[float, float], tuple[float, int]] = {}
    others: dict[tuple[float, float], list[tuple[float, int]]] = {}
    for batch in batches:
        owner = names.get((batch["instance"], batch["engine"]))
        kind = batch["decodes"], batch["prefill"]
        if owner == unit:
            own[kind] = np.log(batch["tile_s"]), batch["n"]
        elif owner is not None:
            others.setdefault(kind, []).append((np.log(batch["tile_s"]), batch["n"]))
    total, weight = 0.0, 0
    for kind, (mine, n) in own.items():
        if kind in others:
            there = sum(k for _, k in others[kind])
            theirs = sum(value * k for value, k in others[kind]) / there
            total, weight = total + min(n, there) * (mine - theirs), weight + min(n, there)
    if weight < MIN_STEPS:
        return {}
    return {"pace": float(np.exp(total / weight)), "pace_steps": weight}


def _state(
    units: list[dict[str, Any]],
    group: list[int],
    unit: int,
    state: dict[tuple[str, int | None], dict[str, Any]],
) -> dict[str, Any]:
    """What ran, waited and was held on the engine and on its peers, as means over the time of its steps."""
    result: dict[str, Any] = {}
    for name in ("running", "waiting", "kv_usage"):
        means: dict[bool, list[float]] = {True: [], False: []}
        for other in group:
            row = state.get((units[other]["instance"], units[other]["engine"]))
            if row is not None and row[name] is not None and row["span"]:
                means[other == unit].append(row[name] / row["span"])
        if means[True] and means[False]:
            result |= {name: means[True][0], f"peers_{name}": float(np.mean(means[False]))}
    return result


#: (class, metric) -> requests of the tail, sorted.
Tails = dict[tuple[int, str], Ints]


def _tail_members(trace: Trace, names: list[str]) -> Tails:
    c = trace.connection.execute(
        "SELECT klass, metric, id FROM members WHERE tail AND metric <> 'ITL' ORDER BY id"
    ).fetchnumpy()
    klass, metric = np.asarray(c["klass"]).astype(str), np.asarray(c["metric"]).astype(str)
    ids = np.asarray(c["id"], np.int64)
    pairs = [(i, name) for i in range(len(names)) for name in np.unique(metric)]
    chosen = {(i, str(name)): ids[(klass == names[i]) & (metric == name)] for i, name in pairs}
    return {key: rids for key, rids in chosen.items() if len(rids)}


def _tails(
    served: _Served, group: list[int], unit: int, members: Tails, names: list[str]
) -> list[dict[str, Any]]:
    """What of each tail's excess the engine's requests make by being slower than those of its peers of the same rank."""
    peers = np.isin(served.unit, [u for u in group if u != unit])
    result = []
    for (klass, metric), ids in members.items():
        values = served.values[metric]
        known = (served.klass == klass) & np.isfinite(values)
        mine, theirs = np.flatnonzero(known & (served.unit == unit)), values[known & peers]
        if len(mine) < MIN_REQUESTS or len(theirs) < MIN_REQUESTS:
            continue
        order = np.argsort(values[mine], kind="stable")
        rank = np.empty(len(mine))
        rank[order] = (np.arange(len(mine)) + 0.5) / len(mine)
        # The quantiles of so many ranks: one sort, where np.quantile would part the values anew for each.
        as_there = np.interp(rank * (len(theirs) - 1), np.arange(len(theirs)), np.sort(theirs))
        in_tail = np.isin(served.rid[mine], ids)
        lost = float((values[mine] - as_there)[in_tail].sum()) / len(ids)
        result.append(
            {
                "klass": names[klass],
                "metric": metric,
                "lost_s": lost,
                "tail_share": float(in_tail.sum()) / len(ids),
                "p99_s": float(np.quantile(values[mine], 0.99)),
                "peers_p99_s": float(np.quantile(theirs, 0.99)),
            }
        )
    return result
