"""Each request's bill: its latency booked, to the nanosecond, to components, with the culprits of each.

`bill_lines` has a row per (request, place, component, culprit): places are wait, queue, prefill and decode; the
first three sum to TTFT, all four to E2E, exactly. `gap_lines` is the same for the token gaps that were asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tailscope.ledger.engine_time import EngineTime, Place, Prefills, Steps
from tailscope.store import Trace

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: component -> what it means; the order is the order of a request's life.
COMPONENTS: dict[str, str] = {
    "frontend": "API server: tokenise, event loop, hand-over to the engine",
    "step_wait": "waiting for the running step to end, at the step's normal cost",
    "others_prefill_before": "waiting to be scheduled behind steps that others' prefill made long",
    "queue_budget": "queued while others' prefill took the token budget",
    "queue_kv": "queued while the KV cache was full",
    "queue_slots": "queued while all sequence slots were taken",
    "queue": "queued, reason not known",
    "own_prefill": "prefill of its own prompt, with the batch it ran in",
    "others_prefill_in_prefill": "others' prefill in the steps of its own prefill",
    "decode": "decode at the batch's normal cost",
    "others_prefill_in_decode": "others' prefill in the steps of its decode",
    "preempted": "preempted, waiting to be scheduled again",
    "prefill_phase": "prefill as the engine measured it; no steps are known that would say what it held",
    "decode_phase": "decode as the engine or client measured it; no steps are known that would say what it held",
    "unexplained": "measured, but no evidence says why",
}

#: At most this many preemptions of a request are placed in time.
MAX_PREEMPTIONS = 16
#: A gap between tokens of fewer steps is jitter of the client, not a preemption.
MIN_STALL_STEPS = 3

_LINES = pa.schema(
    [
        ("id", pa.int64()),
        ("place", pa.string()),
        ("component", pa.string()),
        ("culprit", pa.string()),
        ("ns", pa.int64()),
    ]
)


@dataclass
class Ledger:
    """What the ledger knows beside the bills: each engine's cost model and unexplained steps."""

    culprits: tuple[str, ...]
    engines: list[dict[str, Any]] = field(default_factory=list)
    times: dict[tuple[str, int | None], EngineTime] = field(default_factory=dict)


class _Lines:
    """Collects lines of one set of bills. What was not given to any component is `unexplained`."""

    def __init__(self, trace: Trace, table: str, ids: Ints, culprits: tuple[str, ...]) -> None:
        self._trace, self._table, self._ids, self._culprits = trace, table, ids, culprits

    def place(self, place: str, total_ns: Ints, parts: dict[tuple[str, int | None], Floats], rest: str) -> None:
        """Book `total_ns` of each request: `parts` in seconds, scaled down where they exceed it, `rest` takes what is left."""
        given = np.sum(list(parts.values()), axis=0) * 1e9 if parts else np.zeros(len(total_ns))
        with np.errstate(divide="ignore", invalid="ignore"):
            scale = np.where(given > total_ns, total_ns / np.maximum(given, 1e-9), 1.0)
        left = total_ns.copy()
        lines: dict[tuple[str, int | None], Ints] = {}
        for key, seconds in parts.items():
            # Rounding must not give more than there is.
            ns = np.minimum(np.floor(seconds * 1e9 * scale).astype(np.int64), left)
            lines[key] = ns
            left -= ns
        rest_key = (rest, None)
        lines[rest_key] = lines[rest_key] + left if rest_key in lines else left
        for (component, culprit), ns in lines.items():
            self._append(place, component, None if culprit is None else self._culprits[culprit], ns)

    def _append(self, place: str, component: str, culprit: str | None, ns: Ints) -> None:
        some = ns > 0
        count = int(some.sum())
        if not count:
            return
        rows = pa.Table.from_arrays(
            [
                pa.array(self._ids[some]),
                *(pa.repeat(pa.scalar(text, pa.string()), count) for text in (place, component, culprit)),
                pa.array(ns[some]),
            ],
            schema=_LINES,
        )
        self._trace.connection.register("new_lines", rows)
        self._trace.connection.execute(f"INSERT INTO {self._table} SELECT * FROM new_lines")
        self._trace.connection.unregister("new_lines")


