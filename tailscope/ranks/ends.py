"""The same collective on two ranks where nothing numbers them: ends of synchronising collectives nearly agree, and ranks
of a group run the same ones in the same order.
"""

from __future__ import annotations

import numpy as np

from tailscope.ranks.clocks import MAD_TO_SIGMA
from tailscope.ranks.collectives import SYNCHRONISING
from tailscope.ranks.sequence import Floats, Ints, Match, Sequence, nothing

#: How many collectives one profile may begin before another.
MOST_LAG = 256
#: Collectives in a row that the clocks' offset is looked for in, and followed by.
BLOCK = 256
#: As many at a time where clocks drift as foretold; and by how much they may, ns per ns.
LONGEST = 16_384
MOST_DRIFT = 2e-4
#: How exactly ends may agree, most exact first; never more than half the time between two ends.
WIDTHS_NS = (5_000, 20_000, 80_000, 320_000, 1_280_000)
#: Offset of the clocks of two processes of one host at most.
SAME_HOST_NS = 100_000
#: By so much a rank may seem to leave before another came.
SLACK_NS = 50_000
#: Ends that agree by chance are fewer.
LEAST_AGREE = 3
MOST_PEAKS = 64
#: So many collectives that end together on all ranks tell the offset without the others.
ENOUGH_TOGETHER = 32
CHANCE_DEVIATIONS = 4.0


