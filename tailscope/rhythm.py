"""Whether events come at a regular period, of which some may be missing and among which there may be others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln

from tailscope.stats import Floats

#: Fewer events have no period that anybody should believe.
MIN_EVENTS = 4
#: More are not needed; the largest count.
MAX_EVENTS = 200
#: A lattice may have this many times as many places as there are gaps: the others are missing.
SPARSE = 3
#: Share of the events that may be of another kind.
STRAY = 0.25
#: Events of one kind are within this factor of each other's size.
ALIKE = 4.0
#: Kinds are looked for at sizes that differ by this factor.
STEP = 1.5
#: As many sizes are a factor of 10^5.
MOST_SIZES = 30
#: How far from its place an event may lie, as a share of the period, to be one of them.
NEAR = 0.15


@dataclass(frozen=True)
class Rhythm:
    """`period` in the unit of the positions; `p_value` for all that was searched; which events keep time, how many
    places of the lattice between first and last there are, and how far from them (root mean square, of a period)."""

    period: float
    p_value: float
    members: NDArray[np.intp]
    places: int
    jitter: float


def find(at: Floats, size: Floats, resolution: float) -> Rhythm | None:
    """The most regular period among events of one kind, None below MIN_EVENTS. `at`: positions in order; `size` tells
    kinds apart; `resolution`: how exactly positions are known. The p-value is against events at random (Poisson), and
    counts every kind and period that was tried (Bonferroni).
    """
    tried, best = 0, None
    for members in _kinds(size):
        apart = _apart(at, members, resolution)
        # The first or the last may be one that does not belong to the others.
        for part in (apart, apart[1:], apart[:-1], apart[1:-1]):
            if len(part) < MIN_EVENTS:
                continue
            tried += 1
            found = _lattice(at, part, resolution)
            if found is not None and (best is None or found.p_value < best.p_value):
                best = found
    if best is None:
        return None
    return Rhythm(best.period, min(1.0, best.p_value * tried), best.members, best.places, best.jitter)


def _kinds(size: Floats) -> Iterator[NDArray[np.intp]]:
    """Events from some size on, and those of like size: each set once, in order of position."""
    seen = set()
    positive = size[size > 0]
    if not len(positive):
        return
    least, most = np.log(positive.min()), np.log(positive.max())
    for i in range(min(int((most - least) / np.log(STEP)) + 2, MOST_SIZES)):
        level = float(np.exp(most - i * np.log(STEP))) * (1 - 1e-9)
        for top in (np.inf, ALIKE * level):
            members = np.flatnonzero((size >= level) & (size < top))
            key = members.tobytes()
            if MIN_EVENTS <= len(members) <= MAX_EVENTS and key not in seen:
                seen.add(key)
                yield members


def _apart(at: Floats, members: NDArray[np.intp], resolution: float) -> NDArray[np.intp]:
    """Without those that follow right upon another: one event that was seen twice."""
    follows = np.diff(at[members], prepend=-np.inf) <= 2 * resolution
    return members[~follows]


def _lattice(at: Floats, members: NDArray[np.intp], resolution: float) -> Rhythm | None:
    """Whether the events lie on a lattice that begins at the first and ends at the last, up to STRAY of them.

    Given first and last, the m others of a Poisson process are independent and uniform between them, and so are their
    phases on a lattice of N intervals, for each whole N: that m - j of them are within d of their places has at most the
    chance C(m, j) (2 d)^(m - j). Half of the weight is on no place missing, the rest on the other N.
    """
    n = len(members)
    position = at[members] - at[members[0]]
    span, m = float(position[-1]), n - 2
    counts = np.arange(n - 1 - int(STRAY * m), SPARSE * (n - 1) + 1)
    phases = position[1:-1] / span * counts[:, None]
    off = np.abs(phases - np.round(phases))
    strays = np.arange(int(STRAY * m) + 1)
    # Nothing is known to be nearer than the resolution.
    within = np.maximum(np.sort(off, axis=1)[:, m - 1 - strays], (resolution * counts / span)[:, None])
    tests = np.where(counts == n - 1, 2, 2 * (len(counts) - 1)) * len(strays)
    ways = gammaln(m + 1) - gammaln(strays + 1) - gammaln(m - strays + 1)
    chances = np.log(tests)[:, None] + ways + (m - strays) * np.log(np.minimum(2 * within, 1.0))
    best, left_out = np.unravel_index(int(np.argmin(chances)), chances.shape)
    near = within[best, left_out]
    on = np.concatenate([[True], off[best] <= near, [True]])
    places = np.concatenate([[0], np.round(phases[best]), [counts[best]]])[on]
    if near > NEAR or len(places) < MIN_EVENTS or len(np.unique(places)) < len(places):
        return None  # two at one place are no rhythm
    jitter = float(np.sqrt(np.mean(off[best][on[1:-1]] ** 2)))
    p_value = float(np.exp(min(chances[best, left_out], 0.0)))
    return Rhythm(span / counts[best], p_value, members[on], int(counts[best]) + 1, jitter)
