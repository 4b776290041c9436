"""Torch worlds for tests: ranks that work, then meet in a collective that none leaves before all have come.

Every nanosecond is known: `live` says when each rank came and left by one true clock, `tables` what its profile shows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import worlds
from numpy.typing import NDArray

from tailscope.model import Finding
from tailscope.schema import BY_NAME

START_NS = worlds.START_NS
US, MS, S = 1_000, 1_000_000, 1_000_000_000
HOSTS = tuple("abcdefghijklmnop")
OFFSETS_MS = (0.0, 0.1, 0.5, 2.0, 20.0)

#: Kind and phase of each layer's collectives, in order: after attention in the TP group, before and after the experts.
LAYOUTS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "moe": {
        "tp": ("all_reduce", "collective"),
        "in": ("all_gather", "dispatch"),
        "out": ("reduce_scatter", "combine"),
    },
    "all_to_all": {
        "tp": ("all_reduce", "collective"),
        "in": ("all_to_all", "dispatch"),
        "out": ("all_to_all", "combine"),
    },
    "dense": {
        "tp": ("all_reduce", "collective"),
        "in": ("all_reduce", "collective"),
        "out": ("all_reduce", "collective"),
    },
}


@dataclass(frozen=True)
class Slow:
    """A rank whose work takes `factor` times as long: in a phase, in a layer, in some steps, or always."""

    rank: int
    factor: float
    phase: str | None = "expert"
    layer: int | None = None
    steps: tuple[int, ...] | None = None

    def at(self, step: int, layer: int, phase: str) -> bool:
        return (
            self.phase in (None, phase)
            and self.layer in (None, layer)
            and (self.steps is None or step in self.steps)
        )


@dataclass(frozen=True)
class World:
    """What there is, how it runs, and what of it the profiles show. Tuples count by rank; empty means 0 for each."""

    name: str = "w"
    seed: int = 0
    ranks: int = 4
    #: Ranks of a tensor-parallel group; further groups are data-parallel engines beside the first.
    tp: int = 1
    steps: int = 10
    layers: int = 4
    windows: int = 1
    pause_ns: float = 5 * S
    layout: str = "moe"
    attention_ns: float = 600 * US
    expert_ns: float = 900 * US
    between_ns: float = 300 * US
    transfer_ns: float = 80 * US
    #: Spread (of the logarithm) of each piece of work, and of a step's load, which all ranks share.
    noise: float = 0.05
    load: float = 0.0
    #: How much later than it could a rank leaves a collective, at most, in ns.
    straggle_ns: float = 10 * US
    #: How much later than that each rank leaves, always.
    leaves_late_ns: tuple[float, ...] = ()
    #: Every so many collectives one rank is held up when it leaves, for so long.
    hiccup_every: int = 0
    hiccup_ns: float = 0.0
    #: By how much longer the transfer of a collective takes, by its number.
    congested_ns: Mapping[int, float] = field(default_factory=dict)
    slow: tuple[Slow, ...] = ()
    #: named: groups and sequence numbers are known. plain: only kinds and order are.
    metadata: str = "plain"
    hosts: tuple[str, ...] = ()
    offset_ns: tuple[float, ...] = ()
    drift_ppm: tuple[float, ...] = ()
    #: Collectives by which a rank's profile begins after, and ends before, the first one's.
    begins_late: tuple[int, ...] = ()
    ends_early: tuple[int, ...] = ()
    #: Collectives, counted from the first, that the profile of a rank lost.
    dropped: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    absent: tuple[int, ...] = ()
    #: Ranks of which there is a second profile, of half the collectives, at the same time.
    twice: tuple[int, ...] = ()
    #: Passes without a step before each step, and how much higher each rank counts its steps.
    dummies: int = 0
    step_shift: tuple[int, ...] = ()
    #: Whether `tokens` holds the number of the collective, so that a test knows each row again.
    tokens_are_ids: bool = False
    #: Else the tokens that the experts of a rank get in each dispatch.
    tokens: Mapping[int, int] = field(default_factory=dict)
    #: Tokens routed in each layer of a step, as chance has it by the ranks' shares: by step, layer and rank, the first two
    #: repeated as often as needed. Each takes its rank's experts so long, beside `expert_ns`.
    routed: int = 0
    shares: tuple[tuple[tuple[float, ...], ...], ...] = ()
    token_ns: float = 0.0
    tells_tokens: bool = True

    def of(self, values: Sequence[Any], rank: int, default: Any = 0) -> Any:
        return values[rank] if values else default


@dataclass
class Round:
    """One collective as it was, by the true clock, ns since the world began."""

    id: int
    kind: str
    phase: str
    group: str
    seq: int
    step: int | None
    layer: int
    ranks: tuple[int, ...]
    came: dict[int, float]
    left: dict[int, float]
    #: What each rank did since the collective before: phase -> ns.
    work: dict[int, dict[str, float]]
    #: Tokens that each rank got in it, where they are routed by chance.
    tokens: dict[int, int] = field(default_factory=dict)

    @property
    def last(self) -> int:
        return max(self.ranks, key=lambda r: self.came[r])

    def wait(self, rank: int) -> float:
        return max(self.came.values()) - self.came[rank]

    @property
    def caused(self) -> float:
        """How much sooner all would have come without the last one."""
        first, second = sorted(self.came.values(), reverse=True)[:2]
        return first - second


@dataclass
class Lived:
    """What became of a world: its collectives by window, and the ops between them."""

    world: World
    windows: list[list[Round]] = field(default_factory=list)
    #: (window, rank) -> (phase, layer, step, start, end) of its work.
    ops: dict[tuple[int, int], list[tuple[str, int, int | None, float, float]]] = field(default_factory=dict)

    def shown(self, rank: int, window: int = 0) -> list[Round]:
        """The collectives in a rank's profile."""
        mine = [r for r in self.windows[window] if rank in r.ranks]
        world = self.world
        first, cut = world.of(world.begins_late, rank), world.of(world.ends_early, rank)
        dropped = set(world.dropped.get(rank, ()))
        return [r for i, r in enumerate(mine) if first <= i < len(mine) - cut and i not in dropped]

    def clock(self, rank: int, times: Any) -> NDArray[np.int64]:
        """True times on a rank's clock."""
        world, times = self.world, np.asarray(times, np.float64)
        drift = world.of(world.drift_ppm, rank) * 1e-6
        offset = float(world.of(world.offset_ns, rank))
        return np.asarray(np.round(times + offset + drift * times), np.int64)


