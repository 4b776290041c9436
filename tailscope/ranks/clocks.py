"""Clocks of ranks against each other, from the ends of synchronising collectives.

Such a collective ends at nearly one time on all ranks, so the median difference of the ends is the clocks' offset, and
what is left around it its error. Starts say nothing: they hold the lateness that is to be measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats as scipy_stats
from scipy.sparse import csgraph

Floats = NDArray[np.float64]
#: Median absolute deviation to the standard deviation of a normal distribution.
MAD_TO_SIGMA = 1.4826
#: Between processes of one host: how well Kineto places its events on the wall clock.
SAME_HOST_NS = 50_000.0
#: Share of rounds in which one rank would leave before another came, from which a clock is not shared.
IMPOSSIBLE = 0.1
#: Points a drift is fitted to, and the rounds it needs.
BINS, DRIFT_ROUNDS = 64, 64
#: Times the clocks are fitted to what all ranks' ends say together.
PASSES = 3


@dataclass(frozen=True)
class Clock:
    """A rank's clock less the window's: `offset_ns` at `middle_ns` of the window, growing by `drift` ns per ns."""

    offset_ns: float
    drift: float
    middle_ns: float
    error_ns: float
    basis: str

    def of(self, times_ns: Floats) -> Floats:
        """The offset at times on the rank's clock."""
        return self.offset_ns + self.drift * (times_ns - self.middle_ns)


def fit_clocks(start: Floats, end: Floats, *, one_host: bool) -> list[Clock]:
    """A clock for each rank. `start`, `end`: ranks x rounds, ns, NaN where a rank has no part in a round.

    Ranks of one host share a clock unless they cannot: then ends decide.
    """
    rounds = np.sum(np.isfinite(end), axis=0) >= 2
    start, end = start[:, rounds], end[:, rounds]
    if not end.shape[1]:
        basis = "one host" if one_host else "none"
        error = SAME_HOST_NS if one_host else np.inf
        return [Clock(0.0, 0.0, 0.0, error, basis) for _ in range(end.shape[0])]
    # Not every rank is in every round, and clocks may be far apart: who is there must not move the common time.
    aligned = end - _pairwise(end)[:, None]
    for _ in range(PASSES):
        common = median_of(aligned)
        fitted = [_fit(row, common) for row in end]
        aligned = np.array([row - clock.of(row) for row, clock in zip(end, fitted, strict=True)])
    if one_host and np.mean(_impossible(start, end)) < IMPOSSIBLE:
        # A shared clock is at least as good as the ends show it to be.
        seen = [abs(clock.offset_ns) + clock.error_ns for clock in fitted]
        return [Clock(0.0, 0.0, 0.0, min(SAME_HOST_NS, max(seen)), "one host") for _ in fitted]
    return fitted


def median_of(values: Floats) -> Floats:
    """Median of each column, NaN left out. Sorting short columns is faster than NumPy's nanmedian."""
    ordered = np.sort(values, axis=0)
    count = np.sum(np.isfinite(ordered), axis=0)
    columns = np.arange(values.shape[1])
    low, high = np.maximum(count - 1, 0) // 2, np.minimum(count // 2, len(values) - 1)
    return np.asarray(np.where(count > 0, (ordered[low, columns] + ordered[high, columns]) / 2, np.nan))


def _impossible(start: Floats, end: Floats) -> NDArray[np.bool_]:
    """Rounds in which, by these clocks, a rank left before another came."""
    return np.asarray(np.nanmax(start, axis=0) > np.nanmin(end, axis=0) + SAME_HOST_NS)


def _fit(end: Floats, common: Floats) -> Clock:
    known = np.isfinite(end)
    times, apart = end[known], end[known] - common[known]
    if not len(apart):
        return Clock(0.0, 0.0, 0.0, np.inf, "none")
    middle = float(np.median(times))
    offset, drift = float(np.median(apart)), 0.0
    left = apart - offset
    error = MAD_TO_SIGMA * float(np.median(np.abs(left)))
    if len(apart) >= DRIFT_ROUNDS:
        edges = np.array_split(np.arange(len(apart)), BINS)
        x = np.array([np.median(times[e]) for e in edges])
        y = np.array([np.median(apart[e]) for e in edges])
        if not np.ptp(x):
            return Clock(offset, 0.0, middle, error, "ends of collectives")
        slope, level, low, high = scipy_stats.theilslopes(y, x - middle)
        # A drift that may as well be none is none.
        if low * high > 0:
            around = apart - (level + slope * (times - middle))
            error_with = MAD_TO_SIGMA * float(np.median(np.abs(around)))
            if error_with < error:
                offset, drift, error = float(level), float(slope), error_with
    return Clock(offset, drift, middle, error, "ends of collectives")


def _pairwise(end: Floats) -> Floats:
    """Offsets of the ranks, each from the one before it that it has most rounds with (Prim's spanning tree)."""
    known = np.isfinite(end).astype(np.float32)
    together = known @ known.T
    ranks = len(end)
    offsets = np.zeros(ranks)
    left = np.ones(ranks, bool)
    most, link = np.full(ranks, -1.0), np.full(ranks, -1)
    for _ in range(ranks):
        i = int(np.argmax(np.where(left, most, -np.inf)))
        left[i] = False
        if most[i] > 0:
            offsets[i] = offsets[link[i]] + float(np.nanmedian(end[i] - end[link[i]]))
        better = left & (together[i] > most)
        most[better], link[better] = together[i][better], i
    return offsets


def connected(end: Floats) -> bool:
    """Whether rounds link all ranks, one through another."""
    known = np.isfinite(end).astype(np.float32)
    parts, _ = csgraph.connected_components(known @ known.T, directed=False)
    return bool(parts == 1)
