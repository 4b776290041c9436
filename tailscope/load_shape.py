"""Whether requests wait for answers before they are sent: signs of a closed loop, or of a limit on requests in flight, in
arrivals and departures. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

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


@dataclass(frozen=True)
class Loop:
    """What arrivals have to do with departures.

    `capped`: share of the time in parts in which each arrival follows a departure, by `turnaround_s` (median), with at most
    `limit` in flight. `held`: by what share of its mean the rate of arrivals falls when one standard deviation more is in
    flight, 0 where that is not sure.
    """

    n: int
    capped: float
    limit: int
    turnaround_s: float
    held: float
    mean_in_flight: float


def loop_of(arrivals_ns: Ints, ends_ns: Ints) -> Loop | None:
    """Signs of a loop in requests that were sent at `arrivals_ns` and answered at `ends_ns`. None for too few.

    With at most U in flight the (U+k)-th request is sent after the k-th answer. Where clients wait for answers it follows by
    a time that hardly varies, while without them the two know nothing of each other and their distance varies more than
    the gaps between arrivals. Users who think between answer and request show otherwise: the more of them wait, the fewer
    requests come. Arrivals of a slot of time are regressed on what is in flight at its start and on the arrivals of
    the slots before, since a burst that has passed leaves many in flight and few arriving too.
    """
    n = len(arrivals_ns)
    if n < LEAST:
        return None
    origin = int(arrivals_ns.min())
    arrivals, ends = (np.sort(instants - origin) / 1e9 for instants in (arrivals_ns, ends_ns))
    # In flight just before each arrival.
    before = np.arange(n) - np.searchsorted(ends, arrivals, side="left")
    edges = np.linspace(0, n, min(MOST_PARTS, max(1, n // PART)) + 1).astype(int)
    capped, of, limits, turnarounds = 0.0, 0.0, [], []
    lasting = float(ends.sum() - arrivals.sum()) / n
    for first, beyond in pairwise(edges.tolist()):
        span = float(arrivals[beyond - 1] - arrivals[first])
        of += span
        found = _turnaround(arrivals, ends, before, range(first, beyond), lasting)
        if found:
            capped += span
            limits.append(found[0])
            turnarounds.append(found[1])
    length = float(max(arrivals[-1], ends[-1]))
    return Loop(
        n,
        capped / of if of else 0.0,
        int(np.median(limits)) if limits else 0,
        float(np.median(turnarounds)) if turnarounds else 0.0,
        _held(arrivals, ends),
        float((ends - arrivals).sum() / length) if length else 0.0,
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
