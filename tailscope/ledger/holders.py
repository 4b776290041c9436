"""Who held what a queued request waited for: long answers, and requests of lower priority.

The bill says how long a request queued for slots, KV cache or token budget. `held_up` has the part of it that a group of
requests held meanwhile, in proportion to their slots, KV tokens or prompt tokens: groups that are no classes, since what
makes them is the length of the answer, or a priority below the waiting request's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tailscope.ledger.bills import Ledger
from tailscope.ledger.engine_time import EngineTime
from tailscope.ledger.steps import Place
from tailscope.stats import Floats, Ints, active, prefix_sums
from tailscope.store import Trace, schema_of

Mask = NDArray[np.bool_]

#: An answer of so many times the median's tokens is a long one, and of at least so many tokens.
LONG_TIMES, LONG_LEAST = 5.0, 256
#: Priorities that are told apart: the first ones; those beyond count as the last of them.
MOST_LEVELS = 8
#: Where no step is known a batch counts as made so long ahead.
LEAD_NS = 50_000_000

COLUMNS = schema_of(
    {
        "id": pa.int64(),
        "component": pa.string(),
        "holder": pa.string(),
        "ns": pa.int64(),
        "waited_ns": pa.int64(),
    }
)


@dataclass(frozen=True)
class Stays:
    """An engine's billed requests, arrays of one length. `long`: whether its answer is long; `level`: 0 is the first
    priority; `slot_ns` and so on: the parts of its bill that were waits for what others held."""

    rid: Ints
    queued_ns: Ints
    scheduled_ns: Ints
    first_ns: Ints
    last_ns: Ints
    tokens: Floats
    computed: Floats
    long: Mask
    level: Ints
    slots_ns: Ints
    kv_ns: Ints
    budget_ns: Ints
    preempted_ns: Ints

    def __len__(self) -> int:
        return len(self.rid)


def write_holders(trace: Trace, ledger: Ledger) -> None:
    """Fill `held_up`, `waits_behind` and `answers`. After bills.

    held_up: id, component, holder (`long answers`, `lower priority`), ns of the component that they held, of `waited_ns`.
    waits_behind: see `_overtaken`; empty where all requests have one priority.
    answers: one row, the median of the answers' tokens and from which length on one is long.
    """
    con = trace.connection
    trace.create("held_up", COLUMNS.empty_table())
    con.execute(_ANSWERS, {"times": LONG_TIMES, "least": LONG_LEAST})
    con.execute(_LEVELS, {"most": MOST_LEVELS})
    con.execute(_STAYS)
    con.execute(
        "CREATE OR REPLACE TEMP TABLE waits_behind(id BIGINT, level BIGINT, queue_ns BIGINT, behind_ns BIGINT, overtaken BIGINT)"
    )
    levels = trace.count("priority_levels")
    # Of several engines that are not told apart, one may well serve the last priority while another has a queue.
    engines = con.execute("SELECT DISTINCT instance, engine FROM stays WHERE engine_known ORDER BY ALL")
    for instance, engine in engines.fetchall():
        stays, time = _load(trace, instance, engine), ledger.times.get((instance, engine))
        if time is not None:
            _write_held(trace, time, stays, levels)
        if levels > 1:
            _write_overtaken(trace, _lead_ns(time), stays, levels)
    con.execute("DROP TABLE stays")


_ANSWERS = """
CREATE OR REPLACE TEMP TABLE answers AS
SELECT count(*) AS n, median(output_tokens) AS median_tokens,
       greatest($times * median(output_tokens), $least) AS long_from
FROM joined WHERE billed AND output_tokens > 0
"""
#: Where some requests tell a priority those that tell none have vLLM's default, 0.
_LEVELS = """
CREATE OR REPLACE TEMP TABLE priority_levels AS
SELECT priority, least(dense_rank() OVER (ORDER BY priority) - 1, $most - 1) AS level
FROM (SELECT DISTINCT coalesce(priority, 0) AS priority FROM joined
      WHERE billed AND EXISTS (FROM joined WHERE billed AND priority IS NOT NULL))
