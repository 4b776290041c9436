"""Layers by counting: where nothing names them, attention says where each begins.

Ops on the CPU are counted in the thread that runs them, for micro-batches of one step may each have a thread. A step replayed
from a graph has no ops: there kernels are counted in the order in which they ran.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from . import _kineto_names as names
from ._kineto_spool import NONE, Spool

if TYPE_CHECKING:
    from ._kineto_timeline import Timeline

Ints = NDArray[np.int64]
#: A kernel runs once a layer where at least this share of its repeats are as far apart: some events may be lost.
EVEN = 0.75


class _Marks:
    """Times at which layers begin, and the step and number of each."""

    def __init__(self, times_ns: Ints, step: Ints) -> None:
        order = np.argsort(times_ns, kind="stable")
        self._times, self._step = times_ns[order], step[order]
        by_step = np.argsort(self._step, kind="stable")
        ordered = self._step[by_step]
        places = np.arange(len(ordered))
        begins = np.concatenate([[True], ordered[1:] != ordered[:-1]])[: len(ordered)]
        self._number = np.empty(len(ordered), np.int64)
        self._number[by_step] = places - np.maximum.accumulate(np.where(begins, places, 0))

    def layer(self, times_ns: Ints, step: Ints) -> Ints:
        """The layer begun last before each time, in the same step; NONE before the first."""
        if not len(self._times):
            return np.full(len(times_ns), NONE)
        index = np.searchsorted(self._times, times_ns, side="right") - 1
        known = (index >= 0) & (step >= 0) & (self._step[index] == step)
        return np.where(known, self._number[index], NONE)


class Layers:
    """The layer of any event of a spooled profile, NONE where layers have names, outside of steps and before the first."""

    def __init__(self, spool: Spool, timeline: Timeline) -> None:
        self._by_thread: dict[int, _Marks] = {}
        self._replayed = np.zeros(len(timeline.steps), bool)
        self._kernels = _Marks(np.empty(0, np.int64), np.empty(0, np.int64))
        if timeline.surroundings.layers_named or not timeline.steps:
            return
        marks = spool.marks.filter(spool.marks["layer_mark"])
        times, threads = _ints(marks["start_ns"]), _ints(marks["thread"])
        step = timeline.step_at(times)
        for thread in np.unique(threads).tolist():
            mine = threads == thread
            self._by_thread[thread] = _Marks(times[mine], step[mine])
        self._replayed = ~np.isin(np.arange(len(timeline.steps)), step)
        kernels = spool.attention
        start, launch = _ints(kernels["start_ns"]), spool.launch_of(kernels)
        launched_ns = np.append(spool.launches.start_ns, NONE)[launch]
        step = timeline.step_of(start, launched_ns, np.ones(len(start), bool))
        chosen = (step >= 0) & self._replayed[step]
        writes = spool.names.where(names.CACHE_WRITER.search)
        first = _once_a_layer(start[chosen], step[chosen], _ints(kernels["name"])[chosen], writes)
        self._kernels = _Marks(start[chosen][first], step[chosen][first])

    @property
    def threads(self) -> Ints:
        """Threads that run layers."""
        return np.array(sorted(self._by_thread), np.int64)

    def of(
        self,
        starts_ns: Ints,
        origins_ns: Ints,
        threads: Ints,
        step: Ints,
        on_gpu: NDArray[np.bool_],
        launched: NDArray[np.bool_],
    ) -> Ints:
        """`origins_ns`, `threads`: when and where each event was launched, or itself began on the CPU."""
        layer = np.full(len(step), NONE)
        if len(self._by_thread) == 1:
            [marks] = self._by_thread.values()
            layer = marks.layer(origins_ns, step)
        elif self._by_thread:
            for thread in np.unique(threads).tolist():
                if marks_of := self._by_thread.get(thread):
                    mine = threads == thread
                    layer[mine] = marks_of.layer(origins_ns[mine], step[mine])
        layer = np.where(on_gpu & ~launched, NONE, layer)
        if not self._replayed.any():
            return layer
        replayed = on_gpu & (step >= 0) & self._replayed[step]
        return np.where(replayed, self._kernels.layer(starts_ns, step), layer)


def _once_a_layer(start: Ints, step: Ints, name: Ints, writes: NDArray[np.bool_]) -> Ints:
    """Indices of the attention kernels with the one name in each step that runs once per layer.

    That is the one which writes the cache, the most frequent if there are several. Where none does: of those that come
    again after as many other kernels each time the most frequent, of these the first.
    """
    order = np.lexsort((start, step))
    step, name = step[order], name[order]
    ordinal = np.arange(len(step))
    by_name = np.lexsort((ordinal, name, step))
    head = np.concatenate([[True], (np.diff(step[by_name]) != 0) | (np.diff(name[by_name]) != 0)])
    head = np.flatnonzero(head[: len(by_name)])
    if not len(head):
        return np.empty(0, np.int64)
    count = np.diff(np.append(head, len(by_name)))
    group = np.repeat(np.arange(len(head)), count)
    # The last of a name has no gap to the next.
    again = np.flatnonzero(np.diff(group) == 0)
    of_gap, gap = group[again], np.diff(ordinal[by_name])[again]
    gaps = np.bincount(of_gap, minlength=len(head))
    middle = np.cumsum(gaps) - gaps + np.maximum(gaps - 1, 0) // 2
    usual = np.append(gap[np.lexsort((gap, of_gap))], 0)[np.minimum(middle, len(gap))]
    even = np.bincount(of_gap, gap == usual[of_gap], minlength=len(head)) >= EVEN * gaps
    writer = writes[name[by_name[head]]]
    fit = np.flatnonzero(writer | (even & (count > 1)))
    of_step, first = step[by_name[head]], by_name[head]
    best = fit[np.lexsort((first[fit], -count[fit], ~writer[fit], of_step[fit]))]
    best = best[np.concatenate([[True], np.diff(of_step[best]) != 0])[: len(best)]]
    return np.asarray(order[by_name[np.isin(group, best)]])


def _ints(column: Any) -> Ints:
    values: Any = pa.compute.fill_null(column, NONE)
    return np.asarray(values.to_numpy(), np.int64)
