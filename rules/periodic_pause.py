"""The engine stands still at a regular period."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from scipy import stats

from tailscope import rhythm
from tailscope.model import Decision, Evidence, Finding, Party, Remedy, Rows, Rule, Threshold

from . import _pauses, _tails
from ._tails import BEYOND_BATCH, Row


def decide(rows: Rows, limits: Mapping[str, float]) -> Decision:
    return _pauses.by_lane(rows, lambda lane, steps: lane_decision(lane, steps, limits), RULE.missing)


def lane_decision(lane: Row, rows: Sequence[Row], limits: Mapping[str, float]) -> Decision:
    """What the long steps of an engine, or of some that step together, say."""
    steps = _tails.counted(len(rows), "long step")
    found, clock = _pauses.best_rhythm(rows)
    if found is None:
        few = len(rows) < rhythm.MIN_EVENTS
        why = f"fewer than {rhythm.MIN_EVENTS}" if few else "no period fits them"
        return Decision("clear", f"{steps}, not periodic: {why}")
    if found.p_value > limits["chance"]:
        return Decision("clear", f"{steps}, not periodic: no period beyond chance")
    members = [rows[i] for i in found.members]
    period_s, period_steps = _pauses.periods(members, found, clock)
    every = f"every {period_s:.3g} s, or {period_steps:,.0f} steps"
    if period_steps < limits["apart"]:
        return Decision("clear", f"{steps}, {every}: that often it is what batches are like")
    lost_s = sum(row["beyond_s"] for row in members)
    tails = _tails.tails((row["hurt"] for row in members), lane["classes"])
    hurt = _tails.felt(tails, limits["share"], limits["slowdown"])
    if not hurt and lost_s < limits["cost"] * lane["busy_s"]:
        return Decision(
            "clear", f"pauses {every}, but they cost no tail and {lost_s / lane['busy_s']:.2%} of the time"
        )
    prefills = sum(row["prefill_tokens"] > 0 for row in members)
    by_load = stats.binom.sf(prefills - 1, len(members), lane["prefill_share"] or 0.0)
    if prefills and by_load < limits["chance"]:
        return Decision(
            "inconclusive",
            f"long steps {every}, but {prefills} of {len(members)} hold prefill: what comes so regularly may be the load",
        )
    name = _tails.engine_name(lane)
    return Decision(
        "found",
        f"engine {name} stands still {every}",
        (finding(lane, members, found, clock, hurt, lost_s),),
    )


def finding(
    lane: Row,
    members: Sequence[Row],
    found: rhythm.Rhythm,
    clock: str,
    hurt: Sequence[_tails.Tail],
    lost_s: float,
) -> Finding:
    period_s, period_steps = _pauses.periods(members, found, clock)
    length_s = float(np.median([row["beyond_s"] for row in members]))
    beside = list(dict.fromkeys(row["reason"] for row in members if row["reason"]))
    by_whom = _pauses.who_pauses(beside)
    by = f" ({' and '.join(sorted(by_whom))} by its log)" if by_whom else ""
    every = f"{period_steps:,.0f} steps" if clock == "steps" else f"{period_s:.3g} s"
    missing = found.places - len(members)
    evidence = [
        Evidence(
            f"{len(members)} steps took {length_s:.3g} s (median) longer than their batches account for, every {period_s:.4g} s or "
            f"{period_steps:,.0f} steps; regular in {clock}: {found.jitter:.1%} of a period off, p = {found.p_value:.1g} against "
            "pauses at random",
            {
                "pauses": len(members),
                "length_s": length_s,
                "period_s": period_s,
                "period_steps": period_steps,
                "regular_in": clock,
                "jitter": found.jitter,
                "p_value": found.p_value,
            },
        ),
        Evidence(
            f"{lost_s:.3g} s in all, {lost_s / lane['busy_s']:.1%} of the time the engine was busy",
            {"lost_s": lost_s, "busy_s": lane["busy_s"]},
        ),
    ]
    if hurt:
        evidence.append(Evidence(_tails.sentence(hurt, "what the pauses took")))
    evidence.append(
        Evidence(f"beside them in the log: {'; '.join(beside[:3])}", {"beside": beside[:10]})
        if beside
        else Evidence(
            "nothing stands beside them in the log: garbage collection, a cron job or a sidecar leave no line"
        )
    )
    counter = [
        Evidence(
            f"{missing} of {found.places} places have no long step: the engine was idle there, or something else sets the beat"
            if missing
            else "no place of the beat is without its long step"
        )
    ]
    name = _tails.engine_name(lane)
    engines = len(lane["engines"])
    who = _tails.engines_name(lane)
    stands = "stands" if engines == 1 else "stand"
    return Finding(
        rule=RULE.name,
        status="found",
        severity=_tails.severity(hurt),
        basis="inferred",
        title=f"{who} {stands} still for {length_s:.3g} s every {every}{by}",
        culprit=Party("process", name, {"instance": lane["instance"], "engine": lane["engine"]}),
        victims=_tails.victims(hurt),
        share_of_tail=hurt[0].share if hurt else None,
        window_ns=(members[0]["start_ns"], members[-1]["end_ns"]),
        evidence=tuple(evidence),
        counter_evidence=tuple(counter),
        remedies=_pauses.remedies_for(by_whom) or RULE.remedies,
        confirm_by=RULE.confirm_by,
        explains=_tails.explains(hurt),
        claims=BEYOND_BATCH,
    )


RULE = Rule(
    name="periodic-pause",
    summary="The engine stands still at a regular period.",
    why=(
        "Whatever stops an engine stops all requests in it. What comes every so many seconds or steps hits a fixed share of "
        "them, however short a test is, and looks like chance to each of them."
    ),
    needs=("step_costs",),
    missing="needs steps of an engine",
    thresholds=(
        _pauses.TIMES,
        Threshold("most", 400, "steps", "The longest steps of an engine are enough to show a beat."),
        Threshold(
            "chance", 0.001, "", "Against pauses at random, for all periods and sizes that were tried."
        ),
        Threshold("apart", 10, "steps", "What comes more often than that is a kind of batch, not a pause."),
        _tails.SHARE,
        _tails.SLOWDOWN,
        Threshold(
            "cost", 0.01, "of busy time", "Without requests to hurt, a hundredth of the time is worth a word."
        ),
    ),
    remedies=(
        Remedy(
            "See whether Python's garbage collector is it, and in which process",
            "VLLM_GC_DEBUG=1",
            "vLLM V1, since about 0.11",
            "A line in the log for each collection",
        ),
        Remedy(
            "Look for what else wakes at this period: cron jobs, node agents, metric exporters, power management",
            "systemctl list-timers; perf sched; nvidia-smi --query-gpu=clocks_throttle_reasons.active",
            "any",
            "Your time",
        ),
        *_pauses.EPLB,
        Remedy(
            "Keep what lives as long as the server out of the garbage collector's way",
            "gc.freeze() after start (vLLM does so itself), fewer objects made by plug-ins",
            "vLLM V1",
            "A plug-in to maintain",
        ),
    ),
    confirm_by=(
        "Change the suspected interval, --eplb-config step_interval or the cron job's: the pauses move with it",
        "Sample the engine core's stack at the next expected pause (py-spy dump): it shows who holds it up",
    ),
    decide=decide,
)
