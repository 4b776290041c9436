"""Who waited for whom in a window: arrivals, waits and transfers of every collective, and what made the last one late.

Late arrival and transfer are told apart as in vLLM's RFC 52777: a rank's time in a collective is its wait for the last
to come, then the transfer, which the shortest of all stays shows without any clock. A rank that comes last only
because it left the collective before late, or waited there, has not worked longer than the others: what it caused
is at most what its own work since then exceeds theirs (after Böhme et al., ACM TOPC 3(2), 2016).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from tailscope.ranks.clocks import MAD_TO_SIGMA, Clock, connected, fit_clocks, median_of
from tailscope.ranks.collectives import KINDS, OTHER, WORK, RankCollectives, load_rank
from tailscope.ranks.groups import BESIDE, Group, common, gather, match_groups
from tailscope.ranks.sequence import UNKNOWN, Floats, Ints
from tailscope.ranks.windows import Window
from tailscope.schema import PHASES
from tailscope.store import Trace

#: Of those the ones that end at one time: an exchange of unequal parts ends when each has its own.
CLOCKS = frozenset(KINDS) - {"all_to_all"}
#: Below this many rounds of those the exchanges must do for the clocks too.
FEW_ROUNDS = 8
#: Rounds the clocks are fitted to, evenly taken; more make them no better known.
MOST_FITTED = 20_000
#: Rounds compared at a time, each by a thread of its own.
ROUNDS = 65_536
#: A transfer counts as slow beyond so many deviations from those of its size.
SLOW_DEVIATIONS = 5.0


@dataclass
class WindowWaits:
    """A window's ranks compared. `tables` have a row per rank and collective (columns of `rank_rounds`)."""

    clocks: list[Clock]
    tables: list[pa.Table]
    collectives: int = 0
    unmatched: int = 0


def compare(trace: Trace, window: Window) -> WindowWaits:
    """Match a window's collectives, align its clocks, and say who waited for whom."""
    origin = window.span_ns[0]
    with ThreadPoolExecutor(BESIDE) as pool:
        ranks = list(pool.map(lambda profile: load_rank(trace, profile, origin), window.profiles))
    waits = WindowWaits([], [], collectives=sum(len(r.start_ns) for r in ranks))
    groups, waits.unmatched = match_groups(window, ranks)
    waits.clocks = _clocks(groups, ranks, window.one_host)
    waits.tables = [table for group in groups for table in _tables(window, group, ranks, waits.clocks)]
    return waits


def _clocks(groups: list[Group], ranks: list[RankCollectives], one_host: bool) -> list[Clock]:
    """A clock a rank, from the rounds of all groups; those of kinds that do not end together only where the others are few
    or link only some of the ranks."""
    starts, ends, kinds = [], [], []
    for group in groups:
        starts.append(gather(group, [r.start_ns for r in ranks]))
        ends.append(gather(group, [r.end_ns for r in ranks]))
        kinds.append(common(gather(group, [r.columns["kind"].astype(np.float64) for r in ranks])))
    if not groups:
        return fit_clocks(np.empty((len(ranks), 0)), np.empty((len(ranks), 0)), one_host=one_host)
    start, end, kind = np.hstack(starts), np.hstack(ends), np.concatenate(kinds)
    if len(kind) > MOST_FITTED:
        some = np.linspace(0, len(kind) - 1, MOST_FITTED).astype(np.int64)
        start, end, kind = start[:, some], end[:, some], kind[some]
    together = np.isin(kind, [KINDS.index(k) for k in CLOCKS])
    if np.sum(together) < FEW_ROUNDS or not connected(end[:, together]):
        together[:] = True
    return fit_clocks(start[:, together], end[:, together], one_host=one_host)


def _tables(
    window: Window, group: Group, ranks: list[RankCollectives], clocks: list[Clock]
) -> list[pa.Table]:
    """Rows of `rank_rounds` for the rounds of a group that more than one rank has, some rounds a table."""
    place = group.place[:, np.sum(group.place >= 0, axis=0) >= 2]
    if not place.shape[1]:
        return []
    group = Group(group.name, group.complete, place)
    stay = gather(group, [r.end_ns - r.start_ns for r in ranks])
    transfer = np.maximum(np.min(np.where(place >= 0, stay, np.inf), axis=0), 0.0)
    slow = _slow_transfer(group, ranks, transfer)

    def table(first: int) -> pa.Table:
        some = slice(first, first + ROUNDS)
        part = Group(group.name, group.complete, place[:, some])
        return _table(window, part, first, ranks, clocks, transfer[some], slow[some])

    with ThreadPoolExecutor(BESIDE) as pool:
        return list(pool.map(table, range(0, place.shape[1], ROUNDS)))


