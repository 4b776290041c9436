"""The same collective on all ranks. By sequence number where the profiler kept it, else by order: the ranks of a group
run the same collectives one after the other, so that only where each one's profile begins must be found.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
UNKNOWN = -1
#: How many collectives one profile may begin before another.
MOST_LAG = 256
#: Pairs looked at to judge a lag, and to judge whether two sequences have come apart.
SAMPLE, NEXT = 512, 8
#: How many collectives may be missing at a place where events were dropped.
MOST_DROPPED = 8
MOST_PLACES = 1_000
#: Ends may differ by this much before two intervals count as apart, whatever the clocks' error.
SLACK_NS = 50_000


@dataclass(frozen=True)
class Sequence:
    """One rank's collectives on one group in order, arrays of one length; `kind` and `seq` are UNKNOWN where not told."""

    index: Ints
    kind: Ints
    seq: Ints
    start_ns: Ints
    end_ns: Ints


@dataclass(frozen=True)
class Match:
    """Positions in two sequences that are one collective, and what could not be matched."""

    one: Ints
    other: Ints
    offset_ns: float
    unmatched: int


def match(one: Sequence, other: Sequence, *, shared_clock: bool) -> Match:
    """Pair the collectives of two ranks. `offset_ns` is the other's clock less the one's, as the ends suggest."""
    if not len(one.kind) or not len(other.kind):
        return Match(_none(), _none(), 0.0, len(one.kind) + len(other.kind))
    if (one.seq >= 0).all() and (other.seq >= 0).all():
        return _by_number(one, other)
    return _by_order(one, other, shared_clock)


def _none() -> Ints:
    return np.empty(0, np.int64)


def _by_number(one: Sequence, other: Sequence) -> Match:
    """By number and kind, and by occurrence: a coalesced call gives several kernels one number."""
    numbers = np.stack([np.concatenate([one.seq, other.seq]), np.concatenate([one.kind, other.kind])])
    _, named = np.unique(numbers, axis=1, return_inverse=True)
    most = len(named) + 1
    keys = [ids * most + _occurrence(ids) for ids in np.split(named.reshape(-1), [len(one.seq)])]
    _, mine, theirs = np.intersect1d(*keys, assume_unique=True, return_indices=True)
    order = np.argsort(mine, kind="stable")
    mine, theirs = mine[order], theirs[order]
    offset = float(np.median(other.end_ns[theirs] - one.end_ns[mine])) if len(mine) else 0.0
    return Match(mine, theirs, offset, len(one.kind) + len(other.kind) - 2 * len(mine))


def _occurrence(ids: Ints) -> Ints:
    """How often each value stood before."""
    order = np.argsort(ids, kind="stable")
    ordered, places = ids[order], np.arange(len(ids))
    first = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    result = np.empty(len(ids), np.int64)
    result[order] = places - np.maximum.accumulate(np.where(first, places, 0))
    return result


def _by_order(one: Sequence, other: Sequence, shared_clock: bool) -> Match:
    lag, offset, spread = _lag(one, other, shared_clock)
    slack = max(SLACK_NS, 3 * spread)
    pairs_one, pairs_other = [], []
    at_one, at_other = max(0, -lag), max(0, lag)
    for _ in range(MOST_PLACES):
        count = min(len(one.kind) - at_one, len(other.kind) - at_other)
        if count <= 0:
            break
        mine, theirs = np.arange(at_one, at_one + count), np.arange(at_other, at_other + count)
        good = _together(one, other, mine, theirs, offset, slack)
        until = _comes_apart(good)
        kept = good[:until]
        pairs_one.append(mine[:until][kept])
        pairs_other.append(theirs[:until][kept])
        if until == count:
            break
        at_one, at_other = at_one + until, at_other + until
        skip = _resume(one, other, at_one, at_other, offset, slack)
        if skip is None:
            break
        at_one, at_other = at_one + skip[0], at_other + skip[1]
    mine, theirs = np.concatenate([*pairs_one, _none()]), np.concatenate([*pairs_other, _none()])
    return Match(mine, theirs, offset, len(one.kind) + len(other.kind) - 2 * len(mine))


def _lag(one: Sequence, other: Sequence, shared_clock: bool) -> tuple[int, float, float]:
    """How many collectives the other began before the one; the clocks' offset by it, and the spread of the ends.

    At the right lag the ends differ by a constant. Where steps repeat to the ns several lags look alike: the one
    that needs the smallest offset is taken, as clocks are set by NTP.
    """
    found: list[tuple[float, float, int]] = []
    for lag in range(-min(MOST_LAG, len(one.kind) - 1), min(MOST_LAG, len(other.kind) - 1) + 1):
        first, count = max(0, -lag), min(len(one.kind) - max(0, -lag), len(other.kind) - max(0, lag))
        mine = first + np.unique(np.linspace(0, count - 1, min(count, SAMPLE)).astype(np.int64))
        theirs = mine + lag
        if np.mean(one.kind[mine] == other.kind[theirs]) < 0.9:
            continue
        apart = (other.end_ns[theirs] - one.end_ns[mine]).astype(np.float64)
        offset = 0.0 if shared_clock else float(np.median(apart))
        # Few pairs agree by chance.
        found.append((float(np.median(np.abs(apart - offset))) * (1 + 16 / count), offset, lag))
    if not found:
        return 0, 0.0, 0.0
    best = min(spread for spread, _, _ in found)
    alike = [entry for entry in found if entry[0] <= 2 * best + 1_000]
    spread, offset, lag = min(alike, key=lambda entry: (abs(entry[1]), entry[0]))
    return lag, offset, spread


def _together(
    one: Sequence, other: Sequence, mine: Ints, theirs: Ints, offset: float, slack: float
) -> NDArray[np.bool_]:
    """Which pairs are of one kind and overlap in time: nobody leaves a collective before all have come."""
    overlap = (one.start_ns[mine] <= other.end_ns[theirs] - offset + slack) & (
        other.start_ns[theirs] - offset <= one.end_ns[mine] + slack
    )
    return np.asarray((one.kind[mine] == other.kind[theirs]) & overlap)


def _comes_apart(good: NDArray[np.bool_]) -> int:
    """From where on most of the next pairs do not fit; the length where none such is."""
    if good.all():
        return len(good)
    bad = np.concatenate([[0], np.cumsum(~good)])
    ahead = np.minimum(np.arange(len(good)) + NEXT, len(good))
    many = (bad[ahead] - bad[:-1]) * 2 > ahead - np.arange(len(good))
    places = np.flatnonzero(many & ~good)
    return int(places[0]) if len(places) else len(good)


def _resume(
    one: Sequence, other: Sequence, at_one: int, at_other: int, offset: float, slack: float
) -> tuple[int, int] | None:
    """How many to pass over in each until they fit again, as few as possible."""
    skips = sorted(
        ((i, j) for i in range(MOST_DROPPED + 1) for j in range(MOST_DROPPED + 1) if i or j), key=sum
    )
    for i, j in skips:
        count = min(len(one.kind) - at_one - i, len(other.kind) - at_other - j, NEXT)
        if count <= 0:
            continue
        steps = np.arange(count)
        if _together(one, other, at_one + i + steps, at_other + j + steps, offset, slack).all():
            return i, j
    return None
