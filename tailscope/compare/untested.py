"""What of two traces was not compared, and why: no regression called is no all-clear for it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from tailscope.compare.blocks import Change
from tailscope.compare.read import Side

Reason = Literal[
    "too-few-samples", "too-few-blocks", "not-before", "not-after", "not-measured", "not-the-same-load"
]
#: What is missed where neither trace has it. A queue that no client sees is no surprise.
ASKED = ("TTFT", "TPOT", "ITL", "E2E")

WORDS: dict[Reason, str] = {
    "too-few-samples": "too few effective samples",
    "too-few-blocks": "too few independent blocks of time",
    "not-before": "no values before",
    "not-after": "no values after",
    "not-measured": "measured in neither trace",
    "not-the-same-load": "too little of the loads is alike",
}


@dataclass(frozen=True)
class Untested:
    """A quantile that was not compared; `quantile` None for all of a class's metric."""

    klass: str
    metric: str
    quantile: str | None
    reason: Reason


def untested(
    sides: tuple[Side, Side],
    keys: tuple[Collection[tuple[str, str]], Collection[tuple[str, str]]],
    rows: Sequence[Change],
) -> list[Untested]:
    """`keys`: the (class, metric) that each trace has values of; `rows`: what was compared of them."""
    found = []
    seen = {(row.klass, row.metric) for row in rows}
    for klass in dict.fromkeys([*sides[0].classes, *sides[1].classes]):
        for metric in ("queue", *ASKED):
            before, after = ((klass, metric) in own for own in keys)
            if before and after:
                if (klass, metric) not in seen:
                    found.append(Untested(klass, metric, None, "not-the-same-load"))
            elif before or after:
                found.append(Untested(klass, metric, None, "not-after" if before else "not-before"))
            elif metric in ASKED:
                found.append(Untested(klass, metric, None, "not-measured"))
    for row in rows:
        if row.interval is None:
            reason: Reason = "too-few-blocks" if row.reason == "too-few-blocks" else "too-few-samples"
            # A row without effective samples stands for all of its quantiles.
            found.append(Untested(row.klass, row.metric, row.quantile if any(row.n_eff) else None, reason))
    return found


def told(entries: Sequence[Untested]) -> list[str]:
    """A line for each reason."""
    lines = []
    for reason, words in WORDS.items():
        named: dict[str, dict[str, list[str]]] = {}
        for e in entries:
            if e.reason == reason:
                named.setdefault(e.klass, {}).setdefault(e.metric, []).append(e.quantile or "")
        if named:
            parts = []
            for klass, metrics in named.items():
                told = [f"{metric} {'/'.join(filter(None, qs))}".strip() for metric, qs in metrics.items()]
                parts.append(f"{klass} {', '.join(told)}")
            lines.append(f"{words}: {'; '.join(parts)}")
    return lines
