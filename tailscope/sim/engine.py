"""Plays a scenario: clients, gateway, routing, engines and their ranks, event by event."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from math import ceil, inf, isnan, nan
from typing import Any

import numpy as np

from tailscope.errors import UsageError
from tailscope.sim.api_server import ApiServer
from tailscope.sim.lanes import EngineRun, Lane, pauses
from tailscope.sim.on_the_way import delay_s, place_of
from tailscope.sim.outcome import (
    ABORTED,
    OK,
    REJECTED,
    TIMEOUT,
    UNFINISHED,
    Event,
    Outcome,
    Requests,
)
from tailscope.sim.ranks import RankWorld
from tailscope.sim.scenario import Fault, Scenario, end_s
from tailscope.sim.scheduler import Batch, Request
from tailscope.sim.workload import Closed, make

#: A world that has not come to its end this long after its clients' last request never will.
GIVE_UP_S = 100_000.0
#: A user who got no answer waits at least so long before asking again.
RETRY_S = 0.01


def simulate(scenario: Scenario) -> Outcome:
    """Play a scenario to its end: everything that was sent is served, left or refused. Deterministic by its seed."""
    return _Play(scenario).run()


class _Row:
    """A request as its client and the truth have it."""

    __slots__ = (
        "abort_after",
        "arrival",
        "engine",
        "finished",
        "first_shown",
        "id",
        "in_gateway",
        "intended",
        "last_shown",
        "left",
        "load",
        "of_engine",
        "of_prefill",
        "planned",
        "prefill_engine",
        "prefix",
        "prefix_tokens",
        "priority",
        "prompt",
        "sent",
        "status",
        "timeout",
        "transfer",
        "user",
    )  # fmt: skip

    def __init__(self, id: str, load: int, intended: float, prompt: int, output: int) -> None:
        self.id, self.load, self.intended, self.prompt, self.planned = id, load, intended, prompt, output
        self.sent = self.arrival = self.first_shown = self.last_shown = self.finished = self.left = nan
        self.prefix, self.prefix_tokens, self.priority = -1, 0, 0
        self.timeout = self.abort_after = self.transfer = nan
        self.status, self.engine, self.prefill_engine = UNFINISHED, -1, -1
        self.of_engine: Request | None = None
        self.of_prefill: Request | None = None
        self.user = False
        self.in_gateway = False


_ROW_INTS = ("load", "prompt", "planned", "priority", "status", "engine", "prefill_engine")
_ROW_FLOATS = ("intended", "sent", "arrival", "first_shown", "last_shown", "finished", "left")


class _Play:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._count = 0
        #: The call last forwarded and where to: all answers of one call stay on one server.
        self._last_call: tuple[str, Lane | None] = ("", None)
        self.rows: list[_Row] = []
        self.events: list[Event] = []
        self.worlds: dict[str, RankWorld] = {}
        self.prefillers, self.lanes = self._build()
        self.engines = [e for lane in [*self.lanes, *self.prefillers] for e in lane.engines]
        for place, engine in enumerate(self.engines):
            engine.place = place
        self._of_instance: dict[str, list[EngineRun]] = {}
        for engine in self.engines:
            self._of_instance.setdefault(engine.instance, []).append(engine)
        self._api_servers = {name: ApiServer(scenario.cost.frontend, self.at) for name in self._of_instance}
        self._turn = self._prefill_turn = 0
        self._in_flight = 0
        self._queue: deque[_Row] = deque()
        self._slow_networks = [f for f in scenario.faults if f.kind == "network"]
        self._slow_frontends = [f for f in scenario.faults if f.kind == "frontend"]
        #: (from, until) in which the gateway holds what comes.
        self._holds = [
            (at, at + length)
            for at, length in pauses(scenario, [f for f in scenario.faults if f.kind == "gateway-hold"])
        ]
        self._counts = [0] * len(scenario.loads)
        self._by_request: list[_Row] = []

    def _build(self) -> tuple[list[Lane], list[Lane]]:
        scenario, engine = self.scenario, self.scenario.engine
        prefillers: list[Lane] = []
        lanes: list[Lane] = []
        for i in range(engine.replicas + engine.prefill_replicas):
            decodes = i < engine.replicas
            role = ("decode" if engine.prefill_replicas else "both") if decodes else "prefill"
            name = f"vllm-{i}" if decodes else f"vllm-prefill-{i - engine.replicas}"
            engines = [EngineRun(scenario, name, number, role, i) for number in range(engine.data_parallel)]
            world = None
            if scenario.ranks.tensor_parallel * (engine.data_parallel if engine.moe else 1) > 1:
                world = RankWorld(scenario, name, i, scenario.seed)
                self.worlds[name] = world
            groups = [engines] if engine.moe else [[e] for e in engines]
            for group in groups:
                lane = Lane(self, i, group, scenario.seed, world)
                for e in group:
                    e.lane = lane
                (lanes if decodes else prefillers).append(lane)
        return prefillers, lanes

    # -- events --------------------------------------------------------------------------------

    def at(self, time: float, what: Callable[[float], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (time, self._count, what))

    def run(self) -> Outcome:
        workload, self._closed = make(self.scenario)
        arrivals = self._rows_of(workload)
        for load, closed in self._closed.items():
            self._start_users(load, closed)
        limit = self.scenario.duration_s + GIVE_UP_S
        heap, nothing = self._heap, inf
        upcoming = next(arrivals, None)
        while heap or upcoming is not None:
            due = upcoming.intended if upcoming is not None else nothing
            if upcoming is not None and (not heap or due <= heap[0][0]):
                self.send(upcoming, due)
                upcoming = next(arrivals, None)
                continue
            now, _, what = heapq.heappop(heap)
            self.now = now
            if now > limit:
                raise UsageError(
                    f"{self.scenario.name}: not over {GIVE_UP_S:,.0f} s after its clients' last request; something in it "
                    "takes too long: a pause, a step, a transfer"
                )
            what(now)
        self._check_over()
        self._tell_pauses()
        return self._outcome()

    def _check_over(self) -> None:
        for engine in self.engines:
            scheduler = engine.scheduler
            if scheduler.busy:
                waiting = len(scheduler.waiting) + len(scheduler.fetching) + len(scheduler.arrived_remote)
                raise UsageError(
                    f"{self.scenario.name}: {engine.instance} stands still for ever: {waiting} requests wait for KV cache that "
                    "is held by others that wait; give it more kv_blocks"
                )
            assert scheduler.kv.free == scheduler.kv.total, "a block was lost"

    def _rows_of(self, workload: Any) -> Any:
        columns = (
            "load",
            "index",
            "intended_s",
            "prompt",
            "output",
            "prefix",
            "prefix_tokens",
            "priority",
            "timeout_s",
            "abort_after",
            "n",
        )
        lists = [getattr(workload, name).tolist() for name in columns]
        names = [load.name for load in self.scenario.loads]
        for load, index, intended, prompt, output, prefix, prefix_tokens, priority, timeout, abort, n in zip(
            *lists, strict=True
        ):
            for _ in range(n):
                row = _Row(f"{names[load]}-{index:05d}", load, intended, prompt, output)
                row.prefix, row.prefix_tokens, row.priority = prefix, prefix_tokens, priority
                row.timeout, row.abort_after = timeout, abort
                self._counts[load] = max(self._counts[load], index + 1)
                yield row

    # -- clients -------------------------------------------------------------------------------

    def _start_users(self, load: int, closed: Closed) -> None:
        spec = self.scenario.loads[load]
        for _ in range(spec.users):
            self.at(spec.from_s + closed.think(), lambda now: self._user_sends(load, now))

    def _user_sends(self, load: int, now: float) -> None:
        spec = self.scenario.loads[load]
        if now >= end_s(spec, self.scenario.duration_s) or (
            spec.requests is not None and self._counts[load] >= spec.requests
        ):
            return
        prompt, output, prefix, prefix_tokens, timeout, abort = self._closed[load].draw()
        row = _Row(f"{spec.name}-{self._counts[load]:05d}", load, now, prompt, output)
        self._counts[load] += 1
        row.prefix, row.prefix_tokens, row.priority = prefix, prefix_tokens, spec.priority
        row.timeout, row.abort_after, row.user = timeout, abort, True
        self.send(row, now)

    def send(self, row: _Row, now: float) -> None:
        self.rows.append(row)
        row.sent = now
        if not isnan(row.timeout):
            self.at(now + row.timeout, lambda t: self._leave(row, t, TIMEOUT))
        until = next((end for start, end in self._holds if start <= now < end), None)
        if until is not None:
            self.at(until, lambda t: self._through(row, t))
            return
        self._through(row, now)

    def _through(self, row: _Row, now: float) -> None:
        """To the gateway's queue, or on. A client that has left meanwhile sends nothing."""
        if row.status != UNFINISHED or not isnan(row.left):
            return
        gateway = self.scenario.gateway
        if gateway.max_in_flight is not None and self._in_flight >= gateway.max_in_flight:
            if gateway.max_queue is not None and len(self._queue) >= gateway.max_queue:
                self._done(row, now, REJECTED)
                return
            row.in_gateway = True
            self._queue.append(row)
            return
        self._forward(row, now)

    def _leave(self, row: _Row, now: float, status: int) -> None:
        """A client goes without its whole answer."""
        if row.status != UNFINISHED or not isnan(row.left):
            return
        row.left = now
        # What comes later reaches nobody.
        row.finished = row.last_shown = nan
        self._sent(row)
        for place, request in ((row.engine, row.of_engine), (row.prefill_engine, row.of_prefill)):
            if request is not None and not request.gone and place >= 0:
                lane = self.engines[place].lane
                lane.aborts.append((self.engines[place], request))
                lane.wake(now)
        if row.in_gateway or isnan(row.arrival):
            # Else the gateway holds it for other reasons than its queue's.
            if row.in_gateway:
                self._queue.remove(row)
            row.in_gateway = False
            row.status = status
            self._user_done(row, now)
        else:
            self._done(row, now, status)

    def _done(self, row: _Row, now: float, status: int) -> None:
        row.status = status
        if status != REJECTED or not isnan(row.arrival):
            self._in_flight -= 1
            while self._queue and self._in_flight < (self.scenario.gateway.max_in_flight or 0):
                first = self._queue.popleft()
                first.in_gateway = False
                self._forward(first, now)
        self._user_done(row, now)

    def _user_done(self, row: _Row, now: float) -> None:
        if row.user:
            pause = self._closed[row.load].think()
            if row.status != OK:
                pause = max(pause, RETRY_S)
            self.at(now + pause, lambda t: self._user_sends(row.load, t))

    # -- gateway and API server ------------------------------------------------------------------

    def _forward(self, row: _Row, now: float) -> None:
        self._in_flight += 1
        arrival = now + self.scenario.gateway.delay_s + self.scenario.telemetry.network_s
        if self._slow_networks:
            arrival += delay_s(self._slow_networks, row.id, row.sent)
        row.arrival = arrival
        call, known = self._last_call
        if known is not None and call == row.id:
            lane = known
        elif self.prefillers:
            lane = self._choose(self.prefillers, self._prefill_turn, row)
            self._prefill_turn += 1
        else:
            lane = self._choose(self.lanes, self._turn, row)
            self._turn += 1
        self._last_call = (row.id, lane)
        limit = self.scenario.engine.max_num_queued_reqs
        instance = self._of_instance[lane.engines[0].instance]
        if limit is not None and sum(e.queued for e in instance) >= limit:
            self.events.append(Event(arrival, "rejection", "max_num_queued_reqs", instance[0].place))
            self._done(row, now, REJECTED)
            return
        engine = min(instance, key=lambda e: (e.load, e.number))
        delay = 0.0
        for fault in self._slow_frontends:
            if fault.replica == engine.lane.instance and fault.holds_at(arrival):
                delay += fault.length_s
        request = self._request(row, row.planned if not self.prefillers else 1)
        if self.prefillers:
            row.prefill_engine, row.of_prefill = engine.place, request
        else:
            row.engine, row.of_engine = engine.place, request
        self.at(arrival + delay, lambda t: self._to_engine(engine, request, t))

    def _to_engine(self, engine: EngineRun, request: Request, now: float) -> None:
        """Through the API server to the engine's input."""
        self._api_servers[engine.instance].take(now, lambda t: engine.lane.put(engine, request, t))

    def _choose(self, lanes: list[Lane], turn: int, row: _Row) -> Lane:
        """The instance a request goes to, by its first lane."""
        firsts = list({lane.instance: lane for lane in reversed(lanes)}.values())[::-1]
        if self.scenario.engine.skew and place_of(row.id, "skew") < self.scenario.engine.skew:
            return firsts[0]
        if self.scenario.engine.routing == "round-robin":
            return firsts[turn % len(firsts)]
        return min(
            firsts,
            key=lambda f: sum(e.load for lane in lanes if lane.instance == f.instance for e in lane.engines),
        )

    def _request(self, row: _Row, output: int) -> Request:
        index = len(self._by_request)
        self._by_request.append(row)
        blocks = row.prefix_tokens // self.scenario.engine.block_size if row.prefix >= 0 else 0
        request = Request(index, row.prompt, output, row.prefix, blocks)
        request.order = (row.priority, row.arrival, index)
        if not isnan(row.abort_after):
            request.leaves_at = -1 if row.abort_after <= 0 else max(1, ceil(row.abort_after * row.planned))
        return request

    # -- engines -------------------------------------------------------------------------------

    def leaves_early(self, request: Request, now: float) -> None:
        """The client goes as soon as its request is taken up, before there is a token."""
        row = self._by_request[request.index]
        self.at(now, lambda t: self._leave(row, t, ABORTED))

    def shape_comes_first(self, lane: Lane, fault: Fault, now: float) -> None:
        """The log tells of it where the fault has a reason that one does."""
        place = lane.engines[0].place
        self.events.append(Event(now, fault.reason, "first-shape", place, length_s=fault.length_s))

    def fetch(self, lane: Lane, engine: EngineRun, request: Request, now: float) -> None:
        """The KV cache of a request comes from its prefill instance."""
        assert request.transfer_s is not None

        def arrived(time: float) -> None:
            self._sent(self._by_request[request.index])
            if not request.gone:
                engine.scheduler.fetching.remove(request)
                engine.scheduler.arrived_remote.append(request)
                lane.wake(time)

        self.at(now + request.transfer_s, arrived)

    def _sent(self, row: _Row) -> None:
        """A prefill instance keeps the blocks until they have been sent, or nobody wants them."""
        request = row.of_prefill
        if request is not None and request.gone and request.blocks + request.sharing:
            engine = self.engines[row.prefill_engine]
            engine.scheduler.release(request)
            engine.lane.wake(self.now)

    def results(self, engine: EngineRun, batch: Batch, now: float) -> None:
        shown = now + self.scenario.cost.output
        for request in batch.firsts:
            request.first_token_s = now
            row = self._by_request[request.index]
            if request is row.of_engine and not request.gone and isnan(row.left):
                row.first_shown = shown
        for request in batch.leaving:
            if not request.gone:
                row = self._by_request[request.index]
                self._leave(row, shown, ABORTED)
        for request in batch.finishing:
            if request.gone:
                continue
            request.last_token_s = now
            row = self._by_request[request.index]
            engine.scheduler.finish(request, keep_blocks=request is row.of_prefill and isnan(row.left))
            self._finished(row, request, shown)

    def _finished(self, row: _Row, request: Request, shown: float) -> None:
        if not isnan(row.left):
            return
        if request is row.of_prefill:
            self.at(shown, lambda t: self._hand_over(row, t))
            return
        row.last_shown = row.finished = shown
        self.at(shown, lambda t: self._done(row, t, OK) if isnan(row.left) else None)

    def _hand_over(self, row: _Row, now: float) -> None:
        if not isnan(row.left):
            return
        engine_settings = self.scenario.engine
        lane = self._choose(self.lanes, self._turn, row)
        self._turn += 1
        engine = min(self._of_instance[lane.engines[0].instance], key=lambda e: (e.load, e.number))
        request = self._request(row, row.planned)
        row.transfer = (
            engine_settings.kv_transfer_latency_s + row.prompt / engine_settings.kv_transfer_tokens_per_s
        )
        request.transfer_s = row.transfer
        row.engine, row.of_engine = engine.place, request
        self._to_engine(engine, request, now)

    # -- what became of it -----------------------------------------------------------------------

    def _tell_pauses(self) -> None:
        last = max((e.rows[-1][2] for e in self.engines if e.rows), default=0.0)
        for fault in self.scenario.faults:
            if fault.kind == "pause":
                place = next(e.place for e in self.engines if e.lane.instance == fault.replica)
                for time, length in pauses(self.scenario, [fault]):
                    if time <= last:
                        self.events.append(Event(time, fault.reason, "pause", place, length_s=length))

    def _outcome(self) -> Outcome:
        rows = self.rows
        of_row = {id(row): i for i, row in enumerate(rows)}
        places = np.array([of_row[id(row)] for row in self._by_request], np.int64)
        given, last_given = np.zeros(len(places), np.int64), np.full(len(places), -inf)
        engines = [e.outcome() for e in self.engines]
        for outcome in engines:
            r = outcome.runs
            np.add.at(given, r.request, np.where(r.gives, r.last - r.first + 1, 0))
            np.maximum.at(last_given, r.request[r.gives], outcome.steps.end_s[r.last[r.gives]])
            r.request = places[r.request]
        own = [row.of_engine or row.of_prefill for row in rows]
        index = np.array([-1 if q is None else q.index for q in own], np.int64)
        seen = index >= 0
        ints = {name: [getattr(row, name) for row in rows] for name in _ROW_INTS}
        floats = {f"{name}_s": [getattr(row, name) for row in rows] for name in _ROW_FLOATS}
        floats["kv_transfer_s"] = [row.transfer for row in rows]
        for name in ("input_s", "queued_s", "fetch_s", "fetched_s", "scheduled_s", "first_token_s"):
            floats[name] = [nan if q is None else getattr(q, name) for q in own]
        ints["cached"] = [0 if q is None else max(q.cached, 0) for q in own]
        ints["preemptions"] = [0 if q is None else q.preemptions for q in own]
        last = np.full(len(rows), nan)
        last[seen] = np.where(given[index[seen]] > 0, last_given[index[seen]], nan)
        output = np.zeros(len(rows), np.int64)
        output[seen] = given[index[seen]]
        arrays: dict[str, Any] = {name: np.array(values, np.int64) for name, values in ints.items()}
        arrays |= {name: np.array(values, np.float64) for name, values in floats.items()}
        requests = Requests(id=[row.id for row in rows], output=output, last_token_s=last, **arrays)
        events = sorted(self.events, key=lambda event: event.time_s)
        return Outcome(self.scenario, requests, engines, events, dict(self.worlds))
