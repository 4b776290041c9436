"""Each bill's waiting divided among the tenants whose load it was.

The bills say how long each request waited for others' prefill, for the token budget, for slots and for KV cache. Here
that time is divided among the tenants by what each had in those steps: prefill tokens, slots, or tokens in the cache.
So what a tenant is blamed for is a part of the bill, and never more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tailscope.ledger.bills import Ledger, handed_over
from tailscope.ledger.engine_time import EngineTime
from tailscope.ledger.own_prefill import OwnPrefill
from tailscope.ledger.requests import Requests, load_requests
from tailscope.ledger.steps import Place
from tailscope.stats import Floats, Ints, active, prefix_sums
from tailscope.store import Trace

#: From here on a KV cache is so full that what others hold is missed.
KV_SCARCE = 0.9
#: What of a bill is divided, and among whom: by prefill tokens in the steps, by slots or by cache held. `before`: in the
#: time up to the first token.
KINDS: dict[str, tuple[str, bool]] = {
    "prefill_before": ("others_prefill_before", True),
    "prefill_beside": ("others_prefill_in_prefill", True),
    "budget": ("queue_budget", True),
    "slots": ("queue_slots", True),
    "kv": ("queue_kv", True),
    "prefill_in_decode": ("others_prefill_in_decode", False),
    "preempted": ("preempted", False),
}
GAP_KINDS = tuple(kind for kind, (_, before) in KINDS.items() if not before)


#: Of each kind a matrix: the seconds of each tenant's that each stay waited for, tenants x stays (by id).
Parts = dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class _Stays:
    """Stays of requests, or token gaps, on an engine: by kind where each begins and ends and what of its bill it is,
    whose it is, the own prefill in it, and by how much it counts here."""

    id: Ints
    tenant: Ints
    spans: dict[str, tuple[Place, Place]]
    billed: dict[str, Floats]
    own: Floats
    share: float

    def among(self, time: EngineTime, kind: str, whole: Floats, of: Floats, number: int) -> Floats:
        """What of a kind is a tenant's, whose part of the prefix sums `whole` is `of`."""
        first, last = self.spans[kind]
        own = self.own if kind == "prefill_beside" else np.zeros(len(self.id))
        there = np.maximum(time.between(whole, first, last) - own, 1e-12)
        theirs = np.maximum(time.between(of, first, last) - np.where(self.tenant == number, own, 0.0), 0.0)
        return self.share * self.billed[kind] * np.minimum(theirs / there, 1.0)


class _Engine:
    """An engine's steps, and by tenant what of them was its prefill, its slots and its cache."""

    def __init__(
        self,
        time: EngineTime,
        requests: Sequence[tuple[Requests, Ints, float]],
        tenants: int,
    ) -> None:
        """`requests` with their tenants, and by how much each counts: those that may have run on any of several engines
        by a part."""
        self.time, self.requests, self.tenants = time, requests, tenants
        self.steps, self.n = time.steps, len(time.steps.start_ns)
        self.weights: list[Floats] = []
        self._spans: list[tuple[Ints, NDArray[np.intp], NDArray[np.intp], NDArray[np.intp], Floats]] = []
        for part, tenant, share in requests:
            inside = part.inside(self.steps)
            prefills = part.prefills(self.steps, share)
            self.weights.append(OwnPrefill(self.steps, prefills, 0).weight)
            first = np.minimum(Place(self.steps, prefills.scheduled_ns).boundary(), self.n - 1)
            prefilled = np.clip(Place(self.steps, prefills.first_token_ns).boundary(), first + 1, self.n)
            done = np.clip(Place(self.steps, prefills.last_ns).boundary(), first + 1, self.n)
            self._spans.append((tenant[inside], first, prefilled, done, np.nan_to_num(prefills.held_tokens)))
        everybody = self._amounts(None)
        self._known = np.maximum(everybody[0], 1.0)
        self._running = np.maximum(np.maximum(np.nan_to_num(self.steps.running), everybody[1]), 1e-9)
        self._held = np.maximum(everybody[2], 1e-9)

    def _amounts(self, number: int | None) -> tuple[Floats, Floats, Floats]:
        """A tenant's share of each step's prefill tokens, its slots and its tokens in the cache; None: everybody's."""
        prefill, slots, held = (np.zeros(self.n) for _ in range(3))
        for (tenant, first, prefilled, done, kept), weight, (_, _, share) in zip(
            self._spans, self.weights, self.requests, strict=True
        ):
            mine = slice(None) if number is None else tenant == number
            prefill += active(first[mine], prefilled[mine], weight[mine], self.n)
            slots += active(first[mine], done[mine], np.full(len(first), share)[mine], self.n)
            held += active(first[mine], done[mine], kept[mine], self.n)
        return tuple(np.maximum(a, 0.0) for a in (prefill, slots, held))  # type: ignore[return-value]

    def shares(self, number: int) -> tuple[Floats, Floats, Floats]:
        """A tenant's shares of each step's prefill tokens, of the slots taken and of the cache held."""
        prefill, slots, held = self._amounts(number)
        return prefill / self._known, slots / self._running, held / self._held


