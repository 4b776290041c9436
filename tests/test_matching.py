"""The same collective found on all ranks, on worlds whose every nanosecond is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from rank_worlds import MS, OFFSETS_MS, US, Lived, World, live

from tailscope.ranks.collectives import KINDS
from tailscope.ranks.rounds import match as match_rounds
from tailscope.ranks.sequence import UNKNOWN, Match
from tailscope.ranks.sequence import Sequence as RankSequence

#: Collectives 35 to 95 us apart, as on GPUs in decode.
DENSE = {"attention_ns": 25 * US, "expert_ns": 30 * US, "between_ns": 50 * US, "transfer_ns": 15 * US, "straggle_ns": 3 * US}  # fmt: skip


def sequence(lived: Lived, rank: int, group: str = "world") -> tuple[RankSequence, NDArray[np.int64]]:
    """What the profile of a rank shows of a group, and which collectives those are."""
    shown = [r for r in lived.shown(rank) if r.group == group]
    named = lived.world.metadata == "named"
    return (
        RankSequence(
            index=np.arange(len(shown)),
            kind=np.array([KINDS.index(r.kind) for r in shown], np.int64),
            seq=np.array([r.seq if named else UNKNOWN for r in shown], np.int64),
            start_ns=lived.clock(rank, [r.came[rank] for r in shown]),
            end_ns=lived.clock(rank, [r.left[rank] for r in shown]),
        ),
        np.array([r.id for r in shown], np.int64),
    )


def matched(world: World) -> tuple[int, int, int, Match]:
    """(pairs that are right, pairs, pairs there are, match) of ranks 0 and 1."""
    lived = live(world)
    (one, mine), (other, theirs) = sequence(lived, 0), sequence(lived, 1)
    match = match_rounds(one, other, shared_clock=not world.hosts)
    assert 2 * len(match.one) + match.unmatched == len(mine) + len(theirs)
    assert len(np.unique(match.one)) == len(match.one) == len(np.unique(match.other))
    right = int(np.sum(mine[match.one] == theirs[match.other]))
    return right, len(match.one), len(np.intersect1d(mine, theirs)), match


def lags(rng: np.random.Generator) -> dict[str, Any]:
    return {"begins_late": tuple(rng.integers(0, 41, 2)), "ends_early": tuple(rng.integers(0, 11, 2))}


def drops(rng: np.random.Generator) -> dict[str, Any]:
    """One to five lost of each, somewhere in the middle."""
    lost = [rng.choice(np.arange(45, 75), rng.integers(1, 6), replace=False) for _ in range(2)]
    return {"dropped": {rank: tuple(int(i) for i in places) for rank, places in enumerate(lost)}}


def a_run_lost(rng: np.random.Generator) -> dict[str, Any]:
    first = int(rng.integers(45, 70))
    return {"dropped": {1: tuple(range(first, first + int(rng.integers(1, 6))))}}


def nothing(rng: np.random.Generator) -> dict[str, Any]:
    return {}


def both(rng: np.random.Generator) -> dict[str, Any]:
    return {**lags(rng), **drops(rng)}


MATCHED: dict[str, tuple[dict[str, Any], Callable[[np.random.Generator], dict[str, Any]]]] = {
    **{
        f"{metadata}, {offset:g} ms, {hurt.__name__}": ({"metadata": metadata, "hosts": ("a", "b"), "offset_ns": (0, offset * MS)}, hurt)
        for metadata in ("named", "plain")
        for offset in OFFSETS_MS
        for hurt in (nothing, lags, both)
    },
    "one host, lags": ({}, lags),
    "one host, drops": ({}, both),
    "a run lost on one side": ({"hosts": ("a", "b"), "offset_ns": (0, 2 * MS)}, a_run_lost),
    "all_reduces alone": ({"layout": "dense", "hosts": ("a", "b"), "offset_ns": (0, 2 * MS)}, both),
    "all_to_alls alone": ({"layout": "all_to_all", "hosts": ("a", "b"), "offset_ns": (0, -20 * MS)}, both),
    "clocks drift": ({"hosts": ("a", "b"), "offset_ns": (0, 20 * MS), "drift_ppm": (0, 50), "steps": 40, "layers": 8}, both),
    "dense": ({"layout": "dense", "hosts": ("a", "b"), "offset_ns": (0, 2 * MS), **DENSE}, both),
    "dense, one host": ({"layout": "dense", **DENSE}, both),
    "one host with a clock that is off": ({"offset_ns": (0, 20 * MS)}, lags),
    "ends up to 50 us apart": ({"hosts": ("a", "b"), "offset_ns": (0, 2 * MS), "straggle_ns": 50 * US}, both),
    "held up when leaving": ({"hosts": ("a", "b"), "offset_ns": (0, 2 * MS), "hiccup_every": 9, "hiccup_ns": 600 * US}, lags),
    "two steps": ({"hosts": ("a", "b"), "offset_ns": (0, 2 * MS), "steps": 2, "layers": 2, "begins_late": (0, 3)}, nothing),
}  # fmt: skip


@pytest.mark.parametrize("case", MATCHED)
def test_match_finds_the_same_collective_and_pairs_no_others(case: str) -> None:
    changes, hurt = MATCHED[case]
    right = pairs = there = 0
    for seed in range(4):
        world = World(ranks=2, seed=seed, **{"steps": 14, **changes})
        result = matched(replace(world, **hurt(np.random.default_rng(1000 + seed))))
        right, pairs, there = right + result[0], pairs + result[1], there + result[2]
    assert there >= 20
    assert right >= 0.99 * pairs
    assert right >= 0.99 * there


def test_steps_that_repeat_to_the_ns_are_matched_by_the_smallest_offset() -> None:
    """Half a layer is 0.8 ms; clocks further apart than that cannot be told from one layer more."""
    world = World(ranks=2, noise=0.0, straggle_ns=0.0, hosts=("a", "b"), offset_ns=(0, 0.5 * MS), steps=14)
    right, pairs, there, match = matched(replace(world, begins_late=(0, 16)))
    assert (right, pairs) == (there, there)
    assert match.offset_ns == pytest.approx(0.5 * MS, abs=10)


def simple(kinds: Sequence[int], seqs: Sequence[int], ends: Sequence[int]) -> RankSequence:
    end = np.array(ends, np.int64) * MS
    return RankSequence(
        np.arange(len(kinds)), np.array(kinds, np.int64), np.array(seqs, np.int64), end - 10 * US, end
    )


def test_calls_of_one_number_are_matched_by_occurrence() -> None:
    """A coalesced call gives several kernels one number; another kind may have it too."""
    one = simple([0, 0, 0, 1, 0], [4, 5, 5, 5, 6], [0, 1, 2, 3, 4])
    other = simple([0, 0, 1, 0, 2], [5, 5, 5, 6, 6], [1, 2, 3, 4, 5])
    match = match_rounds(one, other, shared_clock=True)
    assert list(zip(match.one.tolist(), match.other.tolist(), strict=True)) == [
        (1, 0),
        (2, 1),
        (3, 2),
        (4, 3),
    ]
    assert (match.unmatched, match.offset_ns) == (2, 0.0)


@pytest.mark.parametrize("shared", [True, False])
def test_against_nothing_nothing_is_matched(shared: bool) -> None:
    some, none = simple([0, 1, 0], [-1, -1, -1], [0, 1, 2]), simple([], [], [])
    for one, other, unmatched in ((some, none, 3), (none, some, 3), (none, none, 0)):
        match = match_rounds(one, other, shared_clock=shared)
        assert (len(match.one), len(match.other), match.unmatched) == (0, 0, unmatched)


def test_other_kinds_are_no_counterparts() -> None:
    match = match_rounds(
        simple([0] * 20, [-1] * 20, range(20)), simple([1] * 20, [-1] * 20, range(20)), shared_clock=True
    )
    assert (len(match.one), match.unmatched) == (0, 40)