class _Life:
    """A world as it runs: when each rank is next free, and what it did since its last collective."""

    def __init__(self, world: World) -> None:
        self.world, self.lived = world, Lived(world)
        self.rng = np.random.default_rng(world.seed)
        self.everyone = tuple(range(world.ranks))
        self.engines = [self.everyone[i : i + world.tp] for i in range(0, world.ranks, world.tp)]
        self.now = np.zeros(world.ranks)
        self.done: list[dict[str, float]] = [{} for _ in self.everyone]
        self.rounds: list[Round] = []
        self.seqs: dict[str, int] = {}
        self.tokens: dict[int, int] = {}

    def route(self, step: int | None, layer: int) -> None:
        """Tokens of the layer that comes."""
        world = self.world
        if world.routed and step is not None:
            of_step = world.shares[step % len(world.shares)]
            shares = np.array(of_step[layer % len(of_step)])
            drawn = self.rng.multinomial(world.routed, shares / shares.sum())
            self.tokens = dict(enumerate(drawn.tolist()))
        else:
            self.tokens = {}

    def begin(self) -> None:
        """A window of profiles."""
        self.rounds, self.seqs = [], {}
        self.done = [{} for _ in self.everyone]
        self.lived.windows.append(self.rounds)

    def work(self, phase: str, mean_ns: float, step: int | None, layer: int) -> None:
        world = self.world
        common = np.exp(self.rng.normal(0, world.load)) if world.load else 1.0
        for rank in self.everyone:
            mine = world.token_ns * self.tokens.get(rank, 0) if phase == "expert" else 0.0
            took = (mean_ns + mine) * common * np.exp(self.rng.normal(0, world.noise))
            for slow in world.slow:
                if slow.rank == rank and step is not None and slow.at(step, layer, phase):
                    took *= slow.factor
            op = (phase, layer, step, self.now[rank], self.now[rank] + took)
            self.lived.ops.setdefault((len(self.lived.windows) - 1, rank), []).append(op)
            self.done[rank][phase] = self.done[rank].get(phase, 0.0) + took
            self.now[rank] += took

    def meet(self, place: str, groups: list[tuple[int, ...]], step: int | None, layer: int) -> None:
        world, now = self.world, self.now
        kind, phase = LAYOUTS[world.layout][place]
        for members in groups:
            group = "world" if len(members) == world.ranks else f"tp{members[0] // world.tp}"
            came = {rank: float(now[rank]) for rank in members}
            number = len(self.rounds)
            until = max(came.values()) + world.transfer_ns + world.congested_ns.get(number, 0.0)
            for rank in members:
                late = float(world.of(world.leaves_late_ns, rank))
                if world.hiccup_every and number % world.hiccup_every == 0 and rank == members[-1]:
                    late += world.hiccup_ns
                now[rank] = until + late + self.rng.uniform(0.1, 1.0) * world.straggle_ns
            left = {rank: float(now[rank]) for rank in members}
            did = {rank: self.done[rank] for rank in members}
            self.seqs[group] = self.seqs.get(group, -1) + 1
            seq = self.seqs[group]
            self.rounds.append(Round(number, kind, phase, group, seq, step, layer, members, came, left, did))
            if place == "in":
                self.rounds[-1].tokens = self.tokens
            for rank in members:
                self.done[rank] = {}


