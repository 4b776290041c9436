"""Placements of experts: what any of them must hold, what they are worth on other windows than their own, and real loads."""

from __future__ import annotations

import csv
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from real import CORPUS, needs_corpus

from tailscope.ranks.placement import (
    Gain,
    balanced,
    by_chance,
    contiguous,
    counts_of,
    max_over_mean,
    movement,
    packed,
    rank_loads,
    replicated,
    scored_ahead,
    usual_by_chance,
)

Floats = NDArray[np.float64]


@st.composite
def problems(draw: st.DrawFn) -> tuple[Floats, int, int]:
    """Loads, ranks and slots that fit each other."""
    ranks = draw(st.integers(1, 8))
    experts = ranks * draw(st.integers(1, 4))
    slots = experts + ranks * draw(st.integers(0, 3))
    layers = draw(st.integers(1, 3))
    values = st.one_of(st.just(0), st.integers(0, 20), st.integers(0, 10**9))
    loads = draw(st.lists(values, min_size=layers * experts, max_size=layers * experts))
    return np.array(loads, np.float64).reshape(layers, experts), ranks, slots


@given(problems())
@settings(max_examples=300, deadline=None)
def test_what_any_placement_holds(problem: tuple[Floats, int, int]) -> None:
    loads, ranks, slots = problem
    layers, experts = loads.shape
    placement = balanced(loads, ranks, slots)
    assert placement.shape == (layers, slots)
    replicas = counts_of(placement, experts)
    assert (replicas >= 1).all()
    assert (replicas.sum(axis=1) == slots).all()
    by_rank = rank_loads(loads, placement, ranks)
    np.testing.assert_allclose(by_rank.sum(axis=1), loads.sum(axis=1), rtol=1e-9)
    before = rank_loads(loads, contiguous(layers, experts), ranks).max(axis=1)
    assert (by_rank.max(axis=1) <= before * (1 + 1e-9)).all()
    assert (by_rank.max(axis=1) >= loads.mean(axis=1) * experts / ranks * (1 - 1e-9)).all()