def _table(
    window: Window,
    group: Group,
    first_round: int,
    ranks: list[RankCollectives],
    clocks: list[Clock],
    transfer: Floats,
    slow: Floats,
) -> pa.Table:
    present = group.place >= 0
    start, end = gather(group, [r.start_ns for r in ranks]), gather(group, [r.end_ns for r in ranks])
    offset = np.array([clock.of(row) for clock, row in zip(clocks, start, strict=True)])
    start, end, duration = start - offset, end - offset, end - start
    arrivals = np.where(present, start, -np.inf)
    late = np.argmax(arrivals, axis=0)
    rounds = np.arange(arrivals.shape[1])
    last = arrivals[late, rounds]
    arrivals[late, rounds] = -np.inf
    second = np.max(arrivals, axis=0)
    shortest = np.argmin(np.where(present, duration, np.inf), axis=0)
    work = gather(group, [r.work_ns for r in ranks])
    work_late, work_others = _late_and_others(work, late)
    extra = work_late - work_others
    error = np.array([clock.error_ns for clock in clocks])
    caused = last - second
    own = np.clip(np.nan_to_num(np.minimum(caused, extra), nan=0.0), 0.0, None)
    own[~np.isfinite(work_late)] = 0.0
    phase, in_phase = _late_phase(group, ranks, late, work_late, work_others)
    row, column = np.nonzero(present)
    places = [place[here] for place, here in zip(group.place, present, strict=True)]

    def told(name: str) -> Ints:
        return np.concatenate([r.columns[name][place] for r, place in zip(ranks, places, strict=True)])

    is_late = late[column] == row
    origin = window.span_ns[0]
    by_round = {
        "transfer_ns": pa.array(_whole(transfer)),
        "slow_ns": pa.array(_whole(slow)),
        "phase_work_ns": _rounded(in_phase[0]),
        "phase_others_ns": _rounded(in_phase[1]),
        "ranks": pa.array(np.sum(present, axis=0)),
    }
    of_round = pa.array(column)
    columns: dict[str, Any] = {
        "window": pa.repeat(pa.scalar(window.number), len(row)),
        "group": pa.repeat(pa.scalar(group.name), len(row)),
        "round": column + first_round,
        "rank": np.array(window.ranks)[row],
        "complete": pa.repeat(pa.scalar(group.complete), len(row)),
        "kind": _named(KINDS, pa.array(told("kind"))),
        "phase": _named(PHASES, _nullable(told("phase"))),
        "step": _nullable(told("step")),
        "layer": _nullable(told("layer")),
        "start_ns": _whole(start[present]) + origin,
        "end_ns": _whole(end[present]) + origin,
        "wait_ns": _whole(last[column] - start[present]),
        "work_ns": _rounded(work[present]),
        "is_last": is_late,
        "is_shortest": shortest[column] == row,
        "caused_ns": np.where(is_late, _whole(caused)[column], 0),
        "own_ns": np.where(is_late, _whole(own)[column], 0),
        "error_ns": (error + _other_error(error))[row],
        "tokens": _nullable(told("tokens")),
        "late_phase": _named(WORK, pa.array(phase[column])),
        **{name: values.take(of_round) for name, values in by_round.items()},
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
    some = [i for i in range(OTHER) if any(r.work_by_phase[:, i].any() for r in ranks)]
    if not some:
        return chosen, (np.nan_to_num(work_late), np.nan_to_num(work_others))
    for index in [*some, OTHER]:
        values = gather(group, [r.work_by_phase[:, index] for r in ranks])
        of_late, of_others = _late_and_others(values, late)
        more = np.nan_to_num(of_late - of_others, nan=-np.inf) > best
        best = np.where(more, of_late - of_others, best)
        chosen, mine, theirs = (
            np.where(more, index, chosen),
            np.where(more, of_late, mine),
            np.where(more, of_others, theirs),
        )
    return chosen, (mine, theirs)


def _slow_transfer(group: Group, ranks: list[RankCollectives], transfer: Floats) -> Floats:
    """How much longer each round's transfer took than those of its kind and size, where that is beyond their spread."""
    kind = common(gather(group, [r.columns["kind"].astype(np.float64) for r in ranks]))
    size = common(gather(group, [r.columns["bytes"].astype(np.float64) for r in ranks]))
    # Sizes within an eighth of each other are alike.
    scale = np.where(size > 0, np.round(8 * np.log2(np.maximum(size, 1.0))), UNKNOWN)
    _, alike = np.unique(kind * 1_000 + scale, return_inverse=True)
    slow = np.zeros(len(transfer))
    order = np.argsort(alike.reshape(-1), kind="stable")
    for members in np.split(order, np.flatnonzero(np.diff(alike.reshape(-1)[order])) + 1):
        values = transfer[members]
        if len(values) < FEW_ROUNDS:
            continue
        usual = np.median(values)
        spread = MAD_TO_SIGMA * np.median(np.abs(values - usual))
        beyond = values > usual + np.maximum(SLOW_DEVIATIONS * spread, 0.5 * usual)
        slow[members[beyond]] = values[beyond] - usual
    return slow


def _other_error(error: Floats) -> Floats:
    """The largest error of another rank than each: a wait is between two clocks."""
    order = np.argsort(error)
    largest, second = error[order[-1]], error[order[-2]]
    return np.asarray(np.where(np.arange(len(error)) == order[-1], second, largest))


def _whole(values: Floats) -> Ints:
    return np.rint(values).astype(np.int64)


def _named(names: tuple[str, ...], indices: Any) -> Any:
    """Names by index; millions of them are few texts."""
    return pa.DictionaryArray.from_arrays(indices.cast(pa.int8()), pa.array(names))


def _nullable(values: Ints) -> Any:
    return pa.array(values, mask=values < 0)


def _rounded(values: Floats) -> Any:
    known = np.isfinite(values)
    return pa.array(_whole(np.where(known, values, 0.0)), mask=~known)
