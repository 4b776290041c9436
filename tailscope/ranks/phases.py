"""How long each phase of each layer took on a rank and how much of it the step waited for; when a GPU had nothing to do.

`rank_phases`: a row per window, rank, step, layer and phase. `busy_ns` is the time in which any of its ops ran,
`exposed_ns` the part of it in which nothing ran that comes before it in `ON_GPU` (or `ON_CPU`), `hidden_ns` the rest. So
each instant of a step is exposed once: the exposed times of a step and its idle time are its span, to the ns, however
streams overlap. Step and layer are NULL for what is in none.

`rank_idle`: a row per window, rank and step of profiles with kernels, none for those of CPUs, whose idle time a profile
does not tell from waiting. `span_ns` from the first start to the last end of what runs on the GPU, copies included;
`busy_ns` of it the step's own work, `beside_ns` only that of other steps or of none, `inner_idle_ns` nothing;
`gap_before_ns` the time in which nothing ran between the step before, where the profile has it, and this one.
`launch_wait_ns` is the part of both idle times in which the next kernel had not been launched yet, so that the host is
the cause, `gap_launch_wait_ns` its part in the gap; NULL where no kernel of the step has a launch. `launches`: launches
that are different; `kernels`, and `unlaunched` of them without a launch; `cpu_step_ns` the length of its annotation.

`rank_kernels`: a row per window and rank of such a profile: `kernels`, copies included, and `unlaunched` of all it holds.

What runs on the GPU speaks where there is any; else the ops of the main thread, with gloo's transfers in its workers.
Between a dispatch and its combine the experts run, whatever the ops are called: kernels that no phase is known of, and
on a CPU, where much of the work is in no op, all of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tailscope.ranks.collectives import GPU_SQL, index_sql
from tailscope.ranks.groups import BESIDE
from tailscope.ranks.sequence import UNKNOWN, Ints
from tailscope.ranks.windows import Profile, Window
from tailscope.store import Trace, schema_of

#: Phases by who hides whom: communication behind computing, and computing that overlaps behind what comes first.
ON_GPU = ("router", "expert", "attention", "moe", "other", "dispatch", "combine", "collective")
#: On a CPU what is `moe`, or in no phase, holds the calls in which the rank waits, and hides none of them. The second
#: `expert` is time in no op between a dispatch and its combine.
ON_CPU = ("router", "expert", "attention", "dispatch", "combine", "collective", "expert", "moe", "other")
BETWEEN = ON_CPU.index("collective") + 1
#: Categories on a CPU of what is no op.
_NO_OP_SQL = "('python_function', 'cuda_runtime', 'cuda_driver', 'hip_runtime', 'hip_driver', 'overhead', 'gpu_user_annotation')"


_PHASES = schema_of(
    {
        "window": pa.int64(),
        "rank": pa.int64(),
        "step": pa.int64(),
        "layer": pa.int64(),
        "phase": pa.string(),
        "on_gpu": pa.bool_(),
        "busy_ns": pa.int64(),
        "exposed_ns": pa.int64(),
        "hidden_ns": pa.int64(),
    }
)
_IDLE = schema_of(
    {
        "window": pa.int64(),
        "rank": pa.int64(),
        "step": pa.int64(),
        "span_ns": pa.int64(),
        "busy_ns": pa.int64(),
        "beside_ns": pa.int64(),
        "inner_idle_ns": pa.int64(),
        "gap_before_ns": pa.int64(),
        "launch_wait_ns": pa.int64(),
        "gap_launch_wait_ns": pa.int64(),
        "launches": pa.int64(),
        "kernels": pa.int64(),
        "unlaunched": pa.int64(),
        "cpu_step_ns": pa.int64(),
    }
)
_KERNEL_COUNTS = schema_of(
    {"window": pa.int64(), "rank": pa.int64(), "kernels": pa.int64(), "unlaunched": pa.int64()}
)
_TABLES = {"rank_phases": _PHASES, "rank_idle": _IDLE, "rank_kernels": _KERNEL_COUNTS}


_COLUMNS = f"""
SELECT start_ns, start_ns + duration_ns AS end_ns, coalesce(step, {UNKNOWN}) AS step, coalesce(layer, {UNKNOWN}) AS layer,
       {{phase}} AS phase, coalesce(launch_ns, {UNKNOWN}) AS launch_ns, (collective IS NOT NULL)::BIGINT AS collective,
       coalesce(stream, {UNKNOWN}) AS stream, (phase IS NOT NULL)::BIGINT AS told,
       (coalesce(category, '') = 'user_annotation')::BIGINT AS annotation
