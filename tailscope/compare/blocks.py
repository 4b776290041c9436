"""How sure one can be of a difference between two windows of a service in bursts: a block bootstrap over time.

Requests that arrive together are slow together, so what is drawn again is blocks of time (Künsch 1989), round a circle
(Politis and Romano 1992), long enough that two of them know little of each other. All classes and metrics of a trace are
drawn together. Few blocks know their own spread badly: what they spread is divided by a random scale as in Student's t,
with as many degrees of freedom as there are blocks less one, and below MIN_BLOCKS nothing is said. A difference is called
where an interval excludes zero that holds all quantiles of all classes at once (max-t: Westfall and Young 1993; Romano
and Wolf 2005), so that a comparison of thirty numbers calls none by chance more often than one of a single number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from tailscope import stats
from tailscope.stats import Floats, Ints

#: Parts of a trace's time that blocks are made of.
SLICES = 512
#: How often the blocks are drawn again.
DRAWS = 599
#: A block is at least so many times as long as what one independent sample takes (the integrated autocorrelation time).
BLOCK_TIMES = 2.0
#: Fewer blocks do not tell how much blocks vary; more tell it no better, and longer ones depend less on each other.
MIN_BLOCKS, MOST_BLOCKS = 10, 50
#: Below this many requests nothing is said of a class.
MIN_VALUES = 20
#: Smaller changes are none to speak of, and where an interval holds no larger one nothing has changed.
SAME = 0.05
#: Latencies shorter than this are alike: clocks and event loops are no better.
FLOOR_S = 1e-4
CONFIDENCE = 0.95
QUANTILES = (0.5, 0.95, 0.99)
#: Ranks at which the resampled distribution is known; between them values are interpolated.
RANKS = np.unique(np.concatenate([np.linspace(0.01, 0.9, 90), 1 - np.logspace(-1, -3.5, 130)]))

Key = tuple[str, str]
Verdict = Literal["faster", "slower", "same", "cannot tell"]


@dataclass(frozen=True)
class Values:
    """Latencies of a class by a metric: seconds, instants, and what each counts. `n`: how many these stand for."""

    values_s: Floats
    times_ns: Ints
    weights: Floats
    n: int

    def worth(self, q: float) -> float:
        """Effective number of samples for quantile q: bursts (`stats.effective_samples`) and weights (Kish 1965)."""
        used = self.weights > 0
        values, weights = self.values_s[used], self.weights[used]
        if not len(values):
            return 0.0
        above = (values > np.quantile(values, q)).astype(np.float64)
        return stats.effective_samples(above, self.times_ns[used]) * evenness(weights)

    def quantile(self, q: float) -> float:
        used = self.weights > 0
        values, weights = self.values_s[used], self.weights[used]
        if weights.max() == weights.min():
            return float(np.quantile(values, q))
        order = np.argsort(values, kind="stable")
        cumulative = np.cumsum(weights[order])
        return float(values[order][min(np.searchsorted(cumulative, q * cumulative[-1]), len(values) - 1)])


def evenness(weights: Floats) -> float:
    """1 for equal weights, less the more a few of them count."""
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))


class Blocks:
    """Blocks of a trace's time, drawn again DRAWS times.

    `span_ns`: its first and last instant. `time_s`: how long one independent sample takes. `count`: how many blocks there are;
    `enough` says whether they tell how much blocks vary.
    """

    def __init__(self, span_ns: tuple[int, int], time_s: float, seed: int) -> None:
        self.first_ns, self.last_ns = span_ns
        self.span_s = max(self.last_ns - self.first_ns, 1) / 1e9
        self.count = float(np.clip(self.span_s / max(BLOCK_TIMES * time_s, 1e-9), 1.0, MOST_BLOCKS))
        rng = np.random.default_rng(seed)
        blocks = max(1, round(self.count))
        length = max(1, round(SLICES / blocks))
        starts = rng.multinomial(blocks, np.full(SLICES, 1 / SLICES), size=DRAWS)
        # A slice is drawn as often as blocks begin on it or shortly before, round the circle.
        sums = np.cumsum(np.concatenate([starts[:, -length:], starts], axis=1), axis=1)
        self._drawn = (sums[:, length:] - sums[:, :-length]).astype(np.float64)
        freedom = max(self.count - 1, 1.0)
        self._scale = np.sqrt(freedom / rng.chisquare(freedom, DRAWS))
        # What blocks next to each other have in common is lost where they are drawn apart: of a variance the share
        # time / (2 length), exactly so for an AR(1) process. And b of them spread less about their own mean by 1 / b.
        lost = min(time_s * self.count / self.span_s / 2, 1 / (2 * BLOCK_TIMES))
        self._widen = float(np.sqrt(self.count / max(self.count - 1, 0.5) / (1 - lost)))

    @property
    def enough(self) -> bool:
        return self.count >= MIN_BLOCKS

    def slices(self, times_ns: Ints) -> Ints:
        """The slice that each instant lies in."""
        share = (times_ns - self.first_ns) / max(self.last_ns - self.first_ns, 1)
        return np.clip((share * SLICES).astype(np.int64), 0, SLICES - 1)

    def per_slice(self, times_ns: Ints, of: Floats | None = None) -> Floats:
        """The sum of `of` (or the number) in each slice."""
        return np.bincount(self.slices(times_ns), weights=of, minlength=SLICES).astype(np.float64)

    def ratio(self, over: Floats, under: Floats) -> Estimate:
        """sum(over) / sum(under), both by slice."""
        drawn = self._drawn @ np.column_stack([over, under])
        point = float(over.sum() / under.sum()) if under.sum() > 0 else 0.0
        values = np.where(drawn[:, 1] > 0, drawn[:, 0] / np.maximum(drawn[:, 1], 1e-12), point)
        return self._estimate(point, values - point)

    def quantiles(self, values: Values) -> dict[float, Estimate]:
        """The logarithms of quantiles, seconds."""
        used = values.weights > 0
        edges = np.unique(np.quantile(values.values_s[used], RANKS))
        bins = np.searchsorted(edges, values.values_s[used], side="left")
        size = len(edges) + 1
        cells = self.slices(values.times_ns[used]) * size + bins
        counts = np.bincount(cells, weights=values.weights[used], minlength=SLICES * size)
        by_slice = np.cumsum(counts.reshape(SLICES, size), axis=1)
        drawn, whole = self._drawn @ by_slice, by_slice.sum(axis=0)[None]
        result = {}
        for q in QUANTILES:
            center = _log(_interpolated(edges, whole, q))[0]
            result[q] = self._estimate(
                float(_log(np.array([values.quantile(q)]))[0]), _log(_interpolated(edges, drawn, q)) - center
            )
        return result

    def _estimate(self, point: float, deviations: Floats) -> Estimate:
        wide = deviations * self._widen
        return Estimate(point, wide, wide * self._scale)


def _log(values: Floats) -> Floats:
    return np.asarray(np.log(np.maximum(values, FLOOR_S)))


def _interpolated(edges: Floats, cumulative: Floats, q: float) -> Floats:
    """Quantile q of each row of counts up to each edge, the last of them beyond all edges."""
    if len(edges) == 1:
        return np.full(len(cumulative), edges[0])
    wanted = q * cumulative[:, -1]
    place = np.clip((cumulative < wanted[:, None]).sum(axis=1), 1, len(edges) - 1)
    row = np.arange(len(cumulative))
    low, high = cumulative[row, place - 1], cumulative[row, place]
    share = np.clip((wanted - low) / np.maximum(high - low, 1e-12), 0.0, 1.0)
    return np.asarray(edges[place - 1] + share * (edges[place] - edges[place - 1]))


@dataclass(frozen=True)
class Estimate:
    """A number and how it varies: `deviations` as drawn, `student` the same for so few blocks."""

    point: float
    deviations: Floats
    student: Floats

    def interval(self) -> tuple[float, float]:
        low, high = np.quantile(self.student, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
        return self.point + float(low), self.point + float(high)


@dataclass(frozen=True)
class Difference:
    """after - before: the number, its own 95 % interval, one that holds with all others of a comparison at once, and what it was
    in each draw."""

    point: float
    interval: tuple[float, float]
    together: tuple[float, float]
    draws: Floats

    @property
    def called(self) -> bool:
        return self.together[0] > 0 or self.together[1] < 0


def differences(pairs: Sequence[tuple[Estimate, Estimate]]) -> list[Difference]:
    """after - before of each pair of (before, after), of which no more than one in twenty families errs anywhere."""
    if not pairs:
        return []
    spread = np.array(
        [max(float(np.std(b.deviations - a.deviations)), 1e-12) for a, b in pairs],
    )
    student = np.array([b.student - a.student for a, b in pairs])
    largest = np.max(np.abs(student) / spread[:, None], axis=0)
    reach = float(np.quantile(largest, CONFIDENCE))
    result = []
    for (a, b), own, size in zip(pairs, student, spread, strict=True):
        point = b.point - a.point
        low, high = (float(v) for v in np.quantile(own, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]))
        together = point - reach * float(size), point + reach * float(size)
        result.append(Difference(point, (point + low, point + high), together, point + own))
    return result


@dataclass(frozen=True)
class Sample:
    """What is compared of a trace: the latencies of its classes, and the blocks of its time."""

    values: Mapping[Key, Values]
    blocks: Blocks


def independent_s(values: Mapping[Key, Values], span_ns: tuple[int, int]) -> float:
    """How long one independent sample takes: of whether requests are slower than their class's median, or than its p95, whichever
    says longer."""
    span_s = max(span_ns[1] - span_ns[0], 1) / 1e9
    longest = 0.0
    for metric in ("TTFT", "E2E"):
        those = [v for (_, m), v in values.items() if m == metric and v.n >= MIN_VALUES]
        if not those:
            continue
        times = np.concatenate([v.times_ns for v in those])
        for q in (0.5, 0.95):
            above = np.concatenate([v.values_s > np.quantile(v.values_s, q) for v in those])
            longest = max(
                longest, span_s / max(stats.effective_samples(above.astype(np.float64), times), 1.0)
            )
    return longest or span_s


def sample(values: Mapping[Key, Values], span_ns: tuple[int, int], seed: int) -> Sample:
    return Sample(values, Blocks(span_ns, independent_s(values, span_ns), seed))


@dataclass(frozen=True)
class Change:
    """A quantile of a class and metric before and after, seconds; withheld values are None and `reason` says why.

    `change`: after / before - 1, with its 95 % interval. `p_faster`: how likely it is lower after; `p_faster_5`, `p_slower_5`: by
    more than 5 %. `n`, `n_eff`: before and after.
    """

    klass: str
    metric: str
    quantile: str
    n: tuple[int, int]
    n_eff: tuple[float, float]
    before_s: float | None = None
    after_s: float | None = None
    before_interval_s: tuple[float, float] | None = None
    after_interval_s: tuple[float, float] | None = None
    change: float | None = None
    interval: tuple[float, float] | None = None
    p_faster: float | None = None
    p_faster_5: float | None = None
    p_slower_5: float | None = None
    verdict: Verdict = "cannot tell"
    reason: str | None = None


def changes(before: Sample, after: Sample) -> list[Change]:
    """Each quantile of each class and metric that both traces have."""
    rows: list[Change] = []
    pairs: list[tuple[Estimate, Estimate]] = []
    asked: list[tuple[int, float, tuple[Values, Values]]] = []
    for key in before.values:
        if key not in after.values:
            continue
        sides = before.values[key], after.values[key]
        counts = sides[0].n, sides[1].n
        if any((v.weights > 0).sum() < MIN_VALUES for v in sides):
            rows.append(Change(*key, "p50", counts, (0.0, 0.0), reason="too-few-samples"))
            continue
        own = [_stated(Change(*key, f"p{100 * q:g}", counts, (0.0, 0.0)), q, sides) for q in QUANTILES]
        if not (before.blocks.enough and after.blocks.enough):
            own = [replace(row, reason=row.reason or "too-few-blocks") for row in own]
        if any(row.reason is None for row in own):
            drawn = [s.blocks.quantiles(v) for s, v in zip((before, after), sides, strict=True)]
            for place, (row, q) in enumerate(zip(own, QUANTILES, strict=True), len(rows)):
                if row.reason is None:
                    asked.append((place, q, sides))
                    pairs.append((drawn[0][q], drawn[1][q]))
        rows += own
    for (place, q, sides), pair, difference in zip(asked, pairs, differences(pairs), strict=True):
        row = _judged(rows[place], difference)
        rows[place] = replace(
            row,
            before_interval_s=_own_interval(pair[0], sides[0], row.n_eff[0], q),
            after_interval_s=_own_interval(pair[1], sides[1], row.n_eff[1], q),
        )
    return rows


def _stated(row: Change, q: float, sides: tuple[Values, Values]) -> Change:
    worth = sides[0].worth(q), sides[1].worth(q)
    # A median needs enough on either side of it, as any quantile does.
    allowed = all(stats.allows_quantile(max(q, 1 - q), n_eff) for n_eff in worth)
    stated = [
        v.quantile(q) if stats.allows_quantile(q, n) else None for v, n in zip(sides, worth, strict=True)
    ]
    return replace(
        row,
        n_eff=worth,
        before_s=stated[0],
        after_s=stated[1],
        reason=None if allowed else "too-few-samples",
    )


def _own_interval(estimate: Estimate, values: Values, n_eff: float, q: float) -> tuple[float, float]:
    """Of one trace's quantile: by blocks or by ranks (as `diagnose` states it), whichever reaches further to either side. A
    quantile is stated in calm windows first, and those alone know little of what bursts do."""
    low, high = (float(v) for v in np.exp(estimate.interval()))
    ranks = stats.quantile_interval(values.values_s[values.weights > 0], q, n_eff)
    return (low, high) if ranks is None else (min(low, ranks[0]), max(high, ranks[1]))


def _judged(row: Change, difference: Difference) -> Change:
    low, high = difference.interval
    verdict: Verdict = "cannot tell"
    if difference.called:
        verdict = "faster" if difference.point < 0 else "slower"
    elif np.log1p(-SAME) <= low and high <= np.log1p(SAME):
        verdict = "same"
    return replace(
        row,
        change=float(np.expm1(difference.point)),
        interval=(float(np.expm1(low)), float(np.expm1(high))),
        p_faster=float(np.mean(difference.draws < 0) + np.mean(difference.draws == 0) / 2),
        p_faster_5=float(np.mean(difference.draws < np.log1p(-SAME))),
        p_slower_5=float(np.mean(difference.draws > np.log1p(SAME))),
        verdict=verdict,
        reason=None if verdict != "cannot tell" else "interval",
    )
