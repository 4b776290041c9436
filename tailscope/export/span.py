"""What part of a trace a timeline shows: what begins in a span of time, and that no longer than a viewer can take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from tailscope.align import Scope
from tailscope.model import Finding
from tailscope.scan import quote
from tailscope.stats import Floats, Ints, prefix_sums
from tailscope.store import Trace

#: Slices, and as many values of counters count as one, of a timeline. Some 100 MB, which Perfetto's page opens within seconds.
MOST_SLICES = 1_000_000
#: Parts a span is taken to consist of to find one that is small enough, and how often such a part is taken apart again.
BINS, DEEPEST = 4096, 3
#: Slices, counters included at half their number, of one row of each table.
WEIGHTS = {"requests": 4, "steps": 4, "rounds": 3, "events": 1, "rank steps": 1, "phases": 1}


@dataclass(frozen=True)
class Span:
    """Time in which everything that is shown begins: [first_ns, last_ns]."""

    first_ns: int
    last_ns: int
    #: Requests of these; None: of all.
    classes: tuple[str, ...] | None
    instance: str | None
    slices: int
    left_out: str | None = None

    @property
    def parameters(self) -> dict[str, Any]:
        return {"first_ns": self.first_ns, "last_ns": self.last_ns}

    @property
    def requests(self) -> str:
        """Of `joined` the rows to show."""
        return f"arrival_ns BETWEEN $first_ns AND $last_ns AND {_of_classes(self.classes)}"


def choose(trace: Trace, scope: Scope, findings: Sequence[Finding], most: int) -> Span:
    """All that the scope has, or where that is more than `most` slices, as much time as fits, about the worst finding."""
    classes = _classes(scope, findings)
    bounds = trace.rows(
        "SELECT min(ns) AS first_ns, max(ns) AS last_ns FROM (" + _begins(scope, classes) + ")",
        _parameters(scope),
    )[0]
    if bounds["first_ns"] is None:
        return Span(0, 0, classes, scope.instance, 0)
    first, last = int(bounds["first_ns"]), int(bounds["last_ns"])
    weights, edges = _histogram(trace, scope, classes, first, last)
    total = int(weights.sum())
    if total <= most:
        return Span(first, last, classes, scope.instance, total)
    number, focus = next(
        ((i, f.window_ns) for i, f in enumerate(findings, 1) if f.status == "found" and f.window_ns),
        (0, None),
    )
    middle = (max(first, focus[0]) + min(last, focus[1])) // 2 if focus else last
    for _ in range(DEEPEST):
        low, beyond = _about(
            weights, int(np.clip(np.searchsorted(edges, middle, "right") - 1, 0, BINS - 1)), most
        )
        if beyond > low:
            break
        # One bin alone is too much: look into it.
        at = int(np.clip(np.searchsorted(edges, middle, "right") - 1, 0, BINS - 1))
        weights, edges = _histogram(trace, scope, classes, int(edges[at]), int(edges[at + 1]) - 1)
    begin, end, kept = int(edges[low]), int(edges[max(beyond, low + 1)]) - 1, int(weights[low:beyond].sum())
    why = f"around finding {number}" if focus else "the last that fits"
    text = (
        f"up to {_count(total)} slices and counter values are more than the {_count(most)} of one timeline: written is {_clock(begin)} to "
        f"{_clock(end)} UTC, {why} ({_count(kept)}). For another part say --from and --to, up to {_duration(end - begin)} apart where "
        f"it is as dense, or --last {_duration(_last_that_fits(weights, edges, most))}; for more at once, --most-slices"
    )
    return Span(begin, end, classes, scope.instance, kept, text)


def _classes(scope: Scope, findings: Sequence[Finding]) -> tuple[str, ...] | None:
    """The class that is asked for, and those that it waits for as findings say."""
    if scope.klass is None:
        return None
    causes = [
        f.culprit.id
        for f in findings
        if f.status == "found"
        and f.culprit.kind == "class"
        and any((v.kind, v.id) == ("class", scope.klass) for v in f.victims)
    ]
    return tuple(dict.fromkeys([scope.klass, *causes]))


def _of_classes(classes: tuple[str, ...] | None) -> str:
    return "true" if classes is None else f"klass IN ({', '.join(map(quote, classes))})"


def _parameters(scope: Scope) -> dict[str, Any]:
    return {"from_ns": scope.from_ns, "to_ns": scope.to_ns}


def _begins(scope: Scope, classes: tuple[str, ...] | None) -> str:
    """When each row begins, and how many slices it makes."""
    inside = "($from_ns IS NULL OR ns >= $from_ns) AND ($to_ns IS NULL OR ns < $to_ns)"
    rows = {
        "requests": f"SELECT arrival_ns FROM joined WHERE {_of_classes(classes)}",
        "steps": "SELECT start_ns FROM steps",
        "rounds": "SELECT start_ns FROM rank_rounds",
        "events": "SELECT time_ns FROM events WHERE instant(time_ns) IS NOT NULL",
        "rank steps": "SELECT i.start_ns FROM iterations i JOIN rank_windows w ON w.source = i.source AND w.rank = i.rank "
        "WHERE w.used AND instant(i.end_ns) >= instant(i.start_ns)",
        "phases": "SELECT start_ns FROM rank_events WHERE source IN (SELECT source FROM rank_windows WHERE used) "
        "AND phase IS NOT NULL AND collective IS NULL AND instant(start_ns) IS NOT NULL AND duration_ns >= 0",
    }
    union = " UNION ALL ".join(
        f"SELECT *, {WEIGHTS[name]} AS weight FROM ({sql})" for name, sql in rows.items()
    )
    return f"SELECT ns, weight FROM ({union}) t(ns, weight) WHERE {inside}"


def _histogram(
    trace: Trace, scope: Scope, classes: tuple[str, ...] | None, first: int, last: int
) -> tuple[Ints, Ints]:
    width = max((last - first) // BINS + 1, 1)
    rows = trace.connection.execute(
        f"SELECT (ns - $first) // $width AS bin, sum(weight)::BIGINT AS weight FROM ({_begins(scope, classes)}) "
        "WHERE ns BETWEEN $first AND $last GROUP BY bin",
        {**_parameters(scope), "first": first, "last": last, "width": width},
    ).fetchnumpy()
    weights = np.zeros(BINS, np.int64)
    weights[np.asarray(rows["bin"], np.int64)] = np.asarray(rows["weight"], np.int64)
    return weights, first + width * np.arange(BINS + 1)


def _about(weights: Ints, middle: int, most: int) -> tuple[int, int]:
    """Bins [low, beyond) about the middle one that are `most` together, grown to both sides alike; none where it alone is more."""
    sums: Floats = prefix_sums(weights.astype(np.float64))
    reach = np.arange(len(weights))
    low, beyond = np.maximum(middle - reach, 0), np.minimum(middle + reach + 1, len(weights))
    fits = sums[beyond] - sums[low] <= most
    if not fits[0]:
        return middle, middle
    widest = int(np.flatnonzero(fits)[-1])
    return int(low[widest]), int(beyond[widest])


def _last_that_fits(weights: Ints, edges: Ints, most: int) -> int:
    fits = int((np.cumsum(weights[::-1]) <= most).sum())
    return int(edges[-1] - edges[len(weights) - max(fits, 1)])


def _count(n: int) -> str:
    return f"{n:,}" if n < 1_000_000 else f"{n / 1e6:.3g} M"


def _clock(ns: int) -> str:
    return f"{datetime.fromtimestamp(ns / 1e9, UTC):%Y-%m-%dT%H:%M:%S}"


def _duration(ns: int) -> str:
    """As `--last` takes it."""
    seconds = ns / 1e9
    if seconds >= 7200:
        return f"{int(seconds // 3600)}h"
    return f"{int(seconds // 60)}m" if seconds >= 120 else f"{max(int(seconds), 1)}s"