@given(problems(), st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_the_order_of_experts_does_not_matter(problem: tuple[Floats, int, int], seed: int) -> None:
    loads, ranks, slots = problem
    rng = np.random.default_rng(seed)
    # No load may be another's multiple: where what a replica gets is equal, the order has to decide.
    loads = (loads + 1) * rng.uniform(1, 1.001, loads.shape)
    order = rng.permutation(loads.shape[1])
    assert (packed(loads, ranks)[:, order] == packed(loads[:, order], ranks)).all()
    assert (replicated(loads, slots)[:, order] == replicated(loads[:, order], slots)).all()


def test_packing_comes_near_the_best_there_is() -> None:
    """Against all placements of eight experts on two ranks and four: greedy packing is within 4/3 of the best (Graham 1969)."""
    rng = np.random.default_rng(5)
    for ranks in (2, 4):
        loads = rng.lognormal(0, 1, (20, 8))
        best = np.full(20, np.inf)
        for order in permutations(range(8)):
            if all(order[i] < order[i + 1] for i in range(7) if (i + 1) % (8 // ranks)):
                best = np.minimum(best, loads[:, order].reshape(20, ranks, -1).sum(axis=2).max(axis=1))
        got = rank_loads(loads, balanced(loads, ranks, 8), ranks).max(axis=1)
        assert (got <= best * 4 / 3).all()
        assert got.sum() <= best.sum() * 1.05


def test_replicas_go_where_the_load_is() -> None:
    loads = np.array([[90.0, 10, 10, 10]])
    assert replicated(loads, 8).tolist() == [[5, 1, 1, 1]]
    placement = balanced(loads, 4, 8)
    by_rank = rank_loads(loads, placement, 4)
    assert by_rank.max() <= 36.0  # two fifths of the hot expert at most, or one and a cold one
    # A single expert cannot be divided without replicas.
    assert rank_loads(loads, balanced(loads, 4, 4), 4).max() == 90


@pytest.mark.parametrize(("ranks", "slots"), [(4, 18), (4, 12)])
def test_what_cannot_be_placed_is_said(ranks: int, slots: int) -> None:
    with pytest.raises(ValueError, match="slots for 16 experts"):
        balanced(np.ones((1, 16)), ranks, slots)


def ahead(loads: Floats, ranks: int, spare: int) -> Gain | None:
    """Against the contiguous placement."""
    _, layers, experts = loads.shape
    busiest = rank_loads(loads, contiguous(layers, experts), ranks).max(axis=2)
    return scored_ahead(loads, busiest, ranks, spare)


def test_a_placement_is_scored_on_windows_it_did_not_see() -> None:
    rng = np.random.default_rng(3)
    skew = rng.lognormal(0, 1, (4, 32))
    stays = rng.poisson(skew * 1000, (6, 4, 32)).astype(float)
    gain = ahead(stays, 8, 8)
    assert gain is not None
    assert gain.before > 1.5
    assert gain.after < 1.1
    assert max(gain.after_age) < 1.1
    assert len(gain.after_age) == 5
    # Loads that are new in each window: what was learned of one says nothing of the next.
    moves = rng.poisson(rng.lognormal(0, 1, (6, 4, 32)) * 1000).astype(float)
    gone = ahead(moves, 8, 0)
    assert gone is not None
    assert gone.after > 0.85 * gone.before
    fitted = [rank_loads(w, balanced(w, 8, 32), 8).max(axis=1).sum() for w in moves]
    assert sum(fitted) < 0.8 * rank_loads(moves, contiguous(4, 32), 8).max(axis=2).sum()


def test_one_window_scores_nothing() -> None:
    assert ahead(np.ones((1, 2, 8)), 4, 0) is None
    idle = np.stack([np.ones((2, 8)), np.zeros((2, 8))])
    assert ahead(idle, 4, 0) is None
    assert ahead(np.ones((3, 2, 8)), 4, 2) is None
    assert movement(idle) is None


def test_movement_tells_what_stays_from_what_moves() -> None:
    rng = np.random.default_rng(4)
    skew = rng.lognormal(0, 1, (4, 64))
    stays = movement(rng.poisson(skew * 500, (5, 4, 64)).astype(float))
    moves = movement(rng.poisson(rng.lognormal(0, 1, (5, 4, 64)) * 500).astype(float))
    assert stays is not None
    assert moves is not None
    assert min(stays.correlation) > 0.95
    assert min(stays.overlap) > 0.8
    assert max(moves.correlation) < 0.2
    assert max(moves.overlap) < 0.35  # an eighth, by chance
    even = movement(np.ones((3, 2, 8)))
    assert even is not None
    assert even.correlation == (1.0, 1.0)


def test_chance_is_what_a_fair_router_does() -> None:
    """Of 2,000 fair routings about one in a hundred exceeds the bound, half the usual value."""
    rng = np.random.default_rng(6)
    for tokens, bins in ((256, 16), (4_096, 64), (100_000, 8)):
        found = max_over_mean(rng.multinomial(tokens, np.full(bins, 1 / bins), 2_000).astype(float))
        bound = float(by_chance(np.array(float(tokens)), bins, 0.01))
        usual = float(usual_by_chance(np.array(float(tokens)), bins))
        assert np.mean(found > bound) < 0.02
        assert np.quantile(found, 0.96) < bound
        assert abs(np.median(found) - usual) < 0.06 * usual
    assert np.isnan(by_chance(np.array(0.0), 4, 0.01))
    assert np.isnan(max_over_mean(np.zeros((1, 4)))).all()


def real_loads() -> Floats:
    path = CORPUS / "omni-expert-load/omni/accelerators/planner/utils/tools/data/sample_Rand_count.csv"
    with path.open(newline="") as file:
        return np.array([[float(cell) for cell in row[1:]] for row in list(csv.reader(file))[1:]])


@needs_corpus
def test_real_loads_of_a_deepseek_model() -> None:
    loads = real_loads()
    assert loads.shape == (58, 256)
    ratios = max_over_mean(loads)
    assert (round(ratios.min(), 1), round(float(np.median(ratios)), 1), ratios.max()) == (5.0, 26.1, 32.0)
    now = max_over_mean(rank_loads(loads, contiguous(58, 256), 16))
    assert round(float(np.median(now)), 2) == 2.72
    assert now.max() == pytest.approx(16, abs=0.01)
    # An expert with up to an eighth of all tokens fits on no rank of 16 without replicas.
    moved = max_over_mean(rank_loads(loads, balanced(loads, 16, 256), 16))
    spread = max_over_mean(rank_loads(loads, balanced(loads, 16, 272), 16))
    assert (moved <= now + 1e-9).all()
    assert float(np.median(moved)) > 1.5
    assert float(np.median(spread)) < 1.1


@needs_corpus
@pytest.mark.parametrize(
    ("pattern", "median", "worst"),
    [("base_patterns/DSV3_baseline_16_devices_58_MoE_Layers", 2.72, 16.0), ("placement_pattern_*", 2.45, 6.0)],
)  # fmt: skip
def test_real_placements(pattern: str, median: float, worst: float) -> None:
    """Placements of others, ranks x layers x experts: the engine's own is the contiguous one, a fitted one is better."""
    folder = CORPUS / "omni-expert-load/examples/omniinfer/omni/accelerators/placement/patterns"
    [path] = folder.glob(f"{pattern}.npy")
    held = np.load(path, allow_pickle=False)
    placement = np.stack([np.concatenate([np.flatnonzero(r[layer]) for r in held]) for layer in range(58)])
    assert (placement == contiguous(58, 256)).all() == pattern.startswith("base")
    ratios = max_over_mean(rank_loads(real_loads(), placement, 16))
    assert (round(float(np.median(ratios)), 2), round(float(ratios.max()), 2)) == (median, worst)
