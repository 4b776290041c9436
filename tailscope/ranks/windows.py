"""Which profiles belong together: those of the ranks of one world whose times overlap form a window."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tailscope.align import Scope
from tailscope.store import Trace


@dataclass(frozen=True)
class Profile:
    """One rank's profile, as its row of `profiles` tells."""

    source: str
    instance: str
    engine: int | None
    world: str
    rank: int
    world_size: int | None
    host: str | None
    coordinates: tuple[int | None, int | None, int | None, int | None]
    groups: dict[str, list[int]]
    first_ns: int
    last_ns: int
    events: int


@dataclass
class Window:
    """Profiles of one world at one time, one a rank; `double` are further ones of a rank, left out."""

    number: int
    world: str
    profiles: list[Profile]
    double: list[Profile] = field(default_factory=list)

    @property
    def ranks(self) -> list[int]:
        return [p.rank for p in self.profiles]

    @property
    def world_size(self) -> int | None:
        return max((p.world_size for p in self.profiles if p.world_size), default=None)

    @property
    def missing(self) -> int:
        """Ranks of the world without a profile in the window."""
        return max((self.world_size or 0) - len(self.profiles), 0)

    @property
    def one_host(self) -> bool:
        """Whether all ranks ran on one host, whose clock they share."""
        hosts = {p.host for p in self.profiles}
        return len(hosts) == 1 and None not in hosts

    @property
    def span_ns(self) -> tuple[int, int]:
        return min(p.first_ns for p in self.profiles), max(p.last_ns for p in self.profiles)


def find_windows(trace: Trace, scope: Scope) -> list[Window]:
    """The windows of a trace in a scope, by world and time. Profiles of graph captures and of unknown ranks are left out."""
    rows = trace.rows(
        "SELECT source, coalesce(instance, '') AS instance, engine, coalesce(world, instance, '') AS world, rank, "
        "world_size, host, dp, pp, tp, ep, groups, first_ns, last_ns, "
        "coalesce(events, 0) AS events FROM profiles "
        "WHERE rank IS NOT NULL AND first_ns IS NOT NULL AND last_ns >= first_ns "
        "AND NOT (coalesce(steps, 0) = 0 AND coalesce(captures, 0) > 0) "
        "AND ($instance IS NULL OR coalesce(instance, '') = $instance) "
        "AND ($from_ns IS NULL OR last_ns >= $from_ns) AND ($to_ns IS NULL OR first_ns < $to_ns) "
        "ORDER BY first_ns, rank, source",
        scope.parameters,
    )
    worlds: dict[str, list[Profile]] = {}
    for row in rows:
        profile = _profile(row)
        worlds.setdefault(profile.world, []).append(profile)
    windows: list[Window] = []
    for world, profiles in sorted(worlds.items()):
        for together in _overlapping(profiles):
            for chosen in _one_after_another(together):
                windows.append(_window(len(windows), world, chosen))
    return windows


def _overlapping(profiles: list[Profile]) -> list[list[Profile]]:
    """Profiles, ordered by start, in chains of those whose times overlap."""
    chains: list[list[Profile]] = []
    end_ns = 0
    for profile in profiles:
        if not chains or profile.first_ns > end_ns:
            chains.append([])
            end_ns = 0
        chains[-1].append(profile)
        end_ns = max(end_ns, profile.last_ns)
    return chains


def _one_after_another(chain: list[Profile]) -> list[list[Profile]]:
    """A chain taken apart: where clocks are further apart than the pause between two windows of all ranks, they overlap."""
    by_rank: dict[int, list[Profile]] = {}
    for profile in chain:
        by_rank.setdefault(profile.rank, []).append(profile)
    counts = {len(own) for own in by_rank.values()}
    disjoint = all(one.last_ns <= other.first_ns for own in by_rank.values() for one, other in pairwise(own))
    if len(counts) == 1 and disjoint:
        return [list(profiles) for profiles in zip(*by_rank.values(), strict=True)]
    return [chain]


def _profile(row: dict[str, Any]) -> Profile:
    size = row["world_size"]
    # Ranks made unique over data parallelism are of worlds of their own.
    part = f"/{row['rank'] // size}" if size and row["rank"] >= size else ""
    return Profile(
        source=row["source"],
        instance=row["instance"],
        engine=row["engine"],
        world=f"{row['world']}{part}",
        rank=row["rank"],
        world_size=size,
        host=row["host"],
        coordinates=(row["dp"], row["pp"], row["tp"], row["ep"]),
        groups=dict(row["groups"] or {}),
        first_ns=row["first_ns"],
        last_ns=row["last_ns"],
        events=row["events"],
    )


def _window(number: int, world: str, profiles: list[Profile]) -> Window:
    """Of two profiles that claim one rank at one time the larger counts."""
    window = Window(number, world, [])
    for profile in sorted(profiles, key=lambda p: (-p.events, p.source)):
        if profile.rank in window.ranks:
            window.double.append(profile)
        else:
            window.profiles.append(profile)
    window.profiles.sort(key=lambda p: p.rank)
    return window
