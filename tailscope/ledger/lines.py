"""Lines of a bill: a measured time booked to components, to the nanosecond."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from tailscope.stats import Floats, Ints
from tailscope.store import Trace

#: component -> what it means; the order is the order of a request's life.
COMPONENTS: dict[str, str] = {
    "upstream": "between client and engine, both ways; no gateway's view says where",
    "network": "between client and gateway, both ways",
    "gateway": "in the gateway: its queue, and its way to the engine and back",
    "frontend": "API server: tokenise, event loop, hand-over to the engine",
    "step_wait": "waiting for the running step to end, at the step's normal cost",
    "others_prefill_before": "waiting to be scheduled behind steps that others' prefill made long",
    "queue_budget": "queued while others' prefill took the token budget",
    "queue_kv": "queued while the KV cache was full, or had no room for the first in the queue",
    "queue_slots": "queued while all sequence slots were taken",
    "kv_handoff": "queued while its KV cache was on the way from the engine that did its prefill",
    "queue": "queued, reason not known",
    "own_prefill": "prefill of its own prompt, with the batch it ran in",
    "others_prefill_in_prefill": "others' prefill in the steps of its own prefill",
    "decode": "decode at the batch's normal cost",
    "others_prefill_in_decode": "others' prefill in the steps of its decode",
    "starved": "running, but left out of the steps: others were given all there was",
    "preempted": "preempted, waiting to be scheduled again",
    "recompute": "computing again what a preemption threw away, in the steps it waits for or takes part in",
    "prefill_phase": "prefill as the engine measured it; no steps are known that would say what it held",
    "decode_phase": "decode as the engine or client measured it; no steps are known that would say what it held",
    "straggler_wait": "its ranks stood in a collective because one of them came late",
    "slow_transfer": "collectives whose transfer took longer than usual for their size",
    "host_gap": "between two steps: there was work, and the host had launched none of it",
    "pause": "the engine stood still: profiler, EPLB, JIT or first batch",
    "unexplained": "measured, but no evidence says why",
}

#: (component, index of the culprit's class or None) -> seconds of each request.
Parts = dict[tuple[str, int | None], Floats]


@dataclass(frozen=True)
class Booking:
    """One place (wait, queue, prefill, decode) of many requests: `total_ns` each, the evidence for its parts in
    seconds, and the component that takes what the evidence leaves."""

    place: str
    total_ns: Ints
    parts: Parts
    rest: str
    #: The least and the most that others' prefill can be, as multiples of what is booked; None where it is not modelled.
    bounds: tuple[Floats, Floats] | None = None


def mean_of(bookings: Sequence[Sequence[Booking]]) -> list[Booking]:
    """The mean of several bills of the same requests, place by place."""
    result = []
    for same in zip(*bookings, strict=True):
        keys = dict.fromkeys(key for booking in same for key in booking.parts)
        zero = np.zeros(len(same[0].total_ns))
        parts = {key: np.sum([b.parts.get(key, zero) for b in same], axis=0) / len(same) for key in keys}
        known = [b.bounds for b in same if b.bounds is not None]
        low = np.min([low for low, _ in known], axis=0) if known else zero
        high = np.max([high for _, high in known], axis=0) if known else zero
        bounds = (low, high) if known else None
        result.append(Booking(same[0].place, same[0].total_ns, parts, same[0].rest, bounds))
    return result


#: Components that are the cost model's part of a step, and so carry its bounds.
MODELLED = tuple(name for name in COMPONENTS if name.startswith("others_prefill"))


class Lines:
    """Writes bookings as rows (id, place, component, culprit, ns) of a table, and the bounds of others' prefill in them as
    rows (id, place, low, high) of `TABLE_bounds`."""

    def __init__(self, trace: Trace, table: str, ids: Ints, culprits: tuple[str, ...]) -> None:
        self._trace, self._table, self._ids, self._culprits = trace, table, ids, culprits

    def book(self, bookings: Iterable[Booking]) -> None:
        """The lines of a place sum to its total exactly, none is negative: evidence beyond it is scaled down."""
        for booking in bookings:
            total, parts = booking.total_ns, booking.parts
            given = np.sum(list(parts.values()), axis=0) * 1e9 if parts else np.zeros(len(total))
            scale = np.where(given > total, total / np.maximum(given, 1e-9), 1.0)
            left = total.copy()
            lines: dict[tuple[str, int | None], Ints] = {}
            for key, seconds in parts.items():
                # Rounding must not give more than there is.
                lines[key] = np.minimum(np.floor(seconds * 1e9 * scale).astype(np.int64), left)
                left -= lines[key]
            rest = (booking.rest, None)
            lines[rest] = lines[rest] + left if rest in lines else left
            for (component, culprit), ns in lines.items():
                self._append(
                    booking.place, component, None if culprit is None else self._culprits[culprit], ns
                )
            if booking.bounds is not None:
                self._bound(booking, sum(ns for (name, _), ns in lines.items() if name in MODELLED))

    def _append(self, place: str, component: str, culprit: str | None, ns: Ints) -> None:
        some = ns > 0
        count = int(some.sum())
        if not count:
            return
        texts = (pa.repeat(pa.scalar(text, pa.string()), count) for text in (place, component, culprit))
        rows = pa.Table.from_arrays(
            [pa.array(self._ids[some]), *texts, pa.array(ns[some])],
            names=["id", "place", "component", "culprit", "ns"],
        )
        self._trace.insert(self._table, rows)

    def _bound(self, booking: Booking, modelled: Any) -> None:
        assert booking.bounds is not None
        some = np.broadcast_to(modelled, booking.total_ns.shape) > 0
        if some.any():
            place = pa.repeat(pa.scalar(booking.place, pa.string()), int(some.sum()))
            low, high = (pa.array(values[some]) for values in booking.bounds)
            rows = pa.Table.from_arrays(
                [pa.array(self._ids[some]), place, low, high], names=["id", "place", "low", "high"]
            )
            self._trace.insert(f"{self._table}_bounds", rows)
