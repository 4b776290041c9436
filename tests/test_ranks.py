"""Ranks against each other: collectives matched, clocks aligned, waits measured, stragglers named; on worlds whose
every nanosecond is known, and on real profiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import rank_worlds
import worlds
from numpy.typing import NDArray
from rank_worlds import LAYOUTS, MS, US, Lived, Slow, World, live, several
from real import CAPTURES, CORPUS, needs_captures, needs_corpus

from tailscope import registry
from tailscope.align import Scope
from tailscope.config import Config
from tailscope.engine import diagnose
from tailscope.ingest import ingest
from tailscope.model import Decision, Diagnosis, Finding
from tailscope.parts import SourceWriter
from tailscope.ranks import waits
from tailscope.ranks.clocks import SAME_HOST_NS, Clock, connected, fit_clocks
from tailscope.ranks.collectives import KINDS
from tailscope.ranks.rounds import match as match_rounds
from tailscope.ranks.sequence import UNKNOWN, Match
from tailscope.ranks.sequence import Sequence as RankSequence
from tailscope.ranks.windows import find_windows
from tailscope.schema import BY_NAME
from tailscope.source import Options
from tailscope.store import Trace

RULE, SQL = next((rule, sql) for rule, sql in registry.rules() if rule.name == "straggler-rank")
HOSTS = tuple("abcdefghijklmnop")
OFFSETS_MS = (0.0, 0.1, 0.5, 2.0, 20.0)
#: Collectives 35 to 95 us apart, as on GPUs in decode.
DENSE = {"attention_ns": 25 * US, "expert_ns": 30 * US, "between_ns": 50 * US, "transfer_ns": 15 * US, "straggle_ns": 3 * US}  # fmt: skip


def apart(ranks: int, offset_ms: float) -> dict[str, Any]:
    """Each rank on a host of its own, clocks up to so much before and behind."""
    offsets = [offset_ms * MS * (1 if rank % 2 else -1) * rank / (ranks - 1) for rank in range(ranks)]
    return {"ranks": ranks, "hosts": HOSTS[:ranks], "offset_ns": tuple(offsets)}


# -- the same collective --------------------------------------------------------------------------


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


# -- clocks ---------------------------------------------------------------------------------------


def times(lived: Lived) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Starts and ends, ranks x rounds, NaN where a profile does not show a rank's part."""
    shape = (lived.world.ranks, len(lived.windows[0]))
    start, end = np.full(shape, np.nan), np.full(shape, np.nan)
    for rank in range(lived.world.ranks):
        for r in lived.shown(rank):
            start[rank, r.id], end[rank, r.id] = lived.clock(rank, [r.came[rank], r.left[rank]])
    return start, end


def within(world: World, clocks: Sequence[Clock]) -> bool:
    """Whether the clocks lie apart as they truly do, up to their stated errors."""
    middle = np.mean([np.mean(clock.times_ns) for clock in clocks])
    for i, one in enumerate(clocks):
        for j, other in enumerate(clocks[:i]):
            drift = (world.of(world.drift_ppm, i) - world.of(world.drift_ppm, j)) * 1e-6
            true = world.of(world.offset_ns, i) - world.of(world.offset_ns, j) + drift * middle
            told = float(one.of(np.array([middle]))[0] - other.of(np.array([middle]))[0])
            if abs(told - true) > np.hypot(one.error_ns, other.error_ns):
                return False
    return True


APART: dict[str, Any] = {"hosts": HOSTS[:4], "offset_ns": (0, 1 * MS, 20 * MS, -5 * MS)}
FITTED: dict[str, dict[str, Any]] = {
    "all in all rounds": {},
    "drift": {"drift_ppm": (0, 30, -50, 10)},
    "begin and end at different rounds": {"begins_late": (0, 40, 10, 20), "ends_early": (20, 0, 10, 20)},
    "groups side by side": {"tp": 2},
    "groups side by side and drift": {"tp": 2, "drift_ppm": (0, 0, 50, 50)},
}


@pytest.mark.parametrize("case", FITTED)
def test_offsets_lie_within_their_stated_error(case: str) -> None:
    worlds = several(World(**APART, steps=14), range(8), **FITTED[case])
    good = [within(w, fit_clocks(*times(live(w)), HOSTS[:4])) for w in worlds]
    assert sum(good) >= 0.95 * len(good)


def test_stated_errors_are_small() -> None:
    """As far apart as ends lie, not as clocks do."""
    fitted = fit_clocks(*times(live(World(**APART))), HOSTS[:4])
    assert {clock.basis for clock in fitted} == {"ends of collectives"}
    assert max(clock.error_ns for clock in fitted) < 15 * US


