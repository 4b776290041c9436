"""What the played worlds of ranks say of the rules: who was named, who was named in vain, whether clocks' bounds hold."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from bars import bar, beside, effective
from rank_families import FAMILIES

from tailscope import registry

#: A culprit must be found where it makes others wait for more than so many times the clocks' stated error.
DECIDABLE = 5.0
#: And where the fault costs at least the share of the steps' time from which rules about ranks tell of anything.
WORTH = next(rule.limits["share"] for rule, _ in registry.rules() if rule.name == "straggler-rank")
TOP1_BAR, ALARM_BAR, CLOCK_BAR, BLIND_BAR = 0.98, 0.01, 0.93, 0.95
BARRED = {family.name for family in FAMILIES if not family.unbarred and family.kind == "fault"}
CLOCKED = {family.name for family in FAMILIES if not family.unclocked}
#: What `straggler-rank` names where lateness goes round.
NOBODY = "rank:any"
OUTCOMES = ("top-1", "later", "wrong", "abstained", "missed")

World = Mapping[str, Any]
Finding = Mapping[str, Any]


def fits(finding: Finding, parties: Mapping[str, Sequence[str] | None]) -> bool:
    """Whether a finding is one of those that a label allows."""
    if finding["rule"] not in parties:
        return False
    wanted = parties[finding["rule"]]
    return wanted is None or any(fnmatchcase(finding["culprit"] or "", pattern) for pattern in wanted)


def found(world: World) -> list[Finding]:
    return [f for f in world["findings"] if f["status"] == "found"]


def false_alarms(world: World) -> list[str]:
    """Findings above `low` that no label allows; and whoever else is named by a rule that should name another."""
    return [
        f"{f['rule']} {f['culprit']} ({f['severity']})"
        for f in found(world)
        if not fits(f, world["right"])
        and not fits(f, world["tolerated"])
        and (f["severity"] != "low" or (f["rule"] in world["right"] and f["culprit"] != NOBODY))
    ]


def outcome(world: World) -> str:
    """Of a fault: top-1, later, wrong, abstained or missed. Of a decoy or a blind world: quiet, abstained or wrong."""
    findings = found(world)
    alarms = false_alarms(world)
    undecided = world["verdict"] == "inconclusive" or any(
        world["checks"].get(rule) == "inconclusive" for rule in world["right"] or ("straggler-rank",)
    )
    if world["kind"] != "fault":
        return "wrong" if alarms else "abstained" if undecided else "quiet"
    right = [fits(f, world["right"]) for f in findings]
    if right[:1] == [True]:
        return "top-1"
    if any(right):
        return "later"
    return "wrong" if alarms else "abstained" if undecided else "missed"


def error_s(world: World) -> float:
    """The largest stated bound of its clocks; infinite where one has none."""
    if len(world["bound_ns"]) < world["clocks"] or not world["bound_ns"]:
        return float("inf")
    return float(max(world["bound_ns"])) / 1e9


def seen(world: World) -> bool:
    """Whether a fault's lateness is beyond what clocks leave open."""
    return world["kind"] == "fault" and bool(world["lateness_s"] > DECIDABLE * error_s(world))


def decidable(world: World) -> bool:
    return seen(world) and bool(world["cost"] >= WORTH)


def held(world: World) -> int:
    """Clocks whose true offset is within the stated bound."""
    return int(np.sum(np.abs(world["off_ns"]) <= np.array(world["bound_ns"])))


def _grouped(worlds: Iterable[World], key: Callable[[World], Any]) -> dict[Any, list[World]]:
    groups: dict[Any, list[World]] = defaultdict(list)
    for world in worlds:
        groups[key(world)].append(world)
    return groups


def rows(worlds: Sequence[World]) -> list[dict[str, Any]]:
    """A row for each family and offset, and one for each family with offset None."""
    by_family = _grouped(worlds, lambda w: w["family"])
    made = []
    for family in (f.name for f in FAMILIES if f.name in by_family):
        members = by_family[family]
        made.append(_row(family, None, members))
        for offset, some in sorted(_grouped(members, lambda w: w["offset_ms"]).items()):
            made.append(_row(family, offset, some))
    return made


