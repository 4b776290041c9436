"""Requests of very different sizes share a pool, and the short ones pay for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tailscope.model import (
    Decision,
    Evidence,
    Finding,
    Party,
    Remedy,
    Rows,
    Rule,
    Threshold,
)

from . import _prefill, _tails

Row = Mapping[str, Any]


def decide(rows: Rows, limits: Mapping[str, float]) -> Decision:
    if not rows or rows[0]["ratio"] is None:
        return Decision("no-data", RULE.missing)
    pool = rows[0]
    said = f"the longest prompt ({_tails.rounded(pool['largest_tokens'])} tokens) is {pool['ratio']:.0f}x the median ({_tails.rounded(pool['median_tokens'])})"
    if pool["ratio"] < limits["split"] or not pool["long_requests"]:
        return Decision("clear", f"{said}: no mix that asks for a split")
    if not pool["has_steps"]:
        return Decision(
            "inconclusive", f"{said}, but no iterations at the requests' time say what that costs"
        )
    hurt = sorted((row for row in rows if matters(row, limits)), key=share, reverse=True)
    if not hurt:
        return Decision("clear", f"{said}, but it costs no class's tail enough to be felt")
    enough = [
        row for row in hurt if row["class_requests"] is None or row["class_requests"] >= limits["requests"]
    ]
    if not enough:
        few = hurt[0]["class_requests"]
        return Decision(
            "inconclusive",
            f"{said}, but {_tails.counted(few, 'request')} of class {hurt[0]['klass']} that met it are too few to plan a split by",
        )
    return Decision("found", said, (finding(enough, limits),))


def share(row: Row) -> float:
    return _tails.share_of(row["blamed_s"], row["excess_s"])


def matters(row: Row, limits: Mapping[str, float]) -> bool:
    if not row["excess_s"] or row["excess_s"] <= 0:
        return False
    least = limits["gap"] if row["metric"] == "ITL" else limits["slowdown"]
    return share(row) >= limits["share"] and row["blamed_s"] >= least * (row["p50_s"] or 0.0)


def finding(hurt: Sequence[Row], limits: Mapping[str, float]) -> Finding:
    """`hurt`: rows of the classes that pay, the worst first."""
    worst = hurt[0]
    victims = {row["klass"]: row for row in reversed(hurt)}
    plan = "two services" if worst["ratio"] >= limits["services"] else "a split of the pool"
    tokens = of(worst["long_computed_tokens"], worst["computed_tokens"])
    evidence = [
        Evidence(
            f"the longest prompt has {_tails.rounded(worst['largest_tokens'])} tokens, {worst['ratio']:.0f}x the median of "
            f"{_tails.rounded(worst['median_tokens'])} on {worst['instance'] or 'the instance'}: from {limits['split']:g}x on a split is worth a "
            f"plan, from {limits['services']:g}x on these are two services",
            {k: worst[k] for k in ("largest_tokens", "median_tokens", "ratio", "instance")},
        ),
        Evidence(
            f"the long ones ({worst['long_classes']}) are {of(worst['long_requests'], worst['requests']):.1%} of the requests and "
            f"{tokens:.0%} of the prefill tokens",
            {k: worst[k] for k in ("long_requests", "requests", "long_computed_tokens", "computed_tokens")},
        ),
    ]
    evidence += [
        Evidence(
            f"{r['klass']} {r['metric']}: a tail request ({r['tail_rule']}) would take {r['tail_s'] - r['long_tail_s']:.3g} s "
            f"instead of {r['tail_s']:.3g} s in a pool without them",
            {k: r[k] for k in ("klass", "metric", "tail_s", "long_tail_s", "blamed_s", "excess_s")},
        )
        for r in hurt[:4]
    ]
    evidence += work(worst)
    counter = [
        Evidence("a pool for each loses what sharing gives: either may queue while the other has room"),
    ]
    if tokens < 0.1:
        counter.append(
            Evidence(
                f"the long ones are only {tokens:.0%} of the prefill: an instance of their own would be mostly idle",
                {"share": tokens},
            )
        )
    return Finding(
        rule=RULE.name,
        status="found",
        # A matter of planning: it never outranks what says who waits behind whom.
        severity="low",
        basis="inferred",
        title=(
            f"Prompts up to {worst['ratio']:.0f}x the median share a pool with class {' and '.join(victims)}, whose tail pays for "
            f"it: plan {plan}"
        ),
        culprit=Party(
            "class",
            str(worst["long_classes"]),
            {"requests": worst["long_requests"], "longest_prompt_tokens": worst["largest_tokens"]},
        ),
        victims=tuple(Party("class", name, {"metric": row["metric"]}) for name, row in victims.items()),
        share_of_tail=share(worst),
        window_ns=None,
        evidence=tuple(evidence),
        counter_evidence=tuple(counter),
        remedies=remedies(worst),
        confirm_by=RULE.confirm_by,
        claims=_tails.OTHERS_PREFILL,
        explains={f"{r['klass']}\t{r['metric']}": r["blamed_s"] for r in hurt},
    )


def of(part: float | None, whole: float | None) -> float:
    return (part or 0.0) / whole if whole else 0.0


def engines(row: Row) -> tuple[float, float] | None:
    """How many engines, fully busy, the long and the short ones would need: a class's prefill as the ledger has it, all else
    by output tokens."""
    if not row["busy_s"] or not row["span_s"] or row["prefill_s"] is None:
        return None
    rest = max(row["busy_s"] - row["prefill_s"], 0.0)
    long_s = (row["long_prefill_s"] or 0.0) + rest * of(row["long_output_tokens"], row["output_tokens"])
    return long_s / row["span_s"], (row["busy_s"] - long_s) / row["span_s"]


def work(row: Row) -> list[Evidence]:
    need = engines(row)
    if need is None:
        return []
    long_engines, short_engines = need
    return [
        Evidence(
            f"of {row['span_s']:.3g} s the long ones kept {long_engines:.2g} engines busy and the short ones {short_engines:.2g}, of "
            f"{row['engines']}",
            {
                "long_engines": long_engines,
                "short_engines": short_engines,
                "busy_s": row["busy_s"],
                "span_s": row["span_s"],
            },
        )
    ]


def remedies(row: Row) -> tuple[Remedy, ...]:
    need = engines(row)
    split = SPLIT
    if need is not None and row["long_from"]:
        split = replace(
            SPLIT,
            do=(
                f"{SPLIT.do}: from {_tails.rounded(row['long_from'])} tokens on, {max(need[0], 0.01):.2g} engines' work against "
                f"{need[1]:.2g} of the rest"
            ),
        )
    return (_prefill.CAPPED_CHUNK, split, _prefill.SEPARATE)


SPLIT = Remedy(
    "Route by prompt length to two pools",
    "router configuration",
    "any",
    "More instances, each with its own spare capacity",
)

RULE = Rule(
    name="size-ratio",
    summary="Requests of very different sizes share a pool, and the short ones pay for it.",
    why=(
        "An engine's step is as long as its largest part. Where the longest request is tens of times the usual one no setting "
        "suits both: a small budget makes the long ones slow, a large one the short ones."
    ),
    needs=("class_rows",),
    missing="needs requests with their prompt tokens, of at least one class in number",
    thresholds=(
        Threshold("split", 10, "x", "Known practice: plan a split from ten times the median on."),
        Threshold("services", 50, "x", "Known practice: from fifty times on these are two services."),
        Threshold(
            "requests",
            20,
            "requests",
            "Of fewer a class gets counts only: their hundreds of token gaps may all have met one long prompt.",
        ),
        _tails.SHARE,
        _prefill.SLOWDOWN,
        _prefill.GAP,
    ),
    remedies=(_prefill.CAPPED_CHUNK, SPLIT, _prefill.SEPARATE),
    confirm_by=(
        "Send the long requests elsewhere for ten minutes: the short ones' p99 falls by what is blamed on them",
        "Replay the short requests alone on one instance: their p99 is that of the pool without the long ones",
    ),
    decide=decide,
)
