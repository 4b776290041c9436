"""Requests that are somewhere no gauge counts: arrived and not done, but neither running nor waiting for the engine.

By conservation: at any instant, arrivals less ends is what there is; what the engines' steps say runs, waits or is deferred
is what they know of; the rest is hidden. A request is given the time of a step and the one before to be known, and both
clocks their error, so that what is called hidden is hidden at least.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from tailscope.stats import Floats, Ints
from tailscope.store import Trace, schema_of

#: The front end may tell of an end, or have told of an arrival, by so much beside the engine's own time.
SLACK_NS = 10_000_000
#: So long after an arrival it is asked whether the request is known; a sample speaks for at most so long.
ASKED_NS, SPEAKS_NS = 50_000_000, 1_000_000_000

_FIELDS: dict[str, pa.DataType] = {
    "instance": pa.string(),
    "hidden_s": pa.float64(),
    "there_s": pa.float64(),
    "most_hidden": pa.int64(),
    "most_known": pa.int64(),
    "known_then": pa.float64(),
    "samples": pa.int64(),
    "first_ns": pa.int64(),
    "last_ns": pa.int64(),
}
_HIDDEN = schema_of(_FIELDS)


def write_hidden(trace: Trace) -> None:
    """Fill `hidden`: a row for each instance whose engines' steps tell what runs and waits. `hidden_s`, `there_s`:
    request-seconds hidden and in all; `known_then`: mean known to the engines while some were hidden. Linear but for sorts."""
    rows = []
    for row in trace.rows(
        "SELECT instance FROM steps GROUP BY instance HAVING count(running) = count(*) AND count(waiting) = count(*) ORDER BY instance"
    ):
        found = _of_instance(trace, row["instance"])
        if found:
            rows.append({"instance": row["instance"], **found})
    trace.create("hidden", pa.Table.from_pylist(rows, schema=_HIDDEN))


def _of_instance(trace: Trace, instance: str) -> dict[str, Any] | None:
    known = {"instance": instance}
    stays = trace.connection.execute(
        "SELECT arrival_ns, arrival_ns + e2e_ns AS end_ns FROM joined "
        "WHERE instance = $instance AND engine_saw AND e2e_ns >= 0",
        known,
    ).fetchnumpy()
    steps = trace.connection.execute(
        "SELECT coalesce(engine, -1) AS engine, start_ns, end_ns, time_error_ns, running + waiting + coalesce(deferred, 0) AS known "
        "FROM steps WHERE instance = $instance ORDER BY engine, end_ns",
        known,
    ).fetchnumpy()
    arrivals = np.sort(np.asarray(stays["arrival_ns"], np.int64))
    ends = np.sort(np.asarray(stays["end_ns"], np.int64))
    step_ends = np.asarray(steps["end_ns"], np.int64)
    if not len(arrivals) or not len(step_ends):
        return None
    slack = SLACK_NS + int(np.asarray(steps["time_error_ns"], np.int64).max())
    first, last = int(step_ends.min()), int(step_ends.max())
    asked = np.concatenate([step_ends, arrivals + ASKED_NS + slack])
    asked = np.sort(asked[(asked >= first) & (asked <= last)])
    # Each instant once. Of millions np.unique makes a hash table first, which takes longer than all the rest.
    asked = asked[np.append(True, np.diff(asked) > 0)]
    told, since = np.zeros(len(asked)), asked.copy()
    engines = np.asarray(steps["engine"], np.int64)
    for engine in np.unique(engines):
        mine = engines == engine
        count, until = _known(
            np.asarray(steps["start_ns"], np.int64)[mine],
            step_ends[mine],
            np.asarray(steps["known"], np.float64)[mine],
            asked,
        )
        told += count
        since = np.minimum(since, until)
    there = np.searchsorted(arrivals, since - slack, side="right") - np.searchsorted(
        ends, asked + slack, side="right"
    )
    hidden = np.maximum(there - told, 0.0)
    length = np.minimum(np.diff(asked, append=asked[-1]), SPEAKS_NS) / 1e9
    some = hidden >= 1
    return {
        "hidden_s": float(hidden @ length),
        "there_s": float(np.maximum(there, 0) @ length),
        "most_hidden": int(hidden.max(initial=0.0)),
        "most_known": int(told.max(initial=0.0)),
        "known_then": float(told[some].mean()) if some.any() else None,
        "samples": len(asked),
        "first_ns": int(asked[some].min()) if some.any() else None,
        "last_ns": int(asked[some].max()) if some.any() else None,
    }


def _known(start_ns: Ints, end_ns: Ints, known: Floats, asked: Ints) -> tuple[Floats, Ints]:
    """Of one engine at each instant: how many requests it knew of when its last step ended, and the latest arrival that this
    step could have counted: one before the step before it began. An idle engine takes what comes."""
    last = np.searchsorted(end_ns, asked, side="right") - 1
    inside = np.maximum(last, 0)
    following = np.minimum(last + 1, len(end_ns) - 1)
    works = (end_ns[inside] == asked) | ((last + 1 < len(end_ns)) & (start_ns[following] <= asked))
    before = start_ns[np.maximum(last - 1, 0)]
    count = np.where(last >= 0, known[inside], 0.0)
    return count, np.where(works, np.minimum(before, asked), asked)
