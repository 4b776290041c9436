"""Intervals that overlap, each in a lane in which no other overlaps it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from tailscope.stats import Ints


def lanes(start: Ints, end: Ints) -> Ints:
    """The lane of each interval, from 0; as few as there are intervals at one time, and the same for the same intervals.

    `start` is sorted. Lanes are taken in turn, the one that has been free for longest first: so the i-th interval to begin takes
    the lane of the (i - most)-th to end, and a few steps of pointer jumping replace a loop.
    """
    n = len(start)
    # What takes no time still takes its lane: in file order it ends after it began.
    end = np.maximum(end, start + 1)
    ends = np.sort(end)
    ended = np.searchsorted(ends, start, "right")
    most = int(np.max(np.arange(n) + 1 - ended, initial=1))
    before = np.arange(n)
    before[most:] = np.argsort(end, kind="stable")[: max(n - most, 0)]
    while True:
        further = before[before]
        if np.array_equal(further, before):
            return before
        before = further


def stacked(group: Ints, start: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Lanes within groups, numbered over all of them: of each interval, and the group of each lane. Sorted by group and start."""
    lane = np.empty(len(start), np.int64)
    groups: list[int] = []
    bounds = [*np.flatnonzero(np.diff(group, prepend=-1)), len(group)] if len(group) else []
    for first, beyond in pairwise(bounds):
        own = lanes(start[first:beyond], end[first:beyond])
        lane[first:beyond] = own + len(groups)
        groups += [int(group[first])] * (int(own.max()) + 1)
    return lane, np.asarray(groups, np.int64)
