"""The ranks of an instance: work, then a collective that none leaves before all have come, layer after layer.

A step has two points in each layer at which all ranks meet, so how long it takes is a sum of maxima; that is all `step`
computes. Random numbers come by chunks of steps, each from a seed of its own, so that what every rank did in any step
can be told again afterwards to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tailscope.sim.outcome import START_NS, Floats, Ints, ns
from tailscope.sim.scenario import Fault, Scenario

#: Steps whose random numbers are drawn together.
CHUNK = 256
#: Steps after which another expert is the hottest: a minute or so. A multiple of CHUNK.
HOT_STEPS = 4_096
#: What seeds begin with, so that chunks and hot experts are drawn from streams of their own.
WORK_STREAM, HOT_STREAM = 1, 2
#: (token, expert) pairs of a layer, which say how uneven even routing is by chance.
ROUTED = 2_048
#: Least share of its even load that a rank gets: weights are read whatever the tokens.
LEAST_LOAD = 0.05
#: Least share of `straggle_s` by which a rank leaves a collective after the transfer.
LEAST_STRAGGLE = 0.1


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


@dataclass(frozen=True)
class _Slow:
    """What applies in a step: factors of work (layers × 2 × ranks), of the transfers of all (layers × 2) and of the
    engines' own (layers × engines). None: as ever."""

    work: Floats | None = None
    everyone: Floats | None = None
    engines: Floats | None = None


