"""The same collective on all ranks: by sequence number where the profiler kept it, else by order and by ends."""

from __future__ import annotations

import numpy as np

from tailscope.ranks.ends import match_by_ends
from tailscope.ranks.sequence import Ints, Match, Sequence, nothing


def match(one: Sequence, other: Sequence, *, shared_clock: bool, apart_ns: float | None = None) -> Match:
    """Pair the collectives of two ranks. `offset_ns` is the other's clock less the one's, as the ends suggest; `apart_ns`: what
    other collectives of theirs told of that."""
    if not len(one.kind) or not len(other.kind):
        return Match(nothing(), nothing(), 0.0, len(one.kind) + len(other.kind))
    if (one.seq >= 0).all() and (other.seq >= 0).all():
        return _by_number(one, other)
    return match_by_ends(one, other, shared_clock, apart_ns)


def _by_number(one: Sequence, other: Sequence) -> Match:
    """By number and kind, and by occurrence: a coalesced call gives several kernels one number."""
    numbers = np.stack([np.concatenate([one.seq, other.seq]), np.concatenate([one.kind, other.kind])])
    _, named = np.unique(numbers, axis=1, return_inverse=True)
    most = len(named) + 1
    ours, others = (ids * most + _occurrence(ids) for ids in np.split(named.reshape(-1), [len(one.seq)]))
    _, mine, theirs = np.intersect1d(ours, others, assume_unique=True, return_indices=True)
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
