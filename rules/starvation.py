"""Requests run, get no tokens for many steps while others do, and are not preempted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tailscope.model import Decision, Evidence, Finding, Party, Remedy, Rows, Rule, Threshold, severity_of

from . import _alerts, _prefill, _tails

Row = Mapping[str, Any]

#: From this share of the steps on that used up the token budget, that is what left requests out.
USED_UP = 0.5


def decide(rows: Rows, limits: Mapping[str, float]) -> Decision:
    if not rows or not rows[0]["judged"]:
        return Decision("no-data", RULE.missing)
    trace = rows[0]
    if not trace["requests"]:
        return Decision(
            "clear", f"each of {trace['judged']:,} requests got a token in nearly every step it ran in"
        )
    hurt = [row for row in rows if is_felt(row, "out_s", limits)]
    if hurt:
        return Decision(
            "found", "running requests got no tokens", (found(sorted(hurt, key=share, reverse=True)),)
        )
    if any(is_felt(row, "perhaps_s", limits) for row in rows):
        return Decision(
            "inconclusive",
            f"{trace['unsure']:,} requests got no tokens for up to {trace['most_steps']:,.0f} steps, but nobody says whether they "
            "were preempted meanwhile: the stat logger's finished_requests would",
        )
    return Decision(
        "clear",
        f"{trace['requests']:,} of {trace['judged']:,} requests got no tokens for {trace['seconds']:.3g} s in all while they ran: too "
        "little to make a tail",
    )


def share(row: Row, seconds: str = "out_s") -> float:
    return _tails.share_of(row[seconds], row["excess_s"])


def is_felt(row: Row, seconds: str, limits: Mapping[str, float]) -> bool:
    """Whether it is a real part of an excess, of more than a handful of requests, and long enough to be felt."""
    if not row["excess_s"] or row["excess_s"] <= 0:
        return False
    if row["metric"] != "ITL" and row["hit"] < limits["hit"] * row["n"]:
        return False
    least = limits["gap"] if row["metric"] == "ITL" else limits["slowdown"]
    return share(row, seconds) >= limits["share"] and row[seconds] >= least * (row["p50_s"] or 0.0)


def found(hurt: Sequence[Row]) -> Finding:
    """`hurt`: rows of classes and metrics, the worst first."""
    worst = hurt[0]
    used_up = worst["used_up"] is not None and worst["used_up"] >= USED_UP
    evidence = [
        Evidence(
            f"{r['klass']} {r['metric']}: {r['out_s']:.3g} s of {r['excess_s']:.3g} s excess ({r['tail_rule']}) ran without getting a token",
            {k: r[k] for k in ("klass", "metric", "out_s", "excess_s")},
        )
        for r in hurt[:6]
    ]
    evidence.append(
        Evidence(
            f"{worst['requests']:,} of {worst['judged']:,} requests ran through up to {worst['most_steps']:,.0f} steps without a token while "
            f"others decoded, {worst['seconds']:.3g} s in all, {worst['longest_s']:.3g} s at most; "
            + (
                f"{worst['in_prefill']:,} of them before their first token"
                if worst["in_prefill"]
                else "all after their first token"
            ),
            {
                k: worst[k]
                for k in ("requests", "judged", "most_steps", "steps", "seconds", "longest_s", "in_prefill")
            },
        )
    )
    if worst["used_up"] is not None:
        evidence.append(
            Evidence(
                f"{worst['used_up']:.0%} of the steps in between used up the token budget"
                + ("" if used_up else ": there were tokens left to give"),
                {"used_up": worst["used_up"], "budget": worst["budget"]},
            )
        )
    counter = [Evidence("none of them was preempted, by the engine's own count for each")]
    if not worst["measured"]:
        counter.append(
            Evidence(
                "no schedule says who was in which step: that they got nothing follows from the steps their answers took, and a "
                "preemption that the engine did not report would look the same"
            )
        )
    if worst["counted"]:
        counter.append(
            Evidence(
                f"other requests were preempted meanwhile: {worst['counted']:.0f} by the engine's counter"
            )
        )
    victims = {r["klass"]: r for r in reversed(hurt)}
    one_engine = worst["engine_count"] == 1
    return Finding(
        rule=RULE.name,
        status="found",
        severity=severity_of(share(worst), any(r["slo_broken"] for r in hurt)),
        basis="measured" if worst["measured"] else "inferred",
        title=f"{worst['requests']:,} requests ran and got no tokens for up to {worst['longest_s']:.3g} s while others did"
        + (", the budget being used up by those ahead of them" if used_up else ""),
        culprit=Party("class", worst["ahead"], {"did": "used up the token budget"})
        if used_up and worst["ahead"]
        else Party(
            "engine",
            _tails.engine_name(worst) if one_engine else "scheduler",
            {"part": "scheduler", "on": worst["engines"]},
        ),
        victims=tuple(
            Party("class", k, {"metric": r["metric"], "requests": r["hit"]}) for k, r in victims.items()
        ),
        share_of_tail=share(worst),
        window_ns=(worst["first_ns"], worst["last_ns"]),
        evidence=tuple(evidence),
        counter_evidence=tuple(counter),
        remedies=RULE.remedies if used_up else RULE.remedies[2:],
        confirm_by=RULE.confirm_by,
        claims=_tails.LEFT_OUT,
        explains={f"{r['klass']}\t{r['metric']}": r["out_s"] for r in hurt},
    )


RULE = Rule(
    name="starvation",
    summary="Running requests get no tokens for many steps while others do.",
    why=(
        "A running request keeps its place and its KV cache and is counted as running, so no gauge shows that it stands still. "
        "It happens where those ahead of it use up the token budget, and where the scheduler passes it over."
    ),
    needs=("class_rows",),
    missing=(
        "needs the engine's iterations, and of each request its output tokens and preemptions (the stat logger's "
        "finished_requests); best a schedule, which says who was in which step"
    ),
    thresholds=(
        _tails.SHARE,
        _prefill.SLOWDOWN,
        _prefill.GAP,
        Threshold("hit", 0.01, "0-1", "What hits fewer than one in a hundred requests moves no p99."),
    ),
    remedies=(
        Remedy(
            "Cap what one long prompt may take of a step, leaving budget for those behind it",
            "--long-prefill-token-threshold, for example a quarter of the budget",
            "vLLM V1; 0 (off) by default",
            "TTFT of long prompts rises",
        ),
        Remedy(
            "Raise the token budget of a step, so that all who run get their share",
            "--max-num-batched-tokens, at least --max-num-seqs times the tokens a decode takes (1, or 1 + the drafts)",
            "vLLM V1, all versions",
            "Longer steps beside long prompts: ITL rises",
        ),
        Remedy(
            "Take out what can pass a running request over: grammars that compile, a scheduler of your own",
            "--scheduler-cls left away, so that vLLM's own scheduler decides; structured output off for some minutes",
            "vLLM V1, all versions with --scheduler-cls",
            "Loses what they were there for",
        ),
        Remedy(
            "Let fewer requests run at once",
            "--max-num-seqs",
            "vLLM, all versions",
            "Requests wait before they start instead of in the middle",
        ),
    ),
    confirm_by=(
        "Record a schedule (who got how many tokens in which step): the requests have rows of 0 tokens while they run",
        "After the change, an answer takes as many steps as it has tokens, and the longest token gap is that of the longest step",
    ),
    decide=decide,
    alerts=(_alerts.found("Starvation", "starvation", "Running requests get no tokens while others do"),),
)
