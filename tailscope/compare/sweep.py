"""Several traces of one service under rising load: throughput and latency of each, where the knee is, what is full first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tailscope import stats
from tailscope.compare.blocks import FLOOR_S, MIN_VALUES, Blocks, Estimate, Values, differences, independent_s
from tailscope.compare.read import METRICS, Side, values_of
from tailscope.stats import Floats

#: Latency is flat up to so many times that of the lowest load: noise, and the batch's growth, stay below it.
FLAT = 1.5
#: A trace that is too bursty for an interval is slower all the same where most parts of its time are slower than every part
#: of the lowest load's: an overloaded queue grows all the time and has no two independent blocks.
PARTS, MOST_PARTS = 8, 7
#: A wait that makes up so much of what latency grew by is what grew.
LARGEST_PART = 0.2

#: Component of a bill -> what is full when it grows.
FULL_BY = {
    "queue_kv": "KV cache",
    "preempted": "KV cache",
    "recompute": "KV cache",
    "queue_slots": "sequence slots",
    "queue_budget": "token budget",
    "frontend": "gateway or front end",
    "step_wait": "GPU steps",
    "own_prefill": "GPU steps",
    "decode": "GPU steps",
    "others_prefill_before": "GPU steps",
    "others_prefill_in_prefill": "GPU steps",
    "others_prefill_in_decode": "GPU steps",
}


@dataclass(frozen=True)
class Point:
    """A trace of a sweep. `load`: requests a second offered, or requests in flight in a closed loop. Latencies in seconds over all
    classes, None where too few effective samples allow them; `growth`: of the knee's metric against the lowest load, with
    its interval; `flat`: whether it is (None: cannot tell)."""

    path: str
    load: float
    rate: float
    in_flight: float
    throughput: float
    output_tokens: float
    failed: float
    latency: Mapping[str, Mapping[str, float | None]]
    growth: float | None
    interval: tuple[float, float] | None
    flat: bool | None
    busy: float | None
    kv_p95: float | None
    slots_p95: float | None
    budget: float | None


@dataclass(frozen=True)
class Sweep:
    """`knee`: the largest load that is still flat and the smallest from which on none is, None where a side is not there."""

    axis: str
    metric: str
    quantile: str
    points: tuple[Point, ...]
    knee: tuple[float | None, float | None]
    text: str
    saturates: str | None
    evidence: tuple[str, ...]
    notes: tuple[str, ...]


def sweep(sides: Sequence[Side]) -> Sweep:
    closed = all(s.loop.kind == "closed" for s in sides)
    axis = "requests in flight" if closed else "requests/s offered"
    load = [
        s.loop.mean_in_flight if closed else len(s.requests) and s.requests.counts.sum() / s.span_s
        for s in sides
    ]
    order = sorted(range(len(sides)), key=lambda i: (load[i], i))
    ordered = [sides[i] for i in order]
    everything = [_all(values_of(s, np.ones(len(s.requests)))) for s in ordered]
    quantile = _quantile(everything)
    judged = _growth(ordered, everything, quantile)
    points = tuple(
        _point(s, float(load[i]), values, *g)
        for s, i, values, g in zip(ordered, order, everything, judged, strict=True)
    )
    knee = _knee(points)
    saturates, evidence = _full_first(ordered, points, knee)
    return Sweep(
        axis,
        "TTFT",
        f"p{100 * quantile:g}",
        points,
        knee,
        _text(axis, quantile, points, knee, saturates),
        saturates,
        tuple(evidence),
        tuple(_notes(ordered, closed)),
    )


def _all(values: Mapping[tuple[str, str], Values]) -> dict[str, Values]:
    """Metric -> the latencies of all classes."""
    found = {}
    for metric in METRICS:
        those = [v for (_, m), v in values.items() if m == metric]
        if those:
            found[metric] = Values(
                np.concatenate([v.values_s for v in those]),
                np.concatenate([v.times_ns for v in those]),
                np.concatenate([v.weights for v in those]),
                sum(v.n for v in those),
            )
    return found


def _quantile(everything: Sequence[Mapping[str, Values]]) -> float:
    """The highest quantile of TTFT that the lowest load and most of the others allow, p50 where there is none."""
    for q in (0.99, 0.95):
        allowed = ["TTFT" in v and stats.allows_quantile(q, v["TTFT"].worth(q)) for v in everything]
        if allowed[0] and 2 * sum(allowed) > len(allowed):
            return q
    return 0.5


def _medians(values: Values, span_ns: tuple[int, int]) -> Floats:
    """The median of each part of the time; parts with few values have none."""
    part = (values.times_ns - span_ns[0]) * PARTS // max(span_ns[1] - span_ns[0] + 1, 1)
    those = [values.values_s[part == i] for i in range(PARTS)]
    return np.array([np.median(v) for v in those if len(v) >= MIN_VALUES])


def _growth(
    sides: Sequence[Side], everything: Sequence[Mapping[str, Values]], q: float
) -> list[tuple[float | None, tuple[float, float] | None, bool | None]]:
    """Each trace's quantile of TTFT against the lowest load's, its interval, and whether it is flat."""
    estimates: list[Estimate | None] = []
    enough: list[bool] = []
    for seed, (side, values) in enumerate(zip(sides, everything, strict=True)):
        ttft = values.get("TTFT")
        if ttft is None or len(ttft.values_s) < MIN_VALUES:
            estimates.append(None)
            enough.append(False)
            continue
        blocks = Blocks(side.span_ns, independent_s({("all", "TTFT"): ttft}, side.span_ns), seed)
        estimates.append(blocks.quantiles(ttft)[q])
        enough.append(blocks.enough)
    base = estimates[0]
    parts = [
        _medians(v["TTFT"], s.span_ns) if "TTFT" in v else np.zeros(0)
        for s, v in zip(sides, everything, strict=True)
    ]
    result: list[tuple[float | None, tuple[float, float] | None, bool | None]] = []
    for i, estimate in enumerate(estimates):
        if base is None or estimate is None:
            result.append((None, None, None))
        elif i == 0:
            result.append((1.0, (1.0, 1.0), True))
        else:
            [d] = differences([(base, estimate)])
            low, high = (float(np.exp(v)) for v in d.interval)
            known = enough[0] and enough[i]
            flat = (True if high <= FLAT else False if low > FLAT else None) if known else None
            if flat is None and len(parts[0]) and (parts[i] > FLAT * parts[0].max()).sum() >= MOST_PARTS:
                flat = False
            result.append((float(np.exp(d.point)), (low, high) if known else None, flat))
    return result


def _point(
    side: Side,
    load: float,
    values: Mapping[str, Values],
    growth: float | None,
    interval: tuple[float, float] | None,
    flat: bool | None,
) -> Point:
    q, span = side.requests, side.span_s
    ok = q.status == "ok"
    latency: dict[str, dict[str, float | None]] = {}
    for metric, those in values.items():
        some = len(those.values_s) >= MIN_VALUES
        latency[metric] = {
            f"p{100 * p:g}": those.quantile(p)
            if some and stats.allows_quantile(max(p, 1 - p), those.worth(p))
            else None
            for p in (0.5, 0.99)
        }
    # Those that ended after the last arrival came out of it too, but not in this time.
    ended = ok & (q.arrival_ns + np.nan_to_num(q.e2e_s) * 1e9 <= side.span_ns[1])
    total = max(float(q.counts.sum()), 1.0)
    return Point(
        side.path,
        load,
        float(q.counts.sum()) / span if len(q) > 1 else 0.0,
        side.loop.mean_in_flight,
        float(q.counts[ended].sum()) / span,
        float((q.counts * np.nan_to_num(q.output))[ended].sum()) / span,
        float(q.counts[~ok].sum()) / total,
        latency,
        growth,
        interval,
        flat,
        side.steps.busy,
        side.steps.kv_p95,
        side.steps.slots_p95,
        side.steps.budget,
    )


def _knee(points: Sequence[Point]) -> tuple[float | None, float | None]:
    """(largest load up to which all that is known is flat, smallest load from which on nothing is)."""
    low: float | None = None
    for point in points:
        if point.flat is False:
            break
        if point.flat:
            low = point.load
    high: float | None = None
    for point in reversed(points):
        if point.flat:
            break
        if point.flat is False:
            high = point.load
    return low, high


def _full_first(
    sides: Sequence[Side], points: Sequence[Point], knee: tuple[float | None, float | None]
) -> tuple[str | None, list[str]]:
    """What is full at the first load beyond the knee: by what grew in the bills, and by the limits that the steps reach."""
    if knee[1] is None:
        return None, []
    at = next(i for i, p in enumerate(points) if p.load == knee[1])
    calm, busy = _bill(sides[0]), _bill(sides[at])
    grown = {name: busy.get(name, 0.0) - calm.get(name, 0.0) for name in {*calm, *busy}}
    total = sum(g for g in grown.values() if g > 0)
    by_cause: dict[str, float] = {}
    for name, seconds in grown.items():
        cause = FULL_BY.get(name)
        if cause is not None and seconds > 0:
            by_cause[cause] = by_cause.get(cause, 0.0) + seconds
    evidence = []
    point = points[at]
    for value, name in (
        (point.kv_p95, "p95 of KV cache use"),
        (point.slots_p95, "p95 of sequence slots in use"),
        (point.budget, "steps that use 95 % of the token budget"),
        (point.busy, "time in steps"),
    ):
        if value is not None:
            evidence.append(
                f"{name}: {value:.0%} at {point.load:.3g}, {_of(points[0], name):.0%} at the lowest load"
            )
    if not total:
        return None, evidence
    # A wait that has a reason says more than the steps that all of them are made of.
    causes = sorted(by_cause.items(), key=lambda c: (c[0] == "GPU steps", -c[1]))
    for cause, seconds in causes:
        if seconds >= LARGEST_PART * total:
            evidence.insert(
                0,
                f"{seconds:.3g} s of the {total:.3g} s that a mean request takes longer at {point.load:.3g} than at the lowest load "
                f"is booked to it",
            )
            return cause, evidence
    return None, evidence


def _of(point: Point, name: str) -> float:
    value = {
        "p95 of KV cache use": point.kv_p95,
        "p95 of sequence slots in use": point.slots_p95,
        "steps that use 95 % of the token budget": point.budget,
        "time in steps": point.busy,
    }[name]
    return value or 0.0


def _bill(side: Side) -> dict[str, float]:
    """Component -> mean seconds over all requests."""
    counts = sum(float(v.sum()) for (_, name), v in side.bills.items() if not name)
    sums: dict[str, float] = {}
    for (_, name), seconds in side.bills.items():
        if name:
            sums[name] = sums.get(name, 0.0) + float(seconds.sum())
    return {name: seconds / max(counts, 1.0) for name, seconds in sums.items()}


def _text(
    axis: str,
    quantile: float,
    points: Sequence[Point],
    knee: tuple[float | None, float | None],
    saturates: str | None,
) -> str:
    low, high = knee
    what = f"p{100 * quantile:g} TTFT"
    if all(p.growth is None for p in points):
        return "No load has enough requests with a TTFT to look for a knee."
    if high is None:
        undecided = any(p.flat is None for p in points)
        tail = "; some are too short or too bursty to tell" if undecided else ""
        return f"No knee up to {points[-1].load:.3g} {axis}: {what} stays within {FLAT:g} times the lowest load's{tail}."
    if low is None or low >= high:
        return (
            f"The knee is not bracketed: {what} rises and falls with load. Are these traces of one service?"
        )
    text = f"The knee lies between {low:.3g} and {high:.3g} {axis}: beyond it {what} is more than {FLAT:g} times the lowest load's"
    return f"{text}; first full: {saturates}." if saturates else f"{text}."


def _notes(sides: Sequence[Side], closed: bool) -> list[str]:
    notes = []
    kinds = {s.loop.kind for s in sides} - {"unknown"}
    if len(kinds) > 1:
        notes.append("some traces are of open and some of closed loops: their loads are no one axis")
    if closed:
        notes.append(
            "closed loop: latency grows no further than the users' number lets it; see throughput for what is full"
        )
    lengths: list[list[Floats]] = [[s.requests.prompt, s.requests.output] for s in sides]
    for i, name in enumerate(("prompts", "outputs")):
        means = [float(np.nanmean(of[i])) for of in lengths if np.isfinite(of[i]).any()]
        if means and max(means) > 1.2 * max(min(means), FLOOR_S):
            notes.append(
                f"not one load at several rates: mean {name} are {min(means):,.0f} to {max(means):,.0f} tokens"
            )
    return notes
