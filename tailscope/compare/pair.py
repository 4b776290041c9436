"""A trace before a change and one after it: the same load? who got faster, by how much, and what of the bill shrank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tailscope.compare.blocks import (
    MIN_BLOCKS,
    Blocks,
    Change,
    Difference,
    Estimate,
    Sample,
    changes,
    differences,
    independent_s,
)
from tailscope.compare.load import ABOUT_NS, Common, LoadItem, common_part, compare_load, differ
from tailscope.compare.read import Side, values_of
from tailscope.compare.untested import Untested, untested
from tailscope.config import Config
from tailscope.model import Finding
from tailscope.stats import Floats
from tailscope.units import percent

#: All classes of the common part together.
ALL = "all"
#: Parts of a bill that changed by less of the whole bill are not told.
SMALLEST_PART = 0.01
#: Changes beyond it are told in seconds: of next to nothing a percentage says nothing.
MOST_PERCENT = 9.0

Status = Literal["improved", "regressed", "mixed", "same", "cannot-tell", "not-comparable", "no-data"]


@dataclass(frozen=True)
class Outcome:
    """What came out beside latency: completed requests and tokens a second, and of each class with objectives the share of
    requests that kept them all (`attained`) and those a second (`goodput`). A request that failed kept none."""

    name: str
    klass: str | None
    unit: str
    before: float
    after: float
    difference: float
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class Part:
    """Mean seconds of a component in the bills of a class, and in those of its tail (None where there is no tail)."""

    klass: str
    component: str
    before_s: float
    after_s: float
    difference_s: float
    interval_s: tuple[float, float] | None
    tail_before_s: float | None = None
    tail_after_s: float | None = None


@dataclass(frozen=True)
class Coupled:
    """How much of a class meets the prefill of a longer one: share of its requests, and seconds a request waits for it."""

    victim: str
    culprit: str
    before_share: float | None
    after_share: float | None
    before_s: float | None
    after_s: float | None


@dataclass(frozen=True)
class FindingChange:
    """A finding of `diagnose` in either trace: opened, closed or still there."""

    rule: str
    culprit: str
    title: str
    state: Literal["opened", "closed", "still"]
    before_share: float | None
    after_share: float | None


@dataclass(frozen=True)
class Range:
    """Where only histograms are known: the buckets of p50 and p99. Nothing is called: buckets tell no times of requests."""

    metric: str
    n: tuple[int, int]
    before50_s: tuple[float, float | None]
    after50_s: tuple[float, float | None]
    before99_s: tuple[float, float | None]
    after99_s: tuple[float, float | None]
    moved: Literal["lower", "higher", "same bucket", "overlaps"]


@dataclass(frozen=True)
class About:
    """A trace of a comparison. `blocks`: independent blocks of its time, `block_s` long each."""

    path: str
    first_ns: int
    last_ns: int
    requests: int
    rate: float
    loop: str
    in_flight: float
    blocks: float
    block_s: float


@dataclass(frozen=True)
class Comparison:
    """`changes`: in the common part; `as_observed`: all requests as they are, where the common part is not all of them."""

    status: Status
    text: str
    before: About
    after: About
    load: tuple[LoadItem, ...]
    common: Common
    changes: tuple[Change, ...]
    as_observed: tuple[Change, ...]
    outcomes: tuple[Outcome, ...]
    bill: tuple[Part, ...]
    coupling: tuple[Coupled, ...]
    findings: tuple[FindingChange, ...]
    ranges: tuple[Range, ...] = ()
    notes: tuple[str, ...] = ()
    untested: tuple[Untested, ...] = ()

    @property
    def tested(self) -> bool:
        """Whether any quantile was compared, so that none called slower means something."""
        return any(row.interval is not None for row in self.changes)

    def regressions(self, size: float) -> list[Change]:
        """Slowdowns that are called, by at least `size` (0.05 is 5 %) as estimated."""
        if self.status == "not-comparable":
            return []
        return [c for c in self.changes if c.verdict == "slower" and (c.change or 0.0) >= size]


def compare(before: Side, after: Side, config: Config) -> Comparison:
    sides = before, after
    ones = [np.ones(len(s.requests)) for s in sides]
    plain = [values_of(s, w) for s, w in zip(sides, ones, strict=True)]
    # Whatever is drawn is drawn alike in every run.
    drawn = tuple(
        Blocks(s.span_ns, independent_s(v, s.span_ns), seed)
        for seed, (s, v) in enumerate(zip(sides, plain, strict=True))
    )
    blocks = drawn[0], drawn[1]
    load = compare_load(before, after, blocks)
    common, *weights = common_part(before, after, load)
    matched = [values_of(s, w) for s, w in zip(sides, weights, strict=True)] if common.matched_by else plain
    rows = _changes(matched, blocks) if common.enough else []
    observed = _changes(plain, blocks) if common.matched_by else []
    ranges = _ranges(before, after)
    outcomes = _outcomes(sides, blocks, config)
    bill = _bill(sides, blocks)
    status = _status(rows, common, ranges)
    text = _text(status, rows, load, common, blocks)
    return Comparison(
        status,
        text,
        _about(before, blocks[0]),
        _about(after, blocks[1]),
        tuple(load),
        common,
        tuple(rows),
        tuple(observed),
        tuple(outcomes),
        tuple(bill),
        tuple(_coupling(before, after)),
        tuple(_findings(before.diagnosis.findings, after.diagnosis.findings)),
        tuple(ranges),
        tuple(_notes(sides, load, common, blocks)),
        tuple(untested(sides, (plain[0].keys(), plain[1].keys()), rows)),
    )


def _about(side: Side, blocks: Blocks) -> About:
    n = round(float(side.requests.counts.sum()))
    return About(
        side.path,
        *side.span_ns,
        n,
        n / side.span_s if n > 1 else 0.0,
        side.loop.kind,
        side.loop.mean_in_flight,
        blocks.count,
        side.span_s / blocks.count,
    )


def _changes(
    values: Sequence[Mapping[tuple[str, str], object]], blocks: tuple[Blocks, Blocks]
) -> list[Change]:
    return changes(*(Sample(v, b) for v, b in zip(values, blocks, strict=True)))  # type: ignore[arg-type]


# -- beside latency ---------------------------------------------------------------------------------


def _outcomes(sides: tuple[Side, Side], blocks: tuple[Blocks, Blocks], config: Config) -> list[Outcome]:
    asked: list[tuple[str, str | None, str, tuple[Estimate, Estimate]]] = []

    def add(name: str, klass: str | None, unit: str, over: list[Floats], under: list[Floats]) -> None:
        if all(u.sum() > 0 for u in under):
            a, b = (blocks[i].ratio(over[i], under[i]) for i in (0, 1))
            asked.append((name, klass, unit, (a, b)))

    def sums(amounts: Sequence[Floats]) -> list[Floats]:
        return [
            b.per_slice(s.requests.arrival_ns, s.requests.counts * amount)
            for s, b, amount in zip(sides, blocks, amounts, strict=True)
        ]

    ok = [(s.requests.status == "ok").astype(np.float64) for s in sides]
    time = [np.full(len(x), s.span_s / len(x)) for s, x in zip(sides, sums(ok), strict=True)]
    add("throughput", None, "requests/s", sums(ok), time)
    add("output", None, "tokens/s", sums([np.nan_to_num(s.requests.output) for s in sides]), time)
    add("prompts", None, "tokens/s", sums([np.nan_to_num(s.requests.prompt) for s in sides]), time)
    for klass in dict.fromkeys(slo.klass for slo in config.slos):
        kept = [(s.met[klass] == 1).astype(np.float64) for s in sides]
        known = [(s.met[klass] >= 0).astype(np.float64) for s in sides]
        add("attained", klass, "share", sums(kept), sums(known))
        add("goodput", klass, "requests/s", sums(kept), time)
    found = differences([pair for *_, pair in asked])
    return [
        Outcome(name, klass, unit, a.point, b.point, d.point, _interval(d, blocks))
        for (name, klass, unit, (a, b)), d in zip(asked, found, strict=True)
    ]


def _interval(d: Difference, blocks: tuple[Blocks, Blocks]) -> tuple[float, float] | None:
    return d.interval if all(b.enough for b in blocks) else None


# -- the bill ---------------------------------------------------------------------------------------


def _bill(sides: tuple[Side, Side], blocks: tuple[Blocks, Blocks]) -> list[Part]:
    """What changed by a hundredth of a class's mean bill or more, the largest first, class by class."""
    asked: list[tuple[str, str, tuple[Estimate, Estimate]]] = []
    empty = np.zeros(0)
    for klass in sides[0].classes:
        counts = [s.bills.get((klass, ""), empty) for s in sides]
        if not all(c.sum() > 0 for c in counts):
            continue
        names = sorted({name for s in sides for k, name in s.bills if k == klass and name})
        for name in names:
            seconds = [
                s.bills.get((klass, name), np.zeros_like(c)) for s, c in zip(sides, counts, strict=True)
            ]
            a, b = (blocks[i].ratio(seconds[i], counts[i]) for i in (0, 1))
            asked.append((klass, name, (a, b)))
    found = differences([pair for *_, pair in asked])
    totals: dict[str, float] = {}
    for klass, _, (a, _b) in asked:
        totals[klass] = totals.get(klass, 0.0) + a.point
    parts = []
    for (klass, name, (a, b)), d in zip(asked, found, strict=True):
        tails = [s.tails.get((klass, "E2E", name)) for s in sides]
        shown = max(abs(d.point), *(abs((t or 0.0) - (tails[0] or 0.0)) for t in tails))
        if shown >= SMALLEST_PART * totals[klass]:
            parts.append(Part(klass, name, a.point, b.point, d.point, _interval(d, blocks), *tails))
    order = {klass: i for i, klass in enumerate(sides[0].classes)}
    return sorted(parts, key=lambda p: (order[p.klass], -abs(p.difference_s), p.component))


