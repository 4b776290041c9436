"""Each request's bill: its latency booked, to the nanosecond, to components, with the culprits of each.

`bill_lines` has a row per (request, place, component, culprit): places are wait, queue, prefill and decode; the
first three sum to TTFT, all four to E2E, exactly. `gap_lines` is the same for the token gaps that were asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tailscope.ledger.engine_time import EngineTime
from tailscope.ledger.half_timed import write_half_timed
from tailscope.ledger.handoff import Handoff, write_handoffs
from tailscope.ledger.lines import Booking, Lines, Parts, mean_of
from tailscope.ledger.lockstep import groups, load_ends, one_timeline
from tailscope.ledger.membership import Membership, load_membership
from tailscope.ledger.own_prefill import OwnPrefill, Work
from tailscope.ledger.recompute import write_told
from tailscope.ledger.requests import Requests, culprit_classes, load_requests, load_steps
from tailscope.ledger.stalls import MIN_STALL_STEPS, Gaps, Stalls, by_holder, load_gaps, resumption_ns
from tailscope.ledger.steps import Limits, Place, Prefills, Steps
from tailscope.ledger.unserved import uncertain_ns
from tailscope.model import ClassRow
from tailscope.stats import Floats, Ints
from tailscope.store import Trace


@dataclass
class Ledger:
    """What the ledger knows beside the bills.

    `engines` describes each engine's cost model and unexplained steps. `spread` counts the requests that name no
    engine of several; their bill is the mean over the engines, and `spread_s` the least and the most request-seconds of
    others' prefill it could be.
    """

    culprits: tuple[str, ...]
    engines: list[dict[str, Any]] = field(default_factory=list)
    times: dict[tuple[str, int | None], EngineTime] = field(default_factory=dict)
    #: The engines that step together have one number, and so has each that steps alone.
    lanes: dict[tuple[str, int | None], int] = field(default_factory=dict)
    window_ns: tuple[int, int] = (0, 0)
    spread: int = 0
    spread_s: tuple[float, float] = (0.0, 0.0)
    #: The classes as their clients saw them, beside the engine's view of the same requests.
    clients: list[ClassRow] = field(default_factory=list)


def write_bills(trace: Trace, limits: Mapping[str, Limits]) -> Ledger:
    """Fill `bill_lines` for every request that is billed. `limits`: by instance, where known."""
    con = trace.connection
    for table in ("bill_lines", "gap_lines"):
        con.execute(
            f"CREATE OR REPLACE TEMP TABLE {table}"
            "(id BIGINT, place VARCHAR, component VARCHAR, culprit VARCHAR, ns BIGINT)"
        )
        con.execute(
            f"CREATE OR REPLACE TEMP TABLE {table}_bounds(id BIGINT, place VARCHAR, low DOUBLE, high DOUBLE)"
        )
    write_told(trace)
    write_handoffs(trace)
    ledger = Ledger(culprit_classes(trace))
    for row in trace.rows(
        "SELECT min(arrival_ns) AS first, max(arrival_ns + e2e_ns) AS last FROM joined WHERE billed"
    ):
        ledger.window_ns = (row["first"] or 0, row["last"] or 0)
    gaps = load_gaps(trace)
    for row in trace.rows("SELECT instance FROM joined WHERE billed GROUP BY instance ORDER BY instance"):
        _write_instance(trace, ledger, gaps, row["instance"], limits.get(row["instance"], Limits()))
    write_half_timed(trace)
    return ledger


def _write_instance(trace: Trace, ledger: Ledger, gaps: Gaps, instance: str, limits: Limits) -> None:
    known = {"instance": instance}
    spans = {
        row["engine"]: (row["first_ns"], row["last_ns"])
        for row in trace.rows(
            "SELECT engine, min(start_ns) AS first_ns, max(end_ns) AS last_ns FROM steps "
            "WHERE instance = $instance GROUP BY engine ORDER BY engine",
            known,
        )
    }
    # Requests that name no engine may have run on any of several.
    everywhere = (
        (min(first for first, _ in spans.values()), max(last for _, last in spans.values()))
        if spans
        else None
    )
    anywhere: Requests | None = None
    for row in trace.rows(
        "SELECT engine FROM joined WHERE instance = $instance AND billed GROUP BY engine ORDER BY engine",
        known,
    ):
        engine = row["engine"]
        if engine not in spans:
            requests = load_requests(trace, instance, engine, ledger.culprits)
            spread = engine is None and everywhere is not None
            covered = (
                requests.covered(*everywhere) if spread and everywhere else np.zeros(len(requests.rid), bool)
            )
            outside = requests.select(~covered)
            _book(trace, ledger, outside, _phases_only(outside))
            anywhere = requests.select(covered) if covered.any() else None
    guesses: list[list[Booking]] = []
    for lane, group in enumerate(_groups(trace, instance, spans), len(ledger.times)):
        mine: dict[int | None, Requests] = {}
        for engine in group:
            requests = load_requests(trace, instance, engine, ledger.culprits)
            covered = requests.covered(*spans[engine])
            outside, mine[engine] = requests.select(~covered), requests.select(covered)
            _book(trace, ledger, outside, _phases_only(outside))
        for engine, time, membership in _times(trace, ledger, instance, mine, anywhere, len(spans), limits):
            requests = mine[engine]
            own = int(requests.inside(time.steps).sum())
            ledger.times[instance, engine] = time
            ledger.lanes[instance, engine] = lane
            ledger.engines.append(_about(time, instance, engine, ledger.window_ns))
            error_ns = uncertain_ns(trace, instance, engine)
            booked = _bookings(time, requests, slice(own), gaps, membership, error_ns)
            _book(trace, ledger, requests, booked)
            if anywhere is not None:
                guesses.append(_bookings(time, anywhere, slice(own, None), gaps, engines=len(spans)))
    if anywhere is not None:
        _book(trace, ledger, anywhere, mean_of(guesses))
        _bound(ledger, guesses)


def _groups(trace: Trace, instance: str, engines: Iterable[int | None]) -> list[list[int | None]]:
    """The engines of an instance, those that step together in one list."""
    names = list(engines)
    if len(names) < 2:
        return [names] if names else []
    return groups(load_ends(trace, instance, names))


def times_without_requests(trace: Trace, ledger: Ledger, instance: str, limits: Limits) -> None:
    """The time of engines none of whose requests is known, for what their steps say alone."""
    engines = trace.rows(
        "SELECT engine FROM steps WHERE instance = $instance GROUP BY engine ORDER BY engine",
        {"instance": instance},
    )
    names = [row["engine"] for row in engines]
    for lane, group in enumerate(_groups(trace, instance, names), len(ledger.times)):
        nobody = {engine: load_requests(trace, instance, engine, ledger.culprits) for engine in group}
        for engine, time, _ in _times(trace, ledger, instance, nobody, None, len(names), limits):
            ledger.times[instance, engine] = time
            ledger.lanes[instance, engine] = lane


def _times(
    trace: Trace,
    ledger: Ledger,
    instance: str,
    requests: dict[int | None, Requests],
    anywhere: Requests | None,
    engines: int,
    limits: Limits,
) -> Iterator[tuple[int | None, EngineTime, Membership | None]]:
    """The time of each engine of those that step together, which may be one, with its `requests`, and who was in its steps.

    `anywhere`: requests that may have run on any of so many `engines` of the instance.
    """
    steps = [
        load_steps(trace, instance, engine, _recompute_steps(requests[engine], anywhere))
        for engine in requests
    ]
    if len(steps) > 1:
        steps = one_timeline(steps)
    prefills, memberships, own = [], [], []
    culprits = len(ledger.culprits)
    for i, (engine, mine) in enumerate(requests.items()):
        membership = load_membership(trace, instance, engine, mine, steps[i].end_ns)
        if membership is not None:
            again = np.where(membership.covered, membership.recompute_tokens, steps[i].recompute_tokens)
            steps[i] = replace(steps[i], recompute_tokens=again)
        inside = mine.prefills(steps[i])
        known = len(inside.culprit)
        if anywhere is not None:
            inside = _together(inside, anywhere.prefills(steps[i], 1 / engines))
        told = (
            None
            if membership is None
            else membership.prefill(mine.inside(steps[i]), len(inside.culprit) - known)
        )
        prefills.append(inside)
        memberships.append(membership)
        own.append(OwnPrefill(steps[i], inside, culprits, told))
    work = Work.of(steps, own)
    for i, engine in enumerate(requests):
        time = EngineTime(steps[i], prefills[i], culprits, limits, own[i], work, len(steps))
        yield engine, time, memberships[i]


def _recompute_steps(requests: Requests, anywhere: Requests | None) -> float:
    """In how many of an engine's steps preempted requests can have been computed again; NaN if unknown."""
    counts = [r.recompute_steps() for r in (requests, anywhere) if r is not None]
    known = [count for count in counts if np.isfinite(count)]
    return sum(known) if known else np.nan


