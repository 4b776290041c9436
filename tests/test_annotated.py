"""Annotated steps of a profile find their steps of the engine, however far the host runs ahead."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailscope.ranks.annotated import Annotated, placed
from tailscope.stats import Floats, Ints

MS = 1_000_000
#: Where batches are not known.
NOTHING = np.nan


def steps(lengths_ms: list[int], batches: list[tuple[int, int]]) -> tuple[Ints, Ints, Floats]:
    ends = np.cumsum(lengths_ms) * MS
    return np.concatenate([[0], ends[:-1]]), ends, np.array(batches, np.float64)


@given(
    st.lists(
        st.tuples(st.integers(4, 60), st.sampled_from([(0, 3), (0, 4), (2048, 0), (2048, 3)])),
        min_size=8,
        max_size=120,
    ),
    st.sampled_from([-1.4, -0.3, 0.0, 0.6, 2.0]),
    st.integers(0, 2**32 - 1),
)
def test_each_finds_its_own_though_batches_repeat(
    made: list[tuple[int, tuple[int, int]]], ahead_ms: float, seed: int
) -> None:
    """A short annotation about when the step before ends: whether a little before or after it, says nothing."""
    start, end, batch = steps([length for length, _ in made], [b for _, b in made])
    rng = np.random.default_rng(seed)
    begun = start - round(ahead_ms * MS) + rng.integers(-MS // 4, MS // 4, len(start))
    index, alike = placed(Annotated(begun, begun + MS // 16, batch), Annotated(start, end, batch))
    if len({b for _, b in made}) > 1:
        assert (index == np.arange(len(start))).all() and (alike == 1).all()
    else:
        # Steps that are all alike cannot be told apart; that none is said to be two holds.
        assert len(set(index[index >= 0])) == (index >= 0).sum()


def test_a_step_that_the_engine_does_not_tell_of_shifts_no_other() -> None:
    rng = np.random.default_rng(1)
    batches = [(0, int(n)) for n in rng.integers(1, 9, 80)]
    start, end, batch = steps([10] * 80, batches)
    told = np.delete(np.arange(80), [20, 21, 50])
    index, alike = placed(
        Annotated(start + MS, start + 9 * MS, batch), Annotated(start[told], end[told], batch[told])
    )
    mine = np.array([int(np.flatnonzero(told == i)[0]) if i in told else -1 for i in range(80)])
    near = np.isin(np.arange(80), [19, 20, 21, 22, 49, 50, 51])
    assert (index[~near] == mine[~near]).all()
    assert (alike[~near] == 1).all()


@pytest.mark.parametrize("known", [True, False])
def test_without_batches_time_decides(known: bool) -> None:
    start, end, batch = steps([10] * 12, [(0, 1)] * 12)
    batch = batch if known else np.full_like(batch, NOTHING)
    index, alike = placed(Annotated(start + MS, end - MS, batch), Annotated(start, end, batch))
    assert index.tolist() == list(range(12))
    assert set(alike) == {1 if known else -1}


def test_what_is_long_before_all_steps_is_none_of_them() -> None:
    start, end, batch = steps([10] * 5, [(0, 1)] * 5)
    index, _ = placed(Annotated(start - 5_000 * MS, end - 5_000 * MS, batch), Annotated(start, end, batch))
    assert (index == -1).all()


def test_a_long_hole_in_the_engines_log_takes_no_memory() -> None:
    """The lag jumps by as many steps as are missing."""
    n = 60_000
    rng = np.random.default_rng(2)
    start, end, batch = steps([10] * n, [(0, int(x)) for x in rng.integers(1, 9, n)])
    told = np.delete(np.arange(n), np.arange(5_000, 45_000))
    tracemalloc.start()
    index, _ = placed(
        Annotated(start + MS, start + 9 * MS, batch), Annotated(start[told], end[told], batch[told])
    )
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (index[:4_990] == np.arange(4_990)).all()
    assert (index[45_020:] == np.arange(5_020, len(told))).all()
    assert peak < 200e6


@pytest.mark.parametrize("off_ms", [-40.0, -9.7, 0.0, 19.2])
def test_a_clock_that_is_off_is_found_where_batches_differ(off_ms: float) -> None:
    """Long stretches of one request that decodes are all alike: the offset, which drifts, is learnt where others come."""
    rng = np.random.default_rng(7)
    n = 2_000
    alone = rng.random(n) < 0.9
    requests = np.where(np.repeat(rng.random(n // 50) < 0.6, 50), 1, rng.integers(1, 6, n))
    start, end, batch = steps(
        [6] * n,
        [(0 if a else int(rng.integers(20, 400)), int(r)) for a, r in zip(alone, requests, strict=True)],
    )
    off = (
        round(off_ms * MS)
        + (np.arange(n) * 0.3e-3 * MS).astype(np.int64)
        + rng.integers(-MS // 2, MS // 2, n)
    )
    index, alike = placed(Annotated(start + off, end + off, batch), Annotated(start, end, batch))
    assert (index == np.arange(n)).mean() > 0.995
    assert (alike[index >= 0] == 1).all()
