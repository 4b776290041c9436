"""Whether a few values of another kind are told from the largest of a long tail."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailscope import outliers


def steps(rng: np.random.Generator, share: float, alpha: float) -> np.ndarray:
    """A lognormal body, of which a share has a power law beside."""
    values = np.exp(rng.normal(0, 0.08, 12_000))
    struck = rng.random(len(values)) < share
    values[struck] *= 1 + rng.pareto(alpha, int(struck.sum()))
    return values


@pytest.mark.parametrize("count", [1, 2, 7, 20])
def test_values_apart_from_a_thin_tail_are_counted(count: int) -> None:
    rng = np.random.default_rng(count)
    values = steps(rng, 0.0, 1.0)
    values[:count] = rng.uniform(20, 90, count)
    found = outliers.beyond_tail(values)
    assert found is not None
    assert found.count == count
    assert found.p_value < 1e-6


def test_those_far_beyond_a_long_tail_too() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(40):
        values = steps(rng, 0.005, 3.0)
        values[0] = 400.0
        found = outliers.beyond_tail(values)
        assert found is not None
        hits += found.count == 1 and found.p_value <= 0.01
    assert hits >= 32


def test_the_largest_of_a_long_tail_are_not_apart() -> None:
    rng = np.random.default_rng(2)
    alarms = 0
    for _ in range(200):
        found = outliers.beyond_tail(
            steps(rng, float(rng.uniform(0.005, 0.02)), float(rng.uniform(1.2, 2.0)))
        )
        assert found is not None
        alarms += found.p_value <= 0.01
    # 11 of 400 are: a bound of 95 %.
    assert alarms <= 12


def test_where_a_tail_of_few_values_ends_is_no_gap_between_kinds() -> None:
    rng = np.random.default_rng(4)
    alarms = []
    for _ in range(200):
        values = steps(rng, float(rng.uniform(0.002, 0.01)), float(rng.uniform(2.0, 3.0)))
        found, unasked = outliers.beyond_tail(values, 3.0), outliers.beyond_tail(values)
        assert found is not None
        assert unasked is not None
        assert np.sort(values)[-found.count] >= 3 or not found.count
        alarms.append((found.p_value <= 0.01, unasked.p_value <= 0.01))
    # 14 of 1,000 are; without asking for values that are large themselves, one of ten.
    called, unasked_called = np.sum(alarms, axis=0)
    assert called <= 8
    assert unasked_called > called


def test_none_is_an_outlier_that_is_not_large() -> None:
    found = outliers.beyond_tail(np.append(np.geomspace(1, 1.1, 100), 2.0), 3.0)
    assert found is not None
    assert (found.count, found.p_value) == (0, 1.0)


def test_a_power_law_is_called_as_often_as_said() -> None:
    rng = np.random.default_rng(3)
    p_values = [outliers.beyond_tail(1 + rng.pareto(1.5, 300)) for _ in range(400)]
    assert np.mean([found is not None and found.p_value <= 0.05 for found in p_values]) <= 0.075


def test_too_few_say_nothing() -> None:
    assert outliers.beyond_tail(np.ones(20)) is None
    assert outliers.beyond_tail(np.empty(0)) is None


@given(st.lists(st.floats(1e-6, 1e6), max_size=200), st.floats(1e-3, 1e3))
def test_units_do_not_matter(values: list[float], unit: float) -> None:
    one, other = outliers.beyond_tail(np.array(values)), outliers.beyond_tail(np.array(values) * unit)
    assert (one is None) == (other is None)
    if one is not None and other is not None:
        assert 0 <= one.p_value <= 1
        assert one.p_value == pytest.approx(other.p_value, abs=1e-6, rel=1e-3)
