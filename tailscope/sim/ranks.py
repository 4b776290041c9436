"""The ranks of an instance: work, then a collective that none leaves before all have come, layer after layer.

A step has two points in each layer at which all ranks meet, so how long it takes is a sum of maxima; that is all `step`
computes. Only where ranks exchange parts of their own (`exchange` = all-to-all) do they not meet, and each is followed
from place to place. Random numbers come by chunks of steps, each from a seed of its own, so that what every rank did in
any step can be told again afterwards to the last bit, and what it had taken without a fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from tailscope.sim.experts import Experts, blocks, split
from tailscope.sim.outcome import START_NS, Floats, Ints, ns
from tailscope.sim.rank_faults import KINDS, NOTHING_SLOW, Shape, Slow, total
from tailscope.sim.scenario import Scenario

#: Steps whose random numbers are drawn together.
CHUNK = 256
#: What seeds begin with, so that chunks are drawn from a stream of their own.
WORK_STREAM = 1
#: Least share of `straggle_s` by which a rank leaves a collective after the transfer.
LEAST_STRAGGLE = 0.1
#: Width of the model, and bytes of an element: for sizes of messages.
HIDDEN, ELEMENT = 4_096, 2


@dataclass(frozen=True)
class Place:
    """A collective that every layer has: among all ranks or those of an engine, after work of a phase (None: at once)."""

    kind: str
    phase: str
    everyone: bool
    after: str | None


DENSE = (
    Place("all_reduce", "collective", True, "attention"),
    Place("all_reduce", "collective", True, "mlp"),
)
MOE = (
    Place("all_gather", "dispatch", True, "attention"),
    Place("reduce_scatter", "combine", True, "expert"),
)
#: With tensor parallelism the engines' own ranks meet first.
MOE_TP = (
    Place("all_reduce", "collective", False, "attention"),
    Place("all_gather", "dispatch", True, None),
    Place("reduce_scatter", "combine", True, "expert"),
)
ALL_TO_ALL = "all_to_all"


def places_of(scenario: Scenario) -> tuple[Place, ...]:
    """The collectives of a layer, in order."""
    if not scenario.engine.moe:
        return DENSE
    places = MOE_TP if scenario.ranks.tensor_parallel > 1 else MOE
    if scenario.ranks.exchange == "all-gather":
        return places
    return tuple(replace(p, kind=ALL_TO_ALL) if p.everyone else p for p in places)


@dataclass(frozen=True)
class Timeline:
    """What the ranks did in consecutive steps from `first` on.

    `begin`, `arrival`, `leave`: steps × layers × places × ranks, seconds since the step's own start: when a rank began
    the work before the collective (of the phase `Place.after`), came, and left. `start_s`, `duration_s`: of each step.
    """

    first: int
    start_s: Floats
    duration_s: Floats
    begin: Floats
    arrival: Floats
    leave: Floats


@dataclass(frozen=True)
class _Noise:
    """What chance does in a chunk of steps; all but the first have a leading axis of steps."""

    number: int
    #: Share of a step's cost that each piece of work takes: layers × 2 × ranks.
    work: Floats
    #: What the experts of each rank get, over an even share: layers × ranks; None without experts.
    load: Floats | None
    #: How late ranks leave each collective, s: layers × places × ranks.
    straggle: Floats
    #: How late they begin each piece of work because of that: layers × 2 × ranks.
    before: Floats
    #: How late the last of an engine leaves its own collective: layers × engines.
    engine_late: Floats
    #: How late the last rank leaves the step.
    last_late: Floats
    #: By fault: below its `often` it applies.
    chance: Floats


class RankWorld:
    """The ranks of instance `instance`, replica number `replica`; see `step`.

    Rank r is tensor-parallel rank r % tp of engine r // tp. Experts lie on all ranks of the instance, in order; their
    work is that of all engines together, so that a rank's is its share of the engines' mean cost.
    """

    def __init__(self, scenario: Scenario, instance: str, replica: int, seed: int) -> None:
        self.instance = instance
        self.settings = settings = scenario.ranks
        self.engines, self.tp = scenario.engine.data_parallel, settings.tensor_parallel
        self.ranks = self.engines * self.tp
        self.moe = scenario.engine.moe
        self.places = places_of(scenario)
        #: When each step began, what its engines' ranks had to do (s), and the tokens and requests of their batches.
        self.starts: list[float] = []
        self.costs: list[tuple[float, ...]] = []
        self.tokens: list[tuple[int, ...]] = []
        self.requests: list[int] = []
        #: Seconds of the last step in which no rank's host launched anything.
        self.held_s = 0.0
        #: Steps that begin with such a time, and those in which a host stands still: (fault, number of the pause).
        self._stalls: dict[int, float] = {}
        self._pauses: dict[int, list[tuple[int, int]]] = {}
        self.seed = (seed, replica)
        self.experts = Experts(settings, self.ranks, self.seed)
        self._phases = ("attention", self.places[-1].after)
        self._faults = [f for f in scenario.faults if f.kind in KINDS and f.replica == replica]
        self._check()
        meetings = [place for place in self.places if place.everyone]
        self._all_to_all = meetings[0].kind == ALL_TO_ALL
        self._shape = Shape(
            settings.layers, self.ranks, self.tp, self._phases, [m.phase for m in meetings], self._all_to_all
        )
        self._slow = [self._shape.slowed_by(fault) for fault in self._faults]
        self._pausing = [(i, f) for i, f in enumerate(self._faults) if f.kind == "host-slow" and f.every_s]
        self._paused = [0] * len(self._faults)
        #: More than one group within the world, so that the engines meet before all do.
        self._in_two = len(self.places) == 3
        self._transfer = np.full((settings.layers, 2), settings.transfer_s)
        self._bias = np.zeros(self.ranks)
        self._bias[: len(settings.leave_bias_s)] = settings.leave_bias_s
        self._cost = np.empty((2, self.ranks))
        self._noise_of = lru_cache(maxsize=2)(self._draw)
        self._noise = self._noise_of(0)

    def _check(self) -> None:
        settings = self.settings
        if self.engines > 1 and not self.moe:
            raise ValueError(
                "data-parallel engines without experts do not wait for each other: make replicas of them"
            )
        if self.moe and settings.experts < self.ranks:
            raise ValueError(f"{settings.experts} experts are too few for {self.ranks} ranks")
        for fault in self._faults:
            if not 0 <= fault.rank < self.ranks:
                raise ValueError(f"{fault.kind} of rank {fault.rank}: there are {self.ranks} ranks")
            known = tuple(p.phase for p in self.places) if fault.kind == "slow-link" else self._phases
            if fault.phase is not None and fault.phase not in known:
                raise ValueError(
                    f"{fault.kind} in phase {fault.phase}: ranks have {', '.join(map(str, known))}"
                )
            if any(not 0 <= layer < settings.layers for layer in fault.layers):
                raise ValueError(f"{fault.kind} in layers {fault.layers}: there are {settings.layers}")

    # -- a step -----------------------------------------------------------------------------------

    def step(
        self,
        k: int,
        start_s: float,
        costs: Sequence[float],
        tokens: Sequence[int] = (),
        requests: int = 0,
        stall_s: float = 0.0,
    ) -> tuple[float, float, float]:
        """(duration, part of it due to slow ranks and their hosts, part due to slow links) of step k, s. Once for k = 0, 1, 2 …

        `costs`: seconds of work of each rank of each engine, noise included. `tokens`: of each engine's batch, where sizes
        count; `requests`: of all. `stall_s`: before any rank's first kernel. A part is what the step would be shorter by, with
        the same random numbers, without the faults of that kind; `held_s` is that of what holds up the hosts of all ranks.
        """
        if k != len(self.starts):
            raise ValueError(f"step {k} comes after step {len(self.starts) - 1}")
        self.starts.append(start_s)
        self.costs.append(tuple(costs))
        self.tokens.append(tuple(tokens))
        self.requests.append(requests)
        noise, place = self._noise, k % CHUNK
        if noise.number != k // CHUNK:
            noise = self._noise = self._noise_of(k // CHUNK)
        work = noise.work[place] * self._cost_of(costs)
        self.held_s = 0.0
        if stall_s:
            self._stalls[k] = stall_s
        if not self._faults and not stall_s:
            return self._duration(work, noise, place, k, NOTHING_SLOW), 0.0, 0.0
        if self._pausing:
            self._note_pauses(k, start_s)
        slow = self._slow_in(k, start_s, noise.chance[place])
        duration = self._duration(work, noise, place, k, slow)
        by_ranks = by_links = 0.0
        if slow.has_ranks:
            by_ranks = duration - self._duration(work, noise, place, k, slow.without_ranks())
        if slow.has_links:
            by_links = duration - self._duration(work, noise, place, k, slow.without_links())
        if slow.held is not None:
            self.held_s = duration - self._duration(work, noise, place, k, slow._replace(held=None))
        return duration, by_ranks, by_links

    def _cost_of(self, costs: Sequence[float]) -> float | Floats:
        """Seconds of a step's work by phase (attention, the rest) and rank; one number where all are alike."""
        if self.engines == 1:
            return costs[0]
        total = 0.0
        for cost in costs:
            total += cost
        self._cost[0] = [cost for cost in costs for _ in range(self.tp)]
        self._cost[1] = total / self.engines
        return self._cost

    def _duration(self, work: Floats, noise: _Noise, place: int, k: int, slow: Slow) -> float:
        if slow.work is not None:
            work = work * slow.work
        everyone, engines = self._transfers(k, noise, place, slow)
        if self._all_to_all:
            waits = _waits(slow)
            leave = self._followed(work, waits, noise.straggle[place], everyone, engines, slow.pairs)[2]
            return float(leave[-1, -1].max())
        ready = work + _later(noise.before[place], _waits(slow))
        meetings = self._meetings(ready, noise.engine_late[place], everyone, engines)
        return float(np.add.accumulate(meetings.ravel())[-1] + noise.last_late[place])

    def _meetings(
        self, ready: Floats, engine_late: Floats, everyone: Floats, engines: float | Floats
    ) -> Floats:
        """From each meeting of all ranks to the next, s: … × layers × 2. `ready`: … × layers × 2 × ranks, how long after
        a meeting each rank has done its work."""
        last = np.maximum.reduce(ready, axis=-1)
        if self._in_two:
            own = self._of_engines(ready[..., 0, :])
            own = own + (engines + engine_late)
            last[..., 0] = np.maximum.reduce(own, axis=-1)
        return np.asarray(last + everyone)

    def _followed(
        self,
        work: Floats,
        waits: Floats | None,
        straggle: Floats,
        everyone: Floats,
        engines: float | Floats,
        pairs: Floats | None,
    ) -> tuple[Floats, Floats, Floats]:
        """(begin, arrival, leave) of each rank from place to place: … × layers × places × ranks.

        `everyone`: … × layers × 2 × ranks, how long each takes to get its part; `pairs`: factors of that by sender.
        """
        begin, arrival, leave = (np.empty_like(straggle) for _ in range(3))
        left = np.zeros(straggle[..., 0, 0, :].shape)
        engines = np.broadcast_to(engines, (*straggle.shape[:-2], self.engines))
        for layer in range(straggle.shape[-3]):
            for index, place in enumerate(self.places):
                column = 0 if place.after in (None, "attention") else 1
                started = left
                if place.after and waits is not None:
                    started = left + waits[..., layer, column, :]
                came = started + work[..., layer, column, :] if place.after else started
                if not place.everyone:
                    met = np.repeat(self._of_engines(came) + engines[..., layer, :], self.tp, axis=-1)
                elif pairs is None:
                    met = came.max(axis=-1, keepdims=True) + everyone[..., layer, column, :]
                else:
                    taken = everyone[..., layer, column, None, :] * pairs[..., layer, column, :, :]
                    met = (came[..., :, None] + taken).max(axis=-2)
                left = met + straggle[..., layer, index, :]
                begin[..., layer, index, :], arrival[..., layer, index, :] = started, came
                leave[..., layer, index, :] = left
        return begin, arrival, leave

    def _of_engines(self, values: Floats) -> Floats:
        """The largest of each engine's ranks."""
        by_engine = values.reshape(*values.shape[:-1], self.engines, self.tp)
        return np.asarray(np.maximum.reduce(by_engine, axis=-1))

    # -- transfers --------------------------------------------------------------------------------

    def _transfers(self, k: int, noise: _Noise, place: int, slow: Slow) -> tuple[Floats, float | Floats]:
        """Seconds of step k's transfers: of all ranks (layers × 2, in an all-to-all × ranks), of engines (× engines)."""
        everyone, engines = self._transfer, self.settings.transfer_s
        own: float | Floats = engines
        if self._all_to_all:
            everyone = everyone[..., None]
        if self.settings.bandwidth_gb_s:
            of_all, of_engines = self._bytes(k, noise, place)
            second = self.settings.bandwidth_gb_s * 1e9
            everyone, own = everyone + of_all / second, engines + of_engines / second
        if slow.everyone is not None:
            everyone = everyone * slow.everyone
        return everyone, own if slow.engines is None else own * slow.engines

    def _bytes(self, k: int, noise: _Noise, place: int) -> tuple[Floats, Floats]:
        """Bytes of step k's messages, as `_transfers` has their times."""
        tokens = np.array(self.tokens[k], np.int64)
        if len(tokens) != self.engines:
            raise ValueError(
                f"step {k}: where sizes count, the tokens of {self.engines} engines must be told"
            )
        row = HIDDEN * ELEMENT
        of_engines = np.broadcast_to(tokens * float(row), (self.settings.layers, self.engines))
        if not self.moe:
            return np.full((self.settings.layers, 2), tokens[0] * float(row)), of_engines
        if self._all_to_all and noise.load is not None:
            rows = self.exchanged(tokens, noise.load[place])
            return np.stack([rows.sum(axis=-2), rows.sum(axis=-1)], axis=1) * float(row), of_engines
        whole = -(-int(tokens.max()) // self.tp) * self.ranks
        return np.full((self.settings.layers, 2), whole * float(row)), of_engines

    def exchanged(self, tokens: Ints, load: Floats) -> Ints:
        """Rows that each rank sends to the experts of each: … × layers × senders × receivers.

        `tokens`: of the engines' batches (… × engines), which their ranks share; `load`: … × layers × ranks.
        """
        of_ranks = np.repeat(-(-tokens // self.tp), self.tp, axis=-1) * self.settings.topk
        share = load / load.sum(axis=-1, keepdims=True)
        return split(np.broadcast_to(of_ranks[..., None, :], load.shape), share)

    def loads(self, first: int, stop: int) -> Floats:
        """What the experts of each rank got, over an even share, in steps: steps × layers × ranks. Of a `moe` only."""
        parts = []
        for low, high in blocks(first, stop, CHUNK):
            load = self._noise_of(low // CHUNK).load
            assert load is not None, "a dense model has no experts"
            parts.append(load[low % CHUNK : low % CHUNK + high - low])
        return np.concatenate(parts)

    # -- what is slow -----------------------------------------------------------------------------

    def _note_pauses(self, k: int, start_s: float) -> None:
        """Which pauses of hosts have become due since the step before: they strike in this one."""
        for place, fault in self._pausing:
            if fault.every_s is None or not fault.holds_at(start_s):
                continue
            due = int((start_s - fault.from_s) / fault.every_s) + 1
            if due > self._paused[place]:
                self._paused[place] = due
                self._pauses.setdefault(k, []).append((place, due - 1))

    def _slow_in(self, k: int, start_s: float, chance: Floats) -> Slow:
        """What is slow in step k, which begins at `start_s`."""
        found = NOTHING_SLOW
        for fault, slow, drawn in zip(self._faults, self._slow, chance, strict=True):
            if not fault.holds_at(start_s):
                continue
            if drawn >= fault.often:
                continue
            if fault.kind == "host-slow":
                if fault.every_s is not None:
                    continue
                seconds = fault.length_s + fault.per_request_s * self.requests[k]
                slow = Slow(idle=_times(slow.idle, seconds), held=_times(slow.held, seconds))
            found = slow if found is NOTHING_SLOW else found.both(slow)
        for place, number in self._pauses.get(k, ()):
            found = found.both(self._shape.pause(self._faults[place], number))
        if k in self._stalls:
            stall = np.zeros((self.settings.layers, 2, self.ranks))
            stall[0, 0] = self._stalls[k]
            found = found.both(Slow(held=stall))
        return found

    # -- chance -----------------------------------------------------------------------------------

    def _draw(self, number: int) -> _Noise:
        """The random numbers of steps from number × CHUNK on, whoever asks and when."""
        settings, ranks = self.settings, self.ranks
        rng = np.random.default_rng([WORK_STREAM, *self.seed, number])
        of_layers = (CHUNK, settings.layers)
        load = None
        work = np.exp(settings.spread * rng.standard_normal((*of_layers, 2, ranks)))
        work[:, :, 0] *= settings.attention_share / settings.layers
        work[:, :, 1] *= (1 - settings.attention_share) / settings.layers
        if self.moe:
            load = self.experts.load(number * CHUNK, rng.standard_normal((*of_layers, ranks)))
            work[:, :, 1] *= load if settings.follow == 1.0 else 1.0 + settings.follow * (load - 1.0)
        straggle = rng.uniform(LEAST_STRAGGLE, 1.0, (*of_layers, len(self.places), ranks))
        straggle *= settings.straggle_s
        if settings.leave_bias_s:
            straggle += self._bias
        before = np.zeros((*of_layers, 2, ranks))
        before[:, :, 1] = straggle[:, :, -2]
        before[:, 1:, 0] = straggle[:, :-1, -1]
        return _Noise(
            number,
            work,
            load,
            straggle,
            before,
            self._of_engines(straggle[:, :, 0]),
            np.asarray(straggle[:, -1, -1].max(axis=-1)),
            rng.random((CHUNK, len(self._faults))),
        )

    def hot_expert(self, k: int) -> int:
        return self.experts.hottest(k)

    def rank_of(self, expert: int) -> int:
        return self.experts.rank_of(expert)

    # -- afterwards -------------------------------------------------------------------------------

    def between(self, from_s: float, to_s: float) -> tuple[int, int]:
        """(first, last + 1) of the steps that began in a time."""
        first, stop = np.searchsorted(self.starts, [from_s, to_s])
        return int(first), int(stop)

    def timelines(self, first: int, stop: int) -> Timeline:
        """What the ranks did in the steps from `first` to before `stop`."""
        parts = [
            self._lived(low, self.starts[low:high], self.costs[low:high])
            for low, high in blocks(first, stop, CHUNK)
        ]
        columns = ("start_s", "duration_s", "begin", "arrival", "leave")
        return Timeline(first, *(np.concatenate([getattr(part, c) for part in parts]) for c in columns))

    def timeline(self, k: int, start_s: float, costs: Sequence[float]) -> Timeline:
        """What the ranks did in one step: its duration is what `step` said, bit for bit."""
        return self._lived(k, [start_s], [tuple(costs)])

    def _lived(self, first: int, starts: Sequence[float], costs: Sequence[tuple[float, ...]]) -> Timeline:
        """The same sums as in `step`, with what they are made of, for steps of one chunk."""
        noise, count = self._noise_of(first // CHUNK), len(starts)
        low = first % CHUNK
        rows = slice(low, low + count)
        work = noise.work[rows].copy()
        slow = [
            self._slow_in(first + i, s, chance)
            for i, (s, chance) in enumerate(zip(starts, noise.chance[rows], strict=True))
        ]
        for step, (cost, what) in enumerate(zip(costs, slow, strict=True)):
            work[step] *= self._cost_of(cost)
            if what.work is not None:
                work[step] *= what.work
        moved = [self._transfers(first + i, noise, low + i, what) for i, what in enumerate(slow)]
        everyone = np.stack([of_all for of_all, _ in moved])
        of_engines = (self.settings.layers, self.engines)
        engines = np.stack([np.broadcast_to(own, of_engines) for _, own in moved])
        waits = _stacked([_waits(what) for what in slow], 0.0)
        if self._all_to_all:
            pairs = _stacked([what.pairs for what in slow], 1.0)
            lived = self._followed(work, waits, noise.straggle[rows], everyone, engines, pairs)
            return Timeline(first, np.array(starts), lived[2][:, -1, -1].max(axis=-1), *lived)
        before, straggle = _later(noise.before[rows], waits), noise.straggle[rows]
        ready = work + before
        meetings = self._meetings(ready, noise.engine_late[rows], everyone, engines)
        ends = np.add.accumulate(meetings.reshape(count, -1), axis=1)
        met = np.concatenate([np.zeros((count, 1)), ends[:, :-1]], axis=1)
        met, ends = (values.reshape(*meetings.shape, 1) for values in (met, ends))
        begin, arrival, leave = met + before, met + ready, ends + straggle[:, :, [-2, -1]]
        if self._in_two:
            together = met[:, :, 0] + self._of_engines(ready[:, :, 0]) + engines
            left = np.repeat(together, self.tp, axis=-1) + straggle[:, :, 0]
            begin, arrival, leave = (
                np.stack([values[:, :, 0], left, values[:, :, 1]], axis=2)
                for values in (begin, arrival, leave)
            )
            leave[:, :, 0], leave[:, :, 1] = left, ends[:, :, 0] + straggle[:, :, 1]
        duration = ends[:, -1, -1, 0] + noise.last_late[rows]
        return Timeline(first, np.array(starts), duration, begin, arrival, leave)

    def host_of(self, rank: int) -> int:
        return rank * self.settings.hosts // self.ranks

    def clock_ns(self, rank: int, seconds: Floats) -> Ints:
        """Unix ns that a rank's clock shows; where the scenario gives it none, that of the first rank of its host."""
        offset, drift = (self._by_rank(v, rank) for v in (self.settings.offset_s, self.settings.drift_ppm))
        shown = seconds + offset + drift * 1e-6 * seconds
        for host, at_s, jump_s in self.settings.clock_steps:
            if host == self.host_of(rank):
                shown = shown + np.where(seconds >= at_s, jump_s, 0.0)
        return ns(shown, START_NS)

    def _by_rank(self, values: tuple[float, ...], rank: int) -> float:
        if rank < len(values):
            return values[rank]
        first = next(r for r in range(self.ranks) if self.host_of(r) == self.host_of(rank))
        return values[first] if first < len(values) else 0.0


def _waits(slow: Slow) -> Floats | None:
    return total(slow.idle, slow.held)


def _later(before: Floats, waits: Floats | None) -> Floats:
    return before if waits is None else before + waits


def _times(values: Floats | None, factor: float) -> Floats | None:
    return None if values is None else values * factor


def _stacked(values: Sequence[Floats | None], usual: float) -> Floats | None:
    """By step, `usual` where nothing is said; None where it is of no step."""
    shape = next((v.shape for v in values if v is not None), None)
    if shape is None:
        return None
    return np.stack([np.full(shape, usual) if v is None else v for v in values])
