"""What rules about ranks share: windows of profiles judged one by one, and whether their collectives could be compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from tailscope.model import Decision, Evidence, Rows, Threshold, summed_up

Row = Mapping[str, Any]

MATCHED = Threshold(
    "matched", 0.5, "0-1", "Where half of the collectives stay alone the others may be paired wrongly."
)
HEALTHY = Threshold(
    "healthy", 0.9, "0-1", "To call a window clear nearly all of its collectives must have been compared."
)
SHARE = Threshold("share", 0.05, "0-1", "Less than a twentieth of the steps' time is not worth acting on.")


def by_window(rows: Rows, judge: Callable[[Sequence[Row]], Decision], missing: str) -> Decision:
    """What all windows of profiles say together."""
    return summed_up([judge(list(some)) for _, some in groupby(rows, key=lambda r: r["window"])], missing)


def unfit(window: Row, matched: float) -> Decision | None:
    """That the profiles do not fit each other, where too few collectives found their counterparts to judge anything."""
    if window["unmatched"] <= (1 - matched) * window["collectives"]:
        return None
    return Decision("inconclusive", f"{alone(window)}: the profiles do not fit each other")


def unsure(window: Row, healthy: float, alike: str) -> Decision | None:
    """That nothing can be called `alike`, where too few collectives found their counterparts for that."""
    if window["unmatched"] <= (1 - healthy) * window["collectives"]:
        return None
    return Decision("inconclusive", f"{alone(window)}: too many to call {alike} alike")


def alone(window: Row) -> str:
    return f"{window['unmatched']} of {window['collectives']} collectives have no counterpart on another rank"


def unprofiled(window: Row) -> list[Evidence]:
    """Against a finding: that ranks of the world have no profile, where they have none."""
    if not window["missing"]:
        return []
    return [Evidence(f"{window['missing']} of {window['world_size']} ranks have no profile in this window")]
