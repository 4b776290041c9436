"""What the played worlds say of the rules: who was found, who was blamed in vain, how far bills are off."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from bars import bar, beside
from play import GROUPS

#: A cause that raises no class's p99 by so much need not be found.
FELT = 0.2
#: One below so much of a p99 and of a p95 is not there, for all anybody can tell.
NOTHING = 0.05
TOP1_BAR, FALSE_ALARM_BAR, BILL_BAR, UNEXPLAINED_BAR = 0.95, 0.02, 0.10, 0.10
NOBODY = "(nothing)"

World = Mapping[str, Any]


def is_right(finding: Mapping[str, Any], labels: Mapping[str, str | None]) -> bool:
    """Whether a finding names one of the causes, with its culprit where the label has one."""
    if finding["rule"] not in labels:
        return False
    wanted = labels[finding["rule"]]
    if wanted is None:
        return True
    kind, _, ids = wanted.partition(":")
    return finding["culprit"] in {f"{kind}:{name}" for name in ids.split("|")}


def found(world: World) -> list[Mapping[str, Any]]:
    return [f for f in world["findings"] if f["status"] == "found"]


def causes(world: World, least: float) -> dict[str, str | None]:
    return {rule: who for rule, who in world["labels"].items() if world["cost"][rule] >= least}


def false_alarms(world: World) -> list[str]:
    """Findings that name no cause, or make much of one that costs nothing."""
    there = {
        rule: who
        for rule, who in world["labels"].items()
        # What hits few requests raises the mean above a p99, if not the p99, and a tail is what findings speak of. That mean
        # is of so few that it varies by itself.
        if max(world["cost"][rule], world["cost_p95"][rule]) >= NOTHING or world["tail_cost"][rule] >= FELT
    }
    # What a rule points at costs something after all.
    there |= {rule: None for rule, cost in world["suspects"].items() if cost >= NOTHING}
    return [
        f"{f['rule']} {f['culprit']} ({f['severity']})"
        for f in found(world)
        if not is_right(f, (world["labels"] if f["severity"] == "low" else {}) | there)
    ]


def outcome(world: World) -> str:
    """top-1, top-3, later, wrong, abstained or missed, of a world with a cause that is felt."""
    felt, findings = causes(world, FELT), found(world)
    right = [is_right(f, felt) for f in findings]
    if right[:1] == [True]:
        return "top-1"
    if any(right[:3]):
        return "top-3"
    if any(right):
        return "later"
    if false_alarms(world):
        return "wrong"
    return "abstained" if world["verdict"] == "inconclusive" else "missed"


def by_family(worlds: Iterable[World]) -> list[dict[str, Any]]:
    """A row a family: how many worlds, how many with a cause that is felt, and what became of them."""
    groups: dict[str, list[World]] = defaultdict(list)
    for world in worlds:
        groups[world["family"]].append(world)
    rows = []
    for family, members in groups.items():
        felt = [w for w in members if causes(w, FELT)]
        counts = Counter(outcome(w) for w in felt)
        all_found = sum(
            all(any(is_right(f, {rule: who}) for f in found(w)) for rule, who in causes(w, FELT).items())
            for w in felt
        )
        alarms = [w for w in members if false_alarms(w)]
        rows.append(
            {
                "family": family,
                "kind": members[0]["kind"],
                "n": len(members),
                "felt": len(felt),
                **{
                    name: counts[name] for name in ("top-1", "top-3", "later", "wrong", "abstained", "missed")
                },
                "all_found": all_found,
                "false_alarms": len(alarms),
                "alarms": dict(Counter(a for w in alarms for a in false_alarms(w))),
                "no_decoy": sum(max(w["suspects"].values(), default=0.0) >= NOTHING for w in members),
                "undecided": sum(w["verdict"] == "inconclusive" for w in members),
            }
        )
    return rows


def by_rule(worlds: Iterable[World]) -> list[dict[str, Any]]:
    """A row a rule: in how many worlds its cause is felt, where a finding names that, where the first finding names a felt cause;
    and in how many of all worlds one of its own findings names none."""
    felt, named, first, false = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    n = 0
    for world in worlds:
        n += 1
        for rule, who in causes(world, FELT).items():
            felt[rule] += 1
            named[rule] += any(is_right(f, {rule: who}) for f in found(world))
            first[rule] += outcome(world) == "top-1"
        false.update({alarm.split(" ", 1)[0] for alarm in false_alarms(world)})
    return [
        {
            "rule": rule,
            "felt": felt[rule],
            "named": named[rule],
            "first": first[rule],
            "false": false[rule],
            "worlds": n,
        }
        for rule in sorted(felt.keys() | false.keys())
    ]


def confusion(worlds: Iterable[World]) -> dict[str, dict[str, int]]:
    """What was the costliest cause -> which rule spoke first."""
    table: dict[str, Counter[str]] = defaultdict(Counter)
    for world in worlds:
        felt = causes(world, FELT)
        if world["labels"] and not felt:
            continue  # a fault that nobody feels is neither
        true = max(felt, key=lambda rule: world["cost"][rule]) if felt else NOBODY
        findings = found(world)
        said = findings[0]["rule"] if findings else NOBODY
        table[true][said] += 1
    return {true: dict(said) for true, said in table.items()}


def bars(worlds: Sequence[World]) -> list[dict[str, Any]]:
    """The bars, each with n and the 95 % bound that has to keep it."""
    felt = [w for w in worlds if causes(w, FELT)]
    top1, top3 = (sum(outcome(w) in names for w in felt) for names in (("top-1",), ("top-1", "top-3")))
    decoys = [
        w for w in worlds if w["kind"] == "decoy" and max(w["suspects"].values(), default=0.0) < NOTHING
    ]
    alarmed = sum(bool(false_alarms(w)) for w in decoys)
    faulty = [w for w in worlds if w["kind"] != "decoy"]
    wrong = sum(bool(false_alarms(w)) for w in faulty)
    return [
        bar("top-1 of what costs ≥ 20 % of a p99", top1, len(felt), TOP1_BAR, "lower"),
        bar("top-3 of the same", top3, len(felt), TOP1_BAR, "lower"),
        bar("false alarms in healthy and decoy worlds", alarmed, len(decoys), FALSE_ALARM_BAR, "upper"),
        beside("wrong findings beside a fault", wrong, len(faulty)),
    ]


def bill_errors(
    worlds: Iterable[World], part_profiled: bool = False, told: bool | None = None
) -> list[dict[str, Any]]:
    """Per group of components: how far the ledger's part of an excess is from the true one, in points of the excess.

    In worlds whose slow rank was profiled all the time, or with `part_profiled` a part of it; `told`: of those with a
    schedule, or without one.
    """
    errors: dict[str, list[float]] = defaultdict(list)
    for world in worlds:
        if world["part_profiled"] != part_profiled or told not in (None, world["via"] == "schedule"):
            continue
        for bill in world["bill_errors"]:
            for group in GROUPS:
                if max(abs(bill["said"][group]), abs(bill["true"][group])) >= 0.01:
                    errors[group].append(bill["said"][group] - bill["true"][group])
    return [_errors(group, values) for group, values in errors.items()]


def unexplained(worlds: Iterable[World]) -> dict[str, float]:
    """Of the excess of classes in worlds where nothing is wrong: the share that bills say is a pause or unexplained, and the one that
    truly is, by chance in what steps take; means."""
    group = "pause or unexplained"
    bills = [bill for world in worlds if not world["labels"] for bill in world["bill_errors"]]
    said, true = ([abs(bill[side][group]) for bill in bills] for side in ("said", "true"))
    return {"n": len(bills), "said": float(np.mean(said or [0.0])), "true": float(np.mean(true or [0.0]))}


def blame_errors(worlds: Iterable[World]) -> list[dict[str, Any]]:
    """Per rule: what its finding explains of an excess, against what the world without its cause takes less."""
    errors: dict[str, list[float]] = defaultdict(list)
    for world in worlds:
        if world["part_profiled"]:
            continue
        for blame in world["blame"]:
            errors[blame["rule"]].append(blame["said"] - blame["true"])
    return [_errors(rule, values) for rule, values in errors.items()]


def _errors(name: str, values: Sequence[float]) -> dict[str, Any]:
    array = np.array(values)
    size = np.abs(array)
    within = int((size <= BILL_BAR).sum())
    return {
        "name": name,
        "n": len(array),
        "median": float(np.median(size)),
        "mean": float(size.mean()),
        "p95": float(np.quantile(size, 0.95)),
        "bias": float(np.median(array)),
        "within": within / len(array),
        "holds": float(size.mean()) <= BILL_BAR,
    }


def verdict_of(world: World) -> str:
    """right, quiet, not felt, or what was wrong."""
    alarms = false_alarms(world)
    if alarms:
        return f"said {', '.join(alarms)}"
    felt = causes(world, FELT)
    if felt:
        name = outcome(world)
        return "right" if name == "top-1" else f"{name}: {', '.join(felt)}"
    return "not felt" if world["labels"] else "quiet"
