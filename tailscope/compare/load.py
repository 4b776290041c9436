"""Whether two traces were under the same load, and what part of them can be compared where they were not.

The common part: requests whose cell (class, prompt and output length within a factor, and how many tokens arrived about then)
both traces have. There each request counts so that both traces have the same mix of cells: direct standardisation. A class
or a length that came more often in one trace can then make no difference, neither by itself nor, as far as the tokens of
some seconds tell, by what it made others wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tailscope.compare.blocks import Blocks, Estimate, differences
from tailscope.compare.read import FAILURES, MOST_TENANTS, Requests, Side
from tailscope.stats import Floats, Ints

#: A difference in load that matters: of a rate or a mean length as a share of it, of a mix in shares.
RATE_MATTERS, SHARE_MATTERS = 0.05, 0.02
#: Fewer requests of a kind are compared with nothing.
MIN_CELL = 10
#: Lengths are alike within these factors, tokens that arrived about then within this.
PROMPT_FACTOR, OUTPUT_FACTOR, WORK_FACTOR = 2.0, 4.0, 1.4
#: The load about a request is what arrived so long before and after it.
ABOUT_NS = 5_000_000_000
#: With less of either trace in common nothing is compared.
LEAST_COMMON = 0.1
#: What is matched beside class and length.
WORK = "tokens that arrived about then"

LoadStatus = Literal["same", "differs", "may differ", "cannot tell"]


@dataclass(frozen=True)
class LoadItem:
    """One thing that makes load: before, after, and the interval of their difference (of a rate or length relative to
    before, of a share in shares). `differs` where it does among all items at once, `may differ` where only by its own interval."""

    name: str
    about: Literal["arrivals", "mix", "lengths", "cache", "failures", "loop"]
    unit: str
    before: float | str
    after: float | str
    interval: tuple[float, float] | None
    status: LoadStatus


@dataclass(frozen=True)
class Common:
    """What of both traces is compared. `matched_by`: what requests are alike in, empty where all are compared as they are."""

    matched_by: tuple[str, ...]
    before_share: float
    after_share: float

    @property
    def enough(self) -> bool:
        return min(self.before_share, self.after_share) >= LEAST_COMMON


@dataclass(frozen=True)
class _Ratio:
    name: str
    about: Literal["arrivals", "mix", "lengths", "cache", "failures"]
    unit: str
    relative: bool
    sides: tuple[Estimate, Estimate]


def compare_load(before: Side, after: Side, blocks: tuple[Blocks, Blocks]) -> list[LoadItem]:
    """Each item of the load; those that differ for sure and by enough to matter say `differs`."""
    asked = _ratios((before, after), blocks)
    items = []
    enough = all(b.enough for b in blocks)
    pairs = [tuple(_scaled(e, r.relative) for e in r.sides) for r in asked]
    for ratio, d in zip(asked, differences([(a, b) for a, b in pairs]), strict=True):
        matters = RATE_MATTERS if ratio.relative else SHARE_MATTERS
        low, high = (float(np.expm1(v)) if ratio.relative else v for v in d.interval)
        size = abs(float(np.expm1(d.point))) if ratio.relative else abs(d.point)
        status: LoadStatus = "cannot tell"
        if enough and -matters <= low and high <= matters:
            status = "same"
        elif enough and d.called and size >= matters:
            status = "differs"
        elif enough and d.interval[0] * d.interval[1] > 0 and size >= matters:
            status = "may differ"
        a, b = ratio.sides
        interval = (low, high) if enough else None
        items.append(LoadItem(ratio.name, ratio.about, ratio.unit, a.point, b.point, interval, status))
    return [_loop_item(before, after), *items]


def _scaled(estimate: Estimate, relative: bool) -> Estimate:
    """The estimate, or its logarithm."""
    if not relative:
        return estimate
    point = max(estimate.point, 1e-12)

    def log(deviations: Floats) -> Floats:
        return np.asarray(np.log(np.maximum(point + deviations, point / 20) / point))

    return Estimate(float(np.log(point)), log(estimate.deviations), log(estimate.student))


def _loop_item(before: Side, after: Side) -> LoadItem:
    kinds = before.loop.kind, after.loop.kind
    status: LoadStatus = "differs" if set(kinds) == {"open", "closed"} else "same"
    if "unknown" in kinds:
        status = "cannot tell"
    if kinds == ("closed", "closed"):
        users = before.loop.most, after.loop.most
        if abs(users[1] - users[0]) > max(1, RATE_MATTERS * users[0]):
            status = "differs"
    names = [f"{s.loop.kind}, up to {s.loop.most} in flight" for s in (before, after)]
    return LoadItem("loop", "loop", "", names[0], names[1], None, status)


def _ratios(sides: tuple[Side, Side], blocks: tuple[Blocks, Blocks]) -> list[_Ratio]:
    """What is compared, each as a ratio of sums over time with its spread."""
    found: list[_Ratio] = []

    def add(
        name: str,
        about: Literal["arrivals", "mix", "lengths", "cache", "failures"],
        unit: str,
        over: Mapping[int, Floats],
        under: Mapping[int, Floats],
        relative: bool,
    ) -> None:
        estimates = [blocks[i].ratio(over[i], under[i]) for i in (0, 1)]
        if any(e.point for e in estimates) and all(under[i].sum() > 0 for i in (0, 1)):
            found.append(_Ratio(name, about, unit, relative, (estimates[0], estimates[1])))

    def sums(of: str | None, among: Mapping[int, NDArray[np.bool_]] | None = None) -> dict[int, Floats]:
        result = {}
        for i, side in enumerate(sides):
            q = side.requests
            amount = q.counts * (1.0 if of is None else np.nan_to_num(getattr(q, of)))
            chosen = among[i] if among is not None else np.ones(len(q), bool)
            result[i] = blocks[i].per_slice(q.arrival_ns[chosen], amount[chosen])
        return result

    time = {i: np.full(len(sums(None)[i]), s.span_s / len(sums(None)[i])) for i, s in enumerate(sides)}
    count = sums(None)
    closed = all(s.loop.kind == "closed" for s in sides)
    if not closed:  # there the rate is what comes out, not what goes in
        add("arrivals", "arrivals", "1/s", count, time, True)
        dispersion = {i: _dispersion(blocks[i], s.requests.arrival_ns) for i, s in enumerate(sides)}
        add(
            "burstiness (CV² of gaps)",
            "arrivals",
            "",
            {i: d[0] for i, d in dispersion.items()},
            {i: d[1] for i, d in dispersion.items()},
            True,
        )
    classes = list(dict.fromkeys([*sides[0].classes, *sides[1].classes]))
    for klass in classes if len(classes) > 1 else ():
        own = {i: s.requests.klass == klass for i, s in enumerate(sides)}
        add(f"share of class {klass}", "mix", "", sums(None, own), count, False)
    for klass in classes:
        for column, name in (("prompt", "prompt"), ("output", "output")):
            known = {
                i: (s.requests.klass == klass) & np.isfinite(getattr(s.requests, column)) & s.requests.billed
                for i, s in enumerate(sides)
            }
            if all(k.sum() >= MIN_CELL for k in known.values()):
                add(f"{name} of {klass}", "lengths", "tokens", sums(column, known), sums(None, known), True)
    tenants = _tenants(sides)
    for tenant in tenants if len(tenants) > 1 else ():
        own = {i: s.requests.tenant == tenant for i, s in enumerate(sides)}
        add(f"share of tenant {tenant or '(none)'}", "mix", "", sums(None, own), count, False)
    known = {i: np.isfinite(s.requests.cached) & np.isfinite(s.requests.prompt) for i, s in enumerate(sides)}
    if all(k.any() for k in known.values()):
        add("prompt tokens from the cache", "cache", "", sums("cached", known), sums("prompt", known), False)
    for status in FAILURES:
        own = {i: s.requests.status == status for i, s in enumerate(sides)}
        add(status, "failures", "", sums(None, own), count, False)
    return found


def _dispersion(blocks: Blocks, arrival_ns: Ints) -> tuple[Floats, Floats]:
    """By slice what sums to the squared deviations of gaps from the mean gap, in mean gaps, and the number of gaps."""
    if len(arrival_ns) < 3:
        return blocks.per_slice(arrival_ns) * 0, blocks.per_slice(arrival_ns)
    gaps = np.diff(arrival_ns).astype(np.float64)
    mean = max(float(gaps.mean()), 1.0)
    return blocks.per_slice(arrival_ns[1:], (gaps / mean - 1) ** 2), blocks.per_slice(arrival_ns[1:])


def _tenants(sides: tuple[Side, Side]) -> list[str]:
    """The tenants that send most in either trace."""
    totals: dict[str, float] = {}
    for side in sides:
        names, index = np.unique(side.requests.tenant, return_inverse=True)
        sums = np.bincount(index, weights=side.requests.counts, minlength=len(names))
        for name, amount in zip(names, sums, strict=True):
            share = float(amount / max(side.requests.counts.sum(), 1))
            totals[str(name)] = max(totals.get(str(name), 0.0), share)
    return sorted(totals, key=lambda name: (-totals[name], name))[:MOST_TENANTS]


def differ(items: list[LoadItem], *about: str) -> bool:
    return any(item.status == "differs" and item.about in about for item in items)


def _may_differ(items: list[LoadItem], about: str) -> bool:
    return any(item.status == "may differ" and item.about == about for item in items)


def common_part(before: Side, after: Side, items: list[LoadItem]) -> tuple[Common, Floats, Floats]:
    """What is compared, and what each request of either trace counts: 0 outside the common part, 1 on average within."""
    # To match what is alike after all costs little; not to match what is not would call the load's change the service's.
    by_kind = differ(items, "mix", "lengths") or _may_differ(items, "mix")
    by_rate = differ(items, "arrivals") or _may_differ(items, "arrivals")
    ones = np.ones(len(before.requests)), np.ones(len(after.requests))
    if not (by_kind or by_rate) or not (len(before.requests) and len(after.requests)):
        return Common((), 1.0, 1.0), *ones
    sides = before.requests, after.requests
    classes = np.array(sorted(set(before.classes) | set(after.classes)))
    columns = [[np.searchsorted(classes, q.klass), _binned(_work_about(q), WORK_FACTOR)] for q in sides]
    if by_kind:
        for of, q in zip(columns, sides, strict=True):
            of += [_binned(q.prompt, PROMPT_FACTOR), _binned(q.output, OUTPUT_FACTOR)]
    matched = ("class", "prompt length", "output length", WORK) if by_kind else ("class", WORK)
    cells = [np.column_stack(c) for c in columns]
    _, index = np.unique(np.concatenate(cells), axis=0, return_inverse=True)
    index = index.reshape(-1)
    size = int(index.max()) + 1
    place = index[: len(cells[0])], index[len(cells[0]) :]
    counts = [np.bincount(p, weights=q.counts, minlength=size) for p, q in zip(place, sides, strict=True)]
    rows = [np.bincount(p, minlength=size) for p in place]
    both = (rows[0] >= MIN_CELL) & (rows[1] >= MIN_CELL)
    share = [float(c[both].sum() / max(c.sum(), 1)) for c in counts]
    if not both.any():
        return Common(matched, 0.0, 0.0), np.zeros(len(sides[0])), np.zeros(len(sides[1]))
    mixes = [np.where(both, c, 0) / c[both].sum() for c in counts]
    target = (mixes[0] + mixes[1]) / 2
    weights = [np.where(both, target / np.where(both, m, 1), 0.0) for m in mixes]
    return Common(matched, share[0], share[1]), weights[0][place[0]], weights[1][place[1]]


def _binned(values: Floats, factor: float) -> Ints:
    bins = np.floor(np.log(np.maximum(np.nan_to_num(values), 1.0)) / np.log(factor)).astype(np.int64)
    return np.where(np.isfinite(values), bins, -1)


def _work_about(q: Requests) -> Floats:
    """Tokens a second of the prompts, as far as they are not cached, and answers that arrived about each request, itself left
    out: its length is matched by itself."""
    own = q.counts * (
        np.maximum(np.nan_to_num(q.prompt) - np.nan_to_num(q.cached), 0) + np.nan_to_num(q.output)
    )
    sums = np.concatenate([[0.0], np.cumsum(own)])
    first = np.searchsorted(q.arrival_ns, q.arrival_ns - ABOUT_NS, side="left")
    beyond = np.searchsorted(q.arrival_ns, q.arrival_ns + ABOUT_NS, side="right")
    # At either end of the trace less of the time about a request is known.
    known = np.minimum(q.arrival_ns + ABOUT_NS, q.arrival_ns[-1]) - np.maximum(
        q.arrival_ns - ABOUT_NS, q.arrival_ns[0]
    )
    return np.asarray((sums[beyond] - sums[first] - own) / np.maximum(known / 1e9, 1.0))
