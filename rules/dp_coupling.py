"""Data-parallel engines of a mixture of experts wait for whichever of them prefills."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from tailscope.model import (
    Decision,
    Evidence,
    Finding,
    Party,
    Remedy,
    Rows,
    Rule,
    Threshold,
    severity_of,
    summed_up,
)
from tailscope.units import ms

from . import _prefill, _tails
from ._tails import OTHERS_PREFILL, Row, Tail

#: Engines are seen to step together in no fewer steps.
FEW_STEPS = 50


def decide(rows: Rows, limits: Mapping[str, float]) -> Decision:
    if not rows:
        return Decision("no-data", RULE.missing)
    first = rows[0]
    windows = [
        by_ranks(list(window), first["instances"], limits)
        for _, window in groupby(first["by_ranks"] or (), key=lambda r: r["win"])
    ]
    # Where there are requests to hurt, their tails decide.
    if windows and (first["lane"] is None or not first["classes"]):
        return summed_up(windows, RULE.missing)
    if first["lane"] is None:
        if (first["most_engines"] or 1) < 2:
            return Decision("clear", "each instance has one engine")
        if first["fewest_steps"] < FEW_STEPS:
            return Decision("no-data", "too few steps to see whether the engines step together")
        return Decision("clear", "the engines of an instance do not step together")
    return summed_up([lane_decision(row, limits) for row in rows], RULE.missing)


def by_ranks(rows: Sequence[Row], instances: int, limits: Mapping[str, float]) -> Decision:
    """What the ranks of one window wait for in collectives that span engines, one row a waiting engine."""
    most = max(rows, key=share_stalled)
    costs = (
        f"ranks of engine {most['engine']} wait {share_stalled(most):.0%} of their steps' time for an engine with more to prefill, in "
        f"{most['steps']} steps that are twice as long for it or longer"
    )
    if share_stalled(most) < limits["time"]:
        return Decision("clear", f"{costs}: too little")
    if most["behind_ns"] < limits["contrast"] * most["beside_ns"]:
        return Decision(
            "clear",
            f"{costs}; {ms(most['behind_ns'])} a step for those with more to prefill, {ms(most['beside_ns'])} for those "
            "without more: prefill is not what they wait for",
        )
    caused: dict[int, float] = {}
    for row in rows:
        for last in row["caused"] or ():
            caused[last["engine"]] = caused.get(last["engine"], 0.0) + last["ns"] / 1e9
    named = {"instances": instances, "instance": rows[0]["instance"]}
    evidence = [
        Evidence(
            f"engine {r['engine']}: its ranks wait {share_stalled(r):.0%} of the time of their steps in collectives for an engine with more "
            f"to prefill, in {r['steps']} steps and {ms(r['stalled_ns'] / max(r['stalls'], 1))} at a time; for engines without more "
            f"{ms(r['beside_ns'])}; but for that a step takes {ms(r['usual_ns'])}",
            {
                k: r[k]
                for k in ("engine", "stalls", "stalled_ns", "behind_ns", "beside_ns", "usual_ns", "step_ns")
            },
        )
        for r in sorted(rows, key=lambda r: -share_stalled(r))[:4]
        if r["stalls"]
    ]
    victims = tuple(
        Party(
            "engine",
            _tails.engine_name({**named, "engine": r["engine"]}),
            {"share_of_steps": share_stalled(r)},
        )
        for r in rows
        if share_stalled(r) >= limits["time"]
    )
    culprit, title = blamed(caused, named, len(rows), limits)
    found = Finding(
        rule=RULE.name,
        status="found",
        severity=severity_of(share_stalled(most)),
        basis="measured",
        title=title,
        culprit=culprit,
        victims=tuple(v for v in victims if v.id != culprit.id),
        share_of_tail=None,
        window_ns=None,
        evidence=(*evidence, caused_by(caused)),
        counter_evidence=(Evidence("no requests are known that it would have made slow"),),
        remedies=RULE.remedies,
        confirm_by=RULE.confirm_by,
    )
    return Decision("found", costs, (found,))


def share_stalled(row: Row) -> float:
    """Of the time of an engine's steps, its ranks' wait for others' prefill in the steps that it at least doubles."""
    return float(row["stalled_ns"] / max(row["step_ns"], 1))