def live(world: World) -> Lived:
    life = _Life(world)
    for _ in range(world.windows):
        life.begin()
        for number in range(world.steps):
            for step in [*[None] * world.dummies, number]:
                life.work("between", world.between_ns, step, 0)
                for layer in range(world.layers):
                    life.work("attention", world.attention_ns, step, layer)
                    if world.tp > 1:
                        life.meet("tp", life.engines, step, layer)
                    life.route(step, layer)
                    life.meet("in", [life.everyone], step, layer)
                    life.work("expert", world.expert_ns, step, layer)
                    life.meet("out", [life.everyone], step, layer)
        life.now += world.pause_ns
    return life.lived


# -- rows -----------------------------------------------------------------------------------------


def source_of(world: World, window: int, rank: int, copy: int = 0) -> str:
    text = f"{world.name}/{window}/{rank}/{copy}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class _Columns:
    """Rows of a table, gathered by column."""

    def __init__(self, table: str) -> None:
        self.table = BY_NAME[table]
        self.columns: dict[str, list[Any]] = {}
        self.rows = 0

    def add(self, **values: Any) -> None:
        for name in values.keys() - self.columns.keys():
            self.columns[name] = [None] * self.rows
        for name, column in self.columns.items():
            column.append(values.get(name))
        self.rows += 1

    def arrow(self) -> pa.Table:
        return self.table.batch(dict(self.columns))


def tables(*lived: Lived | World) -> dict[str, pa.Table]:
    """`profiles`, `rank_events` and `iterations` of some worlds together."""
    gathered = {name: _Columns(name) for name in ("profiles", "rank_events", "iterations")}
    for one in lived:
        one = live(one) if isinstance(one, World) else one
        for window in range(len(one.windows)):
            for rank in range(one.world.ranks):
                for copy in range(1 + (rank in one.world.twice)):
                    if rank not in one.world.absent:
                        _show(one, window, rank, copy, gathered)
    return {name: columns.arrow() for name, columns in gathered.items() if columns.rows}


def write(folder: Path, *lived: Lived | World, parts: int = 1) -> Path:
    return worlds.write(folder, tables(*lived), parts)


