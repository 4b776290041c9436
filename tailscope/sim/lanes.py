"""Engines as they step: alone, or together where they share a mixture of experts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from tailscope.sim.cost import StepCost
from tailscope.sim.outcome import EngineOutcome, Runs, Steps
from tailscope.sim.ranks import RankWorld
from tailscope.sim.scenario import Fault, Scenario, end_s
from tailscope.sim.scheduler import Batch, Request, Scheduler


class Play(Protocol):
    """What an engine tells the world around it."""

    scenario: Scenario

    def at(self, time: float, what: Callable[[float], None]) -> None:
        """Have something done at an instant."""

    def results(self, engine: EngineRun, batch: Batch, now: float) -> None:
        """A step is over."""

    def fetch(self, lane: Lane, engine: EngineRun, request: Request, now: float) -> None:
        """A request waits for its KV cache from elsewhere."""

    def leaves_early(self, request: Request, now: float) -> None:
        """The client of a request that was just taken up goes."""

    def shape_comes_first(self, lane: Lane, fault: Fault, now: float) -> None:
        """A step takes longer because its batch is of a new size."""


class Lane:
    """Engines that step together: one, or the data-parallel engines of a mixture of experts."""

    def __init__(
        self, play: Play, instance: int, engines: list[EngineRun], seed: int, world: RankWorld | None
    ) -> None:
        self.play, self.instance, self.engines, self.world = play, instance, engines, world
        scenario = play.scenario
        self.lead = scenario.engine.async_scheduling
        self.gap = scenario.cost.host_gap
        self.executing: tuple[list[Batch], float, float] | None = None
        self.pending: deque[list[Batch]] = deque()
        self.inputs: list[tuple[EngineRun, Request]] = []
        self.aborts: list[tuple[EngineRun, Request]] = []
        self.steps = 0
        self.parts: tuple[float, ...] = ()
        self.costs = [StepCost(scenario.cost, (seed, instance, e.number)) for e in engines]
        faults = [f for f in scenario.faults if f.replica == instance]
        self.pauses = pauses(scenario, [f for f in faults if f.kind == "pause"])
        self.next_pause = 0
        self.slow = [f for f in faults if f.kind == "slow-replica"]
        self.first_shapes = [(f, set[int]()) for f in faults if f.kind == "first-shape"]

    # -- input ---------------------------------------------------------------------------------

    def put(self, engine: EngineRun, request: Request, now: float) -> None:
        request.input_s = now
        self.inputs.append((engine, request))
        self.wake(now)

    def wake(self, now: float) -> None:
        if self.executing is None:
            self.drain(now)
            self.advance(now)

    def drain(self, now: float) -> None:
        for engine, request in self.inputs:
            if request.gone:
                continue
            engine.scheduler.add(request, now)
        self.inputs.clear()
        for engine, request in self.aborts:
            if not request.gone:
                engine.scheduler.finish(request)
        self.aborts.clear()

    # -- steps ---------------------------------------------------------------------------------

    def make(self, now: float, last: list[Batch] | None) -> bool:
        """Make the next batch of each engine; whether any has something to compute."""
        batches = [
            engine.scheduler.schedule(now, last[i] if last else None) for i, engine in enumerate(self.engines)
        ]
        for engine in self.engines:
            for request in engine.scheduler.started_fetches:
                self.play.fetch(self, engine, request, now)
            engine.scheduler.started_fetches.clear()
        for batch in batches:
            for request in [r for r in batch.leaving if r.leaves_at < 0]:
                batch.leaving.remove(request)
                self.play.leaves_early(request, now)
        if all(batch.empty for batch in batches):
            return False
        if len(batches) > 1:
            # A batch that is empty is computed as a dummy, and counts as a step of its engine.
            for engine, batch in zip(self.engines, batches, strict=True):
                if batch.empty:
                    batch.number = engine.scheduler.made
                    engine.scheduler.made += 1
        self.pending.append(batches)
        return True

    def advance(self, now: float) -> None:
        if not self.pending:
            self.make(now, None)
        if not self.pending:
            return
        batches = self.pending.popleft()
        start = now + self.gap
        end = self._end(batches, start)
        self.executing = (batches, start, end)
        if self.lead:
            self.make(now, batches)
        self.play.at(end, self._ended)

    def _end(self, batches: list[Batch], start: float) -> float:
        """When a step ends, and what each engine's part in it costs."""
        factor = 1.0
        for fault in self.slow:
            if fault.holds_at(start):
                factor *= fault.factor
        parts = [cost.of(batch, factor) for cost, batch in zip(self.costs, batches, strict=True)]
        work = [sum(part) for part in parts]
        straggler = transfer = 0.0
        stall = self._first_shape(batches, start) if self.first_shapes else 0.0
        if self.world is not None:
            requests = sum(batch.prefill_requests + batch.decodes for batch in batches)
            duration, straggler, transfer = self.world.step(
                self.steps, start, work, [batch_tokens(batch) for batch in batches], requests, stall
            )
            stall = self.world.held_s
            duration -= stall
        else:
            duration = max(work)
        self.steps += 1
        pause = stall
        end = start + duration + stall
        while self.next_pause < len(self.pauses) and self.pauses[self.next_pause][0] < end:
            at, length = self.pauses[self.next_pause]
            self.next_pause += 1
            # A pause that began while the engine had nothing to do holds up only with its rest.
            rest = length if at >= start else max(0.0, at + length - start)
            pause += rest
            end += rest
        # The engines of a lane wait for the slowest, so that its prefill is everyone's.
        slowest = max(range(len(parts)), key=lambda i: work[i])
        scale = (duration - straggler - transfer) / work[slowest]
        base, prefill, chance = (part * scale for part in parts[slowest])
        if len(parts) > 1:
            idle = max(part[0] for part in parts) * scale
            base, prefill = idle, max(base + prefill - idle, 0.0)
            base += duration - straggler - transfer - base - prefill - chance
        self.parts = (base, prefill, straggler, transfer, pause, chance)
        return end

    def _first_shape(self, batches: list[Batch], start: float) -> float:
        """What the step takes longer because no batch of such a size came before."""
        longer = 0.0
        shape = shape_of(max(batch_tokens(batch) for batch in batches))
        for fault, seen in self.first_shapes:
            if fault.holds_at(start) and shape not in seen:
                seen.add(shape)
                longer += fault.length_s
                self.play.shape_comes_first(self, fault, start)
        return longer

    def _ended(self, now: float) -> None:
        assert self.executing is not None
        batches, start, end = self.executing
        for engine, batch in zip(self.engines, batches, strict=True):
            self.play.results(engine, batch, now)
            engine.record(batch, start, end, self.parts)
        self.executing = None
        self.drain(now)
        self.advance(now)


