"""Requests that ran and were given no tokens while others went on, and were not preempted.

`schedule` says so where there is one: rows of 0 tokens. Else it follows from the engine's own numbers (`Unserved`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tailscope.ledger.bills import Ledger
from tailscope.ledger.engine_time import BUDGET_FULL, EngineTime
from tailscope.ledger.steps import Place
from tailscope.ledger.unserved import MIN_STEPS, Unserved, uncertain_ns
from tailscope.stats import Floats, Ints, prefix_sums
from tailscope.store import Trace, floats, schema_of

COLUMNS = schema_of(
    {
        "id": pa.int64(),
        "place": pa.string(),
        "ns": pa.int64(),
        "missed": pa.float64(),
        "full": pa.float64(),
        "basis": pa.string(),
        "start_ns": pa.int64(),
        "end_ns": pa.int64(),
    }
)
GAPS = schema_of({"id": pa.int64(), "rid": pa.int64(), "ns": pa.int64()})


@dataclass(frozen=True)
class Answers:
    """An engine's billed requests of known length, arrays of one length; `preemptions` is NaN where nobody told."""

    rid: Ints
    scheduled_ns: Ints
    first_ns: Ints
    last_ns: Ints
    tokens: Floats
    preemptions: Floats

    def __len__(self) -> int:
        return len(self.rid)

    def unserved(self, time: EngineTime, error_ns: float) -> Unserved:
        return Unserved(
            time, self.scheduled_ns, self.first_ns, self.last_ns, self.tokens, self.preemptions, error_ns
        )


def write_left_out(trace: Trace, ledger: Ledger) -> None:
    """Fill `left_out`, `left_out_gaps` and `left_out_known`. After bills and `gaps`.

    left_out: id, place (prefill, decode), ns, `missed` (steps without a token), `full` (share of these steps that used up the token
    budget; NULL where they are not placed in time), basis (schedule; steps; unsure: preempted or left out), start and end.
    left_out_gaps: token gaps of such requests, and the ns of each in which they were left out.
    left_out_known: one row, of how many requests it is known.
    """
    trace.create("left_out", COLUMNS.empty_table())
    trace.create("left_out_gaps", GAPS.empty_table())
    con = trace.connection
    con.execute(_BY_SCHEDULE, {"least": MIN_STEPS})
    con.execute(_GAPS_BY_SCHEDULE, {"least": MIN_STEPS})
    told = {row["instance"] for row in trace.rows(_TOLD)}
    judged = 0
    for (instance, engine), time in ledger.times.items():
        if instance in told:
            continue
        answers = _load(trace, instance, engine)
        if not len(answers):
            continue
        unserved = answers.unserved(time, uncertain_ns(trace, instance, engine))
        if unserved.certain_enough:
            judged += len(answers)
            _write_inferred(trace, time, answers, unserved)
    con.execute(_KNOWN, {"judged": judged})


_BY_SCHEDULE = """
INSERT INTO left_out BY NAME
SELECT r.rid AS id, CASE r.phase WHEN 'decode' THEN 'decode' ELSE 'prefill' END AS place, sum(l.end_ns - f.start_ns)::BIGINT AS ns,
       sum(r.k_last - r.k_first + 1)::DOUBLE AS missed, NULL::DOUBLE AS full, 'schedule' AS basis,
       min(f.start_ns) AS start_ns, max(l.end_ns) AS end_ns
FROM scheduled r JOIN steps f ON f.k = r.k_first JOIN steps l ON l.k = r.k_last
WHERE r.tokens = 0 AND r.rid IS NOT NULL AND r.k_last - r.k_first + 1 >= $least
GROUP BY ALL
"""
_GAPS_BY_SCHEDULE = """
INSERT INTO left_out_gaps BY NAME
SELECT g.id, g.rid, sum(least(g.end_ns, l.end_ns) - greatest(g.start_ns, f.start_ns))::BIGINT AS ns
FROM scheduled r JOIN steps f ON f.k = r.k_first JOIN steps l ON l.k = r.k_last
JOIN gaps g ON g.rid = r.rid AND g.start_ns < l.end_ns AND g.end_ns > f.start_ns
WHERE r.tokens = 0 AND r.rid IS NOT NULL AND r.phase = 'decode' AND r.k_last - r.k_first + 1 >= $least
GROUP BY ALL
"""
_TOLD = "SELECT DISTINCT f.instance FROM scheduled r JOIN steps f ON f.k = r.k_first"
_KNOWN = f"""
CREATE OR REPLACE TEMP TABLE left_out_known AS
SELECT $judged + (SELECT count(*) FROM joined WHERE billed AND instance IN ({_TOLD})) AS judged
"""


def _load(trace: Trace, instance: str, engine: int | None) -> Answers:
    columns = trace.connection.execute(
        "SELECT rid, arrival_ns + ttft_ns - least(coalesce(prefill_ns, 0), ttft_ns) AS scheduled_ns, arrival_ns + ttft_ns AS first_ns, "
        "arrival_ns + e2e_ns AS last_ns, output_tokens::DOUBLE AS tokens, preemptions::DOUBLE AS preemptions FROM joined "
        "WHERE billed AND engine_known AND ttft_ns >= 0 AND e2e_ns >= ttft_ns AND output_tokens > 0 "
        "AND instance = $instance AND engine IS NOT DISTINCT FROM $engine ORDER BY rid",
        {"instance": instance, "engine": engine},
    ).fetchnumpy()
    arrays: dict[str, Any] = {
        name: floats(values) if name in ("tokens", "preemptions") else np.asarray(values, np.int64)
        for name, values in columns.items()
    }
    return Answers(**arrays)