def write_bills(trace: Trace, budgets: dict[str, float]) -> Ledger:
    """Fill `bill_lines` for every request an engine saw. `budgets`: token budget by instance, where known."""
    con = trace.connection
    for table in ("bill_lines", "gap_lines"):
        con.execute(
            f"CREATE OR REPLACE TEMP TABLE {table}"
            "(id BIGINT, place VARCHAR, component VARCHAR, culprit VARCHAR, ns BIGINT)"
        )
    culprits = _culprits(trace)
    ledger = Ledger(culprits)
    for instance, engine in _engines(trace):
        requests = _requests(trace, instance, engine)
        if not len(requests["rid"]):
            continue
        steps = _steps(trace, instance, engine)
        if steps is None:
            _write_phases_only(trace, requests, culprits)
            continue
        time = EngineTime(steps, _prefills(steps, requests, culprits), len(culprits), budgets.get(instance))
        ledger.times[instance, engine] = time
        ledger.engines.append(_about(time, instance, engine))
        _write_engine(trace, time, requests, culprits)
    return ledger


def _write_engine(trace: Trace, time: EngineTime, r: dict[str, Any], culprits: tuple[str, ...]) -> None:
    wait, queue, prefill, decode = _phases(r)
    arrival = r["arrival_ns"]
    instants = np.cumsum([arrival, wait, queue, prefill, decode], axis=0)
    arrived, queued, scheduled, first, last = (Place(time.steps, instant) for instant in instants)
    lines = _Lines(trace, "bill_lines", r["rid"], culprits)
    classes = range(len(culprits))

    lines.place(
        "wait",
        wait,
        {
            ("step_wait", None): time.between(time.base, arrived, queued),
            ("unexplained", None): time.between(time.unexplained, arrived, queued),
            **_others_prefill("others_prefill_before", time, arrived, queued),
        },
        "frontend",
    )
    lines.place(
        "queue",
        queue,
        {
            **{("queue_budget", c): time.between(time.budget_by[c], queued, scheduled) for c in classes},
            **_by_holder(time, "queue_kv", time.between(time.blocked["kv"], queued, scheduled), queued, scheduled),
            **_by_holder(time, "queue_slots", time.between(time.blocked["slots"], queued, scheduled), queued, scheduled),
        },
        "queue",
    )
    own_rate = time.between(time.own_rate, scheduled, first)
    own = _own_weight(time, r) * own_rate
    mine = r["culprit"]
    others = _others_prefill("others_prefill_in_prefill", time, scheduled, first)
    lines.place(
        "prefill",
        prefill,
        {
            ("own_prefill", None): time.between(time.base, scheduled, first) + own,
            **{
                (component, c): seconds if c is None else np.maximum(seconds - np.where(mine == c, own, 0.0), 0.0)
                for (component, c), seconds in others.items()
            },
        },
        "unexplained",
    )
    stalled = _stalls(trace, time, r)
    if stalled is None:
        stall_parts: dict[tuple[str, int | None], Floats] = {}
        in_stall = {}
    else:
        stall_parts, in_stall = stalled
    lines.place(
        "decode",
        decode,
        {
            ("decode", None): np.maximum(time.between(time.base, first, last) - in_stall.get("base", 0.0), 0.0),
            **{
                (component, c): np.maximum(seconds - in_stall.get(c, 0.0), 0.0)
                for (component, c), seconds in _others_prefill("others_prefill_in_decode", time, first, last).items()
            },
            **stall_parts,
        },
        "unexplained",
    )


def _others_prefill(
    component: str, time: EngineTime, start: Place, end: Place
) -> dict[tuple[str, int | None], Floats]:
    """Prefill time between two instants by class of culprit; None for requests nobody saw finish."""
    parts: dict[tuple[str, int | None], Floats] = {
        (component, c): time.between(sums, start, end) for c, sums in enumerate(time.prefill_by)
    }
    parts[component, None] = time.between(time.prefill_by_nobody, start, end)
    return parts


def _by_holder(
    time: EngineTime, component: str, seconds: Floats, start: Place, end: Place
) -> dict[tuple[str, int | None], Floats]:
    """`seconds` of waiting for KV or slots, divided among the classes by the KV tokens they held meanwhile."""
    shares = [time.between(held, start, end) for held in time.held_by]
    total = np.maximum(np.sum(shares, axis=0), 1e-12) if shares else np.ones(len(seconds))
    divided = {(component, c): seconds * share / total for c, share in enumerate(shares)}
    unheld = seconds - np.sum(list(divided.values()), axis=0) if divided else seconds
    return {**divided, (component, None): np.maximum(unheld, 0.0)}


def _own_weight(time: EngineTime, r: dict[str, Any]) -> Floats:
    """Each billed request's weight in its prefill window; 0 for those outside the steps' time."""
    weight = np.zeros(len(r["rid"]))
    weight[r["inside"]] = time.weight
    return weight


