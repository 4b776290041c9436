"""What a window's steps would take if something were otherwise: without skew, without one rank's lateness, with balanced experts.

Each rank works, then meets the others of a group in a collective, which ends a transfer after the last has come. With
the work and the transfers as measured that gives each step again; with other ones what it would have taken (after Lin et
al., OSDI 2025, section 3). Lateness goes on through the groups, so a rank that is late to one collective because another
kept it waiting before is charged with nothing (delay cost of Böhme et al., ACM TOPC 3(2), 2016). Work and transfers are durations
on one clock each: no clock's offset is in the result.

Of links that is not so. Who receives slowly leaves late, and who sends slowly leaves before all others, who wait for it: on the
window's clock a rank leaves so long after the last has come, and would with the others if its link were like theirs.

What the replay leaves out: that other batches would have been scheduled. A saving is an upper bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tailscope.ranks.clocks import median_of, median_of_others
from tailscope.ranks.collectives import EXPERT, OTHER, WORK, RankCollectives
from tailscope.ranks.groups import Group, common, gather
from tailscope.ranks.sequence import UNKNOWN, Floats, Ints

#: Ranks whose lateness is taken away one at a time: those with most of it, and with no less than so much of the most.
CANDIDATES, CANDIDATE_SHARE = 8, 0.25
#: Numbers held at a time for one array of a chunk of steps.
CHUNK = 2_000_000
#: Scenarios before those of single ranks: as it was, without skew, usual transfers, balanced experts; and as it was where
#: each rank leaves when it did, which those of single links are held against.
AS_IT_WAS, NO_SKEW, USUAL_TRANSFERS, BALANCED, AS_THEY_LEFT = range(5)
SHARED = 5
#: Links looked at: those of the ranks whose exits differ most from the others'.
LINKS = 4


@dataclass(frozen=True)
class Rounds:
    """The rounds of a group. By round: its step, when the last rank came, its transfer, the usual one of its kind and size
    (NaN: unknown), what it took beyond, and the class of its size."""

    group: Group
    step: Ints
    last_ns: Floats
    transfer_ns: Floats
    usual_ns: Floats
    slow_ns: Floats
    size: Floats

    def some(self, which: slice) -> Rounds:
        group = self.group.some(which)
        times = (self.last_ns, self.transfer_ns, self.usual_ns, self.slow_ns, self.size)
        return Rounds(group, self.step[which], *(value[which] for value in times))


class Link(NamedTuple):
    """A rank's place, and whether it leaves after the others (what it receives is slow) or before them (what it sends is)."""

    rank: int
    late: bool


@dataclass(frozen=True)
class Replayed:
    """`step`: labels; `duration_ns`: steps x scenarios, those of SHARED, then one for each of `without`, ranks' places, then one
    for each of `links`.

    `path_ns`: ranks x WORK: work on the steps' critical paths; `path_transfer_ns`: the transfers there, each step's.
    """

    step: Ints
    without: list[int]
    links: list[Link]
    duration_ns: Floats
    path_ns: Floats
    path_transfer_ns: Floats


def replay(
    rounds: Sequence[Rounds], ranks: Sequence[RankCollectives], telling: Sequence[int] = ()
) -> Replayed | None:
    """Replay the labelled rounds of complete groups; None where there are none. Cost is linear in rounds x ranks.

    `telling`: kinds of collectives whose ends tell who leaves late, beside the clocks.
    """
    rounds = [r for r in rounds if r.group.complete and (r.step >= 0).any()]
    if not rounds:
        return None
    number = np.concatenate([np.full(len(r.step), i) for i, r in enumerate(rounds)])
    index = np.concatenate([np.arange(len(r.step)) for r in rounds])
    step = np.concatenate([r.step for r in rounds])
    order = np.lexsort((np.concatenate([r.last_ns for r in rounds]), step))
    order = order[step[order] >= 0]
    number, index, step = number[order], index[order], step[order]
    candidates, links = _candidates(rounds, ranks), _links(rounds, ranks, telling)
    labels, first = np.unique(step, return_index=True)
    durations = np.zeros((len(labels), SHARED + len(candidates) + len(links)))
    path_transfer = np.zeros(len(labels))
    path = np.zeros((len(ranks), len(WORK)))
    for members, rows in _alike(number, first, len(step), len(ranks)):
        chunk = _Chunk(rounds, ranks, number[rows[0]], index[rows], telling)
        durations[members] = chunk.durations(candidates, links)
        path_transfer[members] = chunk.add_path(path)
    return Replayed(labels, candidates, links, durations, path, path_transfer)


