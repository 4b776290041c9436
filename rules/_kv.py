"""What rules about the KV cache have in common: what it cost a tail, and which of them speaks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tailscope.model import Remedy, Threshold

from . import _tails
from ._tails import Row

#: `claims` of findings: time spent for want of KV cache is explained once.
CACHE = "the KV cache"

HIT = Threshold("hit", 0.01, "0-1", "What hits fewer than one in a hundred requests moves no p99.")
SHARE = Threshold("share", 0.1, "0-1", "A tenth of the excess: healthy preemption stays below it.")
SLOWDOWN = Threshold(
    "slowdown", 0.25, "x p50", "A tail slower by less than a quarter of the median is not felt."
)
QUEUE_ONLY = Threshold(
    "queue_only",
    3,
    "",
    "Where a tail only queued for the cache, one or two preemptions meanwhile are no storm.",
)
MORE_CACHE = Remedy(
    "Give the cache more memory",
    "--gpu-memory-utilization 0.95, --kv-cache-dtype fp8",
    "vLLM, all versions; fp8 depends on the GPU",
    "Less headroom for activations; fp8 may cost accuracy",
)
FEWER_TOKENS = Remedy(
    "Cap in-flight tokens where requests enter",
    "gateway or client concurrency limit",
    "any",
    "Requests queue, or are refused, at the gateway",
)
ADD = Remedy("Add an instance", "router configuration", "any", "another GPU")


@dataclass(frozen=True)
class Bars:
    """What rules about the cache decide by, as their thresholds say."""

    share: float
    hit: float
    slowdown: float
    queue_only: float


def caused(row: Row) -> float:
    """Seconds of the excess that the victims stalled, others computed for them, or somebody queued for the cache."""
    return float(row["preempted_s"] + max(row["recompute_s"], 0.0) + max(row["queued_s"], 0.0))


def share(row: Row) -> float:
    return part(row, caused(row))


def part(row: Row, seconds: float) -> float:
    """`seconds` of a row's excess, as a share of it."""
    return _tails.share_of(seconds, row["excess_s"])


def felt(row: Row, seconds: float, bars: Bars) -> bool:
    """Whether `seconds` of the excess are a real part of it and of the median, and not just a handful of requests'."""
    if not row["excess_s"] or row["excess_s"] <= 0 or part(row, seconds) < bars.share:
        return False
    if row["hit"] is not None and row["hit"] < bars.hit * row["n"]:
        return False
    return bool(seconds >= bars.slowdown * (row["p50_s"] or 0.0))


def hurt_by_cache(rows: Sequence[Row], bars: Bars) -> list[Row]:
    return [row for row in rows if felt(row, caused(row), bars)]


def is_storm(hurt: Sequence[Row], bars: Bars) -> bool:
    """Whether preemption is a real part of what the cache cost `hurt`: then preemption-storm speaks, else kv-pressure."""
    stalled = any(r["preempted_s"] > 0 or r["recompute_s"] >= bars.share * r["excess_s"] for r in hurt)
    return bool(hurt) and bool(
        hurt[0]["preempted_requests"] and (stalled or hurt[0]["preempted_requests"] >= bars.queue_only)
    )