class EngineRun:
    """One engine and what is written down of its steps."""

    def __init__(
        self, scenario: Scenario, instance: str, number: int, role: str, instance_number: int = 0
    ) -> None:
        self.scheduler = Scheduler(scenario.engine)
        self.scheduler.set_faults(scenario.faults, instance_number)
        self.instance, self.number, self.role = instance, number, role
        self.output_s = scenario.cost.output
        self.place = -1
        self.lane: Lane
        self.rows: list[tuple[Any, ...]] = []

    def record(self, batch: Batch, start: float, end: float, parts: tuple[float, ...]) -> None:
        s = self.scheduler
        self.rows.append(
            (
                batch.made_s, start, end, end + self.output_s,
                batch.prefill_requests, batch.prefill_tokens, batch.decodes, batch.decodes,
                batch.recompute_requests, batch.recompute_tokens, batch.context,
                len(s.running), len(s.waiting), len(s.fetching) + len(s.arrived_remote), s.kv.usage,
                batch.preempted, batch.preempted_told, batch.blocked,
                *parts, batch.empty,
            )
        )  # fmt: skip

    @property
    def queued(self) -> int:
        """Requests that wait, or will once the running step is over."""
        return len(self.scheduler.waiting) + sum(engine is self for engine, _ in self.lane.inputs)

    @property
    def load(self) -> int:
        """As vLLM's data-parallel load balancer counts it."""
        return 4 * self.queued + len(self.scheduler.running)

    def outcome(self) -> EngineOutcome:
        types = Steps.__annotations__
        columns = list(zip(*self.rows, strict=True)) if self.rows else [()] * len(types)
        kinds = {"Ints": np.int64, "Floats": np.float64}
        arrays: dict[str, Any] = {
            name: np.array(column, kinds.get(types[name], np.bool_))
            for name, column in zip(types, columns, strict=True)
        }
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            self.scheduler.end_runs(request)
        runs = np.array(self.scheduler.runs, np.int64).reshape(-1, 7)
        # A batch that was made and never run (its clients left) has no step.
        runs = runs[runs[:, 1] < len(self.rows)]
        runs[:, 2] = np.minimum(runs[:, 2], len(self.rows) - 1)
        runs = runs[np.lexsort((runs[:, 0], runs[:, 1]))]
        return EngineOutcome(
            self.instance,
            self.number,
            self.role,
            Steps(**arrays),
            Runs(
                runs[:, 0], runs[:, 1], runs[:, 2], runs[:, 3], runs[:, 4], runs[:, 5], gives=runs[:, 6] > 0
            ),
        )


def batch_tokens(batch: Batch) -> int:
    """Tokens of a batch; a dummy batch computes one."""
    return max(batch.prefill_tokens + batch.decodes + batch.recompute_tokens, 1)


def shape_of(tokens: int) -> int:
    """The size a batch is padded to: of vLLM's CUDA graphs (1, 2, 4, by 8, from 256 on by 16), then a power of two."""
    for most, step in ((2, 1), (4, 4), (256, 8), (512, 16)):
        if tokens <= most:
            return -(-tokens // step) * step
    return int(2 ** (tokens - 1).bit_length())


def pauses(scenario: Scenario, faults: list[Fault]) -> list[tuple[float, float]]:
    """(instant, length) of each pause, in order; periodic ones as long as clients send."""
    found = []
    for fault in faults:
        time = fault.from_s
        until = end_s(fault, scenario.duration_s)
        while time < until:
            found.append((time, fault.length_s))
            if fault.every_s is None:
                break
            time += fault.every_s
    merged: list[tuple[float, float]] = []
    for start, length in sorted(found):
        if merged and start <= sum(merged[-1]):
            first, lasting = merged[-1]
            merged[-1] = (first, max(lasting, start + length - first))
        else:
            merged.append((start, length))
    return merged
