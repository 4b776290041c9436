"""What encloses a profile's events: steps, annotated layers and phases, the calls that collectives belong to.

Arrays over the few events that say something of others, so that any event's surroundings are one look-up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import compute

from . import _kineto_names as names
from ._kineto_layers import Layers
from ._kineto_spool import NONE, PHASE_INDEX, Spool

#: Untyped: the stubs of pyarrow know only some of what these functions take.
pc: Any = compute
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Step:
    """A step of the engine on this rank; times in ns since the file's own origin."""

    start_ns: int
    end_ns: int
    name: names.StepName


@dataclass(frozen=True)
class Intervals:
    """Disjoint or nested intervals by start, each with a number; a later start wins."""

    start_ns: Ints
    end_ns: Ints

    def of(self, times_ns: Ints) -> Ints:
        """Index of the interval that began last before each time and still lasts, else NONE."""
        if not len(self.start_ns):
            return np.full(len(times_ns), NONE)
        index = np.searchsorted(self.start_ns, times_ns, side="right") - 1
        inside = (index >= 0) & (times_ns < self.end_ns[np.maximum(index, 0)])
        return np.asarray(np.where(inside, index, NONE))


class Surroundings:
    """Innermost annotated layer and phase of the main thread, for any time."""

    def __init__(self, annotations: list[tuple[str, int, int]]) -> None:
        """`annotations`: (name, start, end) of one thread, by start, the longer of two that begin together first."""
        times: list[int] = []
        layers: list[int] = []
        phases: list[int] = []
        open_ones: list[tuple[int, int, int]] = []

        def mark(time_ns: int) -> None:
            layer, phase = open_ones[-1][1:] if open_ones else (NONE, NONE)
            times.append(time_ns)
            layers.append(layer)
            phases.append(phase)

        for name, start, end in annotations:
            named, phase = names.layer_of(name), names.annotated_phase(name)
            if named is None and phase is None:
                continue
            while open_ones and open_ones[-1][0] <= start:
                ended = open_ones.pop()[0]
                mark(ended)
            outer = open_ones[-1] if open_ones else (0, NONE, NONE)
            # What begins inside another and outlasts it is cut: annotations of a thread nest.
            end = min(end, outer[0]) if open_ones else end
            open_ones.append(
                (
                    end,
                    outer[1] if named is None else named,
                    outer[2] if phase is None else PHASE_INDEX[phase],
                )
            )
            mark(start)
        while open_ones:
            mark(open_ones.pop()[0])
        self._times = np.array(times, np.int64)
        self._layers, self._phases = np.array(layers, np.int64), np.array(phases, np.int64)
        self.layers_named = any(layer >= 0 for layer in layers)

    def of(self, times_ns: Ints) -> tuple[Ints, Ints]:
        """(layer, index of the phase) at each time, NONE where there is none."""
        if not len(self._times):
            nowhere = np.full(len(times_ns), NONE)
            return nowhere, nowhere
        index = np.searchsorted(self._times, times_ns, side="right") - 1
        known = index >= 0
        index = np.maximum(index, 0)
        return np.where(known, self._layers[index], NONE), np.where(known, self._phases[index], NONE)