def _stalls(
    trace: Trace, time: EngineTime, r: dict[str, Any]
) -> tuple[dict[tuple[str, int | None], Floats], dict[int | str | None, Floats]] | None:
    """Time preempted inside decode, by holder, and what of the decode's other evidence lies in it.

    From the gaps between the client's tokens where there are any; else from the steps in which the request
    must have been left out, which says how long but not when.
    """
    preempted = np.flatnonzero(r["preemptions"] > 0)
    if not len(preempted):
        return None
    n = len(r["rid"])
    sums: dict[int | str | None, Floats] = {"base": time.base, None: time.prefill_by_nobody}
    sums.update(enumerate(time.prefill_by))
    in_stall = {name: np.zeros(n) for name in sums}
    total = np.zeros(n)
    held = [np.zeros(n) for _ in time.held_by]
    position = {int(rid): i for i, rid in enumerate(r["rid"])}
    gaps = trace.connection.execute(_PREEMPTION_GAPS, {"most": MAX_PREEMPTIONS}).fetchnumpy()
    rows = np.array([position.get(int(rid), -1) for rid in gaps["rid"]], dtype=np.intp)
    kept = rows >= 0
    rows = rows[kept]
    seen = np.zeros(n, dtype=bool)
    seen[rows] = True
    start = Place(time.steps, np.asarray(gaps["start_ns"], dtype=np.int64)[kept])
    end_ns = np.asarray(gaps["end_ns"], dtype=np.int64)[kept]
    steps_inside = time.between(time.count, start, Place(time.steps, end_ns))
    # The step that gives the next token is the request's own again.
    boundary = np.clip(Place(time.steps, end_ns).boundary() - 1, 0, len(time.steps.start_ns) - 1)
    end = Place(time.steps, np.maximum(np.asarray(gaps["start_ns"], dtype=np.int64)[kept], time.steps.start_ns[boundary]))
    long = steps_inside >= MIN_STALL_STEPS
    np.add.at(total, rows[long], time.between(time.busy, start, end)[long])
    for name, values in sums.items():
        np.add.at(in_stall[name], rows[long], time.between(values, start, end)[long])
    for c, held_sums in enumerate(time.held_by):
        np.add.at(held[c], rows[long], time.between(held_sums, start, end)[long])
    _, _, _, decode = _phases(r)
    first_ns = r["arrival_ns"] + r["ttft_ns"]
    unseen = preempted[~seen[preempted]]
    first, last = Place(time.steps, first_ns[unseen]), Place(time.steps, (first_ns + decode)[unseen])
    steps_in_decode = time.between(time.count, first, last)
    tokens = np.nan_to_num(r["output_tokens"][unseen]) - 1
    with np.errstate(divide="ignore", invalid="ignore"):
        left_out = np.where(steps_in_decode > 0, (steps_in_decode - tokens) / np.maximum(steps_in_decode, 1), 0.0)
    left_out = np.where(steps_in_decode - tokens >= MIN_STALL_STEPS, np.clip(left_out, 0.0, 1.0), 0.0)
    total[unseen] = left_out * time.between(time.busy, first, last)
    for name, values in sums.items():
        in_stall[name][unseen] = left_out * time.between(values, first, last)
    for c, held_sums in enumerate(time.held_by):
        held[c][unseen] = left_out * time.between(held_sums, first, last)
    held_total = np.maximum(np.sum(held, axis=0), 1e-12) if held else np.ones(n)
    parts: dict[tuple[str, int | None], Floats] = {
        ("preempted", c): total * share / held_total for c, share in enumerate(held)
    }
    parts["preempted", None] = np.maximum(total - np.sum(list(parts.values()), axis=0), 0.0) if parts else total
    return parts, in_stall


#: The longest gaps between a preempted request's tokens, one a preemption, on the engine's clock: the client has
#: a token as much later as it had the first one.
_PREEMPTION_GAPS = """
WITH wanted AS (
    SELECT rid, client_key, preemptions,
           client_arrival_ns + client_ttft_ns - (arrival_ns + ttft_ns) AS delay_ns
    FROM joined WHERE preemptions > 0 AND client_key IS NOT NULL AND client_ttft_ns IS NOT NULL
),
gaps AS (
    SELECT w.rid, w.preemptions, w.delay_ns,
           lag(t.time_ns) OVER (PARTITION BY t.request_key ORDER BY t.seq) AS start_ns, t.time_ns AS end_ns
    FROM tokens t JOIN wanted w ON w.client_key = t.request_key
)
SELECT rid, start_ns - delay_ns AS start_ns, end_ns - delay_ns AS end_ns
FROM gaps WHERE start_ns IS NOT NULL AND end_ns > start_ns
QUALIFY row_number() OVER (PARTITION BY rid ORDER BY end_ns - start_ns DESC, start_ns) <= least(preemptions, $most)
"""