def ticks(drift_ppm: float, seed: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Two ranks that leave 400 collectives, 10 ms apart, within 5 us; the second's clock drifts."""
    rng = np.random.default_rng(seed)
    true = np.arange(400) * 10.0 * MS
    end = np.stack(
        [true + rng.uniform(0, 5_000, 400), true * (1 + drift_ppm * 1e-6) + rng.uniform(0, 5_000, 400)]
    )
    return end - 100 * US, end


@pytest.mark.parametrize("drift_ppm", [2.0, 20.0, -50.0])
def test_drift_is_found(drift_ppm: float) -> None:
    one, other = fit_clocks(*ticks(drift_ppm, 1), HOSTS[:2])
    assert (other.drift - one.drift) * 1e6 == pytest.approx(drift_ppm, abs=0.3)
    at = np.array([0.0, 4_000 * MS])
    assert other.of(at) - one.of(at) == pytest.approx(drift_ppm * 1e-6 * at, abs=3_000)


def test_no_drift_is_none() -> None:
    found = [clock.drift for seed in range(20) for clock in fit_clocks(*ticks(0.0, seed), HOSTS[:2])]
    assert max(abs(drift) for drift in found) < 1e-6
    assert sum(drift == 0 for drift in found) >= 32  # The interval is of 95 %.


def test_a_clock_that_is_stepped_or_slewed_is_followed() -> None:
    """NTP steps one clock by 2 ms half-way, and lets another run fast for a while."""
    rng = np.random.default_rng(5)
    true = np.arange(1_600, dtype=np.float64) * (10 * MS)
    stepped = np.where(np.arange(1_600) < 700, 0.0, 2.0 * MS)
    slewed = np.interp(
        true, [0, 4 * rank_worlds.S, 8 * rank_worlds.S, 16 * rank_worlds.S], [0, 0, 2 * MS, 2 * MS]
    )
    end = np.stack([true, true, true + stepped, true + slewed]) + rng.uniform(0, 5_000, (4, 1_600))
    clocks = fit_clocks(end - 100 * US, end, HOSTS[:4])
    for clock, offset in zip(clocks[2:], (stepped, slewed), strict=True):
        off = clock.of(true) - clocks[0].of(true) - offset
        assert np.mean(np.abs(off) < np.hypot(clock.error_ns, clocks[0].error_ns)) >= 0.93
        assert clock.error_ns < 20 * US
        assert len(clock.times_ns) > 2


def test_a_rank_that_always_leaves_late_is_within_the_error() -> None:
    """It looks like a clock that is ahead."""
    late = (0.0, 6.0 * US, 0.0, 2.0 * US)
    for world in several(World(**APART, leaves_late_ns=late, straggle_ns=12 * US), range(4)):
        assert within(world, fit_clocks(*times(live(world)), HOSTS[:4]))


def test_of_few_rounds_the_error_is_what_is_possible() -> None:
    """Nobody leaves before all have come: a transfer of 80 us, hidden by the slower ranks' lateness, bounds the error."""
    world = World(ranks=2, hosts=HOSTS[:2], offset_ns=(0, 3 * MS), steps=1, layers=1)
    clocks = fit_clocks(*times(live(world)), HOSTS[:2])
    assert {clock.rounds for clock in clocks} == {2}
    assert 30 * US < max(clock.error_ns for clock in clocks) < 300 * US
    assert within(world, clocks)


def test_ranks_of_a_host_share_its_clock_among_others() -> None:
    world = World(
        hosts=("a", "a", "b", "b"), offset_ns=(0, 0, 7 * MS, 7 * MS), drift_ppm=(0, 0, 30, 30), steps=40
    )
    clocks = fit_clocks(*times(live(world)), world.hosts)
    assert {clock.basis for clock in clocks} == {"ends of its host"}
    assert clocks[2].offset_ns == clocks[3].offset_ns
    assert within(world, clocks)
    # A container with a time namespace of its own does not.
    other = replace(world, offset_ns=(0, 0, 7 * MS, 9 * MS))
    clocks = fit_clocks(*times(live(other)), world.hosts)
    assert [clock.basis for clock in clocks] == ["ends of its host"] * 2 + ["ends of collectives"] * 2
    assert within(other, clocks)


def test_ranks_of_one_host_share_a_clock() -> None:
    for clock in fit_clocks(*times(live(World(straggle_ns=200 * US))), ["one"] * 4):
        assert (clock.offset_ns, clock.drift, clock.error_ns, clock.basis) == (
            0.0,
            0.0,
            SAME_HOST_NS,
            "one host",
        )


def test_a_shared_clock_is_known_as_well_as_ends_show_it() -> None:
    alike = fit_clocks(*times(live(World())), ["one"] * 4)
    assert {clock.basis for clock in alike} == {"one host"}
    assert max(clock.error_ns for clock in alike) < 15 * US
    # What may be the clock's or the way a rank leaves counts as error.
    off = fit_clocks(*times(live(World(ranks=2, offset_ns=(0, 30 * US)))), ["one"] * 2)
    assert [clock.offset_ns for clock in off] == [0.0, 0.0]
    assert 28 * US <= min(clock.error_ns for clock in off) < SAME_HOST_NS


def test_a_shared_clock_that_is_impossible_is_not_believed() -> None:
    world = World(offset_ns=(0, 0, 2 * MS, 0))
    fitted = fit_clocks(*times(live(world)), ["one"] * 4)
    assert {clock.basis for clock in fitted} == {"ends of collectives"}
    assert within(world, fitted)


@pytest.mark.parametrize("ranks", [1, 2, 17, 64])
def test_ranks_are_linked_one_through_another(ranks: int) -> None:
    """Each rank shares rounds with its neighbour alone; without one such link there are two parts."""
    end = np.full((ranks, ranks), np.nan)
    for rank in range(ranks):
        end[rank, rank] = end[rank, (rank + 1) % ranks] = 1.0
    assert connected(end)
    if ranks > 2:
        end[0] = np.nan
        end[0, 0] = 1.0
        end[-1, 0] = np.nan
        assert not connected(end)


@pytest.mark.parametrize(
    ("hosts", "basis", "error"), [(("a", "a"), "one host", SAME_HOST_NS), (("a", "b"), "none", np.inf)]
)
def test_without_rounds_in_common_there_is_no_clock(hosts: tuple[str, ...], basis: str, error: float) -> None:
    lone = np.array([[1.0, np.nan], [np.nan, 2.0]])
    for some in (np.empty((2, 0)), lone):
        clocks = fit_clocks(some, some, hosts)
        assert [(c.offset_ns, c.error_ns, c.basis) for c in clocks] == [(0.0, error, basis)] * 2


# -- windows --------------------------------------------------------------------------------------


@contextmanager
def opened(folder: Path, *some: Lived | World, parts: int = 1) -> Iterator[Trace]:
    with Trace(rank_worlds.write(folder, *some, parts=parts), threads=1) as trace:
        yield trace


def test_profiles_that_overlap_are_a_window_of_their_world(tmp_path: Path) -> None:
    one = World(name="one", ranks=2, steps=2, windows=3)
    two = World(name="two", ranks=3, steps=2, absent=(1,), twice=(2,))
    with opened(tmp_path / "t", one, two) as trace:
        windows = find_windows(trace, Scope())
        late = find_windows(trace, Scope(from_ns=rank_worlds.START_NS + 6 * rank_worlds.S))
        other = find_windows(trace, Scope(instance="two"))
    assert [(w.number, w.world, w.ranks, w.missing) for w in windows] == [
        (0, "one", [0, 1], 0),
        (1, "one", [0, 1], 0),
        (2, "one", [0, 1], 0),
        (3, "two", [0, 2], 1),
    ]
    assert [
        (d.rank, d.events < p.events) for d, p in zip(windows[3].double, windows[3].profiles[1:], strict=True)
    ] == [(2, True)]
    assert [(w.world, w.ranks) for w in late] == [("one", [0, 1])]
    assert [(w.world, w.missing) for w in other] == [("two", 1)]


def test_ranks_beyond_the_world_are_of_another(tmp_path: Path) -> None:
    """vLLM numbers ranks over all data-parallel engines, each of which may be a world."""
    tables = rank_worlds.tables(World(ranks=4, steps=2))
    size = tables["profiles"].schema.get_field_index("world_size")
    tables["profiles"] = tables["profiles"].set_column(size, "world_size", pa.array([2] * 4, pa.int64()))
    with Trace(worlds.write(tmp_path / "t", tables)) as trace:
        found = [(w.world, w.ranks, w.missing) for w in find_windows(trace, Scope())]
    assert found == [("w", [0, 1], 0), ("w/1", [2, 3], 0)]


# -- waits ----------------------------------------------------------------------------------------


def compared(folder: Path, *some: Lived | World, parts: int = 1) -> dict[str, list[dict[str, Any]]]:
    """Rows of `rank_rounds` by world."""
    with opened(folder, *some, parts=parts) as trace:
        diagnose(trace, Config())
        rows = trace.rows(
            'SELECT w.world, r.* FROM rank_rounds r JOIN (SELECT DISTINCT "window", world FROM rank_windows) w USING ("window") '
            'ORDER BY "window", "group", round, rank'
        )
    return {name: list(group) for name, group in groupby(rows, key=lambda r: str(r["world"]))}


@pytest.mark.parametrize("metadata", ["named", "plain"])
def test_waits_are_the_true_ones(tmp_path: Path, metadata: str) -> None:
    some = [
        live(World(name=f"{ms:g} ms", seed=i, metadata=metadata, tokens_are_ids=True, slow=(Slow(2, 1.6),), noise=0.1, **apart(4, ms)))
        for i, ms in enumerate(OFFSETS_MS)
    ]  # fmt: skip
    found = compared(tmp_path / "t", *some)
    for lived in some:
        rows = found[lived.world.name]
        assert len(rows) == 4 * len(lived.windows[0])
        last = []
        for row in rows:
            true = lived.windows[0][row["tokens"]]
            error, rank = 3 * row["error_ns"], row["rank"]
            assert error < 60 * US
            assert row["wait_ns"] == pytest.approx(true.wait(rank), abs=error)
            assert row["transfer_ns"] == pytest.approx(lived.world.transfer_ns, abs=lived.world.straggle_ns)
            # Waiting and transfer are all of a stay, but for how much later than it could a rank left.
            stay = row["end_ns"] - row["start_ns"]
            assert row["wait_ns"] + row["transfer_ns"] == pytest.approx(stay, abs=error)
            assert (row["step"], row["layer"], row["kind"], row["phase"]) == (
                true.step,
                true.layer,
                true.kind,
                true.phase,
            )
            if row["is_last"]:
                assert row["wait_ns"] == 0
                assert row["caused_ns"] == pytest.approx(true.caused, abs=error)
                if true.caused > error:
                    last.append(rank == true.last)
            else:
                assert (row["caused_ns"], row["own_ns"]) == (0, 0)
        assert len(last) > 50
        assert all(last)


def test_lateness_is_of_the_phase_that_took_longer(tmp_path: Path) -> None:
    some = [
        World(name=phase, slow=(Slow(1, 2.0, phase),), layout=layout, **apart(4, 0.5))
        for phase, layout in (("attention", "dense"), ("expert", "dense"))
    ]
    for phase, rows in compared(tmp_path / "t", *some).items():
        late = [r for r in rows if r["is_last"] and r["rank"] == 1 and r["own_ns"] > 200 * US]
        assert len(late) >= 35
        assert {r["late_phase"] for r in late} == {phase}
        extra = sum(r["phase_work_ns"] - r["phase_others_ns"] for r in late)
        assert sum(r["own_ns"] for r in late) == pytest.approx(extra, rel=0.1)


def test_between_dispatch_and_combine_the_experts_run_whatever_the_ops_are_called(tmp_path: Path) -> None:
    tables = rank_worlds.tables(World(slow=(Slow(1, 2.0),)))
    events = tables["rank_events"]
    names = [None if p == "expert" else p for p in events["phase"].to_pylist()]
    at = events.schema.get_field_index("phase")
    tables["rank_events"] = events.set_column(at, "phase", pa.array(names, pa.string()))
    with Trace(worlds.write(tmp_path / "t", tables)) as trace:
        diagnose(trace, Config())
        late = trace.rows("SELECT late_phase FROM rank_rounds WHERE is_last AND rank = 1 AND own_ns > 400000")
    assert len(late) >= 35
    assert {r["late_phase"] for r in late} == {"expert"}


def test_groups_side_by_side_are_kept_apart_without_their_names(tmp_path: Path) -> None:
    """Collectives outside of MoE exchanges are those of an engine's ranks."""
    rows = compared(tmp_path / "t", World(tp=2, tokens_are_ids=True))["w"]
    groups = {name: {r["rank"] for r in rows if r["group"] == name} for name in {r["group"] for r in rows}}
    assert groups == {"": {0, 1, 2, 3}, "dp0 pp0": {0, 1}, "dp1 pp0": {2, 3}}
    assert all(r["complete"] for r in rows)
    assert {(r["group"] == "", r["kind"]) for r in rows} == {
        (True, "all_gather"),
        (True, "reduce_scatter"),
        (False, "all_reduce"),
    }
    # Each round is one true collective.
    pairs = {(r["group"], r["round"], r["tokens"]) for r in rows}
    assert len(pairs) == len({(group, number) for group, number, _ in pairs}) == 160


def test_transfers_slower_than_their_like_are_told(tmp_path: Path) -> None:
    congested = {20: 200.0 * US, 45: 1.0 * MS}
    rows = compared(tmp_path / "t", World(tokens_are_ids=True, congested_ns=congested, **apart(4, 0.5)))["w"]
    slow = {r["tokens"]: r["slow_ns"] for r in rows if r["slow_ns"]}
    assert slow.keys() == congested.keys()
    assert all(slow[number] == pytest.approx(more, abs=12 * US) for number, more in congested.items())


def test_who_is_late_because_it_left_late_has_caused_nothing_of_its_own(tmp_path: Path) -> None:
    world = World(leaves_late_ns=(0, 0, 1.0 * MS, 0), noise=0.01)
    rows = compared(tmp_path / "t", world)["w"]
    last = [r for r in rows if r["is_last"] and r["work_ns"] is not None]
    assert {r["rank"] for r in last} == {2}
    assert min(r["caused_ns"] for r in last) > 0.9 * MS
    assert sum(r["own_ns"] for r in last) < 0.01 * sum(r["caused_ns"] for r in last)
    assert judged(tmp_path / "j", world)["w"].status != "found"


def key(row: Mapping[str, Any], *left_out: str) -> tuple[Any, ...]:
    return tuple((k, str(v)) for k, v in row.items() if k not in left_out)


def test_the_order_of_rows_and_parts_says_nothing(tmp_path: Path) -> None:
    world = World(slow=(Slow(1, 1.5),), twice=(2,), windows=2, **apart(3, 2.0))
    tables = rank_worlds.tables(world)
    rng = np.random.default_rng(0)
    shuffled = {name: table.take(rng.permutation(len(table))) for name, table in tables.items()}
    results = []
    for name, some, parts in (("a", tables, 1), ("b", shuffled, 3)):
        with Trace(worlds.write(tmp_path / name, some, parts)) as trace:
            diagnosis = diagnose(trace, Config())
            rows = trace.rows('FROM rank_rounds ORDER BY "window", "group", round, rank')
            results.append(([key(r) for r in rows], diagnosis.findings, diagnosis.checks))
    assert len(results[0][1]) == 2
    assert results[0] == results[1]


def test_how_many_rounds_are_compared_at_a_time_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = worlds.write(tmp_path / "t", rank_worlds.tables(World(slow=(Slow(1, 1.5),), **apart(3, 2.0))))
    results = []
    for at_once in (waits.ROWS, 7 * 3):
        monkeypatch.setattr(waits, "ROWS", at_once)
        with Trace(path) as trace:
            diagnose(trace, Config())
            rows = trace.rows('FROM rank_rounds ORDER BY "window", "group", round, rank')
            results.append([key(row) for row in rows])
    assert len(results[0]) > 7
    assert results[0] == results[1]


def test_the_order_of_ingestion_says_nothing(tmp_path: Path) -> None:
    world = World(slow=(Slow(1, 1.5),), steps=6, **apart(3, 2.0))
    tables = rank_worlds.tables(world)
    sources = sorted({str(source) for source in tables["profiles"]["source"].to_pylist()})
    results = []
    for name, order in (("a", sources), ("b", sources[::-1])):
        for source in order:
            with SourceWriter(tmp_path / name, source) as writer:
                for table, rows in tables.items():
                    writer.write(BY_NAME[table], rows.filter(pc.equal(rows["source"], pa.scalar(source))))
                writer.commit({"kind": "test"})
        with Trace(tmp_path / name) as trace:
            diagnosis = diagnose(trace, Config())
            rows_ = trace.rows('FROM rank_rounds ORDER BY "window", "group", round, rank')
            results.append(([key(r) for r in rows_], diagnosis.findings))
    assert len(results[0][1]) == 1
    assert results[0] == results[1]


def test_a_constant_on_all_clocks_changes_nothing(tmp_path: Path) -> None:
    world = World(slow=(Slow(1, 1.5),), **apart(3, 2.0))
    later = replace(world, name="later", offset_ns=tuple(o + 3_600_000 * MS for o in world.offset_ns))
    found = compared(tmp_path / "t", world, later)
    moving = ("world", "window", "start_ns", "end_ns")
    for one, other in zip(found["w"], found["later"], strict=True):
        assert [k for k in one if k not in moving and one[k] != other[k]] == []
        assert other["start_ns"] - one["start_ns"] == 3_600_000 * MS


def test_other_names_for_the_ranks_give_the_same_with_those_names(tmp_path: Path) -> None:
    new = {0: 2, 1: 0, 2: 1}
    tables = rank_worlds.tables(World(slow=(Slow(1, 1.5),), metadata="named", **apart(3, 2.0)))
    renamed = {}
    for name, table in tables.items():
        ranks = pa.array([new[int(r or 0)] for r in table["rank"].to_pylist()], pa.int64())
        renamed[name] = table.set_column(table.schema.get_field_index("rank"), "rank", ranks)
    results, culprits = [], []
    for name, some, names in (("a", tables, new), ("b", renamed, {0: 0, 1: 1, 2: 2})):
        with Trace(worlds.write(tmp_path / name, some)) as trace:
            culprits += [f.culprit.id for f in diagnose(trace, Config()).findings]
            rows = trace.rows('FROM rank_rounds ORDER BY "window", "group", round')
        results.append({(r["round"], names[r["rank"]]): r for r in rows})
    assert culprits == ["1", "0"]
    one, other = results
    assert one.keys() == other.keys()
    # Clocks are fitted from the first rank on, so that they are the same only within their error.
    for place, row in one.items():
        for name in ("wait_ns", "caused_ns", "own_ns"):
            assert row[name] == pytest.approx(other[place][name], abs=row["error_ns"])


# -- who is named ---------------------------------------------------------------------------------


def judged(folder: Path, *some: Lived | World) -> dict[str, Decision]:
    """What the rule says of each world, which has one window."""
    decisions = {}
    with opened(folder, *some) as trace:
        diagnosis = diagnose(trace, Config())
        assert "failed" not in {check.status for check in diagnosis.checks}
        rows = trace.rows(SQL, {name: value for name, value in RULE.limits.items() if f"${name}" in SQL})
        for _, window in groupby(rows, key=lambda r: r["window"]):
            of_window = list(window)
            name = str(of_window[0]["world"])
            assert name not in decisions
            decisions[name] = RULE.decide(of_window, RULE.limits)
    told = sorted((f.culprit.detail["world"], f.title) for f in diagnosis.findings if f.rule == RULE.name)
    assert told == sorted((name, f.title) for name, d in decisions.items() for f in d.findings)
    return decisions


def said(finding: Finding) -> tuple[str, str, str]:
    return finding.culprit.id, finding.culprit.detail["pattern"], finding.culprit.detail["where"]


def loud(decision: Decision) -> bool:
    return any(f.severity in ("high", "medium") for f in decision.findings)


@pytest.mark.parametrize("offset_ms", OFFSETS_MS)
def test_a_straggler_is_named_whatever_the_clocks(tmp_path: Path, offset_ms: float) -> None:
    """Persistent and transient ones, with and without sequence numbers; one may itself have the clock that is off."""
    some: list[World] = []
    expected: dict[str, tuple[str, str, str]] = {}
    for seed in range(2):
        common: dict[str, Any] = {"seed": seed, "load": 0.1, **apart(4, offset_ms)}
        late = (seed + round(offset_ms)) % 4
        some += [
            World(name=f"expert {seed}", metadata="named", slow=(Slow(late, 1.8),), **common),
            World(name=f"attention {seed}", layout="dense", slow=(Slow(late, 1.8, "attention"),), **common),
            World(
                name=f"passing {seed}",
                metadata="named",
                slow=(Slow(late, 8.0, "expert", 1, (2, 5)),),
                **common,
            ),
        ]
        expected |= {
            f"expert {seed}": (str(late), "persistent", "expert compute of 4 layers"),
            f"attention {seed}": (str(late), "persistent", "attention of 4 layers"),
            f"passing {seed}": (str(late), "transient", "expert compute of layer 1"),
        }
    decisions = judged(tmp_path / "t", *some)
    assert all(loud(d) for d in decisions.values())
    assert {name: said(f) for name, d in decisions.items() for f in d.findings} == expected
    passing = decisions["passing 1"].findings[0]
    assert passing.evidence[0].data["steps"] == [2, 5]
    assert all(len(d.findings[0].victims) == 3 for d in decisions.values())


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
def test_a_straggler_is_named_among_any_number_of_ranks(tmp_path: Path, ranks: int) -> None:
    some = several(World(metadata="named", layers=2, slow=(Slow(1, 2.0),), **apart(ranks, 2.0)), range(2))
    some.append(World(name="healthy", metadata="named", layers=2, noise=0.1, **apart(ranks, 2.0)))
    decisions = judged(tmp_path / "t", *some)
    assert decisions.pop("healthy").status == "clear"
    assert {said(d.findings[0]) for d in decisions.values()} == {
        ("1", "persistent", "expert compute of 2 layers")
    }
    assert all(loud(d) for d in decisions.values())
    victims = {victim.id for d in decisions.values() for victim in d.findings[0].victims}
    assert "1" not in victims
    assert len(victims) >= min(ranks - 1, 8)


STRAGGLERS: dict[str, World] = {
    "two engines of two ranks, no metadata": World(tp=2, hosts=("a", "a", "b", "b"), offset_ns=(0, 0, 20 * MS, 20 * MS)),
    "two engines of two ranks, named": World(tp=2, metadata="named", hosts=("a", "a", "b", "b"), offset_ns=(0, 0, 20 * MS, 20 * MS)),
    "two engines that exchange all to all": World(tp=2, layout="all_to_all", hosts=("a", "a", "b", "b"), offset_ns=(0, 0, 20 * MS, 20 * MS)),
    "one host": World(),
    "one host, its clock 20 ms off": World(offset_ns=(0, 20 * MS, 0, 0)),
    "another's clock 20 ms off": World(offset_ns=(0, 0, 20 * MS, 0)),
    "all to all alone": World(layout="all_to_all", **apart(4, 2.0)),
    "passes without a step": World(dummies=2, **apart(4, 0.5)),
    "steps counted from elsewhere": World(step_shift=(0, 3, 5, 0), **apart(4, 0.5)),
    "a second profile of two ranks": World(twice=(1, 2), **apart(4, 0.5)),
    "profiles begin late and have gaps": World(steps=14, begins_late=(0, 40, 10, 20), dropped={1: (60,), 2: (65, 70)}, **apart(4, 2.0)),
    "drift": World(drift_ppm=(0, 50, -30, 10), steps=20, metadata="named", **apart(4, 2.0)),
}  # fmt: skip


def test_a_straggler_is_named_in_all_kinds_of_worlds(tmp_path: Path) -> None:
    some = [replace(world, name=name, slow=(Slow(1, 2.0),)) for name, world in STRAGGLERS.items()]
    decisions = judged(tmp_path / "t", *some)
    assert {name: [said(f) for f in d.findings] for name, d in decisions.items()} == {
        name: [("1", "persistent", "expert compute of 4 layers")] for name in STRAGGLERS
    }
    assert all(loud(d) for d in decisions.values())


def test_healthy_worlds_raise_no_alarm(tmp_path: Path) -> None:
    """Noise, load that all share, clocks that are off, lateness that goes round."""
    kinds = {
        "noise 2 %": {"noise": 0.02, "load": 0.2},
        "noise 20 %": {"noise": 0.2, "load": 0.1},
        "two ranks": {"noise": 0.2, "metadata": "named", **apart(2, 2.0)},
        "clocks": {"noise": 0.1, "metadata": "named", **apart(4, 20.0)},
        "goes round": {"slow": tuple(Slow(step % 4, 1.5, steps=(step,)) for step in range(12)), "steps": 12, "metadata": "named", **apart(4, 0.5)},
    }  # fmt: skip
    some = [
        World(name=f"{name} {seed}", seed=seed, layers=2, **{"steps": 10, **kind})
        for name, kind in kinds.items()
        for seed in range(4)
    ]
    decisions = judged(tmp_path / "t", *some)
    assert len(decisions) == 20
    assert sum(loud(d) for d in decisions.values()) == 0


def test_lateness_that_goes_round_in_every_step_is_no_ranks(tmp_path: Path) -> None:
    slow = tuple(Slow(step % 2, 2.0, steps=(step,)) for step in range(12))
    some = several(World(layers=2, steps=12, metadata="named", slow=slow, **apart(2, 0.5)), range(3))
    decisions = judged(tmp_path / "t", *some)
    assert sum(loud(d) for d in decisions.values()) == 0


def test_what_cannot_be_decided_is_not(tmp_path: Path) -> None:
    slow = (Slow(1, 2.0),)
    some = {
        "a rank is missing": (World(absent=(3,), slow=slow), "inconclusive", "profiles of 3 of 4 ranks"),
        "one step": (World(steps=1, slow=slow), "inconclusive", "one step of 4 ranks"),
        "one rank": (World(ranks=2, absent=(1,)), "inconclusive", "profiles of 1 of 2 ranks"),
        "clocks unknown": (World(slow=(Slow(1, 1.15),), straggle_ns=800 * US, metadata="named", **apart(4, 2.0)), "inconclusive", "less than clocks are known"),
    }  # fmt: skip
    decisions = judged(tmp_path / "t", *(replace(world, name=name) for name, (world, _, _) in some.items()))
    for name, (_, status, reason) in some.items():
        assert (decisions[name].status, decisions[name].findings) == (status, ())
        assert reason in decisions[name].reason


def test_three_steps_are_too_few_to_say_that_lateness_rotates(tmp_path: Path) -> None:
    """Late in every one of them, each time elsewhere."""
    slow = tuple(Slow(1, 4.0, "expert", step, (step,)) for step in range(3))
    decision = judged(tmp_path / "t", World(ranks=2, steps=3, slow=slow))["w"]
    assert not loud(decision)
    assert decision.status == "inconclusive"


def test_two_late_steps_are_not_called_all(tmp_path: Path) -> None:
    """By noise a rank leads in others too; still it is those two that cost time."""
    slow = (Slow(1, 6.0, "expert", 1, (2, 5)),)
    some = several(World(metadata="named", slow=slow, **apart(4, 0.5)), range(4))
    decisions = judged(tmp_path / "t", *some)
    assert {said(f) for d in decisions.values() for f in d.findings} == {
        ("1", "transient", "expert compute of layer 1")
    }


def test_tokens_tell_a_loaded_rank_from_a_slow_one(tmp_path: Path) -> None:
    """Experts that take twice as long, with twice the tokens, half as many more, and as many as the others have."""
    world = World(slow=(Slow(1, 2.0),))
    tokens = {"w": 200, "half": 150, "even": 100}
    some = [
        replace(world, name=name, tokens={**dict.fromkeys(range(4), 100), 1: n}) for name, n in tokens.items()
    ]
    decisions = judged(tmp_path / "t", *some)
    found = {name: d.findings[0] for name, d in decisions.items()}
    assert {name: f.culprit.detail["cause"] for name, f in found.items()} == {
        "w": "load",
        "half": "compute and load",
        "even": "compute",
    }
    assert {name: f.severity for name, f in found.items()} == {"w": "low", "half": "high", "even": "high"}
    for name, one in found.items():
        [said] = [e for e in (*one.evidence, *one.counter_evidence) if "tokens_ratio" in e.data]
        assert said.data["tokens_ratio"] == tokens[name] / 100
        assert said.data["work_ratio"] == pytest.approx(2.0, rel=0.1)
        assert (said in one.counter_evidence) == (name == "w")
    balance = {name for name, f in found.items() if any("balance" in r.do.lower() for r in f.remedies)}
    assert balance == {"w", "half"}


def test_layouts_are_those_of_the_rounds() -> None:
    """The worlds of these tests consist of collectives that are compared."""
    assert {kind for layout in LAYOUTS.values() for kind, _ in layout.values()} <= set(KINDS)


# -- real profiles --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Read:
    """A folder of real files, ingested and diagnosed."""

    diagnosis: Diagnosis
    rows: Callable[[str], list[dict[str, Any]]]

    def findings(self) -> list[Finding]:
        return [f for f in self.diagnosis.findings if f.rule == RULE.name]

    def status(self) -> tuple[str, str]:
        [found] = [(c.status, c.reason) for c in self.diagnosis.checks if c.rule == RULE.name]
        return found

    def trust(self, check: str) -> list[tuple[str, str]]:
        return [(t.status, t.detail) for t in self.diagnosis.trust if t.check == check]


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path], Read]]:
    """Each folder is read once."""
    done: dict[Path, Read] = {}
    with ExitStack() as stack:

        def of(folder: Path) -> Read:
            if folder not in done:
                path = tmp_path_factory.mktemp("real") / "trace.parquet"
                ingest([folder], path, config=Config(), options=Options())
                trace = stack.enter_context(Trace(path))
                done[folder] = Read(diagnose(trace, Config()), trace.rows)
            return done[folder]

        yield of


