"""Annotated steps of a profile find their steps of the engine, however far the host runs ahead."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailscope.ranks.annotated import placed
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
    index, alike = placed(begun, begun + MS // 16, batch, start, end, batch)
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
    index, alike = placed(start + MS, start + 9 * MS, batch, start[told], end[told], batch[told])
    mine = np.array([int(np.flatnonzero(told == i)[0]) if i in told else -1 for i in range(80)])
    near = np.isin(np.arange(80), [19, 20, 21, 22, 49, 50, 51])
    assert (index[~near] == mine[~near]).all()
    assert (alike[~near] == 1).all()


@pytest.mark.parametrize("known", [True, False])
def test_without_batches_time_decides(known: bool) -> None:
    start, end, batch = steps([10] * 12, [(0, 1)] * 12)
    batch = batch if known else np.full_like(batch, NOTHING)
    index, alike = placed(start + MS, end - MS, batch, start, end, batch)
    assert index.tolist() == list(range(12))
    assert set(alike) == {1 if known else -1}


def test_what_is_long_before_all_steps_is_none_of_them() -> None:
    start, end, batch = steps([10] * 5, [(0, 1)] * 5)
    index, _ = placed(start - 5_000 * MS, end - 5_000 * MS, batch, start, end, batch)
    assert (index == -1).all()


def test_a_long_hole_in_the_engines_log_takes_no_memory() -> None:
    """The lag jumps by as many steps as are missing."""
    n = 60_000
    rng = np.random.default_rng(2)
    start, end, batch = steps([10] * n, [(0, int(x)) for x in rng.integers(1, 9, n)])
    told = np.delete(np.arange(n), np.arange(5_000, 45_000))
    tracemalloc.start()
    index, _ = placed(start + MS, start + 9 * MS, batch, start[told], end[told], batch[told])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (index[:4_990] == np.arange(4_990)).all()
    assert (index[45_020:] == np.arange(5_020, len(told))).all()
    assert peak < 200e6