FROM rank_events
WHERE source = $source AND duration_ns >= 0 AND start_ns IS NOT NULL AND {{which}}
"""
_KERNELS = _COLUMNS.format(
    phase=index_sql("phase", ON_GPU, ON_GPU.index("other")), which=f"category IN {GPU_SQL}"
)
_OPS = _COLUMNS.format(
    phase=index_sql("phase", ON_CPU, ON_CPU.index("other")),
    which=f"coalesce(category, '') NOT IN {_NO_OP_SQL}",
)
_STEPS = """
SELECT iteration, max(end_ns - start_ns) AS length FROM iterations
WHERE source = $source AND rank = $rank AND iteration IS NOT NULL AND end_ns IS NOT NULL AND start_ns IS NOT NULL
GROUP BY iteration
"""


def write_phases(trace: Trace, windows: Sequence[Window]) -> None:
    """Fill `rank_phases`, `rank_idle` and `rank_kernels`. Cost is linear in events but for sorting; a few ranks are in memory at a time."""
    for name, schema in _TABLES.items():
        trace.create(name, schema.empty_table())
    mine = iter([(window, profile) for window in windows for profile in window.profiles])
    with ThreadPoolExecutor(BESIDE) as pool:
        while some := list(islice(mine, BESIDE)):
            for tables in pool.map(lambda pair: _of_rank(trace, *pair), some):
                for name, rows in zip(_TABLES, tables, strict=True):
                    trace.insert(name, rows)


def _of_rank(trace: Trace, window: Window, profile: Profile) -> tuple[pa.Table, pa.Table, pa.Table]:
    with trace.connection.cursor() as con:
        events = _loaded(con, _KERNELS, {"source": profile.source})
        on_gpu = len(events["start_ns"]) > 0
        if not on_gpu:
            events = of_main_thread(_loaded(con, _OPS, {"source": profile.source}))
        known = {"source": profile.source, "rank": profile.rank}
        steps = _loaded(con, _STEPS, known, "iteration") if on_gpu else {}
    place = {"window": window.number, "rank": profile.rank}
    names = ON_GPU if on_gpu else ON_CPU
    told = named_by_exchange(events) if on_gpu else with_time_of_experts(events)
    phases = _rows(_PHASES, {**place, "on_gpu": on_gpu, **phase_times(told, names)})
    idle = idle_times(events) if on_gpu else {"step": np.empty(0, np.int64)}
    if steps and len(numbers := steps["iteration"]):
        index = np.minimum(np.searchsorted(numbers, idle["step"]), len(numbers) - 1)
        found = numbers[index] == idle["step"]
        idle["cpu_step_ns"] = np.where(found, steps["length"][index], UNKNOWN)
    counts = {"kernels": len(events["step"]), "unlaunched": int(np.sum(events["launch_ns"] == UNKNOWN))}
    counted = [{**place, **counts}] if on_gpu else []
    return phases, _rows(_IDLE, {**place, **idle}), pa.Table.from_pylist(counted, schema=_KERNEL_COUNTS)


def _loaded(
    con: duckdb.DuckDBPyConnection, sql: str, known: dict[str, object], by: str = "start_ns"
) -> dict[str, Ints]:
    rows = con.sql(sql, params=known).to_arrow_table()
    columns = {name: np.asarray(rows[name].to_numpy(), np.int64) for name in rows.column_names}
    # Parts are by start: NumPy sorts what is nearly sorted sooner than DuckDB.
    order = np.argsort(columns[by], kind="stable")
    return {name: values[order] for name, values in columns.items()}


def of_main_thread(events: dict[str, Ints]) -> dict[str, Ints]:
    """Of ops those of the main thread, which is busy longest with what tells a phase, and the transfers in all threads.

    An annotation that names no phase only holds others.
    """
    own = events["collective"] == 0
    threads, thread = np.unique(events["stream"], return_inverse=True)
    length = (events["end_ns"] - events["start_ns"]) * own
    spent = [np.bincount(thread, length * told, minlength=len(threads)) for told in (events["told"], 1)]
    main = np.lexsort((spent[1], spent[0]))[-1:]
    mine = np.isin(thread, main) & ((events["told"] > 0) | (events["annotation"] == 0))
    return {name: values[~own | mine] for name, values in events.items()}


def _rows(schema: pa.Schema, columns: dict[str, object]) -> pa.Table:
    """A table of columns, scalars repeated, UNKNOWN as NULL, columns that are not there empty."""
    count = len(np.asarray(columns["step"]))
    arrays = []
    for field in schema:
        values = np.broadcast_to(np.asarray(columns.get(field.name, UNKNOWN)), (count,))
        unknown = values == UNKNOWN if values.dtype.kind == "i" else np.zeros(count, bool)
        arrays.append(pa.array(values, mask=unknown).cast(field.type))
    return pa.Table.from_arrays(arrays, schema=schema)


# -- phases ---------------------------------------------------------------------------------------


def phase_times(events: dict[str, Ints], names: Sequence[str]) -> dict[str, NDArray[np.generic]]:
    """step, layer, phase, busy_ns, exposed_ns, hidden_ns of each step, layer and phase that there is.

    `events`: start_ns, end_ns, step, layer, phase, by start; a phase is a place in `names`, and hides those behind it.
    """
    start, end, phase = events["start_ns"], events["end_ns"], events["phase"]
    _, step = np.unique(events["step"], return_inverse=True)
    _, layer = np.unique(events["layer"], return_inverse=True)
    layers, count = int(layer.max(initial=0)) + 1, len(names)
    named = np.array([names.index(name) for name in names])[phase]
    code = (step * layers + layer) * count + named
    _, first, group = np.unique(code, return_index=True, return_inverse=True)
    groups = len(first)
    busy = np.zeros(groups, np.int64)
    # What only fills time in which nothing else runs is busy as far as it does.
    real = np.flatnonzero(named == phase)
    index, length = _lengths(*_laid(group[real], start[real], end[real]))
    np.add.at(busy, group[real[index]], length)
    exposed = np.zeros(groups, np.int64)
    opened, closed = _laid(step, start, end)
    covered = Cover(np.empty(0, np.int64), np.empty(0, np.int64))
    for rank in range(count):
        of_phase = np.flatnonzero(phase == rank)
        if not len(of_phase):
            continue
        order = np.argsort(opened[of_phase], kind="stable")
        of_phase = of_phase[order]
        begin = np.maximum(opened[of_phase], _ended_before(closed[of_phase]))
        finish = closed[of_phase]
        kept = finish > begin
        of_phase, begin, finish = of_phase[kept], begin[kept], finish[kept]
        free = finish - begin - (covered.until(finish) - covered.until(begin))
        np.add.at(exposed, group[of_phase], free)
        if names.index(names[rank]) != rank:
            np.add.at(busy, group[of_phase], free)
        covered = covered.with_more(begin, finish)
    lasted = busy > 0
    busy, exposed, first = busy[lasted], exposed[lasted], first[lasted]
    return {
        "step": events["step"][first],
        "layer": events["layer"][first],
        "phase": np.array(names)[phase[first]],
        "busy_ns": busy,
        "exposed_ns": exposed,
        "hidden_ns": busy - exposed,
    }


def _exchanges(events: dict[str, Ints], names: Sequence[str], *others: str) -> tuple[Ints, Ints]:
    """Indices of dispatches, combines and ops of other phases, and which of them are a dispatch with its combine behind it."""
    phase, step = events["phase"], events["step"]
    exchange = (events["collective"] > 0) & np.isin(phase, [names.index(n) for n in ("dispatch", "combine")])
    marks = np.flatnonzero(exchange | np.isin(phase, [names.index(n) for n in others]))
    one, other = marks[:-1], marks[1:]
    pair = (phase[one] == names.index("dispatch")) & (phase[other] == names.index("combine"))
    return marks, np.flatnonzero(pair & exchange[one] & exchange[other] & (step[one] == step[other]))


def named_by_exchange(events: dict[str, Ints]) -> dict[str, Ints]:
    """Events, by start, with what has no phase between a dispatch and its combine as experts' work.

    Not where attention or routing begins between them: then another batch of the step runs there too.
    """
    marks, pairs = _exchanges(events, ON_GPU, "attention", "router")
    if not len(pairs):
        return events
    after = np.searchsorted(marks, np.arange(len(events["phase"])), side="right") - 1
    inside = np.zeros(len(marks) + 1, bool)
    inside[pairs] = True
    of_experts = (events["phase"] == ON_GPU.index("other")) & inside[after]
    return {**events, "phase": np.where(of_experts, ON_GPU.index("expert"), events["phase"])}


def with_time_of_experts(events: dict[str, Ints]) -> dict[str, Ints]:
    """Events, by start, and one of experts' work for all the time between each dispatch and its combine."""
    marks, pairs = _exchanges(events, ON_CPU)
    one, other = marks[pairs], marks[pairs + 1]
    start, end = events["end_ns"][one], events["start_ns"][other]
    kept = end > start
    more = {
        **{name: values[one[kept]] for name, values in events.items()},
        "start_ns": start[kept],
        "end_ns": end[kept],
        "phase": np.full(int(kept.sum()), BETWEEN),
    }
    together = {name: np.concatenate([values, more[name]]) for name, values in events.items()}
    order = np.argsort(together["start_ns"], kind="stable")
    return {name: values[order] for name, values in together.items()}


