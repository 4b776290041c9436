"""Who waited for whom in a window: arrivals, waits and transfers of every collective, and what made the last one late.

Late arrival and transfer are told apart as in vLLM's RFC 52777: a rank's time in a collective is its wait for the last
to come, then the transfer, which the shortest of all stays shows without any clock. A rank that comes last only
because it left the collective before late, or waited there, has not worked longer than the others: what it caused
is at most what its own work since then exceeds theirs (after Böhme et al., ACM TOPC 3(2), 2016).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tailscope.ranks.clocks import FEW_ROUNDS, Clock, connected, fit_clocks, median_of
from tailscope.ranks.collectives import (
    EXCHANGE,
    KINDS,
    OTHER,
    SYNCHRONISING,
    WORK,
    RankCollectives,
    load_rank,
)
from tailscope.ranks.groups import BESIDE, Group, common, gather, match_groups
from tailscope.ranks.replay import Replayed, Rounds, replay
from tailscope.ranks.sequence import UNKNOWN, Floats, Ints
from tailscope.ranks.steps import label
from tailscope.ranks.transfers import VERDICTS, against_usual, size_class, verdicts
from tailscope.ranks.windows import Window
from tailscope.schema import PHASES
from tailscope.store import Trace

#: Rounds the clocks are fitted to, evenly taken; more make them no better known.
MOST_FITTED = 20_000
#: Tables made ahead of who takes them, each by a thread of its own.
AHEAD = 2


@dataclass
class WindowWaits:
    """A window's ranks compared. `tables` have a row per rank and collective (columns of `rank_rounds`)."""

    clocks: list[Clock]
    tables: Iterator[pa.Table]
    collectives: int
    unmatched: int
    #: What the arrays take that `tables` and `replayed` are made from.
    held_bytes: int
    #: What the window's steps would take if something were otherwise. Reads what `tables` does, and may run beside them.
    replayed: Callable[[], Replayed | None]


def compare(trace: Trace, window: Window) -> WindowWaits:
    """Match a window's collectives, align its clocks, and say who waited for whom."""
    origin = window.span_ns[0]
    with ThreadPoolExecutor(BESIDE) as pool:
        ranks = list(pool.map(lambda profile: load_rank(trace, profile, origin), window.profiles))
    collectives = sum(len(r.start_ns) for r in ranks)
    groups, unmatched = match_groups(window, ranks)
    clocks = _clocks(groups, ranks, [p.host for p in window.profiles])
    ranks = [_aligned(rank, clock) for rank, clock in zip(ranks, clocks, strict=True)]
    met = [_met(group, ranks) for group in groups]
    rounds = [r for r in met if len(r.last_ns)]
    steps = label(
        [gather(r.group, [rank.columns["step"] for rank in ranks], missing=UNKNOWN) for r in rounds],
        [r.last_ns for r in rounds],
    )
    rounds = [replace(r, step=step) for r, step in zip(rounds, steps, strict=True)]
    exits = _exits(rounds, ranks)
    tables = (table for r in rounds for table in _tables(window, r, ranks, clocks, exits))
    held = sum(rank.held_bytes for rank in ranks) + sum(r.group.place.nbytes for r in rounds)
    held += sum(of_rank.nbytes for of_rank in exits)
    replayed = partial(replay, rounds, ranks, _telling(clocks))
    return WindowWaits(clocks, tables, collectives, unmatched, held, replayed)


def _telling(clocks: Sequence[Clock]) -> list[int]:
    """Kinds of collectives whose ends tell who leaves late. Where a kind sets the clocks, a rank that always does has a clock
    that is ahead."""
    if not all(clock.together for clock in clocks):
        return []
    return list(range(len(KINDS))) if all(clock.basis == "one host" for clock in clocks) else [EXCHANGE]


