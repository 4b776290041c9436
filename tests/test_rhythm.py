"""Whether events at a beat are told from events at random."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailscope import rhythm


def beat(n: int, period: float, missing: float, jitter: float, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    at = np.arange(n) * period + rng.uniform(0, period)
    return np.sort((at + rng.normal(0, jitter, n))[rng.random(n) >= missing])


@pytest.mark.parametrize(
    ("n", "period", "missing", "jitter"),
    [(4, 30.0, 0.0, 0.02), (6, 25.0, 0.0, 0.05), (30, 10.0, 0.5, 0.05), (60, 3.0, 0.2, 0.05)],
)
def test_a_beat_is_found_though_places_are_missing(
    n: int, period: float, missing: float, jitter: float
) -> None:
    at = beat(n, period, missing, jitter, seed=n)
    found = rhythm.find(at, np.full(len(at), 0.5), 0.01)
    assert found is not None
    assert found.p_value < 0.001
    assert found.period == pytest.approx(period, rel=0.01)
    assert found.places == round((at[-1] - at[0]) / period) + 1
    # One or two far from their places may count as strays.
    assert len(found.members) >= 0.95 * len(at)


def test_others_of_another_size_do_no_harm() -> None:
    rng = np.random.default_rng(3)
    at = beat(15, 10.0, 0.2, 0.05, seed=3)
    others = rng.uniform(0, 150, 80)
    size = np.concatenate([np.full(len(at), 0.5), 0.05 * (1 + rng.pareto(2.5, 80))])
    order = np.argsort(np.concatenate([at, others]))
    found = rhythm.find(np.concatenate([at, others])[order], size[order], 0.01)
    assert found is not None
    assert found.p_value < 0.001
    assert found.period == pytest.approx(10.0, rel=0.01)


def in_bursts(rng: np.random.Generator, n: int) -> np.ndarray:
    return np.sort(rng.choice(rng.uniform(0, 150, max(2, n // 6)), n) + rng.exponential(1.5, n))


def at_random(rng: np.random.Generator, n: int) -> np.ndarray:
    return np.sort(rng.uniform(0, 150, n))


def with_drift(rng: np.random.Generator, n: int) -> np.ndarray:
    return np.cumsum(np.exp(0.3 * np.cumsum(rng.normal(0, 0.5, n))) * rng.exponential(1.0, n))


@pytest.mark.parametrize("draw", [at_random, in_bursts, with_drift])
def test_events_to_no_beat_seldom_have_one(draw: object) -> None:
    """At a nominal 1 %, of which Bonferroni leaves less: 300 draws, each of 4 to 100 events, sizes of a heavy tail."""
    assert callable(draw)
    rng = np.random.default_rng(7)
    p_values = []
    for _ in range(300):
        at = draw(rng, int(rng.integers(4, 100)))
        found = rhythm.find(at, 0.05 * (1 + rng.pareto(2.5, len(at))), 0.01)
        p_values.append(1.0 if found is None else found.p_value)
    assert sum(p < 0.01 for p in p_values) <= 8  # binomial, 300 at 1 %: beyond 8 once in 300 such tests
    assert sum(p < 0.001 for p in p_values) <= 2


def test_what_is_known_to_no_better_than_half_a_period_has_none() -> None:
    at = beat(20, 1.0, 0.0, 0.0, seed=1)
    found = rhythm.find(at, np.ones(20), 0.45)
    assert found is None or found.p_value > 0.5


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e3)), max_size=40),
    st.floats(1e-6, 10),
)
def test_any_events_give_a_probability_and_places_for_each(
    events: list[tuple[float, float]], resolution: float
) -> None:
    events.sort()
    at, size = (np.array([e[i] for e in events], np.float64) for i in (0, 1))
    found = rhythm.find(at, size, resolution)
    if found is not None:
        assert 0 <= found.p_value <= 1
        assert found.period > 0
        assert rhythm.MIN_EVENTS <= len(found.members) <= found.places
        assert (np.diff(found.members) > 0).all()
