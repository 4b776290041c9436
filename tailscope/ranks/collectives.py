"""One rank's collectives in a window, and the work it did between them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import duckdb
import numpy as np
from numpy.typing import NDArray

from tailscope.ranks.sequence import UNKNOWN, Floats
from tailscope.ranks.windows import Profile
from tailscope.scan import quote
from tailscope.schema import GPU_CATEGORIES, PHASES
from tailscope.store import Trace

#: Collectives that nobody leaves before all have come. Others give no arrivals to compare.
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "barrier", "all_to_all")
EXCHANGE = KINDS.index("all_to_all")
#: Those that all ranks leave at one time: an exchange of unequal parts ends when each has its own.
SYNCHRONISING = [kind for kind in range(len(KINDS)) if kind != EXCHANGE]
#: Phases that work between collectives is told apart by; what is in none is `other`. `idle`: nothing runs on the GPU.
WORK = ("expert", "attention", "router", "moe", "other", "idle")
NAMED = ("expert", "attention", "router", "moe")
OTHER, IDLE = WORK.index("other"), WORK.index("idle")
EXPERT, DISPATCH, COMBINE = WORK.index("expert"), PHASES.index("dispatch"), PHASES.index("combine")


def index_sql(column: str, names: Iterable[str], otherwise: int = UNKNOWN) -> str:
    """SQL for the place of a column's value among names, `otherwise` where it is none of them."""
    cases = " ".join(f"WHEN {quote(name)} THEN {index}" for index, name in enumerate(names))
    return f"CASE {column} {cases} ELSE {otherwise} END" if cases else str(otherwise)


#: As SQL lists them.
GPU_SQL = f"({', '.join(map(quote, GPU_CATEGORIES))})"
_NAMED_SQL = f"({', '.join(map(quote, NAMED))})"


_COLLECTIVES = f"""
WITH batches AS (
    -- Kernels that tell no bytes move as many as their batch has tokens.
    SELECT iteration AS step, max(coalesce(prefill_tokens, 0) + coalesce(decode_tokens, 0)) AS batch
    FROM iterations WHERE source = $source AND coalesce(prefill_tokens, decode_tokens) IS NOT NULL GROUP BY iteration
)
SELECT start_ns, start_ns + duration_ns AS end_ns, ({index_sql("collective", KINDS)})::TINYINT AS kind,
       ({index_sql("phase", PHASES)})::TINYINT AS phase, coalesce(seq, -1) AS seq, ({{group}})::INTEGER AS "group",
       coalesce(TRY_CAST(group_size AS INTEGER), 0) AS group_size, coalesce(TRY_CAST(step AS INTEGER), -1) AS step,
       coalesce(TRY_CAST(layer AS INTEGER), -1) AS layer, coalesce(bytes_in, batch, -1) AS bytes, coalesce(tokens, -1) AS tokens
FROM rank_events LEFT JOIN batches USING (step) WHERE source = $source AND collective IS NOT NULL AND duration_ns IS NOT NULL
"""
_OPS = f"""
SELECT start_ns, start_ns + duration_ns AS end_ns, {index_sql("phase", NAMED)} AS phase
FROM rank_events
WHERE source = $source AND collective IS NULL AND duration_ns > 0
  AND CASE WHEN $on_gpu THEN category IN {GPU_SQL}
           ELSE phase IN {_NAMED_SQL} AND category NOT IN {GPU_SQL} END
ORDER BY phase, start_ns
"""


@dataclass(frozen=True)
class RankCollectives:
    """One rank's collectives by start, with its work before each; ns since the window's first event."""

    profile: Profile
    #: Whole numbers, each column as narrow as it can be: a window holds millions.
    columns: dict[str, NDArray[Any]]
    #: Names of the groups that the column `group` counts.
    groups: list[str]
    start_ns: Floats
    end_ns: Floats
    #: Time since the collectives before had ended; NaN for the first, whose work the profile does not show.
    work_ns: Floats
    #: That time by phase, in the order of WORK, in single precision.
    work_by_phase: list[NDArray[np.float32]]

    @property
    def held_bytes(self) -> int:
        arrays = [*self.columns.values(), *self.work_by_phase, self.start_ns, self.end_ns, self.work_ns]
        # What is one value throughout is held once.
        return sum(array.nbytes for array in arrays if any(array.strides))


def load_rank(trace: Trace, profile: Profile, origin_ns: int) -> RankCollectives:
    with trace.connection.cursor() as con:
        return _load(con, profile, origin_ns)


