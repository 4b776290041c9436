"""Dose and response: Spearman's correlation with its interval, and the dose that a request meets."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.signal import lfilter
from scipy.stats import spearmanr

from tailscope import stats
from tailscope.ledger.doses import _Class


def test_rho_is_spearmans() -> None:
    rng = np.random.default_rng(1)
    x = np.round(rng.normal(size=300), 1)  # with ties
    y = x + rng.normal(size=300)
    found = stats.rank_correlation(x, y, np.arange(300))
    assert found.rho == pytest.approx(spearmanr(x, y).statistic)
    assert found.rho is not None and found.low is not None and found.high is not None
    assert found.low < found.rho < found.high


@pytest.mark.parametrize("phi", [0.0, 0.9])
def test_the_interval_holds_nothing_where_there_is_nothing_though_both_come_in_bursts(phi: float) -> None:
    misses = 0
    for seed in range(200):
        x, y = np.random.default_rng(seed).normal(size=(2, 600))
        x, y = (lfilter([1], [1, -phi], v) for v in (x, y))
        found = stats.rank_correlation(x, y, np.arange(600))
        assert found.low is not None and found.high is not None
        misses += not found.low <= 0 <= found.high
    assert misses <= 20


def test_too_few_or_all_alike_have_no_interval() -> None:
    times = np.arange(8)
    assert stats.rank_correlation(np.ones(8), np.arange(8.0), times).rho is None
    found = stats.rank_correlation(np.arange(8.0), np.arange(8.0), times)
    assert found.rho == pytest.approx(1.0)
    assert found.low is None


def test_a_prompts_tokens_are_computed_evenly_over_its_prefill() -> None:
    none = np.empty(0, np.int64)
    prefills = _Class(none, none / 1e9, np.array([100, 150]), np.array([200, 250]), np.array([10.0, 20.0]))
    # By 150 half of the first, by 175 three quarters of it and a quarter of the second.
    assert prefills.computed_by(np.array([0, 100, 150, 175, 300])) == pytest.approx([0, 0, 5, 12.5, 30])


def test_during_after_and_else() -> None:
    none = np.empty(0, np.int64)
    one = np.array([10.0, 10.0, 10.0])
    prefills = _Class(none, none / 1e9, np.array([100, 150, 1_000]), np.array([200, 300, 1_100]), one)
    # The first two are one prefill of 200 ns.
    at = np.array([99, 100, 250, 300, 301, 500, 501, 1_050, 1_150, 1_300])
    assert prefills.phase(at).tolist() == [2, 0, 0, 0, 1, 1, 2, 0, 1, 2]
