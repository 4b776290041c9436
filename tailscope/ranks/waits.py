"""Who waited for whom in a window: arrivals, waits and transfers of every collective, and what made the last one late.

Late arrival and transfer are told apart as in vLLM's RFC 52777: a rank's time in a collective is its wait for the last
to come, then the transfer, which the shortest of all stays shows without any clock. A rank that comes last only
because it left the collective before late, or waited there, has not worked longer than the others: what it caused
is at most what its own work since then exceeds theirs (after Böhme et al., ACM TOPC 3(2), 2016).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from tailscope.ranks.clocks import MAD_TO_SIGMA, Clock, connected, fit_clocks, median_of
from tailscope.ranks.rounds import match
from tailscope.ranks.sequence import UNKNOWN, Floats, Ints, Sequence
from tailscope.ranks.windows import Profile, Window
from tailscope.scan import quote
from tailscope.store import Trace

#: Collectives that nobody leaves before all have come. Others give no arrivals to compare.
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "barrier", "all_to_all")
#: Of those the ones that end at one time: an exchange of unequal parts ends when each has its own.
CLOCKS = frozenset(KINDS) - {"all_to_all"}
#: Below this many rounds of those the exchanges must do for the clocks too.
FEW_ROUNDS = 8
#: Rounds the clocks are fitted to, evenly taken; more make them no better known.
MOST_FITTED = 20_000
PHASES = ("dispatch", "expert", "combine", "router", "attention", "moe", "collective", "eplb", "capture")
#: Phases that work between collectives is told apart by; what is in none is `other`.
WORK = ("expert", "attention", "router", "moe", "other")
OTHER = len(WORK) - 1
EXPERT, DISPATCH, COMBINE = WORK.index("expert"), PHASES.index("dispatch"), PHASES.index("combine")
#: Ranks read and matched beside each other: NumPy and DuckDB leave Python's lock alone.
BESIDE = 4
#: A transfer counts as slow beyond so many deviations from those of its size.
SLOW_DEVIATIONS = 5.0


def _index_sql(column: str, names: Iterable[str]) -> str:
    """SQL for the place of a column's value among names, UNKNOWN where it is none of them."""
    cases = " ".join(f"WHEN {quote(name)} THEN {index}" for index, name in enumerate(names))
    return f"CASE {column} {cases} ELSE {UNKNOWN} END" if cases else str(UNKNOWN)


_COLLECTIVES = f"""
SELECT start_ns, start_ns + duration_ns AS end_ns, {_index_sql("collective", KINDS)} AS kind,
       {_index_sql("phase", PHASES)} AS phase, coalesce(seq, -1) AS seq, {{group}} AS "group",
       coalesce(group_size, 0) AS group_size, coalesce(step, -1) AS step, coalesce(layer, -1) AS layer,
       coalesce(bytes_in, -1) AS bytes, coalesce(tokens, -1) AS tokens
FROM rank_events WHERE source = $source AND collective IS NOT NULL AND duration_ns IS NOT NULL
ORDER BY start_ns, end_ns
"""
_OPS = f"""
SELECT start_ns, start_ns + duration_ns AS end_ns, {_index_sql("phase", WORK)} AS phase
FROM rank_events
WHERE source = $source AND collective IS NULL AND duration_ns > 0 AND phase IN ('expert', 'attention', 'router', 'moe')
  AND (category = 'kernel') = $on_gpu
ORDER BY phase, start_ns
"""


@dataclass(frozen=True)
class RankCollectives:
    """One rank's collectives by start, with its work before each; ns since the window's first event."""

    profile: Profile
    columns: dict[str, Ints]
    #: Names of the groups that the column `group` counts.
    groups: list[str]
    start_ns: Floats
    end_ns: Floats
    #: Time since the collectives before had ended; NaN for the first, whose work the profile does not show.
    work_ns: Floats
    #: collectives x WORK: that time by phase.
    work_by_phase: Floats


def load_rank(trace: Trace, profile: Profile, origin_ns: int) -> RankCollectives:
    with trace.connection.cursor() as con:
        return _load(con, profile, origin_ns)


