"""Which step of the engine each annotated step of a profile is.

An annotation encloses what the host did for a step: with asynchronous scheduling it ends before its step begins to count, on a
CPU as its step ends; and its host's clock may be off. How many steps it is ahead changes only where one of both sides lacks a
step, and batches tell, where they differ. What the clock is off by is learnt from those; then time tells the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from scipy.ndimage import median_filter, uniform_filter1d

from tailscope.stats import Floats, Ints
from tailscope.store import Trace, floats, schema_of

#: Steps around one, among whose lags that of most is taken.
AROUND = 33
#: Steps that a host's clock may be off by, and those that it is once that is taken off.
FAR_LAGS, LAGS = np.arange(-16, 17), np.arange(-2, 3)
#: A lag is clear where so many more of those around have the same batch than at any other; from so many on the clock's offset is
#: learnt, by the median of so many.
CLEAR, LEAST, DRIFTS = 0.1, 8, 129
#: One batch that is the same counts as half of all around being so.
OWN = 0.5
#: More different lags than these are no lags: annotations and steps have next to nothing to do with each other.
MOST_LAGS = 128
#: An annotation this long before or after a step is none of it, ns.
AHEAD_NS = 1_000_000_000

_ROWS = schema_of(
    {
        "window": pa.int64(),
        "rank": pa.int64(),
        "step": pa.int64(),
        "instance": pa.string(),
        "engine": pa.int64(),
        "k": pa.int64(),
        "alike": pa.bool_(),
        "start_ns": pa.int64(),
        "end_ns": pa.int64(),
    }
)
_MINE = """
SELECT w."window", w.rank, i.iteration AS step, w.instance, coalesce(w.engine, o.engine) AS engine,
       instant(i.start_ns) AS start_ns, instant(i.end_ns) AS end_ns, i.prefill_tokens::DOUBLE AS prefill_tokens,
       i.decode_requests::DOUBLE AS decode_requests
