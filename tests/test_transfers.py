"""Usual transfers: of a kind and size, or foretold by other sizes where a time was slow."""

from __future__ import annotations

import numpy as np
import pytest

from tailscope.ranks.transfers import against_usual, size_class, verdicts

RNG = np.random.default_rng(0)


def rounds(*parts: tuple[int, float, int]) -> tuple[np.ndarray, np.ndarray]:
    """(bytes, transfer in us, how many), one after another: classes of size and transfers in ns."""
    size = np.concatenate([np.full(n, float(of)) for of, _, n in parts])
    transfer = np.concatenate([us * 1e3 * RNG.lognormal(0, 0.03, n) for _, us, n in parts])
    return size_class(size), transfer


def usual_of(size: np.ndarray, transfer: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return against_usual(np.zeros(len(size)), size, transfer, np.full(len(size), 1e3))


def test_a_slow_time_is_slow_though_all_rounds_of_a_size_were_in_it() -> None:
    """A latency of 20 us and a us for each 10 kB; for a while five times as long, when only sizes of that while occur."""
    at = [10_000, 14_000, 20_000, 28_000, 40_000]
    parts = [(n, 20 + n / 1e4, 12) for n in at * 4]
    slow = [(n, 5 * (20 + n / 1e4), 12) for n in (52_000, 70_000, 90_000)]
    size, transfer = rounds(*parts, *slow, *parts)
    usual, beyond = usual_of(size, transfer)
    where = np.arange(len(size))
    inside = (where >= len(at) * 48) & (where < len(at) * 48 + 36)
    assert np.all(beyond[inside] > 0)
    assert not np.any(beyond[~inside])
    assert usual[inside] == pytest.approx(transfer[inside] / 5, rel=0.3)


def test_a_slow_time_is_slow_though_most_rounds_of_a_size_were_in_it() -> None:
    size, transfer = rounds((65_536, 30, 20), (65_536, 150, 60), (65_536, 30, 10))
    usual, beyond = usual_of(size, transfer)
    assert np.flatnonzero(beyond).tolist() == list(range(20, 80))
    assert usual == pytest.approx(30e3, rel=0.05)


def test_a_few_rounds_before_a_slow_time_tell_where_other_sizes_take_as_long() -> None:
    beside = [(n, 30, 30) for n in (40_000, 50_000, 80_000, 100_000)]
    size, transfer = rounds(*beside, (65_536, 30, 6), (65_536, 150, 60), *beside)
    _, beyond = usual_of(size, transfer)
    assert np.flatnonzero(beyond).tolist() == list(range(126, 186))
    alone, transfer = rounds((65_536, 30, 6), (65_536, 150, 60))
    assert not np.any(usual_of(alone, transfer)[1]), "without them the few may be the odd ones"


def test_two_kinds_of_one_size_are_not_a_slow_time() -> None:
    """One short and three long ones, over and over: nothing became slow."""
    size, transfer = rounds(*[(65_536, 30, 1), (65_536, 150, 3)] * 20)
    _, beyond = usual_of(size, transfer)
    assert not np.any(beyond)


def test_a_size_that_only_a_slow_time_has_is_slow_as_those_before_it() -> None:
    """Right before it others are slow; right after it the slow time is over."""
    sizes = [10_000, 14_000, 20_000, 28_000, 40_000]
    parts = [(n, 20 + n / 1e4, 24) for n in sizes]
    slow = [(20_000, 5 * 22, 16), (52_000, 5 * 25.2, 8)]
    size, transfer = rounds(*parts, *slow, (52_000, 25.2, 4), *parts)
    _, beyond = usual_of(size, transfer)
    where = np.arange(len(size))
    assert np.flatnonzero(beyond).tolist() == where[120:144].tolist()


@pytest.mark.parametrize(
    "parts",
    [
        [(65_536, 30, 50), (1 << 20, 60, 10), (64 << 20, 5_000, 4)],
        [(32_768, 25, 6), (8 << 20, 150, 40), (64 << 20, 1_600, 40)],
    ],
)
def test_sizes_of_other_protocols_are_not_slow(parts: list[tuple[int, float, int]]) -> None:
    """Small messages take long for their bytes: latency and protocol decide, and no line through all sizes holds."""
    size, transfer = rounds(*parts * 20)
    usual, beyond = usual_of(size, transfer)
    assert not np.any(beyond)
    assert usual == pytest.approx(transfer, rel=0.2)


def test_long_transfers_of_ranks_that_came_far_apart_are_not_the_usual_ones() -> None:
    transfer = np.concatenate([np.full(40, 100e3), np.full(20, 900e3)])
    skew = np.full(60, 500e3)
    usual, slow = against_usual(np.zeros(60), np.full(60, -1.0), transfer, skew)
    assert set(usual) == {100e3}
    assert np.all(slow[40:] == 800e3)


def test_what_a_collective_is_mostly() -> None:
    """Rank 1 comes 800 us late; both at once; half and half; and clocks that say another thing than stays."""
    stay = np.array([[900e3, 100e3, 150e3, 900e3], [100e3, 100e3, 50e3, 100e3]])
    wait = np.array([[800e3, 0.0, 100e3, 0.0], [0.0, 0.0, 0.0, 0.0]])
    transfer = stay.min(axis=0)
    assert verdicts(stay, wait, transfer, 1e3).tolist() == [1, 0, 2, 3]