def _load(con: duckdb.DuckDBPyConnection, profile: Profile, origin_ns: int) -> RankCollectives:
    known = {"source": profile.source}
    groups = [
        name
        for (name,) in con.execute(
            'SELECT DISTINCT "group" FROM rank_events WHERE source = $source AND collective IS NOT NULL '
            'AND "group" IS NOT NULL ORDER BY 1',
            known,
        ).fetchall()
    ]
    sql = _COLLECTIVES.format(group=_index_sql('"group"', groups))
    rows = con.sql(sql, params=known).to_arrow_table()
    arrays = {name: np.asarray(rows[name].to_numpy(), np.int64) for name in rows.column_names}
    start = (arrays.pop("start_ns") - origin_ns).astype(np.float64)
    end = (arrays.pop("end_ns") - origin_ns).astype(np.float64)
    over = np.concatenate([[np.nan], np.maximum.accumulate(end)[:-1]]) if len(end) else end
    work = np.maximum(start - over, 0.0)
    by_phase = _by_phase(con, profile, origin_ns, start, over, work)
    # Between dispatch and combine the experts run, whatever the ops are called.
    before = np.concatenate([[UNKNOWN], arrays["phase"][:-1]]) if len(end) else arrays["phase"]
    inside = (arrays["phase"] == COMBINE) & (before == DISPATCH)
    by_phase[inside, EXPERT] += by_phase[inside, OTHER]
    by_phase[inside, OTHER] = 0.0
    return RankCollectives(profile, arrays, groups, start, end, work, by_phase)


def _by_phase(
    con: duckdb.DuckDBPyConnection,
    profile: Profile,
    origin_ns: int,
    start: Floats,
    over: Floats,
    work: Floats,
) -> Floats:
    """The work before each collective by phase: the time that ops of a phase cover in it."""
    result = np.zeros((len(start), len(WORK)))
    if len(start):
        for on_gpu in (True, False):
            ops = con.execute(_OPS, {"source": profile.source, "on_gpu": on_gpu}).fetchnumpy()
            if not len(ops["start_ns"]):
                continue
            phase = np.asarray(ops["phase"], np.int64)
            begin = (np.asarray(ops["start_ns"], np.int64) - origin_ns).astype(np.float64)
            finish = (np.asarray(ops["end_ns"], np.int64) - origin_ns).astype(np.float64)
            for index in np.unique(phase):
                mine = phase == index
                opened, closed = begin[mine], finish[mine]
                # Ops nest and overlap; each counts from where those before it ended.
                opened = np.maximum(opened, np.concatenate([[-np.inf], np.maximum.accumulate(closed)[:-1]]))
                collective = np.searchsorted(start, opened, side="right")
                known = collective < len(start)
                collective = np.minimum(collective, len(start) - 1)
                opened = np.maximum(opened, np.nan_to_num(over[collective], nan=np.inf))
                covered = np.maximum(np.minimum(closed, start[collective]) - opened, 0.0)
                result[:, index] += np.bincount(collective, weights=covered * known, minlength=len(start))
            break
        else:
            result[:, OTHER] = np.nan_to_num(work)
            return result
    left = np.nan_to_num(work) - result[:, :OTHER].sum(axis=1)
    result[:, OTHER] = np.maximum(left, 0.0)
    return result


@dataclass(frozen=True)
class Group:
    """Collectives of some ranks matched: `place` is ranks x rounds, UNKNOWN where a rank has no part.

    `complete`: whether the ranks that the group should have are all there.
    """

    name: str
    complete: bool
    place: Ints


@dataclass
class WindowWaits:
    """A window's ranks compared. `table` has a row per rank and collective (columns of `rank_rounds`)."""

    window: Window
    clocks: list[Clock]
    tables: list[pa.Table]
    collectives: int = 0
    unmatched: int = 0


def compare(trace: Trace, window: Window) -> WindowWaits:
    """Match a window's collectives, align its clocks, and say who waited for whom."""
    origin = window.span_ns[0]
    with ThreadPoolExecutor(BESIDE) as pool:
        ranks = list(pool.map(lambda profile: load_rank(trace, profile, origin), window.profiles))
    waits = WindowWaits(window, [], [], collectives=sum(len(r.start_ns) for r in ranks))
    groups: list[Group] = []
    for key in sorted({key for rank in ranks for key in _keys(window, rank)}):
        group, unmatched = _matched(window, key, ranks)
        groups.append(group)
        waits.unmatched += unmatched
    waits.clocks = _clocks(groups, ranks, window.one_host)
    waits.tables = [t for g in groups if (t := _table(window, g, ranks, waits.clocks)) is not None]
    return waits


#: A group: its name, the ranks it has by the profile, how many there should be (0: not known).
Key = tuple[str, tuple[int, ...], int]


def _keys(window: Window, rank: RankCollectives) -> dict[Key, Ints]:
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