def blamed(
    caused: Mapping[int, float], named: Row, engines: int, limits: Mapping[str, float]
) -> tuple[Party, str]:
    """Whom the waiting is due to, and the finding's title: one engine, or whichever prefills."""
    total = sum(caused.values())
    worst = max(caused, key=lambda engine: caused[engine])
    detail = {"instance": named["instance"], "share_of_waiting": caused[worst] / total if total else None}
    if total and caused[worst] >= limits["one"] * total:
        name = _tails.engine_name({**named, "engine": worst})
        return Party("engine", name, detail), f"Engines in step with engine {name} wait for its prefill"
    return Party(
        "engine", "whichever prefills", detail
    ), f"{engines} engines in step wait for whichever of them prefills"


def caused_by(caused: Mapping[int, float]) -> Evidence:
    total = sum(caused.values())
    parts = (
        f"engine {engine} {seconds / total if total else 0:.0%}"
        for engine, seconds in sorted(caused.items(), key=lambda item: -item[1])[:4]
    )
    return Evidence(
        f"the waiting is caused by {', '.join(parts)}", {"caused_s": {str(e): s for e, s in caused.items()}}
    )


def lane_decision(lane: Row, limits: Mapping[str, float]) -> Decision:
    """What the engines that step together cost each other."""
    if lane["usable"] is None:
        return Decision("no-data", "engines step together, for too few steps to know what a step takes")
    if not lane["usable"]:
        return Decision(
            "inconclusive", "engines step together, but what steps take does not follow their batches"
        )
    most = max(lane["engines"], key=share_of_time)
    costs = (
        f"engine {most['engine']} spends {share_of_time(most):.0%} of its time on other engines' prefill, "
        f"up to {most['longest_s']:.3g} s in a step"
    )
    hurt = [tail for tail in all_tails(lane) if matters(tail, limits)]
    if hurt:
        return Decision("found", costs, (finding(lane, hurt, limits),))
    if not lane["classes"] and share_of_time(most) >= limits["time"]:
        return Decision("inconclusive", f"{costs}; without requests nothing says whom that hurts")
    return Decision("clear", f"{costs}: too little to make a tail")


def share_of_time(engine: Row) -> float:
    """Of the time its steps need; what stopped all engines is no work."""
    return float(engine["dragged_s"] / engine["work_s"]) if engine["work_s"] > 0 else 0.0


def all_tails(lane: Row) -> list[Tail]:
    return _tails.tails([lane["hurt"] or ()], lane["classes"])


def matters(tail: Tail, limits: Mapping[str, float]) -> bool:
    """Whether other engines' prefill is a real part of an excess that is worth the name."""
    least = limits["gap"] if tail.metric == "ITL" else limits["slowdown"]
    return tail.is_felt(limits["share"], least)