FROM rank_windows w
JOIN iterations i ON i.source = w.source AND i.rank = w.rank
LEFT JOIN only_engine o ON o.instance = w.instance
WHERE w.used AND w.instance IS NOT NULL AND instant(i.start_ns) IS NOT NULL AND instant(i.end_ns) IS NOT NULL
ORDER BY w."window", w.rank, instant(i.end_ns), i.iteration
"""
_STEPS = """
SELECT k, start_ns, end_ns, prefill_tokens::DOUBLE AS prefill_tokens, decode_requests::DOUBLE AS decode_requests FROM steps
WHERE instance = $instance AND engine IS NOT DISTINCT FROM $engine ORDER BY end_ns, k
"""


def write_rank_steps(trace: Trace) -> None:
    """Fill `rank_steps`: a row for each annotated step of a profile with its step of the engine (k). `alike`: whether the batch
    was compared and is the same."""
    trace.create("rank_steps", _ROWS.empty_table())
    mine = trace.connection.sql(_MINE).to_arrow_table()
    if not mine.num_rows:
        return
    windows, ranks = (np.asarray(mine[name], np.int64) for name in ("window", "rank"))
    edges = np.flatnonzero((np.diff(windows) != 0) | (np.diff(ranks) != 0)) + 1
    engines: dict[tuple[str, int | None], tuple[Ints, Annotated]] = {}
    for first, stop in zip([0, *edges], [*edges, mine.num_rows], strict=True):
        part = mine.slice(first, stop - first)
        name = part["instance"][0].as_py(), part["engine"][0].as_py()
        if name not in engines:
            columns = trace.connection.execute(_STEPS, {"instance": name[0], "engine": name[1]}).fetchnumpy()
            engines[name] = np.asarray(columns["k"], np.int64), _annotated(columns)
        k, steps = engines[name]
        if not len(k):
            continue
        index, alike = placed(_annotated(part), steps)
        some = index >= 0
        rows = part.filter(pa.array(some))
        found = {
            "k": pa.array(k[index[some]]),
            "alike": pa.array(alike[some] == 1, mask=alike[some] < 0),
        }
        trace.insert(
            "rank_steps",
            pa.table({f: found[f] if f in found else rows[f] for f in _ROWS.names}, schema=_ROWS),
        )


@dataclass(frozen=True)
class Annotated:
    """Annotated steps of a profile or steps of an engine, in the order of their ends. `batch`: prefill tokens and decode requests,
    NaN where they are not known."""

    start_ns: Ints
    end_ns: Ints
    batch: Floats


def _annotated(columns: Any) -> Annotated:
    start_ns, end_ns = (np.asarray(columns[name], np.int64) for name in ("start_ns", "end_ns"))
    batch = np.column_stack([floats(columns[name]) for name in ("prefill_tokens", "decode_requests")])
    return Annotated(start_ns, end_ns, batch)


def placed(mine: Annotated, steps: Annotated) -> tuple[NDArray[np.intp], NDArray[np.int8]]:
    """The index of each annotation's step, -1 for none, and whether their batches are the same (1, 0, -1 where one is not known).

    No two annotations have the same step.
    """
    when, marks = mine.end_ns, steps.end_ns
    far = _chosen(mine, steps, when, marks, FAR_LAGS)
    certain = far.clear & (far.alike == 1)
    if np.count_nonzero(certain) >= LEAST:
        # What the host's clock is off by, and how far ahead it runs, in one: of the steps' starts or ends what varies less.
        apart = [when[certain] - m[far.index[certain]] for m in (steps.start_ns, steps.end_ns)]
        marks = (steps.start_ns, steps.end_ns)[
            int(np.argmin([np.median(np.abs(a - np.median(a))) for a in apart]))
        ]
        off = median_filter(
            (when[certain] - marks[far.index[certain]]).astype(np.float64), size=DRIFTS, mode="nearest"
        )
        when = when - np.interp(when, when[certain], off).astype(np.int64)
    near = _chosen(mine, steps, when, marks, LAGS)
    # Two steps of a profile cannot be one of the engine's.
    order = np.lexsort((near.apart, -near.alike, near.index))
    first = np.ones(len(order), bool)
    first[order[1:]] = near.index[order[1:]] != near.index[order[:-1]]
    return np.where(near.fits & first, near.index, -1), near.alike


@dataclass(frozen=True)
class _Chosen:
    """A step for each annotation: its index, whether it is possible, whether the batches are the same (see `placed`), how far apart
    they are (ns), and whether no other lag has nearly as many votes."""

    index: NDArray[np.intp]
    fits: NDArray[np.bool_]
    alike: NDArray[np.int8]
    apart: Floats
    clear: NDArray[np.bool_]


def _chosen(mine: Annotated, steps: Annotated, when: Ints, marks: Ints, lags: Ints) -> _Chosen:
    """Of the steps so many `lags` after the one whose mark is next to `when`, the one at the lag of most around that have the same
    batch; of lags with as many the one whose mark is the nearest."""
    n, number = len(when), np.arange(len(when))
    after = np.clip(np.searchsorted(marks, when), 0, len(marks) - 1)
    before = np.maximum(after - 1, 0)
    next_to = np.where(np.abs(marks[before] - when) < np.abs(marks[after] - when), before, after)
    usual = median_filter(next_to - number, size=AROUND, mode="nearest")
    index = number[:, None] + usual[:, None] + lags
    inside = np.clip(index, 0, len(marks) - 1)
    shift = (when - mine.end_ns)[:, None]
    possible: NDArray[np.bool_] = (
        np.equal(index, inside)
        & (steps.end_ns[inside] > mine.start_ns[:, None] + shift - AHEAD_NS)
        & (steps.start_ns[inside] < mine.end_ns[:, None] + shift + AHEAD_NS)
    )
    told, step_told = (~np.isnan(side.batch.sum(axis=1)) for side in (mine, steps))
    known = told[:, None] & step_told[inside]
    same = np.all(mine.batch[:, None, :] == steps.batch[inside], axis=2) & possible & known
    apart = np.abs(marks[inside] - when[:, None]).astype(np.float64)
    # A lag is of the steps' count, so that it means the same in all rows around.
    values = np.unique(np.unique(usual)[:, None] + lags)
    column = np.searchsorted(values, usual[:, None] + lags)
    votes = same.astype(np.float32)
    if len(values) <= MOST_LAGS:
        by_lag = np.zeros((n, len(values)), np.float32)
        by_lag[number[:, None], column] = same
        votes = uniform_filter1d(by_lag, AROUND, axis=0, mode="nearest")[number[:, None], column]
    score = np.where(possible, np.round(votes + OWN * same, 4), -1.0)
    order = np.lexsort((apart, -score), axis=1)
    best, second = order[:, 0], order[:, 1]
    return _Chosen(
        index[number, best],
        possible[number, best],
        np.where(known[number, best], same[number, best].astype(np.int8), -1).astype(np.int8),
        apart[number, best],
        score[number, best] >= score[number, second] + CLEAR,
    )