VLLM = CAPTURES / "vllm-cpu"
#: The second profile of each of these runs is of a time in which rank 1 had less CPU.
TP2, EP2 = VLLM / "run2-moe-tp2", VLLM / "run3-moe-dp2-ep2-patched"


@needs_captures
def test_a_slowed_tensor_parallel_rank_is_named_in_its_window_alone(read: Callable[[Path], Read]) -> None:
    of = read(TP2)
    [found] = of.findings()
    assert (found.severity, found.basis, said(found)) == (
        "high",
        "measured",
        ("1", "persistent", "work in no single phase"),
    )
    assert [victim.id for victim in found.victims if victim.kind == "rank"] == ["0"]
    assert found.evidence[0].data["lead_steps"] == found.evidence[0].data["steps"] == 12
    assert found.evidence[1].data["slowdown"] == pytest.approx(1.86, abs=0.02)
    [second] = of.rows(
        'SELECT min(first_ns) AS low, max(last_ns) AS high FROM rank_windows WHERE "window" = 1'
    )
    assert found.window_ns == (second["low"], second["high"])
    assert of.rows("SELECT sum(unmatched)::BIGINT AS n FROM rank_windows") == [{"n": 0}]


@needs_captures
def test_a_slowed_expert_parallel_rank_is_named_with_its_experts(read: Callable[[Path], Read]) -> None:
    of = read(EP2)
    found, ordinary = of.findings()
    assert (found.severity, said(found)) == ("high", ("1", "persistent", "expert compute of 4 layers"))
    assert found.victims[0].detail["waits_in"] == "combine"
    assert found.evidence[1].data["slowdown"] == pytest.approx(2.02, abs=0.02)
    windows = of.rows(
        'SELECT "window", min(first_ns) AS low FROM rank_windows GROUP BY "window" ORDER BY "window"'
    )
    assert [f.window_ns and f.window_ns[0] for f in (ordinary, found)] == [w["low"] for w in windows]
    # Two ranks never do quite the same: in the first window they differ by a quarter.
    assert (ordinary.severity, said(ordinary)[2]) == ("low", "work in no single phase")
    assert ordinary.counter_evidence[0].data["slowdown"] == pytest.approx(1.24, abs=0.02)
    assert of.rows("SELECT sum(unmatched)::BIGINT AS n FROM rank_windows") == [{"n": 0}]