def _clocks(groups: list[Group], ranks: list[RankCollectives], hosts: Sequence[str | None]) -> list[Clock]:
    """A clock a rank, from the rounds of all groups; those of kinds that do not end together only where the others are few
    or link only some of the ranks."""
    if not groups:
        return fit_clocks(np.empty((len(ranks), 0)), np.empty((len(ranks), 0)), hosts)
    together = [
        np.isin(common(gather(group, [r.columns["kind"] for r in ranks], missing=UNKNOWN)), SYNCHRONISING)
        for group in groups
    ]
    start, end = _fitted(groups, ranks, together)
    if start.shape[1] >= FEW_ROUNDS and connected(end):
        return fit_clocks(start, end, hosts)
    every = [np.ones_like(some) for some in together]
    start, end = _fitted(groups, ranks, every)
    return fit_clocks(start, end, hosts, together=all(some.all() for some in together))


def _fitted(
    groups: list[Group], ranks: list[RankCollectives], which: list[NDArray[np.bool_]]
) -> tuple[Floats, Floats]:
    """Starts and ends, ranks x rounds, of the chosen rounds of each group, evenly thinned where they are many."""
    apart = max(1, -(-sum(int(np.sum(some)) for some in which) // MOST_FITTED))
    chosen = [
        Group(g.name, g.complete, g.place[:, np.flatnonzero(some)[::apart]])
        for g, some in zip(groups, which, strict=True)
    ]
    start, end = (
        np.hstack([gather(group, [getattr(r, name) for r in ranks]) for group in chosen])
        for name in ("start_ns", "end_ns")
    )
    return start, end


def _aligned(rank: RankCollectives, clock: Clock) -> RankCollectives:
    """The rank's collectives on the window's clock. Durations stay what they were."""
    offset = clock.of(rank.start_ns)
    return replace(rank, start_ns=rank.start_ns - offset, end_ns=rank.end_ns - offset)


def _met(group: Group, ranks: list[RankCollectives]) -> Rounds:
    """The rounds of a group that more than one rank has, not labelled yet."""
    place = group.place[:, np.sum(group.place >= 0, axis=0) >= 2]
    group = Group(group.name, group.complete, place)
    if not place.shape[1]:
        nothing = np.empty(0)
        return Rounds(group, np.empty(0, np.int64), *[nothing] * 5)
    parts = [_of_part(part, ranks) for part in group.parts()]
    kind, size, transfer, first, last = (np.concatenate(values) for values in zip(*parts, strict=True))
    size = size_class(size)
    usual, slow = against_usual(kind, size, transfer, last - first)
    return Rounds(group, np.empty(0, np.int64), last, transfer, usual, slow, size)


def _of_part(group: Group, ranks: list[RankCollectives]) -> tuple[Floats, ...]:
    """Kind, bytes, transfer, and when the first and the last rank came, of rounds."""
    start, end = gather(group, [r.start_ns for r in ranks]), gather(group, [r.end_ns for r in ranks])
    kind, size = (
        common(gather(group, [r.columns[name] for r in ranks], missing=UNKNOWN)).astype(np.float64)
        for name in ("kind", "bytes")
    )
    transfer = np.maximum(np.nanmin(end - start, axis=0), 0.0)
    return kind, size, transfer, np.nanmin(start, axis=0), np.nanmax(start, axis=0)


def _exits(rounds: Sequence[Rounds], ranks: list[RankCollectives]) -> list[Floats]:
    """For each rank, by collective: how much later than the others it left, 0 where nobody else is known; negative: sooner."""
    exits = [np.zeros(len(rank.start_ns)) for rank in ranks]
    for part in (part for r in rounds for part in r.group.parts()):
        end = gather(part, [rank.end_ns for rank in ranks])
        # The median of two is half-way between them.
        apart = (end - median_of(end)) * np.where(np.sum(np.isfinite(end), axis=0) == 2, 2.0, 1.0)
        for place, of_rank, row in zip(part.place, exits, apart, strict=True):
            of_rank[place[place >= 0]] = row[place >= 0]
    return exits


def _tables(
    window: Window, rounds: Rounds, ranks: list[RankCollectives], clocks: list[Clock], exits: list[Floats]
) -> Iterator[pa.Table]:
    """Rows of `rank_rounds` for the rounds of a group, some rounds a table, a few tables ahead of who takes them."""
    parts = rounds.group.slices()

    def table(part: slice) -> pa.Table:
        return _table(window, rounds.some(part), part.start, ranks, clocks, exits)

    with ThreadPoolExecutor(AHEAD) as pool:
        for first in range(0, len(parts), AHEAD):
            yield from pool.map(table, parts[first : first + AHEAD])


def _table(
    window: Window,
    rounds: Rounds,
    first_round: int,
    ranks: list[RankCollectives],
    clocks: list[Clock],
    exits: list[Floats],
) -> pa.Table:
    group = rounds.group
    present = group.place >= 0
    start, end = gather(group, [r.start_ns for r in ranks]), gather(group, [r.end_ns for r in ranks])
    stay, last = end - start, rounds.last_ns
    arrivals = np.where(present, start, -np.inf)
    late = np.argmax(arrivals, axis=0)
    every = np.arange(len(last))
    arrivals[late, every] = -np.inf
    shortest = np.argmin(np.where(present, stay, np.inf), axis=0)
    work = gather(group, [r.work_ns for r in ranks])
    work_late, work_others = _late_and_others(work, late)
    error = np.array([clock.error_ns for clock in clocks])
    error = np.hypot(error, _other_error(error))
    caused = last - np.max(arrivals, axis=0)
    own = np.clip(np.nan_to_num(np.minimum(caused, work_late - work_others), nan=0.0), 0.0, None)
    own[~np.isfinite(work_late)] = 0.0
    verdict = verdicts(stay, last - start, rounds.transfer_ns, float(error.max()))
    phase, in_phase = _late_phase(group, ranks, late, work_late, work_others)
    everyone = bool(present.all())
    places = [place[here] for place, here in zip(group.place, present, strict=True)]

    def rows(values: NDArray[Any]) -> NDArray[Any]:
        """ranks x rounds as rows, those of one rank behind those of another."""
        return values.reshape(-1) if everyone else values[present]

    def of_rounds(values: NDArray[Any]) -> NDArray[Any]:
        return rows(np.broadcast_to(values, present.shape))

    def of_ranks(values: NDArray[Any]) -> NDArray[Any]:
        return rows(np.broadcast_to(values[:, None], present.shape))

    def told(name: str) -> Ints:
        return np.concatenate([r.columns[name][place] for r, place in zip(ranks, places, strict=True)])

    kind = told("kind")
    start, end, stay = rows(start), rows(end), rows(stay)
    row = np.arange(len(ranks))[:, None]
    is_late = rows(late == row)
    origin = window.span_ns[0]
    # In an exchange of unequal parts a rank may have waited for some of the others only: all of its stay may be transfer.
    exchange, transfer, came = kind == EXCHANGE, of_rounds(rounds.transfer_ns), of_rounds(last)
    by_round = {
        "transfer_ns": pa.array(whole(rounds.transfer_ns)),
        "usual_transfer_ns": _rounded(rounds.usual_ns),
        "size": pa.array(whole(rounds.size)),
        "slow_ns": pa.array(whole(rounds.slow_ns)),
        "verdict": _named(VERDICTS, pa.array(verdict)),
        "at_step": _nullable(rounds.step),
        "phase_work_ns": _rounded(in_phase[0]),
        "phase_others_ns": _rounded(in_phase[1]),
        "ranks": pa.array(np.sum(present, axis=0)),
        "round": pa.array(every + first_round),
        "late_phase": _named(WORK, pa.array(phase)),
    }
    column = pa.array(of_rounds(every))
    columns: dict[str, Any] = {
        "window": pa.repeat(pa.scalar(window.number), len(kind)),
        "group": pa.repeat(pa.scalar(group.name), len(kind)),
        "rank": of_ranks(np.array(window.ranks)),
        "complete": pa.repeat(pa.scalar(group.complete), len(kind)),
        "kind": _named(KINDS, pa.array(kind)),
        "phase": _named(PHASES, _nullable(told("phase"))),
        "step": _nullable(told("step")),
        "layer": _nullable(told("layer")),
        "start_ns": whole(start) + origin,
        "end_ns": whole(end) + origin,
        "wait_ns": whole(came - start),
        "transfer_low_ns": whole(np.where(exchange, np.maximum(end - came, 0.0), transfer)),
        "transfer_high_ns": whole(np.where(exchange, stay, transfer)),
        "exit_ns": whole(rows(gather(group, exits))),
        "work_ns": _rounded(rows(work)),
        "is_last": is_late,
        "is_shortest": rows(shortest == row),
        "caused_ns": np.where(is_late, of_rounds(whole(caused)), 0),
        "own_ns": np.where(is_late, of_rounds(whole(own)), 0),
        "error_ns": of_ranks(error),
        "tokens": _nullable(told("tokens")),
        # Where every rank is in every round those of each rank are the rounds again, held once.
        **{
            name: pa.chunked_array([values] * len(ranks)) if everyone else values.take(column)
            for name, values in by_round.items()
        },
    }
    return pa.table(columns)


def _late_and_others(values: Floats, late: Ints) -> tuple[Floats, Floats]:
    """The value of each round's last rank, and the median of the others'."""
    rounds = np.arange(values.shape[1])
    others = values.copy()
    others[late, rounds] = np.nan
    return values[late, rounds], median_of(others)


def _late_phase(
    group: Group, ranks: list[RankCollectives], late: Ints, work_late: Floats, work_others: Floats
) -> tuple[Ints, tuple[Floats, Floats]]:
    """Index of the phase of work in which each round's last rank exceeds the others most; its time and theirs."""
    rounds = group.place.shape[1]
    best, chosen = np.full(rounds, -np.inf), np.full(rounds, OTHER)
    mine, theirs = np.zeros(rounds), np.zeros(rounds)
    # What no rank did cannot be it; `other` is what there is without any phase.
    some = [i for i in range(len(WORK)) if i != OTHER and any(r.work_by_phase[i].any() for r in ranks)]
    if not some:
        return chosen, (np.nan_to_num(work_late), np.nan_to_num(work_others))
    for index in [*some, OTHER]:
        values = gather(group, [r.work_by_phase[index] for r in ranks])
        of_late, of_others = _late_and_others(values, late)
        more = np.nan_to_num(of_late - of_others, nan=-np.inf) > best
        best = np.where(more, of_late - of_others, best)
        chosen, mine, theirs = (
            np.where(more, index, chosen),
            np.where(more, of_late, mine),
            np.where(more, of_others, theirs),
        )
    return chosen, (mine, theirs)


def _other_error(error: Floats) -> Floats:
    """The largest error of another rank than each: a wait is between two clocks."""
    order = np.argsort(error)
    largest, second = error[order[-1]], error[order[-2]]
    return np.asarray(np.where(np.arange(len(error)) == order[-1], second, largest))


def whole(values: Floats) -> Ints:
    return np.rint(values).astype(np.int64)


def _named(names: tuple[str, ...], indices: Any) -> Any:
    """Names by index; millions of them are few texts."""
    return pa.DictionaryArray.from_arrays(indices.cast(pa.int8()), pa.array(names))


def _nullable(values: Ints) -> Any:
    return pa.array(values, mask=values < 0)


def _rounded(values: Floats) -> Any:
    known = np.isfinite(values)
    return pa.array(whole(np.where(known, values, 0.0)), mask=~known)