#: Which sums over steps divide a kind, where it is not the prefill in them.
_SUMS: dict[str, str] = {"budget": "budget", "slots": "slots", "kv": "kv", "preempted": "full"}


def _seconds(time: EngineTime) -> dict[str, Floats]:
    """Of each step the seconds to divide."""
    scarce = np.nan_to_num(time.steps.kv_usage) >= KV_SCARCE
    return {
        "prefill": np.diff(np.sum(time.prefill_by, axis=0) + time.prefill_by_nobody),
        "budget": np.diff(np.sum(time.budget_by, axis=0) + time.budget_by_nobody),
        "slots": np.diff(time.blocked["slots"]),
        "kv": np.diff(time.blocked["kv"]),
        "full": np.diff(time.busy) * scarce,
    }


def divided(trace: Trace, ledger: Ledger, tenants: int, requests: int, gaps: int) -> tuple[Parts, Parts]:
    """The kinds of every request, by rid, and of every token gap that was billed, by its place in `tenant_gaps`."""
    of_requests = {kind: np.zeros((tenants, requests), np.float32) for kind in KINDS}
    of_gaps = {kind: np.zeros((tenants, gaps), np.float32) for kind in GAP_KINDS}
    lanes: dict[int, list[tuple[str, int | None]]] = {}
    engines_of: dict[str, int] = {}
    for key, lane in ledger.lanes.items():
        lanes.setdefault(lane, []).append(key)
        engines_of[key[0]] = engines_of.get(key[0], 0) + 1
    for keys in lanes.values():
        made = [_engine(trace, ledger.times[key], *key, engines_of[key[0]], tenants) for key in keys]
        engines = [engine for engine, _, _ in made]
        tokens = np.sum([e.steps.prefill_tokens for e in engines], axis=0)
        seconds = [_seconds(e.time) for e in engines]
        whole = [{name: prefix_sums(each) for name, each in one.items()} for one in seconds]
        for number in range(tenants):
            shares = [e.shares(number) for e in engines]
            # Engines that step together wait for each other's prefill.
            prefill = np.sum(
                [own[0] * e.steps.prefill_tokens for own, e in zip(shares, engines, strict=True)], axis=0
            ) / np.maximum(tokens, 1.0)
            for i, (engine, stays, gap_stays) in enumerate(made):
                budget, slots, held = shares[i]
                by = {"prefill": prefill, "budget": budget, "slots": slots, "kv": held, "full": held}
                of = {name: prefix_sums(seconds[i][name] * share) for name, share in by.items()}
                for parts, several in ((of_requests, stays), (of_gaps, gap_stays)):
                    for stay, kind in ((stay, kind) for stay in several for kind in parts):
                        name = _SUMS.get(kind, "prefill")
                        part = stay.among(engine.time, kind, whole[i][name], of[name], number)
                        np.add.at(parts[kind][number], stay.id, part.astype(np.float32))
    return of_requests, of_gaps