@needs_captures
@pytest.mark.parametrize("run", ["run1-dense-mixed", "run5-dense-ngram-spec"])
def test_a_lone_rank_has_nobody_to_wait_for(read: Callable[[Path], Read], run: str) -> None:
    assert read(VLLM / run / "profile").status() == ("clear", "one rank: nobody to wait for")


@needs_captures
def test_experts_slow_in_two_steps_are_found_without_blaming_their_load(read: Callable[[Path], Read]) -> None:
    of = read(CAPTURES / "torch-gloo-moe" / "slow")
    [found] = of.findings()
    assert said(found) == ("2", "transient", "expert compute of layer 1")
    assert {victim.id for victim in found.victims} == {"0", "1", "3"}
    assert found.evidence[0].data["steps"] == [2, 5]
    assert found.evidence[0].data["work_ns"] > 8 * found.evidence[0].data["others_ns"]
    assert found.evidence[-1].text.endswith("load is no cause")
    assert of.rows("SELECT max(unmatched) AS n FROM rank_windows") == [{"n": 0}]


@needs_corpus
def test_late_arrival_in_one_step_of_eight_gpus_is_measured_and_not_judged(
    read: Callable[[Path], Read],
) -> None:
    of = read(CORPUS / "param" / "dlrm_8ranks")
    assert of.status()[0] == "inconclusive"
    assert of.findings() == []
    rows = of.rows(
        "SELECT min(start_ns) AS first_ns, arg_max(rank, start_ns) AS last, max(rank) FILTER (WHERE is_last) AS told, "
        "max(start_ns) - min(start_ns) AS starts_ns, max(end_ns) - min(end_ns) AS ends_ns, max(wait_ns) AS wait_ns, "
        'count(*) AS ranks FROM rank_rounds GROUP BY "group", round ORDER BY first_ns'
    )
    assert [row["last"] for row in rows] == [row["told"] for row in rows] == [7, 7, 7, 7, 7, 5, 5, 4]
    assert {row["ranks"] for row in rows} == {8}
    assert rows[0]["starts_ns"] == rows[0]["wait_ns"] == pytest.approx(7_624 * US, abs=3 * US)
    assert rows[0]["ends_ns"] <= 3 * US
    [clocks] = of.rows("SELECT max(error_ns) AS error_ns FROM rank_clocks")
    # Five of the eight are exchanges, whose ends need not agree: the clocks are known by what is possible.
    assert clocks["error_ns"] < 150 * US