def finding(lane: Row, hurt: Sequence[Tail], limits: Mapping[str, float]) -> Finding:
    engines = lane["engines"]
    caused = {e["engine"]: e["caused_s"] for e in engines}
    caused_s = sum(caused.values())
    culprit, title = blamed(caused, lane, len(engines), limits)
    dragged = sorted(engines, key=lambda e: -e["waited_s"])
    evidence = [
        Evidence(
            f"engine {e['engine']}: {e['dragged_s']:.3g} s of its steps ({share_of_time(e):.0%}) is prefill of other engines, "
            f"{e['dragged_idle_s'] or 0:.3g} s of that in steps without prefill of its own; its requests wait {e['waited_s']:.3g} "
            "request-seconds",
            {k: e[k] for k in ("engine", "dragged_s", "waited_s", "work_s")},
        )
        for e in dragged[:4]
        if e["dragged_s"] > 0
    ]
    longest = max(engines, key=lambda e: e["longest_s"])
    evidence += [
        Evidence(_tails.sentence(hurt, "other engines' prefill")),
        Evidence(
            f"the longest such step held engine {longest['engine']} up for {longest['longest_s']:.3g} s; without anybody's prefill a "
            f"step takes {lane['usual_s'] or 0:.3g} s (median)",
            {"longest_s": longest["longest_s"], "usual_s": lane["usual_s"]},
        ),
        caused_by(caused),
    ]
    along = [e for e in engines if e["along_s"] > 0]
    if along:
        evidence.append(
            Evidence(
                "without requests they run along in dummy batches: "
                + ", ".join(f"engine {e['engine']} {e['along_s']:.3g} s" for e in along[:4])
            )
        )
    return Finding(
        rule=RULE.name,
        status="found",
        severity=_tails.severity(hurt),
        basis="inferred",
        title=title,
        culprit=culprit,
        victims=(
            *_tails.victims(hurt),
            *(
                Party(
                    "engine",
                    _tails.engine_name({**lane, "engine": e["engine"]}),
                    {"request_seconds": e["waited_s"]},
                )
                for e in dragged
                if e["waited_s"] >= limits["share"] * caused_s
                and _tails.engine_name({**lane, "engine": e["engine"]}) != culprit.id
            ),
        ),
        share_of_tail=hurt[0].share,
        window_ns=(lane["first_ns"], lane["last_ns"]),
        evidence=tuple(evidence),
        counter_evidence=(
            Evidence(
                "part of it may be counted under a class's long prompts too: the same prefill holds up requests of its own engine"
            ),
        ),
        remedies=_prefill.sized(RULE.remedies, lane["budget"]),
        confirm_by=RULE.confirm_by,
        explains=_tails.explains(hurt),
        claims=OTHERS_PREFILL,
    )


RULE = Rule(
    name="dp-coupling",
    summary="Data-parallel engines wait for whichever of them prefills.",
    why=(
        "Experts span all data-parallel engines, so their steps are one: each takes as long as the engine with most to do "
        "makes it. A prompt on one engine stalls the answers on all, and an idle engine computes dummy batches to keep step."
    ),
    needs=("step_costs",),
    missing="needs steps of an engine",
    thresholds=(
        _tails.SHARE,
        _prefill.SLOWDOWN,
        _prefill.GAP,
        Threshold(
            "time", 0.05, "of step time", "Less than a twentieth of the steps' time is not worth acting on."
        ),
        Threshold(
            "contrast",
            2,
            "x",
            "Who waits as long for an engine without more to prefill waits for something else.",
        ),
        Threshold("errors", 3, "x the clocks' error", "A shorter wait may be an error of the clocks."),
        Threshold("one", 0.8, "of the waiting", "Below that the part goes round, and no engine is to blame."),
    ),
    remedies=(
        Remedy(
            "Let the engines prefill in the same steps, every few of them",
            "--prefill-schedule-interval, for example 4",
            "vLLM V1, recent versions (see vllm serve --help)",
            "TTFT rises by up to so many steps",
        ),
        Remedy(
            "Spread prompts over the engines by their tokens, not by their number",
            "a router that knows the DP ranks' load, or --data-parallel-hybrid-lb / --data-parallel-external-lb with one",
            "vLLM V1",
            "A router to configure",
        ),
        _prefill.SMALLER_STEPS,
        Remedy(
            "Use fewer data-parallel engines of more tensor-parallel ranks each",
            "--data-parallel-size down, --tensor-parallel-size up",
            "any",
            "More communication in each layer, KV cache shared by fewer engines",
        ),
        _prefill.SEPARATE,
    ),
    confirm_by=(
        "Send a long prompt to one engine (X-data-parallel-rank) while the others decode: all their token gaps grow at once",
        "Replay with --prefill-schedule-interval: long gaps become rarer on all engines",
    ),
    decide=decide,
    dashboard="ranks",
)