def _engine(
    trace: Trace, time: EngineTime, instance: str, engine: int | None, engines: int, tenants: int
) -> tuple[_Engine, list[_Stays], list[_Stays]]:
    """An engine with the stays of its requests and token gaps, and of those that may have been on any of several."""
    asked = [(engine, 1.0)]
    if engine is not None and engines > 1:
        asked.append((None, 1.0 / engines))
    requests = [(*_requests(trace, instance, which), share) for which, share in asked]
    made = _Engine(time, requests, tenants)
    stays = [
        _stays(trace, made, part, tenant, share, weight)
        for (part, tenant, share), weight in zip(requests, made.weights, strict=True)
    ]
    gaps = [_gap_stays(trace, made, instance, which, share) for which, share in asked]
    return made, stays, gaps


def _stays(
    trace: Trace, engine: _Engine, requests: Requests, tenant: Ints, share: float, weight: Floats
) -> _Stays:
    time = engine.time
    wait, queue, prefill, decode = requests.phases()
    instants = np.cumsum([requests.arrival_ns, wait, queue, prefill, decode], axis=0)
    queued, scheduled, first, last = (Place(time.steps, instant) for instant in instants[1:])
    own = np.zeros(len(requests.rid))
    own[requests.inside(time.steps)] = weight
    own *= time.between(time.own_rate, scheduled, first)
    queueing, decoding = (queued, scheduled), (first, last)
    spans = {
        "prefill_before": (handed_over(time.steps, requests.arrival_ns, queued), queued),
        **dict.fromkeys(("budget", "slots", "kv"), queueing),
        "prefill_beside": (scheduled, first),
        **dict.fromkeys(GAP_KINDS, decoding),
    }
    billed = _billed(trace, "bill_lines", requests.rid, KINDS)
    return _Stays(requests.rid, tenant, spans, billed, own, share)


def _gap_stays(trace: Trace, engine: _Engine, instance: str, which: int | None, share: float) -> _Stays:
    columns = trace.connection.execute(
        "SELECT place, id, number, start_ns, end_ns FROM tenant_gaps WHERE instance = $instance "
        "AND engine IS NOT DISTINCT FROM $engine ORDER BY id",
        {"instance": instance, "engine": which},
    ).fetchnumpy()
    place, gap, number, start, end = (np.asarray(values, np.int64) for values in columns.values())
    span = Place(engine.time.steps, start), Place(engine.time.steps, end)
    billed = _billed(trace, "gap_lines", gap, GAP_KINDS)
    return _Stays(place, number, dict.fromkeys(GAP_KINDS, span), billed, np.zeros(len(place)), share)


def _requests(trace: Trace, instance: str, engine: int | None) -> tuple[Requests, Ints]:
    requests = load_requests(trace, instance, engine, ("",))
    columns = trace.connection.execute(
        "SELECT t.number FROM joined j JOIN tenant_of t USING (rid) "
        "WHERE billed AND ttft_ns >= 0 AND e2e_ns >= ttft_ns AND instance = $instance "
        "AND engine IS NOT DISTINCT FROM $engine ORDER BY j.rid",
        {"instance": instance, "engine": engine},
    ).fetchnumpy()
    return requests, np.asarray(columns["number"], np.int64)


def _billed(trace: Trace, table: str, ids: Ints, kinds: Iterable[str]) -> dict[str, Floats]:
    """Of each kind the seconds of each bill."""
    con = trace.connection
    con.register("asked_ids", pa.table({"id": pa.array(ids)}))
    sums = ", ".join(
        f"coalesce(sum(ns) FILTER (WHERE component = '{KINDS[kind][0]}'), 0) / 1e9 AS {kind}"
        for kind in kinds
    )
    columns = con.execute(
        f"SELECT a.id, {sums} FROM asked_ids a LEFT JOIN {table} l ON l.id = a.id GROUP BY a.id ORDER BY a.id"
    ).fetchnumpy()
    con.unregister("asked_ids")
    return {kind: np.asarray(columns[kind], np.float64) for kind in kinds}
