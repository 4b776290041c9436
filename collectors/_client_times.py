"""When requests of a client's file were sent: instants on the wall clock, or placed as well as the file allows."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

from tailscope.source import INT64_MAX, Source

from ._client_rows import Values

SECOND = 1_000_000_000
MILLISECOND = 1_000_000
#: How far the end of a run put together from its requests may lie from the length the client measured:
#: the client's own time between requests is in the one and not in the other.
RUN_LENGTH_SLACK = 0.05
RUN_LENGTH_SLACK_S = 1.0
#: Between runs of one file that are placed one before the other. No request of one meets one of the other.
BETWEEN_RUNS_NS = 60 * SECOND

BY_FILE_TIME = (
    "The file does not say when the run was. It was placed so that it ended when the file was last written: "
    "instants may be off by any amount, durations are not affected."
)

#: Why a request is left out that times of that length place where no clock was.
BEFORE_1970 = "sent before 1970, going by how long requests took"


def number(value: object) -> float | None:
    """A number from 0 on, or None: NaN, negative numbers and truth values are none."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= INT64_MAX:
        return float(value)
    return None


def instant(value: object, unit_ns: int = 1) -> int | None:
    """Unix nanoseconds of a time given in units of `unit_ns`; None where it is missing or none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= INT64_MAX:
        return None
    # The product of a float would round to 256 ns, at today's Unix times.
    whole = int(value)
    ns = whole * unit_ns + round((value - whole) * unit_ns)
    return ns if ns <= INT64_MAX else None


def after(value: object, unit_ns: int, start: int, name: str, values: Values) -> int | None:
    """As `instant`, for what cannot come before `start`: what does is left NULL and counted."""
    if value is None:
        return None
    at = instant(value, unit_ns)
    if at is None or at < start:
        values.blank(f"{name} not a time after the request was sent")
        return None
    return at


def summed(first: float, gaps: Sequence[Any], name: str, values: Values) -> tuple[list[float], bool]:
    """When each chunk came, from the first one's time and the gaps between them, in the gaps' unit; and whether
    these are all: after a gap that is none, nothing can be placed."""
    times = [first]
    for gap in gaps:
        length = number(gap)
        if length is None:
            values.blank(f"{name} not a duration")
            return times, False
        times.append(times[-1] + length)
    return times, True


def of_closed_loop(latencies: Sequence[float | None], at_once: int | None) -> list[float] | None:
    """When each request was sent, in seconds since the first, by a client that has `at_once` requests under way and sends
    the next when one ends; all at 0 for None. `latencies` are in the order of sending.

    None where the length of a request that another one waited for is unknown.
    """
    if at_once is None or at_once >= len(latencies):
        return [0.0] * len(latencies)
    if any(latency is None for latency in latencies[: len(latencies) - at_once]):
        return None
    ends = [0.0] * at_once
    starts = []
    for latency in latencies:
        start = heapq.heappop(ends)
        starts.append(start)
        heapq.heappush(ends, start + (latency or 0.0))
    return starts


def as_long_as(measured: object, starts: Sequence[float], latencies: Sequence[float | None]) -> bool:
    """Whether a run put together from its requests takes as long as the client measured."""
    length = number(measured)
    if length is None:
        return False
    made = max(start + (latency or 0.0) for start, latency in zip(starts, latencies, strict=True))
    return abs(length - made) <= max(RUN_LENGTH_SLACK_S, RUN_LENGTH_SLACK * length)


def end_by_file_time(source: Source) -> int:
    """When the last run of the file ended, as nothing in it says so; the source then tells of it."""
    source.tally.note(BY_FILE_TIME)
    source.clock = "perf_counter"
    return source.modified_ns
