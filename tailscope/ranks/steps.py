"""Which step of a window each round belongs to, though every rank counts its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tailscope.ranks.sequence import UNKNOWN, Floats, Ints

#: Where no step is annotated so many rounds of the largest group stand for one.
BLOCK = 8
#: Steps that only a further rank counts are numbered from here on, times that rank's place in the window.
OF_ANOTHER = 1_000_000


def label(steps: Sequence[Ints], last_ns: Sequence[Floats]) -> list[Ints]:
    """The step of each round of each group, UNKNOWN outside of annotated ones.

    `steps`: by group, ranks x rounds, each rank's own count, UNKNOWN where it has none. `last_ns`: by group, when the last
    rank came. A round is of the step that its lowest rank says. Rounds without the window's first rank are of the step
    that it was in when the ranks first met in theirs; where it was in none, of a step of their own. Then all are counted
    by time.
    """
    if all((of_group < 0).all() for of_group in steps):
        return _blocks(last_ns)
    told = [_lowest(of_group) for of_group in steps]
    for rank in range(1, len(steps[0])):
        both = [_both(labels, own[rank]) for labels, own in zip(told, steps, strict=True)]
        here = np.concatenate([own[rank, b] for own, b in zip(steps, both, strict=True)])
        if not len(here):
            continue
        number, first = np.unique(here, return_index=True)
        meant = np.concatenate([labels[b] for labels, b in zip(told, both, strict=True)])[first]
        for labels in told:
            others = np.flatnonzero(labels // OF_ANOTHER == rank)
            place = np.minimum(np.searchsorted(number, labels[others] % OF_ANOTHER), len(number) - 1)
            known = number[place] == labels[others] % OF_ANOTHER
            labels[others[known]] = meant[place[known]]
    return _by_time(told, last_ns) if any((labels >= OF_ANOTHER).any() for labels in told) else told


def _by_time(told: Sequence[Ints], last_ns: Sequence[Floats]) -> list[Ints]:
    """The steps counted from 0 in the order in which they began."""
    labels = np.concatenate(told)
    known, place = np.unique(labels, return_inverse=True)
    begin = np.full(len(known), np.inf)
    np.minimum.at(begin, place.reshape(-1), np.concatenate(last_ns))
    begin[known < 0] = -np.inf
    number = np.empty(len(known), np.int64)
    number[np.argsort(begin, kind="stable")] = np.arange(len(known)) - int(np.sum(known < 0))
    return np.split(number[place.reshape(-1)], np.cumsum([len(some) for some in told])[:-1])


def _both(labels: Ints, own: Ints) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Rounds in which the window's first rank and another each say their step."""
    return np.asarray((labels >= 0) & (labels < OF_ANOTHER) & (own >= 0))


def _lowest(of_group: Ints) -> Ints:
    known = of_group >= 0
    first = np.argmax(known, axis=0)
    rounds = np.arange(of_group.shape[1])
    return np.where(known.any(axis=0), first * OF_ANOTHER + of_group[first, rounds], UNKNOWN)


def _blocks(last_ns: Sequence[Floats]) -> list[Ints]:
    """Rounds of the largest group by eights; those of others by when they were."""
    if not last_ns:
        return []
    largest = max(range(len(last_ns)), key=lambda i: len(last_ns[i]))
    begin = np.sort(last_ns[largest])[::BLOCK]
    return [
        np.arange(len(last)) // BLOCK
        if i == largest
        else np.maximum(np.searchsorted(begin, last, side="right") - 1, 0)
        for i, last in enumerate(last_ns)
    ]