"""
_STAYS = """
CREATE OR REPLACE TEMP TABLE stays AS
WITH parts AS (
    SELECT id, sum(ns) FILTER (WHERE place = 'wait') AS wait_ns, sum(ns) FILTER (WHERE place = 'queue') AS queue_ns,
           sum(ns) FILTER (WHERE component = 'queue_slots') AS slots_ns, sum(ns) FILTER (WHERE component = 'queue_kv') AS kv_ns,
           sum(ns) FILTER (WHERE component = 'queue_budget') AS budget_ns, sum(ns) FILTER (WHERE component = 'preempted') AS preempted_ns
    FROM bill_lines WHERE place IN ('wait', 'queue') OR component = 'preempted' GROUP BY id
)
SELECT j.instance, j.engine, j.engine_known, j.rid, j.arrival_ns + coalesce(p.wait_ns, 0) AS queued_ns,
       j.arrival_ns + coalesce(p.wait_ns, 0) + coalesce(p.queue_ns, 0) AS scheduled_ns,
       j.arrival_ns + j.ttft_ns AS first_ns, j.arrival_ns + j.e2e_ns AS last_ns,
       coalesce(j.prompt_tokens, 0) + coalesce(j.output_tokens, 0) / 2 AS tokens,
       greatest(coalesce(j.prompt_tokens, 0) - coalesce(j.cached_tokens, 0), 0) AS computed,
       coalesce(j.output_tokens >= a.long_from, false) AS long, coalesce(l.level, 0) AS level,
       coalesce(p.slots_ns, 0) AS slots_ns, coalesce(p.kv_ns, 0) AS kv_ns, coalesce(p.budget_ns, 0) AS budget_ns,
       coalesce(p.preempted_ns, 0) AS preempted_ns
FROM joined j LEFT JOIN parts p ON p.id = j.rid LEFT JOIN priority_levels l ON l.priority = coalesce(j.priority, 0) CROSS JOIN answers a
WHERE j.billed AND j.ttft_ns >= 0 AND j.e2e_ns >= j.ttft_ns
"""


def _load(trace: Trace, instance: str, engine: int | None) -> Stays:
    columns = trace.connection.execute(
        "SELECT * EXCLUDE (instance, engine, engine_known) FROM stays WHERE instance = $instance AND engine IS NOT DISTINCT FROM $engine ORDER BY rid",
        {"instance": instance, "engine": engine},
    ).fetchnumpy()
    arrays: dict[str, Any] = {
        name: np.asarray(
            values, bool if name == "long" else np.float64 if name in ("tokens", "computed") else np.int64
        )
        for name, values in columns.items()
    }
    return Stays(**arrays)


# -- what was held ---------------------------------------------------------------------------------


class _Shares:
    """The share of what is held at each step of an engine that any group of its requests holds."""

    def __init__(self, time: EngineTime, stays: Stays) -> None:
        self.time, n = time, len(time.steps.start_ns)
        places = [
            np.minimum(Place(time.steps, at).boundary(), n)
            for at in (stays.scheduled_ns, stays.first_ns, stays.last_ns)
        ]
        start, first, last = places
        #: By component: the steps in which a request holds something, and how much.
        self.spans = {
            "queue_slots": (start, np.maximum(last, start), np.ones(len(stays))),
            "queue_kv": (start, np.maximum(last, start), stays.tokens),
            "queue_budget": (start, np.maximum(first, start), stays.computed),
            "preempted": (start, np.maximum(last, start), np.ones(len(stays))),
        }
        tile = np.diff(time.busy)
        self.blocked = {
            "queue_slots": np.diff(time.blocked["slots"]),
            "queue_kv": np.diff(time.blocked["kv"]),
            "queue_budget": np.diff(time.blocked["budget"]),
            "preempted": tile,
        }
        self._all = {name: self._held(name, np.ones(len(stays), bool)) for name in self.spans}

    def _held(self, component: str, group: Mask) -> Floats:
        first, beyond, amounts = self.spans[component]
        n = len(self.time.steps.start_ns)
        return np.maximum(active(first[group], beyond[group], amounts[group], n), 0.0)

    def held_up(self, component: str, group: Mask, start: Place, end: Place) -> Floats:
        """Of what lies between, of the time blocked by the component: the share that the group held. Of the time that
        somebody was preempted the group's is all of that in which it ran."""
        held = self._held(component, group)
        if component == "preempted":
            share = np.where(held > 0.5, 1.0, 0.0)
        else:
            share = np.minimum(held / np.maximum(self._all[component], 1e-9), 1.0)
        blocked = self.blocked[component]
        whole = self.time.between(prefix_sums(blocked), start, end)
        part = self.time.between(prefix_sums(blocked * share), start, end)
        return np.where(whole > 0, np.minimum(part / np.maximum(whole, 1e-12), 1.0), 0.0)


