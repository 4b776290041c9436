"""Which step of the engine each annotated step of a profile is.

An annotation encloses what the host did for a step: with asynchronous scheduling it ends before its step begins to count, on a
CPU as its step ends. How many steps it is ahead changes only where one of both sides lacks a step, and batches tell: so the lag
of most steps around counts, where their batches are known, and time alone only where none is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from scipy.ndimage import median_filter, uniform_filter1d

from tailscope.stats import Floats, Ints
from tailscope.store import Trace, floats, schema_of

#: Steps around one, among whose lags that of most is taken; and how far apart lags may be.
AROUND, LAGS = 33, range(-2, 4)
#: One batch that is the same counts as half of all around being so.
OWN = 0.5
#: More different lags than these are no lags: annotations and steps have next to nothing to do with each other.
MOST_LAGS = 64
#: An annotation this long before a step is none of it, ns.
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
    tiles: dict[tuple[str, int | None], dict[str, Any]] = {}
    for first, stop in zip([0, *edges], [*edges, mine.num_rows], strict=True):
        part = mine.slice(first, stop - first)
        name = part["instance"][0].as_py(), part["engine"][0].as_py()
        if name not in tiles:
            tiles[name] = trace.connection.execute(
                _STEPS, {"instance": name[0], "engine": name[1]}
            ).fetchnumpy()
        steps = tiles[name]
        if not len(steps["k"]):
            continue
        start_ns, end_ns = (np.asarray(part[column], np.int64) for column in ("start_ns", "end_ns"))
        index, alike = placed(
            start_ns,
            end_ns,
            _batches({c: part[c].to_numpy(zero_copy_only=False) for c in _BATCH}),
            np.asarray(steps["start_ns"], np.int64),
            np.asarray(steps["end_ns"], np.int64),
            _batches(steps),
        )
        some = index >= 0
        rows = part.filter(pa.array(some))
        columns = {
            "k": pa.array(np.asarray(steps["k"], np.int64)[index[some]]),
            "alike": pa.array(alike[some] == 1, mask=alike[some] < 0),
        }
        trace.insert(
            "rank_steps",
            pa.table({f: columns[f] if f in columns else rows[f] for f in _ROWS.names}, schema=_ROWS),
        )


_BATCH = ("prefill_tokens", "decode_requests")


def _batches(columns: dict[str, Any]) -> Floats:
    return np.column_stack([floats(columns[name]) for name in _BATCH])


def placed(
    start_ns: Ints, end_ns: Ints, batch: Floats, step_start_ns: Ints, step_end_ns: Ints, step_batch: Floats
) -> tuple[NDArray[np.intp], NDArray[np.int8]]:
    """The index of each annotation's step, -1 for none, and whether their batches are the same (1, 0, -1 where one is not known).

    Annotations and steps in the order of their ends; `batch`: prefill tokens and decode requests of each, NaN where they are not
    known. No two annotations have the same step.
    """
    n, number = len(end_ns), np.arange(len(end_ns))
    near = np.searchsorted(step_end_ns, end_ns)
    usual = median_filter(near - number, size=min(AROUND, 2 * (n // 2) + 1), mode="nearest")
    lags = np.array(LAGS)
    index = number[:, None] + usual[:, None] + lags
    inside = np.clip(index, 0, len(step_end_ns) - 1)
    possible: NDArray[np.bool_] = (
        np.equal(index, inside)
        & (step_end_ns[inside] > start_ns[:, None])
        & (step_start_ns[inside] < end_ns[:, None] + AHEAD_NS)
    )
    told, step_told = (~np.isnan(values.sum(axis=1)) for values in (batch, step_batch))
    known = told[:, None] & step_told[inside]
    same = np.all(batch[:, None, :] == step_batch[inside], axis=2) & possible & known
    apart = np.abs(step_end_ns[inside] - end_ns[:, None]).astype(np.float64)
    # A lag is of the steps' count, so that it means the same in all rows around.
    values, column = np.unique(usual[:, None] + lags, return_inverse=True)
    column = column.reshape(index.shape)
    votes = same.astype(np.float32)
    if len(values) <= MOST_LAGS:
        by_lag = np.zeros((n, len(values)), np.float32)
        by_lag[number[:, None], column] = same
        votes = uniform_filter1d(by_lag, AROUND, axis=0, mode="nearest")[number[:, None], column]
    score = votes + OWN * same
    # Of lags with as many votes the one whose step ended at about that time.
    order = np.lexsort((apart, -np.where(possible, np.round(score, 4), -1.0)), axis=1)
    best = order[:, 0]
    chosen = index[number, best]
    fits = possible[number, best]
    alike = np.where(known[number, best], same[number, best].astype(np.int8), -1).astype(np.int8)
    # Two steps of a profile cannot be one of the engine's.
    rank = np.lexsort((apart[number, best], -alike, chosen))
    first = np.ones(n, bool)
    first[rank[1:]] = chosen[rank[1:]] != chosen[rank[:-1]]
    return np.where(fits & first, chosen, -1), alike