def _write_inferred(trace: Trace, time: EngineTime, a: Answers, unserved: Unserved) -> None:
    basis = np.where(np.isfinite(a.preemptions), "steps", "unsure")
    for place, start_ns, end_ns in (
        ("decode", a.first_ns, a.last_ns),
        ("prefill", a.scheduled_ns, a.first_ns),
    ):
        left = unserved.decode if place == "decode" else unserved.prefill
        placed = (
            _write_gaps(trace, time, a, left.steps, unserved.least)
            if place == "decode"
            else Placed.nowhere(len(a))
        )
        seconds = unserved.of(time.busy, decoding=place == "decode")
        _insert(trace, place, a, seconds, left.steps, basis, start_ns, end_ns, placed)


@dataclass(frozen=True)
class Placed:
    """Of each request, arrays of one length: seconds of its gaps in which it was left out, NaN where none is known; the
    share of their steps that were full; start and end."""

    seconds: Floats
    full: Floats
    start_ns: Ints
    end_ns: Ints

    @staticmethod
    def nowhere(count: int) -> Placed:
        unknown, never = np.full(count, np.nan), np.zeros(count, np.int64)
        return Placed(unknown, unknown, never, never)


def _insert(
    trace: Trace,
    place: str,
    a: Answers,
    seconds: Floats,
    steps: Floats,
    basis: NDArray[np.str_],
    start_ns: Ints,
    end_ns: Ints,
    placed: Placed,
) -> None:
    """Rows of `left_out` of those who were, `placed` where that is known, else in the whole time that they lie in."""
    out = steps > 0
    known = np.isfinite(placed.seconds)
    columns = {
        "id": a.rid,
        "ns": np.asarray(np.where(known, placed.seconds, seconds) * 1e9, np.int64),
        "missed": steps,
        "basis": basis,
        "start_ns": np.where(known, placed.start_ns, start_ns),
        "end_ns": np.where(known, placed.end_ns, end_ns),
    }
    if out.any():
        table = {name: pa.array(values[out]) for name, values in columns.items()}
        full = pa.array(placed.full[out], mask=~known[out])
        trace.insert(
            "left_out",
            pa.table({**table, "full": full, "place": pa.repeat(pa.scalar(place), int(out.sum()))}),
        )


def _write_gaps(trace: Trace, time: EngineTime, a: Answers, left: Floats, least: float) -> Placed:
    """Fill `left_out_gaps` with the gaps between tokens of those `left` out that span steps enough."""
    out = left > 0
    if not out.any():
        return Placed.nowhere(len(a))
    con = trace.connection
    con.register("asked_rids", pa.table({"rid": pa.array(a.rid[out])}))
    g = con.execute(
        "SELECT id, rid, start_ns, end_ns FROM gaps SEMI JOIN asked_rids USING (rid) ORDER BY id"
    ).fetchnumpy()
    con.unregister("asked_rids")
    ids, rid, start_ns, end_ns = (
        np.asarray(g[name], np.int64) for name in ("id", "rid", "start_ns", "end_ns")
    )
    start, end = Place(time.steps, start_ns), Place(time.steps, end_ns)
    spanned = time.between(time.count, start, end)
    long = spanned >= least + 1
    if not long.any():
        return Placed.nowhere(len(a))
    row = np.searchsorted(a.rid, rid[long])
    beyond = spanned[long] - 1
    # No more steps than the engine's own count leaves: the rest of a gap is the client's.
    total = np.bincount(row, weights=beyond, minlength=len(a))
    share = np.minimum(1.0, left[row] / np.maximum(total[row], 1.0)) * beyond / spanned[long]
    seconds = share * time.between(time.busy, start, end)[long]
    trace.insert(
        "left_out_gaps",
        pa.table(
            {
                "id": pa.array(ids[long]),
                "rid": pa.array(rid[long]),
                "ns": pa.array(np.asarray(seconds * 1e9, np.int64)),
            }
        ),
    )
    tokens = time.steps.prefill_tokens + time.steps.decode_tokens
    full = time.between(
        prefix_sums((tokens >= BUDGET_FULL * tokens.max(initial=1.0)).astype(float)), start, end
    )[long]
    sums = [np.bincount(row, weights=values, minlength=len(a)) for values in (seconds, full, spanned[long])]
    first, last = np.full(len(a), np.iinfo(np.int64).max), np.zeros(len(a), np.int64)
    np.minimum.at(first, row, start_ns[long])
    np.maximum.at(last, row, end_ns[long])
    some = sums[2] > 0
    return Placed(
        np.where(some, sums[0], np.nan),
        np.where(some, sums[1] / np.maximum(sums[2], 1.0), np.nan),
        first,
        last,
    )