def _candidates(rounds: Sequence[Rounds], ranks: Sequence[RankCollectives]) -> list[int]:
    """Places of the ranks whose work exceeds the others' most, in sum over rounds in which it does."""
    late = np.zeros(len(ranks))
    for part in (part for r in rounds for part in r.group.parts()):
        work = gather(part, [rank.work_ns for rank in ranks])
        late += np.nansum(np.maximum(work - median_of(work), 0.0), axis=1)
    most = np.argsort(-late, kind="stable")[:CANDIDATES]
    return sorted(int(i) for i in most if late[i] > 0 and late[i] >= CANDIDATE_SHARE * late[most[0]])


def _links(rounds: Sequence[Rounds], ranks: Sequence[RankCollectives], telling: Sequence[int]) -> list[Link]:
    """The links of the ranks that leave farthest from the others, as a rule."""
    if not telling:
        return []
    apart = [np.full((len(ranks), 1), np.nan)]
    for part in (part for r in rounds for part in r.group.parts()):
        kind = common(gather(part, [rank.columns["kind"] for rank in ranks], missing=UNKNOWN))
        end = gather(part, [rank.end_ns for rank in ranks])[:, np.isin(kind, telling)]
        apart.append(end - median_of_others(end))
    usual = np.nan_to_num(median_of(np.hstack(apart).T))
    most = np.argsort(-np.abs(usual), kind="stable")[:LINKS]
    return [Link(int(rank), bool(usual[rank] > 0)) for rank in most if usual[rank]]


