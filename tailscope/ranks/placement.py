"""How unevenly experts are loaded, how fast that moves, and what another placement of them would give.

Everything here works on arrays of tokens, layers x experts or windows x layers x experts, and on a placement, which
says which expert each slot of a layer holds: layers x slots, the slots of rank 0 first, as many on each rank. An
expert in several slots has replicas, which share its tokens evenly, as the engines' dispatch does.

`balanced` follows the idea of DeepSeek's EPLB (github.com/deepseek-ai/eplb): first give each spare slot to the expert
whose replicas carry the most, then put the replicas, heaviest first, on the lightest rank that has a slot left. What a
placement is worth must be asked of windows that it was not fitted to: `scored_ahead`.

It is an estimate with limits. It counts tokens, so it says what time is saved only where time follows tokens; spare
slots take memory of the weights and of the KV cache; experts that move between ranks stop or slow the engine; and
tokens of several replicas may not be shared evenly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


#: Of more tokens SciPy finds no quantiles; chance does no more to them than to so many.
MOST_DRAWN = float(1 << 53)


def max_over_mean(loads: Floats) -> Floats:
    """How much the most loaded of the last axis has over the mean: 1 is even. NaN where there is no load."""
    mean = loads.mean(axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.where(mean > 0, loads.max(axis=-1) / mean, np.nan))


def by_chance(tokens: Floats, bins: int, probability: float, draws: int = 1) -> Floats:
    """Max/mean that even routing of so many tokens to so many experts, or ranks, exceeds with at most this probability
    in any of `draws` layers: the binomial tail of each (Bonferroni). Experts of a token exclude each other, which makes
    the real spread a little less."""
    tokens = np.minimum(tokens, MOST_DRAWN)
    at_most = stats.binom.isf(probability / (bins * draws), tokens, 1 / bins)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.where(tokens > 0, at_most * bins / tokens, np.nan))


def usual_by_chance(tokens: Floats, bins: int) -> Floats:
    """Median of the max/mean of even routing: even a perfect router is not even when it has few tokens."""
    tokens = np.minimum(tokens, MOST_DRAWN)
    at_most = stats.binom.ppf(0.5 ** (1 / bins), tokens, 1 / bins)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.where(tokens > 0, at_most * bins / tokens, np.nan))


# -- placements ------------------------------------------------------------------------------------


def contiguous(layers: int, experts: int) -> Ints:
    """The engines' placement without EPLB: experts in order, as many on each rank."""
    return np.tile(np.arange(experts, dtype=np.int64), (layers, 1))


def rank_loads(loads: Floats, placement: Ints, ranks: int) -> Floats:
    """Tokens by rank under a placement: the shape of `loads` with the experts replaced by ranks."""
    *windows, layers, experts = loads.shape
    replicas = counts_of(placement, experts)
    shared = loads / np.maximum(replicas, 1)
    in_slots = np.take_along_axis(
        shared.reshape(-1, layers, experts),
        np.broadcast_to(placement, (int(np.prod(windows)), *placement.shape)),
        axis=-1,
    )
    return np.asarray(in_slots.reshape(*windows, layers, ranks, -1).sum(axis=-1))


def counts_of(placement: Ints, experts: int) -> Ints:
    """Replicas of each expert, layers x experts."""
    layers = len(placement)
    places = placement + np.arange(layers)[:, None] * experts
    return np.bincount(places.reshape(-1), minlength=layers * experts).reshape(layers, experts)


def replicated(loads: Floats, slots: int) -> Ints:
    """Replicas of each expert, layers x experts, that fill so many slots: each spare one goes to the expert whose replicas
    carry the most."""
    layers, experts = loads.shape
    replicas = np.ones((layers, experts), np.int64)
    rows = np.arange(layers)
    for _ in range(slots - experts):
        replicas[rows, np.argmax(loads / replicas, axis=1)] += 1
    return replicas