def _show(lived: Lived, window: int, rank: int, copy: int, gathered: dict[str, _Columns]) -> None:
    world = lived.world
    rounds = lived.shown(rank, window)
    if copy:
        rounds = rounds[: len(rounds) // 2]
    if not rounds:
        return
    coordinates = {"dp": rank // world.tp, "pp": 0, "tp": rank % world.tp, "ep": rank}
    common = {
        "instance": world.name,
        "engine": rank // world.tp,
        "source": source_of(world, window, rank, copy),
        "rank": rank,
    }
    of_rank = {"world": world.name, "host": world.of(world.hosts, rank, "one"), **coordinates}
    begin, finish = rounds[0].came[rank], rounds[-1].left[rank]

    def at(time: float) -> int:
        return START_NS + int(lived.clock(rank, time))

    events = 0
    named = world.metadata == "named"
    steps: dict[int, tuple[float, float]] = {}
    for phase, layer, step, start, end in lived.ops[window, rank]:
        # The work before a profile's first collective is not in it.
        if start < begin or end > finish:
            continue
        if step is not None:
            low, high = steps.get(step, (start, end))
            steps[step] = min(low, start), max(high, end)
        if phase == "between":
            continue
        gathered["rank_events"].add(
            **common, **of_rank, step=_step(world, rank, step), layer=layer, phase=phase, name=f"{phase}_op",
            category="cpu_op", start_ns=at(start), duration_ns=at(end) - at(start),
        )  # fmt: skip
        events += 1
    for r in rounds:
        if r.step is not None:
            low, high = steps.get(r.step, (r.came[rank], r.left[rank]))
            steps[r.step] = min(low, r.came[rank]), max(high, r.left[rank])
        gathered["rank_events"].add(
            **common, **of_rank, step=_step(world, rank, r.step), layer=r.layer, phase=r.phase,
            name=f"gloo:{r.kind}", category="user_annotation", start_ns=at(r.came[rank]),
            duration_ns=at(r.left[rank]) - at(r.came[rank]), collective=r.kind, bytes_in=4096,
            group=r.group if named else None, group_size=len(r.ranks) if named else None,
            seq=r.seq if named else None,
            tokens=r.id if world.tokens_are_ids else _tokens(world, r, rank),
        )  # fmt: skip
        events += 1
    for step, (low, high) in sorted(steps.items()):
        gathered["iterations"].add(
            **common, iteration=_step(world, rank, step), start_ns=at(low), end_ns=at(high),
            prefill_tokens=0, decode_requests=1,
        )  # fmt: skip
    members = {r.group: list(r.ranks) for r in rounds}
    gathered["profiles"].add(
        **common, **of_rank, world_size=world.ranks, backend="gloo", groups=list(members.items()) if named else [],
        first_ns=at(begin), last_ns=at(finish), exported_ns=at(finish + 1 * MS), steps=len(steps), captures=0,
        events=events,
    )  # fmt: skip


def _tokens(world: World, r: Round, rank: int) -> int | None:
    if r.phase != "dispatch" or not world.tells_tokens:
        return None
    return r.tokens.get(rank, world.tokens.get(rank))


def _step(world: World, rank: int, step: int | None) -> int | None:
    return None if step is None else step + int(world.of(world.step_shift, rank))


def several(world: World, seeds: Sequence[int], **changes: Any) -> list[World]:
    """The world again with each seed, under names of their own."""
    return [replace(world, seed=seed, name=f"{world.name}-{seed}", **changes) for seed in seeds]


def apart(ranks: int, offset_ms: float) -> dict[str, Any]:
    """Each rank on a host of its own, clocks up to so much before and behind."""
    offsets = [offset_ms * MS * (1 if rank % 2 else -1) * rank / (ranks - 1) for rank in range(ranks)]
    return {"ranks": ranks, "hosts": HOSTS[:ranks], "offset_ns": tuple(offsets)}


def said(finding: Finding) -> tuple[str, str, str]:
    """The rank that a finding is about, how it is late, and where."""
    return finding.culprit.id, finding.culprit.detail["pattern"], finding.culprit.detail["where"]