@needs_corpus
def test_two_of_128_ranks_decide_nothing_and_that_is_said(read: Callable[[Path], Read]) -> None:
    of = read(CORPUS / "hta" / "trace_filter")
    assert of.status() == (
        "inconclusive",
        "profiles of 2 of 128 ranks: the one that is waited for may be among the others",
    )
    assert of.findings() == []
    [(level, detail)] = of.trust("rank-coverage")
    assert level == "warn"
    assert "126 of 128" in detail


@needs_corpus
def test_one_of_300_ranks_decides_nothing(read: Callable[[Path], Read]) -> None:
    of = read(CORPUS / "hta" / "cpu_only")
    assert of.status()[0] == "inconclusive"
    assert "1 of 300 ranks" in of.status()[1]
    assert [detail[:12] for _, detail in of.trust("rank-coverage")] == ["1 of 1 profi", "1 profile(s)"]


@needs_captures
def test_waiting_for_a_rank_is_part_of_the_bill(read: Callable[[Path], Read]) -> None:
    of = read(EP2)
    found, ordinary = of.findings()
    assert (found.severity, said(found)) == ("high", ("1", "persistent", "expert compute of 4 layers"))
    assert ordinary.severity == "low"
    [ttft] = [row for row in of.diagnosis.classes if (row.klass, row.metric) == ("<512", "TTFT")]
    assert ttft.excess["straggler_wait"] > 0.3 * (ttft.excess_s or 0.0)
    # Both windows' late rank is paid by the same tail, each for its part.
    shares = [f.share_of_tail or 0.0 for f in (found, ordinary)]
    assert sum(shares) == pytest.approx(ttft.excess["straggler_wait"] / (ttft.excess_s or 1.0), rel=0.1)
    assert sum(shares) < ttft.excess["straggler_wait"] / (ttft.excess_s or 1.0)
    assert [(v.kind, v.id) for v in found.victims] == [("rank", "0"), ("class", "<512")]