def _write_held(trace: Trace, time: EngineTime, stays: Stays, levels: int) -> None:
    shares = _Shares(time, stays)
    waits = {
        "queue_slots": (stays.slots_ns, stays.queued_ns, stays.scheduled_ns),
        "queue_kv": (stays.kv_ns, stays.queued_ns, stays.scheduled_ns),
        "queue_budget": (stays.budget_ns, stays.queued_ns, stays.scheduled_ns),
        "preempted": (stays.preempted_ns, stays.scheduled_ns, stays.last_ns),
    }
    for component, (ns, start_ns, end_ns) in waits.items():
        groups: list[tuple[str, Mask, Mask]] = []
        if component in ("queue_slots", "queue_kv"):
            # Those who wait to give a long answer themselves wait for their peers, and who asked to be served after others by
            # its priority waits for those as it wanted.
            for level in range(max(levels, 1)):
                mine = (ns > 0) & ~stays.long & (stays.level == level)
                groups.append(("long answers", stays.long & (stays.level >= level), mine))
        for level in range(levels - 1):
            groups.append(("lower priority", stays.level > level, (ns > 0) & (stays.level == level)))
        for holder, group, waiting in groups:
            if not group.any() or not waiting.any():
                continue
            start, end = Place(time.steps, start_ns[waiting]), Place(time.steps, end_ns[waiting])
            held = np.floor(ns[waiting] * shares.held_up(component, group, start, end)).astype(np.int64)
            count = len(held)
            trace.insert(
                "held_up",
                pa.table(
                    {
                        "id": pa.array(stays.rid[waiting]),
                        "component": pa.repeat(pa.scalar(component), count),
                        "holder": pa.repeat(pa.scalar(holder), count),
                        "ns": pa.array(held),
                        "waited_ns": pa.array(ns[waiting]),
                    }
                ),
            )


# -- who was served before -------------------------------------------------------------------------


def _lead_ns(time: EngineTime | None) -> int:
    """How far ahead of its start a batch may be made: what comes meanwhile cannot be in it."""
    if time is None or time.usual_step_s is None:
        return LEAD_NS
    return int(2e9 * time.usual_step_s)


def _write_overtaken(trace: Trace, slack: int, stays: Stays, levels: int) -> None:
    """Fill `waits_behind`: of each request of a level with lower ones, how long it queued, and how long after the scheduler
    took a lower one in the place that would have been its own.

    Those of its own priority or better that were queued before it go first: with so many `ahead`, its place is the one
    that the lower one number ahead + 1 got since it came. `overtaken`: lower ones that were taken while it queued. What
    was in a batch made ahead when it came, within `slack` ns, does not count. Cost: sorting, and a search for each request.
    """
    for level in range(levels - 1):
        mine = stays.level == level
        if not mine.any():
            continue
        lower = np.sort(stays.scheduled_ns[stays.level > level])
        better = stays.level <= level
        queued, scheduled = np.sort(stays.queued_ns[better]), np.sort(stays.scheduled_ns[better])
        came, went = stays.queued_ns[mine], stays.scheduled_ns[mine]
        ahead = np.searchsorted(queued, came, side="left") - np.searchsorted(scheduled, came, side="left")
        since = np.searchsorted(lower, came + slack, side="right")
        until = np.searchsorted(lower, went, side="left")
        place = since + np.maximum(ahead, 0)
        at = lower[np.minimum(place, max(len(lower) - 1, 0))] if len(lower) else went
        behind = np.where((place < until) & (place < len(lower)), np.maximum(went - at, 0), 0)
        trace.insert(
            "waits_behind",
            pa.table(
                {
                    "id": pa.array(stays.rid[mine]),
                    "level": pa.repeat(pa.scalar(level), int(mine.sum())),
                    "queue_ns": pa.array(went - came),
                    "behind_ns": pa.array(behind),
                    "overtaken": pa.array(np.maximum(until - since, 0)),
                }
            ),
        )