def _lengths(opened: Ints, closed: Ints) -> tuple[Ints, Ints]:
    """Indices of intervals by start, and how much each adds to what those before it cover."""
    order = np.argsort(opened, kind="stable")
    begin = np.maximum(opened[order], _ended_before(closed[order]))
    return order, np.maximum(closed[order] - begin, 0)


def _ended_before(end: Ints) -> Ints:
    """The latest end of all before each; for the first a time before any."""
    if not len(end):
        return end
    return np.concatenate([[np.iinfo(np.int64).min], np.maximum.accumulate(end)[:-1]])


def _laid(group: Ints, start: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Starts and ends with the groups laid one behind another, so that no two overlap; lengths stay."""
    if not len(group):
        return start, end
    count = int(group.max()) + 1
    first = np.full(count, np.iinfo(np.int64).max)
    last = np.full(count, np.iinfo(np.int64).min)
    np.minimum.at(first, group, start)
    np.maximum.at(last, group, end)
    begins = np.concatenate([[0], np.cumsum(last - first)[:-1]])
    shift = (begins - first)[group]
    return start + shift, end + shift


class Cover:
    """Time that disjoint intervals cover, by start."""

    def __init__(self, start: Ints, end: Ints) -> None:
        self._start, self._end = start, end
        self._before = np.concatenate([[0], np.cumsum(end - start)])

    def until(self, times: Ints) -> Ints:
        """How much is covered before each time."""
        if not len(self._start):
            return np.zeros(len(times), np.int64)
        index = np.searchsorted(self._start, times, side="right")
        beyond = np.maximum(self._end[np.maximum(index - 1, 0)] - times, 0)
        return np.asarray(self._before[index] - np.where(index > 0, beyond, 0))

    def with_more(self, start: Ints, end: Ints) -> Cover:
        """The cover with further intervals, which may overlap its own."""
        if not len(start):
            return self
        start, end = np.concatenate([self._start, start]), np.concatenate([self._end, end])
        order = np.argsort(start, kind="stable")
        start, end = start[order], end[order]
        reach = np.maximum.accumulate(end)
        fresh = start > _ended_before(end)
        index = np.flatnonzero(fresh)
        stop = np.append(index[1:], len(start)) - 1
        return Cover(start[index], reach[stop])


# -- idle -----------------------------------------------------------------------------------------


def idle_times(events: dict[str, Ints]) -> dict[str, Ints]:
    """Columns of `rank_idle`, UNKNOWN for NULL, of each step of a GPU's events by start; without those of annotations."""
    start, end, step, launch = (events[c] for c in ("start_ns", "end_ns", "step", "launch_ns"))
    before = _ended_before(end)
    idle = np.flatnonzero(start > before)[1:] if len(start) else np.empty(0, np.int64)
    lasted = start[idle] - before[idle]
    # Nothing says that the host was late for a kernel whose launch is not known.
    late = np.where(launch[idle] == UNKNOWN, 0, np.minimum(launch[idle], start[idle]) - before[idle])
    idle_until, late_until = (
        np.concatenate([[0], np.cumsum(values)]) for values in (lasted, np.maximum(late, 0))
    )
    mine = np.flatnonzero(step != UNKNOWN)
    numbers, own = np.unique(step[mine], return_inverse=True)
    count = len(numbers)
    first, last = np.full(count, np.iinfo(np.int64).max), np.full(count, np.iinfo(np.int64).min)
    np.minimum.at(first, own, start[mine])
    np.maximum.at(last, own, end[mine])
    busy = np.zeros(count, np.int64)
    index, length = _lengths(*_laid(own, start[mine], end[mine]))
    np.add.at(busy, own[index], length)
    # Steps begin and end with kernels: no idle time is cut.
    at_first, at_last = (np.searchsorted(start[idle], times, side="right") for times in (first, last))
    inner = idle_until[at_last] - idle_until[at_first]
    at_before = np.concatenate([[0], np.maximum.accumulate(at_last)[:-1]]) if count else at_last
    follows = np.concatenate([[False], np.diff(numbers) == 1])[:count]
    between = np.maximum(at_first, at_before)
    gap = np.where(follows, idle_until[between] - idle_until[at_before], UNKNOWN)
    launched = np.flatnonzero(launch[mine] != UNKNOWN)
    # What one call launched is of one step.
    _, different = np.unique(launch[mine[launched]], return_index=True)
    launches = np.bincount(own[launched[different]], minlength=count)
    kernels = np.bincount(own, minlength=count)
    unlaunched = kernels - np.bincount(own[launched], minlength=count)
    told = kernels > unlaunched
    gap_late = np.where(follows, late_until[between] - late_until[at_before], 0)
    inner_late = late_until[at_last] - late_until[at_first]
    return {
        "step": numbers,
        "span_ns": last - first,
        "busy_ns": busy,
        "beside_ns": last - first - busy - inner,
        "inner_idle_ns": inner,
        "gap_before_ns": gap,
        "launch_wait_ns": np.where(told, inner_late + gap_late, UNKNOWN),
        "gap_launch_wait_ns": np.where(told & follows, gap_late, UNKNOWN),
        "launches": launches,
        "kernels": kernels,
        "unlaunched": unlaunched,
    }