def _write_phases_only(trace: Trace, r: dict[str, Any], culprits: tuple[str, ...]) -> None:
    """Bills from the emitter's own phases, where no step of the engine is known."""
    wait, queue, prefill, decode = _phases(r)
    lines = _Lines(trace, "bill_lines", r["rid"], culprits)
    known = np.isfinite(r["queue_ns"]) & np.isfinite(r["prefill_ns"])
    lines.place("wait", wait, {}, "frontend")
    lines.place("queue", queue, {}, "queue")
    # Without its parts, all of TTFT is one phase of which nothing is known.
    lines.place("prefill", prefill, {("prefill_phase", None): np.where(known, prefill / 1e9, 0.0)}, "unexplained")
    lines.place("decode", decode, {}, "decode_phase")


def write_gap_bills(trace: Trace, ledger: Ledger, gaps: pa.Table) -> None:
    """Fill `gap_lines` for token gaps: columns id, instance, engine, start_ns, end_ns (engine's clock), preempted."""
    con = trace.connection
    con.register("asked_gaps", gaps)
    for instance, engine in con.execute("SELECT DISTINCT instance, engine FROM asked_gaps ORDER BY ALL").fetchall():
        g = con.execute(
            "SELECT id, start_ns, end_ns, preempted FROM asked_gaps "
            "WHERE instance = $instance AND engine IS NOT DISTINCT FROM $engine ORDER BY id",
            {"instance": instance, "engine": engine},
        ).fetchnumpy()
        lines = _Lines(trace, "gap_lines", np.asarray(g["id"], np.int64), ledger.culprits)
        start_ns, end_ns = np.asarray(g["start_ns"], np.int64), np.asarray(g["end_ns"], np.int64)
        time = ledger.times.get((instance, engine))
        if time is None:
            lines.place("decode", end_ns - start_ns, {}, "decode_phase")
        else:
            _write_gaps(lines, time, start_ns, end_ns, np.asarray(g["preempted"], bool))
    con.unregister("asked_gaps")


def _write_gaps(lines: _Lines, time: EngineTime, start_ns: Ints, end_ns: Ints, preempted: NDArray[np.bool_]) -> None:
    start, end = Place(time.steps, start_ns), Place(time.steps, end_ns)
    stalled = preempted & (time.between(time.count, start, end) >= MIN_STALL_STEPS)
    # Of a stalled gap only the step that ends it is decode.
    last_step = np.clip(end.boundary() - 1, 0, len(time.steps.start_ns) - 1)
    resumed_ns = np.maximum(start_ns, time.steps.start_ns[last_step])
    resumed = Place(time.steps, resumed_ns)
    decode_from = Place(time.steps, np.where(stalled, resumed_ns, start_ns))
    stall = np.where(stalled, time.between(time.busy, start, resumed), 0.0)
    lines.place(
        "decode",
        end_ns - start_ns,
        {
            ("decode", None): time.between(time.base, decode_from, end),
            **_others_prefill("others_prefill_in_decode", time, decode_from, end),
            **_by_holder(time, "preempted", stall, start, resumed),
        },
        "unexplained",
    )


def _phases(r: dict[str, Any]) -> tuple[Ints, Ints, Ints, Ints]:
    """wait, queue, prefill, decode in ns, each at least 0: the first three sum to TTFT, all to E2E.

    The parts are on the engine's clock and TTFT on the front end's: where the parts exceed it they are scaled down.
    """
    ttft = r["ttft_ns"]
    decode = np.maximum(r["e2e_ns"] - ttft, 0)
    known = np.isfinite(r["queue_ns"]) & np.isfinite(r["prefill_ns"])
    queue = np.where(known, np.nan_to_num(r["queue_ns"]), 0.0)
    prefill = np.where(known, np.nan_to_num(r["prefill_ns"]), ttft)
    parts = queue + prefill
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = np.where(parts > ttft, ttft / np.maximum(parts, 1.0), 1.0)
    queue_ns = np.floor(queue * scale).astype(np.int64)
    prefill_ns = np.minimum(np.floor(prefill * scale).astype(np.int64), ttft - queue_ns)
    return ttft - queue_ns - prefill_ns, queue_ns, prefill_ns, decode


