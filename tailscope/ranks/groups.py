"""Process groups: which collectives of which ranks belong together, and which are the same one."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailscope.ranks.clocks import median_of
from tailscope.ranks.collectives import (
    COMBINE,
    DISPATCH,
    EXCHANGE,
    KINDS,
    SYNCHRONISING,
    RankCollectives,
)
from tailscope.ranks.rounds import match
from tailscope.ranks.sequence import UNKNOWN, Ints, Sequence
from tailscope.ranks.windows import Window

#: Ranks read and matched beside each other: NumPy and DuckDB leave Python's lock alone.
BESIDE = 4
#: Values of ranks in rounds looked at together: memory does not grow with the window.
ROWS = 524_288


@dataclass(frozen=True)
class Group:
    """Collectives of some ranks matched: `place` is ranks x rounds, UNKNOWN where a rank has no part.

    `complete`: whether the ranks that the group should have are all there.
    """

    name: str
    complete: bool
    place: NDArray[np.int32]

    def some(self, rounds: slice) -> Group:
        return Group(self.name, self.complete, self.place[:, rounds])

    def slices(self) -> list[slice]:
        """The rounds in parts of which a value of each rank is held at a time."""
        size = max(1, ROWS // len(self.place))
        return [slice(first, first + size) for first in range(0, self.place.shape[1], size)]

    def parts(self) -> Iterator[Group]:
        return map(self.some, self.slices())


#: Rounds that clocks are told by, evenly taken: only who was in a collective at one time is asked of them.
MOST_TOLD = 4_096

#: A group: its name, the ranks it has by the profile, how many there should be (0: not known).
Key = tuple[str, tuple[int, ...], int]


def group_keys(window: Window, rank: RankCollectives) -> dict[Key, Ints]:
    """A rank's groups and the positions of its collectives on each.

    Where the profiler names no group, collectives outside of MoE exchanges are those of the tensor-parallel ranks of
    one engine, if there are several engines side by side; all others are the world's.
    """
    usable = rank.columns["kind"] >= 0
    keys: dict[Key, Ints] = {}
    for number, name in enumerate(rank.groups):
        mine = np.flatnonzero(usable & (rank.columns["group"] == number))
        members = tuple(rank.profile.groups.get(name, ()))
        size = (
            len(members) or int(rank.columns["group_size"][mine].max(initial=0)) or (window.world_size or 0)
        )
        keys[name, members, size] = mine
    unnamed = usable & (rank.columns["group"] == UNKNOWN)
    inside = np.zeros(len(unnamed), bool)
    if _several_engines(window):
        inside = ~np.isin(rank.columns["phase"], (DISPATCH, COMBINE))
        dp, pp = rank.profile.coordinates[:2]
        engine = tuple(p.rank for p in window.profiles if p.coordinates[:2] == (dp, pp))
        keys[f"dp{dp} pp{pp}", engine, 0 if window.missing else len(engine)] = np.flatnonzero(
            unnamed & inside
        )
    keys["", (), window.world_size or 0] = np.flatnonzero(unnamed & ~inside)
    return {key: mine for key, mine in keys.items() if len(mine)}


def _several_engines(window: Window) -> bool:
    """Whether the window has tensor-parallel groups beside each other."""
    tp = {p.coordinates[2] for p in window.profiles}
    return None not in tp and len(tp) > 1 and len({p.coordinates[:2] for p in window.profiles}) > 1


def match_groups(window: Window, ranks: list[RankCollectives]) -> tuple[list[Group], int]:
    """The collectives of each group matched, and how many of the ranks' collectives have no counterpart on another."""
    of_rank = [group_keys(window, rank) for rank in ranks]
    members: dict[Key, list[int]] = {}
    for i, keys in enumerate(of_rank):
        for key in keys:
            members.setdefault(key, []).append(i)
    found: dict[Key, Group] = {}
    unmatched = 0
    clocks: dict[int, float] = {}
    # What is numbered needs no clocks, and tells them.
    for numbered in (True, False):
        for key in sorted(members):
            positions = {i: of_rank[i][key] for i in members[key]}
            if numbered != all((ranks[i].columns["seq"][mine] >= 0).all() for i, mine in positions.items()):
                continue
            found[key], alone = _matched(window, key, ranks, positions, clocks)
            unmatched += alone
            if numbered and len(positions) > len(clocks):
                clocks = _told(found[key], ranks) or clocks
    return [found[key] for key in sorted(found)], unmatched


