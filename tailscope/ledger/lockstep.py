"""Engines that step together: the data-parallel engines of a mixture of experts, whose collectives span all ranks.

Whether they do is read off the ends of their steps. A step of one then is a step of all, as long as the slowest makes
it; an engine that has nothing to compute runs along, which vLLM does not report.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailscope.ledger.steps import Steps
from tailscope.stats import Ints
from tailscope.store import Trace

#: Two steps end together when their ends are no further apart than this share of the step's length. After the last
#: collective each engine samples and tells on its own: of a real pair 98 % are within 0.2.
TOGETHER = 0.25
#: Share of the steps taken while both engines were busy that must end together. By chance, half of them do.
NEARLY_ALL = 0.9
#: Engines of like load drift past each other slowly; a step this much longer than usual throws them apart, unless
#: they are bound to each other. There must be some.
LONG, MIN_LONG = 1.25, 10
MIN_COMMON = 50
#: Steps of an engine that are compared with those of each other one, and as many long ones.
COMPARED = 2_000
#: A step of one engine that ends within this share of its length of another's is the same step.
SAME = 0.5


@dataclass(frozen=True)
class Ends:
    start_ns: Ints
    end_ns: Ints

    @cached_property
    def sample(self) -> Sample:
        length = self.end_ns - self.start_ns
        long = length > LONG * np.median(length)
        chosen = np.concatenate([_thinned(np.flatnonzero(long)), _thinned(np.flatnonzero(~long))])
        return Sample(self.end_ns[chosen], length[chosen], long[chosen])


@dataclass(frozen=True)
class Sample:
    """Steps of an engine that are compared with those of others."""

    end_ns: Ints
    length_ns: Ints
    long: NDArray[np.bool_]


def load_ends(trace: Trace, instance: str, engines: Iterable[int | None]) -> dict[int | None, Ends]:
    """When the steps of an instance's engines began and ended."""
    found: dict[int | None, Ends] = {}
    for engine in engines:
        columns = trace.connection.execute(
            "SELECT start_ns, end_ns FROM steps "
            "WHERE instance = $instance AND engine IS NOT DISTINCT FROM $engine ORDER BY k",
            {"instance": instance, "engine": engine},
        ).fetchnumpy()
        found[engine] = Ends(
            np.asarray(columns["start_ns"], np.int64), np.asarray(columns["end_ns"], np.int64)
        )
    return found


def groups(engines: Mapping[int | None, Ends]) -> list[list[int | None]]:
    """The engines, those that step together as one list, in order."""
    head: dict[int | None, int | None] = {engine: engine for engine in engines}
    for one, other in combinations(engines, 2):
        if head[one] != head[other] and together(engines[one], engines[other]):
            joined = head[other]
            head = {engine: head[one] if h == joined else h for engine, h in head.items()}
    return [[engine for engine in engines if head[engine] == h] for h in dict.fromkeys(head.values())]


def together(one: Ends, other: Ends) -> bool:
    """Whether the steps of two engines end together, the long ones as well."""
    compared = [_compared(one.sample, other), _compared(other.sample, one)]
    coincide = np.concatenate([c for c, _ in compared])
    long = np.concatenate([g for _, g in compared])
    return bool(
        len(coincide) >= MIN_COMMON
        and long.sum() >= MIN_LONG
        and coincide[~long].sum() >= NEARLY_ALL * (~long).sum()
        and coincide[long].sum() >= NEARLY_ALL * long.sum()
    )


def _compared(one: Sample, other: Ends) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Of steps of `one` in whose middle the other is busy: whether it ends a step with them, and which are long."""
    middle = one.end_ns - one.length_ns // 2
    beside = np.searchsorted(other.start_ns, middle, side="right") - 1
    busy = (beside >= 0) & (other.end_ns[np.maximum(beside, 0)] > middle)
    apart = np.abs(other.end_ns[beside[busy]] - one.end_ns[busy])
    return apart <= TOGETHER * one.length_ns[busy], one.long[busy]


def _thinned(index: NDArray[np.intp]) -> NDArray[np.intp]:
    return index[:: max(1, len(index) // COMPARED)]


def one_timeline(engines: Sequence[Steps]) -> list[Steps]:
    """The steps of engines that step together as arrays of one length: the k-th of each is the same step.

    Where an engine reported none it ran along without work of its own. What the ranks lost, and what stopped an
    engine, stopped all.
    """
    most = max(range(len(engines)), key=lambda i: len(engines[i].end_ns))
    ends = engines[most].end_ns
    for i, steps in enumerate(engines):
        if i != most:
            alone = ~_near(ends, steps)[1]
            ends = np.sort(np.concatenate([ends, steps.end_ns[alone]]), kind="stable")
    places = [_near(ends, steps)[0] for steps in engines]
    begun = ends.copy()
    for steps, place in zip(engines, places, strict=True):
        np.minimum.at(begun, place, steps.start_ns)
    placed = [_placed(s, p, ends, begun) for s, p in zip(engines, places, strict=True)]
    lost = {
        name: np.max([np.nan_to_num(getattr(s, name)) for s in placed], axis=0)
        for name in ("late_ns", "slow_ns", "paused", "host_ns")
    }
    # On the common time line a step begins where the one before ends.
    lost["before_ns"] = np.zeros(len(ends))
    return [replace(steps, **lost) for steps in placed]


def _near(ends: Ints, steps: Steps) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
    """The end nearest to that of each step, and whether it is the same step's."""
    after = np.clip(np.searchsorted(ends, steps.end_ns), 0, len(ends) - 1)
    before = np.maximum(after - 1, 0)
    nearer = np.abs(ends[before] - steps.end_ns) < np.abs(ends[after] - steps.end_ns)
    nearest = np.where(nearer, before, after)
    apart = np.abs(ends[nearest] - steps.end_ns)
    return nearest, np.asarray(apart <= SAME * (steps.end_ns - steps.start_ns))


def _placed(steps: Steps, place: NDArray[np.intp], ends: Ints, begun: Ints) -> Steps:
    """An engine's steps at their places on the common time line; its own ends stay as they are."""
    n = len(ends)
    own = np.zeros(n, bool)
    own[place] = True
    own_end = np.full(n, np.iinfo(np.int64).max)
    # Of two steps at one place the last one's end counts.
    own_end[place] = steps.end_ns
    upcoming = np.minimum.accumulate(own_end[::-1])[::-1]
    end = np.maximum.accumulate(np.where(own, own_end, np.minimum(ends, upcoming)))
    start = np.minimum(np.maximum(begun, np.concatenate([begun[:1], end[:-1]])), end)
    arrays: dict[str, Any] = {}
    for name in steps.__dataclass_fields__:
        if name not in ("start_ns", "end_ns"):
            values = getattr(steps, name)
            arrays[name] = np.bincount(place, weights=values, minlength=n)
    for name in ("running", "waiting", "deferred", "kv_usage", "epoch", "blocked"):
        # States, not amounts: the last of two steps at one place has them.
        arrays[name] = np.full(n, np.nan if name == "blocked" else 0.0)
        arrays[name][place] = getattr(steps, name)
    # An engine that only runs along has not started again.
    arrays["epoch"] = np.maximum.accumulate(arrays["epoch"])
    return Steps(start, end, **arrays)
