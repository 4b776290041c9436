"""Clocks of ranks against each other, from the ends of synchronising collectives.

Such a collective ends at nearly one time on all ranks, so the median difference of the ends is the clocks' offset, and
what is left around it its error. Starts say nothing: they hold the lateness that is to be measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
#: Points a clock is followed by at most, the rounds each needs, and the rounds a drift needs.
BINS, BIN_ROUNDS, DRIFT_ROUNDS = 64, 16, 64
#: Times the clocks are fitted to what all ranks' ends say together.
PASSES = 3
#: Ends of one collective on GPUs of one host were seen to differ by 3 us, always the same way: no clock is known better.
LEAST_ERROR_NS = 5_000.0
#: A rank that always leaves a little late looks like a clock that is ahead. Of real ranks with one clock none did by more
#: than 0.7 of its ends' deviation, nor by more than an eighth of the shortest transfer: in a ring data arrives in turn.
DEVIATIONS, IN_TURN = 2.0, 1 / 8
#: Standard error of a median of n in deviations, times root n.
MEDIAN_ERROR = 1.2533
#: Below so many rounds their own spread tells no error.
FEW_ROUNDS = 8
#: A straight line does not hold where points lie further from it than so many times their own standard error.
BENT = 3.0


@dataclass(frozen=True)
class Clock:
    """A rank's clock less the window's: `offsets_ns` at `times_ns` (on the rank's clock), straight lines between.

    `drift`: ns per ns over the window, and beyond its ends. `error_ns`: bound of the offset's error, in 95 %. `residual_ns`:
    standard deviation of the ends about it. `basis`: `ends of collectives`, `ends of its host` (whose clock the
    ranks there share), `one host` (all ranks share a clock) or `none`. `together`: whether those are of collectives that all
    ranks leave at one time.
    """

    times_ns: Floats
    offsets_ns: Floats
    drift: float
    error_ns: float
    residual_ns: float
    rounds: int
    basis: str
    together: bool = True

    @property
    def offset_ns(self) -> float:
        """In the middle of the window."""
        return float(np.median(self.offsets_ns))

    def of(self, times_ns: Floats) -> Floats:
        """The offset at times on the rank's clock."""
        return offset_at(times_ns, self.times_ns, self.offsets_ns, self.drift)


def offset_at(times_ns: Floats, known_ns: Floats, offsets_ns: Floats, drift: float) -> Floats:
    """Straight lines between the offsets known at some times, and the drift beyond them."""
    inside = np.interp(times_ns, known_ns, offsets_ns)
    beyond = times_ns - np.clip(times_ns, known_ns[0], known_ns[-1])
    return np.asarray(inside + drift * beyond)


def fit_clocks(
    start: Floats, end: Floats, hosts: Sequence[str | None], *, together: bool = True
) -> list[Clock]:
    """A clock for each rank. `start`, `end`: ranks x rounds, ns, NaN where a rank has no part in a round; `hosts`: of each rank.

    Ranks of one host share a clock unless they cannot: then the ends of each decide. `together`: whether all ranks leave a
    round at one time; if not, a clock's error is what is possible at all.
    """
    rounds = np.sum(np.isfinite(end), axis=0) >= 2
    start, end = start[:, rounds], end[:, rounds]
    one_host = len(set(hosts)) == 1 and None not in hosts
    if not end.shape[1]:
        return [_still(SAME_HOST_NS, "one host") if one_host else _still(np.inf, "none") for _ in hosts]
    # Not every rank is in every round, and clocks may be far apart: who is there must not move the common time.
    aligned = end - _pairwise(end)[:, None]
    for _ in range(PASSES):
        common = median_of(aligned)
        fitted = [_fit(row, common) for row in end]
        aligned = np.array([row - clock.of(row) for row, clock in zip(end, fitted, strict=True)])
    bounds = _possible(start, end, fitted)
    fitted = [
        replace(clock, error_ns=_error(clock, most, together), together=together)
        for clock, most in zip(fitted, bounds, strict=True)
    ]
    if one_host and np.mean(_impossible(start, end)) < IMPOSSIBLE:
        # A shared clock is at least as good as the ends show it to be.
        seen = max(abs(clock.offset_ns) + clock.error_ns for clock in fitted)
        return [
            replace(_still(min(SAME_HOST_NS, seen), "one host"), residual_ns=c.residual_ns, rounds=c.rounds)
            for c in fitted
        ]
    return _by_host(start, end, hosts, fitted, median_of(aligned))


def _still(error_ns: float, basis: str) -> Clock:
    """A clock that shows the window's own time."""
    return Clock(np.zeros(1), np.zeros(1), 0.0, error_ns, 0.0, 0, basis)


def median_of(values: Floats) -> Floats:
    """Median of each column, NaN left out. Sorting short columns is faster than NumPy's nanmedian."""
    ordered = np.sort(values, axis=0)
    count = np.sum(np.isfinite(ordered), axis=0)
    if count.size and count.min() == len(values):
        return np.asarray((ordered[(len(values) - 1) // 2] + ordered[len(values) // 2]) / 2)
    columns = np.arange(values.shape[1])
    low, high = np.maximum(count - 1, 0) // 2, np.minimum(count // 2, len(values) - 1)
    return np.asarray(np.where(count > 0, (ordered[low, columns] + ordered[high, columns]) / 2, np.nan))


def median_of_others(values: Floats) -> Floats:
    """For each value the median of the others of its column, NaN left out; NaN where there are none."""
    order = np.argsort(values, axis=0, kind="stable")
    ordered = np.take_along_axis(values, order, axis=0)
    count = np.sum(np.isfinite(values), axis=0)
    place = np.empty_like(order)
    np.put_along_axis(place, order, np.arange(len(values))[:, None], axis=0)
    halves = []
    for middle in ((count - 2) // 2, (count - 1) // 2):
        # In the column without the value, those from its place on move up by one.
        at = np.maximum(middle, 0) + (place <= middle)
        halves.append(np.take_along_axis(ordered, np.minimum(at, len(values) - 1), axis=0))
    return np.asarray(np.where(count > 1, (halves[0] + halves[1]) / 2, np.nan))


def _impossible(start: Floats, end: Floats) -> NDArray[np.bool_]:
    """Rounds in which, by these clocks, a rank left before another came."""
    return np.asarray(np.nanmax(start, axis=0) > np.nanmin(end, axis=0) + SAME_HOST_NS)


def _fit(end: Floats, common: Floats) -> Clock:
    """A constant where that will do, else a line, else a line from point to point: clocks are stepped and slewed."""
    known = np.isfinite(end)
    times, apart = end[known], end[known] - common[known]
    rounds = len(apart)
    if not rounds:
        return _still(np.inf, "none")
    offset = float(np.median(apart))
    clock = Clock(
        np.array([np.median(times)]),
        np.array([offset]),
        0.0,
        np.inf,
        spread(apart - offset),
        rounds,
        "ends of collectives",
    )
    if rounds < DRIFT_ROUNDS:
        return clock
    order = np.argsort(times, kind="stable")
    x, y, _ = _points(times[order], apart[order], BINS)
    if not np.ptp(x):
        return clock
    slope, _, low, high = scipy_stats.theilslopes(y, x)
    # A drift that may as well be none is none.
    if low * high > 0:
        middle = float(np.median(x))
        level = float(np.median(y - slope * (x - middle)))
        edges = np.array([times.min(), times.max()])
        around = spread(apart - level - slope * (times - middle))
        if around < clock.residual_ns:
            clock = replace(
                clock,
                times_ns=edges,
                offsets_ns=level + slope * (edges - middle),
                drift=float(slope),
                residual_ns=around,
            )
    bins = min(BINS, rounds // BIN_ROUNDS)
    x, y, left = _points(times[order], apart[order], bins)
    scatter = spread(left)
    beside = y - clock.of(x)
    if spread(beside - np.median(beside)) > BENT * MEDIAN_ERROR * scatter / (rounds / bins) ** 0.5:
        clock = replace(clock, times_ns=x, offsets_ns=y, residual_ns=scatter)
    return clock


def _points(times: Floats, apart: Floats, bins: int) -> tuple[Floats, Floats, Floats]:
    """Medians of bins of equally many rounds, by time, and what is left around them; the last rounds, too few for one more a
    bin, are left out."""
    size = len(times) // bins
    x, y = (values[: bins * size].reshape(bins, size) for values in (times, apart))
    middle = np.median(y, axis=1)
    return np.median(x, axis=1), middle, (y - middle[:, None]).reshape(-1)


def spread(values: Floats) -> float:
    """Standard deviation of values about 0, by their median absolute deviation."""
    return MAD_TO_SIGMA * float(np.median(np.abs(values)))


def _error(clock: Clock, possible_ns: float, together: bool) -> float:
    """Bound of a clock's error: what its ends' spread leaves open, at most what is possible at all."""
    if clock.rounds < FEW_ROUNDS or not together:
        return max(possible_ns, LEAST_ERROR_NS)
    of_median = MEDIAN_ERROR / (clock.rounds / len(clock.times_ns)) ** 0.5
    seen = np.hypot(DEVIATIONS * clock.residual_ns * (1 + of_median), IN_TURN * possible_ns)
    return float(max(min(seen, possible_ns), LEAST_ERROR_NS))


def _possible(start: Floats, end: Floats, clocks: Sequence[Clock]) -> Floats:
    """How far each clock can be off at most, ns: nobody leaves before all have come, whatever the clocks are.

    With offsets a and b of two ranks, a - b lies between the largest start of one less the end of the other, and the
    smallest the other way round. Each rank is held against all others at once. Noise of a few rounds must not make a bound
    too tight, so that the 1 % of rounds that bound most are left out.
    """
    late = np.array([row - clock.of(row) for row, clock in zip(start, clocks, strict=True)])
    left = np.array([row - clock.of(row) for row, clock in zip(end, clocks, strict=True)])
    bounds = np.full(len(clocks), np.inf)
    if len(clocks) < 2:
        return bounds
    # When the last of the others came, a rank cannot have left yet.
    for i in range(len(clocks)):
        others = np.arange(len(clocks)) != i
        with np.errstate(invalid="ignore"):
            last = np.fmax.reduce(late[others], axis=0)
            soonest = np.fmin.reduce(left[others], axis=0)
        ahead, behind = left[i] - last, soonest - late[i]
        sides = [
            np.nanquantile(side, 0.01) if np.isfinite(side).any() else np.inf for side in (ahead, behind)
        ]
        bounds[i] = max(*sides, 0.0)
    return bounds


def _by_host(
    start: Floats, end: Floats, hosts: Sequence[str | None], fitted: list[Clock], common: Floats
) -> list[Clock]:
    """The ranks' own clocks, or their host's where the ends of all its ranks agree that they share one."""
    clocks = list(fitted)
    for host in {h for h in hosts if h is not None}:
        members = [i for i, h in enumerate(hosts) if h == host and fitted[i].rounds]
        if len(members) < 2:
            continue
        shared = _fit(median_of(end[members]), common)
        apart = [float(np.nanmedian(end[i] - shared.of(end[i]) - common)) for i in members]
        known = all(abs(d) <= SAME_HOST_NS + fitted[i].error_ns for d, i in zip(apart, members, strict=True))
        here = np.sum(np.isfinite(end[members]), axis=0) >= 2
        if not known or np.mean(_impossible(start[members][:, here], end[members][:, here])) >= IMPOSSIBLE:
            continue
        for d, i in zip(apart, members, strict=True):
            clocks[i] = replace(
                shared,
                error_ns=max(fitted[i].error_ns, abs(d)),
                residual_ns=fitted[i].residual_ns,
                basis="ends of its host",
                together=fitted[i].together,
            )
    return clocks


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