def _told(group: Group, ranks: list[RankCollectives]) -> dict[int, float]:
    """The clocks of a group's ranks against that of its first, by collectives that all leave at one time; none where there
    are no such."""
    together = np.isin(
        common(gather(group, [r.columns["kind"] for r in ranks], missing=UNKNOWN)), SYNCHRONISING
    )
    rounds = np.flatnonzero(together)
    some = Group(group.name, group.complete, group.place[:, rounds[:: max(1, len(rounds) // MOST_TOLD)]])
    end = gather(some, [r.end_ns for r in ranks])
    members = np.flatnonzero(np.isfinite(end).any(axis=1))
    if not len(members):
        return {}
    apart = median_of((end - end[members[0]]).T)
    return {int(i): float(apart[i]) for i in members if np.isfinite(apart[i])}


def _matched(
    window: Window,
    key: Key,
    ranks: list[RankCollectives],
    positions: dict[int, Ints],
    clocks: dict[int, float],
) -> tuple[Group, int]:
    """A group's collectives on all its ranks, of which it has those in `positions`, against those of the rank that has most;
    how many stay alone. `clocks`: of ranks, as far as other groups told them."""
    reference = max(positions, key=lambda i: len(positions[i]))
    most = _sequence(ranks[reference], positions[reference])
    place = np.full((len(ranks), len(most.kind)), UNKNOWN, np.int32)
    place[reference] = most.index
    others = [i for i in positions if i != reference]
    apart = {i: clocks[i] - clocks[reference] for i in others if i in clocks and reference in clocks}
    with ThreadPoolExecutor(BESIDE) as pool:
        matches = pool.map(
            lambda i: match(
                most,
                _sequence(ranks[i], positions[i]),
                shared_clock=window.one_host,
                apart_ns=apart.get(i),
            ),
            others,
        )
        for i, pairs in zip(others, matches, strict=True):
            place[i, pairs.one] = positions[i][pairs.other]
    name, _, size = key
    found = int(np.sum(place[:, np.sum(place >= 0, axis=0) >= 2] >= 0))
    # Of a group of one rank no other is to be found.
    alone = sum(map(len, positions.values())) - found if size != 1 else 0
    return Group(name, 0 < size == len(positions) or (not size and not window.missing), place), alone


def _sequence(rank: RankCollectives, mine: Ints) -> Sequence:
    kind, phase = rank.columns["kind"][mine], rank.columns["phase"][mine]
    # A dispatch and a combine are both exchanges, whose ends may be far apart; but never one and the same.
    told = (kind == EXCHANGE) & np.isin(phase, (DISPATCH, COMBINE))
    return Sequence(
        index=mine,
        kind=np.where(told, len(KINDS) + phase, kind),
        seq=rank.columns["seq"][mine],
        start_ns=rank.start_ns[mine].astype(np.int64),
        end_ns=rank.end_ns[mine].astype(np.int64),
    )


def gather(group: Group, values: list[Any], missing: float = np.nan) -> NDArray[Any]:
    """ranks x rounds of a value per collective, `missing` where a rank has no part."""
    return np.array(
        [_gathered(place, of_rank, missing) for place, of_rank in zip(group.place, values, strict=True)]
    )


def _gathered(place: NDArray[np.int32], values: NDArray[Any], missing: float) -> NDArray[Any]:
    if not len(values):
        return np.full(len(place), missing)
    if len(place) and place.min() >= 0:
        # Where nothing is lost a rank's part is a run of its collectives, or every so many-th of them.
        apart = int(place[1]) - int(place[0]) if len(place) > 1 else 1
        if apart > 0 and (np.diff(place) == apart).all():
            return values[int(place[0]) : int(place[-1]) + 1 : apart]
        return values[place]
    return np.where(place >= 0, values[np.maximum(place, 0)], missing)


def common(values: NDArray[Any]) -> NDArray[Any]:
    """The largest value in each round of those that ranks have: all have one, but what a profile lost."""
    return np.asarray(np.fmax.reduce(values, axis=0))