def _coupling(before: Side, after: Side) -> list[Coupled]:
    pairs = [{(c["victim"], c["culprit"]): c for c in side.coupling} for side in (before, after)]
    rows = []
    for key in dict.fromkeys([*pairs[0], *pairs[1]]):
        known = [p.get(key) for p in pairs]
        shares = [None if c is None else c["coupled"] / max(c["n"], 1) for c in known]
        seconds = [None if c is None else float(c["blamed_s"]) for c in known]
        rows.append(Coupled(*key, *shares, *seconds))
    return rows


def _findings(before: Sequence[Finding], after: Sequence[Finding]) -> list[FindingChange]:
    sides = [
        {(f.rule, f"{f.culprit.kind} {f.culprit.id}"): f for f in findings if f.status == "found"}
        for findings in (before, after)
    ]
    rows = []
    for key in dict.fromkeys([*sides[0], *sides[1]]):
        old, new = (side.get(key) for side in sides)
        state: Literal["opened", "closed", "still"] = (
            "still" if old and new else "closed" if old else "opened"
        )
        shown = new or old
        assert shown is not None
        rows.append(
            FindingChange(
                *key,
                shown.title,
                state,
                old.share_of_tail if old else None,
                new.share_of_tail if new else None,
            )
        )
    return rows