def _book(trace: Trace, ledger: Ledger, requests: Requests, bookings: list[Booking]) -> None:
    Lines(trace, "bill_lines", requests.rid, ledger.culprits).book(bookings)


def _together(one: Prefills, other: Prefills) -> Prefills:
    return Prefills(
        **{
            name: np.concatenate([getattr(one, name), getattr(other, name)])
            for name in one.__dataclass_fields__
        }
    )


def _bookings(
    time: EngineTime,
    r: Requests,
    mine: slice,
    gaps: Gaps,
    membership: Membership | None = None,
    error_ns: float | None = None,
    engines: int = 1,
) -> list[Booking]:
    """The bill of requests on one engine. `mine`: those inside the steps' time among the engine's prefills; `membership`:
    in which steps they were, where that is told; `error_ns`: how far off these are, where the requests are known to have run
    on this engine; `engines`: on how many they may have run."""
    wait, queue, prefill, decode = r.phases()
    instants = np.cumsum([r.arrival_ns, wait, queue, prefill, decode], axis=0)
    queued, scheduled, first, last = (Place(time.steps, instant) for instant in instants[1:])

    handoff = Handoff.of(time, r, instants[1], instants[2])

    def held(by: list[Floats]) -> list[Floats]:
        return [handoff.rest(sums) for sums in by]

    # What lasts longer than the steps in work is the front end's.
    handed = handed_over(time.steps, r.arrival_ns, queued)
    waiting: Parts = {
        ("step_wait", None): time.between(time.base, handed, queued),
        ("unexplained", None): time.between(time.unexplained, handed, queued),
        **_lost(time, handed, queued),
        **_others_prefill("others_prefill_before", time, handed, queued),
    }
    queueing: Parts = {
        ("kv_handoff", None): handoff.seconds,
        ("pause", None): handoff.rest(time.pause),
        **{("queue_budget", c): handoff.rest(sums) for c, sums in enumerate(time.budget_by)},
        ("queue_budget", None): handoff.rest(time.budget_by_nobody),
        ("recompute", None): handoff.rest(time.budget_by_recompute),
        **by_holder("queue_kv", handoff.rest(time.blocked["kv"]), held(time.held_by)),
        **by_holder("queue_slots", handoff.rest(time.blocked["slots"]), held(time.slots_by)),
    }
    inside = r.inside(time.steps)
    own, told = np.zeros(len(r.rid)), np.full(len(r.rid), np.nan)
    own[inside], told[inside] = time.weight[mine], time.own_told[mine]
    own = np.where(np.isfinite(told), told, own * time.between(time.own_rate, scheduled, first))
    # What is spread over engines that step together is on each of them a part of all that was computed.
    parts = min(engines, time.engines)
    elsewhere = np.zeros((len(time.own_held_back), len(r.rid)))
    elsewhere[:, inside] = [
        np.where(r.culprit[inside] == c, 0.0, h[mine]) for c, h in enumerate(time.own_held_back)
    ]
    at_home = own - np.minimum(elsewhere.sum(axis=0), own)
    stalls = Stalls(time, r, gaps, membership, error_ns)

    def at_work(sums: Floats, start: Place, end: Place, spared: Floats | float = 0.0) -> Floats:
        """What of a prefix sum lies between, but for the request's stalls and what is `spared`."""
        away = stalls.of(sums, decoding=start is first)
        return np.maximum(time.between(sums, start, end) - away - spared, 0.0)

    culprits: list[int | None] = [None, *range(len(time.prefill_by))]
    prefilling: Parts = {}
    decoding: Parts = {}
    for c in culprits:
        sums = _prefill_sums(time, c)
        mine_too = 0.0 if c is None else parts * np.where(r.culprit == c, at_home, elsewhere[c])
        prefilling["others_prefill_in_prefill", c] = at_work(sums, scheduled, first, mine_too)
        decoding["others_prefill_in_decode", c] = at_work(sums, first, last)
    for name, sums in _losses(time).items():
        prefilling[name, None] = at_work(sums, scheduled, first)
        decoding[name, None] = at_work(sums, first, last)
    prefilling["host_gap", None] = prefilling["host_gap", None] + time.host_between(instants[2], instants[3])
    decoding["host_gap", None] = decoding["host_gap", None] + time.host_between(instants[3], instants[4])
    prefilling["own_prefill", None] = at_work(time.base, scheduled, first) + own * engines
    decoding["decode", None] = at_work(time.base, first, last)
    prefilling |= stalls.parts(decoding=False)
    decoding |= stalls.parts(decoding=True)
    return [
        Booking("wait", wait, waiting, "frontend", time.prefill_bounds(handed, queued)),
        Booking("queue", queue, queueing, "queue"),
        Booking("prefill", prefill, prefilling, "unexplained", time.prefill_bounds(scheduled, first)),
        Booking("decode", decode, decoding, "unexplained", time.prefill_bounds(first, last)),
    ]


