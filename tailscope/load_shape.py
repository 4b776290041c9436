"""Whether requests wait for answers before they are sent (a closed loop: Schroeder, Wierman, Harchol-Balter 2006), or a limit
on requests in flight holds them: signs of it in arrivals and departures. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from tailscope.stats import Floats, Ints

#: Arrivals that are judged together, and how many parts there are at most: a client may change its limit on the way.
PART, MOST_PARTS = 100, 40
#: Fewer arrivals tell nothing.
LEAST = 60
#: Arrivals follow departures where the time from one to the other spreads by less than this share of what the time
#: between arrivals spreads by.
TIGHT = 0.2
#: The same, and how long before a departure its arrival may seem to be, as a share of the mean latency.
PROMPT = 0.01
#: Gaps between arrivals that vary by less than this share of the mean latency are those of a clock.
LEAST_SPREAD = 1e-3
#: Quantiles of what is in flight that are tried as the limit.
LIMITS = (1.0, 0.9, 0.75, 0.5, 0.25, 0.1)
#: Time slots, in mean gaps between arrivals, in which arrivals are counted and compared with what was in flight before.
SLOT = 2.0
#: How many standard errors below 0 the effect of requests in flight on arrivals lies where they hold arrivals up, and what
#: share of the mean rate a standard deviation more of them takes away.
SURE, NOTABLE = 4.0, 0.15
#: Slots needed for that, and how many times the variance of a Poisson count theirs has at most: what holds arrivals up
#: evens them out, and after a burst has passed many are in flight and few come too.
LEAST_SLOTS, EVEN = 100, 1.3
#: From this share of the time at its limit on a load is called closed.
CLOSED = 0.5
#: By how many arrivals latencies are moved to see how many would come if nobody waited for them; and of how many arrivals.
MOVED, MOST_MOVED = 20, 20_000
#: How many standard deviations of that fewer come while much is in flight, and at most which share of it.
FEWER_SURE, FEWER = 4.0, 0.8


@dataclass(frozen=True)
class Loop:
    """What arrivals have to do with departures. `kind`: "unknown" for too few of them.

    `capped`: share of the time in parts in which each arrival follows a departure, by `turnaround_s` (median), with at most
    `limit` in flight. `held`: by what share of its mean the rate of arrivals falls when one standard deviation more is in
    flight, `fewer`: what share of arrivals is missing while more than usual is in flight; both 0 where that is not sure.
    `mean_in_flight` and the `most` at once.
    """

    n: int
    capped: float
    limit: int
    turnaround_s: float
    held: float
    fewer: float
    mean_in_flight: float
    most: int

    @property
    def kind(self) -> Literal["open", "closed", "unknown"]:
        if self.n < LEAST:
            return "unknown"
        return "closed" if self.capped >= CLOSED or self.held or self.fewer else "open"


def loop_of(arrivals_ns: Ints, ends_ns: Floats | Ints) -> Loop:
    """Signs of a loop in requests that were sent at `arrivals_ns` and answered at `ends_ns`, NaN where that is not known.

    With at most U in flight the (U+k)-th request is sent after the k-th answer. Where clients wait for answers it follows by
    a time that hardly varies, while without them the two know nothing of each other and their distance varies more than
    the gaps between arrivals. Users who think between answer and request show otherwise: the more of them wait, the fewer
    requests come. Arrivals of a slot of time are regressed on what is in flight at its start and on the arrivals of
    the slots before, since a burst that has passed leaves many in flight and few arriving too. That sees many users; few are
    seen by that nobody asks while their own answer runs, which is held against the same arrivals with one another's latencies.
    """
    known = np.isfinite(ends_ns)
    arrivals_ns = arrivals_ns[known]
    n = len(arrivals_ns)
    if not n:
        return Loop(0, 0.0, 0, 0.0, 0.0, 0.0, 0.0, 0)
    order = np.argsort(arrivals_ns, kind="stable")
    origin = int(arrivals_ns.min())
    # A float knows today's instants to a hundred nanoseconds: nobody leaves before they came.
    ended = np.maximum(ends_ns[known].astype(np.int64), arrivals_ns)
    lasted = (ended - arrivals_ns)[order] / 1e9
    arrivals, ends = (arrivals_ns[order] - origin) / 1e9, np.sort(ended - origin) / 1e9
    # In flight just before each arrival.
    before = np.arange(n) - np.searchsorted(ends, arrivals, side="left")
    length = float(max(arrivals[-1], ends[-1]))
    mean = float(lasted.sum() / length) if length else 0.0
    # Who is sent at the instant of an answer takes its place.
    most = int((np.arange(n) - np.searchsorted(ends, arrivals, side="right")).max()) + 1
    if n < LEAST:
        return Loop(n, 0.0, 0, 0.0, 0.0, 0.0, mean, most)
    edges = np.linspace(0, n, min(MOST_PARTS, max(1, n // PART)) + 1).astype(int)
    capped, of, limits, turnarounds = 0.0, 0.0, [], []
    lasting = float(lasted.mean())
    for first, beyond in pairwise(edges.tolist()):
        span = float(arrivals[beyond - 1] - arrivals[first])
        of += span
        found = _turnaround(arrivals, ends, before, range(first, beyond), lasting)
        if found:
            capped += span
            limits.append(found[0])
            turnarounds.append(found[1])
    return Loop(
        n,
        capped / of if of else 0.0,
        int(np.median(limits)) if limits else 0,
        float(np.median(turnarounds)) if turnarounds else 0.0,
        _held(arrivals, ends),
        _fewer(arrivals[:MOST_MOVED], lasted[:MOST_MOVED]),
        mean,
        most,
    )


def _turnaround(
    arrivals: Floats, ends: Floats, before: Ints, part: range, lasting: float
) -> tuple[int, float] | None:
    """(limit, median time from a departure to the arrival that it let in) of a part, where arrivals follow departures."""
    gaps = np.diff(arrivals[part.start : part.stop])
    spread = _spread(gaps, 0.98)
    if spread <= LEAST_SPREAD * lasting:
        return None  # by a clock, or so even that nothing tells the two apart
    # A burst among rare requests spreads the gaps, and none follows a departure closely.
    close = max(TIGHT * _spread(gaps, 0.9), PROMPT * lasting)
    # Some request more, of a probe or another client, may be there at times, and answers end late for who tells of them.
    in_flight = np.quantile(before[part.start : part.stop], LIMITS).astype(int)
    for limit in dict.fromkeys([*(in_flight + 1).tolist(), *in_flight.tolist()]):
        place = np.arange(max(part.start, limit), part.stop) - limit
        if limit < 1 or len(place) < len(part) // 2:
            continue
        since = arrivals[place + limit] - ends[place]
        middle = float(np.median(since))
        apart = float(np.median(np.abs(since - middle)))
        # What comes before it did not wait for it; much later than an answer takes is another burst.
        if apart <= min(TIGHT * spread, close) and -PROMPT * lasting <= middle <= lasting:
            return limit, middle
    return None


def _spread(gaps: Floats, q: float) -> float:
    """Of gaps between arrivals, mean distance from their median; those beyond quantile q count as that."""
    cut = np.minimum(gaps, np.quantile(gaps, q))
    return float(np.abs(cut - np.median(cut)).mean())


def _held(arrivals: Floats, ends: Floats) -> float:
    """Share of the mean rate of arrivals that a standard deviation of requests in flight takes away, 0 where not sure."""
    width = SLOT * float(arrivals[-1]) / len(arrivals)
    if not width > 0:
        return 0.0
    slots = np.arange(0, float(arrivals[-1]) - width, width)
    arrived = np.searchsorted(arrivals, np.append(slots, slots[-1] + width)) if len(slots) else np.empty(0)
    if len(slots) < LEAST_SLOTS:
        return 0.0
    count = np.diff(arrived).astype(np.float64)
    if count.var() > EVEN * count.mean():
        return 0.0
    flying = (arrived[:-1] - np.searchsorted(ends, slots)).astype(np.float64)
    sums = np.concatenate([[0.0], np.cumsum(count)])
    columns = [np.ones(len(count)), flying]
    index = np.arange(len(count))
    for back in (1, 4, 16):
        columns.append((sums[index] - sums[np.maximum(index - back, 0)]) / back)
    design, kept = np.column_stack(columns)[16:], count[16:]
    inverse = np.linalg.pinv(design.T @ design)
    slope = inverse @ (design.T @ kept)
    residual = kept - design @ slope
    # Robust to counts that vary more where there are more (White 1980).
    scaled = design * residual[:, None]
    error = float(np.sqrt(max((inverse @ (scaled.T @ scaled) @ inverse)[1, 1], 0.0)))
    effect = float(-slope[1] * flying.std() / kept.mean()) if kept.mean() > 0 else 0.0
    return effect if error > 0 and -slope[1] > SURE * error and effect >= NOTABLE else 0.0


def _fewer(arrivals: Floats, lasted: Floats) -> float:
    """What share of arrivals is missing in the half of the time in which more is in flight, 0 where not sure.

    Who does not wait for an answer comes as often whatever latency the ones before happened to have: the same arrivals with
    latencies of others near them say how many would come, be they even or in bursts.
    """
    own, ratio = _while_many(arrivals, lasted)
    moves = [move for move in range(-MOVED, MOVED + 1) if move]
    moved = np.array([_while_many(arrivals, np.roll(lasted, move)) for move in moves])
    # Chance alone moves a count by its own deviation; those of moved latencies have it in common.
    sure = own < moved[:, 0].mean() - FEWER_SURE * max(float(moved[:, 0].std()), 0.5)
    usual = float(np.median(moved[:, 1]))
    return 1 - ratio / usual if sure and ratio < FEWER * usual else 0.0


def _while_many(arrivals: Floats, lasted: Floats) -> tuple[float, float]:
    """How many more arrive in the half of the time with more in flight than its length makes, in standard deviations, and
    their rate there over that of the rest (strangers see time averages: Wolff 1982)."""
    ends = np.sort(arrivals + lasted)
    ends = ends[: np.searchsorted(ends, arrivals[-1], side="right")]
    times = np.concatenate([arrivals, ends])
    change = np.repeat([1, -1], [len(arrivals), len(ends)])
    order = np.argsort(times, kind="stable")
    level, lasts = np.cumsum(change[order])[:-1], np.diff(times[order])
    # An arrival ends the state it came in.
    arrives = change[order][1:] > 0
    by_level = np.bincount(np.maximum(level, 0), weights=lasts)
    many = level > int(np.searchsorted(np.cumsum(by_level), by_level.sum() / 2))
    n, there = int(arrives.sum()), int((arrives & many).sum())
    share = float(lasts[many].sum()) / max(float(lasts.sum()), 1e-12)
    if not 0 < share < 1 or not n:
        return 0.0, 1.0
    rate = (there / share) / max((n - there) / (1 - share), 1e-9)
    return (there - share * n) / float(np.sqrt(n * share * (1 - share))), rate
