"""Clocks of ranks fitted to the ends of their collectives, on worlds whose every nanosecond is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import rank_worlds
from numpy.typing import NDArray
from rank_worlds import HOSTS, MS, US, Lived, World, live, several

from tailscope.ranks.clocks import SAME_HOST_NS, Clock, connected, fit_clocks


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