def _ranges(before: Side, after: Side) -> list[Range]:
    rows = []
    for metric, (n, old50, old) in before.ranges.items():
        if metric not in after.ranges:
            continue
        m, new50, new = after.ranges[metric]
        moved: Literal["lower", "higher", "same bucket", "overlaps"] = "overlaps"
        if old == new:
            moved = "same bucket"
        elif new[1] is not None and new[1] <= old[0]:
            moved = "lower"
        elif old[1] is not None and old[1] <= new[0]:
            moved = "higher"
        rows.append(Range(metric, (n, m), old50, new50, old, new, moved))
    return rows


# -- the verdict ------------------------------------------------------------------------------------


def _status(rows: Sequence[Change], common: Common, ranges: Sequence[Range]) -> Status:
    if not common.enough:
        return "not-comparable"
    said = {row.verdict for row in rows}
    if {"faster", "slower"} <= said:
        return "mixed"
    if "faster" in said:
        return "improved"
    if "slower" in said:
        return "regressed"
    if not rows:
        return "cannot-tell" if ranges else "no-data"
    # Not all that was asked needs to be known, but some of each end: the median and what is beyond it.
    known = [row for row in rows if row.interval is not None]
    return "same" if known and all(row.verdict == "same" for row in known) else "cannot-tell"


