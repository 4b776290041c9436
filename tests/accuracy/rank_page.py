"""`docs/accuracy-ranks.md` from the stored result of the worlds of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import rank_score
from bars import bars_table, grid
from rank_families import FAMILIES, OFFSETS_MS

WHY = {family.name: family.why for family in FAMILIES}

HEAD = """# How often the right rank is named

Made by `make accuracy-ranks` from `docs/accuracy-ranks.json`; do not edit. Every world is simulated
([scenarios](scenarios.md)): 2 to 16 ranks in 40 to 80 steps, profiled from the first to the last, and nothing else known but
those profiles. What is wrong in a world, and how late it makes somebody, is known from the same steps without it. Worlds
are drawn at random: tensor-parallel, expert-parallel and nested groups, rings and all-to-all, layers, work and its spread,
transfers by size, ranks that always leave a collective a little later, profiles of several emitters, one rank a host or
several. Clocks of hosts are up to the offset apart. Thresholds were tuned on odd seeds; this page reports even ones.
"""

BY_FAMILY = f"""## By kind of world

*late*: median of the lateness that the fault causes at a collective. *decidable*: worlds in which that exceeds five
times the largest error that the diagnosis states for a clock, and in which the fault costs at least {rank_score.WORTH:.0%} of the steps' time
(by the same steps without it; whatever was said of them): the threshold `share` of the rules about ranks, below which they
promise nothing, of any kind of fault. *cheaper*: of the worlds that cost less, though clocks would decide, those where the first
finding is right all the same. *top-1*: the first finding names the rule and the culprit.
*later*: another one does. *wrong*: nothing right is said, and something wrong. *abstained*: nothing is found and the
verdict is that nothing can be said. *false*: worlds with a finding above `low` that is no fault's, or with another
culprit than the fault's at any severity.
"""

CLOCKS = """## Clocks

*held*: share of the ranks whose true offset, about the median of its world, is within the stated error. *error*: median of
what is stated; *off*: median of how far it is off.
"""


def render(result: Mapping[str, Any]) -> str:
    played = (
        f"{result['worlds']:,} worlds were diagnosed, {result['by_files']:,} of them through profiles' files and `ingest`, the "
        f"others as tables, in {result['seconds'] / 60:.0f} minutes ({result['form']} form)."
    )
    parts = [
        HEAD, played + "\n", "## The bars\n", bars_table(result), _left_out(), BY_FAMILY, _families(result),
        "Top-1 of the decidable worlds by how far clocks are apart:\n", _offsets(result),
    ]  # fmt: skip
    if result["files"]:
        parts += ["The same worlds as files:\n", _by_files(result)]
    parts += [CLOCKS, _clocks(result), _not_right(result)]
    return "\n".join(part for part in parts if part)


def _left_out() -> str:
    """Families that a bar does not count, and why."""
    culprits = [f"{family.name} ({family.unbarred})" for family in FAMILIES if family.unbarred]
    offsets = [f"{family.name} ({family.unclocked})" for family in FAMILIES if family.unclocked]
    return (
        f"Not counted for culprits: {'; '.join(culprits)}. Not counted for clocks: {'; '.join(offsets)}. Clocks of a world are "
        "fitted together, and hold or fail together: their bound is that of as many independent ones as they are worth by "
        "how worlds differ (Korn and Graubard 1998).\n"
    )


def _families(result: Mapping[str, Any]) -> str:
    rows = []
    for row in result["rows"]:
        if row["offset_ms"] is not None:
            continue
        fault = row["kind"] == "fault"
        rows.append(
            (
                f"{row['family']}: {WHY.get(row['family'], '')}",
                f"{row['n']:,}",
                _us(row["late_us"]),
                f"{row['decided']:,} of {row['decidable']:,}" if fault else "",
                f"{row['cheap_decided']:,} of {row['cheap']:,}" if fault else "",
                *(f"{row[name]:,}" if fault else "" for name in ("top-1", "later")),
                f"{row['wrong']:,}",
                f"{row['abstained']:,}",
                f"{row['missed']:,}" if fault else "",
                f"{row['false_alarms']:,}",
            )
        )
    heads = (
        "world", "n", "late", "top-1 of decidable", "cheaper", "top-1", "later", "wrong", "abstained", "missed", "false",
    )  # fmt: skip
    return grid(heads, rows)


def _offsets(result: Mapping[str, Any]) -> str:
    cells = {(row["family"], row["offset_ms"]): row for row in result["rows"]}
    names = list(dict.fromkeys(row["family"] for row in result["rows"] if row["kind"] == "fault"))
    rows = []
    for name in names:
        some = [cells.get((name, offset)) for offset in OFFSETS_MS]
        rows.append((name, *(f"{c['decided']:,} of {c['decidable']:,}" if c else "" for c in some)))
    return grid(("world", *(f"{offset:g} ms" for offset in OFFSETS_MS)), rows)


def _by_files(result: Mapping[str, Any]) -> str:
    rows = [
        (
            row["family"],
            f"{row['n']:,}",
            f"{row['decided']:,} of {row['decidable']:,}" if row["kind"] == "fault" else "",
            f"{row['wrong']:,}",
            f"{row['abstained']:,}",
            f"{row['false_alarms']:,}",
        )
        for row in result["files"]
        if row["offset_ms"] is None
    ]
    return grid(("world", "n", "top-1 of decidable", "wrong", "abstained", "false"), rows)


def _clocks(result: Mapping[str, Any]) -> str:
    rows = [
        (
            row["family"],
            f"{row['clocks']:,}",
            f"{row['held'] / row['clocks']:.1%}" if row["clocks"] else "",
            _us(row["bound_us"]),
            _us(row["off_us"]),
        )
        for row in result["rows"]
        if row["offset_ms"] is None
    ]
    return grid(("world", "clocks", "held", "error", "off"), rows)


def _us(value: float | None) -> str:
    return "" if value is None else f"{value:,.3g} µs"


def _not_right(result: Mapping[str, Any]) -> str:
    if not result["not_right"]:
        return ""
    rows = [
        (w["family"], f"{w['offset_ms']:g}", str(w["seed"]), w["via"], w["outcome"])
        for w in result["not_right"]
    ]
    text = "## Worlds that were not judged right\n\nThe first ten of a kind.\n\n"
    return text + grid(("world", "offset, ms", "seed", "as", "outcome"), rows)
