"""Data-parallel engines of a mixture of experts wait for whichever of them prefills."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tailscope.model import Decision, Evidence, Finding, Party, Remedy, Rows, Rule, Threshold

from . import _tails
from ._tails import Row, Tail

#: Engines are seen to step together in no fewer steps.
FEW_STEPS = 50


def decide(rows: Rows, limits: Mapping[str, float]) -> Decision:
    if not rows:
        return Decision("no-data", RULE.missing)
    first = rows[0]
    if first["lane"] is None:
        if (first["most_engines"] or 1) < 2:
            return Decision("clear", "each instance has one engine")
        if first["fewest_steps"] < FEW_STEPS:
            return Decision("inconclusive", "too few steps to see whether the engines step together")
        return Decision("clear", "the engines of an instance do not step together")
    decisions = [lane_decision(row, limits) for row in rows]
    findings = tuple(finding for decision in decisions for finding in decision.findings)
    for status in ("found", "inconclusive", "clear"):
        chosen = [decision.reason for decision in decisions if decision.status == status]
        if chosen:
            return Decision(status, "; ".join(list(dict.fromkeys(chosen))[:3]), findings)
    raise AssertionError("a lane has one of these")


def lane_decision(lane: Row, limits: Mapping[str, float]) -> Decision:
    """What the engines that step together cost each other."""
    if not lane["usable"]:
        return Decision(
            "inconclusive", "engines step together, but what steps take does not follow their batches"
        )
    most = max(lane["engines"], key=share_of_time)
    costs = (
        f"engine {most['engine']} spends {share_of_time(most):.0%} of its time on other engines' prefill, "
        f"up to {most['longest_s']:.3g} s in a step"
    )
    hurt = [tail for tail in all_tails(lane) if matters(tail, lane, limits)]
    if not hurt:
        return Decision("clear", f"{costs}: too little to make a tail")
    return Decision("found", costs, (finding(lane, hurt, limits),))


def share_of_time(engine: Row) -> float:
    """Of the time its steps need; what stopped all engines is no work."""
    return float(engine["dragged_s"] / engine["work_s"]) if engine["work_s"] > 0 else 0.0


def all_tails(lane: Row) -> list[Tail]:
    return _tails.tails([lane["hurt"] or ()], lane["classes"])


def matters(tail: Tail, lane: Row, limits: Mapping[str, float]) -> bool:
    """Whether other engines' prefill is a real part of an excess that is worth the name."""
    p50_s = next(
        c["p50_s"] for c in lane["classes"] if (c["klass"], c["metric"]) == (tail.klass, tail.metric)
    )
    least = limits["gap"] if tail.metric == "ITL" else limits["slowdown"]
    return tail.share >= limits["share"] and tail.seconds >= least * (p50_s or 0.0)


def finding(lane: Row, hurt: Sequence[Tail], limits: Mapping[str, float]) -> Finding:
    engines = lane["engines"]
    caused_s = sum(e["caused_s"] for e in engines)
    worst = max(engines, key=lambda e: e["caused_s"])
    one = caused_s > 0 and worst["caused_s"] >= limits["one"] * caused_s
    name = _tails.engine_name({**lane, "engine": worst["engine"]})
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
        Evidence(
            "their steps end together, the long ones as well; caused by "
            + ", ".join(
                f"engine {e['engine']} {e['caused_s'] / caused_s if caused_s else 0:.0%}"
                for e in sorted(engines, key=lambda e: -e["caused_s"])[:4]
            ),
            {"caused_s": {str(e["engine"]): e["caused_s"] for e in engines}},
        ),
    ]
    along = [e for e in engines if e["along_s"] > 0]
    if along:
        evidence.append(
            Evidence(
                "without requests they run along in dummy batches: "
                + ", ".join(f"engine {e['engine']} {e['along_s']:.3g} s" for e in along[:4])
            )
        )
    who = f"engine {name}" if one else "whichever of them"
    return Finding(
        rule=RULE.name,
        status="found",
        severity=_tails.severity(hurt),
        basis="inferred",
        title=f"{len(engines)} engines in step wait for {who} prefills"
        if not one
        else f"Engines in step with {who} wait for its prefill",
        culprit=Party(
            "engine",
            name if one else "whichever prefills",
            {
                "instance": lane["instance"],
                "share_of_waiting": worst["caused_s"] / caused_s if caused_s else None,
            },
        ),
        victims=(
            *_tails.victims(hurt),
            *(
                Party(
                    "engine",
                    _tails.engine_name({**lane, "engine": e["engine"]}),
                    {"request_seconds": e["waited_s"]},
                )
                for e in dragged
                if e["waited_s"] >= limits["share"] * caused_s and not (one and e is worst)
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
        remedies=sized(RULE.remedies, lane["budget"]),
        confirm_by=RULE.confirm_by,
        explains=_tails.explains(hurt),
        claims="others' prefill",
    )


def sized(remedies: Sequence[Remedy], budget: int | None) -> tuple[Remedy, ...]:
    """The one about the budget with this trace's own numbers."""
    if not budget:
        return tuple(remedies)
    flag = f"--max-num-batched-tokens {budget // 2} (now {budget})"
    return tuple(
        replace(r, flag=flag) if r.flag.startswith("--max-num-batched-tokens") else r for r in remedies
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
        Threshold(
            "share", 0.1, "0-1", "A tenth of the excess: what causes less is not why the tail is long."
        ),
        Threshold(
            "slowdown", 0.25, "x p50", "A tail slower by less than a quarter of the median is not felt."
        ),
        Threshold(
            "gap",
            1.0,
            "x p50",
            "A chunk beside a decode is how chunked prefill works: less than a doubled gap is no stall.",
        ),
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
        Remedy(
            "Lower the token budget of a step, so that a chunk of a long prompt takes less time",
            "--max-num-batched-tokens, for example half of now",
            "vLLM V1, all versions, with chunked prefill (the default)",
            "Long prompts get more, smaller chunks: their TTFT rises, throughput falls somewhat",
        ),
        Remedy(
            "Use fewer data-parallel engines of more tensor-parallel ranks each",
            "--data-parallel-size down, --tensor-parallel-size up",
            "any",
            "More communication in each layer, KV cache shared by fewer engines",
        ),
        Remedy(
            "Separate prefill from decode",
            "--kv-transfer-config",
            "vLLM V1 with a KV connector (NIXL, Mooncake, LMCache)",
            "A second pool and a KV transfer for each request",
        ),
    ),
    confirm_by=(
        "Send a long prompt to one engine (X-data-parallel-rank) while the others decode: all their token gaps grow at once",
        "Replay with --prefill-schedule-interval: long gaps become rarer on all engines",
    ),
    decide=decide,
)