@needs_captures
def test_steps_stopped_by_the_profiler_are_nobodys_fault(read: Callable[[Path], Read]) -> None:
    of = read(TP2)
    [found] = of.findings()
    assert (found.severity, said(found)[:2]) == ("high", ("1", "persistent"))
    longest = of.rows(
        "SELECT s.iteration, s.tile_ns, p.reason FROM steps s LEFT JOIN pauses p USING (k) ORDER BY s.tile_ns DESC LIMIT 4"
    )
    assert [row["iteration"] for row in longest] == [142, 0, 77, 196]
    assert all(row["tile_ns"] > 2_500 * MS for row in longest)
    assert all(
        word in row["reason"]
        for row, word in zip(
            longest, ("writes its files", "first batch", "profiler", "profiler"), strict=True
        )
    )
    [e2e] = [row for row in of.diagnosis.classes if (row.klass, row.metric) == ("<512", "E2E")]
    assert e2e.excess["pause"] > 0.9 * (e2e.excess_s or 0.0)
    assert abs(e2e.excess["unexplained"]) < 0.05 * (e2e.excess_s or 0.0)


def test_a_profile_without_collectives_among_others(tmp_path: Path) -> None:
    """Of what the rank did beside the others nothing is known; the others' rounds are still told."""
    tables = rank_worlds.tables(World(ranks=3, steps=4, hosts=HOSTS[:3]))
    events = tables["rank_events"]
    tables["rank_events"] = events.filter((pc.field("rank") != 2) | pc.field("collective").is_null())
    with Trace(worlds.write(tmp_path / "t", tables), threads=1) as trace:
        diagnosis = diagnose(trace, Config())
        ranks = {r["rank"] for r in trace.rows("FROM rank_rounds")}
    assert ranks == {0, 1}
    assert {c.status for c in diagnosis.checks if c.rule in ("straggler-rank", "slow-link")} <= {
        "inconclusive",
        "no-data",
    }


def test_collectives_at_one_time_are_judged_by_nobody(tmp_path: Path) -> None:
    tables = rank_worlds.tables(World(ranks=3, steps=4, hosts=HOSTS[:3]))
    events = tables["rank_events"]
    for name, value in (("start_ns", events["start_ns"][0].as_py()), ("duration_ns", 0)):
        index = events.schema.get_field_index(name)
        events = events.set_column(index, name, pa.array([value] * events.num_rows, pa.int64()))
    tables["rank_events"] = events
    with Trace(worlds.write(tmp_path / "t", tables), threads=1) as trace:
        diagnosis = diagnose(trace, Config())
    assert not diagnosis.findings
    assert "failed" not in {c.status for c in diagnosis.checks}