def _load(con: duckdb.DuckDBPyConnection, profile: Profile, origin_ns: int) -> RankCollectives:
    known = {"source": profile.source}
    groups = [
        name
        for (name,) in con.execute(
            'SELECT DISTINCT "group" FROM rank_events WHERE source = $source AND collective IS NOT NULL '
            'AND "group" IS NOT NULL ORDER BY 1',
            known,
        ).fetchall()
    ]
    sql = _COLLECTIVES.format(group=index_sql('"group"', groups))
    rows = con.sql(sql, params=known).to_arrow_table()
    arrays = _by_start({name: rows[name].to_numpy() for name in rows.column_names})
    arrays = {name: _once(values) for name, values in arrays.items()}
    start = (arrays.pop("start_ns") - origin_ns).astype(np.float64)
    end = (arrays.pop("end_ns") - origin_ns).astype(np.float64)
    over = np.concatenate([[np.nan], np.maximum.accumulate(end)[:-1]]) if len(end) else end
    work = np.maximum(start - over, 0.0)
    by_phase = _by_phase(con, profile, origin_ns, start, over, work)
    # Between dispatch and combine the experts run, whatever the ops are called.
    before = np.concatenate([[UNKNOWN], arrays["phase"][:-1]]) if len(end) else arrays["phase"]
    inside = (arrays["phase"] == COMBINE) & (before == DISPATCH)
    if inside.any():
        by_phase[EXPERT] = by_phase[EXPERT] + np.where(inside, by_phase[OTHER], np.float32(0.0))
        by_phase[OTHER] = np.where(inside, np.float32(0.0), by_phase[OTHER])
    return RankCollectives(profile, arrays, groups, start, end, work, [_once(some) for some in by_phase])


def _by_start(columns: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The rows by start, then by end. Parts are so already but for what a thread took out of turn."""
    start, end = columns["start_ns"], columns["end_ns"]
    later = np.diff(start)
    if ((later > 0) | ((later == 0) & (np.diff(end) >= 0))).all():
        return columns
    order = np.lexsort((end, start))
    return {name: values[order] for name, values in columns.items()}


def _once(values: NDArray[Any]) -> NDArray[Any]:
    """The same values; where all are one, it is held once."""
    alike = len(values) and values[0] == values[-1] and (values == values[0]).all()
    # A view of the first would keep them all.
    return np.broadcast_to(values[0].copy(), values.shape) if alike else values


def _by_phase(
    con: duckdb.DuckDBPyConnection,
    profile: Profile,
    origin_ns: int,
    start: Floats,
    over: Floats,
    work: Floats,
) -> list[NDArray[np.float32]]:
    """The work before each collective by phase: the time that ops of a phase cover in it."""
    result = [np.broadcast_to(np.float32(0.0), start.shape)] * len(WORK)
    if not len(start):
        return result
    for on_gpu in (True, False):
        ops = con.execute(_OPS, {"source": profile.source, "on_gpu": on_gpu}).fetchnumpy()
        if not len(ops["start_ns"]):
            continue
        phase = np.asarray(ops["phase"], np.int64)
        begin = (np.asarray(ops["start_ns"], np.int64) - origin_ns).astype(np.float64)
        finish = (np.asarray(ops["end_ns"], np.int64) - origin_ns).astype(np.float64)
        for index in np.unique(phase[phase >= 0]):
            mine = phase == index
            result[index] = _covered(begin[mine], finish[mine], start, over)
        if on_gpu:
            order = np.argsort(begin, kind="stable")
            busy = _covered(begin[order], finish[order], start, over)
            result[IDLE] = np.maximum(np.nan_to_num(work) - busy, 0.0).astype(np.float32)
        break
    result[OTHER] = np.maximum(np.nan_to_num(work) - sum(result), 0.0).astype(np.float32)
    return result


def _covered(begin: Floats, finish: Floats, start: Floats, over: Floats) -> Floats:
    """How much of the time before each collective ops cover. Ops are by start; they nest and overlap, and each counts from
    where those before it ended."""
    begin = np.maximum(begin, np.concatenate([[-np.inf], np.maximum.accumulate(finish)[:-1]]))
    collective = np.searchsorted(start, begin, side="right")
    known = collective < len(start)
    collective = np.minimum(collective, len(start) - 1)
    begin = np.maximum(begin, np.nan_to_num(over[collective], nan=np.inf))
    covered = np.maximum(np.minimum(finish, start[collective]) - begin, 0.0)
    return np.bincount(collective, weights=covered * known, minlength=len(start)).astype(np.float32)