def _alike(number: Ints, first: Ints, rounds: int, ranks: int) -> Iterator[tuple[Ints, Ints]]:
    """Steps that meet in the same groups in the same order, some at a time: their places, and their rounds (steps x rounds)."""
    count = np.diff(np.append(first, rounds))
    for length in np.unique(count):
        steps = np.flatnonzero(count == length)
        rows = first[steps, None] + np.arange(length)
        _, pattern = np.unique(number[rows], axis=0, return_inverse=True)
        pattern = pattern.reshape(-1)
        by_pattern = np.argsort(pattern, kind="stable")
        for same in np.split(by_pattern, np.flatnonzero(np.diff(pattern[by_pattern])) + 1):
            size = max(1, CHUNK // (int(length) * ranks))
            for at in range(0, len(same), size):
                some = same[at : at + size]
                yield steps[some], rows[some]


class _Chunk:
    """Some steps of one pattern. Arrays are by position in the pattern, of steps x members of the group that meets there."""

    def __init__(
        self,
        rounds: Sequence[Rounds],
        ranks: Sequence[RankCollectives],
        pattern: Ints,
        index: Ints,
        telling: Sequence[int],
    ) -> None:
        self.ranks, self.steps = len(ranks), len(index)
        self.members: list[Ints] = []
        #: ns of work before each collective, NaN where the profile shows no part of it; and that by phase.
        self.work: list[Floats] = []
        self.phases: list[Floats] = []
        self.transfer: list[Floats] = []
        self.usual: list[Floats] = []
        #: From when the last came to when each rank left, where that tells something; else the transfer.
        self.leaves: list[Floats] = []
        #: Who came last, as it was; and who was last of all at the step's end.
        self.last: list[Ints] = []
        self.end = np.zeros(self.steps, np.int64)
        left = np.full((self.steps, self.ranks), np.nan)
        for number, at in zip(pattern, index.T, strict=True):
            r = rounds[number]
            members = np.flatnonzero((r.group.place >= 0).any(axis=1))
            part = Group(r.group.name, True, r.group.place[np.ix_(members, at)])
            some = [ranks[int(i)] for i in members]
            start, end, recorded = (
                gather(part, [getattr(rank, name) for rank in some]).T
                for name in ("start_ns", "end_ns", "work_ns")
            )
            before = left[:, members]
            # Before a step's first collective a rank has worked since the step before; if nothing shows that, not at all.
            work = np.where(np.isfinite(before), start - before, np.nan_to_num(recorded))
            # Where the profile lost a rank's part the rank left with the others.
            left[:, members] = np.where(np.isfinite(end), end, median_of(end.T)[:, None])
            self.members.append(members)
            self.work.append(np.where(np.isfinite(start), work, np.nan))
            by_phase = [gather(part, [rank.work_by_phase[p] for rank in some]).T for p in range(len(WORK))]
            self.phases.append(np.nan_to_num(np.stack(by_phase, axis=2)))
            self.transfer.append(r.transfer_ns[at])
            self.usual.append(np.fmin(r.usual_ns[at], r.transfer_ns[at]))
            kind = common(gather(part, [rank.columns["kind"] for rank in some], missing=UNKNOWN))
            leaves = left[:, members] - r.last_ns[at][:, None]
            self.leaves.append(np.where(np.isin(kind, telling)[:, None], leaves, r.transfer_ns[at][:, None]))

    def durations(self, candidates: Sequence[int], links: Sequence[Link]) -> Floats:
        """steps x scenarios, ns; keeps who came last as it was."""
        scenarios = SHARED + len(candidates) + len(links)
        free = np.zeros((self.steps, self.ranks, scenarios))
        for members, work, phases, transfer, usual, leaves in zip(
            self.members, self.work, self.phases, self.transfer, self.usual, self.leaves, strict=True
        ):
            took = np.repeat(work[:, :, None], scenarios, axis=2)
            even = np.fmin(work, median_of_others(work.T).T)
            took[:, :, NO_SKEW] = even
            expert = np.where(np.isfinite(work), phases[:, :, EXPERT], np.nan)
            took[:, :, BALANCED] += _mean(expert)[:, None] - expert
            for number, rank in enumerate(candidates):
                at = int(np.searchsorted(members, rank))
                if at < len(members) and members[at] == rank:
                    took[:, at, SHARED + number] = even[:, at]
            arrival = free[:, members] + took
            arrival[np.isnan(work)] = -np.inf
            self.last.append(members[np.argmax(arrival[:, :, AS_IT_WAS], axis=1)])
            takes = np.repeat(np.broadcast_to(transfer[:, None], work.shape)[:, :, None], scenarios, axis=2)
            takes[:, :, USUAL_TRANSFERS] = usual[:, None]
            takes[:, :, [AS_THEY_LEFT, *range(SHARED + len(candidates), scenarios)]] = leaves[:, :, None]
            for number, link in enumerate(links, SHARED + len(candidates)):
                at = int(np.searchsorted(members, link.rank))
                if at < len(members) and members[at] == link.rank:
                    mine = leaves[:, at]
                    if link.late:
                        takes[:, at, number] = np.fmin(mine, median_of_others(leaves.T)[at])
                    else:
                        takes[:, :, number] = np.fmin(leaves, mine[:, None])
            free[:, members] = arrival.max(axis=1)[:, None] + takes
        self.end = np.argmax(free[:, :, AS_IT_WAS], axis=1)
        return np.asarray(free.max(axis=1))

    def add_path(self, path: Floats) -> Floats:
        """Add the work on the steps' critical paths to `path` (ranks x WORK); returns each step's transfers on it.

        From the step's end back: at each collective the path goes on with the rank that came last.
        """
        on_path, transfers = self.end.copy(), np.zeros(self.steps)
        for members, work, phases, transfer, last in zip(
            *(reversed(of) for of in (self.members, self.work, self.phases, self.transfer, self.last)),
            strict=True,
        ):
            here = np.flatnonzero(np.isin(on_path, members))
            on_path[here] = last[here]
            transfers[here] += transfer[here]
            place = np.searchsorted(members, on_path[here])
            spent = np.maximum(np.nan_to_num(work[here, place]), 0.0)
            by_phase = phases[here, place]
            total = by_phase.sum(axis=1, keepdims=True)
            share = np.divide(by_phase, total, out=np.zeros_like(by_phase), where=total > 0)
            share[total[:, 0] <= 0, OTHER] = 1.0
            np.add.at(path, on_path[here], spent[:, None] * share)
        return transfers


def _mean(values: Floats) -> Floats:
    """Mean of each row, NaN left out."""
    known = np.isfinite(values)
    return np.asarray(values.sum(axis=1, where=known) / np.maximum(known.sum(axis=1), 1))
