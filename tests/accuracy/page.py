"""`docs/accuracy.md` from the stored result of the accuracy worlds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bars import bars_table, grid
from catalogue import FAMILIES
from score import UNEXPLAINED_BAR

WHY = {family.name: family.why for family in FAMILIES}

HEAD = """# How often the diagnosis is right

Made by `make accuracy` from `docs/accuracy.json`; do not edit. Every world is simulated ([scenarios](scenarios.md)), so that
what is wrong in it, and what it costs, is known: a cause's **cost** is the largest rise of a class's p99 against the same
world, same seed, without it. Worlds are drawn at random: loads, cost of steps (linear, tiles, cache effects, heavy tails),
engine settings, clocks, and what telemetry there is. Thresholds were tuned on odd seeds; this page reports even ones.
"""


def render(result: Mapping[str, Any]) -> str:
    parts = [HEAD, _summary(result)]
    parts += ["## The bars\n", bars_table(result), _nulls(result)]
    parts += ["## By rule\n", RULES_TEXT, _rules(result)]
    parts += ["## By kind of world\n", FAMILIES_TEXT, _families(result), _confusion(result)]
    parts += ["## Bills\n", BILLS_TEXT, _unexplained(result["unexplained"])]
    parts += [_errors(result["bills"], "component")]
    parts += [TOLD_TEXT, _errors(result["bills_told"], "component")]
    parts += [PART_TEXT, _errors(result["bills_part_profiled"], "component"), BLAME_TEXT]
    parts += [_errors(result["blame"], "rule"), _not_right(result)]
    return "\n".join(parts)


FAMILIES_TEXT = (
    "*felt*: worlds with a cause that costs 20 % or more. *top-1*: the first finding names it, with its culprit; *top-3*: the "
    "second or third does. *abstained*: nothing was found, and the verdict is that nothing can be said. *false*: worlds with a finding "
    "that names no cause of theirs, or more than a low one that names a cause that costs less than 5 % of a p99 and of a p95, and "
    "less than 20 % of the mean above a p99. *no decoy*: decoys in "
    "which what was to look like a fault raises a p99 by 5 % or more after all; they are not counted as decoys.\n"
)
RULES_TEXT = (
    "*felt*: worlds in which what the rule looks for costs 20 % or more of a p99, alone or beside another cause. *named*: a finding "
    "names it, with its culprit. *first*: the first finding names it or a cause beside it that is felt too. *false*: worlds, of all "
    "that were played, in which a finding of the rule names no cause.\n"
)
BILLS_TEXT = (
    "The parts of a class's excess, tail against typical requests, by the ledger and by the simulator, which knows who was in "
    "which step and what each part of it cost. Errors are points of the excess (0.1 = 10 points). Where engines step together, a "
    "slow rank and its engine's own prefill make the same others wait: the ledger divides that by how the lateness of engines whose "
    "ranks are not slow grows with their prefill.\n"
)
TOLD_TEXT = (
    "The same where a schedule tells which requests were in which step "
    "([how to record one](../examples/vllm/schedule_logger.py)).\n"
)
PART_TEXT = (
    "The same where a rank is slow all the time and was profiled for a few seconds: outside of them nothing tells what it "
    "cost, and it is booked as the steps' normal cost.\n"
)
BLAME_TEXT = (
    "What a finding says that its culprit costs, against what the very same requests take in the world without it. The ledger "
    "books to a culprit what its work did to the steps of others; what follows from it (a larger batch afterwards) it books as "
    "the batch's normal cost, so it says less than the truth.\n"
)


def _summary(result: Mapping[str, Any]) -> str:
    return (
        f"{result['worlds']:,} worlds were diagnosed, {result['by_files']} of them through the emitters' files and `ingest`, the "
        f"others as tables, {result['by_schedule']} of these with a schedule, in {result['seconds'] / 60:.0f} minutes ({result['form']} form)."
        + (f" **{len(result['failed'])} more failed and are in no number.**" if result["failed"] else "")
        + "\n"
    )


def _nulls(result: Mapping[str, Any]) -> str:
    rows = [
        (
            n["name"],
            f"{n['n']:,}" + (f" of {n['of']:,}" if "of" in n else ""),
            f"{n['share']:.1%}",
            f"{n['low']:.1%}–{n['high']:.1%}",
            n["bar"],
            "holds" if n["holds"] else "not shown",
        )
        for n in result["nulls"]
    ]
    text = "Tests and intervals where nothing is wrong (nominal: tests fire in 5 %, intervals hold the truth in 95 %):\n"
    return text + "\n" + grid(("", "n", "share", "95 % interval", "bar", ""), rows)


def _rules(result: Mapping[str, Any]) -> str:
    rows = [
        (
            r["rule"],
            f"{r['felt']:,}",
            *(f"{r[name] / r['felt']:.0%}" if r["felt"] else "" for name in ("named", "first")),
            f"{r['false']:,} of {r['worlds']:,}",
        )
        for r in result["rules"]
    ]
    return grid(("rule", "felt", "named", "first", "false"), rows)


def _unexplained(of: Mapping[str, float]) -> str:
    return (
        f"Where nothing is wrong, {of['said']:.1%} of an excess is a pause or unexplained (mean of {of['n']:,}; bar ≤ {UNEXPLAINED_BAR:.0%}); "
        f"{of['true']:.1%} truly is, by chance in what steps take.\n"
    )


def _families(result: Mapping[str, Any]) -> str:
    columns = {
        name: name for name in ("n", "felt", "top-1", "top-3", "later", "wrong", "abstained", "missed")
    } | {"false_alarms": "false", "no_decoy": "no decoy"}
    rows = [
        (f"{f['family']}: {WHY.get(f['family'], '')}", *(f"{f[name]:,}" for name in columns))
        for f in result["families"]
    ]
    return grid(("world", *columns.values()), rows)


def _confusion(result: Mapping[str, Any]) -> str:
    table = result["confusion"]
    said = sorted({rule for row in table.values() for rule in row})
    rows = [(true, *(str(row.get(rule, 0)) for rule in said)) for true, row in sorted(table.items())]
    text = "The costliest cause (rows) and the rule of the first finding (columns):\n"
    return text + "\n" + grid(("", *said), rows)


def _errors(errors: Sequence[Mapping[str, Any]], what: str) -> str:
    rows = [
        (
            e["name"],
            f"{e['n']:,}",
            *(f"{e[k]:.3f}" for k in ("median", "mean", "p95")),
            f"{e['bias']:+.3f}",
            f"{e['within']:.0%}",
        )
        for e in errors
    ]
    return grid((what, "n", "median", "mean", "p95", "bias", "within 0.1"), rows)


def _not_right(result: Mapping[str, Any]) -> str:
    if not result["not_right"]:
        return ""
    rows = [
        (w["family"], f"{w['strength']:g}", str(w["seed"]), w["via"], w["outcome"])
        for w in result["not_right"]
    ]
    return "## Worlds that were not judged right\n\n" + grid(
        ("world", "strength", "seed", "as", "outcome"), rows
    )