def match_by_ends(one: Sequence, other: Sequence, shared_clock: bool, apart_ns: float | None = None) -> Match:
    """By the times of the ends, which nearly agree: first the offset of the clocks at which most do, then, from there on
    outwards, each end with the one next to it. What was dropped stays unmatched, and drift is followed.

    `apart_ns`: the other's clock less the one's, where something else told it: where a link is slow ends do not agree.
    """
    total = len(one.kind) + len(other.kind)
    told = 0.0 if shared_clock else apart_ns
    if told is not None and _in_step(one, other, told):
        every = np.arange(len(one.kind))
        return Match(every, every, told, 0)
    middle = len(one.kind) // 2
    block = np.arange(max(0, middle - BLOCK // 2), min(len(one.kind), middle + BLOCK // 2))
    found = _offset(one, other, block, shared_clock)
    if found is None:
        return Match(nothing(), nothing(), 0.0, total)
    first_offset, width = found
    if _side_by_side(one, other, middle, first_offset, width):
        every = np.arange(len(one.kind))
        return Match(every, every, first_offset, 0)
    by_end = np.argsort(other.end_ns, kind="stable")
    theirs = np.full(len(one.kind), -1)
    for forward in (True, False):
        _follow(one, other, by_end, theirs, middle, first_offset, width, forward=forward)
    # One of theirs may be next to the ends of two chunks, and order must hold.
    mine = np.flatnonzero(theirs >= 0)
    if len(mine):
        rising = theirs[mine] > np.concatenate([np.array([-1]), np.maximum.accumulate(theirs[mine])[:-1]])
        mine = mine[rising]
    mine, matched = _between(one, other, mine, theirs[mine])
    return Match(mine, matched, first_offset, total - 2 * len(mine))


def _in_step(one: Sequence, other: Sequence, apart_ns: float) -> bool:
    """Whether both hold the same collectives from the first to the last, by kind and by who was in them at one time."""
    return bool(
        len(one.kind) == len(other.kind)
        and (one.kind == other.kind).all()
        and (one.start_ns <= other.end_ns - apart_ns + SLACK_NS).all()
        and (other.start_ns - apart_ns <= one.end_ns + SLACK_NS).all()
    )


def _side_by_side(one: Sequence, other: Sequence, middle: int, offset: float, width: float) -> bool:
    """Whether both hold the same collectives from the first to the last, given the clocks' offset in the middle: by kind, and
    by ends that agree throughout, though clocks drift."""
    if len(one.kind) != len(other.kind) or not (one.kind == other.kind).all():
        return False
    apart = (other.end_ns - one.end_ns).astype(np.float64)
    usual, sizes = _medians(apart, max(1, len(apart) // BLOCK))
    if abs(float(np.median(apart[max(0, middle - BLOCK // 2) : middle + BLOCK // 2])) - offset) > width:
        return False
    around = np.repeat(usual, sizes)
    return bool(
        (np.abs(apart - around) <= width).all()
        and (np.abs(np.diff(usual)) <= width).all()
        # Nobody leaves before the other has come.
        and (one.start_ns <= other.end_ns - around + SLACK_NS).all()
        and (other.start_ns - around <= one.end_ns + SLACK_NS).all()
    )


def _medians(values: Floats, blocks: int) -> tuple[Floats, Ints]:
    """The median of each of so many blocks in a row, whose sizes, given too, differ by one at most."""
    size, longer = divmod(len(values), blocks)
    parts = np.split(values, [longer * (size + 1)])
    medians = [
        np.median(part.reshape(-1, of), axis=1)
        for part, of in zip(parts, (size + 1, size), strict=True)
        if len(part)
    ]
    return np.concatenate(medians), np.repeat([size + 1, size], [longer, blocks - longer])


def _follow(
    one: Sequence,
    other: Sequence,
    by_end: Ints,
    theirs: Ints,
    middle: int,
    offset: float,
    width: float,
    *,
    forward: bool,
) -> None:
    """Fill `theirs` from the middle outwards, following the offset as it drifts; longer steps where it goes as foretold."""
    size, at, slope, known_ns = BLOCK, middle, 0.0, float(one.end_ns[min(middle, len(one.kind) - 1)])
    while at < len(one.kind) if forward else at > 0:
        mine = np.arange(at, min(at + size, len(one.kind))) if forward else np.arange(max(0, at - size), at)
        at = int(mine[-1]) + 1 if forward else int(mine[0])
        ahead: Floats = offset + slope * (one.end_ns[mine].astype(np.float64) - known_ns)
        nearest = _nearest(one, other, mine, by_end, ahead, width)
        theirs[mine] = nearest
        hit = nearest >= 0
        if np.sum(hit) < LEAST_AGREE:
            size = BLOCK
            continue
        beyond = float(np.median(other.end_ns[nearest[hit]] - one.end_ns[mine[hit]] - ahead[hit]))
        now_ns = float(np.median(one.end_ns[mine[hit]]))
        found = offset + slope * (now_ns - known_ns) + beyond
        if now_ns != known_ns:
            slope = float(np.clip((found - offset) / (now_ns - known_ns), -MOST_DRIFT, MOST_DRIFT))
        offset, known_ns = found, now_ns
        size = min(2 * size, LONGEST) if abs(beyond) < width / 16 else BLOCK


def _between(one: Sequence, other: Sequence, mine: Ints, theirs: Ints) -> tuple[Ints, Ints]:
    """The pairs, and those between two of them that follow by order: as many on both sides, of the same kinds, and none
    left before the other came. Ends may be far apart where a rank is slow to leave."""
    if not len(mine):
        return mine, theirs
    more_mine, more_theirs = [mine], [theirs]
    apart = (other.end_ns[theirs] - one.end_ns[mine]).astype(np.float64)
    edges_mine = np.concatenate([[-1], mine, [len(one.kind)]])
    edges_theirs = np.concatenate([[-1], theirs, [len(other.kind)]])
    for at in np.flatnonzero((np.diff(edges_mine) > 1) & (np.diff(edges_theirs) > 1)):
        ours = np.arange(edges_mine[at] + 1, edges_mine[at + 1])
        others = np.arange(edges_theirs[at] + 1, edges_theirs[at + 1])
        # The profiles may begin and end at different ones.
        if at == 0:
            ours, others = ours[-len(others) :], others[-len(ours) :]
        elif at == len(mine):
            ours, others = ours[: len(others)], others[: len(ours)]
        if len(ours) != len(others):
            continue
        offset = float(apart[min(int(at), len(apart) - 1)])
        good = (
            (one.kind[ours] == other.kind[others])
            & (one.start_ns[ours] <= other.end_ns[others] - offset + SLACK_NS)
            & (other.start_ns[others] - offset <= one.end_ns[ours] + SLACK_NS)
        )
        if good.all():
            more_mine.append(ours)
            more_theirs.append(others)
    mine, theirs = np.concatenate(more_mine), np.concatenate(more_theirs)
    order = np.argsort(mine, kind="stable")
    return mine[order], theirs[order]


def _offset(one: Sequence, other: Sequence, block: Ints, shared_clock: bool) -> tuple[float, float] | None:
    """The other's clock less the one's, and within how much of it ends agree; None where too few do.

    Where steps repeat to the ns several offsets look alike: the smallest is taken, as clocks are set by NTP.
    """
    low, high = max(0, block[0] - MOST_LAG), min(len(other.kind), block[-1] + 1 + MOST_LAG)
    mine = one.kind[block]
    # Where some end together on all ranks, others may end apart, each time by as much: by a slow link.
    together = np.isin(mine, SYNCHRONISING)
    if np.sum(together) >= ENOUGH_TOGETHER:
        block, mine = block[together], mine[together]
    same = mine[:, None] == other.kind[None, low:high]
    apart = np.sort((other.end_ns[None, low:high] - one.end_ns[block, None])[same]).astype(np.float64)
    if not len(apart):
        return None
    gap = _gap(one, other)
    widths = [float(w) for w in WIDTHS_NS if w <= gap / 2] or [gap / 4]
    counts = [np.searchsorted(apart, apart + w, side="right") - np.arange(len(apart)) for w in widths]
    #: So many agree at any offset.
    by_chance = [float(len(block) * w / gap) for w in widths]
    more = [float(np.max(c)) - b for c, b in zip(counts, by_chance, strict=True)]
    if max(more) <= 0:
        return None
    chosen = next(i for i, m in enumerate(more) if m >= 0.8 * max(more))
    count, width = counts[chosen], widths[chosen]
    enough = min(LEAST_AGREE, len(block), high - low)
    if np.max(count) < enough:
        return None
    peaks: list[tuple[float, float, float]] = []
    left = count.astype(np.float64)
    most = float(np.max(left))
    while left[(place := int(np.argmax(left)))] >= max(enough, 2 + 0.3 * most) and len(peaks) < MOST_PEAKS:
        members = apart[place : place + int(count[place])]
        offset = float(np.median(members))
        spread = float(np.median(np.abs(members - offset)))
        # Of those that the other profile could hold, by its span.
        at = one.end_ns[block] + offset
        held = np.sum((at >= other.end_ns.min() - width) & (at <= other.end_ns.max() + width))
        chance = max(held, 1) * width / gap
        beyond = len(members) - chance - CHANCE_DEVIATIONS * chance**0.5
        # A small spread of few says little.
        if beyond > 0:
            peaks.append((beyond / max(held, 1), spread * (1 + 2 / len(members) ** 0.5), offset))
        left[np.abs(apart - offset) <= 2 * width] = 0.0
    if not peaks:
        return None
    share = max(p[0] for p in peaks)
    peaks = [p for p in peaks if p[0] >= 0.85 * share]
    best = min(p[1] for p in peaks)
    alike = [p for p in peaks if p[1] <= 1.5 * best + 200]
    if shared_clock:
        alike = [p for p in peaks if abs(p[2]) <= SAME_HOST_NS] or alike
    _, spread, offset = min(alike, key=lambda p: (abs(p[2]), p[1]))
    return offset, float(np.clip(8 * MAD_TO_SIGMA * spread, min(10_000, gap / 4), gap / 2))


def _gap(one: Sequence, other: Sequence) -> float:
    """The time between the end of one collective and the next, as a rule."""
    # Nearly in order, which a stable sort is fast at.
    gaps = np.concatenate([np.diff(np.sort(s.end_ns, kind="stable")) for s in (one, other)])
    return max(float(np.median(gaps)), 1.0) if len(gaps) else 4.0 * WIDTHS_NS[-1]


def _nearest(one: Sequence, other: Sequence, mine: Ints, by_end: Ints, offset: Floats, width: float) -> Ints:
    """For each of mine the one of theirs whose end is next to its, -1 where none is, or another of mine is nearer."""
    at = one.end_ns[mine] + offset
    low, high = np.searchsorted(other.end_ns[by_end], [at.min() - width, at.max() + width])
    by_end = by_end[max(low - 1, 0) : high + 1]
    ends = other.end_ns[by_end].astype(np.float64)
    after = np.clip(np.searchsorted(ends, at), 1, max(len(ends) - 1, 1))
    before = after - 1
    after = np.minimum(after, len(ends) - 1)
    place = np.where(np.abs(ends[before] - at) <= np.abs(ends[after] - at), before, after)
    distance = np.abs(ends[place] - at)
    theirs = by_end[place]
    good = (distance <= width) & (one.kind[mine] == other.kind[theirs])
    # Of several that are next to one of theirs, the nearest.
    order = np.lexsort((distance, theirs, ~good))
    first = np.concatenate([[True], theirs[order][1:] != theirs[order][:-1]])
    kept = np.zeros(len(mine), bool)
    kept[order[first]] = True
    return np.asarray(np.where(good & kept, theirs, -1))