def _row(family: str, offset_ms: float | None, members: Sequence[World]) -> dict[str, Any]:
    counts = Counter(outcome(w) for w in members)
    some = [w for w in members if decidable(w)]
    cheap = [w for w in members if seen(w) and not decidable(w)]
    alarms = Counter(_anonymous(a) for w in members for a in false_alarms(w))
    return {
        "family": family,
        "kind": members[0]["kind"],
        "offset_ms": offset_ms,
        "n": len(members),
        **{name: counts[name] for name in (*OUTCOMES, "quiet")},
        "decidable": len(some),
        "decided": sum(outcome(w) == "top-1" for w in some),
        "cheap": len(cheap),
        "cheap_decided": sum(outcome(w) == "top-1" for w in cheap),
        "false_alarms": sum(bool(false_alarms(w)) for w in members),
        "alarms": dict(alarms.most_common(5)),
        "clocks": sum(len(w["off_ns"]) for w in members),
        "held": sum(held(w) for w in members),
        "bound_us": _median([b for w in members for b in w["bound_ns"]]),
        "off_us": _median([abs(o) for w in members for o in w["off_ns"]]),
        "late_us": _median([w["lateness_s"] * 1e9 for w in members if w["lateness_s"] > 0]),
    }


def _anonymous(alarm: str) -> str:
    """An alarm without who was named: the rule, the kind of culprit and the severity."""
    rule, culprit, severity = alarm.split(" ", 2)
    return f"{rule} {culprit.split(':')[0]} {severity}"


def _median(ns: Sequence[float]) -> float | None:
    return round(float(np.median(ns)) / 1e3, 2) if ns else None


def bars(worlds: Sequence[World]) -> list[dict[str, Any]]:
    """The bars, each with n and the 95 % bound that has to keep it."""
    some = [w for w in worlds if w["family"] in BARRED and decidable(w)]
    healthy = [w for w in worlds if w["kind"] == "decoy"]
    blind = [w for w in worlds if w["kind"] == "blind"]
    faults = [w for w in worlds if w["kind"] == "fault"]
    clocked = [w for w in worlds if w["family"] in CLOCKED and w["off_ns"]]
    # Clocks of a world are fitted together, so that they hold or fail together.
    right, of = [held(w) for w in clocked], [len(w["off_ns"]) for w in clocked]
    worth = effective(right, of) if clocked else 0.0
    return [
        bar(
            f"top-1 culprit where lateness exceeds {DECIDABLE:g} × the clocks' stated error and costs {WORTH:.0%} of the steps' time",
            sum(outcome(w) == "top-1" for w in some), len(some), TOP1_BAR, "lower",
        ),
        bar("false alarms in worlds without a fault", sum(bool(false_alarms(w)) for w in healthy), len(healthy), ALARM_BAR, "upper"),
        bar("clocks within their stated error", sum(right), sum(of), CLOCK_BAR, "lower", worth),
        bar("abstains where the slow rank has no profile", sum(outcome(w) == "abstained" for w in blind), len(blind), BLIND_BAR, "lower"),
        beside("wrong findings beside a fault", sum(bool(false_alarms(w)) for w in faults), len(faults)),
    ]  # fmt: skip


def not_right(worlds: Iterable[World], most: int) -> list[dict[str, Any]]:
    """The first worlds of each family that were judged otherwise than they should, to be played again."""
    listed = []
    for members in _grouped(worlds, lambda w: w["family"]).values():
        odd = [w for w in members if is_odd(w)]
        listed += [
            {k: w[k] for k in ("family", "offset_ms", "seed", "via")} | {"outcome": verdict_of(w)}
            for w in odd[:most]
        ]
    return listed


def is_odd(world: World) -> bool:
    if false_alarms(world):
        return True
    wanted = {"fault": "top-1", "decoy": "quiet", "blind": "abstained"}[world["kind"]]
    got = outcome(world)
    return (
        got != wanted
        and (world["kind"] != "fault" or world["family"] not in BARRED or decidable(world))
        and (world["kind"], got) != ("decoy", "abstained")
    )


def verdict_of(world: World) -> str:
    alarms = false_alarms(world)
    said = f"said {', '.join(alarms)}" if alarms else ""
    reasons = "; ".join(f"{rule}: {reason}" for rule, reason in world["reasons"].items())
    return "; ".join(filter(None, (outcome(world), said, reasons)))[:300]