def _culprits(trace: Trace) -> tuple[str, ...]:
    """The classes that can be blamed: those with most prompt tokens, the rest as `other`."""
    most = 7
    names = [
        row["klass"]
        for row in trace.rows(
            "SELECT klass FROM joined WHERE billed GROUP BY klass "
            "ORDER BY sum(greatest(prompt_tokens - coalesce(cached_tokens, 0), 1)) DESC NULLS LAST, klass"
        )
    ]
    return tuple(names) if len(names) <= most else (*names[: most - 1], "other")


def _engines(trace: Trace) -> Iterator[tuple[str, int | None]]:
    for row in trace.rows("SELECT DISTINCT instance, engine FROM joined WHERE billed ORDER BY ALL"):
        yield row["instance"], row["engine"]


def _steps(trace: Trace, instance: str, engine: int | None) -> Steps | None:
    columns = trace.connection.execute(
        "SELECT start_ns, end_ns, prefill_requests, prefill_tokens, decode_requests, decode_tokens, running, waiting, "
        "kv_usage FROM steps WHERE instance = $instance AND engine IS NOT DISTINCT FROM $engine ORDER BY k",
        {"instance": instance, "engine": engine},
    ).fetchnumpy()
    if not len(columns["start_ns"]):
        return None
    times = {name: np.asarray(columns.pop(name), np.int64) for name in ("start_ns", "end_ns")}
    return Steps(**times, **{name: _floats(values) for name, values in columns.items()})


def _requests(trace: Trace, instance: str, engine: int | None) -> dict[str, Any]:
    """Arrays of the requests that have a bill on this engine; unknown is NaN."""
    columns = trace.connection.execute(
        "SELECT rid, arrival_ns, ttft_ns, e2e_ns, queue_ns, prefill_ns, prompt_tokens, cached_tokens, output_tokens, "
        "preemptions, klass FROM joined WHERE billed AND ttft_ns >= 0 AND e2e_ns >= ttft_ns "
        "AND instance = $instance AND engine IS NOT DISTINCT FROM $engine ORDER BY rid",
        {"instance": instance, "engine": engine},
    ).fetchnumpy()
    exact = {name: np.asarray(columns[name], np.int64) for name in ("rid", "arrival_ns", "ttft_ns", "e2e_ns")}
    klass = np.asarray(columns.pop("klass"))
    return {**{name: _floats(values) for name, values in columns.items() if name not in exact}, **exact, "klass": klass}


def _prefills(steps: Steps, r: dict[str, Any], culprits: tuple[str, ...]) -> Prefills:
    """The prefill phases of `r` that lie in the steps' time; adds `culprit` and `inside` to `r`."""
    index = {name: i for i, name in enumerate(culprits)}
    other = len(culprits) - 1
    names, inverse = np.unique(r["klass"].astype(str), return_inverse=True)
    r["culprit"] = np.array([index.get(str(name), other) for name in names], dtype=np.intp)[inverse]
    wait, queue, _, _ = _phases(r)
    scheduled = r["arrival_ns"] + wait + queue
    first_token = r["arrival_ns"] + r["ttft_ns"]
    inside = (first_token > steps.start_ns[0]) & (scheduled < steps.end_ns[-1])
    inside &= np.isfinite(r["prompt_tokens"])
    r["inside"] = inside
    cached = np.nan_to_num(r["cached_tokens"])
    return Prefills(
        scheduled_ns=scheduled[inside],
        first_token_ns=first_token[inside],
        last_ns=(r["arrival_ns"] + r["e2e_ns"])[inside],
        computed_tokens=np.maximum(r["prompt_tokens"] - cached, 1.0)[inside],
        cached_tokens=cached[inside],
        held_tokens=(r["prompt_tokens"] + np.nan_to_num(r["output_tokens"]) / 2)[inside],
        culprit=r["culprit"][inside],
    )


def _about(time: EngineTime, instance: str, engine: int | None) -> dict[str, Any]:
    cost = time.cost
    return {
        "instance": instance,
        "engine": engine,
        "steps": len(time.steps.start_ns),
        "busy_s": float(time.busy[-1]),
        "unexplained_s": float(time.unexplained[-1]),
        "cost_error": None if cost is None else cost.error,
        "cost_explained": None if cost is None else cost.explained,
        "longest": [
            {"time_ns": int(time.steps.start_ns[k]), "seconds": seconds}
            for k, seconds in time.longest_unexplained(3)
            if seconds > 0
        ],
    }


def _floats(values: Any) -> Floats:
    """A DuckDB column as float64, NULL as NaN."""
    if isinstance(values, np.ma.MaskedArray):
        return np.asarray(values.astype(np.float64).filled(np.nan))
    return np.asarray(values, np.float64)