def _matched(window: Window, key: Key, ranks: list[RankCollectives]) -> tuple[Group, int]:
    """The group's collectives on all its ranks, against those of the rank that has most; how many stay unmatched."""
    sequences = {
        i: _sequence(rank, mine)
        for i, rank in enumerate(ranks)
        if (mine := _keys(window, rank).get(key)) is not None
    }
    reference = max(sequences, key=lambda i: len(sequences[i].kind))
    place = np.full((len(ranks), len(sequences[reference].kind)), UNKNOWN)
    place[reference] = sequences[reference].index
    name, _, size = key
    # A group that no other profile knows: its collectives have no counterparts.
    unmatched = place.shape[1] if len(sequences) == 1 and size != 1 else 0
    others = [i for i in sequences if i != reference]
    with ThreadPoolExecutor(BESIDE) as pool:
        matches = pool.map(
            lambda i: match(sequences[reference], sequences[i], shared_clock=window.one_host), others
        )
        for i, pairs in zip(others, matches, strict=True):
            place[i, pairs.one] = sequences[i].index[pairs.other]
            unmatched += pairs.unmatched
    return Group(name, 0 < size == len(sequences) or (not size and not window.missing), place), unmatched


def _sequence(rank: RankCollectives, mine: Ints) -> Sequence:
    return Sequence(
        index=mine,
        kind=rank.columns["kind"][mine],
        seq=rank.columns["seq"][mine],
        start_ns=rank.start_ns[mine].astype(np.int64),
        end_ns=rank.end_ns[mine].astype(np.int64),
    )


def _clocks(groups: list[Group], ranks: list[RankCollectives], one_host: bool) -> list[Clock]:
    """A clock a rank, from the rounds of all groups; those of kinds that do not end together only where the others are few
    or link only some of the ranks."""
    starts, ends, kinds = [], [], []
    for group in groups:
        starts.append(_gather(group, [r.start_ns for r in ranks]))
        ends.append(_gather(group, [r.end_ns for r in ranks]))
        kinds.append(_common(_gather(group, [r.columns["kind"].astype(np.float64) for r in ranks])))
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


def _gather(group: Group, values: list[Floats]) -> Floats:
    """ranks x rounds of a value per collective, NaN where a rank has no part."""
    rows = []
    for place, of_rank in zip(group.place, values, strict=True):
        if len(of_rank):
            rows.append(np.where(place >= 0, of_rank[np.maximum(place, 0)], np.nan))
        else:
            rows.append(np.full(len(place), np.nan))
    return np.array(rows)


def _common(values: Floats) -> Floats:
    """The first rank's value in each round that is known."""
    return np.asarray(np.nanmax(values, axis=0))


def _table(
    window: Window, group: Group, ranks: list[RankCollectives], clocks: list[Clock]
) -> pa.Table | None:
    """Rows of `rank_rounds` for the rounds of a group that more than one rank has."""
    taking = np.sum(group.place >= 0, axis=0)
    if not (taking >= 2).any():
        return None
    group = Group(group.name, group.complete, group.place[:, taking >= 2])
    taking = taking[taking >= 2]
    present = group.place >= 0
    start, end = _gather(group, [r.start_ns for r in ranks]), _gather(group, [r.end_ns for r in ranks])
    offset = np.array([clock.of(row) for clock, row in zip(clocks, start, strict=True)])
    start, end, duration = start - offset, end - offset, end - start
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # rounds of NaN alone cannot occur, columns of it can
        arrivals = np.where(present, start, -np.inf)
        late = np.argmax(arrivals, axis=0)
        rounds = np.arange(arrivals.shape[1])
        last = arrivals[late, rounds]
        arrivals[late, rounds] = -np.inf
        second = np.max(arrivals, axis=0)
        shortest = np.argmin(np.where(present, duration, np.inf), axis=0)
        transfer = np.maximum(np.nanmin(duration, axis=0), 0.0)
        work = _gather(group, [r.work_ns for r in ranks])
        work_late, work_others = _late_and_others(work, late)
        extra = work_late - work_others
    error = np.array([clock.error_ns for clock in clocks])
    caused = last - second
    own = np.clip(np.nan_to_num(np.minimum(caused, extra), nan=0.0), 0.0, None)
    own[~np.isfinite(work_late)] = 0.0
    phase, in_phase = _late_phase(group, ranks, late, work_late, work_others)
    slow = _slow_transfer(group, ranks, transfer)
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
        "ranks": pa.array(taking),
    }
    of_round = pa.array(column)
    columns: dict[str, Any] = {
        "window": pa.repeat(pa.scalar(window.number), len(row)),
        "group": pa.repeat(pa.scalar(group.name), len(row)),
        "round": column,
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
        values = _gather(group, [r.work_by_phase[:, index] for r in ranks])
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
    kind = _common(_gather(group, [r.columns["kind"].astype(np.float64) for r in ranks]))
    size = _common(_gather(group, [r.columns["bytes"].astype(np.float64) for r in ranks]))
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