def handed_over(steps: Steps, arrival_ns: Ints, queued: Place) -> Place:
    """From when on the engine can have had a request's input, which it reads between steps: from its arrival, but no earlier
    than the start of the step that ended as it was queued, or with asynchronous scheduling of the one before that."""
    first = np.maximum(queued.boundary() - 2, 0)
    return Place(steps, np.maximum(arrival_ns, steps.start_ns[first]))


def _losses(time: EngineTime) -> dict[str, Floats]:
    """Step time that is no work the engine was asked for."""
    return {
        "straggler_wait": time.straggler_wait,
        "slow_transfer": time.slow_transfer,
        "host_gap": time.host_gap,
        "pause": time.pause,
        "recompute": time.recompute,
    }


def _lost(time: EngineTime, start: Place, end: Place) -> Parts:
    return {(name, None): time.between(sums, start, end) for name, sums in _losses(time).items()}


def _prefill_sums(time: EngineTime, culprit: int | None) -> Floats:
    """Prefill by class; None for requests nobody saw finish."""
    return time.prefill_by_nobody if culprit is None else time.prefill_by[culprit]


def _others_prefill(component: str, time: EngineTime, start: Place, end: Place) -> Parts:
    culprits: list[int | None] = [None, *range(len(time.prefill_by))]
    return {(component, c): time.between(_prefill_sums(time, c), start, end) for c in culprits}