NOTHING_SLOW = _Slow()


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
        self.places = DENSE if not self.moe else MOE_TP if self.tp > 1 else MOE
        #: When each step began, and what its engines' ranks had to do, s.
        self.starts: list[float] = []
        self.costs: list[tuple[float, ...]] = []
        self._seed = (seed, replica)
        self._phases = ("attention", self.places[-1].after)
        self._faults = [
            fault
            for fault in scenario.faults
            if fault.kind in ("slow-rank", "slow-link") and fault.replica == replica
        ]
        self._check()
        self._slow = [self._slowed_by(fault) for fault in self._faults]
        #: More than one group within the world, so that the engines meet before all do.
        self._in_two = len(self.places) == 3
        self._transfer = np.full((settings.layers, 2), settings.transfer_s)
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
            known = self._phases if fault.kind == "slow-rank" else tuple(p.phase for p in self.places)
            if fault.phase is not None and fault.phase not in known:
                raise ValueError(
                    f"{fault.kind} in phase {fault.phase}: ranks have {', '.join(map(str, known))}"
                )
            if any(not 0 <= layer < settings.layers for layer in fault.layers):
                raise ValueError(f"{fault.kind} in layers {fault.layers}: there are {settings.layers}")

    # -- a step -----------------------------------------------------------------------------------

    def step(self, k: int, start_s: float, costs: Sequence[float]) -> tuple[float, float, float]:
        """(duration, part of it due to slow ranks, part due to slow links) of step k, s. Once for k = 0, 1, 2 …

        `costs`: seconds of work of each rank of each engine, noise included. A part is what the step would be shorter
        by, with the same random numbers, without the faults of that kind.
        """
        if k != len(self.starts):
            raise ValueError(f"step {k} comes after step {len(self.starts) - 1}")
        self.starts.append(start_s)
        self.costs.append(tuple(costs))
        noise, place = self._noise, k % CHUNK
        if noise.number != k // CHUNK:
            noise = self._noise = self._noise_of(k // CHUNK)
        work = noise.work[place] * self._cost_of(costs)
        if not self._faults:
            return self._duration(work, noise, place, NOTHING_SLOW), 0.0, 0.0
        slow = self._slow_in(start_s, noise.chance[place])
        slowed = work if slow.work is None else work * slow.work
        duration = self._duration(slowed, noise, place, slow)
        by_ranks = by_links = 0.0
        if slow.work is not None:
            by_ranks = duration - self._duration(work, noise, place, slow)
        if slow.everyone is not None:
            by_links = duration - self._duration(slowed, noise, place, NOTHING_SLOW)
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

    def _duration(self, work: Floats, noise: _Noise, place: int, slow: _Slow) -> float:
        ready = work + noise.before[place]
        meetings = self._meetings(ready, noise.engine_late[place], slow)
        return float(np.add.accumulate(meetings.ravel())[-1] + noise.last_late[place])

    def _meetings(self, ready: Floats, engine_late: Floats, slow: _Slow) -> Floats:
        """From each meeting of all ranks to the next, s: … × layers × 2. `ready`: … × layers × 2 × ranks, how long after
        a meeting each rank has done its work."""
        transfer = self._transfer if slow.everyone is None else self._transfer * slow.everyone
        last = np.maximum.reduce(ready, axis=-1)
        if self._in_two:
            engines = self._of_engines(ready[..., 0, :])
            engines = engines + (self._engine_transfer(slow) + engine_late)
            last[..., 0] = np.maximum.reduce(engines, axis=-1)
        return np.asarray(last + transfer)

    def _of_engines(self, values: Floats) -> Floats:
        """The largest of each engine's ranks."""
        by_engine = values.reshape(*values.shape[:-1], self.engines, self.tp)
        return np.asarray(np.maximum.reduce(by_engine, axis=-1))

    def _engine_transfer(self, slow: _Slow) -> float | Floats:
        return self.settings.transfer_s if slow.engines is None else self.settings.transfer_s * slow.engines

    # -- what is slow -----------------------------------------------------------------------------

    def _slowed_by(self, fault: Fault) -> _Slow:
        layers = self.settings.layers
        rows = list(fault.layers) if fault.layers else list(range(layers))
        if fault.kind == "slow-rank":
            work = np.ones((layers, 2, self.ranks))
            for column, phase in enumerate(self._phases):
                if fault.phase in (None, phase):
                    work[rows, column, fault.rank] = fault.factor
            return _Slow(work=work)
        everyone, engines = np.ones((layers, 2)), np.ones((layers, self.engines))
        for column, place in enumerate(p for p in self.places if p.everyone):
            if fault.phase in (None, place.phase):
                everyone[rows, column] = fault.factor
        if fault.phase in (None, "collective"):
            engines[rows, fault.rank // self.tp] = fault.factor
        return _Slow(everyone=everyone, engines=engines)

    def _slow_in(self, start_s: float, chance: Floats) -> _Slow:
        """What is slow in a step that begins at `start_s`."""
        work = everyone = engines = None
        for fault, slow, drawn in zip(self._faults, self._slow, chance, strict=True):
            if not fault.holds_at(start_s):
                continue
            if drawn >= fault.often:
                continue
            work = _both(work, slow.work)
            everyone, engines = _both(everyone, slow.everyone), _both(engines, slow.engines)
        return _Slow(work, everyone, engines)

    # -- chance -----------------------------------------------------------------------------------

    def _draw(self, number: int) -> _Noise:
        """The random numbers of steps from number × CHUNK on, whoever asks and when."""
        settings, ranks = self.settings, self.ranks
        rng = np.random.default_rng([WORK_STREAM, *self._seed, number])
        of_layers = (CHUNK, settings.layers)
        work = np.exp(settings.spread * rng.standard_normal((*of_layers, 2, ranks)))
        work[:, :, 0] *= settings.attention_share / settings.layers
        work[:, :, 1] *= (1 - settings.attention_share) / settings.layers
        if self.moe:
            work[:, :, 1] *= self._load(number, rng.standard_normal((*of_layers, ranks)))
        straggle = rng.uniform(LEAST_STRAGGLE, 1.0, (*of_layers, len(self.places), ranks))
        straggle *= settings.straggle_s
        before = np.zeros((*of_layers, 2, ranks))
        before[:, :, 1] = straggle[:, :, -2]
        before[:, 1:, 0] = straggle[:, :-1, -1]
        return _Noise(
            number,
            work,
            straggle,
            before,
            self._of_engines(straggle[:, :, 0]),
            np.asarray(straggle[:, -1, -1].max(axis=-1)),
            rng.random((CHUNK, len(self._faults))),
        )

    def hot_expert(self, k: int) -> int:
        """The expert that gets most tokens in step k; the same in all layers."""
        rng = np.random.default_rng([HOT_STREAM, *self._seed, k // HOT_STEPS])
        return int(rng.integers(self.settings.experts))

    def rank_of(self, expert: int) -> int:
        return expert * self.ranks // self.settings.experts

    def _load(self, number: int, drawn: Floats) -> Floats:
        """What the experts of each rank have to do, over an even share: multinomial, in its normal approximation."""
        settings = self.settings
        # A token goes to an expert once at most.
        hottest = min(1 / settings.experts + settings.hot, 1 / settings.topk)
        cold = (1 - hottest) / max(settings.experts - 1, 1)
        share = np.zeros(self.ranks)
        hot_expert = self.hot_expert(number * CHUNK)
        for expert in range(settings.experts):
            share[self.rank_of(expert)] += hottest if expert == hot_expert else cold
        root = np.sqrt(share)
        # Shares sum to one, so the ranks' deviations sum to none.
        deviation = root * (drawn - root * (drawn @ root)[..., None]) / np.sqrt(ROUTED)
        return np.asarray(np.maximum((share + deviation) * self.ranks, LEAST_LOAD))

    # -- afterwards -------------------------------------------------------------------------------

    def between(self, from_s: float, to_s: float) -> tuple[int, int]:
        """(first, last + 1) of the steps that began in a time."""
        first, stop = np.searchsorted(self.starts, [from_s, to_s])
        return int(first), int(stop)

    def timelines(self, first: int, stop: int) -> Timeline:
        """What the ranks did in the steps from `first` to before `stop`."""
        parts = [
            self._lived(low, self.starts[low:high], self.costs[low:high])
            for low, high in _by_chunk(first, stop)
        ]
        columns = ("start_s", "duration_s", "begin", "arrival", "leave")
        return Timeline(first, *(np.concatenate([getattr(part, c) for part in parts]) for c in columns))

    def timeline(self, k: int, start_s: float, costs: Sequence[float]) -> Timeline:
        """What the ranks did in one step: its duration is what `step` said, bit for bit."""
        return self._lived(k, [start_s], [tuple(costs)])

    def _lived(self, first: int, starts: Sequence[float], costs: Sequence[tuple[float, ...]]) -> Timeline:
        """The same sums as in `step`, with what they are made of, for steps of one chunk."""
        noise, rows = self._noise_of(first // CHUNK), slice(first % CHUNK, first % CHUNK + len(starts))
        work = noise.work[rows].copy()
        slow = [self._slow_in(s, chance) for s, chance in zip(starts, noise.chance[rows], strict=True)]
        for step, (cost, what) in enumerate(zip(costs, slow, strict=True)):
            work[step] *= self._cost_of(cost)
            if what.work is not None:
                work[step] *= what.work
        links = _Slow(
            None,
            _stacked([what.everyone for what in slow], self._transfer.shape),
            _stacked([what.engines for what in slow], (len(self._transfer), self.engines)),
        )
        before, straggle = noise.before[rows], noise.straggle[rows]
        ready = work + before
        meetings = self._meetings(ready, noise.engine_late[rows], links)
        ends = np.add.accumulate(meetings.reshape(len(starts), -1), axis=1)
        met = np.concatenate([np.zeros((len(starts), 1)), ends[:, :-1]], axis=1)
        met, ends = (values.reshape(*meetings.shape, 1) for values in (met, ends))
        begin, arrival, leave = met + before, met + ready, ends + straggle[:, :, [-2, -1]]
        if self._in_two:
            together = met[:, :, 0] + self._of_engines(ready[:, :, 0]) + self._engine_transfer(links)
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
        return ns(seconds + offset + drift * 1e-6 * seconds, START_NS)

    def _by_rank(self, values: tuple[float, ...], rank: int) -> float:
        if rank < len(values):
            return values[rank]
        first = next(r for r in range(self.ranks) if self.host_of(r) == self.host_of(rank))
        return values[first] if first < len(values) else 0.0


def _both(one: Floats | None, other: Floats | None) -> Floats | None:
    if one is None or other is None:
        return other if one is None else one
    return one * other


def _stacked(factors: Sequence[Floats | None], shape: tuple[int, ...]) -> NDArray[np.float64]:
    return np.stack([np.ones(shape) if f is None else f for f in factors])


def _by_chunk(first: int, stop: int) -> list[tuple[int, int]]:
    edges = [first, *range((first // CHUNK + 1) * CHUNK, stop, CHUNK), stop]
    return [(low, high) for low, high in pairwise(edges) if low < high]