def _text(
    status: Status,
    rows: Sequence[Change],
    load: Sequence[LoadItem],
    common: Common,
    blocks: tuple[Blocks, Blocks],
) -> str:
    first = ""
    for status_of_load, words in (
        ("differs", "Not the same load: {} differ. "),
        ("may differ", "Perhaps not the same load: {} may differ. "),
    ):
        different = [item.name for item in load if item.status == status_of_load]
        if different:
            more = f" and {len(different) - 3} more" if len(different) > 3 else ""
            first = words.format(", ".join(different[:3]) + more)
            break
    if common.matched_by and common.enough:
        first += (
            f"In the part alike in {', '.join(common.matched_by)} ({common.before_share:.0%} of before, "
            f"{common.after_share:.0%} of after): "
        )
    if status == "not-comparable":
        return (
            f"{first}Too little of both is alike ({common.before_share:.0%} of before, {common.after_share:.0%} of after) to say "
            "what the change did: repeat one of them under the other's load."
        )
    if status == "no-data":
        return f"{first}No requests that both traces have: nothing can be compared."
    called = sorted(
        (row for row in rows if row.verdict in ("faster", "slower")),
        key=lambda r: (r.quantile != "p99", -abs(np.log1p(r.change or 0.0))),
    )
    if called:
        slower = [row for row in called if row.verdict == "slower"]
        named = [*slower[:2], *(row for row in called if row.verdict == "faster")][:3]
        more = f", and {len(called) - len(named)} more" if len(called) > len(named) else ""
        return f"{first}{'; '.join(_sentence(row) for row in named)}{more}."
    if status == "same":
        left = sum(row.interval is None for row in rows)
        but = f" {left} of {len(rows)} quantiles could not be tested." if left else ""
        return f"{first}No change: every interval {'that is known ' if left else ''}lies within 5 %.{but}"
    known = [row for row in rows if row.interval is not None]
    if not known:
        few = [f"{b.count:.0f}" for b in blocks]
        if not all(b.enough for b in blocks):
            return (
                f"{first}Cannot tell: the traces hold {few[0]} and {few[1]} independent blocks of time, and {MIN_BLOCKS} are needed. "
                "Latencies come in bursts; measure for longer."
            )
        return f"{first}Cannot tell: too few samples for any quantile. Measure for longer."
    # The widest interval of some corner says little: the largest class's latest quantile does.
    widest = max(known, key=lambda r: (min(r.n) if r.metric != "ITL" else 0, r.metric == "E2E", r.quantile))
    assert widest.interval is not None
    low, high = widest.interval
    left = sum(row.interval is None for row in rows)
    but = f" {left} of {len(rows)} quantiles could not be tested." if left else ""
    return (
        f"{first}No change is shown. What is not ruled out: {widest.klass} {widest.metric} {widest.quantile} {low:+.0%} to "
        f"{high:+.0%}.{but}"
    )


def _sentence(row: Change) -> str:
    assert row.change is not None and row.interval is not None
    assert row.before_s is not None and row.after_s is not None
    low, high = row.interval
    seconds = f"{_seconds(row.before_s)} to {_seconds(row.after_s)}"
    name = f"{row.klass} {row.metric} {row.quantile}"
    if high > MOST_PERCENT:
        return f"{name} is {row.verdict} ({seconds})"
    return f"{name} is {percent(abs(row.change))} {row.verdict} ({seconds}; {low:+.0%} to {high:+.0%})"


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _notes(
    sides: tuple[Side, Side], load: Sequence[LoadItem], common: Common, blocks: tuple[Blocks, Blocks]
) -> list[str]:
    notes = []
    if differ(list(load), "cache"):
        notes.append(
            "the share of prompt tokens from the cache differs and is not matched: it is part of the change, or prompts share less"
        )
    if differ(list(load), "failures"):
        notes.append(
            "failures differ: requests that failed have no latency, so the trace with more of them looks faster than it was"
        )
    if all(s.loop.kind == "closed" for s in sides):
        notes.append(
            "clients wait for answers (closed loop): a slower server gets fewer requests, so throughput is an outcome here and "
            "latency says less than it would to an open load"
        )
    for name, side in zip(("before", "after"), sides, strict=True):
        if not np.isfinite(side.requests.cached).any():
            notes.append(f"{name} does not tell tokens from the cache: whether hits differ was not tested")
    loops = next((item for item in load if item.about == "loop"), None)
    if loops is not None and loops.status == "differs":
        notes.append(
            "open and closed loops, or other numbers of users, cannot be matched: their latencies differ by that alone"
        )
    if common.matched_by:
        notes.append(
            f"matched by the tokens that arrived within {ABOUT_NS / 1e9:g} s of each request; what an earlier burst left behind is not: "
            "where loads are far apart, repeat one of the runs under the other's load"
        )
    for name, side, block in zip(("before", "after"), sides, blocks, strict=True):
        if len(side.requests) and not block.enough:
            notes.append(
                f"{name}: {block.count:.0f} independent blocks of time in {side.span_s:,.0f} s, since latencies come in bursts of about "
                f"{side.span_s / block.count / 2:.3g} s; at least {MIN_BLOCKS} are needed to call anything"
            )
    return notes