class Timeline:
    """The surroundings of a spooled profile's events."""

    def __init__(self, spool: Spool) -> None:
        told = spool.told.filter(pc.is_valid(spool.told["duration_ns"]))
        meant = spool.names.where(
            lambda name: (
                names.step_of(name) or names.annotated_phase(name) or names.layer_of(name) is not None
            )
        ) & ~spool.names.where(names.GLOO.match)
        captures = spool.names.where(names.CAPTURING.match)
        code, on_gpu = told["name"].to_numpy(), np.asarray(told["on_gpu"])
        notes = _named(spool, told, meant[code] & np.asarray(told["annotation"]))
        annotations = [(name, thread, start, end) for name, thread, start, end, gpu in notes if not gpu]
        self.captures = _outermost(
            [(name, start, end) for name, _, start, end, _ in _named(spool, told, captures[code] & ~on_gpu)]
        )
        candidates = [(names.step_of(name), thread, start, end) for name, thread, start, end in annotations]
        self.main_thread = _busiest(
            [(thread, end - start) for step, thread, start, end in candidates if step]
            or [
                (thread, end - start)
                for name, thread, start, end in annotations
                if names.annotated_phase(name)
            ]
        )
        self.steps = self._steps(
            [
                (step, start, end)
                for step, thread, start, end in candidates
                if step and thread == self.main_thread
            ]
        )
        self.step_times = Intervals(*_columns([(s.start_ns, s.end_ns) for s in self.steps], 2))
        self.surroundings = Surroundings(
            [(name, start, end) for name, thread, start, end in annotations if thread == self.main_thread]
        )
        self.gpu_steps = self._gpu_steps([(name, start, end) for name, _, start, end, gpu in notes if gpu])
        self.layers = Layers(spool, self)

    def _steps(self, found: list[tuple[names.StepName, int, int]]) -> list[Step]:
        captured = np.array([start for start, _ in self.captures], np.int64)
        kept: list[Step] = []
        for name, start, end in found:
            between = np.searchsorted(captured, [start, end])
            # The capture of a graph is no step, though torch's own annotation may enclose it.
            if name.grammar == names.TORCH_GRAMMAR and between[0] != between[1]:
                continue
            kept.append(Step(start, end, name))
        best = min((step.name.grammar for step in kept), default=0)
        outermost: list[Step] = []
        for step in kept:
            nested = bool(outermost) and step.end_ns <= outermost[-1].end_ns
            if step.name.grammar == best and not nested:
                outermost.append(step)
        return outermost

    def _gpu_steps(self, annotations: list[tuple[str, int, int]]) -> Intervals:
        """What ran on the GPU for each step, where the annotations have twins there: index = step.

        At an end of the profile some may lack a twin: the names say at which.
        """
        grammar = self.steps[0].name.grammar if self.steps else None
        twins = [
            (step, start, end)
            for name, start, end in annotations
            if (step := names.step_of(name)) and step.grammar == grammar
        ]
        own = [step.name for step in self.steps]
        found, count = [step for step, _, _ in twins], len(twins)
        lacking = len(own) - count
        at_first, at_last = found == own[:count], found == own[lacking:]
        if not count or lacking < 0 or (lacking and at_first == at_last):
            return Intervals(*_columns([], 2))
        before = 0 if at_first or not lacking else lacking
        return Intervals(*_columns([(twins[0][1],) * 2] * before + [t[1:] for t in twins], 2))

    def step_at(self, times_ns: Ints) -> Ints:
        return self.step_times.of(times_ns)

    def step_of(self, starts_ns: Ints, launches_ns: Ints, on_gpu: NDArray[np.bool_]) -> Ints:
        """The step of each event. What runs on a GPU is of the step that launched it (NONE where nothing says); it may run
        when the next has begun."""
        launched = launches_ns != NONE
        on_cpu = self.step_at(np.where(launched, launches_ns, starts_ns))
        return np.where(on_gpu & ~launched, self.gpu_steps.of(starts_ns), on_cpu)


def _named(spool: Spool, told: pa.Table, which: Any) -> list[tuple[str, int, int, int, bool]]:
    """(name, thread, start, end, on_gpu) of rows by start, the longer of two that begin together first."""
    rows = told.filter(pa.array(which)).sort_by(
        [("start_ns", "ascending"), ("duration_ns", "descending"), ("number", "ascending")]
    )
    columns = (rows[c].to_pylist() for c in ("name", "thread", "start_ns", "duration_ns", "on_gpu"))
    return [
        (spool.names.texts[name], thread, start, start + duration, gpu)
        for name, thread, start, duration, gpu in zip(*columns, strict=True)
    ]


def _outermost(captures: list[tuple[str, int, int]]) -> list[tuple[int, str]]:
    """(start, name) of captures by start, without the runtime's calls within annotated ones: those are the same."""
    kept: list[tuple[int, str]] = []
    lasts_to: int | None = None
    for name, start, end in captures:
        if lasts_to is None or start >= lasts_to:
            kept.append((start, name))
            lasts_to = end
    return kept


def _columns(rows: list[Any], width: int) -> list[Ints]:
    table = np.array(rows, np.int64).reshape(-1, width)
    return [np.ascontiguousarray(table[:, i]) for i in range(width)]


def _busiest(spent: list[tuple[int, int]]) -> int | None:
    total: dict[int, int] = {}
    for thread, duration in spent:
        total[thread] = total.get(thread, 0) + duration
    return max(total, key=lambda thread: total[thread]) if total else None