def _bound(ledger: Ledger, guesses: list[list[Booking]]) -> None:
    """The least and the most that others' prefill can be for requests of unknown engine."""
    by_engine = np.array(
        [
            np.sum(
                [s for b in bill for (name, _), s in b.parts.items() if name.startswith("others_prefill")],
                axis=0,
            )
            for bill in guesses
        ]
    )
    low, high = ledger.spread_s
    ledger.spread += by_engine.shape[1]
    ledger.spread_s = (low + float(by_engine.min(axis=0).sum()), high + float(by_engine.max(axis=0).sum()))


def _phases_only(r: Requests) -> list[Booking]:
    """Bills from the emitter's own phases, where no step of the engine is known."""
    wait, queue, prefill, decode = r.phases()
    return [
        Booking("wait", wait, {}, "frontend"),
        Booking("queue", queue, {("kv_handoff", None): _told_handoff(r)}, "queue"),
        # Without its parts, all of TTFT is one phase of which nothing is known.
        Booking(
            "prefill",
            prefill,
            {("prefill_phase", None): np.where(r.phases_known, prefill / 1e9, 0.0)},
            "unexplained",
        ),
        Booking("decode", decode, {}, "decode_phase"),
    ]


def _told_handoff(r: Requests) -> Floats:
    """Seconds of the hand-off where something says how long it took; what exceeds the queueing is scaled down."""
    told = np.where(r.fetched_ns > 0, r.fetched_ns - r.fetch_ns, np.nan_to_num(r.kv_transfer_ns))
    return np.asarray(told / 1e9, np.float64)