def packed(weights: Floats, packs: int) -> Ints:
    """Pack of each item, layers x items: heaviest first, each to the lightest pack that has room. Packs get equally many."""
    layers, items = weights.shape
    room = np.full((layers, packs), items // packs)
    load = np.zeros((layers, packs))
    pack = np.empty((layers, items), np.int64)
    rows = np.arange(layers)
    order = np.argsort(-weights, axis=1, kind="stable")
    for item in order.T:
        chosen = np.argmin(np.where(room > 0, load, np.inf), axis=1)
        pack[rows, item] = chosen
        load[rows, chosen] += weights[rows, item]
        room[rows, chosen] -= 1
    return pack


def balanced(loads: Floats, ranks: int, slots: int) -> Ints:
    """A placement fitted to `loads`, layers x experts: `slots` in all, a multiple of `ranks`, at least one for each expert.

    In a layer where this is no better than the contiguous placement, which happens where that is even already, the
    contiguous one stays.
    """
    layers, experts = loads.shape
    if slots % ranks or slots < experts:
        raise ValueError(f"{slots} slots for {experts} experts on {ranks} ranks")
    replicas = replicated(loads, slots)
    copies = np.repeat(contiguous(layers, experts).reshape(-1), replicas.reshape(-1)).reshape(layers, slots)
    pack = packed(np.take_along_axis(loads / replicas, copies, axis=1), ranks)
    placement = np.take_along_axis(copies, np.argsort(pack, axis=1, kind="stable"), axis=1)
    return _unless_worse(loads, placement, ranks, slots)


def _unless_worse(loads: Floats, placement: Ints, ranks: int, slots: int) -> Ints:
    layers, experts = loads.shape
    if experts % ranks:
        return placement
    # A spare slot on the rank that has the expert already changes nothing, so this is the contiguous placement.
    own = np.arange(experts).reshape(ranks, -1)
    kept = np.tile(own[:, np.arange(slots // ranks) % own.shape[1]].reshape(-1), (layers, 1))
    before = rank_loads(loads, contiguous(layers, experts), ranks).max(axis=1)
    after = rank_loads(loads, placement, ranks).max(axis=1)
    return np.where((after < before)[:, None], placement, kept)


# -- what it would give ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Gain:
    """What another placement does to windows it was not fitted to. Tokens are those of the most loaded rank, summed over
    layers, which is what a step waits for; `before` and `after` are them over an even share (1 is even)."""

    spare: int
    before: float
    after: float
    #: The same where the placement is so many windows old: 1 fresh, up to the longest that was seen.
    after_age: tuple[float, ...]


def scored_ahead(loads: Floats, busiest: Floats, ranks: int, spare: int) -> Gain | None:
    """Fit a placement to each window, windows x layers x experts, and score it on those that follow.

    `busiest` is what the most loaded rank had, windows x layers, under the placement in use; `spare` the number of slots
    beyond one for each expert. None where fewer than two windows have load, or the slots cannot be spread evenly.
    """
    used = loads.sum(axis=(1, 2)) > 0
    loads, busiest = loads[used], busiest[used]
    windows, _, experts = loads.shape
    if windows < 2 or (experts + spare) % ranks or spare < 0:
        return None
    even = loads.sum(axis=2) / ranks
    by_age: list[list[tuple[float, float]]] = [[] for _ in range(windows - 1)]
    for fitted in range(windows - 1):
        placement = balanced(loads[fitted], ranks, experts + spare)
        following = rank_loads(loads[fitted + 1 :], placement, ranks).max(axis=2)
        for age, later in enumerate(following):
            by_age[age].append((float(later.sum()), float(even[fitted + 1 + age].sum())))
    ages = tuple(sum(b for b, _ in pairs) / sum(e for _, e in pairs) for pairs in by_age)
    return Gain(spare, float(busiest[1:].sum() / even[1:].sum()), ages[0], ages)


@dataclass(frozen=True)
class Movement:
    """How much one window's loads say of those of a later one; lists are by the number of windows between, from 1."""

    #: Rank correlation (Spearman) of the experts' loads in a layer, mean over layers and pairs of windows.
    correlation: tuple[float, ...]
    #: Share of a layer's busiest eighth of experts that are among it again.
    overlap: tuple[float, ...]


def movement(loads: Floats) -> Movement | None:
    """How fast hot spots move, windows x layers x experts. None below two windows with load."""
    used = loads[loads.sum(axis=(1, 2)) > 0]
    windows, _, experts = used.shape
    if windows < 2 or experts < 2:
        return None
    order = stats.rankdata(used, axis=2)
    centred = order - order.mean(axis=2, keepdims=True)
    length = np.sqrt((centred**2).sum(axis=2))
    top = max(1, experts // 8)
    busiest = np.zeros(used.shape, bool)
    np.put_along_axis(busiest, np.argsort(-used, axis=2, kind="stable")[:, :, :top], True, axis=2)
    correlations, overlaps = [], []
    for age in range(1, windows):
        both = length[:-age] * length[age:]
        product = (centred[:-age] * centred[age:]).sum(axis=2)
        # In a layer whose experts all have the same there is no order to keep.
        correlations.append(float(np.mean(product[both > 0] / both[both > 0])) if (both > 0).any() else 1.0)
        overlaps.append(float((busiest[:-age] & busiest[age:]).sum(axis=2).mean() / top))
    return Movement(tuple(correlations), tuple(overlaps))
