"""Whether clients send when they like or wait for answers: an open or a closed loop (Schroeder, Wierman, Harchol-Balter 2006)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.stats import binomtest

from tailscope.stats import Floats, Ints

#: So many arrivals at least are needed to tell.
MIN_ARRIVALS = 50
#: A loop is closed where so much of all arrivals find all other users' requests running: nobody sends more.
AT_CAP, NEAR_CAP = 0.6, 0.9
#: Arrivals of users who think come more slowly the more requests are in flight; those of strangers do not care.
SLOWER, UNLIKELY = 0.8, 1e-4
#: Gaps between arrivals that vary less are a clock's: they too avoid the instants just after an arrival.
REGULAR_CV = 0.5


@dataclass(frozen=True)
class Loop:
    """`kind` of the clients; mean and largest number of requests in flight. `cv`: of the gaps between arrivals."""

    kind: Literal["open", "closed", "unknown"]
    in_flight: float
    most: int
    cv: float


def loop_of(arrival_ns: Ints, end_ns: Floats) -> Loop:
    """From arrivals in order and ends of requests, NaN where not known."""
    known = np.isfinite(end_ns)
    start = arrival_ns[known]
    # A float knows today's instants to a hundred nanoseconds: nobody leaves before they came.
    end = np.sort(np.maximum(end_ns[known].astype(np.int64), start))
    gaps = np.diff(arrival_ns).astype(np.float64)
    cv = float(gaps.std() / gaps.mean()) if len(gaps) and gaps.mean() > 0 else 0.0
    if not len(start):
        return Loop("unknown", 0.0, 0, cv)
    span = max(int(end[-1] - start[0]), 1)
    mean = float((end_ns[known] - start).sum()) / span
    before = np.arange(len(start)) - np.searchsorted(end, start, side="right")
    most = int(before.max()) + 1
    if len(start) < MIN_ARRIVALS:
        return Loop("unknown", mean, most, cv)
    if most >= 2 and float((before + 1 >= NEAR_CAP * most).mean()) >= AT_CAP:
        return Loop("closed", mean, most, cv)
    return Loop("closed" if cv > REGULAR_CV and _holds_back(start, end) else "open", mean, most, cv)


def _holds_back(start: Ints, end: Ints) -> bool:
    """Whether fewer arrive in the half of the time in which more is in flight (strangers see time averages: Wolff 1982)."""
    inside = end[end <= start[-1]]
    times = np.concatenate([start, inside])
    change = np.concatenate([np.ones(len(start), np.int64), -np.ones(len(inside), np.int64)])
    order = np.lexsort((-change, times))
    level, lasts = np.cumsum(change[order])[:-1], np.diff(times[order]).astype(np.float64)
    arrives = (change[order] > 0)[1:]
    by_level = np.bincount(level, weights=lasts)
    middle = int(np.searchsorted(np.cumsum(by_level), by_level.sum() / 2))
    # An arrival ends the state it came in.
    many = level > middle
    time_many, n_many, n = float(lasts[many].sum()), int((arrives & many).sum()), int(arrives.sum())
    share = time_many / max(float(lasts.sum()), 1.0)
    if not 0 < share < 1 or not n:
        return False
    rate = (n_many / share) / max((n - n_many) / (1 - share), 1e-9)
    return rate < SLOWER and binomtest(n_many, n, share, alternative="less").pvalue < UNLIKELY