def write_gap_bills(trace: Trace, ledger: Ledger, gaps: pa.Table) -> None:
    """Fill `gap_lines` for token gaps: columns id, instance, engine, start_ns, end_ns (engine's clock), preempted. After
    `write_left_out`, which knows in which of them a request ran without tokens."""
    con = trace.connection
    con.register("asked_gaps", gaps)
    con.execute(_STARVED_GAPS)
    for instance, engine in con.execute(
        "SELECT DISTINCT instance, engine FROM asked_gaps ORDER BY ALL"
    ).fetchall():
        g = con.execute(
            "SELECT id, start_ns, end_ns, preempted, coalesce(o.ns, 0) AS starved_ns FROM asked_gaps LEFT JOIN starved_gaps o USING (id) "
            "WHERE instance = $instance AND engine IS NOT DISTINCT FROM $engine ORDER BY id",
            {"instance": instance, "engine": engine},
        ).fetchnumpy()
        start_ns, end_ns, starved_ns = (
            np.asarray(g[name], np.int64) for name in ("start_ns", "end_ns", "starved_ns")
        )
        preempted = np.asarray(g["preempted"], bool)
        known = ledger.times.get((instance, engine))
        times = [known] if known else [time for (name, _), time in ledger.times.items() if name == instance]
        bills = [[_gap_booking(time, start_ns, end_ns, preempted, starved_ns / 1e9)] for time in times]
        nothing = [Booking("decode", end_ns - start_ns, {}, "decode_phase")]
        Lines(trace, "gap_lines", np.asarray(g["id"], np.int64), ledger.culprits).book(
            mean_of(bills) if bills else nothing
        )
    con.unregister("asked_gaps")


#: Where nobody told of preemptions, who was given no tokens may have been preempted.
_STARVED_GAPS = """
CREATE OR REPLACE TEMP VIEW starved_gaps AS
SELECT g.id, g.ns FROM left_out_gaps g JOIN left_out o ON o.id = g.rid AND o.place = 'decode' AND o.basis <> 'unsure'
"""


def _gap_booking(
    time: EngineTime, start_ns: Ints, end_ns: Ints, preempted: NDArray[np.bool_], starved_s: Floats
) -> Booking:
    """The bill of token gaps. `starved_s`: how long the request ran in each without a token; what its engine did meanwhile is
    none of its decode."""
    start, end = Place(time.steps, start_ns), Place(time.steps, end_ns)
    stalled = preempted & (time.between(time.count, start, end) >= MIN_STALL_STEPS)
    resumed_ns = np.maximum(start_ns, resumption_ns(time, end))
    resumed = Place(time.steps, resumed_ns)
    # Of a stalled gap only the step that ends it is decode.
    decode_from = Place(time.steps, np.where(stalled, resumed_ns, start_ns))
    stall = np.where(stalled, time.between(time.busy, start, resumed), 0.0)
    busy = time.between(time.busy, decode_from, end)
    starved = np.where(stalled, 0.0, np.minimum(starved_s, busy))
    served = 1 - starved / np.maximum(busy, 1e-12)
    working: Parts = {
        ("decode", None): time.between(time.base, decode_from, end),
        **_lost(time, decode_from, end),
        **_others_prefill("others_prefill_in_decode", time, decode_from, end),
        ("host_gap", None): time.between(time.host_gap, decode_from, end)
        + time.host_between(start_ns, end_ns),
    }
    parts: Parts = {
        **{key: seconds * served for key, seconds in working.items()},
        ("starved", None): starved,
        **by_holder("preempted", stall, [time.between(held, start, resumed) for held in time.held_by]),
    }
    bounds = time.prefill_bounds(decode_from, end)
    return Booking("decode", end_ns - start_ns, parts, "unexplained", bounds)


def _about(time: EngineTime, instance: str, engine: int | None, window_ns: tuple[int, int]) -> dict[str, Any]:
    """An engine's step time while billed requests were in it, and what of it the cost model does not explain."""
    cost = time.cost
    first, last = (Place(time.steps, np.array([ns])) for ns in window_ns)
    within = (time.steps.end_ns > window_ns[0]) & (time.steps.start_ns < window_ns[1])
    longest = [(k, seconds) for k, seconds in time.longest_unexplained(within, 3) if seconds > 0]
    return {
        "instance": instance,
        "engine": engine,
        "steps": int(within.sum()),
        "busy_s": float(time.between(time.busy, first, last)[0]),
        "unexplained_s": float(time.between(time.unexplained, first, last)[0]),
        "cost_error": None if cost is None else cost.error,
        "cost_explained": None if cost is None else cost.explained,
        "longest": [{"time_ns": int(time.steps.start_ns[k]), "seconds": seconds} for k, seconds in longest],
    }
